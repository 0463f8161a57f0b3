"""What every stage task shares: the recipe of the run, the stage call, progress, the summary table, the final state.

Prefect's own result cache is off: the stage store decides what is a hit, so there is one cache and it is on disk. A
task hands a small `StageRef` on, and its state says `Cached` or `Completed` with the reason. A mistake in the recipe,
or a failed stage, becomes a `Failed` state whose message is the one sentence that says what to do.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast
from uuid import UUID

from prefect.artifacts import create_progress_artifact, create_table_artifact, update_progress_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.exceptions import FailedRun
from prefect.states import Completed, Failed

from torchspec_core.config.load import load_recipe
from torchspec_core.config.schema import Recipe
from torchspec_core.errors import TorchspecError, UserError
from torchspec_core.pipeline import STAGE_NAMES, check_run, open_store, plan, run_stage
from torchspec_core.stages import ProgressEvent, StageRef
from torchspec_core.terminal import progress_line

log = logging.getLogger("torchspec.tasks")

LOG_SECONDS = 10.0
ARTIFACT_SECONDS = 1.0


class _KnownFailure(logging.Filter):
    """Drops the engine's traceback of a failure that the run's state already says in one sentence."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not (record.exc_info and isinstance(record.exc_info[1], TorchspecError | FailedRun))


for _name in ("prefect.engine", "prefect.flow_runs"):
    logging.getLogger(_name).addFilter(_KnownFailure())


@dataclass(frozen=True)
class Run:
    """What the tasks of one flow run share."""

    name: str
    recipe: Recipe
    refresh: tuple[str, ...]
    slugs: Mapping[str, str]


def open_run(recipe: str, overrides: list[str], refresh: list[str]) -> Run:
    """Read the recipe, refuse what cannot run, and log what is cached; raises `UserError`."""
    logging.getLogger("torchspec").setLevel(logging.INFO)  # Prefect gives an extra logger its handlers, but no level
    unknown = [name for name in refresh if name not in STAGE_NAMES]
    if unknown:
        raise UserError(f"there is no stage {unknown[0]!r} to refresh; the stages are {', '.join(STAGE_NAMES)}")
    loaded = load_recipe(Path(recipe), overrides).recipe
    store = open_store(loaded)
    planned = plan(loaded, store)
    check_run(loaded, planned, store)
    cached = [entry.name for entry in planned if entry.lookup.hit]
    log.info("%s: %d of %d stages are in %s", recipe, len(cached), len(planned), store.root)
    return Run(loaded.run.name, loaded, tuple(refresh), {entry.name: entry.spec.slug for entry in planned})


def _io_error(task: Any, task_run: Any, state: State[Any]) -> bool:
    """Whether a second try may help: a broken connection or a busy disk, not a full disk or a missing file."""
    error = state.data if isinstance(state.data, BaseException) else getattr(state.data, "result", None)
    hopeless = {errno.ENOSPC, errno.ENOENT, errno.EACCES, errno.EROFS, errno.EPERM}
    return isinstance(error, OSError) and error.errno not in hopeless


STAGE_TASK: dict[str, Any] = {
    "cache_policy": NO_CACHE,
    "persist_result": False,
    "retries": 1,
    "retry_delay_seconds": 5,
    "retry_condition_fn": _io_error,
}
"""Options of every stage task."""


class _Progress:
    """Turns a stage's progress events into one progress artifact and a log line every ten seconds."""

    def __init__(self, stage: str) -> None:
        self.stage = stage
        self.artifact: UUID | None = None
        self.shown = self.logged = time.monotonic()

    def __call__(self, event: ProgressEvent) -> None:
        done, total, now = event["done"], event["total"], time.monotonic()
        if not total:
            return
        if now - self.shown >= ARTIFACT_SECONDS or done >= total:
            self.shown = now
            self._artifact(100.0 * min(1.0, done / total), progress_line(event))
        if now - self.logged >= LOG_SECONDS:
            self.logged = now
            log.info("%s: %s", self.stage, progress_line(event))

    def _artifact(self, percent: float, line: str) -> None:
        try:
            if self.artifact is None:
                made = create_progress_artifact(percent, key=f"{self.stage}-progress", description=line)
                self.artifact = cast(UUID, made)  # a coroutine only inside an event loop
            else:
                update_progress_artifact(self.artifact, progress=percent, description=line)
        except Exception as error:  # a busy server must not end hours of work over a progress bar
            log.warning("%s: progress could not be shown in the UI: %s", self.stage, error)


def summary_rows(ref: StageRef) -> list[dict[str, Any]]:
    """The stage's summary table: one row a fact, the same facts for every stage, then the stage's own metrics."""
    facts: dict[str, Any] = {
        "key": ref.key, "state": "cached" if ref.cached else "made now", "reason": ref.reason, "folder": str(ref.path),
        "rows": ref.rows, "bytes": ref.bytes, "seconds": round(ref.seconds, 2),
    }
    return [{"fact": name, "value": value} for name, value in {**facts, **ref.metrics}.items()]


def run_stage_task(run: Run, name: str, show: Callable[[StageRef], None] | None = None) -> State[Any]:
    """Find or make the output of stage `name` and say which; the state's result is the `StageRef`.

    `show` adds the stage's own artifacts after its summary table.
    """
    refresh = name in run.refresh
    try:
        ref = run_stage(name, run.recipe, open_store(run.recipe), on_progress=_Progress(name), refresh=refresh)
    except TorchspecError as error:
        return Failed(message=str(error), data=error)
    log.info("%s: %s, %d rows, %.1f MB, %.1f s (%s)", name, "cached" if ref.cached else "done", ref.rows,
             ref.bytes / 1e6, ref.seconds, ref.reason if ref.cached else f"was {ref.reason}")
    create_table_artifact(summary_rows(ref), key=f"{name}-summary", description=f"Stage {name}: {ref.path.name}")
    if show is not None:
        try:
            show(ref)
        except Exception as error:  # the output is sealed: a picture that cannot be drawn must not end the run
            log.warning("%s: its artifacts could not be shown in the UI: %s: %s", name, type(error).__name__, error)
    state = "Cached" if ref.cached else "Completed"
    message = f"{name}/{ref.key[:12]}: {ref.reason}"
    # Prefect draws an arrow for every object that two results share, and "same key" is one object.
    return Completed(name=state, message=message, data=replace(ref, reason=message))
