"""The training-time-test mask: which keys a drafted row sees, defined once, with a dense and a fast form.

Rows of several documents are packed one after the other. Depth 0 makes keys for every row; each later depth makes
keys for the *drafted* rows alone (the rows that lead to a loss). A drafted row at depth d sees the depth-0 keys at or
before it in its own document, and its own keys of depths 1..d. Because only drafted rows query, dense and anchored
drafting are the same code: anchors are a choice of `rows`.

`DenseTTT` is the definition turned into a boolean matrix: the oracle. `GroupedTTT` lays documents side by side,
multiplies once per KV head for all its query heads, and adds the few own-row keys as extra columns; no [rows x rows *
depths] mask exists. (Torch's flash kernel for CPU was tried: at these lengths its bf16 backward alone took 20-70 ms
where this form's products take 1.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


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
    """

    document: Tensor
    position: Tensor
    rows: Tensor
    rank: Tensor
    documents: int
    width: int
    drafted: int


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


class GroupedTTT:
    """The fast form: documents side by side, a KV head's queries in one product, own-row keys as extra columns."""

    def __init__(self, layout: TTTLayout) -> None:
        self.documents, self.width, self.drafted = layout.documents, layout.width, layout.drafted
        self.key_slots = layout.document * layout.width + layout.position
        self.query_slots = layout.document.index_select(0, layout.rows) * layout.drafted + layout.rank
        position = layout.position.new_zeros(self.documents * self.drafted)
        position[self.query_slots] = layout.position.index_select(0, layout.rows)
        ahead = torch.arange(self.width, device=position.device) > position.unsqueeze(1)
        self.ahead = ahead.view(self.documents, 1, 1, self.drafted, self.width)

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

    def hide_ahead(self, scores: Tensor, kv_heads: int) -> None:
        """Put -inf where a key lies ahead of the row."""
        scores.view(self.documents, kv_heads, -1, self.drafted, self.width).masked_fill_(self.ahead, float("-inf"))

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
        scores = torch.bmm(folded, k0.transpose(1, 2))
        form.hide_ahead(scores, kv_heads)
        if own:
            columns = [(q.view(split) * k.unsqueeze(2)).sum(dim=-1).view(rows, heads) for k in own[::2]]
            scores = torch.cat((scores, form.fold(torch.stack(columns, dim=-1), kv_heads).mul_(scale)), dim=-1)
        weights = torch.softmax(scores, dim=-1)
        out = form.unfold(torch.bmm(weights[..., : form.width], v0), kv_heads)
        if own:
            shares = form.unfold(weights[..., form.width :].contiguous(), kv_heads)
            for depth, v in enumerate(own[1::2]):
                out.view(split).addcmul_(shares[..., depth].reshape(split), v.unsqueeze(2))
        ctx.form, ctx.scale = form, scale
        ctx.save_for_backward(q, folded, weights, k0, v0, *own)
        return out.to(q.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        form: GroupedTTT = ctx.form
        q, folded, weights, k0, v0, *own = ctx.saved_tensors
        rows, heads, _ = q.shape
        kv_heads = k0.shape[0] // form.documents
        split = (rows, kv_heads, heads // kv_heads, -1)
        grad = grad.contiguous()
        grad_folded = form.fold(grad, kv_heads)
        grad_weights = torch.bmm(grad_folded, v0.transpose(1, 2))
        if own:
            columns = [(grad.view(split) * v.unsqueeze(2)).sum(dim=-1).view(rows, heads) for v in own[1::2]]
            grad_weights = torch.cat((grad_weights, form.fold(torch.stack(columns, dim=-1), kv_heads)), dim=-1)
        grad_scores = torch._softmax_backward_data(grad_weights, weights, -1, weights.dtype)
        context = grad_scores[..., : form.width]
        grad_q = form.unfold(torch.bmm(context, k0), kv_heads)
        grad_k0 = torch.bmm(context.transpose(1, 2), folded)
        grad_v0 = torch.bmm(weights[..., : form.width].transpose(1, 2), grad_folded)
        grad_own: list[Tensor] = []
        if own:
            slopes = form.unfold(grad_scores[..., form.width :].contiguous(), kv_heads)
            shares = form.unfold(weights[..., form.width :].contiguous(), kv_heads)
            for depth, k in enumerate(own[::2]):
                slope, share = slopes[..., depth].reshape(split), shares[..., depth].reshape(split)
                grad_q.view(split).addcmul_(slope, k.unsqueeze(2))
                grad_k = (slope * q.view(split)).sum(dim=2).mul_(ctx.scale)
                grad_own += [grad_k.to(q.dtype), (share * grad.view(split)).sum(dim=2).to(q.dtype)]
        return None, None, grad_q.mul_(ctx.scale).to(q.dtype), grad_k0, grad_v0, *grad_own
