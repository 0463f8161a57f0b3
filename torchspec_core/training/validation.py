"""Teacher-forced validation: how many of the drafter's tokens are the target's own most likely tokens.

Everything is measured against the target's argmax over its *whole* vocabulary: a token that the draft vocabulary
lacks is a miss, as it is in serving. `estimated_acceptance_length` is an estimate from these rows, not a measured
acceptance: one plus the mean number of leading depths of a row that are right.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from torchspec_core.drafters.eagle3 import Eagle3Drafter
from torchspec_core.drafters.layers import rms_norm
from torchspec_core.objectives.eagle3 import Teacher, embed_rows
from torchspec_core.training.batch import PackedBatch

_CHUNK = 512


@dataclass(frozen=True)
class DraftedRows:
    """hit [D, R]: the draft is the target's argmax; valid [D, R]: there is a supervised target."""

    hit: Tensor
    valid: Tensor


@torch.no_grad()
def drafted_rows(
    drafter: Eagle3Drafter, teacher: Teacher, full_head: Tensor, kept: Tensor, batch: PackedBatch
) -> DraftedRows:
    """Compare all drafts of a batch with the target.

    Args:
        full_head: [V, H_t] the target's whole head.
        kept: [V_d] int64 target ids of the draft vocabulary.
    """
    index = batch.index
    states = rms_norm(batch.last.index_select(0, index.teacher), teacher.norm, teacher.eps)
    wanted = torch.cat([(part @ full_head.T).argmax(dim=-1) for part in states.split(_CHUNK)])
    embeds = [embed_rows(teacher.embedding, batch.ids, following) for following in index.next_token]
    outs = drafter.rollout(batch.aux, embeds, index.layout)
    hit = torch.zeros(len(outs), len(index.layout.rows), dtype=torch.bool)
    valid = torch.zeros_like(hit)
    for depth, out in enumerate(outs):
        drafts = kept[torch.cat([drafter.logits(part).argmax(dim=-1) for part in out.split(_CHUNK)])]
        taught = index.weight[depth] > 0
        rows = index.student[depth][taught]
        valid[depth, rows] = True
        hit[depth, rows] = drafts[rows] == wanted[taught]
    return DraftedRows(hit, valid)


def validate(
    drafter: Eagle3Drafter,
    teacher: Teacher,
    full_head: Tensor,
    kept: Tensor,
    batches: Iterable[PackedBatch],
) -> dict[str, float]:
    """Flat metrics: `acc_d` (of one depth alone), `slot_d` (this depth and all before it right),
    `estimated_acceptance_length`, `rows`."""
    parts = [drafted_rows(drafter, teacher, full_head, kept, batch) for batch in batches]
    hit, valid = torch.cat([p.hit for p in parts], dim=1), torch.cat([p.valid for p in parts], dim=1)
    count = valid.sum(dim=1).clamp(min=1)
    accuracy = (hit & valid).sum(dim=1) / count
    leading = (hit & valid).long().cumprod(dim=0)
    slots = leading.sum(dim=1) / count
    metrics = {f"acc_{d}": value for d, value in enumerate(accuracy.tolist())}
    metrics |= {f"slot_{d}": value for d, value in enumerate(slots.tolist())}
    return {**metrics, "estimated_acceptance_length": 1.0 + float(slots.sum()), "rows": float(valid[0].sum())}
