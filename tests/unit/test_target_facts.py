"""Facts of a target folder, layer ids, and the sentences for folders that are no targets."""

import json
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from torchspec_core.errors import UserError
from torchspec_core.targets.facts import (
    aux_layers,
    captured_layers,
    facts_from_config,
    hf_hidden_index,
    read_facts,
    vllm_layer_id,
)
from torchspec_core.targets.gguf import hub_name, undo_rope_interleave
from torchspec_core.targets.source import parse_hub, source_files

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "eos_token_id": 2,
}


@dataclass(frozen=True)
class Settings:
    source: str


def facts_of(layers: int):
    return facts_from_config({**CONFIG, "num_hidden_layers": layers})


@pytest.mark.parametrize(
    ("layers", "expected"),
    [(28, (1, 13, 24)), (36, (1, 17, 32)), (40, (1, 19, 36)), (48, (1, 23, 44)), (64, (1, 31, 60)), (30, (1, 14, 26))],
)
def test_default_layers_are_the_published_ones(layers: int, expected: tuple[int, ...]) -> None:
    assert aux_layers(facts_of(layers)) == expected
    assert captured_layers(facts_of(layers)) == (*expected, layers - 1)


def test_vllm_ids_of_the_default_layers_are_the_published_ones() -> None:
    # vLLM's own default for EAGLE-3: (2, L // 2, L - 3).
    assert [vllm_layer_id(j) for j in aux_layers(facts_of(30))] == [2, 15, 27]
    assert [hf_hidden_index(j) for j in (0, 14)] == [1, 15]


@pytest.mark.parametrize(
    ("layers", "words"),
    [((1, 1, 4), "layer 1 is named twice"), ((1, 30), "layer 30"), ((-1,), "-1"), ((5, 2), "[2, 5]"), ((), "empty")],
)
def test_bad_layers_are_named(layers: tuple[int, ...], words: str) -> None:
    with pytest.raises(UserError) as error:
        aux_layers(facts_of(30), layers)
    assert words in str(error.value)


def test_a_shallow_target_has_no_default_layers() -> None:
    with pytest.raises(UserError, match="6 layers"):
        aux_layers(facts_of(6))
    assert captured_layers(facts_of(6), (0, 2, 5)) == (0, 2, 5)


def test_facts_read_both_spellings_of_rope_and_the_generation_config(tmp_path: Path) -> None:
    config = {**CONFIG, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))
    facts = read_facts(tmp_path)
    assert (facts.rope_theta, facts.eos_token_ids, facts.head_dim) == (5e5, (7, 2), 64)
    assert facts_from_config({**CONFIG, "rope_theta": 1e5}).rope_theta == 1e5


def write_weights(path: Path, cut: int = 0) -> None:
    header = json.dumps({"x": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
    path.write_bytes((struct.pack("<Q", len(header)) + header + bytes(16))[: None if not cut else -cut])


def target_folder(folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "x"}))
    write_weights(folder / "model.safetensors")
    return folder


def test_a_whole_folder_lists_what_it_reads(tmp_path: Path) -> None:
    files = source_files(Settings(str(target_folder(tmp_path))))
    assert sorted(files) == ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]


def broken_folder(folder: Path, how: str) -> None:
    if how == "architecture":
        (folder / "config.json").write_text(json.dumps({**CONFIG, "architectures": ["BertModel"]}))
    elif how == "json":
        (folder / "config.json").write_text("{")
    elif how == "template":
        (folder / "tokenizer_config.json").write_text("{}")
    elif how == "cut":
        write_weights(folder / "model.safetensors", cut=3)
    elif how == "pointer":
        (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    elif how == "pickle":
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    else:
        (folder / how).unlink()


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("config.json", "not a model folder"),
        ("tokenizer.json", "tokenizer.json"),
        ("model.safetensors", "no weights"),
        ("architecture", "BertModel"),
        ("json", "cannot be read"),
        ("template", "chat template"),
        ("cut", "not a whole safetensors"),
        ("pointer", "not a whole safetensors"),
        ("pickle", "pickles"),
    ],
)
def test_each_fault_of_a_folder_is_one_sentence(tmp_path: Path, how: str, words: str) -> None:
    broken_folder(target_folder(tmp_path), how)
    with pytest.raises(UserError) as error:
        source_files(Settings(str(tmp_path)))
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("source", ["/no/such/folder", "package:other", "random:huge", "hub:only-a-name", "hub:a/b@"])
def test_unknown_sources_are_refused(source: str) -> None:
    with pytest.raises(UserError):
        source_files(Settings(source))


def test_hub_ids() -> None:
    assert parse_hub("hub:org/name") == ("org/name", None)
    assert parse_hub("hub:org/name@v1") == ("org/name", "v1")


def test_gguf_names_and_row_order() -> None:
    assert hub_name("blk.3.attn_q.weight") == "model.layers.3.self_attn.q_proj.weight"
    assert hub_name("token_embd.weight") == "model.embed_tokens.weight"
    # llama.cpp stores rows (0, half), (1, half + 1), ... of each head; here head size 4: file order 0 2 1 3.
    stored = np.array([0, 2, 1, 3, 4, 6, 5, 7], dtype=np.float32)[:, None]
    assert undo_rope_interleave(stored, 2)[:, 0].tolist() == list(range(8))
