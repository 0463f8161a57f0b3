"""Progress of a stage body: rate-limited JSON lines that the parent turns into a bar, a log line or an artifact.

An event is a mapping: done, total, unit, message, rate (units a second in this attempt, or None), eta_s (seconds
left, or None), numbers (what the body wants shown beside it).
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PROGRESS_FILE = "progress.jsonl"

ProgressEvent = Mapping[str, Any]


class Progress:
    """Writes at most one line each `every_s` seconds to `path`, the first and the last one always."""

    def __init__(self, path: Path, every_s: float = 0.5) -> None:
        self._path = Path(path)
        self._every_s = every_s
        self._last = float("-inf")
        self._start: tuple[float, float] | None = None

    def update(
        self, done: float, total: float, unit: str = "", message: str = "", **numbers: float | int | str
    ) -> None:
        """Say how far it is: `done` of `total` units; `numbers` are shown beside it (loss, tokens_per_second)."""
        now = time.monotonic()
        if self._start is None:
            self._start = (now, done)  # a resumed body starts above zero: the rate is of this attempt only
        if done < total and now - self._last < self._every_s:
            return
        self._last = now
        began, first = self._start
        rate = (done - first) / (now - began) if now > began and done > first else None
        event = {
            "done": done,
            "total": total,
            "unit": unit,
            "message": message,
            "rate": rate,
            "eta_s": (total - done) / rate if rate else None,
            "numbers": numbers,
        }
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(event) + "\n")
