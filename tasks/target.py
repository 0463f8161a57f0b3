"""Stage `target`: the target model."""

from __future__ import annotations

from typing import Any

from prefect import task
from prefect.client.schemas.objects import State

from tasks.common import STAGE_TASK, Run, run_stage_task


@task(name="target", task_run_name="target[{run.slugs[target]}]", **STAGE_TASK)
def target(run: Run) -> State[Any]:
    """The model whose answers are to come faster, as a checked folder in Hub layout."""
    return run_stage_task(run, "target")
