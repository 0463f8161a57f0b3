"""The commands that measure a trained drafter: `torchspec evaluate` and `torchspec parity`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torchspec_core.config.load import load_recipe
from torchspec_core.errors import UserError
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


def _parity(args: argparse.Namespace) -> int:
    from torchspec_core.evaluation.parity import LAW_TOLERANCE, STATES_TOLERANCE, input_folder, parity

    if args.samples < 1:
        raise UserError(f"--samples is {args.samples}; give a positive number")
    export, states = Path(args.exported).expanduser(), Path(args.states).expanduser()
    found = parity(export, states, input_folder(states, "tokens"), input_folder(states, "target"), args.samples)
    print(f"{found.samples} samples, {found.places} places, fp32")
    for layer, difference in found.states.items():
        print(f"  states after layer {layer:<3} differ by {difference:.2e} (RMS; at most {STATES_TOLERANCE:g})")
    print(f"  law of the first draft: total variation {found.law_mean:.2e} on average (at most {LAW_TOLERANCE:g}),")
    print(f"    {found.law_max:.2e} at most; {100 * found.drafts_equal:.1f} % of the drafts equal")
    print(f"  the text's next token gets probability {found.likes:.3f}")
    for cause in found.causes:
        print(f"  cause: {cause}")
    print("parity holds" if found.passed else "parity FAILS")
    return 0 if found.passed else 1


def add_measurements(commands: Any, recipe_arguments: Callable[[argparse.ArgumentParser], None]) -> None:
    """Add the commands to the parser's `commands`."""
    evaluate = commands.add_parser("evaluate", help="acceptance of a recipe's drafter on ten benchmarks")
    recipe_arguments(evaluate)
    evaluate.add_argument("--refresh", action="store_true", help="measure again although the store has it")
    evaluate.set_defaults(handler=_evaluate)

    check = commands.add_parser("parity", help="does an exported drafter read what it was trained on?")
    check.add_argument("exported", help="the exported drafter's folder")
    check.add_argument("--states", required=True, metavar="FOLDER", help="the states stage it was trained on")
    check.add_argument("--samples", type=int, default=8, help="samples to compare (default 8)")
    check.set_defaults(handler=_parity)
