"""`run_stage`: what reaches the body in its child process, and what comes back."""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from torchspec_core.errors import UserError
from torchspec_core.stages import StageSpec, StageStore, run_stage
from torchspec_core.stages.lock import hold

BODY = """
import json, os, sys

def build(job):
    seen = {
        "inputs": {name: (path / "a").read_text() for name, path in job.inputs.items()},
        "params": job.params, "runtime": job.runtime, "threads": os.environ.get("OMP_NUM_THREADS"),
        "wait": os.environ["OMP_WAIT_POLICY"], "extra": os.environ.get("EXTRA"), "stdin": sys.stdin.read(),
        "inheritable": [n for n in map(int, os.listdir("/proc/self/fd")) if n > 2 and is_inheritable(n)],
    }
    with job.workspace.shard("seen.json") as path:
        path.write_text(json.dumps(seen))
    job.progress.update(1, 2, "things", "half", loss=0.5)
    job.progress.update(2, 2, "things")
    job.workspace.record(rows=7, name="x")

def is_inheritable(number):
    try:
        return os.get_inheritable(number)
    except OSError:
        return False
"""


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "body_of_test.py").write_text(BODY)
    return {"PYTHONPATH": os.pathsep.join((str(tmp_path), os.getcwd())), "EXTRA": "x"}


def test_the_body_gets_its_job_and_the_ref_its_facts(tmp_path: Path, env: dict[str, str]) -> None:
    store = StageStore(tmp_path / "store")
    target = StageSpec("target", 1)

    def make_target(workspace: Any) -> None:
        with workspace.shard("a") as path:
            path.write_text("weights")

    target_ref = store.materialize(target, make_target)
    spec = StageSpec("tokens", 1, {"data": {"max_length": 5}}, {"target": target.key})
    events: list[Mapping[str, Any]] = []
    runtime = {"run": {"threads": 3}}
    ref = run_stage(
        store, spec, "body_of_test:build", {"target": target_ref.path}, spec.identity, runtime, events.append, env=env
    )
    seen = json.loads((ref.path / "seen.json").read_text())
    assert seen == {
        "inputs": {"target": "weights"},
        "params": {"data": {"max_length": 5}},
        "runtime": runtime,
        "threads": "3",
        "wait": "PASSIVE",
        "extra": "x",
        "stdin": "",
        "inheritable": [],
    }
    assert (ref.rows, ref.metrics, ref.cached) == (7, {"rows": 7, "name": "x"}, False)
    assert json.loads((ref.path / "manifest.json").read_text())["runtime"] == runtime
    assert events[-1]["done"] == 2 and events[-1]["total"] == 2
    again = run_stage(store, spec, "no.such:function", {"target": target_ref.path}, spec.identity, runtime)
    assert again.cached
    assert "Warning" not in (ref.path / "logs" / "attempt-001.log").read_text()  # a failure's "last error" reads it


def test_a_run_that_waits_for_another_says_so(
    tmp_path: Path, env: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    store, spec = StageStore(tmp_path / "store"), StageSpec("tokens", 1)
    caplog.set_level(logging.INFO, logger="torchspec.stages")
    with ThreadPoolExecutor(1) as pool:
        with hold(store.lock_path(spec.stage, spec.key)):
            pool.submit(run_stage, store, spec, "no.such:function", {}, {}, {}, env=env)
            until = time.monotonic() + 20
            while not caplog.messages and time.monotonic() < until:
                time.sleep(0.01)
    assert re.fullmatch(r"tokens: waiting for process \d+ since .*, which makes or reads the same", caplog.messages[0])


def test_an_input_that_is_not_sealed_is_refused(tmp_path: Path, env: dict[str, str]) -> None:
    store = StageStore(tmp_path / "store")
    with pytest.raises(UserError, match="not a stage of this store"):
        run_stage(store, StageSpec("tokens", 1), "body_of_test:build", {"target": tmp_path}, {}, {}, env=env)
