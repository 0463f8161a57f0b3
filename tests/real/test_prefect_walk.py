"""The walk through a real Prefect server and worker, with tiny stage bodies: states, artifacts, cache, failures."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.prefect_home import PrefectHome, prefect_home, until
from torchspec_core.pipeline import STAGE_NAMES, STAGES


@pytest.fixture(scope="module")
def prefect(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefectHome]:
    with prefect_home(tmp_path_factory.mktemp("prefect")) as place:
        yield place


@pytest.fixture(scope="module")
def first(prefect: PrefectHome) -> str:
    return str(prefect.finished(prefect.start_run())["id"])


def test_run_completes_with_every_stage(prefect: PrefectHome, first: str) -> None:
    run = prefect.run(first)
    assert run["state_name"] == "Completed", run["state"]
    assert run["name"].startswith("tiny: smollm2-135m-instruct, eagle3, ")
    page = Path(run["state"]["message"].removeprefix("report: "))
    assert page.read_text() == "<h1>Report</h1>"
    assert prefect.tasks(first) == dict.fromkeys(STAGE_NAMES, "Completed")
    assert {stage: prefect.shards(stage) for stage in STAGE_NAMES} == {stage: [0, 1, 2] for stage in STAGE_NAMES}


def test_arrows_join_a_stage_to_its_inputs_only(prefect: PrefectHome, first: str) -> None:
    rows = prefect.call("/task_runs/filter", {"flow_runs": {"id": {"any_": [first]}}})
    stage = {row["id"]: row["name"].split("[")[0] for row in rows}
    arrows = {
        stage[row["id"]]: {stage[task["id"]] for found in row["task_inputs"].values() for task in found}
        for row in rows
    }
    assert arrows == {entry.name: set(entry.inputs) for entry in STAGES}


def test_artifacts_of_each_stage(prefect: PrefectHome, first: str) -> None:
    found = prefect.call("/artifacts/filter", {"flow_runs": {"id": {"any_": [first]}}, "limit": 200})
    kinds = {row["key"]: row["type"] for row in found}
    assert {f"{stage}-summary": "table" for stage in STAGE_NAMES}.items() <= kinds.items()
    assert kinds["acceptance"] == kinds["tokens-counts"] == "table"
    assert {kinds[key] for key in ("training-curves", "tokens-lengths", "report", "report-page")} == {"markdown"}
    by_key = {row["key"]: row for row in found}
    assert "data:image/svg+xml;base64," in by_key["report"]["data"]
    rows = {row["fact"]: row["value"] for row in json.loads(by_key["tokens-summary"]["data"])}
    assert rows["state"] == "made now" and rows["rows"] == 3


def test_second_run_is_all_cached(prefect: PrefectHome, first: str) -> None:
    before = {stage: prefect.shards(stage) for stage in STAGE_NAMES}
    run = prefect.finished(prefect.start_run())
    assert run["state_name"] == "Completed"
    assert prefect.tasks(run["id"]) == dict.fromkeys(STAGE_NAMES, "Cached")
    assert {stage: prefect.shards(stage) for stage in STAGE_NAMES} == before


def test_changed_parameter_runs_only_what_depends_on_it(prefect: PrefectHome, first: str) -> None:
    run = prefect.finished(prefect.start_run("training.lr=0.5"))
    states = prefect.tasks(run["id"])
    ran = ("drafter", "export", "evaluation", "report")
    assert states == {stage: "Completed" if stage in ran else "Cached" for stage in STAGE_NAMES}


def test_refresh_runs_the_named_stage(prefect: PrefectHome, first: str) -> None:
    made = len(prefect.shards("evaluation"))
    run = prefect.finished(prefect.start_run(refresh=["evaluation"]))
    assert prefect.tasks(run["id"])["evaluation"] == "Completed"
    assert len(prefect.shards("evaluation")) == made + 3


@pytest.mark.parametrize(("overrides", "parameters", "words"), [
    (["training.learning=1"], {}, "training.learning"),
    ([], {"recipe": "configs/none.yaml"}, "configs/none.yaml"),
])
def test_mistake_fails_with_one_sentence(
    prefect: PrefectHome, overrides: list[str], parameters: dict[str, object], words: str
) -> None:
    run = prefect.finished(prefect.start_run(*overrides, **parameters))
    assert run["state_name"] == "Failed"
    message = run["state"]["message"]
    assert words in message and "\n" not in message and "Traceback" not in message

    def logs() -> list[str]:
        rows = prefect.call("/logs/filter", {"logs": {"flow_run_id": {"any_": [run["id"]]}}})
        return [row["message"] for row in rows]

    until(lambda: any("exited with status code" in line for line in logs()), 20, "the worker's last line")
    assert not any("Traceback" in line for line in logs())


def test_demo_prints_the_report_last_and_follows_the_run(prefect: PrefectHome, first: str) -> None:
    shown = prefect.command("infra.local", "demo", "train-drafter/tiny", f"run.store={prefect.store}", "run.name=tiny")
    assert shown.returncode == 0, shown.stdout + shown.stderr
    lines = shown.stdout.splitlines()
    assert lines[-1].endswith("report.html") and Path(lines[-1]).is_file()
    assert lines[-2].startswith("The run in the UI: http://127.0.0.1:")
    assert any("  tokens: done, 3 rows" in line for line in lines)


def test_demo_fails_with_the_sentence_on_stderr(prefect: PrefectHome) -> None:
    shown = prefect.command("infra.local", "demo", "train-drafter/tiny", "training.learning=1")
    assert shown.returncode == 1
    assert "training.learning" in shown.stderr and len(shown.stderr.splitlines()) == 1
    assert "Traceback" not in shown.stdout and "training.learning" not in shown.stdout


def test_all_deployments_are_registered(prefect: PrefectHome) -> None:
    done = prefect.command("infra.local", "deploy")
    assert done.returncode == 0, done.stderr
    found = {row["name"]: row for row in prefect.call("/deployments/filter", {})}
    assert {"quickstart", "smoke", "eagle3-1h", "nightly"} <= found.keys()
    nightly = found["nightly"]
    assert nightly["schedules"][0]["schedule"] == {"cron": "30 2 * * *", "timezone": "Etc/UTC", "day_or": True}
    assert nightly["global_concurrency_limit"]["limit"] == 1
    assert nightly["concurrency_options"]["collision_strategy"] == "CANCEL_NEW"
    again = prefect.command("infra.local", "deploy")
    assert "deployments unchanged" in again.stdout


def test_named_server_that_is_down_is_said_at_once(prefect: PrefectHome) -> None:
    started = time.monotonic()
    shown = prefect.command("infra.local", "demo", PREFECT_API_URL="http://127.0.0.1:9/api")
    assert shown.returncode == 2
    assert time.monotonic() - started < 10
    assert "http://127.0.0.1:9/api" in shown.stderr
    assert "prefect server start" in shown.stderr and "unset PREFECT_API_URL" in shown.stderr
    assert len(shown.stderr.splitlines()) == 1
