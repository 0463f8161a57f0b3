"""The anchored-block mask: which keys a drafted block sees, defined once, with a dense and a fast form.

A block stands at an anchor a: its slots sit at positions a, a+1, .. and ask for the tokens there. A slot sees the
target's context at positions strictly before a (the state at a is not known when the block is drafted), all slots of
its own block, and nothing of other blocks. A layer's rule narrows that by distance: causal, a sliding window, or both.

`DenseBlocks` is the definition turned into a boolean matrix: the oracle. `GatheredBlocks` lays the blocks of a
document side by side, multiplies them once per key-value head with their document's context, and adds the few keys of
the own block as extra columns; no [blocks x all keys] matrix exists.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class BlockRule:
    """How far a layer looks: `causal` hides keys after the query, `window` keys that are `window` or more away."""

    causal: bool = False
    window: int | None = None

    def sees(self, distance: Tensor) -> Tensor:
        """Boolean; `distance` = query position - key position."""
        seen = distance >= 0 if self.causal else torch.ones_like(distance, dtype=torch.bool)
        return seen if self.window is None else seen & (distance.abs() < self.window)


def block_visible(
    rule: BlockRule, query_block: Tensor, anchor: Tensor, offset: Tensor, key_block: Tensor, key_position: Tensor
) -> Tensor:
    """The one definition, within a document; all tensors broadcast, result is boolean.

    Args:
        query_block: block of the query; `anchor` its position, `offset` the query's slot.
        key_block: block of the key, -1 for a key of the target's context.
        key_position: absolute position of the key.
    """
    context = (key_block < 0) & (key_position < anchor)
    return (context | (key_block == query_block)) & rule.sees(anchor + offset - key_position)


@dataclass(frozen=True)
class BlockLayout:
    """Where the blocks of a packed batch stand.

    Attributes:
        document, position: [N] int64 of each packed row.
        block_document: [M] int64, document of each block.
        anchor: [M] int64, its anchor's position in the document.
        rank: [M] int64, place of each block among those of its document.
        size: slots of a block.
        documents, width, drafted: documents, rows of the longest one, blocks of the fullest one (or more: rounded up
            to keep shapes few).
    """

    document: Tensor
    position: Tensor
    block_document: Tensor
    anchor: Tensor
    rank: Tensor
    size: int
    documents: int
    width: int
    drafted: int


class BlockAttention(Protocol):
    """A form of the mask; K/V are [N, kv_heads, d or dv] of the context and [M, B, kv_heads, d or dv] of the blocks."""

    def attend(
        self, q: Tensor, context: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor], rule: BlockRule, scale: float
    ) -> Tensor:
        """Queries [M, B, heads, d] to the attended values [M, B, heads, dv]."""
        ...


BlockForm = Callable[[BlockLayout], BlockAttention]


class DenseBlocks:
    """All blocks against all keys with a boolean matrix [M * B, N + M * B]."""

    def __init__(self, layout: BlockLayout) -> None:
        self.layout = layout

    def visible(self, rule: BlockRule) -> Tensor:
        """[M, B, N + M * B] boolean: context rows first, then the slots of the blocks in order."""
        layout = self.layout
        device = layout.anchor.device
        blocks, offset = torch.arange(len(layout.anchor), device=device), torch.arange(layout.size, device=device)
        slots = layout.anchor.unsqueeze(1) + offset
        key_block = torch.cat((torch.full_like(layout.position, -1), blocks.repeat_interleave(layout.size)))
        key_position = torch.cat((layout.position, slots.flatten()))
        key_document = torch.cat((layout.document, layout.block_document.repeat_interleave(layout.size)))
        mine = layout.block_document.view(-1, 1, 1) == key_document
        return mine & block_visible(
            rule, blocks.view(-1, 1, 1), layout.anchor.view(-1, 1, 1), offset.view(1, -1, 1), key_block, key_position
        )

    def attend(
        self, q: Tensor, context: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor], rule: BlockRule, scale: float
    ) -> Tensor:
        """See `BlockAttention`."""
        groups = q.shape[2] // own[0].shape[2]
        k, v = (
            torch.cat((past, new.flatten(0, 1))).repeat_interleave(groups, dim=1)
            for past, new in zip(context, own, strict=True)
        )
        scores = torch.einsum("mbhd,khd->mbhk", q, k) * scale
        scores = scores.masked_fill(~self.visible(rule).unsqueeze(2), float("-inf"))
        return torch.einsum("mbhk,khd->mbhd", scores.softmax(dim=-1), v)


class GatheredBlocks:
    """Documents side by side: [documents, blocks, slots] queries against [documents, width] context keys."""

    def __init__(self, layout: BlockLayout) -> None:
        self.layout = layout
        self.row_place = layout.document * layout.width + layout.position
        self.block_place = layout.block_document * layout.drafted + layout.rank
        self._hidden: dict[BlockRule, tuple[Tensor, Tensor]] = {}

    def _spread(self, x: Tensor, place: Tensor, width: int) -> Tensor:
        """[n, ...] to [documents, width, ...], zeros where there is nothing."""
        documents = self.layout.documents
        return x.new_zeros(documents * width, *x.shape[1:]).index_copy(0, place, x).unflatten(0, (documents, width))

    def _masks(self, rule: BlockRule) -> tuple[Tensor, Tensor]:
        """What a rule hides: context [documents, drafted, B, width], own block [B, B]."""
        if rule not in self._hidden:
            layout = self.layout
            offset, rows = (torch.arange(n, device=layout.anchor.device) for n in (layout.size, layout.width))
            zero = torch.zeros_like(offset[0])
            anchor = self._spread(layout.anchor, self.block_place, layout.drafted).unsqueeze(-1).unsqueeze(-1)
            past = block_visible(rule, zero, anchor, offset.unsqueeze(1), zero - 1, rows)
            own = block_visible(rule, zero, zero, offset.unsqueeze(1), zero, offset)
            self._hidden[rule] = ~past, ~own
        return self._hidden[rule]

    def attend(
        self, q: Tensor, context: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor], rule: BlockRule, scale: float
    ) -> Tensor:
        """See `BlockAttention`."""
        layout = self.layout
        size, heads, kv_heads = layout.size, q.shape[2], own[0].shape[2]
        groups = heads // kv_heads
        # [documents, drafted, B, kv, g, d] -> [documents, kv, drafted, g, B, d]: one matrix for each kv head.
        grid = self._spread(q * scale, self.block_place, layout.drafted).unflatten(3, (kv_heads, groups))
        grid = grid.permute(0, 3, 1, 4, 2, 5)
        past_k, past_v = (self._spread(x, self.row_place, layout.width).transpose(1, 2) for x in context)
        own_k, own_v = (self._spread(x, self.block_place, layout.drafted).permute(0, 3, 1, 2, 4) for x in own)
        hidden_past, hidden_own = self._masks(rule)
        past = grid.flatten(2, 4) @ past_k.transpose(-1, -2)
        past = past.unflatten(2, (layout.drafted, groups, size))
        past = past.masked_fill(hidden_past.unsqueeze(2).unsqueeze(1), float("-inf"))
        near = grid.flatten(3, 4) @ own_k.transpose(-1, -2)
        near = near.unflatten(3, (groups, size)).masked_fill(hidden_own, float("-inf"))
        precise = torch.float64 if q.dtype == torch.float64 else torch.float32
        weights = torch.softmax(torch.cat((past, near), dim=-1), dim=-1, dtype=precise).to(q.dtype)
        far, close = weights.split((layout.width, size), dim=-1)
        out = (far.flatten(2, 4) @ past_v).unflatten(2, (layout.drafted, groups, size))
        out = out + (close.flatten(3, 4) @ own_v).unflatten(3, (groups, size))
        placed = out.permute(0, 2, 4, 1, 3, 5).reshape(-1, size, heads, out.shape[-1])
        return placed.index_select(0, self.block_place)
