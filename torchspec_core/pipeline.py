"""The pipeline: the list of stages, what each one's key is made of, and how one of them is run.

Every key is a pure function of the recipe and of the digests of the files that sources read, so the whole plan (keys,
hits, reasons) is known before anything runs. A stage's body lives in its own room and runs in a supervised child.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torchspec_core.config.fields import identity_of, keyed_of, runtime_of
from torchspec_core.config.schema import Recipe, Section
from torchspec_core.data.checks import check_readable, check_scheduler
from torchspec_core.errors import UserError
from torchspec_core.recipe_checks import check_fields, check_place, check_states_place, check_target
from torchspec_core.stages.disk import digest_file, free_bytes
from torchspec_core.stages.lock import Holder
from torchspec_core.stages.run import run_stage as run_stage_child
from torchspec_core.stages.spec import StageRef, StageSpec
from torchspec_core.stages.store import Lookup, StageStore
from torchspec_core.targets.facts import TargetFacts
from torchspec_core.targets.made import known_facts

Fields = Mapping[str, tuple[str, ...] | None]
"""Recipe section -> the fields a stage reads; None = all of the section's."""


@dataclass(frozen=True)
class Stage:
    """One stage: where its body is, what it reads, and a readable name for its folder."""

    name: str
    version: int
    function: str
    inputs: tuple[str, ...]
    reads: Fields
    files: Callable[[Recipe], Mapping[str, str]]
    slug: Callable[[Recipe], str]

    def spec(self, recipe: Recipe, keys: Mapping[str, str]) -> StageSpec:
        """What the stage is made from under `recipe`; `keys`: stage name -> key, its inputs' among them."""
        return StageSpec(
            stage=self.name, version=self.version, slug=self.slug(recipe),
            identity=select(recipe, self.reads, keyed_of), files=dict(self.files(recipe)),
            inputs={name: keys[name] for name in self.inputs},
        )  # fmt: skip


@dataclass(frozen=True)
class PlannedStage:
    """A stage under one recipe: its spec, and whether the store already holds it."""

    stage: Stage
    spec: StageSpec
    params: Mapping[str, Any]
    runtime: Mapping[str, Any]
    lookup: Lookup

    @property
    def name(self) -> str:
        """The stage's name."""
        return self.stage.name


def _no_files(recipe: Recipe) -> Mapping[str, str]:
    return {}


@functools.lru_cache(maxsize=256)
def _digest(path: str, size: int, mtime_ns: int) -> str:
    return digest_file(Path(path))


def digest_of_file(path: Path) -> str:
    """Blake2b-128 of a file's bytes, remembered while its size and modification time stay the same."""
    try:
        stat = path.stat()
        return _digest(str(path), stat.st_size, stat.st_mtime_ns)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; check the path in the recipe") from error


def _target_files(recipe: Recipe) -> Mapping[str, str]:
    from torchspec_core.targets.source import source_files

    return {name: digest_of_file(path) for name, path in source_files(recipe.target).items()}


def _source_files(sources: Sequence[tuple[str, str | None]], benchmarks: bool) -> Mapping[str, str]:
    from torchspec_core.data.files import data_files
    from torchspec_core.data.packages import BENCHMARK_FILES, SDIST, SDIST_FILES, SOURCE_FILES, sdist_file, ship

    files: dict[str, str] = {}
    for number, (name, path) in enumerate(sources):
        if name == "hub" and path is not None:
            continue  # nothing to read before it is fetched: its name and revision, in the parameters, stand for it
        if path is not None:
            root = Path(path).expanduser()
            for found in data_files(root):
                inside = found.name if found == root else f"{root.name}/{found.relative_to(root).as_posix()}"
                files[f"{number}:{inside}"] = digest_of_file(found)
        elif name in SDIST_FILES:
            files[f"{SDIST}/{SDIST_FILES[name]}"] = digest_of_file(sdist_file(name))
        elif name not in SOURCE_FILES:
            raise UserError(f"source {name!r} of the recipe reads a file: give its path")
        else:
            for file in SOURCE_FILES[name]:
                files[f"{file.dist}/{file.path}"] = digest_of_file(ship(file.dist, file.path))
    if benchmarks:
        for file in BENCHMARK_FILES:
            files[f"{file.dist}/{file.path}"] = digest_of_file(ship(file.dist, file.path))
    return files


