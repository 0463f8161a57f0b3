"""The objectives of the block drafters, one row of the vocabulary for each supervised slot.

- DFlash: hard cross-entropy on the text's tokens, weights exp(-n / gamma) or those of D-PACE; L1 distance to the
  target's distribution beside it, if asked for.
- DFlash 2: that, plus cross-entropy of the selector among the best candidates. Candidate ids are taken from the base
  scores without gradient; a gold token that is missing replaces the last one; the token before is the true one.
- DSpark: cross-entropy and L1 distance to the target's distribution, the Markov bias included, and binary
  cross-entropy of the confidence against the probability of acceptance, 1 - L1 / 2 (no gradient).

The selector's and DSpark's slots count only while every slot before them in the block is supervised. Each term is a
weighted sum over the batch divided by the sum of its weights.
"""

from __future__ import annotations

from collections.abc import Mapping
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
from torchspec_core.objectives.metrics import acceptance
from torchspec_core.objectives.reduction import Normalisation, precise, shares
from torchspec_core.objectives.result import LossResult
from torchspec_core.objectives.terms import dpace_weights, hard_cross_entropy, l1_distance


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
    """Factors of the terms, how slots are weighed and added up, and where gradients stop.

    Attributes:
        distance: DFlash's and DFlash 2's L1 distance to the target's distribution, beside their cross-entropy.
        dpace_alpha: smoothing of D-PACE, which takes the place of exp(-n / gamma) in DFlash's and DFlash 2's
            cross-entropy at the price of one more pass over the head; None = off.
        selector: of DFlash 2's selector cross-entropy.
        selector_stop_gradient: the selector's loss does not move the backbone.
        cross_entropy, l1, confidence: of DSpark's terms.
        confidence_stop_gradient: the confidence's loss does not move backbone and Markov head.
    """

    distance: float = 0.0
    dpace_alpha: float | None = None
    normalisation: Normalisation = "supervised"
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
    loss, seen = _slot_terms(drafter, teacher, ids, aux, last, index, weights, chunk, form)
    taught = (index.chain if drafter.config.markov_rank is not None else index.weight) > 0
    return _result(loss, seen, index, taught, drafter.config.predictions)


@torch.no_grad()
def judged_slots(
    drafter: BlockDrafter, teacher: BlockTeacher, ids: Tensor, aux: Tensor, last: Tensor, index: BlockIndex
) -> tuple[Tensor, Tensor, Tensor]:
    """What DSpark's confidence head says of each slot and what is so, after the true text; arguments as `block_loss`.

    Returns:
        ([M, P] logit, [M, P] probability that a drawn draft is accepted, [M, P] boolean: the slot and all before it
        are supervised).
    """
    _, seen = _slot_terms(drafter, teacher, ids, aux, last, index, BlockWeights())
    taught, places = (index.chain > 0).to(seen["logit"].dtype), drafter.config.predictions
    logit, overlap, known = (by_block(taught * x, index, places) for x in (seen["logit"], seen["overlap"], 1.0))
    return logit, overlap, known > 0


def by_block(values: Tensor, index: BlockIndex, predictions: int) -> Tensor:
    """[R] of the weighted slots, 0 for those that fill up, to [M, P]."""
    flat = values.new_zeros(len(index.anchor) * predictions)
    return flat.index_add(0, index.slot, values).view(-1, predictions)


