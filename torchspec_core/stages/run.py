"""`run_stage`: a stage as a supervised child process, from spec to sealed folder."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torchspec_core
from torchspec_core.errors import StageError, UserError
from torchspec_core.processes import JsonlTail, Supervised
from torchspec_core.stages.canonical import to_plain
from torchspec_core.stages.disk import explain_disk_error, write_json
from torchspec_core.stages.lock import LOCK_FDS, Holder
from torchspec_core.stages.progress import PROGRESS_FILE, ProgressEvent
from torchspec_core.stages.spec import StageRef, StageSpec
from torchspec_core.stages.store import StageStore
from torchspec_core.stages.workspace import OUTCOME, REQUEST, Workspace

POLL_S = 0.1
OUTCOME_ROOM = 1 << 16
log = logging.getLogger("torchspec.stages")


class StageInterrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM while a stage ran; the message says what is kept and how to continue."""


def run_stage(
    store: StageStore,
    spec: StageSpec,
    function: str,
    inputs: Mapping[str, Path],
    params: Mapping[str, Any],
    runtime: Mapping[str, Any],
    on_progress: Callable[[ProgressEvent], None] | None = None,
    refresh: bool = False,
    env: Mapping[str, str] | None = None,
    deadline_s: float | None = None,
    wait_s: float | None = None,
    on_wait: Callable[[Holder], None] | None = None,
    grace_s: float = 10.0,
) -> StageRef:
    """The sealed entry of `spec`: a hit, or made by `function` ("package.module:build") in a supervised child.

    inputs: input stage name -> sealed folder, held against removal while the child reads them. env: variables on top of
    ours. on_progress is called from this thread. Raises StageError (with the log's path), UserError (also one raised in
    the child), StageInterrupted. on_wait: called when another run holds the stage; by default the log says so.
    """

    def say(holder: Holder) -> None:
        log.info("%s: waiting for %s, which makes or reads the same", spec.stage, holder.describe())

    plain_runtime = to_plain(runtime, "runtime")
    request = {
        "function": function,
        "inputs": {name: os.fspath(Path(path).absolute()) for name, path in inputs.items()},
        "params": to_plain(params, "params"),
        "runtime": plain_runtime,
    }

    def build(workspace: Workspace) -> None:
        with ExitStack() as stack:
            reading = [stack.enter_context(store.reading(Path(path))) for path in request["inputs"].values()]
            fds = (*workspace.lock_fds, *reading)
            _run_child(spec, workspace, request, fds, on_progress, env or {}, deadline_s, grace_s)

    return store.materialize(spec, build, refresh, wait_s, on_wait or say, plain_runtime)


def _run_child(
    spec: StageSpec,
    workspace: Workspace,
    request: Mapping[str, Any],
    fds: tuple[int, ...],
    on_progress: Callable[[ProgressEvent], None] | None,
    env: Mapping[str, str],
    deadline_s: float | None,
    grace_s: float,
) -> None:
    folder = workspace.path
    write_json(folder / REQUEST, request)
    (folder / OUTCOME).unlink(missing_ok=True)
    attempt = 1 + len(list(workspace.logs.glob("attempt-*.log")))
    path = os.pathsep.join(
        filter(None, (os.fspath(Path(torchspec_core.__file__).parent.parent), os.environ.get("PYTHONPATH")))
    )
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **env, LOCK_FDS: ",".join(map(str, fds))}
    child = Supervised(
        [sys.executable, "-m", "torchspec_core.stages.child", folder],
        log=workspace.logs / f"attempt-{attempt:03d}.log",
        env=environment,
        deadline_s=deadline_s,
        grace_s=grace_s,
        pass_fds=fds,
    )
    progress = JsonlTail(workspace.logs / PROGRESS_FILE, from_end=True)
    log.info("%s: making %s (log: %s)", spec.stage, folder.name, child.log)
    try:
        with _sigterm_interrupts(), child:
            while child.wait(POLL_S) is None:
                _relay(progress, on_progress)
        _relay(progress, on_progress)
    except KeyboardInterrupt:
        raise StageInterrupted(
            f"The stage {spec.stage} was stopped; run the same command again to continue: {_kept(folder)}."
        ) from None
    _raise_failure(spec, child, folder)


def _relay(tail: JsonlTail, on_progress: Callable[[ProgressEvent], None] | None) -> None:
    rows = tail.read()
    if rows and on_progress is not None:
        on_progress(rows[-1])


def _kept(folder: Path) -> str:
    kept, expected = Workspace(folder).kept()
    return f"{kept}{f' of {expected}' if expected is not None else ''} shards are kept"


def _raise_failure(spec: StageSpec, child: Supervised, folder: Path) -> None:
    """Nothing when the child ended well, else the error that fits."""
    if not folder.is_dir():
        raise UserError(f"The folder {folder} vanished while its stage was being written; run the same command again.")
    try:
        outcome = json.loads((folder / OUTCOME).read_text())
    except (OSError, ValueError):
        outcome = {}
    if child.returncode == 0 and outcome.get("ok"):
        return
    if "user_error" in outcome:
        raise UserError(outcome["user_error"])
    if not outcome and (child.returncode or 0) >= 0 and shutil.disk_usage(folder).free < OUTCOME_ROOM:
        full = explain_disk_error(OSError("No space left on device"), folder)
        assert full is not None
        raise full
    how = child.describe_end()
    if "error" in outcome:
        how = f"exit status {child.returncode}; last error: {outcome['error']}"
    raise StageError(
        f"The stage {spec.stage} failed ({how}); {_kept(folder)}, the same command continues from there; log: "
        f"{child.log}"
    )


@contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """SIGTERM ends the block like Ctrl-C, where nobody else handles it (Prefect does, and raises its own)."""
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    ):
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
