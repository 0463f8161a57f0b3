"""Capture of a target in processes of their own, in different ways, and the comparison of what they wrote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from torchspec_core.capture import states as states_stage
from torchspec_core.data.tokenset import INDEX_SCHEMA
from torchspec_core.stages.job import local_job
from torchspec_core.store.files import StateSet

ROOT = Path(__file__).parents[1]
STAGE = """
import json, sys
from types import SimpleNamespace
from torchspec_core.capture import states
from torchspec_core.stages.job import local_job
from torchspec_core.targets import vllm_cpu

if __name__ == "__main__":
    out, target, tokens, params, runtime, options = sys.argv[1:]

    def with_options():
        import vllm
        from vllm.v1.core.sched.scheduler import Scheduler

        def preempt(*arguments, original=Scheduler._preempt_request, **named):
            print("preempted", flush=True)
            return original(*arguments, **named)

        Scheduler._preempt_request = preempt
        return SimpleNamespace(LLM=lambda **ours: vllm.LLM(**{**ours, **json.loads(options)}))

    vllm_cpu._import_vllm = with_options
    states.build(local_job(out, {"target": target, "tokens": tokens}, json.loads(params), json.loads(runtime)))
"""
RUNTIME = {
    "engine": "vllm", "token_budget": 512, "pipeline_parallel": 1, "tensor_parallel": 1, "outstanding": 6,
    "buffer_mib": 64, "kv_cache_gib": 1,
}  # fmt: skip


def write_tokens(folder: Path, lengths: list[int], vocabulary: int) -> Path:
    random = np.random.default_rng(0)
    folder.mkdir()
    samples = [random.integers(3, vocabulary, n).tolist() for n in lengths]
    table = pa.table({
        "input_ids": pa.array(samples, pa.list_(pa.int32())),
        "loss_mask": pa.array([[0, n] for n in lengths], pa.list_(pa.int32())),
    })  # fmt: skip
    index = pa.table(
        {
            "sample_id": [f"{i:08x}" for i in range(len(lengths))],
            "shard": pa.array([0] * len(lengths), pa.int32()),
            "row": pa.array(range(len(lengths)), pa.int32()),
            "length": pa.array(lengths, pa.int32()),
            "supervised": pa.array(lengths, pa.int32()),
        },
        schema=INDEX_SCHEMA,
    )
    for name, rows in (("tokens-00000.arrow", table), ("index.arrow", index)):
        with pa.OSFile(str(folder / name), "wb") as sink, pa.ipc.new_file(sink, rows.schema) as writer:
            writer.write_table(rows)
    return folder


class Case:
    """A target, its tokens, and the folder in which it is captured in different ways."""

    def __init__(self, root: Path, layers: list[int], lengths: list[int], vocabulary: int) -> None:
        self.root, self.layers = root, layers
        self.tokens = write_tokens(root / "tokens", lengths, vocabulary)

    def start(
        self, name: str, dtype: str = "float32", shard_mib: int = 1, options: dict[str, Any] | None = None,
        **runtime: Any,
    ) -> subprocess.Popen[bytes]:
        """A process that captures; `options` go past ours to `vllm.LLM`."""
        params = {"capture": {"layers": self.layers, "dtype": dtype, "shard_mib": shard_mib}}
        chosen = {"capture": {**RUNTIME, **runtime}, "run": {"threads": 0}}
        script = self.root / "stage.py"
        script.write_text(STAGE)
        words = [str(script), str(self.root / name), str(self.root / "target"), str(self.tokens)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "PASSIVE"}
        with (self.root / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, *words, *map(json.dumps, (params, chosen, options or {}))],
                env=environment, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def run(self, name: str, **more: Any) -> StateSet:
        done = self.start(name, **more)
        assert done.wait(timeout=600) == 0, (self.root / f"{name}.log").read_text()[-3000:]
        return StateSet(self.root / name, verify="always")

    def plain(self, dtype: str = "float32") -> StateSet:
        name = f"transformers-{dtype}"
        if not (self.root / name).exists():
            params = {"capture": {"layers": self.layers, "dtype": dtype, "shard_mib": 1}}
            runtime = {"capture": {"engine": "transformers", "token_budget": 512}, "run": {"threads": 0}}
            inputs = {"target": self.root / "target", "tokens": self.tokens}
            states_stage.build(local_job(self.root / name, inputs, params, runtime))
        return StateSet(self.root / name, verify="always")


def difference(ours: StateSet, theirs: StateSet) -> float:
    """The largest relative difference of a layer of a sample."""
    assert sorted(ours.ids) == sorted(theirs.ids)
    found = []
    for sample in ours.ids:
        mine, other = ours.get(sample), theirs.get(sample)
        assert mine.keys() == other.keys()
        found += [float((mine[i].float() - other[i].float()).norm() / other[i].float().norm()) for i in mine]
    return max(found)



def make_qwen3(folder: Path) -> None:
    """A random Qwen3 of 5 layers and 256 positions; its norm is not 1, so that a normed state shows."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=512, hidden_size=64, num_hidden_layers=5, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
        intermediate_size=96, max_position_embeddings=256, eos_token_id=2, tie_word_embeddings=False,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    torch.nn.init.normal_(model.model.norm.weight, 1.0, 0.3)
    model.save_pretrained(folder)
