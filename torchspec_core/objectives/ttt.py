"""The index arithmetic of training-time test: from lengths and loss masks to rows, depths and weights.

Everything here is NumPy on the host and depends on lengths and masks only, so a batch's indices can be made ahead of
time. A row takes part only if a loss depends on it: attention queries, MLP, head, softmax and teacher are never
computed for other rows (a third of the tokens in a chat set). Sizes are rounded up to a multiple, because matrix
kernels are generated for each new shape: a few shapes are met thousands of times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from torchspec_core.drafters.ttt import TTTLayout, plan_tiles
from torchspec_core.objectives.alignment import MaskAlignment, teacher_weight


@dataclass(frozen=True)
class TTTIndex:
    """Indices of one packed batch.

    Attributes:
        layout: documents, positions, drafted rows.
        teacher: [P] int64, packed positions whose target distribution teaches.
        student: [D, P] int64, index into the drafted rows of the row that teacher p teaches at depth d (0 where there
            is none).
        weight: [D, P] fp32, 1 where a row is taught, else 0.
        next_token: [D] tensors of int64: packed index of the token that enters with each row at each depth (N at
            depth 0, then R); -1 past the end of the document.
    """

    layout: TTTLayout
    teacher: Tensor
    student: Tensor
    weight: Tensor
    next_token: tuple[Tensor, ...]


def _round_up(value: int, multiple: int) -> int:
    return max(multiple, -(-value // multiple) * multiple)


def ttt_index(
    lengths: Sequence[int],
    loss_mask: np.ndarray,
    depths: int,
    alignment: MaskAlignment = "predicted",
    row_multiple: int = 1,
    width_multiple: int = 1,
    rows: np.ndarray | None = None,
) -> TTTIndex:
    """Make the indices of a packed batch.

    Args:
        lengths: tokens of each document, in packed order.
        loss_mask: [sum(lengths)] boolean.
        depths: drafted depths.
        alignment: which tokens supervise.
        row_multiple: drafted rows and teacher positions are filled up to a multiple of this (rows with weight 0).
        width_multiple: the same for the sides of the attention matrices.
        rows: drafted rows to use instead of all that lead to a loss (anchors); ascending packed indices. A teacher
            position that teaches none of them is left out.
    """
    length = np.asarray(lengths, dtype=np.int64)
    total = int(length.sum())
    document = np.repeat(np.arange(len(length)), length)
    start = np.repeat(np.cumsum(length) - length, length)
    position = np.arange(total) - start
    teacher, taught, valid = _pairs(loss_mask, document, start, depths, alignment)
    chosen, anchored = (np.unique(taught[valid]), False) if rows is None else (rows, True)
    rows = _fill(chosen, total, row_multiple)
    place = np.full(total, -1, dtype=np.int64)
    place[chosen] = np.searchsorted(rows, chosen)  # rows that fill up are not taught
    student = np.where(valid, place[np.where(valid, taught, 0)], -1)
    if anchored:
        used = (student >= 0).any(axis=0)
        teacher, student = teacher[used], student[:, used]
    filler = _round_up(len(teacher), row_multiple) - len(teacher)
    teacher = np.pad(teacher, (0, filler))
    student = np.pad(student, ((0, 0), (0, filler)), constant_values=-1)
    counts = np.bincount(document[rows], minlength=len(length))
    rank = np.arange(len(rows)) - (np.cumsum(counts) - counts)[document[rows]]
    following = []
    for depth in range(depths):
        base = np.arange(total) if depth == 0 else rows
        inside = position[base] + 1 + depth < length[document[base]]
        following.append(torch.from_numpy(np.where(inside, base + 1 + depth, -1)))
    width, drafted = (_round_up(int(size), width_multiple) for size in (length.max(), counts.max()))
    reach = np.zeros(drafted, dtype=np.int64)
    np.maximum.at(reach, rank, position[rows])
    layout = TTTLayout(
        document=torch.from_numpy(document),
        position=torch.from_numpy(position),
        rows=torch.from_numpy(rows),
        rank=torch.from_numpy(rank),
        documents=len(length),
        width=width,
        drafted=drafted,
        tiles=plan_tiles(np.maximum.accumulate(reach).tolist(), width),
    )
    return TTTIndex(
        layout=layout,
        teacher=torch.from_numpy(teacher),
        student=torch.from_numpy(np.maximum(student, 0)),
        weight=torch.from_numpy((student >= 0).astype(np.float32)),
        next_token=tuple(following),
    )


def candidate_rows(
    lengths: Sequence[int], loss_mask: np.ndarray, depths: int, alignment: MaskAlignment = "predicted"
) -> list[np.ndarray]:
    """Packed indices of the rows that lead to a loss, ascending, one array a document: what `ttt_index` drafts."""
    length = np.asarray(lengths, dtype=np.int64)
    first = np.cumsum(length) - length
    _, taught, valid = _pairs(
        loss_mask, np.repeat(np.arange(len(length)), length), np.repeat(first, length), depths, alignment
    )
    rows = np.unique(taught[valid])
    return np.split(rows, np.searchsorted(rows, first[1:]))


def _pairs(
    loss_mask: np.ndarray, document: np.ndarray, start: np.ndarray, depths: int, alignment: MaskAlignment
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(teacher positions [P], the row that each teaches at each depth [D, P], whether there is one [D, P])."""
    teacher = np.flatnonzero(teacher_weight(np.asarray(loss_mask, dtype=bool), document, alignment))
    taught = teacher[None, :] - 1 - np.arange(depths)[:, None]
    return teacher, taught, taught >= start[teacher][None, :]


def _fill(rows: np.ndarray, total: int, multiple: int) -> np.ndarray:
    """Add unused rows until the count is a multiple, as far as there are any; never empty."""
    missing = min(_round_up(len(rows), multiple), total) - len(rows)
    if missing <= 0:
        return rows
    unused = np.setdiff1d(np.arange(total), rows, assume_unique=True)
    # Spread over all documents: the attention is laid out by the document with the most drafted rows.
    spread = unused[np.linspace(0, len(unused) - 1, missing).astype(np.int64)]
    return np.sort(np.concatenate((rows, spread)))
