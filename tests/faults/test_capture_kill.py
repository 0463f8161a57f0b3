"""kill -9 of a pipeline stage's worker and of the engine while states are captured."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.capture_case import Case, difference, make_qwen3
from tests.watch import alive, until
from torchspec_core.stages.workspace import Workspace
from torchspec_core.store.files import StateSet

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1200)]

LENGTHS = [60 + 7 * (i % 28) for i in range(300)]  # about 50 shards of 1 MiB


def sealed(folder: Path) -> dict[str, int]:
    """Files of states that the journal speaks of -> when they were written."""
    names = [name for name in Workspace(folder).recorded() if name.startswith("states-")]
    return {name: (folder / name).stat().st_mtime_ns for name in names}


def workers(engine: subprocess.Popen[bytes]) -> list[int]:
    """Pids of the engine's workers, one a stage."""
    children = psutil.Process(engine.pid).children(recursive=True)
    return [child.pid for child in children if "resource_tracker" not in " ".join(child.cmdline())]


@pytest.fixture
def runs() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Runs that a failed test leaves behind are ended."""
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for run in started:
        with suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)


def test_a_killed_worker_and_a_killed_engine_lose_only_what_was_under_way(
    tmp_path: Path, runs: list[subprocess.Popen[bytes]]
) -> None:
    make_qwen3(tmp_path / "target")
    case = Case(tmp_path, [0, 2, 3], LENGTHS, 500)
    folder, log = tmp_path / "states", tmp_path / "states.log"

    def killed(victim: str) -> str:
        """Start a run, kill a process of it once there are ten more files; returns what it said."""
        before = len(sealed(folder))
        run = case.start("states", pipeline_parallel=2, outstanding=2, token_budget=256)
        runs.append(run)
        begin = log.stat().st_size
        until(lambda: run.poll() is not None or len(sealed(folder)) >= before + 10, 500)
        assert run.poll() is None, log.read_text()[-3000:]
        stages = workers(run)
        assert len(stages) == 2
        os.kill(stages[1] if victim == "worker" else run.pid, signal.SIGKILL)
        assert run.wait(timeout=60) != 0
        until(lambda: not any(alive(pid) for pid in stages))
        return log.read_text()[begin:]

    assert "a worker of vLLM died" in killed("worker")
    first = sealed(folder)
    killed("engine")
    second = sealed(folder)
    assert not (folder / "index.arrow").exists()

    # Another engine goes on; which one made a shard does not matter.
    case.run("states", engine="transformers", token_budget=512)
    last = StateSet(folder, verify="always")
    assert len(last) == len(set(last.ids)) == len(LENGTHS)
    assert last.verify() == [] and difference(last, case.plain()) < 1e-4
    after = sealed(folder)
    for earlier in (first, second):
        pairs = {name.split(".")[0] for name in earlier if name.endswith(".1of2.safetensors")}
        pairs &= {name.split(".")[0] for name in earlier if name.endswith(".2of2.safetensors")}
        kept = [name for name in earlier if name.split(".")[0] in pairs]
        assert len(kept) >= 8 and all(after[name] == earlier[name] for name in kept)
