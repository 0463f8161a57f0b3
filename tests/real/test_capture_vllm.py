"""Capture by stock vLLM, on one stage and on two, against transformers, on real SmolLM2 and a random Qwen3."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.capture_case import Case, difference, make_qwen3
from torchspec_core.stages.job import local_job
from torchspec_core.store.format import read_shard_entries
from torchspec_core.targets.made import PACKAGE
from torchspec_core.targets.source import build

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]


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
    make_qwen3(tmp_path / "target")
    lengths = [256, 3, 256, 255, 1, 64, 65, 127, 128, 200] * 3
    case = Case(tmp_path, [0, 2, 3], lengths, 500)
    plain = case.plain()
    # Nine blocks of 128 positions for 16 requests that advance side by side: some start again.
    small = {"num_gpu_blocks_override": 10, "long_prefill_token_threshold": 32, "scheduler_reserve_full_isl": False}
    interrupted = case.run("mixed", token_budget=256, outstanding=16, options=small)
    assert "preempted" in (tmp_path / "mixed.log").read_text()
    assert difference(interrupted, plain) < 1e-4

    shards = sorted(path.name for path in (tmp_path / "mixed").glob("states-*"))
    assert len(shards) >= 3
    kept = {name: (tmp_path / "mixed" / name).stat().st_mtime_ns for name in shards[:-1]}
    (tmp_path / "mixed" / shards[-1]).unlink()
    again = case.run("mixed", pipeline_parallel=2, token_budget=256)
    assert difference(again, plain) < 1e-4
    assert {name: (tmp_path / "mixed" / name).stat().st_mtime_ns for name in kept} == kept
    assert len(list((tmp_path / "mixed").glob("states-*of2*"))) == 2
