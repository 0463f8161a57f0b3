"""Waiting for other processes in tests: conditions with a limit, and whether a pid is still at work."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from torchspec_core.processes.guard import read_proc


def until(check: Callable[[], object], seconds: float = 30.0) -> None:
    """Return once `check` is true; fail the test after `seconds`."""
    limit = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < limit, "it did not happen in time"
        time.sleep(0.01)


def alive(pid: int) -> bool:
    """Whether the process runs (a zombie does not)."""
    proc = read_proc(pid)
    return proc is not None and proc.state not in "ZX"


def number_in(path: Path) -> int:
    """The number that another process writes to `path`, with a newline, sooner or later."""
    until(lambda: path.exists() and path.read_text().endswith("\n"))
    return int(path.read_text())
