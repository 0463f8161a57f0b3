"""Where a step's time goes: seconds of the host by phase, and the same names as spans in a profiler's trace.

On an accelerator the host runs ahead of the device: there `forward` is the time to launch, and what the device still
owes shows up in `metrics`, where the host waits for values.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from torch.profiler import record_function

PHASES = ("data", "forward", "backward", "optimizer", "metrics")
"""`data`: the wait for a batch; `metrics`: reading values and logging them."""


class Phases:
    """Adds up the seconds of each phase."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time a block as one of `PHASES`."""
        started = time.perf_counter()
        with record_function(f"step/{name}"):
            yield
        self.seconds[name] += time.perf_counter() - started

    def take(self) -> dict[str, float]:
        """Seconds by phase since the last call."""
        taken, self.seconds = self.seconds, dict.fromkeys(PHASES, 0.0)
        return taken
