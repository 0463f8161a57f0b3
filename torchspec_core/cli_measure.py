"""The commands that measure a trained drafter: `torchspec evaluate`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torchspec_core.config.load import load_recipe
from torchspec_core.measurements import run_measurement
from torchspec_core.pipeline import open_store
from torchspec_core.stages.spec import StageRef
from torchspec_core.terminal import Terminal


def _measure(name: str, args: argparse.Namespace) -> StageRef:
    recipe = load_recipe(Path(args.recipe), args.overrides).recipe
    terminal = Terminal(name)
    ref = run_measurement(
        name, recipe, open_store(recipe), on_progress=terminal, refresh=args.refresh, on_wait=terminal.wait
    )
    terminal.finish(ref)
    return ref


def benchmark_table(numbers: Mapping[str, Any]) -> list[str]:
    """The lines of a table: one a benchmark, greedy and sampled acceptance length with its 95 % interval."""
    lines = [f"{'benchmark':<16} {'category':<14} {'greedy':>18} {'T=' + format(numbers['meta.temperature'], 'g'):>18}"]
    for key, category in numbers.items():
        if key.startswith("meta.category."):
            name = key.removeprefix("meta.category.")
            cells = []
            for mode in ("greedy", "t1"):
                half = numbers[f"{name}.{mode}.ci95_high"] - numbers[f"{name}.{mode}.acceptance_length"]
                cells.append(f"{numbers[f'{name}.{mode}.acceptance_length']:.3f} ± {half:.3f}")
            lines.append(f"{name:<16} {category:<14} {cells[0]:>18} {cells[1]:>18}")
    greedy, sampled = (f"{numbers[f'mean.{mode}.acceptance_length']:.3f}        " for mode in ("greedy", "t1"))
    return [*lines, f"{'mean':<16} {'':<14} {greedy:>18} {sampled:>18}", numbers["meta.definition"]]


def _evaluate(args: argparse.Namespace) -> int:
    folder = Path(_measure("benchmarks", args).path)
    numbers = json.loads((folder / "benchmarks.json").read_text("utf-8"))
    print("\n".join(benchmark_table(numbers)))
    print(f"{folder / 'benchmarks.json'}, {folder / 'benchmarks.svg'}")
    return 0


def add_measurements(commands: Any, recipe_arguments: Callable[[argparse.ArgumentParser], None]) -> None:
    """Add the commands to the parser's `commands`."""
    evaluate = commands.add_parser("evaluate", help="acceptance of a recipe's drafter on ten benchmarks")
    recipe_arguments(evaluate)
    evaluate.add_argument("--refresh", action="store_true", help="measure again although the store has it")
    evaluate.set_defaults(handler=_evaluate)
