"""DFlash and its descendants: a small decoder that drafts a whole block in one pass.

The target's states enter as keys and values of every layer ("KV injection"); only the block's slots ask. The input is
the newest token followed by mask tokens. One module serves three kinds, composed from parts: `dflash` fills the mask
slots in; `dflash2` adds a convolution around every sublayer and a selector among the best candidates; `dspark` lets
the anchor slot predict too and adds a Markov bias and a confidence head. Attention is grouped-query with a norm on
every head, or multi-latent without one. Embedding and head are the target's, frozen, and not parameters here. Parameter
names are those that vLLM reads.

Prediction n (0-based) of a block at anchor a is the token at a + 1 + n, whatever the kind.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from torchspec_core.drafters.attention import Angles, Attention, DraftCache, GroupedQueryAttention
from torchspec_core.drafters.blocks import BlockAttention, BlockForm, BlockLayout, BlockRule, GatheredBlocks
from torchspec_core.drafters.convolution import GroupedDynamicConvolution
from torchspec_core.drafters.layers import PartNorms, RMSNorm, SwiGLU
from torchspec_core.drafters.mla import MLAConfig, MultiLatentAttention
from torchspec_core.drafters.rope import RopeConfig
from torchspec_core.drafters.rope_config import check_mla_rope
from torchspec_core.drafters.slots import CandidateSelector, ConfidenceHead, MarkovHead, Tables
from torchspec_core.errors import UserError

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class ConvolutionConfig:
    """DFlash 2's convolution."""

    kernel_size: int = 2
    group_size: int = 16


@dataclass(frozen=True)
class SelectorConfig:
    """DFlash 2's candidate selector."""

    rank: int = 256
    top_k: int = 16
    codebook: Literal["projected", "free"] = "projected"


@dataclass(frozen=True)
class BlockConfig:
    """Shape of a block drafter.

    Attributes:
        kind: `dflash`, `dflash2` or `dspark`.
        num_kv_heads, head_dim: of grouped-query attention; multi-latent attention has its widths in `mla`.
        aux_layers: canonical layer ids whose states enter `fc`, in order.
        block_size: input slots of a block, the anchor's included.
        mask_token_id: the row of the target's embedding that stands for "fill this in".
        layer_types: `full_attention` or `sliding_attention` for each layer.
        is_causal: holds for all layers; none = sliding layers are causal, full ones are not.
        mla: widths of multi-latent attention; None = grouped-query attention.
        fc_norm: a norm for each aux state, before `fc`; no vLLM class of these kinds has one.
        confidence_temperatures: what each prediction's confidence logit is divided by; none = not calibrated.
    """

    kind: str
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    aux_layers: tuple[int, ...]
    block_size: int
    mask_token_id: int
    layer_types: tuple[str, ...] = (FULL, FULL)
    sliding_window: int | None = None
    is_causal: bool | None = None
    rms_norm_eps: float = 1e-5
    rope: RopeConfig = field(default_factory=RopeConfig)
    max_position_embeddings: int = 2048
    convolution: ConvolutionConfig | None = None
    selector: SelectorConfig | None = None
    markov_rank: int | None = None
    mla: MLAConfig | None = None
    fc_norm: bool = False
    confidence_temperatures: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if len(set(self.aux_layers)) != len(self.aux_layers) or not self.aux_layers:
            raise UserError(f"capture.layers must name different layers, not {list(self.aux_layers)}")
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"drafter.num_heads {self.num_heads} is no multiple of drafter.num_kv_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise UserError(f"drafter.head_dim {self.head_dim} must be even")
        if self.predictions < 1:
            raise UserError(f"drafter.block_size {self.block_size} leaves no slot to predict; use 2 at least")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise UserError(
                f"drafter.mask_token_id {self.mask_token_id} is outside the target's vocabulary: use an unused or "
                f"reserved id from 0 to {self.vocab_size - 1}"
            )
        wrong = [name for name in self.layer_types if name not in (FULL, SLIDING)]
        if wrong or not self.layer_types:
            raise UserError(f"drafter.layer_types must be {FULL} or {SLIDING} for each layer, not {wrong or 'empty'}")
        if SLIDING in self.layer_types and not self.sliding_window:
            raise UserError("drafter.layer_types has sliding layers: set drafter.sliding_window")
        if self.convolution and (self.hidden_size % self.convolution.group_size or self.convolution.kernel_size < 1):
            raise UserError(
                f"drafter.conv_group_size {self.convolution.group_size} does not divide the width {self.hidden_size}"
            )
        if self.mla is not None:
            check_mla_rope(self.rope)
        if self.selector and not 0 < self.selector.top_k <= self.vocab_size:
            raise UserError(
                f"drafter.selector_top_k {self.selector.top_k} must be from 1 to the vocabulary's {self.vocab_size}"
            )

    @property
    def predictions(self) -> int:
        """Tokens that one block drafts: DSpark's anchor slot predicts too."""
        return self.block_size if self.markov_rank is not None else self.block_size - 1

    @property
    def rules(self) -> tuple[BlockRule, ...]:
        """How far each layer looks, by the order of precedence that vLLM resolves."""
        return tuple(
            BlockRule(
                causal=self.is_causal if self.is_causal is not None else name == SLIDING,
                window=self.sliding_window if name == SLIDING else None,
            )
            for name in self.layer_types
        )

    def to_json(self) -> dict[str, Any]:
        """The configuration as JSON types; forms that are switched off are left out."""
        values = {**asdict(self), "aux_layers": list(self.aux_layers), "layer_types": list(self.layer_types)}
        return {name: value for name, value in values.items() if value or name not in _FORMS}

    @staticmethod
    def from_json(values: dict[str, Any]) -> BlockConfig:
        """The inverse of `to_json`."""
        convolution, selector, mla = values["convolution"], values["selector"], values.get("mla")
        temperatures = values.get("confidence_temperatures")
        return BlockConfig(
            **{
                **values,
                "aux_layers": tuple(values["aux_layers"]),
                "layer_types": tuple(values["layer_types"]),
                "rope": RopeConfig.from_json(values["rope"]),
                "convolution": convolution and ConvolutionConfig(**convolution),
                "selector": selector and SelectorConfig(**selector),
                "mla": mla and MLAConfig(**mla),
                "confidence_temperatures": None if temperatures is None else tuple(temperatures),
            }
        )


