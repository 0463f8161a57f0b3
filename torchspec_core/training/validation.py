"""Teacher-forced validation: how far the drafter's tokens and distributions are the target's own.

Everything is measured against the target over its *whole* vocabulary: a token that the draft vocabulary lacks is a
miss, and its probability is lost, as in serving. Names and estimates as in `objectives/metrics.py`.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from torchspec_core.drafters.eagle3 import Eagle3Drafter
from torchspec_core.drafters.layers import rms_norm
from torchspec_core.objectives.eagle3 import Teacher, embed_rows
from torchspec_core.objectives.metrics import acceptance, add_parts, by_row, estimates, means_of
from torchspec_core.objectives.reduction import precise
from torchspec_core.training.batch import PackedBatch

_CHUNK = 512


@torch.no_grad()
def drafted_parts(
    drafter: Eagle3Drafter, teacher: Teacher, full_head: Tensor, kept: Tensor, batch: PackedBatch
) -> dict[str, Tensor]:
    """Compare all drafts of a batch with the target: additive parts, [2] each.

    Args:
        full_head: [V, H_t] the target's whole head.
        kept: [V_d] int64 target ids of the draft vocabulary.
    """
    index = batch.index
    states = rms_norm(batch.last.index_select(0, index.teacher), teacher.norm, teacher.eps)
    embeds = [embed_rows(teacher.embedding, batch.ids, following) for following in index.next_token]
    outs = drafter.rollout(batch.aux, embeds, index.layout)
    hits, overlaps, masses = [], [], []
    for part in torch.arange(len(states)).split(_CHUNK):
        p = precise(states[part] @ full_head.T).softmax(dim=-1)
        wanted, p = p.argmax(dim=-1), p.index_select(1, kept)
        masses.append(p.sum(dim=-1))
        logits = [drafter.logits(out[index.student[depth, part]]) for depth, out in enumerate(outs)]
        hits.append(torch.stack([kept[q.argmax(dim=-1)] == wanted for q in logits]))
        overlaps.append(torch.stack([torch.minimum(precise(q).softmax(dim=-1), p).sum(dim=-1) for q in logits]))
    hit, overlap, mass = torch.cat(hits, dim=1), torch.cat(overlaps, dim=1), torch.cat(masses)
    valid, rows = (index.weight > 0).to(mass.dtype), len(index.layout.rows)
    taught = valid.amax(dim=0)
    return {
        **acceptance(*(by_row(valid * x, index.student, rows) for x in (hit, overlap, 1.0))),
        "kept_mass": torch.stack(((taught * mass).sum(), taught.sum())),
    }


def validate(
    drafter: Eagle3Drafter,
    teacher: Teacher,
    full_head: Tensor,
    kept: Tensor,
    batches: Iterable[PackedBatch],
) -> dict[str, float]:
    """Flat metrics: `acc_d`, `alpha_d`, `slot_d`, `slot_tv_d`, the two estimates, `kept_mass` (the target's
    probability of the draft vocabulary, the coverage of a pruned one), `rows`."""
    parts = add_parts([drafted_parts(drafter, teacher, full_head, kept, batch) for batch in batches])
    means = means_of(parts)
    return {**means, **estimates(means), "rows": float(parts["acc_0"][1])}
