"""EAGLE-3's objective: roll out, then one soft cross-entropy over all depths."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torchspec_core.drafters.eagle3 import Eagle3Drafter, MaskForm
from torchspec_core.drafters.layers import rms_norm
from torchspec_core.drafters.ttt import GroupedTTT
from torchspec_core.objectives.soft_cross_entropy import SoftCrossEntropy, soft_cross_entropy
from torchspec_core.objectives.ttt import TTTIndex, depth_coefficients


@dataclass(frozen=True)
class Teacher:
    """What the loss needs of the target; all frozen.

    Attributes:
        embedding: [V, H_t] token embedding.
        norm: [H_t] final norm weight.
        eps: of the final norm.
        head: [V_d, H_t] head rows of the draft vocabulary, ascending target ids.
    """

    embedding: Tensor
    norm: Tensor
    eps: float
    head: Tensor


def embed_rows(embedding: Tensor, ids: Tensor, index: Tensor) -> Tensor:
    """Embeddings [M, H_t] of the packed tokens at `index` [M]; -1 embeds token 0, as the reference's padding does."""
    tokens = ids.index_select(0, index.clamp(min=0)).masked_fill(index < 0, 0)
    return embedding.index_select(0, tokens)


def eagle3_loss(
    drafter: Eagle3Drafter,
    teacher: Teacher,
    ids: Tensor,
    aux: Tensor,
    last: Tensor,
    index: TTTIndex,
    depth_decay: float = 0.8,
    covered: Tensor | None = None,
    chunk: int = 1024,
    mask: MaskForm = GroupedTTT,
) -> SoftCrossEntropy:
    """Loss of a packed batch.

    Args:
        ids: [N] int64 tokens.
        aux: [N, A * H_t] target states of the aux layers.
        last: [N, H_t] target's last layer state before its final norm.
        index: rows, depths and weights of the batch.
        depth_decay: weight of depth d is depth_decay ** d.
        covered: [N] boolean, false where the target's most likely token is outside the draft vocabulary: such teacher
            positions get weight 0. None keeps every position: p is then the target's distribution given that the
            token is in the vocabulary.
        chunk: teacher positions at a time.

    Returns:
        `sum_d depth_decay^d * mean over taught rows` with its additive parts; zero, connected to every parameter, if
        no row is taught.
    """
    embeds = [embed_rows(teacher.embedding, ids, following) for following in index.next_token]
    outs = drafter.rollout(aux, embeds, index.layout, mask)
    normed = torch.stack(
        [drafter.norm(out).index_select(0, rows) for out, rows in zip(outs, index.student, strict=True)]
    )
    weight = index.weight.to(torch.float64) if aux.dtype == torch.float64 else index.weight
    if covered is not None:
        weight = weight * covered.index_select(0, index.teacher).to(weight.dtype)
    states = rms_norm(last.index_select(0, index.teacher), teacher.norm, teacher.eps)
    return soft_cross_entropy(
        normed, drafter.lm_head.weight, states, teacher.head, weight, depth_coefficients(weight, depth_decay), chunk
    )
