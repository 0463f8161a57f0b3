"""Loss masks as run lengths: `[zeros, ones, zeros, ...]`.

A conversation of a few hundred tokens has a handful of runs, so the mask costs a few integers instead of a value a
token. The first run counts zeros and may be 0; the others are positive; they add up to the number of tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray


def merge(pieces: Iterable[tuple[int, bool]]) -> list[int]:
    """Run lengths of consecutive pieces (length, supervised); empty pieces vanish, equal neighbours join."""
    runs = [0]
    value = False
    for length, supervised in pieces:
        if not length:
            continue
        if supervised == value:
            runs[-1] += length
        else:
            runs.append(length)
            value = supervised
    return runs


def encode(mask: NDArray[np.bool_]) -> list[int]:
    """Run lengths of a mask [T]."""
    edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0)).tolist()
    return [int(n) for n in np.diff([0, *edges, len(mask)])]


def decode(runs: Sequence[int] | NDArray[np.int32]) -> NDArray[np.bool_]:
    """The mask [T] of run lengths."""
    lengths = np.asarray(runs, dtype=np.int64)
    return np.repeat(np.arange(len(lengths)) % 2 == 1, lengths)


def truncate(runs: Sequence[int], length: int) -> list[int]:
    """Run lengths of the first `length` tokens."""
    kept: list[int] = []
    for run in runs:
        if length <= 0 and kept:
            break
        kept.append(min(run, length))
        length -= kept[-1]
    return kept


def supervised(runs: Sequence[int]) -> int:
    """Number of ones."""
    return int(sum(runs[1::2]))
