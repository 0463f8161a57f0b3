"""Copy, look at, mend and clear away sets of states, between any two stores.

A copy moves one shard at a time, reads each one back and compares digests, and writes the index last: without it there
is no set. An interrupted copy goes on at the first shard that is not there with equal bytes.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np

from torchspec_core.errors import UserError
from torchspec_core.stages.manifest import MANIFEST
from torchspec_core.store.files import INDEX, Problem
from torchspec_core.store.protocol import StateStore, StoreError, get
from torchspec_core.store.remote import RemoteStates

_log = logging.getLogger("torchspec.store")


@dataclass(frozen=True)
class Copied:
    """What a copy did: files and bytes that were moved, and files that were there with equal bytes."""

    files: int
    bytes: int
    kept: int


def open_set(store: StateStore) -> RemoteStates:
    """The set of a store, nothing of it kept in memory."""
    return RemoteStates(store, "never", 0)


def _read(store: StateStore, key: str, size: int) -> np.ndarray:
    data = store.buffer(size)
    store.get_into(key, data)
    return data


def _digest(data: np.ndarray) -> bytes:
    return hashlib.blake2b(data.data, digest_size=16).digest()


def copy_set(
    source: StateStore, target: StateStore, report: Callable[[int, int, str], None] = lambda done, total, name: None
) -> Copied:
    """Copy the set of `source` to `target`; see the module's docstring.

    Args:
        report: called with (bytes done, bytes in all, file) after each file.

    Raises:
        UserError: no set at the source.
        StoreError: a store fails, or gives back other bytes than it was given.
    """
    files = open_set(source).files
    index = get(source, INDEX)
    total, done, moved, kept = sum(files.values()), 0, [], 0
    if target.size(INDEX) is not None and get(target, INDEX) != index:
        raise UserError(f"{target.url} holds another set of states: copy to another place, or delete that one first.")
    for name, size in files.items():
        data = _read(source, name, size)
        wanted = _digest(data)
        if target.size(name) == size and _digest(_read(target, name, size)) == wanted:
            kept += 1
        else:
            target.put(name, data)
            if _digest(_read(target, name, size)) != wanted:
                raise StoreError(f"{target.url} gives back other bytes of {name} than were written: look at that disk.")
            moved.append(size)
        done += size
        report(done, total, name)
    if source.size(MANIFEST) is not None:
        target.put(MANIFEST, get(source, MANIFEST))
    target.put(INDEX, index)
    return Copied(len(moved), sum(moved), kept)


def stat_set(store: StateStore) -> dict[str, int | str]:
    """Facts of a set: samples, tokens, layers, width, type, files, bytes, bytes a token."""
    states = open_set(store)
    return {
        "samples": len(states),
        "tokens": int(states.lengths.sum()),
        "layers": ", ".join(map(str, states.layers)),
        "hidden_size": states.hidden_size,
        "dtype": states.layout.dtype,
        "files": len(states.files),
        "bytes": states.nbytes,
        "bytes_per_token": states.layout.bytes_per_token,
    }


def repair_set(store: StateStore, good: StateStore | None = None) -> tuple[list[Problem], list[str]]:
    """(what was wrong, names of the files that were mended from the set of `good`)."""
    problems = open_set(store).verify()
    broken = sorted({problem.shard for problem in problems})
    if good is None:
        return problems, []
    files = open_set(good).files
    if get(good, INDEX) != get(store, INDEX):
        raise UserError(f"{good.url} holds another set than {store.url}: it cannot mend it.")
    bad = {problem.shard for problem in open_set(good).verify()}
    mended = [name for name in broken if name not in bad]
    for name in mended:
        store.put(name, _read(good, name, files[name]))
        _log.info("%s: %s written again", store.url, name)
    return problems, mended


def unreachable(store: StateStore, reachable: Collection[str]) -> dict[str, tuple[int, list[str]]]:
    """First word of the keys -> (bytes, keys) of everything in the store that `reachable` does not name."""
    found: dict[str, tuple[int, list[str]]] = {}
    for key, size in store.list():
        name, slash, _ = key.partition("/")
        if slash and name not in reachable:
            count, keys = found.get(name, (0, []))
            found[name] = (count + size, [*keys, key])
    return found


def delete_keys(store: StateStore, keys: Collection[str]) -> int:
    """Remove objects, indices first, so that no half of a set looks whole; how many there were."""
    ordered = sorted(keys, key=lambda key: (not key.endswith(INDEX), key))
    return sum(store.delete(key) for key in ordered)


