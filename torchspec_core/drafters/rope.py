"""Rotary position embedding: one builder of angles for every drafter.

Angles are made from positions on the fly (a few thousand sines a step) instead of from a table of fixed length, so no
position is ever out of range. They are computed in fp32 at least: bf16 angles lose whole positions after a few hundred
tokens. A new kind of scaling is one more entry in `_FREQUENCIES`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from torchspec_core.errors import UserError


@dataclass(frozen=True)
class RopeConfig:
    """How positions turn into angles: `kind` names the frequency rule, `theta` its base."""

    theta: float = 10000.0
    kind: str = "default"

    def __post_init__(self) -> None:
        if self.kind not in _FREQUENCIES:
            raise UserError(f"rope kind {self.kind!r} is not known; use one of {sorted(_FREQUENCIES)}")
        if not self.theta > 0:
            raise UserError(f"rope theta must be above 0, not {self.theta}")

    def to_json(self) -> dict[str, Any]:
        """The configuration as JSON types."""
        return asdict(self)

    @staticmethod
    def from_json(values: dict[str, Any]) -> RopeConfig:
        """The inverse of `to_json`."""
        return RopeConfig(**values)


def _default_frequencies(config: RopeConfig, width: int, dtype: torch.dtype) -> Tensor:
    """theta ** (-2i / width) for i < width / 2."""
    return 1.0 / config.theta ** (torch.arange(0, width, 2, dtype=dtype) / width)


_FREQUENCIES: dict[str, Callable[[RopeConfig, int, torch.dtype], Tensor]] = {"default": _default_frequencies}


def rope_angles(config: RopeConfig, width: int, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine for each position.

    Args:
        positions: [...] int64.
        width: rotated numbers of a head, even.
        dtype: type of the vectors to be rotated; the angles are fp32, or fp64 if that is.

    Returns:
        (cos, sin), each [..., width / 2].
    """
    precise = torch.float64 if dtype == torch.float64 else torch.float32
    frequencies = _FREQUENCIES[config.kind](config, width, precise).to(positions.device)
    angles = positions.to(precise).unsqueeze(-1) * frequencies
    return angles.cos(), angles.sin()


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (v_i, v_{i + width/2}) (the neox layout): (a, b) -> (a cos - b sin, b cos + a sin).

    Args:
        x: [..., heads, width].
        cos, sin: [..., width / 2], one angle for all heads.

    Returns:
        Same shape and dtype as `x`; cosine and sine are rounded to that type, as vLLM does.
    """
    out: Tensor = _RotateHalves.apply(x, cos.to(x.dtype).unsqueeze(-2), sin.to(x.dtype).unsqueeze(-2))
    return out


class _RotateHalves(torch.autograd.Function):
    """A rotation's gradient is the rotation back, so nothing but the angles is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, -sin), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    first, second = out.chunk(2, dim=-1)
    first.copy_((a * cos).addcmul_(b, sin, value=-1))
    second.copy_((b * cos).addcmul_(a, sin))
    return out
