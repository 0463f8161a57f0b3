"""Soft cross-entropy against the target's distribution, without a [rows x vocabulary] tensor that lives on.

`-sum_v p_v log q_v` of each row; p = the target's softmax over the draft vocabulary (renormalised), q =
the drafter's. One pass over chunks of teacher positions: a chunk's p is computed once and serves every depth; the
gradients of hidden states and head are taken while the chunk's q is at hand, so backward only scales them. With
dL/dlogits = q - p,

    d hidden = c (q W - p W),   d W = sum_rows c (q - p) x hidden

q and p are rows of one matrix and never subtracted: one product with W gives all q W and p W, one product with the
scaled hidden rows (for the p rows: minus their sum over depths) gives d W, and p W gives the loss for free: sum_v p_v
logit_v = (p W) . hidden. The logarithm of the partition comes from one column of the softmax. In bf16 the loss
*value* is therefore good to about 0.005; in fp64 it is exact. Gradients agree with autograd.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class RowTerms:
    """A loss and what it saw of each row.

    Attributes:
        loss: scalar, the sum of share x term; carries the gradient.
        term: [D, P] detached.
        hit: [D, P] 1 where the most likely draft token is the target's, detached.
        overlap: [D, P] sum_v min(p, q), detached.
    """

    loss: Tensor
    term: Tensor
    hit: Tensor
    overlap: Tensor


def soft_cross_entropy(
    hidden: Tensor,
    head: Tensor,
    teacher_hidden: Tensor,
    teacher_head: Tensor,
    share: Tensor,
    chunk: int = 1024,
) -> RowTerms:
    """Loss of all depths.

    Args:
        hidden: [D, P, H] drafter's normed output for each depth and teacher position.
        head: [V_d, H] drafter's head.
        teacher_hidden: [P, H_t] target's final-normed state at each teacher position.
        teacher_head: [V_d, H_t] the target head's rows of the draft vocabulary.
        share: [D, P] factor of each row's term, denominators included.
        chunk: teacher positions at a time; memory grows with chunk x (D + 1) x V_d.
    """
    return RowTerms(*_SoftCrossEntropy.apply(hidden, head, teacher_hidden, teacher_head, share, chunk))


def _bits(p: Tensor) -> Tensor:
    """Probabilities as integers of the same order: integer comparisons are ten times as fast as bf16 ones on CPU."""
    return p.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[p.element_size()])


def _most_likely(p: Tensor) -> Tensor:
    """[rows] index of the largest of the probabilities [rows, V]; the place is sought in the winning block of columns
    only."""
    bits = _bits(p)
    block = next(size for size in (64, 32, 16, 8, 4, 2, 1) if p.shape[1] % size == 0)
    blocks = bits.view(len(p), -1, block)
    best_block = blocks.amax(dim=2).argmax(dim=1)
    return best_block * block + blocks[torch.arange(len(p), device=p.device), best_block].argmax(dim=1)


class _SoftCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        teacher_hidden: Tensor,
        teacher_head: Tensor,
        share: Tensor,
        chunk: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        depths, positions, width = hidden.shape
        precise = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        wants_grad = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        factor = share.to(precise)
        term = torch.empty(depths, positions, dtype=precise, device=hidden.device)
        hit, overlap = torch.empty_like(term), torch.empty_like(term)
        grad_hidden = torch.empty_like(hidden) if wants_grad else hidden.new_empty(0)
        grad_head: Tensor = hidden.new_empty(0)
        for start in range(0, positions, chunk):
            part = slice(start, min(start + chunk, positions))
            h, scale = hidden[:, part], factor[:, part].unsqueeze(2)
            shape = h.shape[:2]
            taught = depths * h.shape[1]
            both = hidden.new_empty(
                (taught + h.shape[1], len(head))
            )  # the drafter's rows of all depths, then the target's
            q, p = both[:taught], both[taught:]
            torch.mm(h.reshape(-1, width), head.T, out=q)
            torch.mm(teacher_hidden[part], teacher_head.T, out=p)
            best = _most_likely(torch.softmax(p, dim=-1, out=p)).repeat(depths).unsqueeze(1)
            logit_at_best = q.gather(1, best).to(precise)
            torch.softmax(q, dim=-1, out=q)
            q_at_best = q.gather(1, best)
            hit[:, part] = (q_at_best.squeeze(1) == _bits(q).amax(dim=1).view(q.dtype)).view(shape)
            # Summed in the type itself: asking for another one converts every number first, six times the time.
            smaller = torch.minimum(_bits(q).view(*shape, -1), _bits(p))
            overlap[:, part] = smaller.view(q.dtype).sum(dim=-1)
            products = both @ head
            p_head = products[taught:]
            partition = logit_at_best - q_at_best.to(precise).clamp(min=torch.finfo(q.dtype).tiny).log()
            term[:, part] = partition.view(shape) - torch.linalg.vecdot(h.to(precise), p_head.to(precise))
            if wants_grad:
                grad_hidden[:, part] = (products[:taught].view_as(h) - p_head) * scale
            if ctx.needs_input_grad[1]:  # not of a frozen head
                scaled = (h * scale).to(h.dtype)
                # [H, rows] @ [rows, V]: this product runs twice as fast as its transpose.
                grad = torch.cat((scaled.flatten(0, 1), -scaled.sum(dim=0))).T.contiguous() @ both
                grad_head = grad if start == 0 else grad_head.to(precise) + grad
        ctx.save_for_backward(grad_hidden, grad_head)
        ctx.mark_non_differentiable(term, hit, overlap)
        return (factor * term).sum(), term, hit, overlap

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_head = ctx.saved_tensors
        factor = grad_loss.to(grad_hidden.dtype)
        of_head = grad_head.to(grad_hidden.dtype).mul_(factor).T if ctx.needs_input_grad[1] else None
        return grad_hidden.mul_(factor), of_head, None, None, None, None
