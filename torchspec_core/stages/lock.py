"""One writer per stage entry: `flock` on a small file beside the entries, `<root>/.locks/<stage>-<key>`.

The kernel frees the lock when the last process that holds the descriptor ends. Children inherit it, so after a
SIGKILL of the parent it stays held until its child is gone too, and a new run never writes beside an orphan. The file
is outside the stage's folder, so deleting that folder does not make a second lock. The file says who holds it, for
messages only.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torchspec_core.errors import UserError
from torchspec_core.stages.disk import disk_errors

LOCK_FDS = "TORCHSPEC_LOCK_FDS"
"""Environment variable that tells a child the descriptors of the locks it inherits."""

POLL_S = 0.1


@dataclass(frozen=True)
class Holder:
    """Who holds a lock: pid of the run (0 when unknown) and since when (Unix time)."""

    pid: int
    since: float

    def describe(self) -> str:
        """`process 123 since 12:34:56`."""
        if not self.pid:
            return "another process"
        return f"process {self.pid} since {time.strftime('%H:%M:%S', time.localtime(self.since))}"


class BusyError(UserError):
    """The lock is held by another run."""


def read_holder(path: Path) -> Holder:
    """What the lock file says; unknown when it cannot be read."""
    try:
        fields = json.loads(path.read_text())
        return Holder(int(fields["pid"]), float(fields["since"]))
    except (OSError, ValueError, KeyError, TypeError):
        return Holder(0, 0.0)


@contextmanager
def hold(
    path: Path,
    *,
    shared: bool = False,
    wait_s: float | None = None,
    on_wait: Callable[[Holder], None] | None = None,
) -> Iterator[int]:
    """Hold the lock at `path` inside the block; yields its descriptor.

    shared: readers' side; many may hold it, no writer beside them. wait_s: seconds to wait (None = for ever, 0 = not at
    all), then BusyError. on_wait: called once when there is somebody to wait for.
    """
    limit = None if wait_s is None else time.monotonic() + wait_s
    told = False
    with disk_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with disk_errors(path.parent):
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            holder = read_holder(path)
            if limit is not None and time.monotonic() >= limit:
                raise BusyError(
                    f"The stage {path.name} is in use by {holder.describe()}; wait for it to end or stop it, "
                    f"then try again."
                ) from None
            if on_wait is not None and not told:
                told = True
                on_wait(holder)
            time.sleep(POLL_S)
            continue
        except BaseException:
            os.close(handle)
            raise
        if _is_current(handle, path):
            break
        os.close(handle)  # the file was deleted (gc) between open and lock: that lock protects nothing
    try:
        _sign(handle)
        yield handle
    finally:
        os.close(handle)  # never LOCK_UN: that would also free the copy of a child that is still alive


def _sign(handle: int) -> None:
    try:
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps({"pid": os.getpid(), "since": time.time()}).encode(), 0)
    except OSError:  # a full disk: the lock holds all the same, only its message is poorer
        return


def _is_current(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False
