"""A night: every subject through the whole pipeline from nothing, its numbers, its verdicts, the line of history."""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from torchspec_core.config.load import load_recipe
from torchspec_core.config.schema import Recipe
from torchspec_core.errors import TorchspecError, UserError
from torchspec_core.nightly import bands as bands_file
from torchspec_core.nightly import history, measure
from torchspec_core.nightly.bands import THROUGHPUT, Bands
from torchspec_core.nightly.gates import Verdict, failed_to_complete, judge
from torchspec_core.nightly.rerun import Short, rerun, shortened
from torchspec_core.nightly.variants import BANDS, FOLDER, check_subjects, variant
from torchspec_core.pipeline import STAGES, check_run, open_store, plan, run_stage
from torchspec_core.stages.disk import write_json
from torchspec_core.stages.run import run_stage as run_child
from torchspec_core.stages.spec import StageRef, StageSpec

_log = logging.getLogger("torchspec.nightly")
ROOT = Path(".torchspec/nightly")
Walk = Callable[[str, list[str]], Mapping[str, StageRef]]
"""(recipe's path, overrides) -> every stage of it by name, made or found."""
CHECKS = "torchspec_core.nightly.checks:build"
_CHECKED = ("target", "answers", "tokens", "states")


@dataclass(frozen=True)
class Plan:
    """A night to be. night: its name, also its store's: a night that was interrupted goes on under the same name."""

    variant: str
    night: str
    subjects: tuple[str, ...]
    overrides: tuple[str, ...] = ()
    root: Path = ROOT
    bands: Path = BANDS

    @property
    def store(self) -> Path:
        """Where this night's stages are."""
        return self.root / self.night

    def recipe(self, subject: str) -> tuple[str, list[str]]:
        """(path, overrides) of a subject's recipe."""
        changes = [*variant(self.variant).changes, f"run.store={self.store}", *self.overrides]
        return str(FOLDER / f"{subject}.yaml"), changes


def new_night(
    name: str, subjects: Sequence[str] = (), overrides: Sequence[str] = (), root: Path = ROOT, bands: Path = BANDS,
    night: str | None = None,
) -> Plan:  # fmt: skip
    """The plan of a night of variant `name`; raises `UserError` for what does not exist."""
    size = variant(name)
    stamp = night or f"{name}-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    return Plan(size.name, stamp, check_subjects(subjects), tuple(overrides), root, bands)


def walk_here(recipe: str, overrides: list[str]) -> dict[str, StageRef]:
    """Every stage in this process' children, without Prefect."""
    loaded = load_recipe(Path(recipe), overrides).recipe
    store = open_store(loaded)
    check_run(loaded, plan(loaded, store), store)
    return {stage.name: run_stage(stage.name, loaded, store) for stage in STAGES}


def numbers_of(plan_: Plan, subject: str, made: Mapping[str, StageRef]) -> dict[str, float]:
    """Every gate's number of a subject whose stages are made; the checks and the short runs are made here."""
    path, overrides = plan_.recipe(subject)
    recipe = load_recipe(Path(path), overrides).recipe
    folders = {name: Path(ref.path) for name, ref in made.items()}
    numbers = measure.trained(folders["drafter"]) | measure.accepted(folders["evaluation"])
    return numbers | _checks(recipe, made) | _rerun(plan_, subject, recipe, folders)


def _checks(recipe: Recipe, made: Mapping[str, StageRef]) -> dict[str, float]:
    """The sealed stages against other ways of making them; once for all subjects that share them."""
    spec = StageSpec("nightly_checks", 1, inputs={name: made[name].key for name in _CHECKED}, slug="checks")
    inputs = {name: Path(made[name].path) for name in _CHECKED}
    ref = run_child(open_store(recipe), spec, CHECKS, inputs, {}, {"run": {"threads": 0}})
    found: dict[str, float] = json.loads((Path(ref.path) / "checks.json").read_text(encoding="utf-8"))
    return found


def _rerun(plan_: Plan, subject: str, recipe: Recipe, folders: Mapping[str, Path]) -> dict[str, float]:
    entry = next(e for e in plan(recipe, open_store(recipe)) if e.name == "drafter")
    inputs = {name: folders[name] for name in entry.stage.inputs}
    whole = Short(entry.stage.function, inputs, entry.params, entry.runtime)
    steps = int(measure.metrics_rows(folders["drafter"])[-1]["step"])
    folder = plan_.store / "rerun" / subject
    shutil.rmtree(folder, ignore_errors=True)
    return rerun(shortened(whole, steps), folder)


