"""EAGLE-3: one decoder layer that reads the target's hidden states and drafts one token after another.

Row i knows the target's states at position i and token x_{i+1}; its first draft is x_{i+2}. Parameter names are those
that vLLM reads. The token embedding is the target's, frozen, and not a parameter here: embeddings come in as tensors.
The attention is grouped-query or multi-latent; the forms that engines know as flags are fields of the configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from torchspec_core.drafters.attention import DraftCache, GroupedQueryAttention
from torchspec_core.drafters.layers import PartNorms, RMSNorm, SwiGLU
from torchspec_core.drafters.mla import MLAConfig, MultiLatentAttention
from torchspec_core.drafters.rope import RopeConfig
from torchspec_core.drafters.rope_config import check_mla_rope
from torchspec_core.drafters.ttt import GroupedTTT, TTTAttention, TTTLayout
from torchspec_core.errors import UserError

MaskForm = Callable[[TTTLayout], TTTAttention]


@dataclass(frozen=True)
class Eagle3Config:
    """Shape of an EAGLE-3 drafter.

    Attributes:
        aux_layers: canonical layer ids (residual stream after 0-based decoder layer j) whose states enter `fc`, in
            order.
        draft_vocab_size: tokens the drafter can propose.
        num_kv_heads, head_dim: of grouped-query attention; multi-latent attention has its widths in `mla`.
        norm_before_residual: the residual branch starts from the normed hidden state instead of the raw one.
        mla: widths of multi-latent attention; None = grouped-query attention.
        norm_before_fc: one norm over all aux states together, before `fc`.
        fc_norm: a norm for each aux state, before `fc`.
        norm_output: the next depth reads the normed output instead of the raw one.
        head: `own` is trained; `target` is the target's rows of the draft vocabulary, frozen and not a parameter;
            `low_rank` is a trained product of [V_d, head_rank] and [head_rank, H]. A checkpoint holds a whole head.
        head_rank: of `low_rank`.
    """

    hidden_size: int
    target_hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    draft_vocab_size: int
    aux_layers: tuple[int, ...]
    rms_norm_eps: float = 1e-5
    rope: RopeConfig = field(default_factory=RopeConfig)
    max_position_embeddings: int = 2048
    norm_before_residual: bool = False
    mla: MLAConfig | None = None
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    head: Literal["own", "target", "low_rank"] = "own"
    head_rank: int | None = None

    def __post_init__(self) -> None:
        if len(set(self.aux_layers)) != len(self.aux_layers) or not self.aux_layers:
            raise UserError(f"capture.layers must name different layers, not {list(self.aux_layers)}")
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"drafter.num_heads {self.num_heads} is no multiple of drafter.num_kv_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise UserError(f"drafter.head_dim {self.head_dim} must be even")
        if self.draft_vocab_size > self.vocab_size:
            raise UserError(
                f"drafter.draft_vocab_size {self.draft_vocab_size} is above the target's vocabulary, {self.vocab_size}"
            )
        if (self.head == "low_rank") != (self.head_rank is not None):
            raise UserError("drafter.head_rank is for drafter.head=low_rank, which needs it: set both or none")
        if self.head_rank is not None and not 0 < self.head_rank < self.hidden_size:
            raise UserError(
                f"drafter.head_rank {self.head_rank} must be below the drafter's width, 1 to {self.hidden_size - 1}"
            )
        if self.head == "target" and self.hidden_size != self.target_hidden_size:
            raise UserError(
                f"drafter.head=target reads states of the target's width {self.target_hidden_size}, but the drafter is "
                f"{self.hidden_size} wide: use own or low_rank"
            )
        if self.mla is not None:
            check_mla_rope(self.rope)
            if self.norm_before_fc:
                raise UserError(
                    "drafter.norm_before_fc: engines do not know it with drafter.attention: mla; use drafter.fc_norm"
                )

    @property
    def num_aux(self) -> int:
        """Number of auxiliary states of a row."""
        return len(self.aux_layers)

    def to_json(self) -> dict[str, Any]:
        """The configuration as JSON types; forms that are switched off are left out."""
        values = {**asdict(self), "aux_layers": list(self.aux_layers), "rope": self.rope.to_json()}
        off = (None, False, "own")
        return {name: value for name, value in values.items() if name not in _FORMS or value not in off}

    @staticmethod
    def from_json(values: dict[str, Any]) -> Eagle3Config:
        """The inverse of `to_json`."""
        mla = values.get("mla")
        return Eagle3Config(
            **{
                **values,
                "aux_layers": tuple(values["aux_layers"]),
                "rope": RopeConfig.from_json(values["rope"]),
                "mla": None if mla is None else MLAConfig(**mla),
            }
        )


_FORMS = ("mla", "norm_before_fc", "fc_norm", "norm_output", "head", "head_rank")


class FrozenHead(nn.Module):
    """The target's head rows of the draft vocabulary, `weight` [V_d, H]: read, never trained nor stored."""

    weight: Tensor

    def __init__(self, size: int, vocabulary: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.zeros(vocabulary, size), persistent=False)


