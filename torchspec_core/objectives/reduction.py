"""The one place where summed losses become a mean.

Every objective weighs its rows; a row's *share* is its weight over a denominator, and the loss is the sum of share x
term. What is no row's weight is no one's denominator either: denominators are clamped, so a batch, a depth or a
document without supervision gives zero and not NaN.

- `supervised`: over the weights of the batch; every supervised token counts the same.
- `per_sequence`: over the weights of the row's document, then over the documents that have any; every document counts
  the same, however long it is.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Normalisation = Literal["supervised", "per_sequence"]
_LEAST = 1e-9


def shares(weight: Tensor, document: Tensor, documents: int, normalisation: Normalisation = "supervised") -> Tensor:
    """Share of each row in the loss; along the last axis they add up to 1, or to 0 where no row has a weight.

    Args:
        weight: [..., R] >= 0; each leading place is reduced by itself.
        document: [R] int64 of each row, below `documents`.
    """
    if normalisation == "supervised":
        return weight / weight.sum(dim=-1, keepdim=True).clamp(min=_LEAST)
    totals = weight.new_zeros(*weight.shape[:-1], documents).index_add(-1, document, weight)
    supervised = (totals > 0).sum(dim=-1, keepdim=True).clamp(min=1)
    return weight / (totals.index_select(-1, document).clamp(min=_LEAST) * supervised)


def precise(x: Tensor) -> Tensor:
    """Losses are taken in fp32 at least."""
    return x if x.dtype == torch.float64 else x.float()
