"""The objectives of the block drafters, one row of the vocabulary for each supervised slot.

- DFlash: hard cross-entropy on the text's tokens, weights exp(-n / gamma).
- DFlash 2: that, plus cross-entropy of the selector among the best candidates. Candidate ids are taken from the base
  scores without gradient; a gold token that is missing replaces the last one; the token before is the true one.
- DSpark: cross-entropy and L1 distance to the target's distribution, the Markov bias included, and binary
  cross-entropy of the confidence against the probability of acceptance, 1 - L1 / 2 (no gradient).

The selector's and DSpark's slots count only while every slot before them in the block is supervised. Each term is a
weighted sum over the batch divided by the sum of its weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from torchspec_core.drafters.blocks import BlockForm, GatheredBlocks
from torchspec_core.drafters.dflash import BlockDrafter
from torchspec_core.drafters.layers import rms_norm
from torchspec_core.drafters.slots import Tables
from torchspec_core.objectives.blocks import BlockIndex
from torchspec_core.objectives.chunked import chunked
from torchspec_core.objectives.result import LossResult


@dataclass(frozen=True)
class BlockTeacher:
    """What the losses need of the target; all frozen.

    Attributes:
        tables: embedding and head, [V, H] each.
        norm: [H] final norm weight; eps: its epsilon.
    """

    tables: Tables
    norm: Tensor
    eps: float


@dataclass(frozen=True)
class BlockWeights:
    """Factors of the terms, and where gradients stop.

    Attributes:
        selector: of DFlash 2's selector cross-entropy.
        selector_stop_gradient: the selector's loss does not move the backbone.
        cross_entropy, l1, confidence: of DSpark's terms.
        confidence_stop_gradient: the confidence's loss does not move backbone and Markov head.
    """

    selector: float = 1.0
    selector_stop_gradient: bool = False
    cross_entropy: float = 0.1
    l1: float = 0.9
    confidence: float = 1.0
    confidence_stop_gradient: bool = False


def block_embeds(embedding: Tensor, ids: Tensor, anchor: Tensor, size: int, mask_token_id: int) -> Tensor:
    """[M, size, H]: the embedding of each anchor's token, then of the mask token."""
    first = embedding.index_select(0, ids.index_select(0, anchor)).unsqueeze(1)
    return torch.cat((first, embedding[mask_token_id].expand(len(anchor), size - 1, -1)), dim=1)


def block_loss(
    drafter: BlockDrafter,
    teacher: BlockTeacher,
    ids: Tensor,
    aux: Tensor,
    last: Tensor,
    index: BlockIndex,
    weights: BlockWeights = BlockWeights(),
    chunk: int = 512,
    form: BlockForm = GatheredBlocks,
) -> LossResult:
    """Loss of a packed batch, by the drafter's kind.

    Args:
        ids: [N] int64 tokens.
        aux: [N, A * H] target states of the aux layers.
        last: [N, H] target's last layer state before its final norm.
        index: blocks and weighted slots of the batch.
        chunk: slots at a time; memory grows with chunk x V.

    Returns:
        The loss and its parts by prediction; zero, connected to every parameter, if no slot has a weight.
    """
    config = drafter.config
    embeds = block_embeds(teacher.tables.embedding, ids, index.anchor, config.block_size, config.mask_token_id)
    hidden = drafter(aux, embeds, index.layout, form).flatten(0, 1).index_select(0, index.slot)
    rows = _Rows(
        hidden,
        ids.index_select(0, index.label),
        ids.index_select(0, index.previous),
        _share(index.weight, aux),
        _share(index.chain, aux),
    )
    counted = index.weight
    if config.markov_rank is not None:
        counted = index.chain
        states = rms_norm(last.index_select(0, index.previous), teacher.norm, teacher.eps)
        loss, measures, names = _dspark(drafter, teacher.tables, rows, states, weights, chunk)
    elif config.selector is not None:
        loss, measures, names = _dflash2(drafter, teacher.tables, rows, weights, chunk)
    else:
        loss, measures, names = _dflash(teacher.tables, rows, chunk)
    return _result(loss, measures, names, index, counted > 0, config.predictions)


@dataclass(frozen=True)
class _Rows:
    """hidden [R, H], gold and previous tokens [R], weights divided by their sums [R]."""

    hidden: Tensor
    gold: Tensor
    previous: Tensor
    weight: Tensor
    chain: Tensor


def _share(weight: Tensor, like: Tensor) -> Tensor:
    share = weight / weight.sum().clamp(min=1e-9)
    return share if like.dtype == torch.float64 else share.float()


