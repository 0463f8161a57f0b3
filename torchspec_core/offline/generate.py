"""First phase of offline training: everything up to the target's hidden states, into a folder that can be moved.

    python -m torchspec_core.offline.generate --config configs/your.yaml --output ./data/hidden-states
        [--shard I/N] [section.key=value ...]

The folder is a stage store of its own: target, prompts, answers, tokens, hidden states, each sealed. A second run goes
on where the first one stopped. Train from it with the same recipe and `capture.engine=offline
capture.data_path=./data/hidden-states`.

With `--shard I/N` (I from 0) only every N-th shard of the states is captured, from the tokens that are in the folder:
run it on N machines that share the folder, or on copies of it. Then put their `states_part` folders together and run it
without `--shard`: it takes over what is there and captures what is missing.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchspec_core.cli import run_command
from torchspec_core.config.load import load_recipe
from torchspec_core.config.schema import Recipe
from torchspec_core.errors import UserError
from torchspec_core.pipeline import OFFLINE_STAGES, PlannedStage, check_run, open_store, plan, run_stage
from torchspec_core.stages.disk import free_bytes
from torchspec_core.stages.manifest import read_manifest
from torchspec_core.stages.run import run_stage as run_child
from torchspec_core.stages.spec import StageRef, StageSpec
from torchspec_core.stages.store import StageStore
from torchspec_core.terminal import Terminal, size_text

PART_STAGE = "states_part"


def part_spec(spec: StageSpec, part: int, parts: int) -> StageSpec:
    """The spec of one part of a states stage."""
    capture = {**spec.identity["capture"], "part": [part, parts]}
    return replace(spec, stage=PART_STAGE, identity={**spec.identity, "capture": capture})


def sealed_parts(store: StageStore, spec: StageSpec) -> list[Path]:
    """Folders of the sealed parts of a states stage, whatever N they were made with."""
    found = []
    for entry in store.ls(PART_STAGE):
        manifest = read_manifest(entry.path)
        document = manifest["spec"] if manifest is not None else None
        if document is None:
            continue
        own = StageSpec.from_document(document)
        part = own.identity["capture"].get("part")
        if part is not None and part_spec(spec, *part).key == own.key:
            found.append(entry.path)
    return found


def _shard(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if not match or not int(match[1]) < int(match[2]):
        raise UserError(f"--shard {text}: give I/N with I from 0 to N-1, such as 0/4")
    return int(match[1]), int(match[2])


def _estimate(entry: PlannedStage, made: Mapping[str, StageRef], recipe: Recipe, root: Path, parts: int) -> None:
    """Say what the states will take, before the first byte, and refuse what the disk cannot hold."""
    from torchspec_core.store.format import Layout
    from torchspec_core.targets.facts import captured_layers, read_facts

    if entry.lookup.hit:
        return
    facts, tokens = read_facts(Path(made["target"].path)), made["tokens"]
    layers = captured_layers(facts, recipe.capture.layers)
    each = Layout(layers, facts.hidden_size, recipe.capture.dtype).bytes_per_token
    need = int(tokens.metrics["tokens"]) * each // parts
    free = free_bytes(root)
    print(
        f"  states of {tokens.metrics['tokens']:,} tokens, {len(layers)} layers of {facts.hidden_size} in "
        f"{recipe.capture.dtype}: {size_text(need)} ({size_text(free)} free)",
        flush=True,
    )
    if need > free:
        raise UserError(
            f"the states need {size_text(need)}, but {size_text(free)} are free in {root}: use another --output, fewer "
            "rows, or --shard I/N on several machines"
        )


def generate(recipe: Recipe, shard: tuple[int, int] | None = None, terminal: Any = Terminal) -> StageRef:
    """Run a recipe whose `run.store` is the output folder up to its hidden states; returns the states, or the part.

    Raises:
        UserError: a mistake in the recipe, a disk that is too small. StageError: a stage that failed.
    """
    if shard and recipe.store.url is not None:
        raise UserError("--shard leaves each part in the folder: leave store.url to the run that puts them together")
    store = open_store(recipe)
    check_run(recipe, plan(recipe, store), store)
    made: dict[str, StageRef] = {}
    for name in OFFLINE_STAGES[:-1]:
        shown = terminal(name)
        made[name] = run_stage(name, recipe, store, on_progress=shown, on_wait=shown.wait)
        shown.finish(made[name])
    entry = next(e for e in plan(recipe, store) if e.name == OFFLINE_STAGES[-1])
    inputs = {name: Path(made[name].path) for name in entry.stage.inputs}
    _estimate(entry, made, recipe, store.root, shard[1] if shard else 1)
    spec, params, runtime = entry.spec, entry.params, entry.runtime
    if shard:
        spec = part_spec(spec, *shard)
        params = {**params, "capture": {**params["capture"], "part": list(shard)}}
    else:
        parts = [str(folder) for folder in sealed_parts(store, spec)]
        runtime = {**runtime, "capture": {**runtime["capture"], "parts": parts}}
    shown = terminal(spec.stage)
    ref = run_child(
        store, spec, entry.stage.function, inputs, params, runtime, on_progress=shown, on_wait=shown.wait
    )  # fmt: skip
    shown.finish(ref)
    return ref


def _main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m torchspec_core.offline.generate", description="Generate hidden states to train from later."
    )
    parser.add_argument("--config", required=True, help="a recipe")
    parser.add_argument("--output", required=True, help="folder to fill")
    parser.add_argument("--shard", metavar="I/N", help="capture only every N-th shard, from the I-th on")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="changes to the recipe")
    args = parser.parse_args(argv)
    shard = _shard(args.shard) if args.shard else None
    recipe = load_recipe(Path(args.config), [*args.overrides, f"run.store={args.output}"]).recipe
    if recipe.capture.engine == "offline":
        raise UserError(
            "capture.engine=offline reads states, it makes none: set it to transformers or vllm to generate them"
        )
    ref = generate(recipe, shard)
    print(ref.path)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(_main, sys.argv[1:]))
