"""EAGLE-3's objective: roll out, then one loss over all depths, against the target's distributions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torchspec_core.drafters.eagle3 import Eagle3Drafter, MaskForm
from torchspec_core.drafters.layers import rms_norm
from torchspec_core.drafters.ttt import GroupedTTT
from torchspec_core.objectives.distillation import distillation_loss
from torchspec_core.objectives.metrics import acceptance, by_row
from torchspec_core.objectives.reduction import Normalisation, precise, shares
from torchspec_core.objectives.result import LossResult
from torchspec_core.objectives.soft_cross_entropy import soft_cross_entropy
from torchspec_core.objectives.terms import DistillationLoss
from torchspec_core.objectives.ttt import TTTIndex

_FAST_CHUNK, _CHUNK = 1024, 256


@dataclass(frozen=True)
class Teacher:
    """What the loss needs of the target; all frozen.

    Attributes:
        embedding: [V, H_t] token embedding.
        norm: [H_t] final norm weight.
        eps: of the final norm.
        head: [V_d, H_t] head rows of the draft vocabulary, ascending target ids.
        kept: [V_d] int64, those ids; None = the whole vocabulary.
    """

    embedding: Tensor
    norm: Tensor
    eps: float
    head: Tensor
    kept: Tensor | None = None


@dataclass(frozen=True)
class Eagle3Loss:
    """Which loss, and how its rows add up.

    Attributes:
        term: what a row costs. `hard_ce` asks for the text's token and teaches no row whose token is outside the draft
            vocabulary; the others compare with the target's distribution given that the token is in it.
        depth_decay: weight of depth d is depth_decay ** d.
        lk_eta: of `lk_lambda`.
    """

    term: DistillationLoss = "soft_ce"
    depth_decay: float = 0.8
    lk_eta: float = 3.0
    normalisation: Normalisation = "supervised"


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
    loss: Eagle3Loss = Eagle3Loss(),
    covered: Tensor | None = None,
    chunk: int | None = None,
    mask: MaskForm = GroupedTTT,
) -> LossResult:
    """Loss of a packed batch.

    Args:
        ids: [N] int64 tokens.
        aux: [N, A * H_t] target states of the aux layers.
        last: [N, H_t] target's last layer state before its final norm.
        index: rows, depths and weights of the batch.
        covered: [N] boolean, false where the target's most likely token is outside the draft vocabulary: such teacher
            positions get weight 0. None keeps every position: p is then the target's distribution given that the
            token is in the vocabulary.
        chunk: teacher positions at a time; memory grows with chunk x depths x V_d.

    Returns:
        `sum_d depth_decay^d * mean over taught rows` with its additive parts; zero, connected to every parameter, if
        no row is taught.
    """
    embeds = [embed_rows(teacher.embedding, ids, following) for following in index.next_token]
    outs = drafter.rollout(aux, embeds, index.layout, mask)
    normed = torch.stack(
        [drafter.read(out).index_select(0, rows) for out, rows in zip(outs, index.student, strict=True)]
    )
    weight = index.weight.to(precise(normed).dtype)
    if covered is not None:
        weight = weight * covered.index_select(0, index.teacher).to(weight.dtype)
    gold, known = _text_tokens(ids, index, teacher)
    if loss.term == "hard_ce":
        weight = weight * known.to(weight.dtype)
    document = index.layout.document.index_select(0, index.teacher)
    decay = loss.depth_decay ** torch.arange(len(weight), dtype=weight.dtype, device=weight.device)
    share = decay.unsqueeze(1) * shares(weight, document, index.layout.documents, loss.normalisation)
    states = rms_norm(last.index_select(0, index.teacher), teacher.norm, teacher.eps)
    head = drafter.head
    if loss.term == "soft_ce":
        result = soft_cross_entropy(normed, head, states, teacher.head, share, chunk or _FAST_CHUNK)
    else:
        result = distillation_loss(
            normed, head, states, teacher.head, gold, share, loss.term, loss.lk_eta, chunk or _CHUNK
        )
    rows = len(index.layout.rows)
    return LossResult(
        result.loss,
        (weight * result.term).sum(dim=1),
        weight.sum(dim=1),
        acceptance(*(by_row(weight * x, index.student, rows) for x in (result.hit, result.overlap, 1.0))),
    )


def _text_tokens(ids: Tensor, index: TTTIndex, teacher: Teacher) -> tuple[Tensor, Tensor]:
    """([P] place in the draft vocabulary of the token after each teacher position, [P] whether it has one)."""
    token = ids.index_select(0, (index.teacher + 1).clamp(max=len(ids) - 1))
    if teacher.kept is None:
        return token, torch.ones_like(token, dtype=torch.bool)
    place = torch.searchsorted(teacher.kept, token).clamp(max=len(teacher.kept) - 1)
    return place, teacher.kept.index_select(0, place) == token
