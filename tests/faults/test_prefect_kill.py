"""kill -9 of the flow, of a stage's process, of the worker, of all: the UI tells it, and the next run goes on."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import psutil
import pytest

from tests.prefect_home import PrefectHome, prefect_home, until

FLOW, CHILD = "prefect.engine", "torchspec_core.stages.child"


@pytest.fixture(scope="module")
def prefect(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefectHome]:
    with prefect_home(tmp_path_factory.mktemp("prefect")) as place:
        yield place


def _held_run(prefect: PrefectHome, stage: str) -> tuple[str, list[psutil.Process]]:
    """A new run that waits in the middle of `stage`, and its processes."""
    (prefect.recipe().parent / "store" / f"hold-{stage}").touch()
    made = len(prefect.shards(stage))
    run_id = prefect.start_run(f"run.seed={next(_SEEDS)}")
    until(lambda: len(prefect.shards(stage)) > made, 60, f"{stage} to start")
    return run_id, [*prefect.processes(FLOW), *prefect.processes(CHILD)]


_SEEDS = iter(range(1, 100))


def _goes_on(prefect: PrefectHome, run_id: str, stage: str) -> None:
    """The same run again ends well, and makes only the two shards of `stage` that were missing."""
    (prefect.store / f"hold-{stage}").unlink()
    made = len(prefect.shards(stage))
    seed = prefect.run(run_id)["parameters"]["overrides"]
    again = prefect.finished(prefect.start_run(*seed))
    assert again["state_name"] == "Completed"
    assert prefect.shards(stage)[made:] == [1, 2]


def _gone(processes: list[psutil.Process], seconds: float = 20) -> None:
    until(lambda: not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes
                          if psutil.pid_exists(process.pid)), seconds, "every process of the run to end")


def test_killed_flow_process_is_crashed_and_resumes(prefect: PrefectHome) -> None:
    run_id, processes = _held_run(prefect, "states")
    os.kill(prefect.processes(FLOW)[0].pid, signal.SIGKILL)
    assert prefect.finished(run_id, 20)["state_name"] == "Crashed"
    _gone(processes)
    _goes_on(prefect, run_id, "states")


def test_killed_stage_process_fails_with_the_reason_and_resumes(prefect: PrefectHome) -> None:
    run_id, processes = _held_run(prefect, "drafter")
    bodies = [process for process in prefect.processes(CHILD) if "guard.py" not in " ".join(process.cmdline())]
    os.kill(bodies[0].pid, signal.SIGKILL)
    run = prefect.finished(run_id, 30)
    assert run["state_name"] == "Failed"
    assert "drafter" in run["state"]["message"] and "SIGKILL" in run["state"]["message"]
    assert "\n" not in run["state"]["message"]
    _gone(processes)
    _goes_on(prefect, run_id, "drafter")


def test_killed_worker_leaves_nothing_running(prefect: PrefectHome) -> None:
    run_id, processes = _held_run(prefect, "answers")
    os.kill(prefect.pid("prefect-worker"), signal.SIGKILL)
    up = prefect.command("infra.local", "up")
    assert up.returncode == 0, up.stderr
    assert prefect.finished(run_id, 20)["state_name"] == "Crashed"
    _gone(processes)
    _goes_on(prefect, run_id, "answers")


def test_silent_run_is_marked_by_the_server(prefect: PrefectHome) -> None:
    settings = {"PREFECT_API_URL": prefect.api, "PREFECT_HOME": str(prefect.home / "prefect")}
    rule = prefect.command("infra.automations", "--silence", "10", **settings)
    assert rule.returncode == 0, rule.stderr
    run_id, processes = _held_run(prefect, "export")
    for pid in (prefect.pid("prefect-worker"), prefect.processes(FLOW)[0].pid):
        os.kill(pid, signal.SIGKILL)
    _gone(processes)
    run = prefect.finished(run_id, 60)
    assert run["state_name"] == "Crashed"
    assert "no heartbeat for 10 s" in run["state"]["message"]
    for command in (("infra.automations",), ("infra.local", "up")):
        done = prefect.command(*command, **settings if command[0] == "infra.automations" else {})
        assert done.returncode == 0, done.stderr
    _goes_on(prefect, run_id, "export")


def test_everything_killed_at_once_and_started_again(prefect: PrefectHome) -> None:
    run_id, processes = _held_run(prefect, "tokens")
    for pid in (prefect.pid("prefect-worker"), prefect.pid("prefect-server"), prefect.processes(FLOW)[0].pid):
        os.kill(pid, signal.SIGKILL)
    _gone(processes)
    up = prefect.command("infra.local", "up")
    assert up.returncode == 0, up.stderr
    assert prefect.finished(run_id, 20)["state_name"] == "Crashed"
    _goes_on(prefect, run_id, "tokens")
