"""The batch plan: which samples form which step, for all epochs, as a pure function of lengths and settings.

Samples are shuffled and cut into windows of a few dozen steps. Inside a window they are laid into batches that the
token budget bounds, and the steps of an epoch are shuffled again. So samples that share a batch were chosen by their
lengths, but from a window that chance filled, and no order by length is left across steps.

- `packed`: a batch starts with the longest sample left and takes the longest that still fits, until nothing does;
  batches that a window cannot fill go on to the next one. Documents lie end to end, so nearly all rows hold a token.
- `grouped`: neighbours by length, as many as fit when each is as long as the longest. For batches laid out as a
  rectangle, and the way to keep attention small if lengths differ by orders of magnitude.

A step is one batch, or several that are accumulated or dealt out to ranks (`PlannedStep.of_rank`). The steps do not
depend on the number of ranks: a run that goes on with another number sees the same samples in the same order. Batches
of a step have like lengths and are nearly full, so ranks take equally long.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from torchspec_core.errors import UserError

Batching = Literal["packed", "grouped"]
_WINDOW_LEAST, _WINDOW_MOST = 16, 64
"""Batches of a window: a quarter of the data within these bounds. Small data in one window would give the same
batches in every epoch; a larger window than the upper bound fills batches no better."""
_SPILL = 0.01
"""A packed batch that leaves more than this share of its budget empty is tried again with the next window."""
_MOST_LAID = 2
"""Attention lays the documents of a batch side by side, each as wide as the longest; a packed batch takes no more of
them than make that many budgets, even if more would fit."""

Batch = tuple[int, ...]


@dataclass(frozen=True)
class PlannedStep:
    """One optimiser step: `batches` holds the sample indices of each of its batches."""

    epoch: int
    batches: tuple[Batch, ...]

    def of_rank(self, rank: int, world_size: int) -> tuple[Batch, ...]:
        """The batches of one rank, possibly none."""
        return self.batches[rank::world_size]


def plan_epoch(
    lengths: np.ndarray,
    seed: int,
    epoch: int,
    tokens_per_step: int,
    batching: Batching = "packed",
    batches_per_step: int = 1,
) -> list[PlannedStep]:
    """All steps of one epoch; each sample is in exactly one.

    Args:
        lengths: [samples] tokens.
        tokens_per_step: most tokens of one step, all batches together.
        batches_per_step: the budget is shared equally among so many batches.

    Raises:
        UserError: a sample is longer than a batch's share of the budget.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    budget = tokens_per_step // batches_per_step
    if len(lengths) and int(lengths.max()) > budget:
        shared = f" in {batches_per_step} batches" if batches_per_step > 1 else ""
        raise UserError(
            f"a sample of {int(lengths.max())} tokens does not fit "
            f"training.tokens_per_step={tokens_per_step}{shared}; raise it or lower data.max_length"
        )
    random = np.random.default_rng([seed, epoch])
    order = random.permutation(len(lengths))
    per_batch = budget / max(1.0, float(lengths.mean())) if len(lengths) else 1.0
    window = max(1, int(per_batch * min(_WINDOW_MOST, max(_WINDOW_LEAST, len(lengths) / per_batch / 4))))
    lay = _LAY[batching]
    batches: list[Batch] = []
    over: list[Batch] = []
    for start in range(0, len(order), window):
        part = np.concatenate((*(np.asarray(batch) for batch in over), order[start : start + window]))
        laid, over = lay(part[np.argsort(-lengths[part], kind="stable")], lengths, budget)
        batches += laid
    batches += over
    steps = [
        PlannedStep(epoch, tuple(batches[i : i + batches_per_step])) for i in range(0, len(batches), batches_per_step)
    ]
    return [steps[i] for i in random.permutation(len(steps))]


def _lay_packed(samples: np.ndarray, lengths: np.ndarray, budget: int) -> tuple[list[Batch], list[Batch]]:
    """(full batches, batches to try again in the next window) of samples that come sorted longest first."""
    waiting = samples.tolist()[::-1]
    size = [int(lengths[sample]) for sample in waiting]  # ascending
    batches: list[Batch] = []
    empty: list[int] = []
    while waiting:
        batch, longest = [waiting.pop()], size.pop()
        room, most = budget - longest, _MOST_LAID * budget // max(1, longest)
        while len(batch) < most and (fits := bisect.bisect_right(size, room)):
            batch.append(waiting.pop(fits - 1))
            room -= size.pop(fits - 1)
        batches.append(tuple(batch))
        empty.append(room)
    emptiest = np.argsort(-np.asarray(empty), kind="stable")
    # Bounded: samples of which no two fit together would pile up.
    again = {i for i in emptiest[: max(1, len(batches) // 4)].tolist() if empty[i] > _SPILL * budget}
    return [b for i, b in enumerate(batches) if i not in again], [b for i, b in enumerate(batches) if i in again]


def _lay_grouped(samples: np.ndarray, lengths: np.ndarray, budget: int) -> tuple[list[Batch], list[Batch]]:
    """The same for neighbours: documents times the longest of them stays within the budget."""
    batches: list[Batch] = []
    start = 0
    while start < len(samples):
        end = start + max(1, budget // max(1, int(lengths[samples[start]])))
        batches.append(tuple(samples[start:end].tolist()))
        start = end
    return batches[:-1], batches[-1:]


_LAY: dict[Batching, Callable[[np.ndarray, np.ndarray, int], tuple[list[Batch], list[Batch]]]] = {
    "packed": _lay_packed,
    "grouped": _lay_grouped,
}


def plan_steps(
    lengths: np.ndarray,
    seed: int,
    epochs: float,
    tokens_per_step: int,
    batching: Batching = "packed",
    batches_per_step: int = 1,
) -> list[PlannedStep]:
    """The steps of all epochs; a fractional last epoch takes that share of its steps, rounded up."""
    steps: list[PlannedStep] = []
    for epoch in range(math.ceil(epochs)):
        whole = plan_epoch(lengths, seed, epoch, tokens_per_step, batching, batches_per_step)
        share = min(1.0, epochs - epoch)
        steps += whole[: math.ceil(share * len(whole))]
    return steps
