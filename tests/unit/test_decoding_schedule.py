"""Scheduled verification: the counter-example to full search, brute force over prefixes, limits, and the estimator."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from torchspec_core.decoding.schedule import AcceptanceEstimator, StepCost, below_threshold, early_stop


def test_early_stop_equals_brute_force_over_prefixes_on_concave_curves() -> None:
    numbers = np.random.default_rng(0)
    for _ in range(40):
        confidence = numbers.random((3, 3))
        cost, slope = numbers.random() + 0.5, numbers.random() * 0.5

        def rate(tokens: int, cost: float = cost, slope: float = slope) -> float:
            return 1.0 / (cost + slope * tokens)

        survival = confidence.cumprod(axis=1)
        value = {
            prefix: (3 + sum(survival[row, :n].sum() for row, n in enumerate(prefix))) * rate(3 + sum(prefix))
            for prefix in itertools.product(range(4), repeat=3)
        }
        chosen = tuple(early_stop(torch.from_numpy(confidence), rate).tolist())
        assert value[chosen] == pytest.approx(max(value.values()), abs=1e-12)


def test_full_search_would_bend_the_law_and_early_stop_does_not() -> None:
    # One request, P = (.7, .3), Q = (.5, .5), c_1 = .8, c_2 = 1 after token 0 and 0 after token 1.
    target, draft = np.array([0.7, 0.3]), np.array([0.5, 0.5])
    speed = {1: 1.0, 2: 0.5, 3: 0.45}

    def law(choose: object) -> np.ndarray:
        out = np.zeros(2)
        for token in range(2):
            confidence = torch.tensor([[0.8, 1.0 - token]])
            if int(choose(confidence)[0]):  # type: ignore[operator]
                accept = min(1.0, target[token] / draft[token])
                rest = np.maximum(target - draft, 0)
                out[token] += draft[token] * accept
                out += draft[token] * (1 - accept) * rest / rest.sum()
            else:
                out += draft[token] * target
        return out

    def search(confidence: torch.Tensor) -> torch.Tensor:
        survival = confidence.cumprod(dim=1)[0]
        value = [(1 + float(survival[:n].sum())) * speed[1 + n] for n in range(3)]
        return torch.tensor([int(np.argmax(value))])

    np.testing.assert_allclose(law(lambda c: early_stop(c, speed.__getitem__)), target, atol=1e-12)
    np.testing.assert_allclose(law(search), [0.85, 0.15], atol=1e-12)


def test_flat_costs_verify_everything_and_steep_ones_nothing() -> None:
    confidence = torch.full((4, 3), 0.6)
    assert early_stop(confidence, lambda tokens: 1.0).tolist() == [3, 3, 3, 3]
    assert early_stop(confidence, lambda tokens: 1.0 / tokens).tolist() == [0, 0, 0, 0]


def test_threshold_stops_at_the_first_doubt() -> None:
    confidence = torch.tensor([[0.9, 0.4, 0.9], [0.5, 0.6, 0.7], [0.1, 0.9, 0.9]])
    assert below_threshold(confidence, 0.5).tolist() == [1, 3, 0]


def test_step_cost_is_linear_between_its_points() -> None:
    cost = StepCost((1, 3, 7), (0.1, 0.2, 0.4))
    assert [round(1 / cost.rate(n), 9) for n in (1, 2, 3, 5, 9)] == [0.1, 0.15, 0.2, 0.3, 0.4]


def test_the_estimator_finds_the_law_that_made_the_data() -> None:
    numbers = torch.Generator().manual_seed(0)
    true_weight, true_bias = 1.2, torch.tensor([0.3, -0.5])
    estimator = AcceptanceEstimator(slots=2)
    for _ in range(2000):
        peak = torch.rand(8, 2, generator=numbers, dtype=torch.float64) * 0.9 + 0.05
        chance = torch.sigmoid(true_weight * torch.logit(peak) + true_bias)
        hit = torch.rand(8, 2, generator=numbers) < chance
        estimator.observe(peak, hit.long().cumprod(dim=1).sum(dim=1), torch.full((8,), 2))
    assert estimator.weight == pytest.approx(true_weight, abs=0.15)
    np.testing.assert_allclose(estimator.bias, true_bias, atol=0.25)
