"""Small layers that every drafter shares."""

from __future__ import annotations

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
    return functional.rms_norm(x, (x.shape[-1],), weight, eps)


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