def _precise(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _cross_entropy(scores: Tensor, gold: Tensor) -> Tensor:
    return functional.cross_entropy(scores, gold, reduction="none")


def _dflash(tables: Tables, rows: _Rows, chunk: int) -> tuple[Tensor, Tensor, tuple[str, ...]]:
    def terms(hidden: Tensor, gold: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        scores = _precise(hidden @ tables.head.T)
        loss = _cross_entropy(scores, gold)
        hit = scores.argmax(dim=-1) == gold
        return (weight * loss).sum(), torch.stack((loss, hit.to(loss.dtype)), dim=1)

    loss, measures = chunked(terms, (rows.hidden, rows.gold, rows.weight), (), chunk)
    return loss, measures, ()


def _dflash2(
    drafter: BlockDrafter, tables: Tables, rows: _Rows, weights: BlockWeights, chunk: int
) -> tuple[Tensor, Tensor, tuple[str, ...]]:
    selector, count = drafter.candidate_selector, drafter.config.selector.top_k  # type: ignore[union-attr]
    names = tuple(name for name, _ in selector.named_parameters())

    def terms(
        hidden: Tensor, gold: Tensor, previous: Tensor, weight: Tensor, chain: Tensor, *parameters: Tensor
    ) -> tuple[Tensor, Tensor]:
        raw = hidden @ tables.head.T
        scores = _precise(raw)
        loss = _cross_entropy(scores, gold)
        ids = raw.detach().topk(count, dim=-1).indices
        first = ids[:, 0] == gold
        present = ids == gold.unsqueeze(1)
        found = present.any(dim=1)
        ids[:, -1] = torch.where(found, ids[:, -1], gold)
        target = torch.where(found, present.long().argmax(dim=1), count - 1)
        base, at = scores.gather(1, ids), hidden
        if weights.selector_stop_gradient:
            base, at = base.detach(), hidden.detach()
        edges = torch.func.functional_call(
            selector, dict(zip(names, parameters, strict=True)), (at, previous, ids, tables)
        )
        path = base + _precise(edges)
        choice = _cross_entropy(path, target)
        measures = torch.stack((loss, first.to(loss.dtype), choice, path.argmax(dim=1) == target, found), dim=1)
        return (weight * loss).sum() + weights.selector * (chain * choice).sum(), measures

    loss, measures = chunked(
        terms,
        (rows.hidden, rows.gold, rows.previous, rows.weight, rows.chain),
        tuple(selector.parameters()),
        chunk,
    )
    return loss, measures, ("selector_loss", "selector_acc", f"recall_{count}")


def _dspark(
    drafter: BlockDrafter, tables: Tables, rows: _Rows, states: Tensor, weights: BlockWeights, chunk: int
) -> tuple[Tensor, Tensor, tuple[str, ...]]:
    def terms(
        hidden: Tensor,
        features: Tensor,
        states: Tensor,
        gold: Tensor,
        chain: Tensor,
        markov: Tensor,
        confidence: Tensor,
        bias: Tensor,
    ) -> tuple[Tensor, Tensor]:
        scores = _precise(hidden @ tables.head.T + features @ markov.T)
        target = _precise(states @ tables.head.T).softmax(dim=-1)
        loss = _cross_entropy(scores, gold)
        distance = (scores.softmax(dim=-1) - target).abs().sum(dim=-1)
        accepted = 1.0 - 0.5 * distance.detach()
        seen = torch.cat((hidden, features), dim=-1)
        seen = seen.detach() if weights.confidence_stop_gradient else seen
        judged = functional.binary_cross_entropy_with_logits(
            _precise(functional.linear(seen, confidence, bias).squeeze(-1)), accepted, reduction="none"
        )
        hit = scores.argmax(dim=-1) == gold
        total = weights.cross_entropy * loss + weights.l1 * distance + weights.confidence * judged
        measures = torch.stack((loss, hit.to(loss.dtype), distance, judged, accepted), dim=1)
        return (chain * total).sum(), measures

    proj = drafter.confidence_head.proj
    loss, measures = chunked(
        terms,
        (rows.hidden, drafter.markov_head.features(rows.previous), states, rows.gold, rows.chain),
        (drafter.markov_head.markov_w2.weight, proj.weight, proj.bias),
        chunk,
    )
    return loss, measures, ("l1", "confidence_loss", "acceptance")


def _result(
    loss: Tensor, measures: Tensor, names: tuple[str, ...], index: BlockIndex, taught: Tensor, predictions: int
) -> LossResult:
    """Sums by prediction over the slots that the cross-entropy counts; extras are weighted means over the slots whose
    predecessors are all supervised."""
    mine = measures * taught.unsqueeze(1)
    sums = measures.new_zeros(predictions, 2).index_add(0, index.place, mine[:, :2])
    count = measures.new_zeros(predictions).index_add(0, index.place, taught.to(measures.dtype))
    chain = index.chain.to(measures.dtype)
    extras = {name: torch.stack(((chain * measures[:, 2 + i]).sum(), chain.sum())) for i, name in enumerate(names)}
    return LossResult(loss, sums[:, 0], sums[:, 1], count, extras)
