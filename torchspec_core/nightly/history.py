"""What nights there were, and what changed since the last green one.

A night is one line of `history.jsonl`: when, which commit, what else it was made from, every verdict. The first red
night after a green one is the first bad one; the commits between the two are the suspects, and so is everything else
that differs: the lock file, the patches to the engine, the data.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchspec_core.stages.canonical import digest
from torchspec_core.stages.disk import digest_file

HISTORY = "history.jsonl"
SOURCES = ("lock", "patches", "data", "machine")
_SHOWN = 5


@dataclass(frozen=True)
class Night:
    """A line of the history. made_from: digests of `SOURCES`; verdicts: as `Verdict.to_json`."""

    night: str
    variant: str
    time: str
    commit: str
    dirty: bool
    made_from: Mapping[str, str]
    verdicts: tuple[Mapping[str, Any], ...]
    seconds: float

    @property
    def green(self) -> bool:
        """Whether every gate held."""
        return all(verdict["ok"] for verdict in self.verdicts)


def read(path: Path, variant: str) -> list[Night]:
    """The nights of a variant, oldest first; a line that a crash cut off is left out."""
    nights = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if row["variant"] == variant:
            nights.append(Night(**{**row, "verdicts": tuple(row["verdicts"])}))
    return nights


def append(path: Path, night: Night) -> None:
    """Add a night, in one write, on a line of its own even where the line before was cut off."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**night.__dict__, "verdicts": list(night.verdicts)}) + "\n"
    with open(path, "ab+") as file:
        if end := file.seek(0, os.SEEK_END):
            file.seek(end - 1)
            text = text if file.read(1) == b"\n" else "\n" + text
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())


def _git(root: Path, *words: str) -> str:
    try:
        done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def commit_of(root: Path) -> tuple[str, bool]:
    """(commit, whether tracked files differ from it); ("", False) outside of a work tree."""
    return _git(root, "rev-parse", "HEAD"), bool(_git(root, "status", "--porcelain", "--untracked-files=no"))


def machine() -> str:
    """Processor and its cores that this process may use: what throughput depends on besides the code."""
    model = ""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            model = next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), "")
    except OSError:
        pass
    return f"{model or platform.processor() or platform.machine()}, {len(os.sched_getaffinity(0))} cores"


def made_from(root: Path, data: Mapping[str, Any]) -> dict[str, str]:
    """Digests of what a night depends on besides the code. data: digests of the files that the recipes read."""
    files = {
        "lock": sorted((root / "requirements").glob("*.txt")),
        "patches": sorted(path for path in (root / "docker/patches").rglob("*") if path.is_file()),
    }
    digests = {
        name: digest({path.relative_to(root).as_posix(): digest_file(path) for path in paths})
        for name, paths in files.items()
    }
    return {**digests, "data": digest(dict(data)), "machine": machine()}


def last_green(nights: Sequence[Night]) -> Night | None:
    """The newest green night."""
    return next((night for night in reversed(nights) if night.green), None)


def suspects(nights: Sequence[Night], root: Path) -> list[str]:
    """What may have made the newest night red, most telling first; one sentence each. [] when it is green.

    nights: oldest first, the red one last.
    """
    if nights[-1].green:
        return []
    green = last_green(nights)
    if green is None:
        return ["there is no green night to compare with"]
    first_bad = nights[nights.index(green) + 1]
    found = [
        f"{name}: {'changed' if name != 'machine' else f'{old} then, {new} now'} since the last green night"
        for name in SOURCES
        if (old := green.made_from[name]) != (new := first_bad.made_from[name])
    ]
    commits = _git(root, "log", "--format=%h %s", f"{green.commit}..{first_bad.commit}").splitlines()
    if len(commits) == 1:
        found.insert(0, f"code: first bad commit {commits[0]}")
    elif commits:
        shown = "; ".join(commits[:_SHOWN]) + (f"; and {len(commits) - _SHOWN} more" if len(commits) > _SHOWN else "")
        found.insert(0, f"code: the first bad commit is one of {len(commits)}: {shown}")
    elif first_bad.commit != green.commit:
        found.insert(0, f"code: {green.commit[:9] or 'none'} then, {first_bad.commit[:9] or 'none'} now")
    if first_bad.dirty:
        found.insert(0, "code: tracked files differed from the commit")
    since = "" if first_bad is nights[-1] else f" (red since the night {first_bad.night})"
    same = "code, lock, patches, data and machine are those of the last green night: a number near its band's edge"
    return [line + since for line in found or [same]]