def _slot_terms(
    drafter: BlockDrafter,
    teacher: BlockTeacher,
    ids: Tensor,
    aux: Tensor,
    last: Tensor,
    index: BlockIndex,
    weights: BlockWeights,
    chunk: int = 512,
    form: BlockForm = GatheredBlocks,
) -> tuple[Tensor, _Seen]:
    config, tables = drafter.config, teacher.tables
    embeds = block_embeds(tables.embedding, ids, index.anchor, config.block_size, config.mask_token_id)
    hidden = drafter(aux, embeds, index.layout, form).flatten(0, 1).index_select(0, index.slot)
    gold, previous = ids.index_select(0, index.label), ids.index_select(0, index.previous)
    document = index.layout.document.index_select(0, index.label)

    def share(weight: Tensor) -> Tensor:
        weight = weight.to(precise(hidden).dtype)
        return shares(weight, document, index.layout.documents, weights.normalisation)

    weight = index.weight
    if config.markov_rank is None and weights.dpace_alpha is not None:
        weight = _dpace(tables, hidden.detach(), gold, index, config.predictions, weights.dpace_alpha, chunk)
    rows = _Rows(hidden, gold, previous, share(weight), share(index.chain))
    compared = config.markov_rank is not None or weights.distance > 0.0
    states = hidden.new_empty(len(hidden), 0)
    if compared:
        states = rms_norm(last.index_select(0, index.previous), teacher.norm, teacher.eps)
    if config.markov_rank is not None:
        return _dspark(drafter, tables, rows, states, weights, chunk)
    if config.selector is not None:
        return _dflash2(drafter, tables, rows, states, weights, chunk)
    return _dflash(tables, rows, states, weights, chunk)


@dataclass(frozen=True)
class _Rows:
    """hidden [R, H], gold and previous tokens [R], shares of the slot in the loss [R]."""

    hidden: Tensor
    gold: Tensor
    previous: Tensor
    share: Tensor
    chain: Tensor


_Seen = Mapping[str, Tensor]
"""What a loss saw of each slot, [R] each: `loss`, `hit`, `overlap` where the target was compared, the kind's own."""


def _dpace(
    tables: Tables, hidden: Tensor, gold: Tensor, index: BlockIndex, predictions: int, alpha: float, chunk: int
) -> Tensor:
    def confidence(hidden: Tensor, gold: Tensor) -> tuple[Tensor, Tensor]:
        loss = hard_cross_entropy(precise(hidden @ tables.head.T).log_softmax(dim=-1), gold)
        return loss.sum(), torch.exp(-loss)

    sure = chunked(confidence, (hidden, gold), (), chunk)[1]
    taught = (index.weight > 0).to(sure.dtype)
    return dpace_weights(sure, taught, index.slot, len(index.anchor), predictions, alpha)


def _text_terms(
    scores: Tensor, gold: Tensor, states: Tensor, tables: Tables, distance: float
) -> tuple[Tensor, list[Tensor]]:
    """(cost [n] of a slot, its cross-entropy, hit, and its overlap if there are states to compare with)."""
    log_q = precise(scores).log_softmax(dim=-1)
    loss = hard_cross_entropy(log_q, gold)
    seen = [loss, (log_q.argmax(dim=-1) == gold).to(loss.dtype)]
    if not states.shape[1]:
        return loss, seen
    apart = l1_distance(precise(states @ tables.head.T).log_softmax(dim=-1), log_q)
    return loss + distance * apart, [*seen, 1.0 - 0.5 * apart]


def _text_names(states: Tensor) -> tuple[str, ...]:
    return ("loss", "hit", "overlap") if states.shape[1] else ("loss", "hit")


