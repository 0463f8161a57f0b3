"""What a drafter's distribution q of one row costs, given the target's p: functions of log-probabilities [..., V].

`overlap` = sum_v min(p, q) is the probability that a token drawn from q is accepted when it is verified against p
(speculative sampling, arXiv 2211.17192); 1 - overlap is their total variation, half their L1 distance. LK losses
(arXiv 2602.23881) optimise it directly: `lk_alpha` = -log overlap; `lk_lambda` = lambda KL + (1 - lambda) (1 - overlap)
with lambda = exp(-eta x mean overlap), so that it leads from KL, which has a gradient far from the target, to total
variation. Logarithms are kept to the end: an overlap too small for the type still has a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

DistillationLoss = Literal["soft_ce", "hard_ce", "l1", "lk_alpha", "lk_lambda"]


def log_overlap(log_p: Tensor, log_q: Tensor) -> Tensor:
    """log sum_v min(p, q)."""
    return torch.minimum(log_p, log_q).logsumexp(dim=-1)


def l1_distance(log_p: Tensor, log_q: Tensor) -> Tensor:
    """sum_v |p - q|, from 0 to 2; the same value and gradient as the sum of absolute values."""
    return 2.0 * missed(log_overlap(log_p, log_q))


def missed(log_overlap: Tensor) -> Tensor:
    """1 - overlap: total variation, the probability that a drawn draft is rejected."""
    return -torch.expm1(log_overlap)


def soft_cross_entropy_of(log_p: Tensor, log_q: Tensor) -> Tensor:
    """-sum_v p log q: forward KL plus p's entropy."""
    return -(log_p.exp() * log_q).sum(dim=-1)


def kl_divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    """sum_v p (log p - log q)."""
    return (log_p.exp() * (log_p - log_q)).sum(dim=-1)


def hard_cross_entropy(log_q: Tensor, gold: Tensor) -> Tensor:
    """-log q of the token `gold` [...]."""
    return -log_q.gather(-1, gold.unsqueeze(-1)).squeeze(-1)


@dataclass(frozen=True)
class Row:
    """Inputs of a term.

    Attributes:
        log_p, log_q: [..., V], broadcast against each other.
        log_overlap: [...] of the two.
        gold: [...] int64, the text's token.
        blend: lambda of `lk_lambda`, broadcast.
    """

    log_p: Tensor
    log_q: Tensor
    log_overlap: Tensor
    gold: Tensor
    blend: Tensor


def _lk_lambda(row: Row) -> Tensor:
    return row.blend * kl_divergence(row.log_p, row.log_q) + (1.0 - row.blend) * missed(row.log_overlap)


TERMS: Mapping[DistillationLoss, Callable[[Row], Tensor]] = {
    "soft_ce": lambda row: soft_cross_entropy_of(row.log_p, row.log_q),
    "hard_ce": lambda row: hard_cross_entropy(row.log_q, row.gold),
    "l1": lambda row: 2.0 * missed(row.log_overlap),
    "lk_alpha": lambda row: -row.log_overlap,
    "lk_lambda": _lk_lambda,
}


def lk_blend(overlap: Tensor, share: Tensor, eta: float) -> Tensor:
    """[D, 1] lambda of each place: exp(-eta x mean overlap), without gradient.

    Args:
        overlap, share: [D, R]; the mean is weighted by share.
    """
    total = share.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(share.dtype).tiny)
    return torch.exp(-eta * (share * overlap).sum(dim=-1, keepdim=True) / total).detach()


def dpace_weights(
    confidence: Tensor, taught: Tensor, slot: Tensor, blocks: int, predictions: int, alpha: float
) -> Tensor:
    """[R] weights of D-PACE (arXiv 2605.18810): what slot k adds to the expected accepted length of its block.

    With smoothed confidences s = (1 - alpha) q + alpha, c_k = s_0 .. s_k (slots that are not taught count as 1), the
    weight of slot k is c_k + c_{k+1} + .. over the block's taught slots. Carries no gradient.

    Args:
        confidence: [R] q of the text's token.
        taught: [R] 1 where the slot is supervised, else 0.
        slot: [R] int64, place in the flattened [blocks, predictions]; each taught slot once.
    """
    flat = confidence.new_zeros(2, blocks * predictions)
    mask, missing = flat.index_add(1, slot, torch.stack((taught, taught * (1.0 - alpha) * (1.0 - confidence))))
    cumulative = (1.0 - missing).view(blocks, predictions).cumprod(dim=1)
    reached = cumulative * mask.view(blocks, predictions)
    return taught * reached.flip(1).cumsum(dim=1).flip(1).flatten().index_select(0, slot).detach()
