"""Temperatures of confidences: against a plain loop, on samples of known truth, and for the trained head."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from tests.unit import test_dflash as blocks
from torchspec_core.objectives.calibration import BINS, GRID, calibration_error, fit_temperatures
from torchspec_core.objectives.dflash import judged_slots

STEP = GRID[1] / GRID[0]


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def sampled(rows: int, places: int, factors: tuple[float, ...], seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Logits that are `factors` times too large, and the leading drafts that were really accepted."""
    random = np.random.default_rng(seed)
    true = random.normal(1.0, 1.5, (rows, places))
    accepted = np.logical_and.accumulate(random.random((rows, places)) < sigmoid(true), axis=1)
    return true * np.asarray(factors), accepted.astype(float)


def test_the_error_is_that_of_a_loop_over_bins() -> None:
    random = np.random.default_rng(1)
    estimate, happened = random.random(500), (random.random(500) < 0.5).astype(float)
    estimate[:2] = 0.0, 1.0
    expected = 0.0
    for b in range(BINS):
        inside = (estimate >= b / BINS) & ((estimate < (b + 1) / BINS) | (b == BINS - 1))
        if inside.any():
            expected += inside.sum() / 500 * abs(estimate[inside].mean() - happened[inside].mean())
    assert calibration_error(estimate, happened) == pytest.approx(expected, abs=1e-12)
    assert calibration_error(np.array([0.31, 0.32]), np.array([0.0, 0.63])) == pytest.approx(0.0)


def test_what_is_calibrated_stays_so() -> None:
    logit, accepted = sampled(60_000, 4, (1.0,) * 4)
    found = fit_temperatures(logit, accepted, np.ones_like(accepted, dtype=bool))
    assert all(1 / STEP - 1e-9 <= t <= STEP + 1e-9 for t in found.temperatures)
    assert found.after <= found.before < 0.005
    true = np.cumprod(sigmoid(logit), axis=1)
    exact = fit_temperatures(logit, true, np.ones_like(accepted, dtype=bool))
    assert exact.temperatures == (1.0,) * 4 and exact.after == pytest.approx(0.0, abs=1e-12)


def test_what_is_too_sure_or_too_shy_is_mended_slot_by_slot() -> None:
    factors = (2.0, 0.5, 3.0, 1.0)
    logit, accepted = sampled(60_000, 4, factors)
    found = fit_temperatures(logit, accepted, np.ones_like(accepted, dtype=bool))
    assert found.temperatures == pytest.approx(factors, rel=2 * (STEP - 1))
    assert found.after < 0.01 < 0.04 < found.before
    for slot, temperature in enumerate(found.temperatures):
        order = np.argsort(sigmoid(logit[:, slot] / temperature), kind="stable")
        assert (np.diff(logit[order, slot]) >= 0).all()


@pytest.mark.parametrize("seed", range(5))
def test_the_error_never_grows(seed: int) -> None:
    random = np.random.default_rng(seed)
    logit = random.normal(0, 3, (60, 5))
    accepted = np.logical_and.accumulate(random.random((60, 5)) < 0.7, axis=1).astype(float)
    known = random.random((60, 5)) < 0.9
    found = fit_temperatures(logit, accepted, known)
    assert found.after <= found.before
    lost = ~np.logical_and.accumulate(known, axis=1)
    again = fit_temperatures(np.where(lost, 9.0, logit), np.where(lost, 0.5, accepted), known)
    assert again == found  # what is not known is not read
    nothing = fit_temperatures(logit, accepted, np.zeros_like(known))
    assert nothing.temperatures == (1.0,) * 5 and nothing.after == 0.0


def test_the_trained_head_is_judged_after_the_true_text() -> None:
    model = blocks.drafter(blocks.config("dspark"))
    made = blocks.index(model.config.predictions, row_multiple=8, block_multiple=8)
    logit, accepted, known = judged_slots(model, blocks.TEACHER, blocks.IDS, blocks.AUX, blocks.LAST, made)
    hidden = blocks.hidden(model, made)
    normed = blocks.LAST / (blocks.LAST.square().mean(-1, keepdim=True) + 1e-5).sqrt() * blocks.TEACHER.norm
    starts = {0: 0, 1: 12, 2: 21}
    count = 0
    for m, (anchor, document) in enumerate(zip(made.anchor.tolist(), made.layout.block_document.tolist(), strict=True)):
        for n in range(model.config.predictions):
            inside = anchor + n + 1 < starts[document] + blocks.LENGTHS[document]
            real = m < 5 and inside and blocks.MASK[anchor + 1 : anchor + n + 2].all()
            assert bool(known[m, n]) == real
            if not real:
                continue
            count += 1
            features = model.markov_head.markov_w1(blocks.IDS[anchor + n])
            q = (hidden[m, n] @ blocks.TABLES.head.T + model.markov_head.markov_w2(features)).softmax(-1)
            p = (normed[anchor + n] @ blocks.TABLES.head.T).softmax(-1)
            assert float(accepted[m, n]) == pytest.approx(torch.minimum(p, q).sum().item(), abs=1e-12)
            assert float(logit[m, n]) == pytest.approx(
                float(model.confidence_head.proj(torch.cat((hidden[m, n], features))).detach()), abs=1e-12
            )
    assert count > 8


def test_drafts_are_judged_by_the_calibrated_confidence() -> None:
    plain = blocks.drafter(blocks.config("dspark"))
    shape = blocks.config("dspark", confidence_temperatures=(1.0, 2.0, 0.5, 4.0))
    calibrated = blocks.drafter(shape)
    hidden, previous = blocks.random(6, blocks.H), torch.arange(6)
    for place, temperature in enumerate((1.0, 2.0, 0.5, 4.0)):
        before, after = (m.confidence(hidden, previous, place) for m in (plain, calibrated))
        torch.testing.assert_close(torch.logit(after), torch.logit(before) / temperature)
    assert type(shape).from_json(json.loads(json.dumps(shape.to_json()))) == shape
