"""Rotary position embedding: one builder of angles for every drafter, and the two ways of pairing numbers.

Angles are made from positions on the fly (a few thousand sines a step) instead of from a table of fixed length, so no
position is ever out of range. They are computed in fp32 at least: bf16 angles lose whole positions after a few hundred
tokens. A new kind of scaling is one more entry in `_FREQUENCIES` and in `rope_config.SETTINGS`. For the same settings
the frequencies are those of transformers and of vLLM.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchspec_core.drafters.rope_config import RopeConfig

__all__ = [
    "RopeConfig",
    "rope_frequencies",
    "rope_angles",
    "rotate_halves",
    "rotate_pairs",
    "yarn_mscale",
]


def _default_frequencies(config: RopeConfig, width: int, dtype: torch.dtype) -> Tensor:
    """theta ** (-2i / width) for i < width / 2."""
    return 1.0 / config.theta ** (torch.arange(0, width, 2, dtype=dtype) / width)


def _linear_frequencies(config: RopeConfig, width: int, dtype: torch.dtype) -> Tensor:
    """Positions divided by the factor."""
    return _default_frequencies(config, width, dtype) / config.factor


def _dynamic_frequencies(config: RopeConfig, width: int, dtype: torch.dtype) -> Tensor:
    """A larger base (NTK), fixed for the longest context, as engines fix it."""
    if not config.max_trained_positions:
        return _default_frequencies(config, width, dtype)
    stretch = config.factor * config.max_position_embeddings / config.max_trained_positions - (config.factor - 1)
    base = config.theta * stretch ** (width / (width - 2))
    return 1.0 / base ** (torch.arange(0, width, 2, dtype=dtype) / width)


def _llama3_frequencies(config: RopeConfig, width: int, dtype: torch.dtype) -> Tensor:
    """Long waves divided by the factor, short ones kept, a ramp between."""
    plain = _default_frequencies(config, width, dtype)
    turns = config.original_max_position_embeddings * plain / (2 * math.pi)
    ramp = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    kept = ramp.clamp(0.0, 1.0)
    return (1 - kept) * plain / config.factor + kept * plain


def _yarn_frequencies(config: RopeConfig, width: int, dtype: torch.dtype) -> Tensor:
    """Frequencies below `beta_slow` turns in the original context divided by the factor, above `beta_fast` kept."""

    def place(turns: float) -> float:
        length = config.original_max_position_embeddings
        return width * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(config.theta))

    low, high = place(config.beta_fast), place(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    high += 0.001 if low == high else 0  # no division by zero
    scaled = ((torch.arange(width // 2, dtype=dtype) - low) / (high - low)).clamp(0, 1)
    plain = _default_frequencies(config, width, dtype)
    return plain / config.factor * scaled + plain * (1 - scaled)


_FREQUENCIES: dict[str, Callable[[RopeConfig, int, torch.dtype], Tensor]] = {
    "default": _default_frequencies,
    "linear": _linear_frequencies,
    "dynamic": _dynamic_frequencies,
    "llama3": _llama3_frequencies,
    "yarn": _yarn_frequencies,
}


def rope_frequencies(config: RopeConfig, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """[width / 2] radians per position."""
    return _FREQUENCIES[config.kind](config, width, dtype)


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's growth of attention with the context's: 0.1 * mscale * ln(factor) + 1, at least 1."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _length(config: RopeConfig) -> float:
    """Length of (cos, sin): 1 but for `yarn`, which scales queries and keys by it."""
    if config.kind != "yarn":
        return 1.0
    if config.attention_factor is not None:
        return config.attention_factor
    if config.mscale and config.mscale_all_dim:
        return yarn_mscale(config.factor, config.mscale) / yarn_mscale(config.factor, config.mscale_all_dim)
    return yarn_mscale(config.factor)


def rope_angles(config: RopeConfig, width: int, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine for each position.

    Args:
        positions: [...] int64.
        width: rotated numbers of a head, even.
        dtype: type of the vectors to be rotated; the angles are fp32, or fp64 if that is.

    Returns:
        (cos, sin), each [..., width / 2]; with `yarn` their length may differ from 1.
    """
    precise = torch.float64 if dtype == torch.float64 else torch.float32
    frequencies = rope_frequencies(config, width, precise).to(positions.device)
    angles = positions.to(precise).unsqueeze(-1) * frequencies
    length = _length(config)
    if length == 1.0:
        return angles.cos(), angles.sin()
    return angles.cos() * length, angles.sin() * length


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (v_i, v_{i + width/2}) (the neox layout): (a, b) -> (a cos - b sin, b cos + a sin).

    Args:
        x: [..., heads, width].
        cos, sin: [..., width / 2], one angle for all heads.

    Returns:
        Same shape and dtype as `x`; cosine and sine are rounded to that type, as vLLM does.
    """
    out: Tensor = _Rotate.apply(x, cos.to(x.dtype).unsqueeze(-2), sin.to(x.dtype).unsqueeze(-2), False)
    return out


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate neighbours (v_2i, v_{2i+1}) (the interleaved layout of multi-latent attention); else `rotate_halves`."""
    out: Tensor = _Rotate.apply(x, cos.to(x.dtype).unsqueeze(-2), sin.to(x.dtype).unsqueeze(-2), True)
    return out


class _Rotate(torch.autograd.Function):
    """A rotation's gradient is the rotation back, times the same length, so nothing but the angles is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, pairs: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.pairs = pairs
        return _rotate(x, cos, sin, pairs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, -sin, ctx.pairs), None, None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, pairs: bool) -> Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    a, b = _split(x, pairs)
    first, second = _split(out, pairs)
    first.copy_((a * cos).addcmul_(b, sin, value=-1))
    second.copy_((b * cos).addcmul_(a, sin))
    return out


def _split(x: Tensor, pairs: bool) -> tuple[Tensor, Tensor]:
    """Views of the first and the second number of each pair."""
    if pairs:
        return x[..., 0::2], x[..., 1::2]
    a, b = x.chunk(2, dim=-1)
    return a, b
