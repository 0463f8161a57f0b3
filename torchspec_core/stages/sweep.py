"""Garbage collection of a store: mark from the newest results, sweep the rest under their locks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchspec_core.errors import UserError
from torchspec_core.stages.lock import Busy, hold
from torchspec_core.stages.manifest import Entry

if TYPE_CHECKING:
    from torchspec_core.stages.store import StageStore


@dataclass(frozen=True)
class Sweep:
    """removed: entries that went (or would go, in a dry run); kept; busy: would go but is in use; bytes: of `removed`."""

    removed: tuple[Entry, ...]
    kept: tuple[Entry, ...]
    busy: tuple[Entry, ...]
    bytes: int
    dry_run: bool


def mark(entries: Sequence[Entry], keep: int, last: Sequence[str] | None) -> set[str]:
    """Keys that stay: the roots (see `StageStore.gc`) and everything they were made from."""
    needed = {name for entry in entries for name in entry.spec.inputs}
    last_stages = set(last) if last is not None else {entry.stage for entry in entries} - needed
    roots: list[Entry] = []
    for stage in last_stages:
        sealed = sorted((e for e in entries if e.stage == stage and e.sealed), key=lambda e: e.created)
        roots += sealed[-keep:]
    newest = max((entry.created for entry in roots), default=0.0)
    roots += [entry for entry in entries if entry.created > newest]
    by_key = {entry.key: entry for entry in entries}
    kept: set[str] = set()
    frontier = [entry.key for entry in roots]
    while frontier:
        key = frontier.pop()
        if key not in kept:
            kept.add(key)
            frontier += by_key[key].spec.inputs.values() if key in by_key else ()
    return kept


def sweep(store: StageStore, *, keep: int, dry_run: bool, last: Sequence[str] | None) -> Sweep:
    """See `StageStore.gc`."""
    if keep < 1:
        raise UserError(f"gc keeps at least one result, not {keep}; `torchspec cache rm` deletes single entries.")
    entries = store.ls()
    kept = mark(entries, keep, last)
    removed, busy = [], []
    for entry in entries:
        if entry.key in kept:
            continue
        try:
            if dry_run:
                with hold(store.lock_path(entry.stage, entry.key), wait_s=0):
                    pass
            else:
                store.rm(entry)
            removed.append(entry)
        except Busy:
            busy.append(entry)
    return Sweep(
        tuple(removed), tuple(entry for entry in entries if entry.key in kept), tuple(busy),
        sum(entry.bytes for entry in removed), dry_run,
    )
