"""The training loop: packed batches through the objective, one optimiser step each, metrics read late, exact resume.

Nothing in a step waits for a value: losses and norms stay tensors until a line of metrics is due. A checkpoint holds
everything that the next step depends on, and the plan is a pure function of its inputs, so a killed run that starts
again ends with the same bits as one that was never killed.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchspec_core.objectives.metrics import estimates
from torchspec_core.training.batch import IndexBuilder, PackedBatch, SampleSource, pack
from torchspec_core.training.checkpoint import load_checkpoint, save_checkpoint
from torchspec_core.training.method import Objective
from torchspec_core.training.optimizer import OptimizerSettings, make_masters, make_optimizer
from torchspec_core.training.phases import Phases
from torchspec_core.training.plan import Batch, PlannedStep
from torchspec_core.training.schedule import Schedule, lr_factor
from torchspec_core.training.selection import Selection

_log = logging.getLogger("torchspec.training")
METRICS = "metrics.jsonl"


@dataclass(frozen=True)
class LoopSettings:
    """What a run does, step by step; see the recipe's `training` section for the meaning of each."""

    optimizer: OptimizerSettings
    schedule: Schedule
    warmup: float
    decay: float
    dtype: torch.dtype
    ema: float
    checkpoint_seconds: float
    validate_steps: int
    patience: int | None
    keep_best: bool
    log_steps: int


@dataclass(frozen=True)
class Trained:
    """What a run made: fp32 `weights` in parameter order as they were after step `best`, and the `steps` it took."""

    weights: list[Tensor]
    steps: int
    best: int


@dataclass(frozen=True)
class Report:
    """A line of metrics as it is logged: `step` of `steps` done, and the flat numbers."""

    step: int
    steps: int
    numbers: dict[str, float]


