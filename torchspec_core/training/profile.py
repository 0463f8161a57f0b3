"""A short training run that is looked at instead of kept: a trace, and the numbers of where a step's time goes.

`torchspec profile RECIPE` runs the recipe's own training loop three times over a few steps: to warm up, to be timed,
and under torch's profiler, which slows it down. Nothing enters the store.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from torchspec_core.errors import UserError
from torchspec_core.stages.job import local_job
from torchspec_core.training.loop import METRICS, train
from torchspec_core.training.phases import PHASES
from torchspec_core.training.plan import PlannedStep
from torchspec_core.training.stage import Prepared, prepare

TRACE = "trace.json"
_WARM_UP = 5


@dataclass(frozen=True)
class Operation:
    """An operation of the trace: its calls in a step, and the milliseconds of a step that it takes itself (host)."""

    name: str
    calls: float
    ms: float


@dataclass(frozen=True)
class Profile:
    """numbers: `ms_per_step`, `supervised_per_second`, `padding`, `steps`, `threads`; phases: milliseconds of a step
    by phase; operations: the longest first."""

    numbers: Mapping[str, float]
    phases: Mapping[str, float]
    operations: tuple[Operation, ...]


def profile_training(
    inputs: Mapping[str, Path], params: Mapping[str, Any], runtime: Mapping[str, Any], folder: Path, steps: int
) -> Profile:
    """Profile `steps` steps; leaves `trace.json` (for Perfetto or chrome://tracing) in `folder`.

    Args:
        inputs, params, runtime: as the `drafter` stage gets them.

    Raises:
        UserError: as the stage, or the recipe has fewer steps than asked for.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        made = prepare(local_job(Path(scratch) / "job", inputs, params, runtime))
        if len(made.plan) < _WARM_UP + steps:
            raise UserError(
                f"the recipe trains for {len(made.plan)} steps, fewer than {_WARM_UP} to warm up and {steps} to look "
                "at; give a smaller --steps or raise training.epochs"
            )
        chosen = made.plan[_WARM_UP : _WARM_UP + steps]
        _run(made, made.plan[:_WARM_UP], Path(scratch) / "warm")
        line = _run(made, chosen, Path(scratch) / "timed")
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        with torch.profiler.profile(activities=activities) as seen:
            _run(made, chosen, Path(scratch) / "traced")
        seen.export_chrome_trace(str(folder / TRACE))
    ms = 1e3 * line["supervised"] / line["supervised_per_second"] / steps
    phases = {name: ms * line[f"time_{name}"] for name in PHASES}
    phases["other"] = max(0.0, ms - sum(phases.values()))
    numbers = {
        "ms_per_step": ms,
        "supervised_per_second": line["supervised_per_second"],
        "padding": line["padding"],
        "steps": steps,
        "threads": torch.get_num_threads(),
    }
    rows = [row for row in seen.key_averages() if not row.key.startswith(("step/", "Profiler"))]
    operations = (Operation(r.key, r.count / steps, r.self_cpu_time_total / 1e3 / steps) for r in rows)
    return Profile(numbers, phases, tuple(sorted(operations, key=lambda row: -row.ms)))


def _run(made: Prepared, plan: Sequence[PlannedStep], scratch: Path) -> dict[str, float]:
    """Train over `plan`; the line of metrics of all its steps."""
    scratch.mkdir()
    settings = dataclasses.replace(made.settings, log_steps=len(plan), checkpoint_seconds=1e9, validate_steps=0)
    method = made.method
    method.drafter.float()  # the run before left it in the compute type
    train(method.drafter, method.objective, method.index, made.source, plan, settings, scratch, lambda _: None)
    line: dict[str, float] = json.loads((scratch / METRICS).read_text().splitlines()[-1])
    return line
