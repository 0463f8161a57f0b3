"""Read files that another process is still writing: new JSON lines, last lines of a log, the line that names the
error."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

TAIL_BYTES = 65536
_ERROR = re.compile(
    r"^(?:[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Warning)\b.*|.*\b(?:[Ee]rror|ERROR|FATAL|fatal)\b.*)$"
)
_RAISED = re.compile(r"^[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit)(?::.*)?$")


class JsonlTail:
    """New complete lines of a JSONL file at each `read`; a missing file is empty, an unreadable line is left out."""

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        self._path = path
        self._offset = path.stat().st_size if from_end and path.exists() else 0

    def read(self) -> list[dict[str, Any]]:
        """The objects added since the last call."""
        try:
            with open(self._path, "rb") as file:
                if os.fstat(file.fileno()).st_size < self._offset:
                    self._offset = 0  # the file was started anew
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        complete = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete)
        rows = []
        for line in complete.splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict):
                rows.append(row)
        return rows


def tail_lines(path: Path, count: int = 20) -> list[str]:
    """The last `count` lines of a text file, without their ends; [] when there is none."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except FileNotFoundError:
        return []
    return [line.rstrip() for line in text.splitlines()][-count:]


def last_error(path: Path, limit: int = 300) -> str:
    """The line of a log that most likely says what went wrong: the last raised exception, else the last line with an
    error word, else the last line; "" when the log is empty. At most `limit` characters."""
    lines = [line for line in tail_lines(path, 400) if line.strip()]
    for pattern in (_RAISED, _ERROR):
        for line in reversed(lines):
            if pattern.match(line):
                return line.strip()[:limit]
    return lines[-1].strip()[:limit] if lines else ""
