"""A short training done twice: once in one go, once killed in the middle. Gives `resume` and `throughput`.

Both runs are the recipe's own drafter stage in child processes, on the night's own inputs, over its first steps.
"""

from __future__ import annotations

import copy
import json
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchspec_core.errors import StageError
from torchspec_core.nightly.measure import fast
from torchspec_core.processes import Supervised
from torchspec_core.stages.canonical import to_plain
from torchspec_core.stages.disk import write_json
from torchspec_core.stages.workspace import OUTCOME, REQUEST

STEPS = 16
_TIMED = "torchspec_core.nightly.timed:build"
_DEADLINE_S = 900.0
_WARM = 4


@dataclass(frozen=True)
class Short:
    """The drafter stage, cut down. function: its body; inputs, params, runtime: as the stage gets them."""

    function: str
    inputs: Mapping[str, Path]
    params: Mapping[str, Any]
    runtime: Mapping[str, Any]


def shortened(whole: Short, steps_of_whole: int) -> Short:
    """The same stage with about `STEPS` steps, every one of them logged."""
    params, runtime = copy.deepcopy(dict(whole.params)), copy.deepcopy(dict(whole.runtime))
    params["training"] |= {"epochs": params["training"]["epochs"] * min(1.0, STEPS / steps_of_whole)}
    params["training"] |= {"validate_steps": 0, "patience": None, "keep": "last"}
    runtime["training"] |= {"log_steps": 1}
    return Short(whole.function, whole.inputs, params, runtime)


def _request(folder: Path, short: Short, function: str, checkpoint_s: float) -> None:
    folder.mkdir(parents=True)
    runtime = {**short.runtime, "training": {**short.runtime["training"], "checkpoint_seconds": checkpoint_s}}
    timed = {"timed": {"function": short.function}} if function == _TIMED else {}
    write_json(folder / REQUEST, {
        "function": function,
        "inputs": {name: str(Path(path).absolute()) for name, path in short.inputs.items()},
        "params": to_plain({**short.params, **timed}, "params"),
        "runtime": to_plain(runtime, "runtime"),
    })  # fmt: skip


def _child(folder: Path) -> Supervised:
    command = [sys.executable, "-m", "torchspec_core.stages.child", str(folder)]
    return Supervised(command, log=folder / "child.log", deadline_s=_DEADLINE_S, grace_s=0.0)


def _finish(folder: Path) -> None:
    with _child(folder) as child:
        while child.wait(0.2) is None:
            pass
    outcome = json.loads((folder / OUTCOME).read_text()) if (folder / OUTCOME).is_file() else {}
    if child.returncode != 0 or not outcome.get("ok"):
        why = outcome.get("user_error") or outcome.get("error") or child.describe_end()
        raise StageError(f"the short training failed ({why}); log: {child.log}")


def _kill_midway(folder: Path) -> None:
    """Start the stage and SIGKILL it once it has a checkpoint and two logged steps."""
    scratch = folder / "scratch/checkpoint"
    with _child(folder) as child:
        while child.wait(0.01) is None:
            lines = scratch / "metrics.jsonl"
            if (scratch / "state.pt").exists() and lines.exists() and lines.read_text().count("\n") >= 2:
                assert child.pid is not None
                with suppress(ProcessLookupError):  # it ended by itself just now: the outcome tells, below
                    os.kill(child.pid, signal.SIGKILL)
                break
    if (folder / OUTCOME).is_file():
        raise StageError(f"the short training ended before it could be killed; log: {child.log}")


def rerun(short: Short, folder: Path) -> dict[str, float]:
    """`resume`, `resume.continued`, `throughput` (supervised tokens per product of the yardstick).

    Raises:
        StageError: a run that failed, or was over before it could be killed.
    """
    whole, killed = folder / "whole", folder / "killed"
    _request(whole, short, _TIMED, 1e9)
    _finish(whole)
    _request(killed, short, short.function, 1e-3)
    _kill_midway(killed)
    before = _steps_reported(killed)
    _finish(killed)
    first = _steps_reported(killed)[len(before)]
    return {
        "resume": distance(whole / "drafter.safetensors", killed / "drafter.safetensors"),
        "resume.continued": float(first > 1),
        "throughput": throughput(whole),
    }


def _steps_reported(folder: Path) -> list[float]:
    path = folder / "logs/progress.jsonl"
    return [json.loads(line)["done"] for line in path.read_text().splitlines()] if path.is_file() else []


def distance(one: Path, other: Path) -> float:
    """Largest absolute difference of two files' tensors; infinite when their names or shapes differ."""
    from safetensors.numpy import load_file

    a, b = load_file(one), load_file(other)
    if {name: value.shape for name, value in a.items()} != {name: value.shape for name, value in b.items()}:
        return float("inf")
    return max(float(abs(a[name] - b[name]).max()) for name in a)


def throughput(folder: Path) -> float:
    """Fast-quartile supervised tokens a second of the run in `folder`, by the yardstick measured around it."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rate = fast([float(row["supervised_per_second"]) for row in rows[_WARM:]])
    yard = json.loads((folder / "scratch/yardstick/yardstick.json").read_text())
    return rate / float(yard["products_per_second"])
