"""`StateStore`: what every place for hidden states in transit can do, and the errors it raises.

An object is a key and some bytes. Writing replaces the object as a whole: a reader sees the old bytes or the new ones,
a writer that dies leaves the old ones (Mooncake excepted, which replaces an object of equal size in place). Whoever
writes needs no lock, since keys carry what the bytes depend on. Every call ends by its deadline.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from torchspec_core.errors import UserError

Buffer = Any
"""Anything with the buffer protocol: bytes, memoryview, a NumPy array; C-contiguous."""

_KEY = re.compile(r"(?:[A-Za-z0-9_=-][A-Za-z0-9._=-]*/)*[A-Za-z0-9_=-][A-Za-z0-9._=-]*")


class StoreError(UserError):
    """A store that cannot do what was asked; one sentence with the place, the reason and the remedy."""


class MissingObjectError(StoreError):
    """There is no object of this key."""


class StoreFullError(StoreError):
    """No room for the object; nothing of it was kept."""


class StoreUnavailableError(StoreError):
    """The server did not answer before the deadline, after several tries."""


@dataclass(frozen=True)
class StoreStats:
    """What lies below a prefix."""

    objects: int
    bytes: int


class StateStore(Protocol):
    """Objects by key. Keys are words of letters, digits and `._=-`, joined by `/`; an object has one byte at least."""

    @property
    def url(self) -> str:
        """Where it is, as `open_store` takes it; holds no secret."""
        ...

    def put(self, key: str, *parts: Buffer) -> None:
        """Write an object of the bytes of all `parts`, replacing one that is there.

        Raises:
            StoreFullError: no room.
            StoreUnavailableError: no answer before the deadline.
        """
        ...

    def get_into(self, key: str, out: Buffer, start: int = 0) -> None:
        """Fill `out` with the object's bytes from `start` on.

        Raises:
            MissingObjectError: there is no such object.
            StoreError: the object ends before `out` is full.
            StoreUnavailableError: no answer before the deadline.
        """
        ...

    def size(self, key: str) -> int | None:
        """Bytes of the object, None if there is none."""
        ...

    def delete(self, key: str) -> bool:
        """Remove the object; whether there was one."""
        ...

    def list(self, prefix: str = "") -> Iterator[tuple[str, int]]:
        """(key, bytes) of every object whose key starts with `prefix`, in the order of the keys."""
        ...

    def buffer(self, nbytes: int) -> np.ndarray:
        """[nbytes] uint8, not initialised, in memory from which (and into which) this store moves bytes without a
        copy."""
        ...

    def close(self) -> None:
        """Let go of connections; the objects stay where the backend keeps any."""
        ...


def check_key(key: str) -> str:
    """The key; ValueError for one that not every backend takes."""
    if not _KEY.fullmatch(key) or len(key) > 512:
        raise ValueError(f"{key!r} cannot be the key of a stored object")
    return key


def as_bytes(part: Buffer) -> memoryview:
    """A flat view of the bytes of anything with the buffer protocol."""
    view = memoryview(part)
    return view if view.ndim == 1 and view.format == "B" else view.cast("B")


def joined(key: str, parts: tuple[Buffer, ...]) -> tuple[list[memoryview], int]:
    """(views, their bytes together) of what is to be written under `key`; ValueError for nothing at all."""
    views = [as_bytes(part) for part in parts]
    total = sum(view.nbytes for view in views)
    if not total:
        raise ValueError(f"{key}: an object without bytes cannot be stored")
    return views, total


def get(store: StateStore, key: str) -> bytes:
    """A whole object, for small ones."""
    size = store.size(key)
    if size is None:
        raise MissingObjectError(f"{store.url} has no object {key}.")
    out = bytearray(size)
    store.get_into(key, out)
    return bytes(out)


def stats(store: StateStore, prefix: str = "") -> StoreStats:
    """Objects and bytes below `prefix`."""
    sizes = [size for _, size in store.list(prefix)]
    return StoreStats(len(sizes), sum(sizes))
