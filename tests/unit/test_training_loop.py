"""The loop on a tiny model: resume to the bit, skipped updates, learning, clipping."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from torchspec_core.drafters.eagle3 import Eagle3Config, Eagle3Drafter, init_weights
from torchspec_core.objectives.anchors import Anchors
from torchspec_core.objectives.eagle3 import Eagle3Loss, Teacher, embed_rows
from torchspec_core.training.batch import Sample, pack
from torchspec_core.training.eagle3 import eagle3_objective, ttt_builder
from torchspec_core.training.loop import METRICS, LoopSettings, Report, train
from torchspec_core.training.optimizer import OptimizerSettings, make_masters, make_optimizer
from torchspec_core.training.phases import PHASES
from torchspec_core.training.plan import plan_steps
from torchspec_core.training.selection import MEASURE
from torchspec_core.training.validation import validate

SIZE, VOCABULARY = 16, 32
ADAMW = OptimizerSettings("adamw", 3e-3, 0.02, 0.01, (0.9, 0.95), 1.0)
SETTINGS = LoopSettings(
    optimizer=ADAMW,
    schedule="wsd",
    warmup=0.1,
    decay=0.3,
    dtype=torch.bfloat16,
    ema=0.0,
    checkpoint_seconds=1e9,
    validate_steps=0,
    patience=None,
    keep_best=False,
    log_steps=3,
)


pytestmark = pytest.mark.usefixtures("one_thread")


class Samples:
    """Random states and tokens; sample `poison` holds a NaN; a read past `limit` stops the run."""

    def __init__(self, count: int = 24, poison: int | None = None, limit: int | None = None) -> None:
        generator = torch.Generator().manual_seed(2)
        random = np.random.default_rng(2)
        self.items = []
        for i in range(count):
            length = int(random.integers(8, 30))
            aux = torch.randn(length, 2 * SIZE, generator=generator)
            if i == poison:
                aux[3, 3] = float("nan")
            ids = random.integers(0, VOCABULARY, length).astype(np.int32)
            self.items.append(
                Sample(
                    ids,
                    np.arange(length) >= 4,
                    tuple(aux.chunk(2, 1)),
                    torch.randn(length, SIZE, generator=generator),
                    f"sample {i}",
                )
            )
        self.lengths = np.array([len(item.ids) for item in self.items])
        self.reads, self.limit = 0, limit

    def get(self, i: int) -> Sample:
        self.reads += 1
        if self.limit is not None and self.reads > self.limit:
            raise InterruptedError
        return self.items[i]


def drafter() -> Eagle3Drafter:
    model = Eagle3Drafter(
        Eagle3Config(
            hidden_size=SIZE,
            target_hidden_size=SIZE,
            num_heads=4,
            num_kv_heads=2,
            head_dim=4,
            intermediate_size=24,
            vocab_size=VOCABULARY,
            draft_vocab_size=VOCABULARY,
            aux_layers=(0, 1),
        )
    )
    init_weights(model, 0)
    return model


def teacher(dtype: torch.dtype = torch.bfloat16) -> Teacher:
    generator = torch.Generator().manual_seed(9)
    embedding, head = (torch.randn(VOCABULARY, SIZE, generator=generator).to(dtype) for _ in range(2))
    return Teacher(embedding, torch.ones(SIZE, dtype=dtype), 1e-5, head)


def run(
    folder: Path,
    source: Samples,
    settings: LoopSettings = SETTINGS,
    epochs: float = 3,
    anchors: Anchors | None = None,
    check: Callable[[Any], dict[str, float]] | None = None,
) -> tuple[list[Tensor], list[Report]]:
    folder.mkdir(exist_ok=True)
    reports: list[Report] = []
    torch.manual_seed(0)
    plan = plan_steps(source.lengths, 0, epochs, 96)
    objective = eagle3_objective(teacher(settings.dtype), Eagle3Loss())
    index = ttt_builder(2, "predicted", anchors=anchors)
    return train(drafter(), objective, index, source, plan, settings, folder, reports.append, check).weights, reports


def trace(folder: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
    clock = ("seconds", "supervised_per_second", "time_")
    return [{k: v for k, v in row.items() if not k.startswith(clock)} for row in rows]


@pytest.mark.parametrize(
    ("settings", "anchors"),
    [
        (SETTINGS, None),
        (replace(SETTINGS, ema=0.9), None),
        (replace(SETTINGS, optimizer=replace(ADAMW, kind="muon")), None),
        (replace(SETTINGS, dtype=torch.float32), None),
        (SETTINGS, Anchors(4, 2, "strided", 0)),
    ],
    ids=["adamw", "ema", "muon", "fp32", "anchored"],
)
@pytest.mark.parametrize("stop", [10, 41])
def test_an_interrupted_run_ends_with_the_same_bits(
    tmp_path: Path, settings: LoopSettings, anchors: Anchors | None, stop: int
) -> None:
    settings = replace(settings, checkpoint_seconds=1e-9)
    whole, _ = run(tmp_path / "whole", Samples(), settings, anchors=anchors)
    with pytest.raises(InterruptedError):
        run(tmp_path / "cut", Samples(limit=stop), settings, anchors=anchors)
    resumed = Samples()
    again, _ = run(tmp_path / "cut", resumed, settings, anchors=anchors)
    assert resumed.reads < 3 * 24  # it did not start over
    assert all(torch.equal(a, b) for a, b in zip(whole, again, strict=True))
    assert trace(tmp_path / "whole") == trace(tmp_path / "cut")


def test_a_sample_that_is_not_finite_costs_one_update_an_epoch(tmp_path: Path) -> None:
    weights, reports = run(tmp_path, Samples(poison=5))
    assert reports[-1].numbers["skipped"] == 3
    assert all(torch.isfinite(weight).all() for weight in weights)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_non_finite_gradient_changes_nothing(kind: str) -> None:
    model = drafter()
    masters = make_masters(model, torch.bfloat16)
    optimizer = make_optimizer(masters, replace(ADAMW, kind=kind))

    def fill(value: float) -> None:
        for parameter in masters.working:
            parameter.grad = torch.full_like(parameter, value)

    fill(0.1)
    optimizer.step(1.0)
    before = [m.detach().clone() for m in masters.master]
    fill(float("nan"))
    optimizer.step(1.0)
    assert all(torch.equal(a, b) for a, b in zip(before, masters.master, strict=True))
    assert optimizer.skipped.item() == 1
    fill(0.1)
    optimizer.step(1.0)
    assert not any(torch.equal(a, b) for a, b in zip(before, masters.master, strict=True))


def test_adamw_with_clipping_is_the_textbook_update() -> None:
    module = nn.Linear(3, 2, bias=False)
    start = module.weight.detach().clone().double()
    masters = make_masters(module, torch.float32)
    settings = OptimizerSettings("adamw", 0.1, 0.0, 0.05, (0.9, 0.99), 1.0)
    optimizer = make_optimizer(masters, settings)
    expected, m, v = start, torch.zeros(2, 3, dtype=torch.float64), torch.zeros(2, 3, dtype=torch.float64)
    for step in range(1, 4):
        gradient = torch.arange(1.0, 7.0).view(2, 3) * (0.01 if step == 2 else 1.0)
        module.weight.grad = gradient.clone()
        assert optimizer.step(0.5).item() == pytest.approx(gradient.norm().item())
        clipped = gradient.double() / max(1.0, float(gradient.norm()))
        m, v = 0.9 * m + 0.1 * clipped, 0.99 * v + 0.01 * clipped**2
        expected = expected * (1 - 0.05 * 0.05)
        expected = expected - 0.05 * (m / (1 - 0.9**step)) / ((v / (1 - 0.99**step)).sqrt() + 1e-8)
    torch.testing.assert_close(module.weight.detach().double(), expected, atol=1e-6, rtol=1e-6)


def test_loss_falls_and_metrics_are_complete(tmp_path: Path) -> None:
    _, reports = run(tmp_path, Samples(), epochs=12)
    assert reports[-1].numbers["loss"] < 0.9 * reports[0].numbers["loss"]
    assert reports[-1].step == reports[-1].steps == len(plan_steps(Samples().lengths, 0, 12, 96))
    rows = trace(tmp_path)
    assert sum(row["tokens"] for row in rows) == 12 * Samples().lengths.sum() == rows[-1]["tokens_seen"]
    assert {
        "loss_0",
        "loss_1",
        "acc_0",
        "acc_1",
        "lr",
        "grad_norm",
        "supervised",
        "padding",
        "skipped",
        "epoch",
    } <= rows[0].keys()


def test_validation_counts_misses_and_leading_hits() -> None:
    """By hand: drafts and targets through one-hot states, so that every argmax is known."""
    model, target = drafter().double(), teacher(torch.float64)
    batch = pack([Samples().items[0]], ttt_builder(2, "predicted", 1), torch.float64, row_multiple=1)
    full = torch.randn(VOCABULARY, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    kept = torch.arange(VOCABULARY)
    result = validate(model, target, full, kept, [batch])
    layout, hits = batch.index.layout, [[], []]  # type: ignore[var-annotated]
    outs = model.rollout(
        batch.aux, [embed_rows(target.embedding, batch.ids, n) for n in batch.index.next_token], layout
    )
    normed = batch.last / (batch.last.square().mean(1, keepdim=True) + 1e-5).sqrt()
    wanted = (normed @ full.T).argmax(1)
    length = len(batch.ids)
    for depth, out in enumerate(outs):
        for row, i in enumerate(layout.rows.tolist()):
            if 4 <= i + 2 + depth < length:
                hits[depth].append((i, bool(model.logits(out[row]).argmax() == wanted[i + 1 + depth])))
    first = dict(hits[0])
    assert result["rows"] == len(hits[0])
    assert result["acc_0"] == pytest.approx(np.mean([hit for _, hit in hits[0]]))
    assert result["acc_1"] == pytest.approx(np.mean([hit for _, hit in hits[1]]))
    assert result["slot_1"] == pytest.approx(np.mean([hit and first[i] for i, hit in hits[1] if i in first]))
    assert result["estimated_acceptance_length"] == pytest.approx(1 + result["slot_0"] + result["slot_1"])
    p = (normed @ full.T).softmax(1)
    taught = [(row, i) for row, i in enumerate(layout.rows.tolist()) if 4 <= i + 2 < length]
    q = model.logits(outs[0]).softmax(1)
    assert result["alpha_0"] == pytest.approx(
        np.mean([torch.minimum(q[row], p[i + 1]).sum().item() for row, i in taught])
    )
    assert result["estimated_acceptance_length_tv"] == pytest.approx(1 + result["slot_tv_0"] + result["slot_tv_1"])
    assert result["kept_mass"] == pytest.approx(1.0)
    never = next(token for token in range(VOCABULARY) if token not in wanted)
    none = validate(model, target, full, torch.full((VOCABULARY,), never), [batch])  # every draft is the same token
    assert none["acc_0"] == none["acc_1"] == 0.0
    places = sorted({i + 1 + depth for depth, rows in enumerate(hits) for i, _ in rows})
    assert none["kept_mass"] == pytest.approx(VOCABULARY * float(p[places, never].mean()))


def test_the_phases_of_a_step_add_up_to_its_time(tmp_path: Path) -> None:
    run(tmp_path / "run", Samples())
    rows = [json.loads(line) for line in (tmp_path / "run" / METRICS).read_text().splitlines()]
    for row in rows:
        shares = [row[f"time_{name}"] for name in PHASES]
        assert all(share >= 0 for share in shares) and sum(shares) <= 1.0 + 1e-6
    assert all(row["time_forward"] > 0 and row["time_data"] > 0 for row in rows)


def test_a_run_stops_when_nothing_improves_and_keeps_its_best_weights(tmp_path: Path) -> None:
    values, seen = iter([1.0, 2.0, 2.0, float("nan")]), []

    def check(model: Eagle3Drafter) -> dict[str, float]:
        seen.append([p.detach().clone() for p in model.parameters()])
        return {MEASURE: next(values)}

    settings = replace(SETTINGS, dtype=torch.float32, validate_steps=4, patience=2, ema=0.9)
    best, reports = run(tmp_path / "best", Samples(), replace(settings, keep_best=True), 9, check=check)
    assert len(seen) == 4 and reports[-1].step == 16 < reports[-1].steps
    assert all(torch.equal(a, b) for a, b in zip(best, seen[1], strict=True))
    validated = [row["step"] for row in trace(tmp_path / "best") if f"val_{MEASURE}" in row]
    assert validated == [4, 8, 12, 16]
    values, last_seen = iter([2.0, 1.0, 1.0]), seen.copy()
    last, _ = run(tmp_path / "last", Samples(), settings, 9, check=check)
    assert all(
        torch.equal(a, b) for a, b in zip(last, last_seen[2], strict=True)
    )  # the third validation, not the first


@pytest.mark.parametrize("ema", [0.0, 0.9])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_looking_at_the_drafter_does_not_change_its_training(tmp_path: Path, dtype: torch.dtype, ema: float) -> None:
    settings = replace(SETTINGS, dtype=dtype, ema=ema)
    plain, _ = run(tmp_path / "plain", Samples(), settings)
    looked, _ = run(tmp_path / "looked", Samples(), replace(settings, validate_steps=2), check=lambda _: {MEASURE: 1.0})
    assert all(torch.equal(a, b) for a, b in zip(plain, looked, strict=True))


@pytest.mark.parametrize("stop", [15, 41, 60])
def test_an_interrupted_run_remembers_its_best_weights(tmp_path: Path, stop: int) -> None:
    def check(model: Eagle3Drafter) -> dict[str, float]:  # goes up and down
        return {MEASURE: float((1e3 * model.fc.weight.double().sum()).cos())}

    settings = replace(SETTINGS, checkpoint_seconds=1e-9, validate_steps=2, keep_best=True, ema=0.5)
    whole, reports = run(tmp_path / "whole", Samples(), settings, check=check)
    values = [report.numbers[f"val_{MEASURE}"] for report in reports if f"val_{MEASURE}" in report.numbers]
    assert max(values) > values[-1]
    with pytest.raises(InterruptedError):
        run(tmp_path / "cut", Samples(limit=stop), settings, check=check)
    again, _ = run(tmp_path / "cut", Samples(), settings, check=check)
    assert all(torch.equal(a, b) for a, b in zip(whole, again, strict=True))
    assert trace(tmp_path / "whole") == trace(tmp_path / "cut")
