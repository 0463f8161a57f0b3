"""Multi-latent attention of a drafter: keys and values of all heads come from one short latent row.

Per row the input gives a latent c (`kv_lora_rank` numbers, normed) and one rotary key k_r that all heads share; each
head's own key part and value are linear in c. Training uses the naive form: keys [k_nope ; k_r] and values are made
for every row, so the masks of `ttt` and `blocks` serve as they are. Decoding uses the absorbed form: the cache holds c
and k_r alone, queries are taken into the latent space and the values' projection is applied after the softmax.

Rotary positions pair neighbours (interleaved), on the rotary parts only. YaRN multiplies the scores by mscale^2.
Parameter names are DeepSeek's, which engines read. As in vLLM, every norm uses the drafter's epsilon.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torchspec_core.drafters.attention import Angles, Attention
from torchspec_core.drafters.layers import RMSNorm
from torchspec_core.drafters.rope import RopeConfig, rotate_pairs, yarn_mscale
from torchspec_core.drafters.rope_config import check_mla_rope
from torchspec_core.errors import UserError


@dataclass(frozen=True)
class MLAConfig:
    """Widths of multi-latent attention.

    Attributes:
        q_lora_rank: rank of the query projection; None = one full matrix.
        kv_lora_rank: numbers of the latent row.
        qk_nope_head_dim, qk_rope_head_dim: a head's query and key, without and with rotary positions.
        v_head_dim: a head's value.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    def __post_init__(self) -> None:
        if self.qk_rope_head_dim % 2:
            raise UserError(f"drafter.qk_rope_head_dim {self.qk_rope_head_dim} must be even")

    @property
    def qk_head_dim(self) -> int:
        """Width of a head's query."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


class MultiLatentAttention(Attention):
    """`num_heads` heads over rows [..., input_size], result [..., output_size]; no biases."""

    def __init__(
        self, input_size: int, output_size: int, num_heads: int, sizes: MLAConfig, rope: RopeConfig, eps: float
    ) -> None:
        super().__init__()
        check_mla_rope(rope)
        self.num_heads, self.sizes, self.rope = num_heads, sizes, rope
        self.rotary_width, self.cache_shape = sizes.qk_rope_head_dim, (1, sizes.qk_rope_head_dim, sizes.kv_lora_rank)
        queries = num_heads * sizes.qk_head_dim
        if sizes.q_lora_rank is None:
            self.q_proj = nn.Linear(input_size, queries, bias=False)
        else:
            self.q_a_proj = nn.Linear(input_size, sizes.q_lora_rank, bias=False)
            self.q_a_layernorm = RMSNorm(sizes.q_lora_rank, eps)
            self.q_b_proj = nn.Linear(sizes.q_lora_rank, queries, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(input_size, sizes.kv_lora_rank + sizes.qk_rope_head_dim, bias=False)
        self.kv_a_layernorm = RMSNorm(sizes.kv_lora_rank, eps)
        self.kv_b_proj = nn.Linear(
            sizes.kv_lora_rank, num_heads * (sizes.qk_nope_head_dim + sizes.v_head_dim), bias=False
        )
        self.o_proj = nn.Linear(num_heads * sizes.v_head_dim, output_size, bias=False)

    @property
    def scale(self) -> float:
        """Factor on the scores: 1 / sqrt(width of a query), times mscale^2 with YaRN."""
        grown = yarn_mscale(self.rope.factor, self.rope.mscale_all_dim or 0.0) if self.rope.kind == "yarn" else 1.0
        return self.sizes.qk_head_dim**-0.5 * grown * grown

    def project_queries(self, u: Tensor, angles: Angles) -> Tensor:
        """[..., input_size] to queries [..., num_heads, nope + rope], the rotary part rotated."""
        q = self.q_proj(u) if self.sizes.q_lora_rank is None else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(u)))
        nope, rotary = q.unflatten(-1, (self.num_heads, -1)).split(
            [self.sizes.qk_nope_head_dim, self.sizes.qk_rope_head_dim], dim=-1
        )
        return torch.cat((nope, rotate_pairs(rotary, *angles)), dim=-1)

    def cache_rows(self, u: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
        """[..., input_size] to (shared rotary key [..., 1, rope], latent row [..., 1, kv_lora_rank])."""
        latent, rotary = self.kv_a_proj_with_mqa(u).split(
            [self.sizes.kv_lora_rank, self.sizes.qk_rope_head_dim], dim=-1
        )
        return rotate_pairs(rotary.unsqueeze(-2), *angles), self.kv_a_layernorm(latent).unsqueeze(-2)

    def project_keys(self, u: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
        """[..., input_size] to keys [..., num_heads, nope + rope] and values [..., num_heads, v]: the naive form."""
        rotary, latent = self.cache_rows(u, angles)
        nope, v = (
            self.kv_b_proj(latent.squeeze(-2))
            .unflatten(-1, (self.num_heads, -1))
            .split([self.sizes.qk_nope_head_dim, self.sizes.v_head_dim], dim=-1)
        )
        return torch.cat((nope, rotary.expand(*nope.shape[:-1], -1)), dim=-1), v.contiguous()

    def combine(self, attended: Tensor) -> Tensor:
        """[..., num_heads, v] to [..., output_size]."""
        return self.o_proj(attended.flatten(-2))

    def read(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        """The absorbed form: `k` holds shared rotary keys, `v` latent rows, and no head's own keys are ever made."""
        keys, latents = k[:, 0], v[:, 0]
        up_k, up_v = self.kv_b_proj.weight.unflatten(0, (self.num_heads, -1)).split(
            [self.sizes.qk_nope_head_dim, self.sizes.v_head_dim], dim=1
        )
        nope, rotary = q.split([self.sizes.qk_nope_head_dim, self.sizes.qk_rope_head_dim], dim=-1)
        absorbed = torch.einsum("bthd,hdr->bhtr", nope, up_k)
        scores = absorbed.flatten(1, 2) @ latents.transpose(1, 2)
        scores = scores + rotary.transpose(1, 2).flatten(1, 2) @ keys.transpose(1, 2)
        scores = scores.unflatten(1, (self.num_heads, -1)).mul(self.scale)
        weights = scores.masked_fill(~visible.unsqueeze(1), float("-inf")).softmax(dim=-1)
        mixed = (weights.flatten(1, 2) @ latents).unflatten(1, (self.num_heads, -1))
        return torch.einsum("bhtr,hdr->bthd", mixed, up_v)
