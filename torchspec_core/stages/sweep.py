"""Garbage collection of a store: which entries the newest results still need."""

from __future__ import annotations

from collections.abc import Sequence

from torchspec_core.stages.manifest import Entry


def needed_keys(entries: Sequence[Entry], keep: int, last: Sequence[str] | None) -> set[str]:
    """Keys that stay: the newest `keep` sealed entries of each last stage, every entry made after the newest of those,
    and everything they were made from. last: names (default: stages that are nobody's input among `entries`)."""
    used = {name for entry in entries for name in entry.spec.inputs}
    last_stages = set(last) if last is not None else {entry.stage for entry in entries} - used
    roots: list[Entry] = []
    for stage in last_stages:
        roots += sorted((e for e in entries if e.stage == stage and e.sealed), key=lambda e: e.created)[-keep:]
    newest = max((entry.created for entry in roots), default="")
    roots += [entry for entry in entries if entry.created > newest]
    by_key = {entry.key: entry for entry in entries}
    needed: set[str] = set()
    frontier = [entry.key for entry in roots]
    while frontier:
        key = frontier.pop()
        if key not in needed:
            needed.add(key)
            frontier += by_key[key].spec.inputs.values() if key in by_key else ()
    return needed