_FORMS = ("mla", "fc_norm", "confidence_temperatures")


class BlockLayer(nn.Module):
    """A pre-norm decoder layer whose attention the caller supplies, with a convolution around each sublayer or not."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        size, conv, eps = config.hidden_size, config.convolution, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.self_attn: Attention = (
            GroupedQueryAttention(
                size, size, config.num_heads, config.num_kv_heads, config.head_dim, config.rope, head_norm_eps=eps
            )
            if config.mla is None
            else MultiLatentAttention(size, size, config.num_heads, config.mla, config.rope, eps)
        )
        self.mlp = SwiGLU(size, config.intermediate_size)
        self.attention_conv, self.mlp_conv = (
            GroupedDynamicConvolution(size, conv.kernel_size, conv.group_size) if conv else None for _ in range(2)
        )

    def forward(self, x: Tensor, attend: Any) -> Tensor:
        """[M, B, H] to the same; `attend` maps the attention's input to its output."""
        x = x + _around(self.attention_conv, self.input_layernorm(x), attend)
        return x + _around(self.mlp_conv, self.post_attention_layernorm(x), self.mlp)


def _around(convolution: GroupedDynamicConvolution | None, x: Tensor, sublayer: Any) -> Tensor:
    if convolution is None:
        return sublayer(x)
    coefficients = convolution.coefficients(x)
    return convolution.side(1, sublayer(convolution.side(0, x, coefficients)), coefficients)


