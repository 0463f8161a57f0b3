"""What `infra.local` asks of the Prefect server: pool, deployments, runs, logs. All through Prefect's own client.

Import this only after `os.environ` holds the settings of `infra.services.environment`: Prefect reads them at import.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime
from typing import Any
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    ArtifactFilterType,
    DeploymentFilter,
    DeploymentFilterId,
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
    LogFilter,
    LogFilterFlowRunId,
)
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.client.schemas.sorting import ArtifactSort, FlowRunSort, LogSort
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound
from prefect.states import Crashed
from prefect.workers.process import ProcessWorker

from infra.services import POOLS, ROOT, Place
from torchspec_core.errors import StageError, UserError

UNFINISHED = [StateType.PENDING, StateType.RUNNING, StateType.SCHEDULED, StateType.CANCELLING]
GONE_SECONDS = 60.0
"""Seconds without an answer after which following a run gives up; a server restart takes about ten."""


def connect() -> SyncPrefectClient:
    """A client of the server in the environment."""
    return get_client(sync_client=True)


def ensure_pools(client: SyncPrefectClient) -> None:
    """The process work pools that the deployments name; one that exists keeps its settings."""
    template = ProcessWorker.get_default_base_job_template()
    for name, limit in POOLS.items():
        with suppress(ObjectAlreadyExists):
            client.create_work_pool(
                WorkPoolCreate(name=name, type="process", base_job_template=template, concurrency_limit=limit)
            )


def _digest() -> str:
    digest = hashlib.blake2b(digest_size=16)
    for path in [ROOT / "prefect.yaml", *sorted((ROOT / "flows").glob("*.py"))]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def deploy(place: Place, client: SyncPrefectClient) -> bool:
    """`prefect deploy --all` unless nothing it reads has changed since; returns whether it ran."""
    memory = place.home / "deployed.json"
    wanted = {"api": place.api, "root": str(ROOT), "digest": _digest()}
    known = json.loads(memory.read_text()) if memory.is_file() else None
    if known == wanted and client.read_deployments(limit=1):
        return False
    ensure_pools(client)
    done = subprocess.run(
        [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all"], cwd=ROOT, env=dict(os.environ),
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300,
    )
    if done.returncode != 0:
        raise StageError(f"`prefect --no-prompt deploy --all` failed: {(done.stderr or done.stdout).strip()[-600:]}")
    memory.write_text(json.dumps(wanted) + "\n")
    return True


def bury_lost_runs(client: SyncPrefectClient) -> int:
    """Mark runs that were in progress when their worker died; call it when no worker of the pool is alive."""
    lost = client.read_flow_runs(flow_run_filter=_in_states([StateType.RUNNING, StateType.PENDING]))
    for run in lost:
        state: State[Any] = Crashed(message="its worker was gone; run it again and it goes on where it stopped")
        client.set_flow_run_state(run.id, state, force=True)
    return len(lost)


def _in_states(states: list[StateType]) -> FlowRunFilter:
    return FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(any_=states)))


def start_run(client: SyncPrefectClient, name: str, overrides: list[str]) -> tuple[FlowRun, bool]:
    """A run of deployment `name`: the one in progress with the same parameters, or a new one; and whether it is new."""
    try:
        deployment = client.read_deployment_by_name(name)
    except ObjectNotFound as error:
        raise UserError(f"there is no deployment {name!r} on the server; prefect.yaml lists them") from error
    parameters = {**deployment.parameters, **({"overrides": overrides} if overrides else {})}
    going = client.read_flow_runs(
        flow_run_filter=_in_states(UNFINISHED),
        deployment_filter=DeploymentFilter(id=DeploymentFilterId(any_=[deployment.id])),
        sort=FlowRunSort.START_TIME_DESC,
    )
    for run in going:
        if run.parameters == parameters and not run.auto_scheduled:
            return run, False
    return client.create_flow_run_from_deployment(deployment.id, parameters=parameters), True


def follow(
    client: SyncPrefectClient, run_id: UUID, interval: float = 0.7, served: Callable[[], bool] = lambda: True
) -> Iterator[tuple[str, Any]]:
    """Yields `("log", log)` for each new line, `("progress", text)` while a stage works, and last `("end", run)`.

    served: whether a worker is there to start the run; one that was not started a while after its worker went never
    will be. A run that has started needs no worker to end, and its heartbeat tells when it dies.
    """
    seen, answered = 0, time.monotonic()
    waited = answered
    while True:
        try:
            run = client.read_flow_run(run_id)
            finished = run.state is not None and run.state.is_final()
            if finished:
                time.sleep(1.2)  # the run's last lines are sent within a second of its end
            while logs := client.read_logs(_logs_of(run_id), limit=200, offset=seen, sort=LogSort.TIMESTAMP_ASC):
                seen += len(logs)
                yield from (("log", line) for line in logs)
            if finished:
                yield "end", run
                return
            if run.start_time is not None or served():
                waited = time.monotonic()
            elif time.monotonic() - waited > GONE_SECONDS:
                raise StageError("the worker ended before the run started; type the same command again to start both")
            if text := _progress(client, run_id):
                yield "progress", text
            answered = time.monotonic()
        except (httpx.HTTPError, OSError) as error:
            if time.monotonic() - answered > GONE_SECONDS:
                raise StageError(f"the Prefect server has not answered for {GONE_SECONDS:g} s ({error})") from error
        time.sleep(interval)


def _logs_of(run_id: UUID) -> LogFilter:
    return LogFilter(flow_run_id=LogFilterFlowRunId(any_=[run_id]))


def _progress(client: SyncPrefectClient, run_id: UUID) -> str:
    found = client.read_artifacts(
        artifact_filter=ArtifactFilter(
            flow_run_id=ArtifactFilterFlowRunId(any_=[run_id]), type=ArtifactFilterType(any_=["progress"])),
        sort=ArtifactSort.UPDATED_DESC, limit=1,
    )
    if not found or not isinstance(found[0].data, int | float) or found[0].data >= 100:
        return ""
    return f"{str(found[0].key).removesuffix('-progress')}: {found[0].description}"


def local_time(moment: datetime) -> str:
    """Clock time of this machine."""
    return f"{moment.astimezone():%H:%M:%S}"
