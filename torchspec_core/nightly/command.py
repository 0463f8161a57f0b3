"""`torchspec nightly run|calibrate|history`."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path
from typing import Any

from torchspec_core.errors import UserError


def add_parser(commands: Any) -> None:
    """Add the `nightly` command to the command line's subparsers."""
    actions = commands.add_parser("nightly", help="the convergence gate, without Prefect").add_subparsers(
        dest="action", required=True, metavar="ACTION"
    )
    run = actions.add_parser("run", help="train the subjects anew and hold their numbers against the bands")
    run.set_defaults(handler=_run)
    calibrate = actions.add_parser("calibrate", help="derive the bands anew from runs with several seeds")
    calibrate.add_argument("--seeds", default="0,1,2,3", help="comma-separated (default %(default)s)")
    calibrate.set_defaults(handler=_calibrate)
    show = actions.add_parser("history", help="the nights so far, and their trend as a picture")
    show.add_argument("--plot", metavar="FILE", help="write the trend as SVG")
    show.set_defaults(handler=_history)
    for parser in (run, calibrate, show):
        parser.add_argument("--variant", default="quick", help="nightly, quick (default) or tiny")
        parser.add_argument("--root", default=".torchspec/nightly", help="folder of history and results")
    for parser in (run, calibrate):
        parser.add_argument("--subject", action="append", default=[], dest="subjects", help="only this recipe")
        parser.add_argument("--bands", default="configs/nightly/bands.json", help="the bands file")
        parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="changes to every recipe")


def _plan(args: argparse.Namespace) -> Any:
    from torchspec_core.nightly.night import new_night

    return new_night(args.variant, args.subjects, args.overrides, Path(args.root), Path(args.bands))


def _run(args: argparse.Namespace) -> int:
    from torchspec_core.nightly.night import run_night

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    night, suspects = run_night(_plan(args))
    print(verdict_lines(night.verdicts))
    for line in suspects:
        print(f"suspect: {line}")
    return 0 if night.green else 1


def verdict_lines(verdicts: Any) -> str:
    """One line a gate."""
    from torchspec_core.nightly.gates import Verdict

    return "\n".join(f"{'ok ' if v['ok'] else 'RED'}  {Verdict(**v)}" for v in verdicts)


def _calibrate(args: argparse.Namespace) -> int:
    from torchspec_core.nightly.night import calibrate

    try:
        seeds = [int(seed) for seed in args.seeds.split(",")]
    except ValueError as error:
        raise UserError(f"--seeds is {args.seeds!r}; give whole numbers with commas, such as 0,1,2,3") from error
    if len(set(seeds)) < 3:
        raise UserError("a band needs three different seeds at least: give --seeds 0,1,2,3")
    calibrate(_plan(args), seeds, lambda line: print(line, flush=True))
    print(f"written: {args.bands}; review it before it is committed")
    return 0


def _history(args: argparse.Namespace) -> int:
    from torchspec_core.nightly.history import HISTORY, read
    from torchspec_core.plots.nightly import trend
    from torchspec_core.plots.style import standalone

    nights = read(Path(args.root) / HISTORY, args.variant)
    if not nights:
        raise UserError(f"{args.root} has no night of the variant {args.variant!r} yet: `torchspec nightly run`")
    for night in nights:
        red = [f"{v['subject']} {v['gate']}" for v in night.verdicts if not v["ok"]]
        state = f"red: {', '.join(red)}" if red else "green"
        print(f"{night.time}  {night.commit[:9] or '-':<9}  {night.seconds:>6.0f} s  {state}")
    if args.plot:
        Path(args.plot).write_text(standalone(trend([dict(v) for v in night.verdicts] for night in nights)), "utf-8")
        print(f"written: {args.plot}")
    return 0