class BlockDrafter(nn.Module):
    """The drafter: context projection, layers, final norm, and the kind's own heads."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.config = config
        size = config.hidden_size
        if config.fc_norm:
            self.fc_norm = PartNorms(len(config.aux_layers), size, config.rms_norm_eps)
        self.fc = nn.Linear(len(config.aux_layers) * size, size, bias=False)
        self.hidden_norm = RMSNorm(size, config.rms_norm_eps)
        self.layers = nn.ModuleList(BlockLayer(config) for _ in config.layer_types)
        self.norm = RMSNorm(size, config.rms_norm_eps)
        if config.selector is not None:
            self.candidate_selector = CandidateSelector(
                config.vocab_size, size, config.selector.rank, config.selector.codebook
            )
        if config.markov_rank is not None:
            self.markov_head = MarkovHead(config.vocab_size, config.markov_rank)
            self.confidence_head = ConfidenceHead(size, config.markov_rank)

    @property
    def stack(self) -> list[BlockLayer]:
        """The layers in order."""
        return [layer for layer in self.layers if isinstance(layer, BlockLayer)]

    def context(self, aux: Tensor) -> Tensor:
        """Target states of the aux layers [..., A * H] to context features [..., H], the same for all layers."""
        return self.hidden_norm(self.fc(self.fc_norm(aux) if self.config.fc_norm else aux))

    def forward(self, aux: Tensor, embeds: Tensor, layout: BlockLayout, form: BlockForm = GatheredBlocks) -> Tensor:
        """Draft all blocks of a packed batch.

        Args:
            aux: [N, A * H] target states of all packed rows.
            embeds: [M, B, H] embeddings of the blocks' inputs: the anchor's token, then masks.
            layout: documents, positions, blocks.
            form: form of the mask, fast (default) or dense.

        Returns:
            [M, P, H] after the final norm, prediction n of each block at [:, n].
        """
        context, mask = self.context(aux), form(layout)
        offset = torch.arange(layout.size, device=aux.device)
        # Angles are the same in all layers.
        attention = self.stack[0].self_attn
        row_angles = attention.angles(layout.position, aux.dtype)
        slot_angles = attention.angles(layout.anchor.unsqueeze(1) + offset, aux.dtype)
        x = embeds
        for layer, rule in zip(self.stack, self.config.rules, strict=True):
            x = layer(x, _training_attention(layer.self_attn, mask, rule, context, row_angles, slot_angles))
        return self.norm(x)[:, self.config.block_size - self.config.predictions :]

    def new_cache(self, batch: int, capacity: int) -> list[DraftCache]:
        """Empty caches, one a layer, for `batch` sequences of at most `capacity` positions."""
        return [layer.self_attn.new_cache(batch, capacity) for layer in self.stack]

    def extend(self, aux: Tensor, positions: Tensor, caches: list[DraftCache]) -> None:
        """Take newly known target states [B, T, A * H] at `positions` [B, T] int64 (-1 = padding) into the caches."""
        context = self.context(aux)
        for layer, cache in zip(self.stack, caches, strict=True):
            layer.self_attn.extend(context, positions, cache)

    def draft(self, embeds: Tensor, anchor: Tensor, caches: list[DraftCache]) -> Tensor:
        """One block a row with the cached context; keys of the block itself are not kept.

        Args:
            embeds: [B, Q, H], the newest token's embedding, then masks.
            anchor: [B] int64, position of the newest token; the context is what was cached before it.

        Returns:
            [B, P, H] after the final norm, where P = Q - 1, or Q if the anchor slot predicts.
        """
        x = embeds
        for layer, rule, cache in zip(self.stack, self.config.rules, caches, strict=True):
            x = layer(x, _cached_attention(layer.self_attn, anchor, rule, cache))
        return self.norm(x)[:, self.config.block_size - self.config.predictions :]

    def scores(self, hidden: Tensor, previous: Tensor, tables: Tables) -> tuple[Tensor, Tensor | None]:
        """What the next token of one slot is chosen by, given the token before it.

        Args:
            hidden: [N, H] of the slot, after the final norm.
            previous: [N] int64.

        Returns:
            (scores [N, C], ids [N, C] int64 of the candidates), or (scores [N, V], None) over the whole vocabulary.
        """
        unary = hidden @ tables.head.T
        if self.config.selector is not None:
            best, ids = unary.topk(self.config.selector.top_k, dim=-1)
            return best + self.candidate_selector(hidden, previous, ids, tables), ids
        if self.config.markov_rank is not None:
            return unary + self.markov_head.markov_w2(self.markov_head.features(previous)), None
        return unary, None

    def confidence(self, hidden: Tensor, previous: Tensor, place: int) -> Tensor:
        """DSpark's estimate [N] that prediction `place`, of a slot with hidden [N, H], is accepted after `previous`
        [N]; calibrated if the drafter is."""
        logit = self.confidence_head(hidden, self.markov_head.features(previous)).float()
        temperatures = self.config.confidence_temperatures
        return torch.sigmoid(logit if temperatures is None else logit / temperatures[place])


def _training_attention(
    attention: Attention,
    mask: BlockAttention,
    rule: BlockRule,
    context: Tensor,
    row_angles: Angles,
    slot_angles: Angles,
) -> Any:
    def attend(z: Tensor) -> Tensor:
        past, own = attention.project_keys(context, row_angles), attention.project_keys(z, slot_angles)
        q = attention.project_queries(z, slot_angles)
        return attention.combine(mask.attend(q, past, own, rule, attention.scale))

    return attend


def _cached_attention(attention: Attention, anchor: Tensor, rule: BlockRule, cache: DraftCache) -> Any:
    return lambda z: attention.cached_block(z, anchor, rule, cache)


def init_blocks(drafter: BlockDrafter, seed: int) -> None:
    """Normal(0, 0.02) matrices and tables, unit norms, identity convolutions, zero bias; deterministic in `seed`."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.02, generator=generator)
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
    for module in drafter.modules():
        if isinstance(module, GroupedDynamicConvolution):
            module.reset()
