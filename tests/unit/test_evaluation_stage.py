"""The evaluation stage's body on a tiny target: keys, identities, resume, refusals. (vLLM: tests/real.)"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM

from torchspec_core.data import tokens
from torchspec_core.decoding.schedule import StepCost
from torchspec_core.drafters.eagle3 import Eagle3Config, Eagle3Drafter, init_weights
from torchspec_core.drafters.mla import MLAConfig
from torchspec_core.errors import UserError
from torchspec_core.evaluation import acceptance as stage
from torchspec_core.evaluation import work as work_room
from torchspec_core.export.checkpoint import export_eagle3
from torchspec_core.stages.job import Job, local_job

K, NEW = 2, 10
TEMPLATE = (
    "{% for m in messages %}<|s|>{{ m['role'] }}\n{{ m['content'] }}<|e|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|s|>assistant\n{% endif %}"
)
SETTINGS: dict[str, Any] = {
    "evaluation": {
        "prompts": 3, "sets": ["heldout", "gsm8k"], "max_new_tokens": NEW, "k": K, "temperature": 1.0, "top_p": 0.95,
        "verification": "block", "dynamic": "none", "confidence_threshold": 0.42,
        "dtype": "float32", "sampled_dtype": "bfloat16",
    },
    "serving": {"vllm": False, "sampled": False, "prompts": 3, "max_new_tokens": NEW, "dtype": "float32"},
    "run": {"seed": 0},
}  # fmt: skip


def write_target(folder: Path) -> int:
    """A random Llama over a byte-level tokenizer; its vocabulary size."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|s|>", "<|e|>"])
    size = tokenizer.get_vocab_size()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=size, hidden_size=32, intermediate_size=48, num_hidden_layers=8, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=128, initializer_range=0.2, eos_token_id=size - 1,
    )  # fmt: skip
    LlamaForCausalLM(config).float().save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": "<|e|>"}))
    return size


def write_export(folders: dict[str, Path], out: Path, size: int, **changes: Any) -> None:
    """A random drafter, exported."""
    sizes: dict[str, Any] = dict(
        hidden_size=32, target_hidden_size=32, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=48,
        vocab_size=size, draft_vocab_size=64, aux_layers=(1, 3, 4), max_position_embeddings=128,
    )  # fmt: skip
    config = Eagle3Config(**{**sizes, **changes})
    drafter = Eagle3Drafter(config)
    init_weights(drafter, 0)
    save_file(drafter.state_dict(), folders["drafter"] / "drafter.safetensors")
    (folders["drafter"] / "drafter.json").write_text(json.dumps(config.to_json()))
    kept = np.arange(64) * 3
    for name, array in {"d2t": kept - np.arange(64), "t2d": np.isin(np.arange(size), kept), "counts": kept}.items():
        np.save(folders["vocabulary"] / f"{name}.npy", np.ones(size, np.int64) if name == "counts" else array)
    export_eagle3(folders["drafter"], folders["target"], folders["vocabulary"], out)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("run")
    folders = {
        name: root / name for name in ("target", "prompts", "answers", "tokens", "drafter", "vocabulary", "export")
    }
    for name in ("prompts", "answers", "drafter", "vocabulary"):
        folders[name].mkdir()
    size = write_target(folders["target"])
    for name in ("heldout", "gsm8k"):
        rows = [{"sample_id": f"{name}{i}", "turns": [f"{name} {i} " + "word " * i], "source": name} for i in range(4)]
        rows.insert(1, {"sample_id": "long", "turns": ["x" * 200], "source": name})  # does not fit the context of 128
        (folders["prompts"] / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    answer = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "abababab cdcd"}]
    row = {"sample_id": "a0", "messages": answer, "prompt_ids": [256, 10, 11], "answer_ids": [5, 6] * 6 + [size - 1],
           "finish": "stop", "source": "sharegpt"}  # fmt: skip
    (folders["answers"] / "answers-00000.jsonl").write_text(json.dumps(row) + "\n")
    data = {"conversations": [], "max_length": 64, "min_supervised": 2, "supervise": "all", "shard_rows": 8}
    tokens.build(local_job(
        folders["tokens"], {name: folders[name] for name in ("target", "answers", "prompts")},
        {"data": data, "run": {"seed": 0}}, {"data": {"max_rejected": 1.0, "workers": 0, "scheduler": None}},
    ))  # fmt: skip
    write_export(folders, folders["export"], size)
    return {name: folders[name] for name in ("target", "prompts", "tokens", "export")}


def job(folder: Path, inputs: dict[str, Path], **evaluation: Any) -> Job:
    params = {**SETTINGS, "evaluation": {**SETTINGS["evaluation"], **evaluation}}
    return local_job(folder, inputs, params, {"evaluation": {"batch_size": 2}, "run": {"threads": 0}})