def _prompt_files(recipe: Recipe) -> Mapping[str, str]:
    return _source_files([(source.name, source.path) for source in recipe.data.prompts], benchmarks=True)


def _conversation_files(recipe: Recipe) -> Mapping[str, str]:
    return _source_files([(source.name, source.path) for source in recipe.data.conversations], benchmarks=False)


def _start_files(recipe: Recipe) -> Mapping[str, str]:
    """The exported drafter that training goes on from."""
    if recipe.training.start is None:
        return {}
    folder = Path(recipe.training.start).expanduser()
    return {f"start/{name}": digest_of_file(folder / name) for name in ("config.json", "model.safetensors")}


def _vocabulary_files(recipe: Recipe) -> Mapping[str, str]:
    counted = [("sharegpt", None)] if recipe.data.vocabulary_rows and recipe.training.start is None else []
    return {**_source_files(counted, benchmarks=False), **_start_files(recipe)}


def _target_slug(recipe: Recipe) -> str:
    return recipe.target.source.split("@")[0].rstrip("/").split("/")[-1].split(":")[-1]


STAGES: tuple[Stage, ...] = (
    Stage(
        "target",
        1,
        "torchspec_core.targets.source:build",
        (),
        {"target": None, "run": ("threads",)},
        _target_files,
        _target_slug,
    ),
    Stage(
        "prompts",
        1,
        "torchspec_core.data.prompts:build",
        ("target",),
        {"data": ("prompts", "max_prompt_tokens", "heldout", "max_rejected"), "run": ("seed",)},
        _prompt_files,
        lambda r: "-".join(f"{s.name}{s.rows}" for s in r.data.prompts),
    ),
    Stage(
        "answers",
        1,
        "torchspec_core.targets.answers:build",
        ("target", "prompts"),
        {"answers": None, "run": ("seed", "threads")},
        _no_files,
        lambda r: f"{_target_slug(r)}-t{r.answers.temperature:g}-{r.answers.max_new_tokens}tok",
    ),
    Stage(
        "tokens",
        2,
        "torchspec_core.data.tokens:build",
        ("target", "prompts", "answers"),
        {
            "data": (
                "conversations",
                "max_length",
                "min_supervised",
                "supervise",
                "reasoning",
                "special_text",
                "max_rejected",
                "shard_rows",
                "workers",
                "scheduler",
            )
        },
        _conversation_files,
        lambda r: f"{_target_slug(r)}-len{r.data.max_length}",
    ),
    Stage(
        "vocabulary",
        1,
        "torchspec_core.data.vocabulary:build",
        ("target", "prompts", "tokens"),
        {"drafter": ("draft_vocab_size",), "data": ("vocabulary_rows",), "training": ("start",)},
        _vocabulary_files,
        lambda r: f"top{r.drafter.draft_vocab_size}",
    ),
    Stage(
        "states",
        1,
        "torchspec_core.capture.states:build",
        ("target", "tokens"),
        {"capture": None, "store": None, "run": ("threads",)},
        _no_files,
        lambda r: f"{_target_slug(r)}-{r.capture.dtype}",
    ),
    Stage(
        "drafter",
        1,
        "torchspec_core.training.stage:build",
        ("target", "tokens", "vocabulary", "states"),
        {"drafter": None, "training": None, "store": None, "run": ("seed", "threads")},
        _start_files,
        lambda r: f"{r.drafter.kind}-{r.drafter.attention}-{r.training.optimizer}-lr{r.training.lr:g}",
    ),
    Stage(
        "export",
        1,
        "torchspec_core.export.checkpoint:build",
        ("target", "vocabulary", "drafter"),
        {},
        _no_files,
        lambda r: f"{_target_slug(r)}-{r.drafter.kind}",
    ),
    Stage(
        "evaluation",
        2,
        "torchspec_core.evaluation.acceptance:build",
        ("target", "prompts", "tokens", "export"),
        {"evaluation": None, "serving": None, "run": ("seed", "threads")},
        _no_files,
        lambda r: f"k{r.evaluation.k}-{r.evaluation.prompts}prompts",
    ),
    Stage(
        "report",
        2,
        "torchspec_core.report.build:build",
        ("target", "prompts", "answers", "tokens", "vocabulary", "states", "drafter", "export", "evaluation"),
        {"run": ("name",), "evaluation": None, "serving": None, "answers": None, "training": None, "drafter": None},
        _no_files,
        lambda r: f"{_target_slug(r)}-{r.drafter.kind}",
    ),
)
"""Every stage, in the order it runs."""

