"""The real target: converted out of its package, checked against transformers' own reading of the same file."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from torchspec_core.data.render import load_renderer
from torchspec_core.stages.job import local_job
from torchspec_core.targets import checks
from torchspec_core.targets.engine import load_model
from torchspec_core.targets.facts import read_facts
from torchspec_core.targets.made import PACKAGE, known_facts
from torchspec_core.targets.source import build, gguf_path

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("work") / "target"
    build(
        local_job(folder, params={"target": {"source": PACKAGE, "dtype": "bfloat16"}}, runtime={"run": {"threads": 0}})
    )
    return folder


def test_facts_are_the_published_ones(target: Path) -> None:
    facts = json.loads((target / "facts.json").read_text())
    assert facts == {
        "architecture": "LlamaForCausalLM", "num_layers": 30, "hidden_size": 576, "num_heads": 9, "num_kv_heads": 3,
        "head_dim": 64, "intermediate_size": 1536, "vocab_size": 49152, "rms_norm_eps": 1e-05, "rope_theta": 100000.0,
        "max_position_embeddings": 8192,
        "eos_token_ids": [2], "tied": True,
    }  # fmt: skip
    assert known_facts(PACKAGE, None) == read_facts(target)
    weights = load_file(target / "model.safetensors")
    assert len(weights) == 272
    assert sum(w.numel() for w in weights.values()) == 134_515_008


def test_it_says_paris(target: Path) -> None:
    assert checks.check_capital(target) == "The capital of France is Paris.<|im_end|>"


def test_weights_are_bit_equal_to_transformers_own_reading_of_the_file(target: Path) -> None:
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    ours = load_model(target, "bfloat16")
    theirs = load_gguf_checkpoint(str(gguf_path()), return_tensors=True, model_to_load=ours)["tensors"]
    weights = load_file(target / "model.safetensors")
    assert sorted(theirs) == sorted(weights)
    for name, value in theirs.items():
        assert torch.equal(weights[name], value.to(torch.bfloat16)), name


def test_one_hand_computed_block() -> None:
    # scale 0.5, minimum -2; the first 16 values are the low nibbles, the next 16 the high ones.
    header = np.array([0.5, -2.0], dtype=np.float16).view(np.uint8)
    block = np.concatenate([header, np.arange(16, dtype=np.uint8) | (15 << 4)])[None]
    expected = [0.5 * i - 2 for i in range(16)] + [5.5] * 16
    assert checks.dequantise_q4_1(block).tolist() == [expected]


def test_digits_are_split_one_by_one_and_the_template_is_chatml(target: Path) -> None:
    renderer = load_renderer(target)
    pieces = renderer.tokenizer.encode("1234567 and 89", add_special_tokens=False).tokens
    assert pieces == ["1", "2", "3", "4", "5", "6", "7", "Ġand", "Ġ", "8", "9"]
    text = renderer.decode(checks.prompt_ids(target, "Hi"))
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_damaged_weight_is_found(target: Path, tmp_path: Path) -> None:
    for path in target.iterdir():
        if path.suffix == ".json":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    weights = load_file(target / "model.safetensors")
    weights["model.layers.13.self_attn.q_proj.weight"][5, 7] += 1
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(checks.UserError, match=r"blk\.13\.attn_q"):
        checks.check_dequantised(gguf_path(), tmp_path)
