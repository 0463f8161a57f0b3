"""Stage `export`: the served checkpoint."""

from __future__ import annotations

from typing import Any

from prefect import task
from prefect.client.schemas.objects import State

from tasks.common import STAGE_TASK, Run, run_stage_task
from torchspec_core.stages import StageRef


@task(name="export", task_run_name="export[{run.slugs[export]}]", **STAGE_TASK)
def export(run: Run, target: StageRef, vocabulary: StageRef, drafter: StageRef) -> State[Any]:
    """The trained drafter as a folder that vLLM loads."""
    return run_stage_task(run, "export")
