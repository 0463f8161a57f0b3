"""What a person sees of a stage in the terminal: progress in place, sizes and times in words."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

from torchspec_core.stages.lock import Holder
from torchspec_core.stages.spec import StageRef


def duration(seconds: float) -> str:
    """Seconds, or minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest:02d}s" if minutes else f"{seconds:.1f}s"


def size_text(count: float) -> str:
    """Bytes in a unit that fits."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def progress_line(event: Mapping[str, Any]) -> str:
    """One readable line of a progress event: share done, rate, time left, and what the stage says."""
    done, total, unit = event.get("done"), event.get("total"), event.get("unit", "")
    parts = []
    if done is not None and total:
        parts.append(f"{100 * done / total:3.0f}%  {done:,.0f}/{total:,.0f} {unit}")
    if event.get("rate"):
        parts.append(f"{event['rate']:,.3g} {unit}/s" if event["rate"] < 100 else f"{event['rate']:,.0f} {unit}/s")
    if event.get("eta_s") is not None:
        parts.append(f"{duration(event['eta_s'])} left")
    if event.get("message"):
        parts.append(str(event["message"]))
    return ", ".join(parts)


class Terminal:
    """Shows progress in place on a terminal, or one line every ten seconds in a log."""

    def __init__(self, stage: str) -> None:
        self.stage = stage
        self.live = sys.stdout.isatty()
        self.last = 0.0
        self.started = time.monotonic()

    def __call__(self, event: Mapping[str, Any]) -> None:
        now = time.monotonic()
        if now - self.last < (0.2 if self.live else 10.0):
            return
        self.last = now
        line = f"  {self.stage:<10}  {progress_line(event)}"
        print(f"\r\x1b[2K{line[:150]}" if self.live else line, end="" if self.live else "\n", flush=True)

    def wait(self, holder: Holder) -> None:
        """Say that another run holds the stage."""
        print(f"  {self.stage:<10}  waiting for {holder.describe()}, which makes or reads the same", flush=True)

    def finish(self, ref: StageRef) -> None:
        """One line of what the stage made."""
        if self.live:
            print("\r\x1b[2K", end="")
        state = "cached" if ref.cached else f"done in {duration(time.monotonic() - self.started)}"
        made = f"{ref.rows:>9,} rows  {size_text(ref.bytes):>9}"
        print(f"  {self.stage:<10}  {state:<16} {made}  {ref.key[:12]}", flush=True)
