"""Sequential temperature scaling of confidences: one temperature for each slot of a block, fitted on held-out blocks.

Slot k's confidence sigmoid(logit_k / T_k) estimates that draft k is accepted given that those before it were; what a
scheduler uses is the cumulative product, the probability that the first k + 1 drafts are all accepted. So temperatures
are fitted from left to right, each on that product with the earlier ones fixed (arXiv 2607.05147 names the method and
gives no details): the one of `GRID` with the least expected calibration error, or 1 where none is better. A temperature
keeps the order of a slot's confidences.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BINS = 15
GRID = np.geomspace(0.25, 4.0, 60)


@dataclass(frozen=True)
class Calibration:
    """temperatures: one a slot. before, after: mean over the slots of the expected calibration error."""

    temperatures: tuple[float, ...]
    before: float
    after: float


def calibration_error(estimate: NDArray[np.float64], happened: NDArray[np.float64], bins: int = BINS) -> float:
    """Expected calibration error: over bins of equal width of `estimate`, the mean distance between what was estimated
    and what happened.

    Args:
        estimate: [N] in [0, 1].
        happened: [N] in [0, 1]: 0 or 1, or the known probability.
    """
    if not len(estimate):
        return 0.0
    place = np.minimum((estimate * bins).astype(np.int64), bins - 1)
    gap = np.bincount(place, estimate - happened, bins)
    return float(np.abs(gap).sum() / len(estimate))


def fit_temperatures(
    logit: NDArray[np.float64], accepted: NDArray[np.float64], valid: NDArray[np.bool_]
) -> Calibration:
    """Fit one temperature a slot.

    Args:
        logit: [N, K] of each block's slots.
        accepted: [N, K] whether, or how probably, all drafts up to the slot are accepted.
        valid: [N, K] true for slots that are known; a slot counts while all before it do.
    """
    known = np.logical_and.accumulate(valid, axis=1)
    reached = np.ones(len(logit))  # probability, by the temperatures so far, that all drafts before the slot pass
    temperatures: list[float] = []
    for slot in range(logit.shape[1]):
        rows = known[:, slot]
        temperatures.append(_fit_slot(logit[rows, slot], reached[rows], accepted[rows, slot]))
        reached = reached * _sigmoid(logit[:, slot] / temperatures[-1])
    before = _mean_error(logit, accepted, known, [1.0] * len(temperatures))
    after = _mean_error(logit, accepted, known, temperatures)
    if after > before:  # each step improved its own slot only; do not leave the whole worse than it was
        temperatures, after = [1.0] * len(temperatures), before
    return Calibration(tuple(temperatures), before, after)


def _fit_slot(logit: NDArray[np.float64], reached: NDArray[np.float64], accepted: NDArray[np.float64]) -> float:
    def error(temperature: float) -> float:
        return calibration_error(reached * _sigmoid(logit / temperature), accepted)

    return min((1.0, *GRID.tolist()), key=error)


def _mean_error(
    logit: NDArray[np.float64], accepted: NDArray[np.float64], known: NDArray[np.bool_], temperatures: list[float]
) -> float:
    chain = np.cumprod(_sigmoid(logit / np.asarray(temperatures)), axis=1)
    return float(
        np.mean([calibration_error(chain[known[:, k], k], accepted[known[:, k], k]) for k in range(logit.shape[1])])
    )


def _sigmoid(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return 0.5 * (1.0 + np.tanh(0.5 * x))