class LowRankHead(nn.Module):
    """`up` [V_d, rank] times `down` [rank, H]."""

    def __init__(self, size: int, rank: int, vocabulary: int) -> None:
        super().__init__()
        self.down = nn.Linear(size, rank, bias=False)
        self.up = nn.Linear(rank, vocabulary, bias=False)

    @staticmethod
    def whole(up: Tensor, down: Tensor) -> Tensor:
        """[V_d, H] in fp32, as a checkpoint holds it."""
        return up.float() @ down.float()


class Eagle3Layer(nn.Module):
    """The decoder layer: attention over [normed embedding ; normed hidden], then an MLP, each with a residual."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        size = config.hidden_size
        self.norm_before_residual = config.norm_before_residual
        self.hidden_norm = RMSNorm(size, config.rms_norm_eps)
        self.input_layernorm = RMSNorm(size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(size, config.rms_norm_eps)
        self.self_attn = (
            GroupedQueryAttention(2 * size, size, config.num_heads, config.num_kv_heads, config.head_dim, config.rope)
            if config.mla is None
            else MultiLatentAttention(2 * size, size, config.num_heads, config.mla, config.rope, config.rms_norm_eps)
        )
        self.mlp = SwiGLU(size, config.intermediate_size)

    def enter(self, hidden: Tensor, embeds: Tensor) -> tuple[Tensor, Tensor]:
        """(input of the projections [..., 2H], residual [..., H]) of rows [..., H]."""
        normed = self.hidden_norm(hidden)
        return torch.cat(
            (self.input_layernorm(embeds), normed), dim=-1
        ), normed if self.norm_before_residual else hidden

    def leave(self, residual: Tensor, attended: Tensor) -> Tensor:
        """The layer's output from the residual and the attention's result."""
        y = residual + attended
        return y + self.mlp(self.post_attention_layernorm(y))


class Eagle3Drafter(nn.Module):
    """The drafter: `fc`, one layer, a final norm, a head over the draft vocabulary."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config = config
        aux_size = config.num_aux * config.target_hidden_size
        if config.norm_before_fc:
            self.input_norm = RMSNorm(aux_size, config.rms_norm_eps)
        if config.fc_norm:
            self.fc_norm = PartNorms(config.num_aux, config.target_hidden_size, config.rms_norm_eps)
        self.fc = nn.Linear(aux_size, config.hidden_size, bias=False)
        self.midlayer = Eagle3Layer(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        size, vocabulary = config.hidden_size, config.draft_vocab_size
        self.lm_head: nn.Linear | FrozenHead | LowRankHead
        if config.head == "own":
            self.lm_head = nn.Linear(size, vocabulary, bias=False)
        elif config.head == "target":
            self.lm_head = FrozenHead(size, vocabulary)
        else:
            assert config.head_rank is not None
            self.lm_head = LowRankHead(size, config.head_rank, vocabulary)

    def combine(self, aux: Tensor) -> Tensor:
        """Target states of the aux layers, concatenated [..., A * H_t], to g [..., H]."""
        if self.config.norm_before_fc:
            aux = self.input_norm(aux)
        if self.config.fc_norm:
            aux = self.fc_norm(aux)
        return self.fc(aux)

    def feedback(self, out: Tensor) -> Tensor:
        """Layer output [..., H] as the next depth's hidden state."""
        return self.norm(out) if self.config.norm_output else out

    def read(self, out: Tensor) -> Tensor:
        """Layer output [..., H] to what `head` multiplies: normed [..., H], or [..., head_rank] of a low-rank head."""
        normed = self.norm(out)
        return self.lm_head.down(normed) if isinstance(self.lm_head, LowRankHead) else normed

    @property
    def head(self) -> Tensor:
        """[V_d, H], or [V_d, head_rank] of a low-rank head."""
        return self.lm_head.up.weight if isinstance(self.lm_head, LowRankHead) else self.lm_head.weight

    def logits(self, out: Tensor) -> Tensor:
        """Layer output [..., H] to draft logits [..., V_d]."""
        return nn.functional.linear(self.read(out), self.head)

    def rollout(
        self, aux: Tensor, embeds: Sequence[Tensor], layout: TTTLayout, mask: MaskForm = GroupedTTT
    ) -> list[Tensor]:
        """Draft len(embeds) tokens deep from every drafted row, as inference would.

        Args:
            aux: [N, A * H_t] target states of all packed rows.
            embeds: depth 0: [N, H], embedding of x_{i+1} for all rows; depth d > 0: [R, H], embedding of x_{i+1+d}
                for the drafted rows.
            layout: documents, positions and drafted rows.
            mask: form of the mask, fast (default) or dense.

        Returns:
            The layer's output [R, H] of the drafted rows, one tensor a depth, before the final norm.
        """
        layer, attention, rows = self.midlayer, self.midlayer.self_attn, layout.rows
        form = mask(layout)
        u, residual = layer.enter(self.combine(aux), embeds[0])
        angles = attention.angles(layout.position, u.dtype)
        context = form.context(*attention.project_keys(u, angles))
        # Every row gives keys, but only drafted rows ask and go on.
        u, residual = u.index_select(0, rows), residual.index_select(0, rows)
        angles = (angles[0].index_select(0, rows), angles[1].index_select(0, rows))
        own: list[tuple[Tensor, Tensor]] = []
        outs: list[Tensor] = []
        for depth, embed in enumerate(embeds):
            if depth:
                u, residual = layer.enter(self.feedback(outs[-1]), embed)
                angles = attention.angles(layout.position.index_select(0, rows) + depth, u.dtype)
                own.append(attention.project_keys(u, angles))
            q = attention.project_queries(u, angles)
            outs.append(layer.leave(residual, attention.combine(form.attend(q, context, own, attention.scale))))
        return outs

    def new_cache(self, batch: int, capacity: int) -> DraftCache:
        """An empty cache for `batch` sequences of at most `capacity` positions."""
        return self.midlayer.self_attn.new_cache(batch, capacity)

    def step(self, hidden: Tensor, embeds: Tensor, positions: Tensor, cache: DraftCache) -> Tensor:
        """One incremental pass.

        Args:
            hidden: [B, T, H], g_i for rows with known target states, else `feedback` of the previous pass' output.
            embeds: [B, T, H], embedding of x_{i+1}.
            positions: [B, T] int64, i; -1 = padding row.

        Returns:
            [B, T, H], before the final norm. K/V of the rows are in the cache at slot = position.
        """
        u, residual = self.midlayer.enter(hidden, embeds)
        return self.midlayer.leave(residual, self.midlayer.self_attn.cached(u, positions, cache))


def init_weights(drafter: Eagle3Drafter, seed: int) -> None:
    """Normal(0, 0.02) matrices, unit norms; deterministic in `seed`, independent of torch's global generator."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.02, generator=generator)
            else:
                parameter.fill_(1.0)
