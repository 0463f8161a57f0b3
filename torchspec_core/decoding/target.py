"""The target as verifier: a transformers causal language model with a cache that forgives rejected tokens.

Rows accept different numbers of tokens, so their contexts grow at different speeds. The cache slot of a token is its
position in its own row: a rejected token leaves stale keys behind, which the next step overwrites before anything can
see them (a query at position p sees slots 0..p). So nothing is ever rolled back, shifted or compacted along the
sequence. Rows that finish are dropped by moving the last live rows into their places; the buffers are used up to the
live count.

Keys and values are stored once per key-value head, and the query heads that share one are folded into the query axis,
so a step neither repeats nor copies the cache. The un-normed residual streams that a drafter reads are caught in the
same pass, by hooks, under canonical layer ids (j = after 0-based decoder layer j).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from torchspec_core.errors import UserError
from torchspec_core.targets.engine import load_model, residual_taps
from torchspec_core.targets.facts import TargetFacts, read_facts

ATTENTION = "torchspec_folded"
# Tokens of one prefill pass, padding included: bounds the memory of the pass.
PREFILL_TOKENS = 4096
# Config fields that change logits after the head; this decoder applies the bare head.
LOGIT_MODIFIERS = ("final_logit_softcapping", "logit_scale", "logits_scaling")


def folded_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of `query[B, Hq, Q, D]` on `key, value[B, Hkv, W, D]`, returned as [B, Q, Hq, D].

    Without a mask: causal from position zero (prefill). With a mask [B, 1, Q, W]: the Hq/Hkv query heads of one key
    head become rows of one query matrix, so that keys are read once and not repeated in memory.
    """
    if attention_mask is None:
        out = functional.scaled_dot_product_attention(
            query, key, value, is_causal=query.shape[2] > 1, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
        )
        return out.transpose(1, 2).contiguous(), None
    rows, heads, length, width = query.shape
    groups = heads // key.shape[1]
    folded = query.reshape(rows, key.shape[1], groups * length, width)
    out = functional.scaled_dot_product_attention(
        folded, key, value, attn_mask=attention_mask.repeat(1, 1, groups, 1), scale=scaling
    )
    return out.reshape(rows, heads, length, width).transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, folded_attention)


@dataclass
class _Window:
    """Where the pass in progress writes, and how much of the buffers it sees; shared by all layers of one cache."""

    rows: int
    capacity: int
    live: int = 0
    width: int = 0
    prefill: bool = False
    at_rows: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    at_slots: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))


class _PositionLayer(CacheLayerMixin):
    """Keys and values of one layer, [rows, heads, capacity, dim], slot = position."""

    is_sliding = False
    keys: Tensor
    values: Tensor

    def __init__(self, window: _Window) -> None:
        super().__init__()
        self.window = window

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        for name, states in (("keys", key_states), ("values", value_states)):
            shape = (self.window.rows, states.shape[1], self.window.capacity, states.shape[3])
            # Zeros, not garbage: slots past a row's own length are masked, but 0 * NaN would still be NaN.
            setattr(self, name, states.new_zeros(shape))
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        window = self.window
        self.keys[window.at_rows, :, window.at_slots] = key_states.transpose(1, 2)
        self.values[window.at_rows, :, window.at_slots] = value_states.transpose(1, 2)
        if window.prefill:
            return key_states, value_states
        return self.keys[: window.live, :, : window.width], self.values[: window.live, :, : window.width]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.window.width, 0

    def get_seq_length(self) -> int:
        return 0 if self.window.prefill else self.window.width

    def get_max_length(self) -> int:
        return self.window.capacity


@dataclass(frozen=True)
class Pass:
    """What one pass of the target gives.

    logits: [B, Q, V] (prefill: [B, 1, V], after each row's last token), in the model's type.
    states: [B, Q, A*H], the captured layers side by side in the order asked for; A = 0 gives a last axis of zero.
        In prefill, rows are padded with zeros on the right.
    """

    logits: Tensor
    states: Tensor


