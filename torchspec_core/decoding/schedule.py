"""How many of the drafted tokens are worth verifying: fixed thresholds, and the confidence scheduler of DSpark.

A confidence c_j estimates that draft j of a row is accepted given that those before it were; it may depend on the
tokens before draft j only, never on draft j itself. Then every rule here keeps the output's law: whether draft j is
verified is decided without looking at it. The scheduler (arXiv 2607.05147, algorithm 1) must stop at the first draft
that does not pay; searching on for the best prefix would let a later confidence, which knows the token, decide.

Shape legend: R rows (requests), K drafts a row. A schedule is [R] int64, the leading drafts to verify, 0..K.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchspec_core.decoding.draft import Proposal
from torchspec_core.decoding.target import CachedTarget

_REFIT_STEPS, _RIDGE, _DAMPING, _NEWTON_STEPS = 100, 1e-3, 50.0, 8


@dataclass(frozen=True)
class StepCost:
    """Measured seconds of one step that verifies `tokens` tokens in all rows together, both ascending."""

    tokens: tuple[int, ...]
    seconds: tuple[float, ...]

    def rate(self, tokens: int) -> float:
        """Steps a second; linear between the measured points, the nearest one outside them."""
        return 1.0 / float(np.interp(tokens, self.tokens, self.seconds))


def measure_step_cost(target: CachedTarget, rows: int, k: int, context: int = 64, repeats: int = 5) -> StepCost:
    """Median seconds of this target's steps over `rows` rows that verify 0..k drafts each, after `context` tokens."""
    target.prefill([[0] * context] * rows, context + k + 1)
    seconds = []
    for width in range(1, k + 2):
        tokens = torch.zeros(rows, width, dtype=torch.int64)
        positions = torch.arange(context, context + width).expand(rows, -1)
        times = []
        for _ in range(repeats):
            began = time.perf_counter()
            target.verify(tokens, positions)
            times.append(time.perf_counter() - began)
        seconds.append(statistics.median(times))
    return StepCost(tuple(rows * width for width in range(1, k + 2)), tuple(seconds))


def below_threshold(confidence: Tensor, threshold: float) -> Tensor:
    """Verify the drafts before the first one whose confidence[R, K] is below `threshold`."""
    return (confidence >= threshold).long().cumprod(dim=1).sum(dim=1)


def early_stop(confidence: Tensor, rate: Callable[[int], float]) -> Tensor:
    """Algorithm 1: add drafts by falling survival while tokens a second grow; stop at the first that does not pay.

    confidence: [R, K] in [0, 1]. rate: steps a second when that many tokens are verified in all rows together.
    """
    rows, slots = confidence.shape
    survival = confidence.double().cumprod(dim=1).flatten()
    # Stable: of equal survivals the earlier draft of a row comes first, so that every schedule is a prefix.
    order = survival.argsort(descending=True, stable=True).tolist()
    chosen = [0] * rows
    verified, expected = rows, float(rows)
    best = expected * rate(verified)
    for place in order:
        verified, expected = verified + 1, expected + float(survival[place])
        gained = expected * rate(verified)
        if gained <= best:
            break
        best = gained
        chosen[place // slots] += 1
    return torch.tensor(chosen, dtype=torch.int64)


@dataclass
class AcceptanceEstimator:
    """Confidence for drafters that have no confidence head: c = sigmoid(w f + b_k), refitted while decoding.

    f is the logit of the draft law's largest probability: it scores the law, not the drawn token. Observed are the
    accepted slots and the first rejected one of each row; every hundred steps Newton's method refits w and all b_k
    with a ridge towards the current values and moves the share n / (n + 50) of the way (n = observations).
    """

    slots: int
    weight: float = 0.5
    bias: NDArray[np.float64] = field(init=False)
    _seen: list[tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.float64]]] = field(init=False)
    _steps: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.bias, self._seen = np.full(self.slots, -0.2), []

    def confidence(self, peak: Tensor) -> Tensor:
        """peak: [R, K] largest probability of each draft's law; [R, K] fp64."""
        return torch.sigmoid(self.weight * _logit(peak) + torch.from_numpy(self.bias[: peak.shape[1]]))

    def observe(self, peak: Tensor, accepted: Tensor, verified: Tensor) -> None:
        """One verification step: accepted, verified [R] of the drafts with `peak` [R, K]."""
        slot = torch.arange(peak.shape[1])
        known = slot < torch.minimum(accepted + 1, verified).unsqueeze(1)
        hit = (slot < accepted.unsqueeze(1))[known]
        places = slot.expand_as(known)[known]
        self._seen.append((_logit(peak)[known].numpy(), places.numpy(), hit.double().numpy()))
        self._steps += 1
        if self._steps % _REFIT_STEPS == 0:
            self.refit()

    def refit(self) -> None:
        """Fit what was seen since the last fit."""
        feature, place, hit = (np.concatenate(column) for column in zip(*self._seen, strict=True))
        self._seen.clear()
        if not len(feature):
            return
        design = np.zeros((len(feature), 1 + self.slots))
        design[:, 0] = feature
        design[np.arange(len(feature)), 1 + place] = 1.0
        before = np.concatenate(([self.weight], self.bias))
        fitted = before.copy()
        for _ in range(_NEWTON_STEPS):
            mean = 1.0 / (1.0 + np.exp(-design @ fitted))
            gradient = design.T @ (hit - mean) - _RIDGE * (fitted - before)
            hessian = (design * (mean * (1.0 - mean))[:, None]).T @ design + _RIDGE * np.eye(len(fitted))
            fitted = fitted + np.linalg.solve(hessian, gradient)
        moved = before + len(feature) / (len(feature) + _DAMPING) * (fitted - before)
        self.weight, self.bias = float(moved[0]), moved[1:]


@dataclass(frozen=True)
class Dynamic:
    """Dynamic verification of one run: a rule over confidences, which are the drafter's own or the estimator's."""

    rule: Callable[[Tensor], Tensor]
    estimator: AcceptanceEstimator | None = None

    def limits(self, proposal: Proposal) -> Tensor:
        """The schedule of one step."""
        if proposal.confidence is not None:
            return self.rule(proposal.confidence)
        assert self.estimator is not None and proposal.peak is not None
        return self.rule(self.estimator.confidence(proposal.peak))

    def observe(self, proposal: Proposal, accepted: Tensor, verified: Tensor) -> None:
        """What became of it: accepted, verified [R]."""
        if proposal.confidence is None and self.estimator is not None and proposal.peak is not None:
            self.estimator.observe(proposal.peak, accepted, verified)


def _logit(probability: Tensor) -> Tensor:
    """log(p / (1 - p)) in fp64, kept finite."""
    inside = probability.double().clamp(1e-6, 1.0 - 1e-6)
    return torch.log(inside) - torch.log1p(-inside)
