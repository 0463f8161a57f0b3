"""Samples and packed batches: documents laid end to end, without padding between them.

The packed length is rounded up with one empty document, because matrix kernels are generated for each new shape; that
is the only padding, and `padding` counts it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

ROW_MULTIPLE = 64
WIDTH_MULTIPLE = 32

IndexBuilder = Callable[[Sequence[int], np.ndarray, Sequence[str], int, int], Any]
"""(lengths of the packed documents, their loss mask [N], ids of the samples, epoch, row multiple) -> a kind's index."""


@dataclass(frozen=True)
class Sample:
    """One conversation: ids [T] int, mask [T] bool, aux: one [T, H_t] tensor a layer, last: [T, H_t] before the final
    norm; key: the sample's id."""

    ids: np.ndarray
    mask: np.ndarray
    aux: tuple[Tensor, ...]
    last: Tensor
    key: str = ""


class SampleSource(Protocol):
    """Random access to samples."""

    @property
    def lengths(self) -> np.ndarray:
        """[samples] tokens."""
        ...

    def get(self, i: int) -> Sample:
        """Sample i."""
        ...


@dataclass(frozen=True)
class PackedBatch:
    """ids [N] int64, aux [N, A * H_t], last [N, H_t], index: the kind's own; tokens: real ones; supervised: loss-mask
    tokens."""

    ids: Tensor
    aux: Tensor
    last: Tensor
    index: Any
    tokens: int
    supervised: int

    @property
    def padding(self) -> float:
        """Share of the packed rows that hold no token."""
        return 1.0 - self.tokens / len(self.ids)


def pack(
    samples: Sequence[Sample],
    index: IndexBuilder,
    dtype: torch.dtype,
    epoch: int = 0,
    row_multiple: int = ROW_MULTIPLE,
) -> PackedBatch:
    """Lay samples end to end; states are cast to `dtype` while they are copied."""
    lengths = [len(sample.ids) for sample in samples]
    tokens = sum(lengths)
    filler = -tokens % row_multiple
    if filler:
        lengths.append(filler)
    ids, mask = np.zeros(tokens + filler, dtype=np.int64), np.zeros(tokens + filler, dtype=bool)
    width, layers = samples[0].last.shape[1], len(samples[0].aux)
    aux, last = (
        torch.zeros(tokens + filler, layers * width, dtype=dtype),
        torch.zeros(tokens + filler, width, dtype=dtype),
    )
    start = 0
    for sample in samples:
        end = start + len(sample.ids)
        ids[start:end], mask[start:end] = sample.ids, sample.mask
        for layer, state in enumerate(sample.aux):
            aux[start:end, layer * width : (layer + 1) * width].copy_(state)
        last[start:end].copy_(sample.last)
        start = end
    made = index(lengths, mask, [sample.key for sample in samples], epoch, row_multiple)
    return PackedBatch(torch.from_numpy(ids), aux, last, made, tokens, int(mask.sum()))
