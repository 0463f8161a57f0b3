"""Attention kinds of a drafter, and the cached masks that all of them share.

A kind says how rows become queries, keys and values, what its cache keeps of a row, and how a query reads that. Which
keys a row sees is never its affair: in training a mask kind (`ttt`, `blocks`) stands between `project_*` and `combine`;
in decoding `cached` (a chain) and `cached_block` (a block) are written once, here. `GroupedQueryAttention` is in this
module, multi-latent attention in `mla`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from torchspec_core.drafters.blocks import BlockRule, block_visible
from torchspec_core.drafters.layers import RMSNorm
from torchspec_core.drafters.rope import RopeConfig, rope_angles, rotate_halves

Angles = tuple[Tensor, Tensor]


@dataclass
class DraftCache:
    """Two tensors by position; what exactly an attention kind keeps in `k` and `v` is its own affair.

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

    def write(self, positions: Tensor, k: Tensor, v: Tensor) -> None:
        """Put rows [B, T, kv_heads, ...] at slot = position (-1: a padding row)."""
        slots = positions.masked_fill(positions < 0, self.capacity)
        batch = torch.arange(len(positions), device=positions.device).unsqueeze(1)
        self.k[batch, :, slots] = k
        self.v[batch, :, slots] = v
        self.upto = max(self.upto, int(positions.max()) + 1)

    @property
    def filled(self) -> tuple[Tensor, Tensor]:
        """Views [batch, kv_heads, upto, ...] of what may hold something."""
        return self.k[:, :, : self.upto], self.v[:, :, : self.upto]


class Attention(nn.Module):
    """What every attention kind offers; `num_heads` heads over rows [..., input_size], result [..., output_size]."""

    num_heads: int
    rope: RopeConfig
    rotary_width: int
    cache_shape: tuple[int, int, int]
    """(kv_heads, width of `k`, width of `v`) of a cached row."""

    @property
    def scale(self) -> float:
        """Factor on the scores."""
        raise NotImplementedError

    def project_queries(self, u: Tensor, angles: Angles) -> Tensor:
        """[..., input_size] to rotated queries [..., num_heads, d]."""
        raise NotImplementedError

    def project_keys(self, u: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
        """[..., input_size] to rotated keys [..., heads of keys, d] and values [..., heads of keys, dv]."""
        raise NotImplementedError

    def cache_rows(self, u: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
        """[..., input_size] to what the cache keeps, [..., kv_heads, width] each."""
        raise NotImplementedError

    def read(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        """Queries [B, T, num_heads, d] over cached rows [B, kv_heads, S, ...], where `visible` [B, T, S] is true; the
        heads' values [B, T, num_heads, dv]."""
        raise NotImplementedError

    def combine(self, attended: Tensor) -> Tensor:
        """[..., num_heads, dv] to [..., output_size]."""
        raise NotImplementedError

    def angles(self, positions: Tensor, dtype: torch.dtype) -> Angles:
        """Rotary (cos, sin) of these positions for this attention's rotary width."""
        return rope_angles(self.rope, self.rotary_width, positions, dtype)

    def new_cache(self, batch: int, capacity: int) -> DraftCache:
        """An empty cache for `batch` sequences of at most `capacity` positions."""
        weight, (heads, *widths) = next(self.parameters()), self.cache_shape
        k, v = (weight.new_zeros(batch, heads, capacity + 1, width) for width in widths)
        return DraftCache(k, v)

    def extend(self, u: Tensor, positions: Tensor, cache: DraftCache) -> None:
        """Write rows [B, T, input_size] at slot = position ([B, T] int64; -1: a padding row) without asking."""
        cache.write(positions, *self.cache_rows(u, self.angles(positions.clamp(min=0), u.dtype)))

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
        at = positions.clamp(min=0)
        angles = self.angles(at, u.dtype)
        cache.write(positions, *self.cache_rows(u, angles))
        visible = torch.arange(cache.upto, device=positions.device) <= at.unsqueeze(-1)
        return self.combine(self.read(self.project_queries(u, angles), *cache.filled, visible))

    def cached_block(self, u: Tensor, anchor: Tensor, rule: BlockRule, cache: DraftCache) -> Tensor:
        """Attend from one block a row, [B, Q, input_size] at positions anchor[b] + slot, to the cached context and the
        block itself, whose own rows are not kept; [B, Q, output_size]."""
        offset, rows = (torch.arange(n, device=u.device) for n in (u.shape[1], cache.upto))
        zero = torch.zeros_like(offset[0])
        positions = anchor.unsqueeze(1) + offset
        angles = self.angles(positions, u.dtype)
        at, slot = anchor.view(-1, 1, 1), offset.view(1, -1, 1)
        past = block_visible(rule, zero, at, slot, zero - 1, rows)
        own = block_visible(rule, zero, at, slot, zero, positions.unsqueeze(1))
        k, v = (
            torch.cat((kept, new.transpose(1, 2)), dim=2)
            for kept, new in zip(cache.filled, self.cache_rows(u, angles), strict=True)
        )
        return self.combine(self.read(self.project_queries(u, angles), k, v, torch.cat((past, own), dim=-1)))


class GroupedQueryAttention(Attention):
    """`num_heads` query heads share `num_kv_heads` key/value heads; neox rotary positions; no biases.

    Args:
        input_size: width of the rows that are projected.
        output_size: width of the result.
        head_norm_eps: epsilon of a norm on every query and key head, before the rotation; None = no such norm.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        rope: RopeConfig,
        head_norm_eps: float | None = None,
    ) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim, self.rope = num_heads, num_kv_heads, head_dim, rope
        self.rotary_width, self.cache_shape = head_dim, (num_kv_heads, head_dim, head_dim)
        self.q_proj = nn.Linear(input_size, num_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(input_size, num_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(input_size, num_kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * head_dim, output_size, bias=False)
        if head_norm_eps is not None:
            self.q_norm = RMSNorm(head_dim, head_norm_eps)
            self.k_norm = RMSNorm(head_dim, head_norm_eps)
        self.head_norms = head_norm_eps is not None

    @property
    def scale(self) -> float:
        """1 / sqrt(head_dim)."""
        return self.head_dim**-0.5

    def project_queries(self, u: Tensor, angles: Angles) -> Tensor:
        """See `Attention`."""
        q = self.q_proj(u).unflatten(-1, (self.num_heads, self.head_dim))
        return rotate_halves(self.q_norm(q) if self.head_norms else q, *angles)

    def project_keys(self, u: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
        """See `Attention`."""
        k, v = (proj(u).unflatten(-1, (self.num_kv_heads, self.head_dim)) for proj in (self.k_proj, self.v_proj))
        return rotate_halves(self.k_norm(k) if self.head_norms else k, *angles), v

    def cache_rows(self, u: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
        """The keys and values themselves."""
        return self.project_keys(u, angles)

    def read(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        """See `Attention`."""
        return functional.scaled_dot_product_attention(
            q.transpose(1, 2),
            k,
            v,
            attn_mask=visible.unsqueeze(1),
            scale=self.scale,
            enable_gqa=self.num_heads != self.num_kv_heads,
        ).transpose(1, 2)

    def combine(self, attended: Tensor) -> Tensor:
        """See `Attention`."""
        return self.o_proj(attended.flatten(-2))
