"""The batch plan, the schedules, packed batches."""

from __future__ import annotations

import ast
import itertools
import math
import os
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
import torch

from torchspec_core.errors import UserError
from torchspec_core.training.batch import Sample, pack
from torchspec_core.training.eagle3 import ttt_builder
from torchspec_core.training.plan import Batching, PlannedStep, plan_epoch, plan_steps
from torchspec_core.training.schedule import lr_factor
from torchspec_core.training.stage import hold_out

LENGTHS = np.random.default_rng(3).integers(10, 250, 700)


BATCHINGS: tuple[Batching, ...] = ("packed", "grouped")


def samples_of(steps: list[PlannedStep]) -> Counter[int]:
    return Counter(i for step in steps for batch in step.batches for i in batch)


def used(steps: list[PlannedStep], lengths: np.ndarray = LENGTHS) -> np.ndarray:
    return np.array([lengths[list(batch)].sum() for step in steps for batch in step.batches])


def laid_out(steps: list[PlannedStep], lengths: np.ndarray = LENGTHS) -> np.ndarray:
    """Tokens of each batch when every document is as long as the longest."""
    return np.array([len(b) * lengths[list(b)].max() for step in steps for b in step.batches])


@pytest.mark.parametrize("batching", BATCHINGS)
@pytest.mark.parametrize("batches", [1, 3])
def test_each_sample_once_an_epoch_and_never_over_budget(batching: Batching, batches: int) -> None:
    for epoch in range(3):
        steps = plan_epoch(LENGTHS, 0, epoch, 1536, batching, batches)
        assert samples_of(steps) == Counter(range(len(LENGTHS)))
        assert max(used(steps)) <= 1536 // batches
        sizes = Counter(len(step.batches) for step in steps)
        assert sizes[batches] >= len(steps) - 1 and min(sizes) >= 1 and all(len(b) for s in steps for b in s.batches)


@pytest.mark.parametrize("batching", BATCHINGS)
def test_same_inputs_same_plan_and_other_epochs_another_order(batching: Batching) -> None:
    assert plan_steps(LENGTHS, 5, 2, 1024, batching) == plan_steps(LENGTHS.tolist(), 5, 2.0, 1024, batching)
    first, second = (plan_epoch(LENGTHS, 5, epoch, 1024, batching) for epoch in (0, 1))
    assert [s.batches for s in first] != [s.batches for s in second]
    assert plan_epoch(LENGTHS, 6, 0, 1024, batching) != first


def test_another_process_makes_the_same_plan() -> None:
    code = (
        "import numpy as np; from torchspec_core.training.plan import plan_steps;"
        "lengths = np.random.default_rng(3).integers(10, 250, 700);"
        "print([s.batches for s in plan_steps(lengths, 5, 1.5, 1024)])"
    )
    env = {**os.environ, "PYTHONHASHSEED": "77"}
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env).stdout
    assert ast.literal_eval(out) == [step.batches for step in plan_steps(LENGTHS, 5, 1.5, 1024)]


def test_ranks_share_out_a_step_whatever_their_number() -> None:
    step = PlannedStep(0, ((1, 2), (3,), (4, 5, 6)))
    for world_size in (1, 2, 3, 5):
        ranks = [step.of_rank(rank, world_size) for rank in range(world_size)]
        assert sorted(batch for rank in ranks for batch in rank) == sorted(step.batches)
        assert max(map(len, ranks)) - min(map(len, ranks)) <= 1


# Lengths of chats after cutting, of long texts, of one length: the budget is a few times the longest.
SHAPES = {
    "chats": np.random.default_rng(0).integers(30, 225, 5000),
    "texts": np.random.default_rng(1).lognormal(6.2, 0.9, 5000).clip(30, 2048).astype(int),
}


@pytest.mark.parametrize(("name", "budget"), [("chats", 1024), ("texts", 4096), ("texts", 8192)])
def test_packed_batches_are_full_and_grouped_ones_are_rectangles(name: str, budget: int) -> None:
    lengths = SHAPES[name]
    packed = plan_epoch(lengths, 0, 0, budget)
    assert lengths.sum() / (len(packed) * budget) > 0.995
    assert max(laid_out(packed, lengths)) <= 2 * budget
    grouped = plan_epoch(lengths, 0, 0, budget, "grouped")
    assert max(laid_out(grouped, lengths)) <= budget
    assert lengths.sum() / laid_out(grouped, lengths).sum() > 0.97


def test_lengths_that_never_fit_together_get_a_batch_each() -> None:
    lengths = np.full(2000, 600)
    assert sorted(step.batches for step in plan_epoch(lengths, 0, 0, 1024)) == [((i,),) for i in range(2000)]


@pytest.mark.parametrize("batching", BATCHINGS)
def test_no_order_is_left_across_steps(batching: Batching) -> None:
    """Against chance: steps' mean lengths rise or fall with the step no more than a shuffled list's would, and a
    sample comes anywhere in an epoch, whatever its length and its place in the data."""
    lengths, epochs = SHAPES["chats"], 8
    when = np.zeros((epochs, len(lengths)))
    for epoch in range(epochs):
        steps = plan_epoch(lengths, 0, epoch, 1024, batching)
        mean = np.array([lengths[list(step.batches[0])].mean() for step in steps])
        assert abs(np.corrcoef(np.arange(len(steps)), mean)[0, 1]) < 4 / math.sqrt(len(steps))
        for place, step in enumerate(steps):
            when[epoch, list(step.batches[0])] = place / len(steps)
    chance = 4 / math.sqrt(when.size)
    assert abs(np.corrcoef(np.tile(lengths, epochs), when.ravel())[0, 1]) < chance
    assert abs(np.corrcoef(np.tile(np.arange(len(lengths)), epochs), when.ravel())[0, 1]) < chance
    assert abs(when.mean() - 0.5) < 0.02 and abs(when.std() - math.sqrt(1 / 12)) < 0.01  # uniform over the epoch
    assert abs(np.corrcoef(when[0], when[1])[0, 1]) < 4 / math.sqrt(len(lengths))


@pytest.mark.parametrize("batching", BATCHINGS)
@pytest.mark.parametrize(("lengths", "most"), [(LENGTHS, 0.25), (SHAPES["chats"], 0.08)])
def test_partners_change_from_epoch_to_epoch(lengths: np.ndarray, most: float, batching: Batching) -> None:
    def pairs(epoch: int) -> set[frozenset[int]]:
        steps = plan_epoch(lengths, 0, epoch, 1024, batching)
        return {frozenset(p) for step in steps for p in itertools.combinations(step.batches[0], 2)}

    first, second = pairs(0), pairs(1)
    assert len(first & second) / len(first) < most


def test_fractional_epochs() -> None:
    whole = plan_epoch(LENGTHS, 0, 0, 1024)
    steps = plan_steps(LENGTHS, 0, 1.25, 1024)
    assert steps[: len(whole)] == whole
    assert len(steps) == len(whole) + math.ceil(0.25 * len(plan_epoch(LENGTHS, 0, 1, 1024)))


def test_a_sample_longer_than_the_budget_is_refused() -> None:
    with pytest.raises(UserError, match=r"600 tokens.*training.tokens_per_step=512;"):
        plan_epoch(np.array([10, 600]), 0, 0, 512)
    with pytest.raises(UserError, match=r"600 tokens.*training.tokens_per_step=1024 in 2 batches"):
        plan_epoch(np.array([10, 600]), 0, 0, 1024, batches_per_step=2)


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
