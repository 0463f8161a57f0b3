"""kill -9 at every stage of the smoke recipe: of the stage's process, and of the run that watches it.

One store is walked to its end. At each stage a run is started, a process of it is killed as soon as the stage's body is
at work, and the next run has to go on from there: earlier stages from the cache, nothing left behind.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from torchspec_core.config.load import load_recipe
from torchspec_core.pipeline import STAGE_NAMES, open_store, plan

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "configs" / "smoke.yaml"
CHILD = "torchspec_core.stages.child"
LONG = ("answers", "states", "drafter", "evaluation")
pytestmark = pytest.mark.timeout(1800)


def _start(store: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torchspec_core", "run", str(RECIPE), f"run.store={store}"]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _bodies(store: Path) -> list[psutil.Process]:
    """The processes that make a stage of this store."""
    found = []
    for process in psutil.process_iter():
        try:
            line = process.cmdline()
        except psutil.Error:
            continue
        if (
            CHILD in line
            and any(part.startswith(str(store)) for part in line)
            and process.status() != psutil.STATUS_ZOMBIE
        ):
            found.append(process)
    return found


def _wait(condition, what: str, run: subprocess.Popen[str] | None = None, seconds: float = 600):  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := condition():
            return value
        if run is not None and run.poll() is not None:
            raise AssertionError(f"the run ended while the test waited for {what}: {run.communicate()[0]}")
        time.sleep(0.02)
    raise AssertionError(f"waited {seconds:.0f} s for {what}")


def _body_of(store: Path, stage: str) -> psutil.Process | None:
    """The process of `stage`; in a long stage, once it has done some of its work."""
    if stage in LONG and not any((store / stage).glob("*/logs/progress.jsonl")):
        return None
    bodies = [p for p in _bodies(store) if any(f"/{stage}/" in part for part in p.cmdline())]
    return next((p for p in bodies if "guard" not in " ".join(p.cmdline())), None)


@pytest.fixture(scope="module")
def walked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Stage -> what the interrupted run said, after a walk that was killed once in every stage."""
    store = tmp_path_factory.mktemp("walk")
    said = {}
    for number, stage in enumerate(STAGE_NAMES):
        run = _start(store)
        body = _wait(lambda stage=stage: _body_of(store, stage), f"stage {stage} to be at work", run)
        victim = body.pid if number % 2 else run.pid
        os.kill(victim, signal.SIGKILL)
        said[stage] = run.communicate(timeout=120)[0]
        said[f"{stage}.status"] = str(run.returncode)
        _wait(lambda: not _bodies(store), f"the processes of stage {stage} to end", seconds=30)
    last = _start(store)
    said["last"] = last.communicate(timeout=600)[0]
    said["last.status"] = str(last.returncode)
    said["store"] = str(store)
    return said


def test_the_last_run_finishes_with_a_report(walked: dict[str, str]) -> None:
    assert walked["last.status"] == "0", walked["last"]
    report = Path(walked["last"].strip().splitlines()[-1])
    assert report.name == "report.html" and report.is_file()
    assert json.loads((report.parent / "report.json").read_text())["heldout.greedy.acceptance_length"] >= 1.0


@pytest.mark.parametrize("stage", STAGE_NAMES[1::2])
def test_a_killed_stage_is_told_in_one_sentence(walked: dict[str, str], stage: str) -> None:
    assert walked[f"{stage}.status"] == "1", walked[stage]
    assert f"The stage {stage} failed (killed by SIGKILL" in walked[stage]
    assert "the same command continues" in walked[stage]


@pytest.mark.parametrize("stage", STAGE_NAMES[1:])
def test_finished_stages_are_not_made_again(walked: dict[str, str], stage: str) -> None:
    before = STAGE_NAMES[: STAGE_NAMES.index(stage) - 1]
    for earlier in before:
        lines = [line for line in walked[stage].splitlines() if line.split()[:1] == [earlier] and "rows" in line]
        assert lines and all("cached" in line for line in lines), walked[stage]


def test_everything_is_sealed_and_whole(walked: dict[str, str]) -> None:
    recipe = load_recipe(RECIPE, [f"run.store={walked['store']}"]).recipe
    store = open_store(recipe)
    assert all(entry.lookup.hit for entry in plan(recipe, store))
    assert store.verify() == []
    assert not list(Path(walked["store"]).glob("*/*/scratch*"))
