"""What `benchmarks.training` prints and draws."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torchspec_core.plots.speed import speed_bars, step_breakdown
from torchspec_core.plots.style import standalone
from torchspec_core.training.phases import PHASES

LABELS = {
    "baseline": "random pairs, loops, synchronised", "grouping": "+ like lengths", "anchored": "+ anchors",
    "optimizer": "+ fused optimiser", "no_sync": "+ metrics later", "packing": "+ packing (all)",
}  # fmt: skip


def show(numbers: dict[str, Any]) -> None:
    """The table."""
    print(f"{'':<14}{'supervised tok/s':>18}{'spread':>9}{'ms a step':>11}{'gain':>7}")
    for key, value in numbers.items():
        if key.startswith("supervised_per_second.") and not key.endswith(".spread"):
            name = key.split(".")[1]
            gain = numbers.get(f"speedup.{name}")
            print(
                f"{name:<14}{value:>18,.0f}{numbers[f'{key}.spread']:>9,.0f}"
                f"{1e3 * numbers[f'step_seconds.{name}']:>11,.1f}{f'{gain:.2f}x' if gain else '':>7}"
            )
    for key, value in numbers.items():
        if key.startswith(("speedup.all", "speedup.vs", "fraction.", "gflop", "floor", "check.")):
            print(f"{key:<42}{value:>10,.3f}")


def draw(numbers: dict[str, Any], folder: Path) -> None:
    """`training_speed.svg` and `training_breakdown.svg`, from the numbers of a run."""
    rates = {label: numbers[f"supervised_per_second.{name}"] for name, label in LABELS.items()}
    spreads = {label: numbers[f"supervised_per_second.{name}.spread"] for name, label in LABELS.items()}
    bars = speed_bars(rates, spreads, "supervised tokens per second, batch size 2")
    (folder / "training_speed.svg").write_text(standalone(bars), encoding="utf-8")
    shown = ("baseline", "optimizer", "no_sync", "packing")
    steps = {LABELS[name]: {phase: numbers[f"ms.{name}.{phase}"] for phase in PHASES} for name in shown}
    (folder / "training_breakdown.svg").write_text(standalone(step_breakdown(steps)), encoding="utf-8")
