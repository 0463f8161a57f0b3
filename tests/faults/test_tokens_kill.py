"""kill -9 of a Dask worker and of the whole stage: a rerun completes from the sealed shards, with the same bytes."""

from __future__ import annotations

import contextlib
import gzip
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.tiny_chat import chat, write_jsonl, write_target
from torchspec_core.stages.job import local_job

pytestmark = pytest.mark.faults

SHARDS = 24
STAGE = """
import sys, time
from pathlib import Path
from torchspec_core.data import shards, tokens
from torchspec_core.stages.job import local_job

def slowly(task):  # a shard takes long enough to be killed in its middle
    time.sleep(float(sys.argv[2]))
    return shards.write_shard(task)

if __name__ == "__main__":
    root = Path(sys.argv[1])
    inputs = {name: root / name for name in ("target", "answers", "prompts")}
    chats = {"name": "file", "rows": 1000, "path": str(root / "chats")}
    data = {"conversations": [chats], "max_length": 64, "min_supervised": 1, "supervise": "all", "shard_rows": 10}
    runtime = {"max_rejected": 0.0, "workers": 2, "scheduler": None}
    job = local_job(root / "out", inputs, {"data": data}, {"data": runtime})
    tokens.write_shard = slowly
    job.workspace.begin()  # as the store does for each attempt: what a killed one left half-written goes
    tokens.build(job)
"""


def _until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def _sealed(out: Path) -> list[Path]:
    return sorted(out.glob("tokens-*.arrow"))


def _family(pid: int) -> list[psutil.Process]:
    """Living descendants of a process."""
    return psutil.Process(pid).children(recursive=True)


def _worker(pid: int) -> psutil.Process:
    """One of the processes that write shards; Dask renames them where setproctitle is installed."""
    titles = {process: " ".join(process.cmdline()) for process in _family(pid)}
    return next(p for p, title in titles.items() if "spawn_main" in title or "dask worker" in title.lower())


def _alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def _gone(family: list[psutil.Process]) -> None:
    """Wait until a killed stage's processes have ended too."""
    _until(lambda: not any(map(_alive, family)))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    rows: list[object] = [
        {"sample_id": f"s{i}", "prompt_ids": [5, 6, i % 200], "answer_ids": list(range(7, 12 + i % 20)), "source": "s"}
        for i in range(5 * SHARDS)
    ]
    chats: list[object] = [chat(f"question {i}", f"answer {i}") for i in range(5 * SHARDS)]
    write_jsonl(tmp_path / "chats" / "a.jsonl", chats[:50])
    packed = write_jsonl(tmp_path / "chats" / "b.jsonl", chats[50:])
    (tmp_path / "chats" / "b.jsonl.gz").write_bytes(gzip.compress(packed.read_bytes()))
    packed.unlink()
    for name in ("mtbench", "gsm8k", "heldout"):
        write_jsonl(tmp_path / "prompts" / f"{name}.jsonl", [])
    write_jsonl(tmp_path / "answers" / "answers-00000.jsonl", rows)
    write_target(tmp_path / "target")
    (tmp_path / "stage.py").write_text(STAGE)
    return tmp_path


def _start(root: Path, sleep: float) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with (root / "log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, str(root / "stage.py"), str(root), str(sleep)], env=environment, stdout=log, stderr=log
        )


def _expected(root: Path) -> dict[str, bytes]:
    """What an undisturbed run in this process writes."""
    from torchspec_core.data import tokens

    chats = {"name": "file", "rows": 1000, "path": str(root / "chats")}
    data = {"conversations": [chats], "max_length": 64, "min_supervised": 1, "supervise": "all", "shard_rows": 10}
    runtime = {"max_rejected": 0.0, "workers": 0, "scheduler": None}
    inputs = {name: root / name for name in ("target", "answers", "prompts")}
    job = local_job(root / "expected", inputs, {"data": data}, {"data": runtime})
    tokens.build(job)
    return _bytes(job.workspace.path)


def _bytes(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file() and p.name != "shards.jsonl"}


def test_killed_worker_costs_nothing(root: Path) -> None:
    stage = _start(root, 0.1)
    try:
        _until(lambda: len(_sealed(root / "out")) >= 2)
        _worker(stage.pid).send_signal(signal.SIGKILL)
        assert stage.wait(timeout=90) == 0, (root / "log").read_text()[-2000:]
    finally:
        stage.kill()
    assert _bytes(root / "out") == _expected(root)


def test_killed_stage_continues_from_its_sealed_shards(root: Path) -> None:
    stage = _start(root, 0.3)
    try:
        _until(lambda: len(_sealed(root / "out")) >= 3)
        family = _family(stage.pid)
        assert len(family) >= 2
    finally:
        stage.kill()
        stage.wait()
    _gone(family)
    # A shard counts once it is in the journal; one that was only renamed when the kill came is written again.
    journal = (root / "out" / "shards.jsonl").read_text().rpartition("\n")[0]
    recorded = set(re.findall(r'"shard": ?"([^"]+)"', journal))
    kept = {path.name: path.stat().st_mtime_ns for path in _sealed(root / "out") if path.name in recorded}
    assert 1 <= len(kept) < SHARDS
    again = _start(root, 0.0)
    assert again.wait(timeout=90) == 0, (root / "log").read_text()[-2000:]
    after = {path.name: path.stat().st_mtime_ns for path in _sealed(root / "out")}
    assert {name: after[name] for name in kept} == kept
    assert _bytes(root / "out") == _expected(root)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_kills_at_random_moments_lose_and_change_nothing(root: Path, seed: int) -> None:
    """Three kill -9, each at a random moment, of the parent or of one of its processes; then a run left alone."""
    numbers = random.Random(seed)
    for _ in range(3):
        stage = _start(root, 0.1)
        try:
            began, moment = time.monotonic(), numbers.uniform(0.0, 8.0)
            while time.monotonic() - began < moment and stage.poll() is None:
                time.sleep(0.02)
            family = _family(stage.pid) if stage.poll() is None else []
            victims = [process.pid for process in family if _alive(process)] if numbers.random() < 0.5 else []
            victim = numbers.choice([stage.pid, *victims])
            print(f"seed {seed}: kill -9 after {moment:.2f} s, {'the parent' if victim == stage.pid else 'a process'}")
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
            if victim != stage.pid:
                # The stage may finish without that process or give up; it may not hang.
                stage.wait(timeout=90)
        finally:
            stage.kill()
            stage.wait()
        _gone(family)
    last = _start(root, 0.0)
    assert last.wait(timeout=90) == 0, (root / "log").read_text()[-2000:]
    assert _bytes(root / "out") == _expected(root)