def examine(plan_: Plan, subject: str, walk: Walk, bands: Bands) -> list[Verdict]:
    """Make a subject and judge it. A stage that fails is a verdict, so that the other subjects still run."""
    try:
        made = walk(*plan_.recipe(subject))
        numbers = numbers_of(plan_, subject, made)
    except UserError:
        raise
    except TorchspecError as error:
        return failed_to_complete(subject, str(error))
    return verdicts_of(subject, numbers, bands)


def verdicts_of(subject: str, numbers: Mapping[str, float], bands: Bands) -> list[Verdict]:
    """The numbers against the bands. Throughput is judged on the machine that its band was measured on only."""
    found = judge(subject, numbers, bands.subjects.get(subject, {}))
    here, there = history.machine(), bands.made.get("machine")
    if here == there:
        return found
    note = f"not judged: the band is of {there}"
    return [
        Verdict(v.subject, v.gate, v.value, v.low, v.high, True, note)
        if v.gate == THROUGHPUT and v.value is not None else v
        for v in found
    ]  # fmt: skip


def close(plan_: Plan, verdicts: Sequence[Verdict], started: float, root: Path) -> tuple[history.Night, list[str]]:
    """Write the night into the history; returns it and the suspects.

    A green night's store is removed, a red one's is kept to be looked at.

    started: Unix time. root: the repository.
    """
    commit, dirty = history.commit_of(root)
    night = history.Night(
        plan_.night, plan_.variant, f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}", commit, dirty,
        history.made_from(root, _data_digests(plan_)), tuple(v.to_json() for v in verdicts),
        round(time.time() - started, 1),
    )  # fmt: skip
    path = plan_.root / history.HISTORY
    history.append(path, night)
    if night.green:
        shutil.rmtree(plan_.store, ignore_errors=True)
    return night, history.suspects(history.read(path, plan_.variant), root)


def _data_digests(plan_: Plan) -> dict[str, Any]:
    path, overrides = plan_.recipe(plan_.subjects[0])
    recipe = load_recipe(Path(path), overrides).recipe
    return {entry.name: dict(entry.spec.files) for entry in plan(recipe, open_store(recipe)) if entry.spec.files}


def run_night(plan_: Plan, walk: Walk = walk_here, root: Path | None = None) -> tuple[history.Night, list[str]]:
    """The whole night without Prefect."""
    started, bands = time.time(), bands_file.read(plan_.bands, plan_.variant)
    verdicts: list[Verdict] = []
    for subject in plan_.subjects:
        _log.info("%s", subject)
        verdicts += examine(plan_, subject, walk, bands)
    return close(plan_, verdicts, started, root or Path.cwd())


def calibrate(plan_: Plan, seeds: Sequence[int], say: Callable[[str], None]) -> dict[str, Any]:
    """Run every subject once a seed and write the bands that follow; returns them.

    Interrupted, it goes on where it stopped as long as the commit is the same. Raises `StageError` when a run fails:
    bands are derived from runs that are whole.
    """
    commit, dirty = history.commit_of(Path.cwd())
    nights = [
        replace(plan_, night=f"calibrate-{plan_.variant}-{commit[:9] or 'none'}-seed{seed}",
                overrides=(*plan_.overrides, f"run.seed={seed}"))
        for seed in seeds
    ]  # fmt: skip
    runs = []
    for seed, one in zip(seeds, nights, strict=True):
        run = {subject: _kept_numbers(one, subject) for subject in one.subjects}
        for subject, numbers in run.items():
            say(f"seed {seed}, {subject}: " + ", ".join(f"{gate} {value:.4g}" for gate, value in numbers.items()))
        runs.append(run)
    derived = bands_file.derive_all(runs)
    made = {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "commit": commit + ("+changes" if dirty else ""),
        "machine": history.machine(),
        "seeds": list(seeds),
        "k": bands_file.K,
        "least": bands_file.LEAST,
        "command": f"torchspec nightly calibrate --variant {plan_.variant} --seeds {','.join(map(str, seeds))}",
    }
    bands_file.write(plan_.bands, plan_.variant, made, derived)
    for one in nights:
        shutil.rmtree(one.store)
    return derived


def _kept_numbers(one: Plan, subject: str) -> dict[str, float]:
    kept = one.store / f"numbers-{subject}.json"
    if not kept.is_file():
        write_json(kept, numbers_of(one, subject, walk_here(*one.recipe(subject))))
    numbers: dict[str, float] = json.loads(kept.read_text(encoding="utf-8"))
    return numbers
