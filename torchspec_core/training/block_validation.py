"""Validation of block drafters from true anchors, on the path that the drafter would really take.

Each slot's token is chosen by the drafter after the one that it chose before (DFlash 2's selector, DSpark's Markov bias
look at it); the target's distributions stand on the true text. Names and estimates as in `objectives/metrics.py`;
`recall_1_n` and `recall_k_n` tell a candidate that is missing from one that is not selected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from torchspec_core.drafters.dflash import BlockConfig, BlockDrafter
from torchspec_core.drafters.layers import rms_norm
from torchspec_core.objectives.blocks import BlockIndex
from torchspec_core.objectives.calibration import fit_temperatures
from torchspec_core.objectives.dflash import BlockTeacher, block_embeds, by_block, judged_slots
from torchspec_core.objectives.metrics import acceptance, add_parts, by_place, estimates, means_of
from torchspec_core.objectives.reduction import precise
from torchspec_core.training.batch import PackedBatch

_CHUNK = 256
RECALL = 16  # candidates that `recall_k` looks at, for kinds without a selector


@torch.no_grad()
def drafted_blocks(drafter: BlockDrafter, teacher: BlockTeacher, batch: PackedBatch) -> dict[str, Tensor]:
    """Compare all blocks of a batch with the target: additive parts, [2] each."""
    index: BlockIndex = batch.index
    config, tables = drafter.config, teacher.tables
    places, blocks = config.predictions, len(index.anchor)
    embeds = block_embeds(tables.embedding, batch.ids, index.anchor, config.block_size, config.mask_token_id)
    hidden = drafter(batch.aux, embeds, index.layout)
    previous = batch.ids.index_select(0, index.anchor)
    valid = by_block((index.weight > 0).to(precise(hidden).dtype), index, places)
    # The state that teaches prediction n of a block is n places after its anchor's.
    at = (index.anchor.unsqueeze(1) + torch.arange(places)).clamp(max=len(batch.last) - 1)
    count = config.selector.top_k if config.selector is not None else min(RECALL, config.vocab_size)
    rows: list[Tensor] = []  # [places, 4, blocks of a chunk]: hit, overlap, recall of one and of `count` candidates
    for part in torch.arange(blocks).split(_CHUNK):
        before = previous[part]
        seen = []
        for place in range(places):
            scores, ids = drafter.scores(hidden[part, place], before, tables)
            states = rms_norm(batch.last.index_select(0, at[part, place]), teacher.norm, teacher.eps)
            p = precise(states @ tables.head.T).softmax(dim=-1)
            wanted = p.argmax(dim=-1, keepdim=True)
            candidates = scores.topk(count, dim=-1).indices if ids is None else ids
            best = scores.argmax(dim=-1, keepdim=True)
            before = (best if ids is None else ids.gather(1, best)).squeeze(1)
            q = precise(scores).softmax(dim=-1)
            overlap = torch.minimum(q, p if ids is None else p.gather(1, ids)).sum(dim=-1)
            hit, first = before == wanted.squeeze(1), candidates[:, 0] == wanted.squeeze(1)
            among = (candidates == wanted).any(dim=1)
            seen.append(torch.stack([x.to(q.dtype) for x in (hit, overlap, first, among)]))
        rows.append(torch.stack(seen))
    hit, overlap, first, among = torch.cat(rows, dim=2).unbind(1)
    valid = valid.T
    recalls = {"recall_1": (first * valid, valid), f"recall_{count}": (among * valid, valid)}
    return acceptance(hit, overlap, valid) | by_place(recalls)


def calibrate(
    drafter: BlockDrafter, teacher: BlockTeacher, batches: Sequence[PackedBatch]
) -> tuple[BlockConfig, dict[str, float]]:
    """The drafter's shape with temperatures of its confidence head fitted on the batches, and the calibration errors.

    Confidences are judged at temperature 1, after the true text, against the exact probability that a draft is
    accepted, which a finite set of drawn drafts would only scatter around.
    """
    parts = [judged_slots(drafter, teacher, b.ids, b.aux, b.last, b.index) for b in batches]
    logit, accepted, known = (torch.cat(part).double().numpy() for part in zip(*parts, strict=True))
    found = fit_temperatures(logit, accepted.cumprod(axis=1), known > 0)
    return replace(drafter.config, confidence_temperatures=found.temperatures), {
        "confidence_error_uncalibrated": found.before,
        "confidence_error": found.after,
    }


def validate_blocks(drafter: BlockDrafter, teacher: BlockTeacher, batches: Sequence[PackedBatch]) -> dict[str, float]:
    """Flat metrics: `acc_n` on the chosen path, `alpha_n`, `slot_n`, `slot_tv_n`, `recall_1_n`, `recall_k_n`, the two
    estimates, `rows`."""
    parts = add_parts([drafted_blocks(drafter, teacher, batch) for batch in batches])
    means = means_of(parts)
    return {**means, **estimates(means), "rows": float(parts["acc_0"][1])}