def _dflash(tables: Tables, rows: _Rows, states: Tensor, weights: BlockWeights, chunk: int) -> tuple[Tensor, _Seen]:
    def terms(hidden: Tensor, gold: Tensor, states: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
        cost, seen = _text_terms(hidden @ tables.head.T, gold, states, tables, weights.distance)
        return (share * cost).sum(), torch.stack(seen, dim=1)

    loss, seen = chunked(terms, (rows.hidden, rows.gold, states, rows.share), (), chunk)
    return loss, dict(zip(_text_names(states), seen.T, strict=True))


def _dflash2(
    drafter: BlockDrafter, tables: Tables, rows: _Rows, states: Tensor, weights: BlockWeights, chunk: int
) -> tuple[Tensor, _Seen]:
    selector, count = drafter.candidate_selector, drafter.config.selector.top_k  # type: ignore[union-attr]
    names = tuple(name for name, _ in selector.named_parameters())

    def terms(
        hidden: Tensor,
        gold: Tensor,
        states: Tensor,
        previous: Tensor,
        share: Tensor,
        chain: Tensor,
        *parameters: Tensor,
    ) -> tuple[Tensor, Tensor]:
        scores = hidden @ tables.head.T
        cost, seen = _text_terms(scores, gold, states, tables, weights.distance)
        ids = scores.detach().topk(count, dim=-1).indices
        present = ids == gold.unsqueeze(1)
        found = present.any(dim=1)
        ids[:, -1] = torch.where(found, ids[:, -1], gold)
        target = torch.where(found, present.long().argmax(dim=1), count - 1)
        base, at = precise(scores.gather(1, ids)), hidden
        if weights.selector_stop_gradient:
            base, at = base.detach(), hidden.detach()
        edges = torch.func.functional_call(
            selector, dict(zip(names, parameters, strict=True)), (at, previous, ids, tables)
        )
        path = base + precise(edges)
        choice = functional.cross_entropy(path, target, reduction="none")
        seen += [choice, path.argmax(dim=1) == target, found]
        total = (share * cost).sum() + weights.selector * (chain * choice).sum()
        return total, torch.stack([x.to(choice.dtype) for x in seen], dim=1)

    loss, seen = chunked(
        terms,
        (rows.hidden, rows.gold, states, rows.previous, rows.share, rows.chain),
        tuple(selector.parameters()),
        chunk,
    )
    own = ("selector_loss", "selector_acc", f"recall_{count}")
    return loss, dict(zip((*_text_names(states), *own), seen.T, strict=True))


def _dspark(
    drafter: BlockDrafter, tables: Tables, rows: _Rows, states: Tensor, weights: BlockWeights, chunk: int
) -> tuple[Tensor, _Seen]:
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
        scores = hidden @ tables.head.T + features @ markov.T
        log_q = precise(scores).log_softmax(dim=-1)
        loss = hard_cross_entropy(log_q, gold)
        distance = l1_distance(precise(states @ tables.head.T).log_softmax(dim=-1), log_q)
        accepted = 1.0 - 0.5 * distance.detach()
        inputs = torch.cat((hidden, features), dim=-1)
        inputs = inputs.detach() if weights.confidence_stop_gradient else inputs
        logit = precise(functional.linear(inputs, confidence, bias).squeeze(-1))
        judged = functional.binary_cross_entropy_with_logits(logit, accepted, reduction="none")
        hit = (log_q.argmax(dim=-1) == gold).to(loss.dtype)
        total = weights.cross_entropy * loss + weights.l1 * distance + weights.confidence * judged
        return (chain * total).sum(), torch.stack((loss, hit, accepted, distance, judged, logit), dim=1)

    proj = drafter.confidence_head.proj
    loss, seen = chunked(
        terms,
        (rows.hidden, drafter.markov_head.features(rows.previous), states, rows.gold, rows.chain),
        (drafter.markov_head.markov_w2.weight, proj.weight, proj.bias),
        chunk,
    )
    return loss, dict(zip(("loss", "hit", "overlap", "l1", "confidence_loss", "logit"), seen.T, strict=True))


_BY_PLACE = ("loss", "hit", "overlap", "logit")


def _result(loss: Tensor, seen: _Seen, index: BlockIndex, taught: Tensor, predictions: int) -> LossResult:
    """Parts by prediction over the slots that the cross-entropy counts; the kind's own are weighted means over the
    slots whose predecessors are all supervised."""
    counted = taught.to(loss.dtype)

    def places(values: Tensor) -> Tensor:
        return by_block(values * counted, index, predictions).T

    overlap = seen.get("overlap")
    count = places(torch.ones_like(counted))
    extras = acceptance(places(seen["hit"]), None if overlap is None else places(overlap), count)
    chain = index.chain.to(loss.dtype)
    for name, values in seen.items():
        if name not in _BY_PLACE:
            extras[name] = torch.stack(((chain * values).sum(), chain.sum()))
    return LossResult(loss, places(seen["loss"]).sum(dim=1), count.sum(dim=1), extras)
