"""`StageStore`: the one cache. Spec -> key -> sealed folder `<root>/<stage>/<slug>-<key12>/`.

`lookup` says hit or miss and why; `materialize` returns a hit or makes the entry under its lock, continuing whatever a
crashed attempt has left. Old entries are never guessed at: a key is equal or it is not. Maintenance (`ls`, `rm`, `gc`,
`adopt`, `verify`) takes the same locks and refuses what is in use.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchspec_core.errors import UserError
from torchspec_core.stages import explain as explaining
from torchspec_core.stages.disk import TEMPORARY, disk_errors, fsync_folder, remove_tree
from torchspec_core.stages.lock import BusyError, Holder, hold
from torchspec_core.stages.manifest import (
    MANIFEST,
    SPEC,
    Entry,
    check_files,
    find_damage,
    read_entry,
    read_manifest,
    read_spec,
    to_ref,
    write_manifest,
    write_spec,
)
from torchspec_core.stages.spec import SHORT_KEY, StageRef, StageSpec
from torchspec_core.stages.sweep import needed_keys
from torchspec_core.stages.workspace import JOURNAL, Workspace, is_private

__all__ = ["Entry", "Lookup", "Plan", "StageRef", "StageStore"]

LOCKS = ".locks"
log = logging.getLogger("torchspec.stages")


@dataclass(frozen=True)
class Lookup:
    """hit: the entry is there and whole. reason: one phrase. ref: set for a hit."""

    hit: bool
    reason: str
    ref: StageRef | None


@dataclass(frozen=True)
class Plan:
    """What a run would do for one stage. bytes and seconds: of the entry for a hit; for a miss those of the newest
    sealed entry of the stage, the best estimate there is (None without one). shards_kept: finished shards of a crashed
    attempt."""

    stage: str
    key: str
    path: Path
    hit: bool
    reason: str
    bytes: int | None
    seconds: float | None
    shards_kept: int


class StageStore:
    """The store below `root`, a local folder (made when it is first written to)."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        text = os.fspath(root)
        if text.startswith("file://"):
            text = text.removeprefix("file://")
        if "://" in text:
            raise UserError(
                f"The store {text} is not a local folder, and only local folders are supported; set run.store to one."
            )
        self.root = Path(text).absolute()

    def folder(self, spec: StageSpec) -> Path:
        """Where the entry is, or will be. An entry made under another slug is found by its key."""
        exact = self.root / spec.stage / spec.folder_name
        if exact.exists():
            return exact
        others = sorted((self.root / spec.stage).glob(f"*-{spec.key[:SHORT_KEY]}"))
        return others[0] if others else exact

    def lock_path(self, stage: str, key: str) -> Path:
        """The lock file of an entry."""
        return self.root / LOCKS / f"{stage}-{key}"

    def lookup(self, spec: StageSpec) -> Lookup:
        """Hit or miss, and why; touches nothing."""
        folder = self.folder(spec)
        if not folder.is_dir():
            return Lookup(False, "not made yet", None)
        self._check_ours(folder, spec)
        manifest = read_manifest(folder)
        if manifest is None:
            kept, expected = Workspace(folder).kept()
            if (folder / MANIFEST).exists():
                return Lookup(False, "its manifest is damaged", None)
            return Lookup(False, f"unfinished, {kept}{f' of {expected}' if expected else ''} shards are kept", None)
        if manifest["key"] != spec.key:
            return Lookup(False, "its manifest is of another key", None)
        damage = find_damage(folder, manifest)
        if damage is not None:
            return Lookup(False, damage, None)
        return Lookup(True, "same key", to_ref(spec.stage, folder, manifest, cached=True, reason="same key"))

    def materialize(
        self,
        spec: StageSpec,
        build: Callable[[Workspace], None],
        refresh: bool = False,
        wait_s: float | None = None,
        on_wait: Callable[[Holder], None] | None = None,
        runtime: Mapping[str, Any] | None = None,
    ) -> StageRef:
        """The sealed entry of `spec`: found, or made by `build` into a workspace that keeps the shards of crashed
        attempts.

        refresh: make it anew even when it is there. wait_s, on_wait: see `lock.hold`. runtime: goes into the manifest.
        Raises UserError (disk, permissions, busy, foreign folder) and whatever `build` raises.
        """
        if not refresh:
            found = self.lookup(spec)
            if found.ref is not None:
                return found.ref
        with hold(self.lock_path(spec.stage, spec.key), wait_s=wait_s, on_wait=on_wait) as lock_fd:
            found = self.lookup(spec)  # another run may have made it while we waited
            if found.ref is not None and not refresh:
                return found.ref
            folder = self.folder(spec)
            with disk_errors(folder):
                if refresh:
                    remove_tree(folder)
                self._open(folder, spec)
                workspace = Workspace(folder, (lock_fd,))
                self._unseal(folder, workspace)
                workspace.begin()
                start = time.monotonic()
                build(workspace)
                return self._seal(
                    spec, workspace, start, runtime or {}, "refresh asked for" if refresh else found.reason
                )

    def _seal(
        self,
        spec: StageSpec,
        workspace: Workspace,
        start: float,
        runtime: Mapping[str, Any],
        reason: str,
        adopted_from: str | None = None,
    ) -> StageRef:
        if not workspace.path.is_dir():
            raise UserError(
                f"The folder {workspace.path} vanished while its stage was being written; run the same command again."
            )
        reader = Workspace(workspace.path)  # a child has written the records, not this object
        files = reader.sealed_files()
        reader.drop_scratch()
        rows, earlier_s, metrics = reader.totals()
        manifest = write_manifest(
            workspace.path,
            spec,
            files,
            rows=rows,
            seconds=earlier_s + time.monotonic() - start,
            metrics=metrics,
            runtime=runtime,
            adopted_from=adopted_from,
        )
        return to_ref(spec.stage, workspace.path, manifest, cached=False, reason=reason)

    def _open(self, folder: Path, spec: StageSpec) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / SPEC).exists():
            write_spec(folder, spec)
            fsync_folder(folder.parent)

    def _unseal(self, folder: Path, workspace: Workspace) -> None:
        if not (folder / MANIFEST).exists():
            return
        manifest = read_manifest(folder)
        if not (folder / JOURNAL).exists() and manifest is not None:
            workspace.restore(manifest["files"])
        (folder / MANIFEST).unlink()
        fsync_folder(folder)

    def _check_ours(self, folder: Path, spec: StageSpec) -> None:
        known = read_spec(folder)
        if known is not None and known[1] == spec.key:
            return
        if known is not None:
            raise UserError(
                f"The folder {folder} belongs to another key ({known[1]} instead of {spec.key}), a collision of names; "
                "move it away or set run.store to another folder."
            )
        if any(not path.name.startswith(TEMPORARY) for path in folder.iterdir()):
            raise UserError(
                f"The folder {folder} was not made by this store (no readable {SPEC}); move it away and try again."
            )

    @contextmanager
    def reading(self, folder: Path) -> Iterator[int]:
        """Hold an entry against removal while it is read; yields a descriptor that children may inherit.

        UserError when the folder is not a sealed entry (any more).
        """
        known = read_spec(folder)
        if known is None:
            raise UserError(f"The input {folder} is not a stage of this store; run the stages before it first.")
        with hold(self.lock_path(known[0].stage, known[1]), shared=True) as lock_fd:
            if read_manifest(folder) is None:
                raise UserError(f"The input {folder} is not finished; run the stages before it first.")
            yield lock_fd

    def plan(self, spec: StageSpec) -> Plan:
        """What `materialize` would do, for a dry run."""
        found = self.lookup(spec)
        folder = self.folder(spec)
        if found.ref is not None:
            return Plan(spec.stage, spec.key, folder, True, found.reason, found.ref.bytes, found.ref.seconds, 0)
        sealed = [entry for entry in self.ls(spec.stage) if entry.sealed]
        newest = max(sealed, key=lambda entry: entry.created, default=None)
        kept = Workspace(folder).kept()[0] if folder.is_dir() else 0
        size, seconds = (newest.bytes, newest.seconds) if newest is not None else (None, None)
        return Plan(spec.stage, spec.key, folder, False, found.reason, size, seconds, kept)

    def explain(self, spec: StageSpec, known: Iterable[StageSpec] = ()) -> explaining.Explanation:
        """Hit, or the nearest entry of the stage and what differs from it, followed through the inputs.

        known: specs of the other stages of this run, so that an input that is not made yet can be compared too.
        """
        found = self.lookup(spec)
        if found.hit:
            return explaining.Explanation(spec.stage, True, found.reason, None, ())
        return explaining.explain_miss(spec, found.reason, self.ls(), known)

    def ls(self, stage: str | None = None) -> list[Entry]:
        """All entries (of one stage), sealed or not, oldest first."""
        entries = [
            entry
            for folder in sorted(self.root.glob(f"{stage or '*'}/*/"))
            if not folder.parent.name.startswith(".") and (entry := read_entry(folder)) is not None
        ]
        return sorted(entries, key=lambda entry: entry.created)

    def find(self, stage: str, key: str) -> Entry:
        """The entry of a stage whose key, or folder name, begins with `key`; UserError unless there is exactly one."""
        found = [entry for entry in self.ls(stage) if entry.key.startswith(key) or entry.path.name.startswith(key)]
        if len(found) != 1:
            many = f"{len(found)} entries" if found else "no entry"
            raise UserError(
                f"There is {many} of {stage} that begins with {key!r} in {self.root}; see `torchspec cache ls`."
            )
        return found[0]

    def rm(self, stage: str, key: str) -> Entry:
        """Delete the one entry of `stage` that `key` names (see `find`); BusyError when a run is writing or reading
        it."""
        entry = self.find(stage, key)
        self._delete(entry)
        return entry

    def _delete(self, entry: Entry) -> None:
        lock = self.lock_path(entry.stage, entry.key)
        with hold(lock, wait_s=0), disk_errors(entry.path):
            (entry.path / MANIFEST).unlink(missing_ok=True)  # first, so that a crash leaves an unfinished entry
            remove_tree(entry.path)
            lock.unlink(missing_ok=True)

    def gc(self, keep: int = 3, dry_run: bool = True, last: Sequence[str] | None = None) -> list[Entry]:
        """Delete what the newest `keep` entries of the last stages do not need; by default only say what would go.

        last: names of the last stages (default: stages that are nobody's input here). Entries made after the newest
        kept one stay, with what they need: a run under way or interrupted. What is in use stays, with a warning in
        the log.
        """
        if keep < 1:
            raise UserError(f"gc keeps at least one result, not {keep}; `torchspec cache rm` deletes single entries.")
        entries = self.ls()
        needed = needed_keys(entries, keep, last)
        removed = []
        for entry in entries:
            if entry.key in needed:
                continue
            try:
                if dry_run:
                    with hold(self.lock_path(entry.stage, entry.key), wait_s=0):
                        pass
                else:
                    self._delete(entry)
                removed.append(entry)
            except BusyError as error:
                log.warning("kept %s: %s", entry.path, error)
        return removed

    def verify(self, entry: Entry | None = None, discard: bool = False) -> list[str]:
        """Re-hash the files of one sealed entry, or of all; one line per problem.

        discard: delete the files that are not what was sealed, so that the next run makes them, and only them, again.
        BusyError when a run reads or writes such an entry.
        """
        problems = []
        every = [each for each in self.ls() if each.sealed or (each.path / MANIFEST).exists()]
        for each in [entry] if entry is not None else every:
            manifest = read_manifest(each.path)
            if manifest is None:
                problems.append(f"{each.path}: it has no readable manifest")
                continue
            damaged = check_files(each.path, manifest)
            problems += [f"{each.path}: {name} {problem}" for name, problem in damaged.items()]
            if discard and damaged:
                with hold(self.lock_path(each.stage, each.key), wait_s=0), disk_errors(each.path):
                    for name in damaged:
                        (each.path / name).unlink(missing_ok=True)
        return problems

    def adopt(self, path: Path, spec: StageSpec, metrics: Mapping[str, float | int | str] | None = None) -> StageRef:
        """Take files made elsewhere as the output of `spec`: copied, hashed, sealed, the source's path in the
        manifest. A stage's folder out of another store keeps its rows, metrics and facts; it must be whole."""
        source = Path(path)
        manifest = read_manifest(source)
        if manifest is not None and (damage := check_files(source, manifest)):
            name, problem = next(iter(damage.items()))
            raise UserError(f"The folder {source} is damaged: {name} {problem}; adopt a whole one.")
        known: Mapping[str, Mapping[str, Any]] = manifest["files"] if manifest is not None else {}
        every = (item for item in source.rglob("*") if item.is_file()) if source.is_dir() else ()
        files = sorted(item for item in every if not is_private(item.relative_to(source).as_posix()))
        if not files:
            raise UserError(
                f"The folder {source} does not exist or holds no files; name a folder that holds the stage's output."
            )
        with hold(self.lock_path(spec.stage, spec.key), wait_s=0):
            found = self.lookup(spec)
            if found.hit:
                raise UserError(
                    f"The entry {self.folder(spec)} is already there; remove it first to adopt another folder."
                )
            folder, start = self.folder(spec), time.monotonic()
            with disk_errors(folder):
                self._open(folder, spec)
                workspace = Workspace(folder)
                self._unseal(folder, workspace)
                workspace.begin()
                for item in files:
                    name = item.relative_to(source).as_posix()
                    own = {key: value for key, value in known.get(name, {}).items() if key not in ("bytes", "blake2b")}
                    with workspace.shard(name) as draft:
                        shutil.copyfile(item, draft)
                        workspace.facts(name, **own)
                if manifest is not None:
                    workspace.record(**{**manifest["metrics"], "rows": manifest["rows"]})
                workspace.record(**(metrics or {}))
                return self._seal(spec, workspace, start, {}, f"adopted from {source}", os.fspath(source.absolute()))
