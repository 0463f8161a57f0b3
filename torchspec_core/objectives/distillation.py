"""Any of the terms between the drafter's distribution and the target's, chunked over teacher positions.

The general form of `soft_cross_entropy`, which is the fast one for the default loss. A chunk's target distribution is
computed once and serves every depth; the chunk is differentiated while its scores are at hand.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchspec_core.objectives.chunked import chunked
from torchspec_core.objectives.reduction import precise
from torchspec_core.objectives.soft_cross_entropy import RowTerms
from torchspec_core.objectives.terms import TERMS, DistillationLoss, Row, lk_blend, log_overlap


def distillation_loss(
    hidden: Tensor,
    head: Tensor,
    teacher_hidden: Tensor,
    teacher_head: Tensor,
    gold: Tensor,
    share: Tensor,
    loss: DistillationLoss,
    eta: float,
    chunk: int = 256,
) -> RowTerms:
    """Loss of all depths.

    Args:
        hidden: [D, P, H] drafter's normed output for each depth and teacher position.
        head: [V_d, H] drafter's head.
        teacher_hidden: [P, H_t] target's final-normed state at each teacher position.
        teacher_head: [V_d, H_t] the target head's rows of the draft vocabulary.
        gold: [P] int64, index in the draft vocabulary of the text's token.
        share: [D, P] factor of each row's term, denominators included.
        eta: of `lk_lambda`, whose mean overlap takes a pass of its own over the rows.
        chunk: teacher positions at a time; memory grows with chunk x D x V_d.
    """
    rows = (hidden.transpose(0, 1), teacher_hidden, gold, share.T)
    blend = share.new_zeros(len(share), 1)
    if loss == "lk_lambda":
        with torch.no_grad():
            seen = _chunks("l1", blend, rows, head, teacher_head, chunk)[1]
        blend = lk_blend(seen[..., 2].T, share, eta)
    total, seen = _chunks(loss, blend, rows, head, teacher_head, chunk)
    return RowTerms(total, *seen.permute(2, 1, 0))


def _chunks(
    loss: DistillationLoss, blend: Tensor, rows: Sequence[Tensor], head: Tensor, teacher_head: Tensor, chunk: int
) -> tuple[Tensor, Tensor]:
    """(summed loss, [P, D, 3] of each row's term, hit and overlap)."""

    def terms(hidden: Tensor, states: Tensor, gold: Tensor, share: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
        scores = (hidden.flatten(0, 1) @ head.T).view(*hidden.shape[:2], -1)
        log_q = precise(scores).log_softmax(dim=-1)
        log_p = precise(states @ teacher_head.T).log_softmax(dim=-1).unsqueeze(1)
        shared = log_overlap(log_p, log_q)
        term = TERMS[loss](Row(log_p, log_q, shared, gold.unsqueeze(1).expand(log_q.shape[:-1]), blend.T))
        with torch.no_grad():
            hit = log_q.argmax(dim=-1) == log_p.argmax(dim=-1)
            seen = torch.stack((term, hit.to(term.dtype), shared.exp()), dim=-1)
        return (share * term).sum(), seen

    return chunked(terms, rows, (head,), chunk)
