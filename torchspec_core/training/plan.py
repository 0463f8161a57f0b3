"""The batch plan: which samples form which step, for all epochs, as a pure function of lengths and settings.

Samples are shuffled, cut into windows of a few dozen steps, sorted by length inside a window (attention is laid out
by the longest document of a batch), filled into batches up to the token budget, and the batches of an epoch are
shuffled again. So batches hold like lengths, yet no order by length is left across steps. With several ranks a batch
is dealt longest first to the rank with the fewest tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from torchspec_core.errors import UserError

_WINDOW_STEPS = 32


@dataclass(frozen=True)
class PlannedStep:
    """One optimiser step: `ranks[r]` holds the sample indices of rank r (possibly none)."""

    epoch: int
    ranks: tuple[tuple[int, ...], ...]


def plan_epoch(
    lengths: np.ndarray, seed: int, epoch: int, tokens_per_step: int, world_size: int = 1
) -> list[PlannedStep]:
    """All steps of one epoch; each sample is in exactly one.

    Args:
        lengths: [samples] tokens.
        tokens_per_step: most tokens of one step, all ranks together.

    Raises:
        UserError: a sample is longer than a rank's share of the budget.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    share = tokens_per_step // world_size
    if len(lengths) and int(lengths.max()) > share:
        raise UserError(
            f"a sample of {int(lengths.max())} tokens does not fit "
            f"training.tokens_per_step={tokens_per_step} on {world_size} rank(s); raise it or lower data.max_length"
        )
    random = np.random.default_rng([seed, epoch])
    order = random.permutation(len(lengths))
    window = max(1, int(_WINDOW_STEPS * tokens_per_step / max(1.0, float(lengths.mean())))) if len(lengths) else 1
    steps: list[PlannedStep] = []
    for start in range(0, len(order), window):
        part = order[start : start + window]
        part = part[np.argsort(-lengths[part], kind="stable")]
        steps += [PlannedStep(epoch, ranks) for ranks in _fill(part, lengths, share, world_size)]
    return [steps[i] for i in random.permutation(len(steps))]


def _fill(samples: np.ndarray, lengths: np.ndarray, share: int, world_size: int) -> list[tuple[tuple[int, ...], ...]]:
    """Batches of samples sorted longest first; a batch closes when the next sample fits no rank."""
    batches = []
    ranks: list[list[int]] = [[] for _ in range(world_size)]
    used = [0] * world_size
    for sample in samples.tolist():
        rank = used.index(min(used))
        if used[rank] + lengths[sample] > share:
            batches.append(tuple(tuple(r) for r in ranks))
            ranks, used, rank = [[] for _ in range(world_size)], [0] * world_size, 0
        ranks[rank].append(sample)
        used[rank] += int(lengths[sample])
    if any(ranks):
        batches.append(tuple(tuple(r) for r in ranks))
    return batches


def plan_steps(
    lengths: np.ndarray, seed: int, epochs: float, tokens_per_step: int, world_size: int = 1
) -> list[PlannedStep]:
    """The steps of all epochs; a fractional last epoch takes that share of its steps, rounded up."""
    steps: list[PlannedStep] = []
    for epoch in range(math.ceil(epochs)):
        whole = plan_epoch(lengths, seed, epoch, tokens_per_step, world_size)
        share = min(1.0, epochs - epoch)
        steps += whole[: math.ceil(share * len(whole))]
    return steps
