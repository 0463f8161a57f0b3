"""Small layers that every drafter shares."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class RMSNorm(nn.Module):
    """v / sqrt(mean(v^2) + eps) * weight over the last axis; statistics in fp32 at least."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] to the same shape and dtype."""
        return rms_norm(x, self.weight, self.eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Functional form of `RMSNorm`."""
    out: Tensor = _RMSNorm.apply(x, weight, eps)
    return out


class _RMSNorm(torch.autograd.Function):
    """Torch composes this norm of a dozen conversions on CPU; written out it reads its input three times, gradient
    included."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        # Row factors in the input's own type: mixed types would copy the whole input. A row's factor is off by 0.2 % at
        # most in bf16, as each number of the row is anyway.
        precise = torch.float64 if x.dtype == torch.float64 else torch.float32
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=precise)
        inverse = torch.rsqrt(length.square_().div_(x.shape[-1]).add_(eps)).to(x.dtype)
        unit = x * inverse
        ctx.save_for_backward(unit, inverse, weight)
        return unit * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        unit, inverse, weight = ctx.saved_tensors
        product = grad * unit
        grad_weight = product.flatten(0, -2).sum(dim=0) if ctx.needs_input_grad[1] else None
        grad_x = None
        if ctx.needs_input_grad[0]:
            # d/dx of x / rms is (g - unit * mean(g * unit)) / rms, where g = grad * weight.
            mean = (product @ weight).unsqueeze(-1) / unit.shape[-1]
            grad_x = (grad * weight).addcmul_(unit, mean, value=-1).mul_(inverse)
        return grad_x, grad_weight, None


class PartNorms(nn.ModuleList):
    """A norm of its own for each of `count` equal parts of a row, in front of the projection that joins them."""

    def __init__(self, count: int, size: int, eps: float) -> None:
        super().__init__(RMSNorm(size, eps) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        """[..., count * size] to the same shape."""
        parts = x.chunk(len(self), dim=-1)
        return torch.cat([norm(part) for norm, part in zip(self, parts, strict=True)], dim=-1)


class SwiGLU(nn.Module):
    """down(silu(gate(z)) * up(z)), no biases."""

    def __init__(self, size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, size, bias=False)

    def forward(self, z: Tensor) -> Tensor:
        """[..., size] to [..., size]."""
        return self.down_proj(functional.silu(self.gate_proj(z)) * self.up_proj(z))
