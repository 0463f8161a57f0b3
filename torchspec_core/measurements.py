"""Stages that run on request, on top of a finished pipeline: benchmarks and the serving sweep of its drafter.

They are stages like the others (a key, a sealed folder, resume, a supervised child) but belong to no run of the
pipeline: nobody waits an hour for figures that were not asked for. Their inputs must be in the store already.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torchspec_core.config.fields import identity_of, runtime_of
from torchspec_core.config.schema import Recipe
from torchspec_core.pipeline import Stage, digest_of_file, made_inputs, plan, select
from torchspec_core.stages.lock import Holder
from torchspec_core.stages.run import run_stage as run_stage_child
from torchspec_core.stages.spec import StageRef
from torchspec_core.stages.store import StageStore


def _benchmark_files(recipe: Recipe) -> Mapping[str, str]:
    from torchspec_core.data.benchmarks import BENCHMARKS
    from torchspec_core.data.packages import ship

    shipped = {file for name in recipe.benchmarks.names for file in BENCHMARKS[name].files}
    files = {f"{file.dist}/{file.path}": digest_of_file(ship(file.dist, file.path)) for file in shipped}
    own = [Path(path).expanduser() for path in recipe.benchmarks.files]
    return {**files, **{f"own/{path.name}": digest_of_file(path) for path in own}}


MEASUREMENTS: tuple[Stage, ...] = (
    Stage(
        "benchmarks",
        1,
        "torchspec_core.evaluation.benchmarks:build",
        ("target", "prompts", "export"),
        {"benchmarks": None, "evaluation": None, "target": ("source",), "run": ("seed", "threads")},
        _benchmark_files,
        lambda r: f"{r.drafter.kind}-k{r.evaluation.k}-{len(r.benchmarks.names) + len(r.benchmarks.files)}sets",
    ),
)
"""Every stage that runs on request."""


def run_measurement(
    name: str,
    recipe: Recipe,
    store: StageStore,
    on_progress: Callable[[Mapping[str, Any]], None] | None = None,
    refresh: bool = False,
    on_wait: Callable[[Holder], None] | None = None,
) -> StageRef:
    """Run one of `MEASUREMENTS` on the recipe's finished stages, or find it in the store.

    Raises:
        UserError: an input stage is not in the store, with what makes it.
        StageError: the stage's process failed.
    """
    stage = next(stage for stage in MEASUREMENTS if stage.name == name)
    entries = {entry.name: entry for entry in plan(recipe, store)}
    remedy = "train the drafter first, `torchspec run RECIPE --until export` with the same recipe and overrides"
    inputs = made_inputs(stage, entries, store, remedy)
    spec = stage.spec(recipe, {entry.name: entry.spec.key for entry in entries.values()})
    params, runtime = select(recipe, stage.reads, identity_of), select(recipe, stage.reads, runtime_of)
    return run_stage_child(
        store, spec, stage.function, inputs, params, runtime, on_progress=on_progress, refresh=refresh, on_wait=on_wait
    )
