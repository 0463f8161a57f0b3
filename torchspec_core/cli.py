"""The `torchspec` command: run a recipe, look at the plan, look after the cache.

`torchspec run configs/quickstart.yaml training.lr=5e-4` walks the stages in this terminal, without Prefect; the same
stages run as a flow by `prefect deployment run train-drafter/quickstart`. A mistake in what was asked prints one
sentence and exits with 2; a stage that fails exits with 1; an interrupted run exits with 130 and says how to go on.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from torchspec_core import __version__
from torchspec_core.cli_measure import add_measurements
from torchspec_core.config.load import LoadedRecipe, load_recipe, render_recipe
from torchspec_core.doctor import add_arguments as doctor_arguments
from torchspec_core.doctor import report as doctor_report
from torchspec_core.errors import StageError, UserError
from torchspec_core.nightly.command import add_parser as add_nightly
from torchspec_core.pipeline import STAGE_NAMES, PlannedStage, check_run, estimate_bytes, open_store, plan, run_stage
from torchspec_core.stages.store import StageStore
from torchspec_core.store_commands import add_store_commands
from torchspec_core.terminal import Terminal, duration, size_text


def _load(args: argparse.Namespace) -> LoadedRecipe:
    return load_recipe(Path(args.recipe), args.overrides)


def _show_plan(loaded: LoadedRecipe, planned: Sequence[PlannedStage], store: StageStore) -> None:
    """One line a stage: what is there, or what making it is expected to write and to take (as the newest one did)."""
    sizes = estimate_bytes(loaded.recipe, planned)
    for entry in planned:
        expected = store.plan(entry.spec)
        size = sizes.get(entry.name, expected.bytes)
        parts = [] if size is None else [size_text(size)]
        if not entry.lookup.hit:
            parts = [f"about {part}" for part in parts]
            parts += [] if expected.seconds is None else [f"{duration(expected.seconds)} last time"]
        hit = "cached " if entry.lookup.hit else "to run "
        print(f"  {entry.name:<10}  {hit}  {entry.spec.key[:12]}  {', '.join([entry.lookup.reason, *parts])}")


def _check_stage(name: str | None) -> None:
    if name is not None and name not in STAGE_NAMES:
        raise UserError(f"there is no stage {name!r}; the stages are {', '.join(STAGE_NAMES)}")


def _run(args: argparse.Namespace) -> int:
    loaded = _load(args)
    store = open_store(loaded.recipe)
    names = list(STAGE_NAMES)
    for name in [*args.refresh, args.until]:
        _check_stage(name)
    planned = plan(loaded.recipe, store)
    if args.dry_run:
        _show_plan(loaded, planned, store)
    check_run(loaded.recipe, planned, store)
    if args.dry_run:
        return 0
    started = time.monotonic()
    print(f"{args.recipe}: {len(names)} stages, results in {store.root}", flush=True)
    ref = None
    for name in names[: names.index(args.until) + 1] if args.until else names:
        terminal = Terminal(name)
        refresh = name in args.refresh
        ref = run_stage(name, loaded.recipe, store, on_progress=terminal, refresh=refresh, on_wait=terminal.wait)
        terminal.finish(ref)
    print(f"finished in {duration(time.monotonic() - started)}")
    if ref is not None and ref.stage == "report":
        print(Path(ref.path) / "report.html")
    return 0


def _profile(args: argparse.Namespace) -> int:
    """Make what training reads, train a few steps, and say where their time goes."""
    from torchspec_core.report.profile import profile_page
    from torchspec_core.training.profile import TRACE, profile_training

    if args.steps < 1:
        raise UserError(f"--steps is {args.steps}; give a positive number")
    loaded = _load(args)
    store, folder = open_store(loaded.recipe), Path(args.out)
    check_run(loaded.recipe, plan(loaded.recipe, store), store)
    entry = next(e for e in plan(loaded.recipe, store) if e.name == "drafter")
    inputs = {}
    for name in STAGE_NAMES[: STAGE_NAMES.index("drafter")]:
        terminal = Terminal(name)
        ref = run_stage(name, loaded.recipe, store, on_progress=terminal, on_wait=terminal.wait)
        terminal.finish(ref)
        inputs[name] = Path(ref.path)
    found = profile_training(inputs, entry.params, entry.runtime, folder, args.steps)
    operations = [(o.name, o.calls, o.ms) for o in found.operations]
    (folder / "profile.html").write_text(profile_page(found.numbers, found.phases, operations, TRACE), "utf-8")
    numbers = {**found.numbers, **{f"ms.{name}": value for name, value in found.phases.items()}}
    (folder / "profile.json").write_text(json.dumps(numbers, indent=1) + "\n", "utf-8")
    step = found.numbers["ms_per_step"]
    print(f"{step:,.1f} ms a step, {found.numbers['supervised_per_second']:,.0f} supervised tokens per second")
    for name, value in found.phases.items():
        print(f"  {name:<10}  {value:>8,.1f} ms  {100 * value / step:>5.1f} %")
    print(f"{folder / 'profile.html'}, {folder / TRACE}")
    return 0


def _config_show(args: argparse.Namespace) -> int:
    print(render_recipe(_load(args)))
    return 0


def _cache_store(args: argparse.Namespace) -> StageStore:
    return StageStore(args.store)


def _cache_ls(args: argparse.Namespace) -> int:
    store = _cache_store(args)
    entries = store.ls()
    if not entries:
        print(f"{store.root} holds no stage")
    for entry in entries:
        state = "sealed" if entry.sealed else "unfinished"
        size = size_text(entry.bytes)
        print(f"{entry.stage:<10}  {entry.key[:12]}  {state:<10}  {size:>9}  {entry.created}  {entry.path}")
    return 0


def _cache_explain(args: argparse.Namespace) -> int:
    _check_stage(args.stage)
    loaded = _load(args)
    store = open_store(loaded.recipe)
    planned = plan(loaded.recipe, store)
    for entry in planned:
        if args.stage is None or entry.name == args.stage:
            print(f"{entry.name}: {store.explain(entry.spec, known=[other.spec for other in planned])}")
    return 0


def _cache_rm(args: argparse.Namespace) -> int:
    removed = _cache_store(args).rm(args.stage, args.key)
    print(f"removed {removed.path} ({size_text(removed.bytes)})")
    return 0


def _cache_gc(args: argparse.Namespace) -> int:
    doomed = _cache_store(args).gc(keep=args.keep, dry_run=not args.delete)
    for entry in doomed:
        print(f"{entry.stage:<10}  {entry.key[:12]}  {size_text(entry.bytes):>9}  {entry.path}")
    verb = "removed" if args.delete else "would remove (add --delete to do it)"
    print(f"{verb}: {len(doomed)} folders, {size_text(sum(entry.bytes for entry in doomed))}")
    return 0


def _cache_adopt(args: argparse.Namespace) -> int:
    _check_stage(args.stage)
    loaded = _load(args)
    store = open_store(loaded.recipe)
    entry = next(e for e in plan(loaded.recipe, store) if e.name == args.stage)
    print(store.adopt(Path(args.folder), entry.spec).path)
    return 0


def _cache_verify(args: argparse.Namespace) -> int:
    problems = _cache_store(args).verify(discard=args.discard)
    for problem in problems:
        print(problem)
    mend = "discarded" if args.discard else "add --discard to delete what is damaged"
    mend += "; the next run makes it, and only it, again"
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    print(f"{count}; {mend}" if problems else "every sealed file has its recorded size and digest")
    return 1 if problems else 0


def _data_inspect(args: argparse.Namespace) -> int:
    from torchspec_core.data.inspect import samples, to_html, to_terminal

    target = Path(args.target).expanduser() if args.target else None
    shown = samples(Path(args.path).expanduser(), target, args.n, args.supervise, args.reasoning == "keep")
    print(to_terminal(shown))
    if args.html:
        Path(args.html).write_text(to_html(shown), "utf-8")
        print(f"written: {args.html}")
    return 0


def _recipe_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", help="a recipe file, such as configs/quickstart.yaml")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="changes to the recipe")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="torchspec", description="Train drafters for speculative decoding.")
    parser.add_argument("--version", action="version", version=f"torchspec {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    run = commands.add_parser("run", help="run a recipe's stages here, without Prefect")
    _recipe_arguments(run)
    run.add_argument("--dry-run", action="store_true", help="show keys, hits and sizes; run nothing")
    run.add_argument("--refresh", action="append", default=[], metavar="STAGE", help="run this stage again")
    run.add_argument("--until", metavar="STAGE", help="stop after this stage")
    run.set_defaults(handler=_run)

    profile = commands.add_parser("profile", help="train a few steps and show where their time goes")
    _recipe_arguments(profile)
    profile.add_argument("--steps", type=int, default=20, help="steps to time and to trace (default 20)")
    profile.add_argument(
        "--out", default="profile", metavar="FOLDER", help="for the page and the trace (default profile)"
    )
    profile.set_defaults(handler=_profile)

    add_measurements(commands, _recipe_arguments)

    config = commands.add_parser("config", help="look at a recipe").add_subparsers(
        dest="action", required=True, metavar="ACTION"
    )
    show = config.add_parser("show", help="the resolved recipe, with the source of each key")
    _recipe_arguments(show)
    show.set_defaults(handler=_config_show)

    cache = commands.add_parser("cache", help="look after the stage store").add_subparsers(
        dest="action", required=True, metavar="ACTION"
    )

    def add(name: str, text: str, handler: Callable[[argparse.Namespace], int], store: bool) -> argparse.ArgumentParser:
        sub = cache.add_parser(name, help=text)
        if store:
            sub.add_argument("--store", default=".torchspec/store", help="the store's folder (run.store of the recipe)")
        sub.set_defaults(handler=handler)
        return sub

    add("ls", "every stage folder with its size", _cache_ls, store=True)
    explain = add("explain", "why each stage is, or is not, cached under a recipe", _cache_explain, store=False)
    explain.add_argument("--stage", help="only this stage")
    _recipe_arguments(explain)
    remove = add("rm", "remove one stage folder", _cache_rm, store=True)
    remove.add_argument("stage")
    remove.add_argument("key", help="the key, or its first characters")
    collect = add("gc", "remove what the newest reports do not reach", _cache_gc, store=True)
    collect.add_argument("--keep", type=int, default=3, help="newest runs to keep (default 3)")
    collect.add_argument("--delete", action="store_true", help="remove; without it, only list")
    adopt = add("adopt", "take a folder made elsewhere as a stage's output", _cache_adopt, store=False)
    adopt.add_argument("stage")
    adopt.add_argument("folder")
    _recipe_arguments(adopt)
    check = add("verify", "read every sealed file and compare its digest", _cache_verify, store=True)
    check.add_argument("--discard", action="store_true", help="delete the damaged files; the next run makes them again")

    add_store_commands(commands, _recipe_arguments)

    data = commands.add_parser("data", help="look at training data").add_subparsers(
        dest="action", required=True, metavar="ACTION"
    )
    inspect = data.add_parser("inspect", help="conversations as tokens, the supervised ones coloured")
    inspect.add_argument("path", help="a file or folder of conversations, or the folder of a finished tokens stage")
    inspect.add_argument("--n", type=int, default=3, help="conversations to show (default 3)")
    inspect.add_argument("--target", help="the target's folder: tokenizer and chat template")
    inspect.add_argument("--html", metavar="FILE", help="write a page as well")
    inspect.add_argument("--supervise", choices=("all", "last", "last-if-thinking"), default="all")
    inspect.add_argument("--reasoning", choices=("keep", "drop"), default="keep")
    inspect.set_defaults(handler=_data_inspect)

    add_nightly(commands)
    doctor = commands.add_parser("doctor", help="what this machine can run, and what is missing")
    doctor_arguments(doctor)
    doctor.set_defaults(handler=doctor_report)
    return parser


def run_command(command: Callable[[Sequence[str]], int], argv: Sequence[str]) -> int:
    """Run a command line; what goes wrong becomes one sentence and an exit code."""
    try:
        return command(argv)
    except UserError as error:
        print(f"torchspec: {error}", file=sys.stderr)
        return 2
    except StageError as error:
        print(f"torchspec: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # `torchspec ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt as error:
        said = str(error) or "interrupted; run the same command again and it goes on where it stopped"
        print(f"\ntorchspec: {said}", file=sys.stderr)
        return 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    # argparse stops collecting overrides at the first option, but people write them on either side of it
    if rest and ("overrides" not in args or any(item.startswith("-") or "=" not in item for item in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        args.overrides = [*args.overrides, *rest]
    return run_command(lambda _: int(args.handler(args)), ())