STAGE_NAMES: tuple[str, ...] = tuple(stage.name for stage in STAGES)
OFFLINE_STAGES = ("target", "prompts", "answers", "tokens", "states")
"""What `torchspec_core.offline.generate` leaves for training elsewhere; the last of them is what it is for."""


def select(recipe: Recipe, reads: Fields, part: Callable[[Section], Mapping[str, Any]]) -> dict[str, Any]:
    """The fields of `reads` that `part` takes (identity, key or runtime), nested by section."""
    selected: dict[str, Any] = {}
    for section, fields in reads.items():
        values = part(getattr(recipe, section))
        chosen = {name: value for name, value in values.items() if fields is None or name in fields}
        if chosen:
            selected[section] = chosen
    return selected


def open_store(recipe: Recipe) -> StageStore:
    """The stage store that the recipe names."""
    return StageStore(recipe.run.store)


def plan(recipe: Recipe, store: StageStore) -> list[PlannedStage]:
    """Every stage of `recipe` with its key and whether it is a hit; raises `UserError` where a source is missing
    or the recipe asks what cannot work."""
    check_fields(recipe)
    keys: dict[str, str] = {}
    planned: list[PlannedStage] = []
    for stage in STAGES:
        params, spec = select(recipe, stage.reads, identity_of), stage.spec(recipe, keys)
        keys[stage.name] = spec.key
        lookup = store.lookup(spec)
        if recipe.capture.engine == "offline" and stage.name in OFFLINE_STAGES and not lookup.hit:
            lookup = _found_offline(recipe, spec, lookup, [entry.spec for entry in planned])
        planned.append(PlannedStage(stage, spec, params, select(recipe, stage.reads, runtime_of), lookup))
    facts = _facts(recipe, planned)
    if facts is not None:
        check_target(recipe, facts)
    return planned


def _found_offline(recipe: Recipe, spec: StageSpec, miss: Lookup, before: Sequence[StageSpec]) -> Lookup:
    """The stage in the folder of `capture.data_path`; states that are not there are an error, other stages can be
    made."""
    assert recipe.capture.data_path is not None
    folder = Path(recipe.capture.data_path).expanduser()
    if not folder.is_dir():
        raise UserError(f"capture.data_path={folder} is no folder: generate the states first, or correct the path")
    generated = StageStore(folder)
    found = generated.lookup(spec)
    if found.hit:
        return replace(found, reason=f"in {folder}")
    if spec.stage == OFFLINE_STAGES[-1]:
        why = str(generated.explain(spec, known=before)).replace("\n", " ")
        raise UserError(
            f"capture.data_path={folder} holds no states for this recipe: {why}; generate them with it, or use the "
            "recipe that they were generated with"
        )
    return miss


