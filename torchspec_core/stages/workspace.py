"""`Workspace`: the folder that a stage is filling, shard by shard.

A shard is written under a temporary name, synced, renamed and only then recorded in `shards.jsonl` (append-only,
synced), so a record always speaks of a whole file. After a crash `done(name)` tells which shards are still whole; the
body skips those. Records are single `O_APPEND` writes: several processes may seal shards of one workspace (it can be
pickled). The store turns the records into the manifest when the body has returned.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from torchspec_core.errors import TorchspecError
from torchspec_core.stages.disk import (
    TEMPORARY,
    digest_file,
    disk_errors,
    fsync_file,
    fsync_folder,
    remove_tree,
    temporary_path,
)

JOURNAL = "shards.jsonl"
REQUEST = "request.json"
OUTCOME = "outcome.json"
PRIVATE_FILES = frozenset({"spec.json", "manifest.json", REQUEST, OUTCOME, JOURNAL})
PRIVATE_FOLDERS = frozenset({"logs", "scratch"})


class WorkspaceError(TorchspecError):
    """A stage body used its workspace in a way that would lose or hide data; a mistake in our code."""


def is_private(name: str) -> bool:
    """Whether a path inside an entry is the store's own (records, logs, halves of files), not the stage's output."""
    parts = PurePosixPath(name).parts
    return parts[0] in PRIVATE_FOLDERS or name in PRIVATE_FILES or parts[-1].startswith(TEMPORARY)


def _check_name(name: str) -> str:
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or parts[-1].startswith(TEMPORARY):
        raise WorkspaceError(f"{name!r} cannot be the name of a shard")
    if parts[0] in PRIVATE_FOLDERS or name in PRIVATE_FILES:
        raise WorkspaceError(f"{name!r} is a name that the stage store uses itself")
    return str(PurePosixPath(name))


def _check_facts(facts: dict[str, Any], what: str) -> None:
    for name, value in facts.items():
        if type(value) not in (bool, int, float, str) or (type(value) is float and not math.isfinite(value)):
            raise WorkspaceError(
                f"{what} {name} must be a finite number or a text, not {value!r} ({type(value).__name__})"
            )


class Workspace:
    """The folder being filled; see the module's docstring. `lock_fd`: the held lock, for children to inherit."""

    def __init__(self, path: Path, lock_fds: tuple[int, ...] = ()) -> None:
        self.path = Path(path)
        self.lock_fds = lock_fds
        self._shards: dict[str, dict[str, Any]] = {}
        self._facts: dict[str, dict[str, Any]] = {}
        self._metrics: dict[str, Any] = {}
        self._expected: int | None = None
        self._earlier_s = 0.0
        self._attempt: tuple[float, float] | None = None
        self._offset = 0
        self._pending: dict[str, dict[str, Any]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return Workspace, (self.path,)

    @property
    def logs(self) -> Path:
        """Folder for logs; kept beside the output, not part of it."""
        folder = self.path / "logs"
        folder.mkdir(exist_ok=True)
        return folder

    def scratch(self, name: str) -> Path:
        """A folder for private state that helps a crashed body to continue (checkpoints); gone when the stage is
        sealed."""
        folder = self.path / "scratch" / _check_name(name)
        with disk_errors(self.path):
            folder.mkdir(parents=True, exist_ok=True)
        return folder

    @contextmanager
    def shard(self, name: str) -> Iterator[Path]:
        """A temporary path to write one file to; when the block ends well it is synced, named `name` and recorded."""
        name = _check_name(name)
        final = self.path / name
        draft = temporary_path(final)
        with disk_errors(self.path):
            self._require_folder()
            final.parent.mkdir(parents=True, exist_ok=True)
            self._forget(name)
            try:
                yield draft
                if not draft.is_file():
                    raise WorkspaceError(
                        f"the shard {name} was not written: there is no file at the path that was given"
                    )
                fsync_file(draft)
                record = {"bytes": draft.stat().st_size, "blake2b": digest_file(draft)}
                os.replace(draft, final)
                fsync_folder(final.parent)
            except BaseException:
                draft.unlink(missing_ok=True)
                raise
            self._append({"shard": name, "files": {name: record}, "facts": self._pending.pop(name, {})})

    @contextmanager
    def tree(self, name: str) -> Iterator[Path]:
        """Like `shard`, for a small folder of files that belong together; `name="."` is refused."""
        name = _check_name(name)
        final = self.path / name
        draft = temporary_path(final)
        with disk_errors(self.path):
            self._require_folder()
            final.parent.mkdir(parents=True, exist_ok=True)
            self._forget(name)
            remove_tree(draft)
            draft.mkdir()
            try:
                yield draft
                files = {}
                for path in sorted(p for p in draft.rglob("*") if p.is_file()):
                    fsync_file(path)
                    relative = f"{name}/{path.relative_to(draft).as_posix()}"
                    files[relative] = {"bytes": path.stat().st_size, "blake2b": digest_file(path)}
                if not files:
                    raise WorkspaceError(f"the folder {name} was left empty")
                remove_tree(final)
                os.replace(draft, final)
                fsync_folder(final.parent)
            except BaseException:
                remove_tree(draft)
                raise
            self._append({"shard": name, "files": files, "facts": self._pending.pop(name, {})})

    def done(self, name: str) -> dict[str, Any] | None:
        """Facts of a sealed shard that is still whole on disk (bytes, blake2b for a file, and its own facts), else
        None."""
        name = _check_name(name)
        self._refresh()
        shard = self._shards.get(name)
        if shard is None or not all(self._whole(file, facts["bytes"]) for file, facts in shard.items()):
            return None
        own = shard[name] if set(shard) == {name} else {"bytes": sum(facts["bytes"] for facts in shard.values())}
        return {**own, **self._facts.get(name, {})}

    def recorded(self) -> set[str]:
        """Names that the journal speaks of; whether they are whole is for `done` to say."""
        self._refresh()
        return set(self._shards)

    def discard(self, name: str) -> None:
        """Forget a sealed file and delete it: something else stands in its place."""
        name = _check_name(name)
        with disk_errors(self.path):
            self._forget(name)
            (self.path / name).unlink(missing_ok=True)

    def facts(self, name: str, **facts: float | int | str) -> None:
        """Small facts of a shard (rows, tokens). Inside its block they are recorded with it, in one write; else after
        it."""
        name = _check_name(name)
        _check_facts(facts, f"fact of {name}:")
        self._refresh()
        if name in self._shards:
            self._append({"facts": facts, "of": name})
        else:
            self._pending.setdefault(name, {}).update(facts)

    def record(self, **metrics: float | int | str) -> None:
        """Flat metrics of the whole stage, for the manifest; a later value replaces an earlier one. `rows` counts
        rows."""
        _check_facts(metrics, "metric")
        self._append({"metrics": metrics})

    def expect(self, shards: int) -> None:
        """How many shards there will be, so that an interrupted run can say how many of them are kept."""
        self._append({"expected": shards})

    def kept(self) -> tuple[int, int | None]:
        """Shards that are whole now, and how many are expected (None when the body did not say)."""
        self._refresh()
        return sum(self.done(name) is not None for name in self._shards), self._expected

    # What follows is for the store and the child.

    def begin(self) -> None:
        """Start an attempt: delete what no record speaks of (halves of a crashed attempt)."""
        self._refresh()
        known = {file for files in self._shards.values() for file in files}
        for path in self._stray(known):
            path.unlink(missing_ok=True)
        self._append({"attempt": os.getpid()})

    def sealed_files(self) -> dict[str, dict[str, Any]]:
        """Every recorded file with size, digest and facts; WorkspaceError when one is missing or another is
        unrecorded."""
        self._refresh()
        files: dict[str, dict[str, Any]] = {}
        for name, shard in self._shards.items():
            for file, facts in shard.items():
                if not self._whole(file, facts["bytes"]):
                    raise WorkspaceError(
                        f"the shard file {self.path / file} vanished or changed size after it was sealed"
                    )
                files[file] = {**facts, **(self._facts.get(name, {}) if file == name else {})}
        stray = sorted(str(path.relative_to(self.path)) for path in self._stray(set(files)))
        if stray:
            raise WorkspaceError(
                f"files were written past Workspace.shard or .tree in {self.path}: {', '.join(stray[:5])}"
            )
        return dict(sorted(files.items()))

    def totals(self) -> tuple[int, float, dict[str, Any]]:
        """Rows (metric `rows`, else the sum of the shards' rows), seconds of earlier attempts, metrics."""
        self._refresh()
        rows = self._metrics.get("rows", sum(int(facts.get("rows", 0)) for facts in self._facts.values()))
        return int(rows), self._earlier_s, dict(self._metrics)

    def restore(self, files: dict[str, dict[str, Any]]) -> None:
        """Write records out of a manifest's files, for a folder whose journal is lost."""
        for name, facts in files.items():
            own = {key: value for key, value in facts.items() if key not in ("bytes", "blake2b")}
            record = {"bytes": facts["bytes"], "blake2b": facts["blake2b"]}
            self._append({"shard": name, "files": {name: record}, "facts": own})

    def drop_scratch(self) -> None:
        """Delete the private state; the stage is about to be sealed."""
        shutil.rmtree(self.path / "scratch", ignore_errors=True)

    def _require_folder(self) -> None:
        if not self.path.is_dir():
            raise WorkspaceError(
                f"the folder {self.path} vanished while its stage was being written; run the same command again"
            )

    def _stray(self, known: set[str]) -> list[Path]:
        stray = []
        for folder, folders, names in os.walk(self.path):
            here = Path(folder)
            if here == self.path:
                folders[:] = [name for name in folders if name not in PRIVATE_FOLDERS]
                names = [name for name in names if name not in PRIVATE_FILES]
            stray += [here / name for name in names if (here / name).relative_to(self.path).as_posix() not in known]
        return stray

    def _whole(self, file: str, size: int) -> bool:
        try:
            return (self.path / file).stat().st_size == size
        except OSError:
            return False

    def _forget(self, name: str) -> None:
        self._refresh()
        if name in self._shards:  # a crash while it is replaced must not leave a record of the old bytes
            self._append({"forget": name})

    def _append(self, record: dict[str, Any]) -> None:
        # The leading newline ends a line that a crash or a full disk may have torn.
        line = b"\n" + json.dumps({**record, "time": time.time()}, allow_nan=False).encode() + b"\n"
        with disk_errors(self.path):
            self._require_folder()
            handle = os.open(self.path / JOURNAL, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                written = os.write(handle, line)
                if written < len(line):
                    os.write(handle, line[written:])  # raises with the reason
                os.fsync(handle)
            finally:
                os.close(handle)

    def _refresh(self) -> None:
        try:
            with open(self.path / JOURNAL, "rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return
        complete = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete)
        for line in complete.split(b"\n"):
            try:
                record = json.loads(line)
            except ValueError:
                continue  # empty or torn
            self._apply(record)

    def _apply(self, record: dict[str, Any]) -> None:
        if "attempt" in record:
            if self._attempt is not None:
                self._earlier_s += self._attempt[1] - self._attempt[0]
            self._attempt = (record["time"], record["time"])
        elif self._attempt is not None:
            self._attempt = (self._attempt[0], max(self._attempt[0], record["time"]))
        if "shard" in record:
            self._shards[record["shard"]] = record["files"]
            self._facts[record["shard"]] = dict(record["facts"])
        elif "of" in record:
            self._facts.setdefault(record["of"], {}).update(record["facts"])
        elif "forget" in record:
            self._shards.pop(record["forget"], None)
            self._facts.pop(record["forget"], None)
        elif "metrics" in record:
            self._metrics.update(record["metrics"])
        elif "expected" in record:
            self._expected = record["expected"]
