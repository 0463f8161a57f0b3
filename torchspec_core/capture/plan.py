"""Which samples share a shard and a forward pass: a pure function of the lengths.

Samples are taken by descending length: padding is then a few percent, and too little memory shows in the first
seconds. Shards are cut by bytes (part of the stage's identity), forward passes by tokens inside a shard (a runtime
choice that does not move a sample to another shard).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from torchspec_core.errors import UserError


def length_order(lengths: np.ndarray) -> np.ndarray:
    """Row numbers by descending length; equal lengths keep their order."""
    return np.argsort(-lengths.astype(np.int64), kind="stable")


def shard_plan(lengths: np.ndarray, bytes_per_token: int, shard_bytes: int) -> list[np.ndarray]:
    """Row numbers of each shard: at most `shard_bytes` of states, at least one sample."""
    shards: list[np.ndarray] = []
    order = length_order(lengths)
    start, size = 0, 0
    for end, row in enumerate(order):
        grown = int(lengths[row]) * bytes_per_token
        if size and size + grown > shard_bytes:
            shards.append(order[start:end])
            start, size = end, 0
        size += grown
    if start < len(order):
        shards.append(order[start:])
    return shards


def token_batches(rows: np.ndarray, lengths: np.ndarray, token_budget: int) -> Iterator[np.ndarray]:
    """Cuts rows, given by descending length, into batches whose padded size is at most `token_budget` tokens."""
    start = 0
    while start < len(rows):
        longest = int(lengths[rows[start]])
        if longest > token_budget:
            raise UserError(
                f"capture.token_budget is {token_budget}, but a sample has {longest} tokens: raise it "
                f"to at least {longest}, "
                f"or lower data.max_length."
            )
        end = start + token_budget // max(longest, 1)
        yield rows[start:end]
        start = end
