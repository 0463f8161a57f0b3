"""The index arithmetic of block drafting: anchors, blocks, and the slots that a loss depends on.

Everything is NumPy on the host. Prediction n (0-based) of a block at anchor a is the token at a + 1 + n; the target's
distribution that it should match stands at a + n, and so does the token before it. Only slots with a weight get a row
of the head; sizes are rounded up to a multiple, because matrix kernels are generated for each new shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from torchspec_core.drafters.blocks import BlockLayout


@dataclass(frozen=True)
class BlockIndex:
    """Indices of one packed batch; R = slots with a weight, rounded up with slots of weight 0.

    Attributes:
        layout: documents and blocks.
        anchor: [M] int64, packed index of each block's anchor.
        slot: [R] int64, index of the slot in the flattened [M, P] predictions.
        place: [R] int64, n of the prediction, 0..P-1.
        label: [R] int64, packed index of the predicted token.
        previous: [R] int64, packed index of the token (and of the target's state) before it.
        weight: [R] fp64, exp(-n / gamma) where the predicted token is supervised.
        chain: [R] fp64, the same where all predicted tokens up to it are supervised.
    """

    layout: BlockLayout
    anchor: Tensor
    slot: Tensor
    place: Tensor
    label: Tensor
    previous: Tensor
    weight: Tensor
    chain: Tensor


def candidate_anchors(loss_mask: np.ndarray) -> np.ndarray:
    """Positions of one document that may be anchors, ascending: their token and the next one are supervised."""
    return np.flatnonzero(loss_mask[:-1] & loss_mask[1:])


def _round_up(value: int, multiple: int) -> int:
    return max(multiple, -(-value // multiple) * multiple)


def block_index(
    lengths: Sequence[int],
    loss_mask: np.ndarray,
    anchors: Sequence[np.ndarray],
    size: int,
    predictions: int,
    gamma: float,
    row_multiple: int = 1,
    block_multiple: int = 1,
    width_multiple: int = 1,
) -> BlockIndex:
    """Make the indices of a packed batch.

    Args:
        lengths: tokens of each document, in packed order.
        loss_mask: [sum(lengths)] boolean.
        anchors: ascending positions in each document; fewer arrays than documents = none in the last ones.
        size, predictions: slots of a block, and those that predict (the last ones).
        gamma: prediction n weighs exp(-n / gamma).
        row_multiple, block_multiple, width_multiple: slots with a weight, blocks, and the sides of the attention
            matrices are filled up to multiples; filler blocks stand at the first token of the last document.
    """
    length = np.asarray(lengths, dtype=np.int64)
    total = int(length.sum())
    document = np.repeat(np.arange(len(length)), length)
    start = np.cumsum(length) - length
    counts = np.zeros(len(length), dtype=np.int64)
    counts[: len(anchors)] = [len(part) for part in anchors]
    filler = _round_up(int(counts.sum()), block_multiple) - int(counts.sum())
    position = np.concatenate([*anchors, np.zeros(filler, dtype=np.int64)]).astype(np.int64)
    counts[-1] += filler
    of_block = np.repeat(np.arange(len(length)), counts)
    real = np.arange(len(position)) < len(position) - filler
    rank = np.arange(len(position)) - (np.cumsum(counts) - counts)[of_block]
    anchor = start[of_block] + position

    place = np.arange(predictions)
    label = anchor[:, None] + 1 + place
    inside = position[:, None] + 1 + place < length[of_block][:, None]
    supervised = np.asarray(loss_mask, dtype=bool)[np.minimum(label, total - 1)] & inside & real[:, None]
    decay = np.exp(-place / gamma)
    weight, chain = supervised * decay, np.logical_and.accumulate(supervised, axis=1) * decay
    slot = np.flatnonzero(weight)
    spare = _round_up(len(slot), row_multiple) - len(slot)

    def rows(values: np.ndarray, dtype: type = np.int64) -> Tensor:
        return torch.from_numpy(np.pad(values.reshape(-1)[slot].astype(dtype), (0, spare)))

    layout = BlockLayout(
        document=torch.from_numpy(document),
        position=torch.from_numpy(np.arange(total) - start[document]),
        block_document=torch.from_numpy(of_block),
        anchor=torch.from_numpy(position),
        rank=torch.from_numpy(rank),
        size=size,
        documents=len(length),
        width=_round_up(int(length.max()), width_multiple),
        drafted=_round_up(int(counts.max()), min(block_multiple, width_multiple)),
    )
    return BlockIndex(
        layout=layout,
        anchor=torch.from_numpy(anchor),
        slot=torch.from_numpy(np.pad(slot, (0, spare))),
        place=rows(np.broadcast_to(place, label.shape)),
        label=rows(label),
        previous=rows(label - 1),
        weight=rows(weight, np.float64),
        chain=rows(chain, np.float64),
    )
