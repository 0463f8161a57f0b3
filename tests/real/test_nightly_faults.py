"""Every planted fault is caught by the gate that is named for it, and the same pipeline without it passes.

A random target and made-up answers stand in for the engine, so that it takes minutes and not an hour.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from tests.plants import PLANTS
from torchspec_core.config.load import load_recipe
from torchspec_core.data.tokenset import TokenSet
from torchspec_core.nightly import bands, checks, measure
from torchspec_core.nightly.gates import Band, Verdict, judge
from torchspec_core.nightly.rerun import Short, rerun, shortened
from torchspec_core.nightly.variants import VARIANTS
from torchspec_core.pipeline import PlannedStage, plan
from torchspec_core.stages.child import load_function
from torchspec_core.stages.job import local_job
from torchspec_core.stages.store import StageStore
from torchspec_core.store.files import StateSet

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
ROWS, SEEDS = 72, (0, 1, 2)
EMBEDDING = "model.embed_tokens.weight"
CHANGES = ["training.epochs=3.0", "training.tokens_per_step=192", "run.threads=1", "data.vocabulary_rows=0"]


@dataclass(frozen=True)
class Walk:
    """A walk without store and children. entries: the plan; folders: stage -> its output."""

    root: Path
    entries: Mapping[str, PlannedStage]
    folders: Mapping[str, Path]

    def make(self, stage: str, name: str, function: str | None = None, **folders: Path) -> Path:
        """Run the body of `stage`, or `function` in its place, into a new folder."""
        entry, made = self.entries[stage], {**self.folders, **folders}
        inputs = {needed: made[needed] for needed in entry.stage.inputs}
        job = local_job(self.root / name, inputs, entry.params, entry.runtime)
        load_function(function or entry.stage.function)(job)
        return self.root / name

    def seeded(self, seed: int) -> Path:
        """The drafter of another seed."""
        entry = self.entries["drafter"]
        params = {**entry.params, "run": {**entry.params["run"], "seed": seed}}
        inputs = {needed: self.folders[needed] for needed in entry.stage.inputs}
        job = local_job(self.root / f"drafter-{seed}", inputs, params, entry.runtime)
        load_function(entry.stage.function)(job)
        return self.root / f"drafter-{seed}"


def sharpen(weights: Path) -> None:
    """Make the random target one that mostly repeats its token, so that a drafter has something to learn."""
    tensors = load_file(weights)
    save_file({**tensors, EMBEDDING: tensors[EMBEDDING] * 8}, weights, metadata={"format": "pt"})


def made_up_answers(folder: Path) -> None:
    """Rows as the answers stage writes them: short random prompts and answers, the second half with two turns."""
    random = np.random.default_rng(5)
    folder.mkdir()
    ids = lambda n: random.integers(100, 500, n).tolist()  # noqa: E731
    with open(folder / "answers-00000.jsonl", "w") as file:
        for number in range(ROWS):
            row: dict[str, Any] = {"prompt_ids": ids(12), "answer_ids": ids(20), "sample_id": f"{number:032x}"}
            if number >= ROWS // 2:
                row["later"] = [{"prompt_ids": ids(6), "answer_ids": ids(12)}]
            file.write(json.dumps({**row, "messages": [], "finish": "stop", "source": "made-up"}) + "\n")


@pytest.fixture(scope="module")
def walk(tmp_path_factory: pytest.TempPathFactory) -> Walk:
    root = tmp_path_factory.mktemp("nightly")
    recipe = load_recipe(ROOT / "configs/nightly/eagle3.yaml", [*VARIANTS["tiny"].changes, *CHANGES]).recipe
    entries = {entry.name: entry for entry in plan(recipe, StageStore(root / "store"))}
    bare = Walk(root, entries, {"prompts": root})
    target = bare.make("target", "target")
    sharpen(target / "model.safetensors")
    (root / "heldout.jsonl").write_text("")
    made_up_answers(root / "answers")
    folders = {"target": target, "prompts": root, "answers": root / "answers"}
    for stage in ("tokens", "vocabulary", "states"):
        folders[stage] = Walk(root, entries, folders).make(stage, stage)
    return Walk(root, entries, folders)


@pytest.fixture(scope="module")
def limits(walk: Walk) -> Mapping[str, Band]:
    """Bands of `loss` and the accuracies from three seeds, as `torchspec nightly calibrate` derives them."""
    runs = [{"eagle3": measure.trained(walk.seeded(seed))} for seed in SEEDS]
    return {gate: Band(e["low"], e["high"]) for gate, e in bands.derive_all(runs)["eagle3"].items()}


def failed(numbers: Mapping[str, float], limits: Mapping[str, Band]) -> set[str]:
    """The gates of `numbers` that fail, of those that were measured here."""
    verdicts: list[Verdict] = judge("eagle3", numbers, limits)
    return {v.gate for v in verdicts if v.value is not None and not v.ok}


@pytest.fixture(scope="module")
def clean(walk: Walk) -> dict[str, float]:
    """What the checks say of the walk without a fault."""
    tokens, states = TokenSet(walk.folders["tokens"]), StateSet(walk.folders["states"])
    return {"mask": checks.mask_share(tokens, walk.folders["answers"]),
            "layers": checks.layer_distance(walk.folders["target"], tokens, states)}  # fmt: skip


def test_nothing_planted_nothing_caught(
    walk: Walk, limits: Mapping[str, Band], clean: dict[str, float], tmp_path: Path
) -> None:
    trained = measure.trained(walk.root / "drafter-0")
    assert not failed({**trained, **clean}, limits)
    assert clean["mask"] == 1.0


@pytest.mark.parametrize("fault", ["lr-times-10", "final-norm-dropped"])
def test_a_fault_of_training_leaves_the_loss_band(walk: Walk, limits: Mapping[str, Band], fault: str) -> None:
    plant = PLANTS[fault]
    drafter = walk.make(plant.stage, fault, plant.function)
    assert failed(measure.trained(drafter), limits) & plant.gates


def test_a_mask_off_by_one_is_seen_in_the_tokens(walk: Walk) -> None:
    plant = PLANTS["mask-off-by-one"]
    tokens = walk.make(plant.stage, "mask", plant.function)
    share = checks.mask_share(TokenSet(tokens), walk.folders["answers"])
    assert share == 0.0 and failed({"mask": share}, {}) == plant.gates


def test_layers_off_by_one_are_seen_in_the_states(walk: Walk, clean: dict[str, float]) -> None:
    plant = PLANTS["layers-off-by-one"]
    states = walk.make(plant.stage, "layers", plant.function)
    distance = checks.layer_distance(walk.folders["target"], TokenSet(walk.folders["tokens"]), StateSet(states))
    assert distance > 10 * clean["layers"] and failed({"layers": distance}, {}) == plant.gates


def short_run(walk: Walk, name: str, function: str) -> dict[str, float]:
    """The short runs of the drafter stage with `function` as its body."""
    entry = walk.entries["drafter"]
    inputs = {needed: walk.folders[needed] for needed in entry.stage.inputs}
    whole = Short(function, inputs, entry.params, entry.runtime)
    steps = int(measure.metrics_rows(walk.root / "drafter-0")[-1]["step"])
    return rerun(shortened(whole, steps), walk.root / name)


def test_a_broken_resume_and_a_slow_step_are_seen_in_the_short_runs(walk: Walk, limits: Mapping[str, Band]) -> None:
    good = short_run(walk, "short", walk.entries["drafter"].stage.function)
    own = bands.derive("throughput", [good["throughput"]])
    band = {"throughput": Band(own["low"], own["high"])}
    assert not failed(good, band)
    for fault in ("resume-broken", "step-twice-as-slow"):
        plant = PLANTS[fault]
        assert plant.gates <= failed(short_run(walk, fault, plant.function), band), fault
