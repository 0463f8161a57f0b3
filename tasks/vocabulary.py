"""Stage `vocabulary`: the draft vocabulary."""

from __future__ import annotations

from typing import Any

from prefect import task
from prefect.client.schemas.objects import State

from tasks.common import STAGE_TASK, Run, run_stage_task
from torchspec_core.stages import StageRef


@task(name="vocabulary", task_run_name="vocabulary[{run.slugs[vocabulary]}]", **STAGE_TASK)
def vocabulary(run: Run, target: StageRef, prompts: StageRef, tokens: StageRef) -> State[Any]:
    """The tokens that the drafter may propose, and the maps to and from the target's ids."""
    return run_stage_task(run, "vocabulary")