def run_stage(
    name: str,
    recipe: Recipe,
    store: StageStore,
    on_progress: Callable[[Mapping[str, Any]], None] | None = None,
    refresh: bool = False,
    on_wait: Callable[[Holder], None] | None = None,
) -> StageRef:
    """Run one stage (or find it in the store) and return its reference; `on_wait`: another run is making it.

    Raises `UserError` when an input stage is not in the store, and `StageError` when the stage's process fails.
    """
    entries = {entry.name: entry for entry in plan(recipe, store)}
    if name not in entries:
        raise UserError(f"there is no stage {name!r}; the stages are {', '.join(STAGE_NAMES)}")
    entry = entries[name]
    inputs = made_inputs(entry.stage, entries, store, "run it first")
    if refresh and recipe.capture.engine == "offline" and name == OFFLINE_STAGES[-1]:
        raise UserError("capture.engine=offline makes no states: name an engine to make them again")
    found = entry.lookup.ref
    if found is not None and not refresh and found.path != store.folder(entry.spec):
        return found  # in capture.data_path
    return run_stage_child(
        store, entry.spec, entry.stage.function, inputs, entry.params, entry.runtime,
        on_progress=on_progress, refresh=refresh, on_wait=on_wait,
    )  # fmt: skip


def made_inputs(stage: Stage, entries: Mapping[str, PlannedStage], store: StageStore, remedy: str) -> dict[str, Path]:
    """The folder of each input of a stage; raises `UserError`, which ends with `remedy`, for one that is not made."""
    folders: dict[str, Path] = {}
    for needed in stage.inputs:
        found = entries[needed].lookup
        if not found.hit or found.ref is None:
            raise UserError(
                f"stage {stage.name} needs stage {needed}, which is not in {store.root} ({found.reason}); {remedy}"
            )
        folders[needed] = Path(found.ref.path)
    return folders


def _facts(recipe: Recipe, planned: Sequence[PlannedStage]) -> TargetFacts | None:
    made = planned[0].lookup.ref
    return known_facts(recipe.target.source, Path(made.path) if made is not None else None)


def estimate_bytes(recipe: Recipe, planned: Sequence[PlannedStage]) -> dict[str, int]:
    """Upper estimate of the bytes that each missing stage will write.

    Hidden states dominate: tokens x (auxiliary layers + 1) x width x bytes of a value.
    """
    facts = _facts(recipe, planned)
    if facts is None:
        return {}
    answered = sum(s.rows * s.turns for s in recipe.data.prompts) * (
        recipe.data.max_prompt_tokens + 32 + recipe.answers.max_new_tokens
    )
    whole = sum(s.rows for s in recipe.data.conversations) * recipe.data.max_length
    layers = 1 + (len(recipe.capture.layers) if recipe.capture.layers else 3)
    value = 2 if recipe.capture.dtype == "bfloat16" else 4
    sizes = {"states": (answered + whole) * layers * facts.hidden_size * value, "tokens": (answered + whole) * 6}
    return {entry.name: sizes[entry.name] for entry in planned if entry.name in sizes and not entry.lookup.hit}


def check_run(recipe: Recipe, planned: Sequence[PlannedStage], store: StageStore) -> None:
    """Refuse a run that would end badly after its first stages: a store that cannot be written or is too small for the
    missing stages, a data file without one usable row, a Dask scheduler that does not answer."""
    check_place(store.root)
    missing = {entry.name for entry in planned if not entry.lookup.hit}
    if "states" in missing:
        check_states_place(recipe.store)
    if "prompts" in missing:
        for source in recipe.data.prompts:
            check_readable(source.name, source.path)
    if "tokens" in missing:
        for rows in recipe.data.conversations:
            check_readable(rows.name, rows.path)
        if recipe.data.scheduler is not None:
            check_scheduler(recipe.data.scheduler)
    need = sum(estimate_bytes(recipe, planned).values())
    free = free_bytes(store.root)
    if need > free:
        raise UserError(
            f"the run needs about {need / 1e9:.3g} GB in {store.root} but {free / 1e9:.3g} GB are free; "
            "free some space, set run.store to a larger disk, or lower data.prompts rows"
        )
