"""The training-time-test mask: which keys a drafted row sees, defined once, with a dense and a fast form.

Rows of several documents are packed one after the other. Depth 0 makes keys for every row; each later depth makes keys
for the *drafted* rows alone (the rows that lead to a loss). A drafted row at depth d sees the depth-0 keys at or before
it in its own document, and its own keys of depths 1..d. Because only drafted rows query, dense and anchored drafting are
the same code: anchors are a choice of `rows`.

`attend_dense` is the definition turned into a boolean matrix: the oracle. `attend_grouped` lays the rows of a document side by
side, multiplies once per KV head for all its query heads, and adds the few own-row keys as extra columns; no
[rows x rows * depths] mask exists.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
    query_document: Tensor, query_position: Tensor, query_depth: int | Tensor,
    key_document: Tensor, key_position: Tensor, key_depth: Tensor,
) -> Tensor:
    """The one definition (algorithms of EAGLE-3's training-time test); all arguments broadcast, result is boolean."""
    causal = (key_depth == 0) & (key_position <= query_position)
    own = (key_depth > 0) & (key_depth <= query_depth) & (key_position == query_position)
    return (query_document == key_document) & (causal | own)


def dense_ttt_mask(layout: TTTLayout, depth: int) -> Tensor:
    """[R, N + depth * R] boolean: the drafted rows against depth-0 keys, then the drafted rows' keys of depth 1, 2, ..."""
    document, position, rows = layout.document, layout.position, layout.rows
    own_depths = torch.arange(1, depth + 1, device=rows.device).repeat_interleave(len(rows))
    return ttt_visible(
        document[rows].unsqueeze(1), position[rows].unsqueeze(1), depth,
        torch.cat((document, document[rows].repeat(depth))),
        torch.cat((position, position[rows].repeat(depth))),
        torch.cat((torch.zeros_like(document), own_depths)),
    )


def attend_dense(q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], layout: TTTLayout, scale: float) -> Tensor:
    """Attention with the full boolean mask: the oracle, quadratic in the batch.

    Args:
        q: [R, heads, d] queries of the drafted rows at depth len(keys) - 1.
        keys, values: depth 0 [N, kv_heads, d or dv], later depths [R, kv_heads, d or dv].
        scale: factor on the scores.

    Returns:
        [R, heads, dv].
    """
    group = q.shape[1] // keys[0].shape[1]
    k = torch.cat(tuple(keys)).repeat_interleave(group, dim=1)
    v = torch.cat(tuple(values)).repeat_interleave(group, dim=1)
    scores = torch.einsum("rhd,khd->hrk", q, k) * scale
    scores = scores.masked_fill(~dense_ttt_mask(layout, len(keys) - 1), float("-inf"))
    return torch.einsum("hrk,khd->rhd", scores.softmax(dim=-1), v)


def _by_document(x: Tensor, slots: Tensor, documents: int, width: int) -> Tensor:
    """[M, ...] rows to [documents, width, ...], zeros where a document has no row."""
    padded = x.new_zeros((documents * width, *x.shape[1:]))
    return padded.index_copy(0, slots, x).view(documents, width, *x.shape[1:])


def attend_grouped(q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], layout: TTTLayout, scale: float) -> Tensor:
    """The fast form of `attend_dense`: same arguments, same result."""
    kv_heads, documents, width, drafted = keys[0].shape[1], layout.documents, layout.width, layout.drafted
    heads, size = q.shape[1:]
    group = heads // kv_heads
    key_slots = layout.document * width + layout.position
    query_documents = layout.document[layout.rows]
    query_slots = query_documents * drafted + layout.rank

    def fold(x: Tensor) -> Tensor:
        """[R, heads, d] to [documents * kv_heads, group * drafted, d]: a KV head's queries side by side."""
        x = _by_document(x.view(len(x), kv_heads, group, -1), query_slots, documents, drafted)
        return x.permute(0, 2, 3, 1, 4).reshape(documents * kv_heads, group * drafted, -1)

    def unfold(x: Tensor) -> Tensor:
        x = x.view(documents, kv_heads, group, drafted, -1).permute(0, 3, 1, 2, 4)
        return x.reshape(documents * drafted, heads, -1).index_select(0, query_slots)

    def context(x: Tensor) -> Tensor:
        """[N, kv_heads, d] to [documents * kv_heads, width, d]."""
        return _by_document(x, key_slots, documents, width).transpose(1, 2).reshape(documents * kv_heads, width, -1)

    position = _by_document(layout.position[layout.rows], query_slots, documents, drafted)
    hidden = torch.arange(width, device=q.device) > position.unsqueeze(-1)
    hidden = hidden.view(documents, 1, 1, drafted, width).expand(-1, kv_heads, group, -1, -1)
    folded = fold(q)
    scores = torch.bmm(folded, context(keys[0]).transpose(1, 2)) * scale
    scores = scores.masked_fill(hidden.reshape(scores.shape), float("-inf"))
    own = [(q.view(len(q), kv_heads, group, size) * k.unsqueeze(2)).sum(-1).view(len(q), heads, 1) for k in keys[1:]]
    columns = [fold(score * scale) for score in own]
    weights = torch.cat((scores, *columns), dim=-1).softmax(dim=-1)
    out = unfold(torch.bmm(weights[..., :width], context(values[0])))
    for depth, v in enumerate(values[1:]):
        weight = unfold(weights[..., width + depth : width + depth + 1])
        out = out + weight * v.repeat_interleave(group, dim=1)
    return out
