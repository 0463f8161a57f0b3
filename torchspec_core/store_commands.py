"""`torchspec store`: copy, look at, check, mend and clear away sets of hidden states; estimate them before a run."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torchspec_core.config.load import load_recipe
from torchspec_core.errors import UserError
from torchspec_core.pipeline import estimate_bytes, open_store, plan
from torchspec_core.stages.disk import free_bytes
from torchspec_core.stages.manifest import read_manifest
from torchspec_core.stages.store import StageStore
from torchspec_core.terminal import size_text

_STATES = "states"


def _open(url: str) -> Any:
    from torchspec_core.store.address import open_store as open_address

    if "://" not in url and not Path(url).expanduser().is_dir():
        raise UserError(f"{url} is no folder: give the folder or the address of a set of states (docs/stores.md).")
    return open_address(url)


def _copy(args: argparse.Namespace) -> int:
    from torchspec_core.store.address import open_store as open_address
    from torchspec_core.store.move import copy_set

    started = time.monotonic()

    def report(done: int, total: int, name: str) -> None:
        rate = done / max(time.monotonic() - started, 1e-9)
        left = (total - done) / rate
        print(f"  {100 * done / total:3.0f}%  {name}  {size_text(rate)}/s  {left:.0f} s left", flush=True)

    copied = copy_set(_open(args.source), open_address(args.target), report)
    print(f"{copied.files} files, {size_text(copied.bytes)} copied and read back; {copied.kept} were there")
    return 0


def _stat(args: argparse.Namespace) -> int:
    from torchspec_core.store.move import stat_set

    facts: dict[str, Any] = dict(stat_set(_open(args.set)))
    manifest = read_manifest(Path(args.set)) if "://" not in args.set else None
    if manifest is not None:
        facts |= {"made": manifest["spec"]["stage"], "key": manifest["key"]}
    for name, value in facts.items():
        print(f"{name:<16} {size_text(value) if name == 'bytes' else value}")
    return 0


def _verify(args: argparse.Namespace) -> int:
    from torchspec_core.store.move import open_set

    problems = open_set(_open(args.set)).verify()
    for problem in problems:
        print(problem.reason)
    print(f"{len(problems)} problems" if problems else "every sample has its recorded checksum")
    return 1 if problems else 0


def _repair(args: argparse.Namespace) -> int:
    from torchspec_core.store.move import repair_set

    problems, mended = repair_set(_open(args.set), _open(args.good) if args.good else None)
    for problem in problems:
        print(problem.reason)
    broken = {problem.shard for problem in problems}
    left = broken - set(mended)
    print(f"{len(broken)} broken files, {len(mended)} mended")
    if left and not args.good:
        print("give --from SET, a whole copy, or capture again: torchspec run RECIPE --refresh states")
    return 1 if left else 0


def _estimate(args: argparse.Namespace) -> int:
    loaded = load_recipe(Path(args.recipe), args.overrides)
    store = open_store(loaded.recipe)
    planned = plan(loaded.recipe, store)
    states = next(entry for entry in planned if entry.name == _STATES)
    if states.lookup.hit and states.lookup.ref is not None:
        print(f"made already: {size_text(states.lookup.ref.bytes)} in {states.lookup.ref.path}")
        return 0
    need = estimate_bytes(loaded.recipe, planned).get(_STATES)
    if need is None:
        print("unknown before the target was prepared: torchspec run RECIPE --until target")
        return 1
    rates = [
        (entry.bytes / entry.seconds) for entry in store.ls(_STATES) if entry.sealed and entry.seconds and entry.bytes
    ]
    where = loaded.recipe.store.url
    print(f"{'states':<16} {size_text(need)} at most")
    if rates:
        print(f"{'time':<16} {need / rates[0] / 3600:.2f} h at {size_text(rates[0])}/s, the newest rate of this store")
    free = free_bytes(store.root)
    fits = need < free
    print(f"{'disk':<16} {size_text(free)} free in {store.root}: {'enough' if fits else 'not enough'}")
    if where:
        print(f"{'then to':<16} {where}")
    return 0 if fits else 1


def _gc(args: argparse.Namespace) -> int:
    from torchspec_core.store.move import delete_keys, unreachable

    place = _open(args.url)
    cached = {entry.path.name for entry in StageStore(args.store).ls(_STATES) if entry.sealed}
    doomed = unreachable(place, cached)
    for name, (count, keys) in sorted(doomed.items()):
        print(f"{name:<60} {len(keys):>7} objects  {size_text(count):>9}")
        if args.delete:
            delete_keys(place, keys)
    verb = "removed" if args.delete else "would remove (add --delete to do it)"
    print(f"{verb}: {len(doomed)} sets, {size_text(sum(count for count, _ in doomed.values()))}")
    return 0


def add_store_commands(commands: Any, recipe_arguments: Callable[[argparse.ArgumentParser], None]) -> None:
    """Add `store` and its actions to the subparsers of `torchspec`."""
    actions = commands.add_parser("store", help="look after sets of hidden states").add_subparsers(
        dest="action", required=True, metavar="ACTION"
    )

    def add(name: str, text: str, handler: Callable[[argparse.Namespace], int], words: Sequence[str]) -> Any:
        sub = actions.add_parser(name, help=text)
        for word in words:
            sub.add_argument(word, help="a folder or an address (docs/stores.md)")
        sub.set_defaults(handler=handler)
        return sub

    add("copy", "copy a set, reading each file back; goes on where it was interrupted", _copy, ("source", "target"))
    add("stat", "what a set holds", _stat, ("set",))
    add("verify", "read every sample and compare its checksum", _verify, ("set",))
    repair = add("repair", "find broken files and write them again from a whole copy", _repair, ("set",))
    repair.add_argument("--from", dest="good", metavar="SET", help="a whole copy of the set")
    recipe_arguments(add("estimate", "bytes and hours of a recipe's states, and whether they fit", _estimate, ()))
    collect = add("gc", "remove sets that no cached states stage names", _gc, ("url",))
    collect.add_argument("--store", default=".torchspec/store", help="the stage store (run.store of the recipe)")
    collect.add_argument("--delete", action="store_true", help="remove; without it, only list")
