"""The training-time-test mask: which keys a drafted row sees, defined once, with a dense and a fast form.

Rows of several documents are packed one after the other. Depth 0 makes keys for every row; each later depth makes
keys for the *drafted* rows alone (the rows that lead to a loss). A drafted row at depth d sees the depth-0 keys at or
before it in its own document, and its own keys of depths 1..d. Because only drafted rows query, dense and anchored
drafting are the same code: anchors are a choice of `rows`.

`DenseTTT` is the definition turned into a boolean matrix: the oracle. `GroupedTTT` lays documents side by side,
multiplies once per KV head for all its query heads, and adds the few own-row keys as extra columns; no [rows x rows *
depths] mask exists. Long documents are worked through in tiles of drafted rows, each with the keys that its last row
sees and no more, which halves the work. (Torch's flash kernel for CPU was tried: at the lengths of chats its bf16
backward alone took 20-70 ms where this form's products take 1.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

# Documents longer than `_TILE_WIDTH` are tiled: so many drafted rows, and keys rounded up to so many, that shapes stay
# few and products large.
_TILE_WIDTH, _TILE_ROWS, _TILE_STEP = 1024, 128, 256


@dataclass(frozen=True)
class TTTLayout:
    """Where the rows of a packed batch sit.

    Attributes:
        document: [N] int64, document of each packed row, ascending from 0.
        position: [N] int64, place of each row in its document, ascending from 0.
        rows: [R] int64, packed indices of the drafted rows, ascending.
        rank: [R] int64, place of each drafted row among those of its document.
        documents: number of documents.
        width: rows that the longest document has, or more (rounded up to keep shapes few).
        drafted: drafted rows of the document with the most, or more.
        tiles: (first, last, width) for stretches of ranks: drafted rows first..last - 1 of every document see keys
            0..width - 1 at most. Known on the host, as shapes depend on it (`plan_tiles`).
    """

    document: Tensor
    position: Tensor
    rows: Tensor
    rank: Tensor
    documents: int
    width: int
    drafted: int
    tiles: tuple[tuple[int, int, int], ...] = ()


def plan_tiles(reach: Sequence[int], width: int) -> tuple[tuple[int, int, int], ...]:
    """Tiles for drafted rows whose furthest key, over all documents, is `reach[rank]` (ascending); one if short."""
    if width <= _TILE_WIDTH:
        return ((0, len(reach), width),)
    bounds = [(first, min(first + _TILE_ROWS, len(reach))) for first in range(0, len(reach), _TILE_ROWS)]
    return tuple(
        (first, last, min(-(-(reach[last - 1] + 1) // _TILE_STEP) * _TILE_STEP, width)) for first, last in bounds
    )


def ttt_visible(
    query_document: Tensor,
    query_position: Tensor,
    query_depth: int | Tensor,
    key_document: Tensor,
    key_position: Tensor,
    key_depth: Tensor,
) -> Tensor:
    """The one definition (algorithms of EAGLE-3's training-time test); all arguments broadcast, result is boolean."""
    causal = (key_depth == 0) & (key_position <= query_position)
    own = (key_depth > 0) & (key_depth <= query_depth) & (key_position == query_position)
    return (query_document == key_document) & (causal | own)


def dense_ttt_mask(layout: TTTLayout, depth: int) -> Tensor:
    """[R, N + depth * R] boolean: the drafted rows against depth-0 keys, then the drafted rows' keys of depth 1, 2,
    ..."""
    document, position, rows = layout.document, layout.position, layout.rows
    own_depths = torch.arange(1, depth + 1, device=rows.device).repeat_interleave(len(rows))
    return ttt_visible(
        document[rows].unsqueeze(1),
        position[rows].unsqueeze(1),
        depth,
        torch.cat((document, document[rows].repeat(depth))),
        torch.cat((position, position[rows].repeat(depth))),
        torch.cat((torch.zeros_like(document), own_depths)),
    )


class TTTAttention(Protocol):
    """A form of the mask, made for one batch: `context` takes the depth-0 keys and values once, `attend` serves every
    depth."""

    def context(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """[N, kv_heads, d], [N, kv_heads, dv] in the form that `attend` reads."""
        ...

    def attend(
        self, q: Tensor, context: tuple[Tensor, Tensor], own: Sequence[tuple[Tensor, Tensor]], scale: float
    ) -> Tensor:
        """[R, heads, dv] for queries [R, heads, d]; `own`: (k, v) of the drafted rows, [R, kv_heads, ...], depths 1,
        2, ..."""
        ...


class DenseTTT:
    """Attention with the full boolean mask: the oracle, quadratic in the batch."""

    def __init__(self, layout: TTTLayout) -> None:
        self.layout = layout

    def context(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Unchanged."""
        return k, v

    def attend(
        self, q: Tensor, context: tuple[Tensor, Tensor], own: Sequence[tuple[Tensor, Tensor]], scale: float
    ) -> Tensor:
        """Every key against every row, then the mask."""
        group = q.shape[1] // context[0].shape[1]
        k = torch.cat((context[0], *(k for k, _ in own))).repeat_interleave(group, dim=1)
        v = torch.cat((context[1], *(v for _, v in own))).repeat_interleave(group, dim=1)
        scores = torch.einsum("rhd,khd->hrk", q, k) * scale
        scores = scores.masked_fill(~dense_ttt_mask(self.layout, len(own)), float("-inf"))
        return torch.einsum("hrk,khd->rhd", scores.softmax(dim=-1), v)


@dataclass(frozen=True)
class Tile:
    """Drafted rows `first`..`last` - 1 of every document, against keys 0..`width` - 1.

    ahead: [documents, last - first, width] boolean, keys that lie ahead of the row.
    """

    first: int
    last: int
    width: int
    ahead: Tensor


class GroupedTTT:
    """The fast form: documents side by side, a KV head's queries in one product, own-row keys as extra columns."""

    def __init__(self, layout: TTTLayout) -> None:
        self.documents, self.width, self.drafted = layout.documents, layout.width, layout.drafted
        self.key_slots = layout.document * layout.width + layout.position
        self.query_slots = layout.document.index_select(0, layout.rows) * layout.drafted + layout.rank
        position = layout.position.new_zeros(self.documents * self.drafted)
        position[self.query_slots] = layout.position.index_select(0, layout.rows)
        position = position.view(self.documents, self.drafted, 1)
        self.tiles = [
            Tile(first, last, width, torch.arange(width, device=position.device) > position[:, first:last])
            for first, last, width in layout.tiles or ((0, self.drafted, self.width),)
        ]

    def context(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """[documents * kv_heads, width, d]: zeros where a document has no row (always masked)."""
        return self._context(k), self._context(v)

    def attend(
        self, q: Tensor, context: tuple[Tensor, Tensor], own: Sequence[tuple[Tensor, Tensor]], scale: float
    ) -> Tensor:
        """Softmax over [context ; own] columns; the backward pass is written out in `_GroupedAttention`."""
        out: Tensor = _GroupedAttention.apply(self, scale, q, *context, *(tensor for pair in own for tensor in pair))
        return out

    def fold(self, x: Tensor, kv_heads: int) -> Tensor:
        """[R, heads, d] to [documents * kv_heads, group * drafted, d]."""
        padded = x.new_zeros((self.documents * self.drafted, *x.shape[1:]), dtype=_precise(x))
        padded[self.query_slots] = x.to(padded.dtype)
        padded = padded.view(self.documents, self.drafted, kv_heads, -1, x.shape[2]).permute(0, 2, 3, 1, 4)
        return padded.reshape(self.documents * kv_heads, -1, x.shape[2])

    def unfold(self, x: Tensor, kv_heads: int) -> Tensor:
        """The inverse of `fold`."""
        x = x.view(self.documents, kv_heads, -1, self.drafted, x.shape[2]).permute(0, 3, 1, 2, 4)
        return x.reshape(self.documents * self.drafted, -1, x.shape[4]).index_select(0, self.query_slots)

    def cut(self, x: Tensor, tile: Tile) -> Tensor:
        """The rows of a tile, [documents * kv_heads, group * (last - first), d], out of folded x."""
        if tile.last - tile.first == self.drafted:
            return x
        return x.unflatten(1, (-1, self.drafted))[:, :, tile.first : tile.last].flatten(1, 2)

    def join(self, parts: list[Tensor]) -> Tensor:
        """The inverse of `cut` over all tiles."""
        if len(parts) == 1:
            return parts[0]
        rows = [part.unflatten(1, (-1, tile.last - tile.first)) for part, tile in zip(parts, self.tiles, strict=True)]
        return torch.cat(rows, dim=2).flatten(1, 2)

    def hide_ahead(self, scores: Tensor, tile: Tile, kv_heads: int) -> None:
        """Put -inf where a key lies ahead of the row."""
        grid = scores.view(self.documents, kv_heads, -1, *tile.ahead.shape[1:])
        grid.masked_fill_(tile.ahead.unsqueeze(1).unsqueeze(1), float("-inf"))

    def _context(self, x: Tensor) -> Tensor:
        x = x.to(_precise(x))
        padded = x.new_zeros((self.documents * self.width, *x.shape[1:])).index_copy(0, self.key_slots, x)
        padded = padded.view(self.documents, self.width, *x.shape[1:]).transpose(1, 2)
        return padded.reshape(-1, self.width, x.shape[2])


def _precise(x: Tensor) -> torch.dtype:
    """Type of the batched products: on CPU fp32, as bf16 kernels are generated anew (2-3 ms) for each of many small
    shapes."""
    return torch.float32 if x.dtype == torch.bfloat16 and x.device.type == "cpu" else x.dtype


class _GroupedAttention(torch.autograd.Function):
    """out = softmax([q K^T ; q . k_1 ; ... ; q . k_d]) [V ; v_1 ; ... ; v_d], with the own-row parts as products of
    rows."""

    @staticmethod
    def forward(ctx: Any, form: GroupedTTT, scale: float, q: Tensor, k0: Tensor, v0: Tensor, *own: Tensor) -> Tensor:
        rows, heads, _ = q.shape
        kv_heads = k0.shape[0] // form.documents
        split = (rows, kv_heads, heads // kv_heads, -1)
        folded = form.fold(q, kv_heads).mul_(scale)
        columns = folded.new_empty(*folded.shape[:2], 0)
        if own:
            scores = [(q.view(split) * k.unsqueeze(2)).sum(dim=-1).view(rows, heads) for k in own[::2]]
            columns = form.fold(torch.stack(scores, dim=-1), kv_heads).mul_(scale)
        weights, outs, shares = [], [], []
        for tile in form.tiles:
            part = torch.bmm(form.cut(folded, tile), k0[:, : tile.width].transpose(1, 2))
            form.hide_ahead(part, tile, kv_heads)
            part = torch.softmax(torch.cat((part, form.cut(columns, tile)), dim=-1) if own else part, dim=-1)
            weights.append(part)
            outs.append(torch.bmm(part[..., : tile.width], v0[:, : tile.width]))
            shares.append(part[..., tile.width :])
        out = form.unfold(form.join(outs), kv_heads)
        if own:
            share = form.unfold(form.join(shares).contiguous(), kv_heads)
            for depth, v in enumerate(own[1::2]):
                out.view(split).addcmul_(share[..., depth].reshape(split), v.unsqueeze(2))
        ctx.form, ctx.scale, ctx.depths = form, scale, len(own)
        ctx.save_for_backward(q, folded, k0, v0, *own, *weights)
        return out.to(q.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        form: GroupedTTT = ctx.form
        q, folded, k0, v0, *rest = ctx.saved_tensors
        own, weights = rest[: ctx.depths], rest[ctx.depths :]
        rows, heads, _ = q.shape
        kv_heads = k0.shape[0] // form.documents
        split = (rows, kv_heads, heads // kv_heads, -1)
        grad = grad.contiguous()
        grad_folded = form.fold(grad, kv_heads)
        columns = grad_folded.new_empty(*grad_folded.shape[:2], 0)
        if own:
            parts = [(grad.view(split) * v.unsqueeze(2)).sum(dim=-1).view(rows, heads) for v in own[1::2]]
            columns = form.fold(torch.stack(parts, dim=-1), kv_heads)
        grad_k0, grad_v0 = torch.zeros_like(k0), torch.zeros_like(v0)
        grad_qs, slopes, shares = [], [], []
        for tile, part in zip(form.tiles, weights, strict=True):
            asked, wanted = form.cut(folded, tile), form.cut(grad_folded, tile)
            grad_part = torch.bmm(wanted, v0[:, : tile.width].transpose(1, 2))
            if own:
                grad_part = torch.cat((grad_part, form.cut(columns, tile)), dim=-1)
            grad_part = torch._softmax_backward_data(grad_part, part, -1, part.dtype)
            context = grad_part[..., : tile.width]
            grad_qs.append(torch.bmm(context, k0[:, : tile.width]))
            grad_k0[:, : tile.width].baddbmm_(context.transpose(1, 2), asked)
            grad_v0[:, : tile.width].baddbmm_(part[..., : tile.width].transpose(1, 2), wanted)
            slopes.append(grad_part[..., tile.width :])
            shares.append(part[..., tile.width :])
        grad_q = form.unfold(form.join(grad_qs), kv_heads)
        grad_own: list[Tensor] = []
        if own:
            slope_of, share_of = (form.unfold(form.join(x).contiguous(), kv_heads) for x in (slopes, shares))
            for depth, k in enumerate(own[::2]):
                slope, share = slope_of[..., depth].reshape(split), share_of[..., depth].reshape(split)
                grad_q.view(split).addcmul_(slope, k.unsqueeze(2))
                grad_k = (slope * q.view(split)).sum(dim=2).mul_(ctx.scale)
                grad_own += [grad_k.to(q.dtype), (share * grad.view(split)).sum(dim=2).to(q.dtype)]
        return None, None, grad_q.mul_(ctx.scale).to(q.dtype), grad_k0, grad_v0, *grad_own