class CachedTarget:
    """A transformers causal LM, a cache of `capacity` positions for a batch of rows, and hooks on `layers`.

    One batch at a time: `prefill` starts it, `verify` extends it, `keep` drops rows. Raises UserError for a model this
    decoder would run wrongly (sliding windows, logits changed after the head) or for layers it does not have.
    """

    def __init__(self, model: PreTrainedModel, facts: TargetFacts, layers: Sequence[int] = ()) -> None:
        _refuse_unfaithful(model)
        missing = [layer for layer in layers if not 0 <= layer < facts.num_layers]
        if missing:
            raise UserError(
                f"the target has decoder layers 0..{facts.num_layers - 1}, but the drafter reads layer "
                f"{missing[0]}: it was trained for another target."
            )
        self.model = model.eval()
        self.model.set_attn_implementation(ATTENTION)
        self.facts = facts
        self.layers = tuple(layers)
        self.decoder = model.get_decoder()
        self.head: nn.Module = model.get_output_embeddings()
        self._stack = ExitStack()
        self._caught = self._stack.enter_context(residual_taps(model, facts, self.layers))

    @property
    def embedding(self) -> Tensor:
        """[V, H], the input embedding, which the drafter shares."""
        weight: Tensor = self.model.get_input_embeddings().weight
        return weight

    @property
    def head_weight(self) -> Tensor:
        """[V, H], the output head, which block drafters share."""
        weight: Tensor = self.head.weight  # type: ignore[assignment]
        return weight

    def close(self) -> None:
        """Remove the hooks from the model."""
        self._stack.close()

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Sequence[int]], capacity: int) -> Pass:
        """Read `prompts` (each at least one token) into a new cache of `capacity` positions a row."""
        lengths = [len(prompt) for prompt in prompts]
        if max(lengths) > capacity:
            raise ValueError(f"a prompt of {max(lengths)} tokens does not fit a cache of {capacity}")
        window = self._window = _Window(rows=len(prompts), capacity=capacity, prefill=True)
        layers = [_PositionLayer(window) for _ in range(self.facts.num_layers)]
        self._cache = Cache(layers=list(layers))
        states = torch.zeros(
            len(prompts), max(lengths), self.facts.hidden_size * len(self.layers), dtype=self.model.dtype
        )
        logits: list[Tensor] = [torch.empty(0)] * len(prompts)
        for rows in _by_length(lengths, PREFILL_TOKENS):
            longest = max(lengths[row] for row in rows)
            tokens = torch.zeros(len(rows), longest, dtype=torch.int64)
            for i, row in enumerate(rows):
                tokens[i, : lengths[row]] = torch.as_tensor(prompts[row], dtype=torch.int64)
            positions = torch.arange(longest).expand(len(rows), -1)
            window.at_rows, window.at_slots = torch.tensor(rows).unsqueeze(1), positions
            hidden, caught = self._forward(tokens, positions, None)
            last = torch.tensor([lengths[row] - 1 for row in rows])
            for row, row_logits in zip(rows, self.head(hidden[torch.arange(len(rows)), last]), strict=True):
                logits[row] = row_logits
            for i, row in enumerate(rows):
                states[row, : lengths[row]] = caught[i, : lengths[row]]
        window.prefill, window.live = False, len(prompts)
        return Pass(torch.stack(logits).unsqueeze(1), states)

    @torch.inference_mode()
    def verify(self, tokens: Tensor, positions: Tensor) -> Pass:
        """Read `tokens[B, Q]` at `positions[B, Q]` (ascending in a row, its context at 0..positions[b, 0]-1)."""
        window = self._window
        window.width = int(positions.max()) + 1
        window.at_rows, window.at_slots = torch.arange(len(tokens)).unsqueeze(1), positions
        visible = torch.arange(window.width) <= positions.unsqueeze(-1)
        hidden, caught = self._forward(tokens, positions, visible.unsqueeze(1))
        return Pass(self.head(hidden), caught)

    def _forward(self, tokens: Tensor, positions: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        additive = None
        if mask is not None:  # made additive here, once: the kernel would convert a boolean mask in every layer
            additive = torch.zeros(mask.shape, dtype=self.model.dtype).masked_fill_(~mask, float("-inf"))
        out = self.decoder(
            input_ids=tokens,
            attention_mask=additive,
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
        )
        hidden: Tensor = out.last_hidden_state
        if not self.layers:
            return hidden, hidden[..., :0]
        caught = torch.cat([self._caught[layer] for layer in self.layers], dim=-1)
        self._caught.clear()
        return hidden, caught

    def keep(self, rows: Tensor) -> None:
        """Row i of the batch becomes what row `rows[i]` was; the batch shrinks to len(rows)."""
        self._window.live = len(rows)
        moved = (rows != torch.arange(len(rows))).nonzero().squeeze(1)
        for layer in self._cache.layers:
            for buffer in (layer.keys, layer.values):
                buffer[moved] = buffer[rows[moved]]


def _by_length(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Row indices grouped by similar length, each group within `budget` tokens of padded area (one row at least)."""
    groups: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        if groups and lengths[groups[-1][0]] * (len(groups[-1]) + 1) <= budget:
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def _refuse_unfaithful(model: PreTrainedModel) -> None:
    config = model.config
    name = config.architectures[0] if config.architectures else type(model).__name__
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"} or (not hasattr(config, "layer_types") and getattr(config, "sliding_window", None)):
        raise UserError(
            f"the reference decoder serves targets with full attention only, but {name} has "
            f"{', '.join(sorted(kinds - {'full_attention'})) or 'a sliding window'}; evaluate it in vLLM."
        )
    for field_name in LOGIT_MODIFIERS:
        if getattr(config, field_name, None) not in (None, 0, 1, 1.0):
            raise UserError(
                f"the reference decoder applies the target's bare head, but {name} sets {field_name}; "
                "evaluate it in vLLM."
            )


def load_target(folder: Path, dtype: str, layers: Sequence[int] = (), threads: int = 0) -> CachedTarget:
    """The model of a Hub-layout `folder` in `dtype` ("float32" | "bfloat16"), catching canonical `layers`."""
    return CachedTarget(load_model(folder, dtype, threads), read_facts(folder), layers)
