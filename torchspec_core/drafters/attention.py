"""Grouped-query attention of a drafter: projections for training, and the cached form for decoding.

An attention kind offers `project_queries`, `project_keys` and `combine` (training; the mask kind stands between them)
and `new_cache`, `cached` (decoding). Another kind is another module with the same five methods.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from torchspec_core.drafters.rope import RopeConfig, rope_angles, rotate_halves


@dataclass
class DraftCache:
    """Keys and values by position; what exactly an attention kind keeps in `k` and `v` is its own affair.

    Attributes:
        k, v: [batch, kv_heads, capacity + 1, width of each]; the last slot takes what padding rows write.
        upto: slots [0, upto) may hold something.
    """

    k: Tensor
    v: Tensor
    upto: int = 0

    @property
    def capacity(self) -> int:
        """Positions that fit."""
        return self.k.shape[2] - 1

    def write(self, positions: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Put rows [B, T, kv_heads, ...] at slot = position (-1: a padding row); [B, T, upto] boolean of the slots at
        or before each row."""
        slots = positions.masked_fill(positions < 0, self.capacity)
        batch = torch.arange(len(positions), device=positions.device).unsqueeze(1)
        self.k[batch, :, slots] = k
        self.v[batch, :, slots] = v
        self.upto = max(self.upto, int(positions.max()) + 1)
        return torch.arange(self.upto, device=positions.device) <= positions.clamp(min=0).unsqueeze(-1)


class GroupedQueryAttention(nn.Module):
    """`num_heads` query heads share `num_kv_heads` key/value heads; neox rotary positions; no biases.

    Args:
        input_size: width of the rows that are projected.
        output_size: width of the result.
    """

    def __init__(
        self, input_size: int, output_size: int, num_heads: int, num_kv_heads: int, head_dim: int, rope: RopeConfig
    ) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim, self.rope = num_heads, num_kv_heads, head_dim, rope
        self.q_proj = nn.Linear(input_size, num_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(input_size, num_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(input_size, num_kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * head_dim, output_size, bias=False)

    @property
    def scale(self) -> float:
        """Factor on the scores."""
        return self.head_dim**-0.5

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Rotary (cos, sin) of these positions for this attention's width."""
        return rope_angles(self.rope, self.head_dim, positions, dtype)

    def project_queries(self, u: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """[..., input_size] to rotated queries [..., num_heads, head_dim]."""
        return rotate_halves(self.q_proj(u).unflatten(-1, (self.num_heads, self.head_dim)), *angles)

    def project_keys(self, u: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """[..., input_size] to rotated keys and values, both [..., num_kv_heads, head_dim]."""
        split = (self.num_kv_heads, self.head_dim)
        return rotate_halves(self.k_proj(u).unflatten(-1, split), *angles), self.v_proj(u).unflatten(-1, split)

    def combine(self, attended: Tensor) -> Tensor:
        """[..., num_heads, head_dim] to [..., output_size]."""
        return self.o_proj(attended.flatten(-2))

    def new_cache(self, batch: int, capacity: int) -> DraftCache:
        """An empty cache for `batch` sequences of at most `capacity` positions."""
        weight = self.k_proj.weight
        shape = (batch, self.num_kv_heads, capacity + 1, self.head_dim)
        return DraftCache(weight.new_zeros(shape), weight.new_zeros(shape))

    def cached(self, u: Tensor, positions: Tensor, cache: DraftCache) -> Tensor:
        """Attend with a cache: write these rows at slot = position, read slots at or before each row's position.

        Args:
            u: [B, T, input_size].
            positions: [B, T] int64; -1 marks a padding row, which writes nothing that is ever read and whose output
                means nothing.

        Returns:
            [B, T, output_size]. A slot written earlier for a position that was rolled back is overwritten before any
            row can see it, since rows only look back.
        """
        angles = self.angles(positions.clamp(min=0), u.dtype)
        q = self.project_queries(u, angles)
        visible = cache.write(positions, *self.project_keys(u, angles))
        attended = functional.scaled_dot_product_attention(
            q.transpose(1, 2),
            cache.k[:, :, : cache.upto],
            cache.v[:, :, : cache.upto],
            attn_mask=visible.unsqueeze(1),
            scale=self.scale,
            enable_gqa=self.num_heads != self.num_kv_heads,
        )
        return self.combine(attended.transpose(1, 2))
