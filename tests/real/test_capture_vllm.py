"""Capture by stock vLLM, on one stage and on two, against transformers, on real SmolLM2 and a random Qwen3."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from torchspec_core.capture import states as states_stage
from torchspec_core.data.tokenset import INDEX_SCHEMA
from torchspec_core.stages.job import local_job
from torchspec_core.store.files import StateSet
from torchspec_core.store.format import read_shard_entries
from torchspec_core.targets.made import PACKAGE
from torchspec_core.targets.source import build

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
STAGE = """
import json, sys
from torchspec_core.capture import states
from torchspec_core.stages.job import local_job

if __name__ == "__main__":
    out, target, tokens, params, runtime = sys.argv[1:]
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

    def start(self, name: str, dtype: str = "float32", shard_mib: int = 1, **runtime: Any) -> subprocess.Popen[bytes]:
        params = {"capture": {"layers": self.layers, "dtype": dtype, "shard_mib": shard_mib}}
        chosen = {"capture": {**RUNTIME, **runtime}, "run": {"threads": 0}}
        script = self.root / "stage.py"
        script.write_text(STAGE)
        words = [str(script), str(self.root / name), str(self.root / "target"), str(self.tokens)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "PASSIVE"}
        with (self.root / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, *words, json.dumps(params), json.dumps(chosen)],
                env=environment, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def run(self, name: str, **more: Any) -> StateSet:
        done = self.start(name, **more)
        assert done.wait(timeout=300) == 0, (self.root / f"{name}.log").read_text()[-3000:]
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


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Case:
    root = tmp_path_factory.mktemp("smollm2")
    target = {"target": {"source": PACKAGE, "dtype": "bfloat16"}}
    build(local_job(root / "target", params=target, runtime={"run": {"threads": 0}}))
    return Case(root, [1, 14, 26], [5, 70, 300, 11, 128, 45, 209, 90, 17, 260, 33, 150], 49_000)


def test_one_stage_two_stages_and_transformers_agree(smollm2: Case) -> None:
    plain = smollm2.plain()
    # Prompts in chunks of 96 tokens, mixed with others; few and many requests at once.
    one = smollm2.run("one", token_budget=300, outstanding=3)
    two = smollm2.run("two", pipeline_parallel=2)
    assert difference(one, plain) < 1e-4
    assert difference(two, plain) < 1e-4
    assert difference(two, one) < 1e-4
    assert one.verify() == [] and two.verify() == []

    by_stage: dict[str, set[int]] = {}
    for path in (smollm2.root / "two").glob("states-*"):
        part = re.search(r"\.(\dof2)\.", path.name)
        assert part, f"{path.name} is not a stage's own file"
        by_stage.setdefault(part[1], set()).update(read_shard_entries(path)[0].layers)
    assert by_stage == {"1of2": {1, 14}, "2of2": {26, 29}}  # SmolLM2's 30 layers, cut in the middle


def test_a_prompt_as_long_as_the_context_a_small_cache_and_a_resume_with_two_stages(
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=512, hidden_size=64, num_hidden_layers=5, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
        intermediate_size=96, max_position_embeddings=256, eos_token_id=2, tie_word_embeddings=False,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    torch.nn.init.normal_(model.model.norm.weight, 1.0, 0.3)
    model.save_pretrained(tmp_path / "target")
    lengths = [256, 3, 256, 255, 1, 64, 65, 127, 128, 200] * 3
    case = Case(tmp_path, [0, 2, 3], lengths, 500)
    plain = case.plain()
    interrupted = case.run("mixed", token_budget=256, outstanding=16)
    assert difference(interrupted, plain) < 1e-4

    shards = sorted(path.name for path in (tmp_path / "mixed").glob("states-*"))
    assert len(shards) >= 3
    kept = {name: (tmp_path / "mixed" / name).stat().st_mtime_ns for name in shards[:-1]}
    (tmp_path / "mixed" / shards[-1]).unlink()
    (tmp_path / "mixed" / "index.arrow").unlink()
    again = case.run("mixed", pipeline_parallel=2, token_budget=256)
    assert difference(again, plain) < 1e-4
    assert {name: (tmp_path / "mixed" / name).stat().st_mtime_ns for name in kept} == kept
    assert len(list((tmp_path / "mixed").glob("states-*of2*"))) == 2
