"""The batch plan, the schedules, packed batches."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest
import torch

from torchspec_core.errors import UserError
from torchspec_core.training.batch import Sample, pack
from torchspec_core.training.eagle3 import ttt_builder
from torchspec_core.training.plan import plan_epoch, plan_steps
from torchspec_core.training.schedule import lr_factor
from torchspec_core.training.stage import hold_out

LENGTHS = np.random.default_rng(3).integers(10, 250, 700)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_each_sample_once_an_epoch_and_never_over_budget(world_size: int) -> None:
    budget = 768
    for epoch in range(3):
        steps = plan_epoch(LENGTHS, 0, epoch, budget, world_size)
        assert Counter(i for step in steps for rank in step.ranks for i in rank) == Counter(range(len(LENGTHS)))
        for step in steps:
            assert len(step.ranks) == world_size
            loads = [int(LENGTHS[list(rank)].sum()) for rank in step.ranks]
            assert max(loads) <= budget // world_size


def test_same_inputs_same_plan_and_other_epochs_another_order() -> None:
    assert plan_steps(LENGTHS, 5, 2, 1024) == plan_steps(LENGTHS.tolist(), 5, 2.0, 1024)
    first, second = (plan_epoch(LENGTHS, 5, epoch, 1024) for epoch in (0, 1))
    assert [s.ranks for s in first] != [s.ranks for s in second]
    assert plan_epoch(LENGTHS, 6, 0, 1024) != first


def test_steps_hold_like_lengths_in_no_order_of_length() -> None:
    steps = plan_epoch(LENGTHS, 0, 0, 1024)
    longest = np.array([max(LENGTHS[list(step.ranks[0])]) for step in steps])
    used = np.array([LENGTHS[list(step.ranks[0])].sum() for step in steps])
    rectangle = sum(len(step.ranks[0]) * high for step, high in zip(steps, longest, strict=True))
    assert used.sum() / rectangle > 0.9  # laid out by the longest document, less than a tenth is empty
    assert abs(np.corrcoef(np.arange(len(steps)), longest)[0, 1]) < 0.3


def test_fractional_epochs() -> None:
    whole = plan_epoch(LENGTHS, 0, 0, 1024)
    steps = plan_steps(LENGTHS, 0, 1.25, 1024)
    assert steps[: len(whole)] == whole
    assert len(steps) == len(whole) + math.ceil(0.25 * len(plan_epoch(LENGTHS, 0, 1, 1024)))


def test_a_sample_longer_than_the_budget_is_refused() -> None:
    with pytest.raises(UserError, match=r"600 tokens.*training.tokens_per_step=512"):
        plan_epoch(np.array([10, 600]), 0, 0, 512)


def test_no_samples_no_steps() -> None:
    assert plan_epoch(np.array([], dtype=np.int64), 0, 0, 64) == []


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1, 1, 1, 1, 1, 1, 1, 1, 1]),
        ("linear", [0.5, 1, 1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8]),
        ("wsd", [0.5, 1, 1, 1, 1, 1, 1, 3 / 4, 2 / 4, 1 / 4]),
    ],
)
def test_schedules(schedule: str, expected: list[float]) -> None:
    assert [lr_factor(step, 10, schedule, 0.2, 0.4) for step in range(10)] == pytest.approx(expected)  # type: ignore[arg-type]


def test_cosine_falls_from_one_to_nearly_zero_through_a_half() -> None:
    factors = [lr_factor(step, 101, "cosine", 0.01, 0.0) for step in range(101)]
    assert factors[0] == factors[1] == 1.0 and factors[51] == pytest.approx(0.5) and factors[100] < 1e-3
    assert all(a >= b for a, b in itertools.pairwise(factors))


def sample(length: int, value: float) -> Sample:
    states = tuple(torch.full((length, 3), value + layer) for layer in range(3))
    return Sample(np.full(length, int(value), dtype=np.int32), np.arange(length) >= 2, states[:2], states[2])


def test_packed_documents_lie_end_to_end() -> None:
    batch = pack([sample(5, 10), sample(7, 20)], ttt_builder(2, "predicted", 4), torch.float32, row_multiple=16)
    assert (batch.tokens, batch.supervised, len(batch.ids)) == (12, 8, 16)
    assert batch.padding == pytest.approx(0.25)
    assert batch.ids.tolist() == [10] * 5 + [20] * 7 + [0] * 4
    assert batch.aux[:, [0, 5]].tolist() == [[10.0, 11.0]] * 5 + [[20.0, 21.0]] * 7 + [[0.0, 0.0]] * 4
    assert batch.last[:, 0].tolist() == [12.0] * 5 + [22.0] * 7 + [0.0] * 4
    assert batch.index.layout.width == 8 and batch.index.layout.documents == 3


def test_held_out_samples_depend_on_their_ids_alone() -> None:
    ids = [f"{i:064x}" for i in range(500)]
    train, held = hold_out(ids)
    assert len(held) == 15 and sorted([*train.tolist(), *held.tolist()]) == list(range(500))
    turned = hold_out(ids[::-1])[1]
    assert {ids[i] for i in held} == {ids[::-1][i] for i in turned}
    assert len(hold_out(ids[:2])[0]) == 1
