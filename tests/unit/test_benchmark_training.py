"""What the training and padding benchmarks compare is the same work: losses, updates, counts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.padding import order_correlation, padded, random_batches
from benchmarks.training_parts import LoopOptimizer, every_row_builder, needed_work, pad_to_longest
from torchspec_core.drafters.eagle3 import Eagle3Config, Eagle3Drafter, init_weights
from torchspec_core.objectives.eagle3 import Eagle3Loss, Teacher
from torchspec_core.training.batch import Sample, pack
from torchspec_core.training.eagle3 import eagle3_objective, ttt_builder
from torchspec_core.training.optimizer import OptimizerSettings, make_masters, make_optimizer
from torchspec_core.training.plan import plan_epoch

CONFIG = Eagle3Config(16, 16, 2, 1, 8, 24, 64, 32, (0, 1, 2))


def samples() -> list[Sample]:
    random = torch.Generator().manual_seed(0)
    made = []
    for length in (9, 14):
        states = [torch.randn(length, 16, generator=random, dtype=torch.float64) for _ in range(4)]
        ids = np.random.default_rng(length).integers(0, 64, length)
        made.append(Sample(ids, np.arange(length) % 5 > 1, tuple(states[:3]), states[3], str(length)))
    return made


def drafter() -> Eagle3Drafter:
    made = Eagle3Drafter(CONFIG)
    init_weights(made, 0)
    return made.double()


def teacher() -> Teacher:
    random = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    return Teacher(draw(64, 16), torch.ones(16, dtype=torch.float64), 1e-5, draw(32, 16))


def test_the_padded_baseline_has_the_packed_batch_s_loss_and_gradients() -> None:
    found = []
    for batch in (
        pack(samples(), ttt_builder(3, "predicted"), torch.float64),
        pack(pad_to_longest(samples()), every_row_builder(3), torch.float64, row_multiple=1),
    ):
        model = drafter()
        result = eagle3_objective(teacher(), Eagle3Loss(depth_decay=1.0))(model, batch)
        result.loss.backward()
        assert batch.supervised == sum(int(sample.mask.sum()) for sample in samples())
        found.append([result.loss.detach(), result.count, *(p.grad for p in model.parameters())])
    for ours, baseline in zip(*found, strict=True):
        torch.testing.assert_close(baseline, ours, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("clip", [1e-3, 1e3])
def test_the_loop_over_parameters_is_the_same_update(clip: float) -> None:
    weights = []
    for loop in (True, False):
        model = drafter().float()
        masters = make_masters(model, torch.float32)
        settings = OptimizerSettings("adamw", 1e-2, 0.02, 0.01, (0.9, 0.95), clip)
        optimizer = LoopOptimizer(masters, 1e-2, clip) if loop else make_optimizer(masters, settings)
        for seed in range(3):
            random = torch.Generator().manual_seed(seed)
            for parameter in masters.working:
                parameter.grad = torch.randn(parameter.shape, generator=random)
            optimizer.step(1.0)
        weights.append([m.detach() for m in masters.master if m.ndim == 2])  # norms: only ours leaves decay out
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-5, atol=1e-6)


def test_needed_products_of_one_document_by_hand() -> None:
    index = ttt_builder(2, "predicted", 1)([4], np.array([False, False, True, True]), ["a"], 0, 1)
    # Teachers 1 and 2 (they predict tokens 2 and 3): depth 0 taught by rows 0, 1; depth 1 by row 0.
    work = needed_work(index, 4, CONFIG)
    assert work.fc == 4 * (3 * 16) * 16 * 4  # forward and weights: 2 operations each
    queries, output, mlp, keys = 32 * 16, 16 * 16, 3 * 16 * 24, 2 * 32 * 8
    assert work.layer == 6 * (2 * 2 * (queries + output + mlp) + (4 + 2) * keys)
    assert work.head == 2 * 16 * 32 * (3 * 3 + 2)
    assert needed_work(index, 4, CONFIG, head_trained=False).head == 2 * 16 * 32 * (3 * 2 + 2)


def test_padding_counts() -> None:
    lengths = np.array([3, 5, 2, 2, 9])
    assert padded([(0, 1), (2, 3), (4,)], lengths) == 10 + 4 + 9
    pairs = random_batches(lengths, 0, 2)
    assert sorted(i for batch in pairs for i in batch) == [0, 1, 2, 3, 4] and [len(b) for b in pairs] == [2, 2, 1]
    many = np.random.default_rng(0).integers(1, 50, 400)
    batches = random_batches(many, 0, budget=200)
    assert sorted(i for batch in batches for i in batch) == list(range(400))
    assert max(padded([batch], many) for batch in batches) <= 200
    assert order_correlation([(0,), (1,), (4,)], lengths) > 0.9
    plan = [step.batches[0] for step in plan_epoch(many, 0, 0, 200)]
    assert abs(order_correlation(plan, many)) < 0.5
