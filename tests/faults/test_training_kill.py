"""kill -9 of the drafter stage at some step: the rerun continues, and its weights are those of a run never killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file, save_file

from torchspec_core.data import runs
from torchspec_core.data.tokenset import INDEX_SCHEMA
from torchspec_core.store.files import INDEX, ShardFile, shard_name, write_index
from torchspec_core.store.format import Layout, write_shard

pytestmark = pytest.mark.faults

SIZE, VOCABULARY, DRAFT, SAMPLES = 32, 64, 48, 60
STAGE = """
import sys, time
from pathlib import Path
import torch
from torchspec_core.config.schema import Recipe
from torchspec_core.stages.job import local_job
from torchspec_core.training import loop, stage

if __name__ == "__main__":
    root, out, optimizer, pause = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], float(sys.argv[4])
    torch.set_num_threads(1)
    load = loop._load
    def slowly(*arguments):  # a step takes long enough to be killed in the middle of training
        time.sleep(pause)
        return load(*arguments)
    loop._load = slowly
    recipe = Recipe().model_dump(mode="json")
    recipe["drafter"] |= {"draft_vocab_size": 48}
    recipe["training"] |= {"optimizer": optimizer, "tokens_per_step": 128, "epochs": 2.5, "checkpoint_seconds": 0.05,
                           "log_steps": 2, "ema": 0.5}
    if optimizer == "anchored":  # multi-latent attention that drafts from anchors
        recipe["drafter"] |= {"attention": "mla", "kv_lora_rank": 16, "q_lora_rank": 12, "qk_nope_head_dim": 8,
                              "qk_rope_head_dim": 4, "v_head_dim": 8, "fc_norm": True, "norm_output": True}
        recipe["training"] |= {"optimizer": "muon", "anchors": 6, "validate_steps": 3, "keep": "best"}
    inputs = {name: root / name for name in ("target", "tokens", "vocabulary", "states")}
    stage.build(local_job(out, inputs, recipe, recipe))
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The four input folders, with random contents of the right forms."""
    root = tmp_path_factory.mktemp("inputs")
    random, generator = np.random.default_rng(0), torch.Generator().manual_seed(0)
    for name in ("target", "tokens", "vocabulary", "states"):
        (root / name).mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 8, "hidden_size": SIZE,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48,
        "vocab_size": VOCABULARY, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 128,
        "eos_token_id": 2, "tie_word_embeddings": True,
    }  # fmt: skip
    (root / "target/config.json").write_text(json.dumps(config))
    from torchspec_core.targets.facts import facts_from_config

    facts = facts_from_config(config)
    (root / "target/facts.json").write_text(json.dumps(facts.to_json()))
    save_file(
        {
            "model.embed_tokens.weight": torch.randn(VOCABULARY, SIZE, generator=generator).bfloat16(),
            "model.norm.weight": torch.ones(SIZE).bfloat16(),
        },
        root / "target/model.safetensors",
    )
    lengths = random.integers(12, 50, SAMPLES)
    ids = [random.integers(0, VOCABULARY, n).astype(np.int32) for n in lengths]
    masks = [np.arange(n) >= 5 for n in lengths]
    names = [f"{i:032x}" for i in range(SAMPLES)]
    tokens = pa.record_batch(
        {
            "sample_id": pa.array(names),
            "input_ids": pa.array([row.tolist() for row in ids], pa.list_(pa.int32())),
            "loss_mask": pa.array([list(runs.encode(mask)) for mask in masks], pa.list_(pa.int32())),
        }
    )
    index = pa.table(
        {
            "sample_id": names, "shard": [0] * SAMPLES, "row": list(range(SAMPLES)), "length": lengths.tolist(),
            "supervised": [int(mask.sum()) for mask in masks],
        },
        schema=INDEX_SCHEMA,
    )  # fmt: skip
    for table, name in ((tokens, "tokens-00000.arrow"), (index, "index.arrow")):
        with pa.OSFile(str(root / "tokens" / name), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write(table)
    kept = np.zeros(VOCABULARY, dtype=bool)
    kept[:DRAFT] = True
    np.save(root / "vocabulary/t2d.npy", kept)
    layout = Layout((1, 3, 4, 7), SIZE, "bfloat16")
    states = [(i, torch.randn(4, n, SIZE, generator=generator).bfloat16()) for i, n in zip(names, lengths, strict=True)]
    entries = write_shard(root / "states" / shard_name(0), layout, states)
    write_index(root / "states" / INDEX, layout, [ShardFile(shard_name(0), layout.layers, entries)])
    return root


def _start(inputs: Path, out: Path, optimizer: str, pause: float) -> subprocess.Popen[bytes]:
    script = inputs / "run_stage.py"
    script.write_text(STAGE)
    out.mkdir(exist_ok=True)
    env = {**os.environ, "PYTHONPATH": os.getcwd(), "OMP_WAIT_POLICY": "PASSIVE"}
    with open(out.parent / f"{out.name}.log", "ab") as log:
        command = [sys.executable, str(script), str(inputs), str(out), optimizer, str(pause)]
        return subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)


def _kill_after(process: subprocess.Popen[bytes], out: Path, lines: int) -> None:
    """SIGKILL once `lines` lines of metrics were written and a checkpoint is there."""
    metrics, state = out / "scratch/checkpoint/metrics.jsonl", out / "scratch/checkpoint/state.pt"
    deadline = time.monotonic() + 90
    while not (state.exists() and metrics.exists() and len(metrics.read_text().splitlines()) >= lines):
        assert process.poll() is None and time.monotonic() < deadline, (out.parent / f"{out.name}.log").read_text()
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "anchored"])
def test_two_kills_leave_no_trace_in_the_weights(inputs: Path, tmp_path: Path, optimizer: str) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert _start(inputs, whole, optimizer, 0.0).wait(timeout=100) == 0, (tmp_path / "whole.log").read_text()
    for lines in (3, 9):
        _kill_after(_start(inputs, killed, optimizer, 0.05), killed, lines)
        assert not (killed / "drafter.safetensors").exists()
    assert _start(inputs, killed, optimizer, 0.0).wait(timeout=100) == 0, (tmp_path / "killed.log").read_text()
    expected, found = load_file(whole / "drafter.safetensors"), load_file(killed / "drafter.safetensors")
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    clocks = ("seconds", "supervised_per_second", "time_")
    rows = [
        [{k: v for k, v in json.loads(line).items() if not k.startswith(clocks)} for line in text.splitlines()]
        for text in ((folder / "metrics.jsonl").read_text() for folder in (whole, killed))
    ]
    assert rows[0] == rows[1]
    validations = [json.loads((folder / "validation.json").read_text()) for folder in (whole, killed)]
    assert validations[0] == validations[1]
    assert validations[0]["samples"] == 1 and 1.0 <= validations[0]["estimated_acceptance_length"] <= 4.0