def train(
    drafter: nn.Module,
    objective: Objective,
    index: IndexBuilder,
    source: SampleSource,
    plan: Sequence[PlannedStep],
    settings: LoopSettings,
    scratch: Path,
    report: Callable[[Report], None],
    validate: Callable[[Any], dict[str, float]] | None = None,
    expect: Callable[[Batch], None] | None = None,
) -> Trained:
    """Train `drafter` in place; it ends in the compute type, with the returned weights.

    Args:
        drafter: fp32, initialised.
        objective: the kind's loss of a batch.
        index: makes the kind's index of a packed batch.
        plan: the steps, of one batch each.
        scratch: folder for checkpoint and metrics; a run continues from what it finds there.
        report: called for each line of metrics; `time_*` in it are shares of the wall time since the line before.
        validate: called every `validate_steps` steps, and after the last if the best weights are kept; sees the weights
            that an end at that step would return. Its numbers are logged as `val_*`.
        expect: told the batch after the one that is about to be computed, so that it can be read meanwhile.
    """
    masters = make_masters(drafter, settings.dtype)
    optimizer = make_optimizer(masters, settings.optimizer)
    average = [m.detach().clone() for m in masters.master] if settings.ema else []
    selection = Selection(settings.keep_best, settings.patience)
    first, tokens, elapsed = 0, 0, 0.0
    pending: list[tuple[Tensor, ...]] = []
    metrics = scratch / METRICS
    saved = load_checkpoint(scratch)
    if saved is not None:
        first, tokens, elapsed = saved["step"], saved["tokens"], saved["seconds"]
        optimizer.load(saved["optimizer"])
        selection.load(saved["selection"])
        torch._foreach_copy_(average, saved["average"]) if average else None
        pending = [tuple(row) for row in saved["pending"]]
        _log.info("continuing at step %d of %d", first, len(plan))
    _truncate(metrics, saved["metrics_bytes"] if saved else 0)
    phase = Phases()
    began = mark = lap = time.monotonic()
    done = first
    with open(metrics, "a", encoding="utf-8") as lines:
        for step in range(first, len(plan)):
            with phase("data"):
                batch = _load(source, plan[step], index, settings.dtype)
                if expect is not None and step + 1 < len(plan):
                    expect(plan[step + 1].batches[0])
            with phase("forward"):
                result = objective(drafter, batch)
            with phase("backward"):
                result.loss.backward()
            factor = lr_factor(step, len(plan), settings.schedule, settings.warmup, settings.decay)
            with phase("optimizer"):
                norm = optimizer.step(factor)
                if average:
                    torch._foreach_lerp_(average, [m.detach() for m in masters.master], 1.0 - settings.ema)
            tokens += batch.tokens
            pending.append(
                (
                    result.loss.detach(),
                    result.numerator,
                    result.count,
                    torch.stack([*result.extras.values()]) if result.extras else torch.zeros(0, 2),
                    norm,
                    torch.tensor([batch.tokens, batch.supervised, len(batch.ids)], dtype=torch.float64),
                )
            )
            done = step + 1
            last = done == len(plan)
            validates = validate is not None and (
                settings.keep_best if last else bool(settings.validate_steps) and done % settings.validate_steps == 0
            )
            if validates or last or done % settings.log_steps == 0:
                with phase("metrics"):
                    numbers = _summarise(pending, tuple(result.extras))
                pending = []
                now = time.monotonic()
                wall = max(now - lap, 1e-9)
                numbers |= {
                    "supervised_per_second": numbers["supervised"] / wall,
                    **{f"time_{name}": seconds / wall for name, seconds in phase.take().items()},
                    "lr": settings.optimizer.lr * factor,
                    "tokens_seen": tokens,
                    "skipped": float(optimizer.skipped),
                    "epoch": plan[step].epoch,
                    "seconds": elapsed + time.monotonic() - began,
                }
                if validates and validate is not None:
                    with masters.showing(average):
                        found = validate(drafter)
                    selection.see(done, found, average or [m.detach() for m in masters.master])
                    numbers |= {f"val_{name}": value for name, value in found.items()}
                lap = time.monotonic()
                lines.write(json.dumps({"step": done, **numbers}) + "\n")
                lines.flush()
                report(Report(done, len(plan), numbers))
                if selection.over:
                    _log.info("no better than at step %d: stopped at %d of %d", selection.step, done, len(plan))
                    break
            if time.monotonic() - mark >= settings.checkpoint_seconds and done < len(plan):
                save_checkpoint(
                    scratch,
                    {
                        "step": done,
                        "tokens": tokens,
                        "seconds": elapsed + time.monotonic() - began,
                        "optimizer": optimizer.state(),
                        "average": average,
                        "selection": selection.state(),
                        "pending": [list(row) for row in pending],
                        "metrics_bytes": lines.tell(),
                    },
                )
                mark = time.monotonic()
    final = selection.weights or average or [m.detach() for m in masters.master]
    with torch.no_grad():
        torch._foreach_copy_(list[Tensor](masters.working), final)
    return Trained(final, done, selection.step if selection.weights else done)


def _load(source: SampleSource, step: PlannedStep, index: IndexBuilder, dtype: torch.dtype) -> PackedBatch:
    return pack([source.get(i) for i in step.batches[0]], index, dtype, step.epoch)


def _truncate(path: Path, size: int) -> None:
    """Drop what was logged after the checkpoint; the steps will be made, and logged, again."""
    with open(path, "a+b") as file:
        file.truncate(size)


def _summarise(pending: list[tuple[Tensor, ...]], extras: Sequence[str]) -> dict[str, float]:
    """Mean loss and norm, and loss by place and extras pooled over the rows, of the steps since the last line."""
    loss, numerator, count, more, norm, sizes = (torch.stack(column).double() for column in zip(*pending, strict=True))
    rows = count.sum(dim=0).clamp(min=1.0)
    total = sizes.sum(dim=0)
    numbers: dict[str, Any] = {"loss": loss.mean(), "grad_norm": norm.mean()}
    numbers |= {f"loss_{place}": value for place, value in enumerate(numerator.sum(dim=0) / rows)}
    numbers |= {name: top / bottom.clamp(min=1e-9) for name, (top, bottom) in zip(extras, more.sum(dim=0), strict=True)}
    numbers |= {"tokens": total[0], "supervised": total[1], "padding": 1.0 - total[0] / total[2]}
    means = {name: float(value) for name, value in numbers.items()}
    return means | estimates(means)