def results(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    numbers = json.loads((folder / "evaluation.json").read_text())
    return numbers, [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("rule", ["threshold", "scheduler"])
def test_dynamic_verification_verifies_less_and_changes_no_greedy_text(
    inputs: dict[str, Path], tmp_path: Path, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A step that costs in proportion to its tokens: the scheduler must not verify everything.
    monkeypatch.setattr(work_room, "measure_step_cost", lambda target, rows, k: StepCost((1, 100), (0.01, 1.0)))
    stage.build(job(tmp_path / "all", inputs, sets=["heldout"]))
    stage.build(job(tmp_path / "some", inputs, sets=["heldout"], dynamic=rule))
    (numbers, samples), (_, every) = results(tmp_path / "some"), results(tmp_path / "all")
    greedy = [row for row in samples if row["mode"] == "greedy"]
    assert [row["text"] for row in greedy] == [row["text"] for row in every if row["mode"] == "greedy"]
    verified = [n for row in greedy for n in row["verified"]]
    assert min(verified) < K
    assert all(a <= n <= K for row in greedy for a, n in zip(row["steps"], row["verified"], strict=True))
    accepted = sum(sum(row["steps"]) + row["after_end"] for row in greedy)
    assert numbers["heldout.greedy.rejected_share"] == pytest.approx(1 - accepted / max(sum(verified), 1))


def test_every_set_and_mode_is_measured_and_the_numbers_agree_with_the_samples(
    inputs: dict[str, Path], tmp_path: Path
) -> None:
    stage.build(job(tmp_path / "out", inputs))
    numbers, samples = results(tmp_path / "out")
    assert {(row["set"], row["mode"]) for row in samples} == {
        (name, mode) for name in ("heldout", "gsm8k") for mode in ("greedy", "t1")
    }
    for name in ("heldout", "gsm8k"):
        for mode in ("greedy", "t1"):
            rows = [row for row in samples if (row["set"], row["mode"]) == (name, mode)]
            assert [row["sample_id"] for row in rows] == [
                f"{name}{i}" for i in range(3)
            ]  # in order, the long one left out
            prefix = f"{name}.{mode}"
            steps = [accepted for row in rows for accepted in row["steps"]]
            assert numbers[f"{prefix}.drafts"] == len(steps)
            assert numbers[f"{prefix}.acceptance_length"] == pytest.approx(1 + sum(steps) / len(steps))
            slots = [numbers[f"{prefix}.slot_{k}"] for k in (1, 2)]
            assert numbers[f"{prefix}.acceptance_length"] == pytest.approx(1 + sum(slots))
            assert numbers[f"{prefix}.tokens"] == sum(len(row["tokens"]) for row in rows)
    for name in ("unigram", "bigram", "repeat"):
        assert numbers[f"baseline.{name}.acceptance_length"] >= 1.0
    assert (numbers["meta.k"], numbers["meta.greedy.drafting"], numbers["meta.t1.drafting"]) == (
        K,
        "greedy",
        "probabilistic",
    )


def test_an_interrupted_evaluation_continues_at_the_first_missing_shard(
    inputs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.build(job(tmp_path / "whole", inputs))
    calls: list[str] = []
    true_decode = work_room.decode

    def failing(*args: Any, **options: Any) -> Any:
        if len(calls) == 4:
            raise KeyboardInterrupt
        calls.append("batch")
        return true_decode(*args, **options)

    monkeypatch.setattr(work_room, "decode", failing)
    with pytest.raises(KeyboardInterrupt):
        stage.build(job(tmp_path / "cut", inputs))
    calls.clear()
    monkeypatch.setattr(
        work_room, "decode", lambda *args, **options: calls.append("batch") or true_decode(*args, **options)
    )
    stage.build(job(tmp_path / "cut", inputs))
    assert len(calls) == 4  # two shards of two batches were kept, two are made
    assert results(tmp_path / "cut") == results(tmp_path / "whole")


def test_a_set_without_a_fitting_prompt_is_refused(inputs: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no prompt fits.*max_new_tokens=125"):
        stage.build(job(tmp_path / "out", inputs, max_new_tokens=125))


def test_another_targets_drafter_is_refused(inputs: dict[str, Path], tmp_path: Path) -> None:
    changed = tmp_path / "export"
    changed.mkdir()
    values = json.loads((inputs["export"] / "config.json").read_text())
    values["torchspec"]["target_num_hidden_layers"] = 9
    (changed / "config.json").write_text(json.dumps(values))
    with pytest.raises(UserError, match="layer count 9"):
        stage.build(job(tmp_path / "out", {**inputs, "export": changed}))


def test_a_multi_latent_drafter_is_measured_by_the_decoder_and_not_served(
    inputs: dict[str, Path], tmp_path: Path
) -> None:
    folders = {**inputs, "drafter": tmp_path / "drafter", "vocabulary": tmp_path / "vocabulary"}
    for name in ("drafter", "vocabulary"):
        folders[name].mkdir()
    size = json.loads((inputs["target"] / "config.json").read_text())["vocab_size"]
    write_export(folders, tmp_path / "export", size, mla=MLAConfig(None, 12, 8, 8, 6), num_kv_heads=2, norm_output=True)
    work = job(tmp_path / "out", {**inputs, "export": tmp_path / "export"}, sets=["heldout"])
    work = replace(work, params={**work.params, "serving": {**SETTINGS["serving"], "vllm": True}})
    stage.build(work)
    numbers, _ = results(tmp_path / "out")
    assert "multi-latent" in numbers["meta.vllm.skipped"]
    assert numbers["heldout.greedy.drafts"] > 0
    assert not any("vllm_" in name for name in numbers)
