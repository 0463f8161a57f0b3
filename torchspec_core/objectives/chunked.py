"""Losses over the vocabulary, a few rows at a time, with their gradients taken while the scores are at hand.

A [rows x vocabulary] tensor lives for one chunk only: the chunk's loss is differentiated at once and backward merely
scales what was found, so memory grows with chunk x vocabulary and nothing is computed twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

ChunkLoss = Callable[..., tuple[Tensor, Tensor]]
"""(tensors of one chunk's rows..., shared parameters...) -> (summed loss, detached measures [rows, ...])."""


def chunked(function: ChunkLoss, rows: Sequence[Tensor], shared: Sequence[Tensor], chunk: int) -> tuple[Tensor, Tensor]:
    """Sum `function` over chunks of `rows`.

    Args:
        rows: tensors [R, ...], one row each; `chunk` of them at a time.
        shared: tensors that every chunk reads (parameters).

    Returns:
        (loss, carrying the gradient of every row and shared tensor that wants one; measures [R, ...]).
    """
    tensors = (*rows, *shared)
    if not torch.is_grad_enabled():  # the function differentiates while it runs: it must not see what wants a gradient
        tensors = tuple(tensor.detach() for tensor in tensors)
    loss, measures = _Chunked.apply(function, len(rows), chunk, *tensors)
    return loss, measures


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: ChunkLoss, count: int, chunk: int, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        wanted = [i for i in range(len(tensors)) if ctx.needs_input_grad[3 + i]]
        gradients = [torch.zeros_like(tensors[i]) for i in wanted]
        shared = [tensor.detach().requires_grad_(count + i in wanted) for i, tensor in enumerate(tensors[count:])]
        losses, measures = [], []
        for start in range(0, len(tensors[0]), chunk):
            part = slice(start, start + chunk)
            rows = [tensor[part].detach().requires_grad_(i in wanted) for i, tensor in enumerate(tensors[:count])]
            inputs = [*rows, *shared]
            with torch.enable_grad():
                loss, measured = function(*inputs)
            if wanted:
                found: Sequence[Tensor | None] = torch.autograd.grad(
                    loss, [inputs[i] for i in wanted], allow_unused=True
                )
                for i, total, gradient in zip(wanted, gradients, found, strict=True):
                    if gradient is None:
                        continue
                    if i < count:
                        total[part] = gradient
                    else:
                        total += gradient
            losses.append(loss.detach())
            measures.append(measured.detach())
        ctx.save_for_backward(*gradients)
        ctx.wanted = wanted
        measured_rows = torch.cat(measures)
        ctx.mark_non_differentiable(measured_rows)
        return torch.stack(losses).sum(), measured_rows

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        out: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        for i, gradient in zip(ctx.wanted, ctx.saved_tensors, strict=True):
            out[3 + i] = gradient * grad_loss.to(gradient.dtype)
        return tuple(out)
