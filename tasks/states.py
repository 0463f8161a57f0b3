"""Stage `states`: hidden states."""

from __future__ import annotations

from typing import Any

from prefect import task
from prefect.client.schemas.objects import State

from tasks.common import STAGE_TASK, Run, run_stage_task
from torchspec_core.stages import StageRef


@task(name="states", task_run_name="states[{run.slugs[states]}]", **STAGE_TASK)
def states(run: Run, target: StageRef, tokens: StageRef) -> State[Any]:
    """The target's hidden states for every training token."""
    return run_stage_task(run, "states")
