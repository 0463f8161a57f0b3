"""Stage `answers`: what the target says."""

from __future__ import annotations

from typing import Any

from prefect import task
from prefect.client.schemas.objects import State

from tasks.common import STAGE_TASK, Run, run_stage_task
from torchspec_core.stages import StageRef


@task(name="answers", task_run_name="answers[{run.slugs[answers]}]", **STAGE_TASK)
def answers(run: Run, target: StageRef, prompts: StageRef) -> State[Any]:
    """The target's own answers to the prompts, as token ids."""
    return run_stage_task(run, "answers")
