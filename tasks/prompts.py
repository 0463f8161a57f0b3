"""Stage `prompts`: what the target is asked."""

from __future__ import annotations

from typing import Any

from prefect import task
from prefect.client.schemas.objects import State

from tasks.common import STAGE_TASK, Run, run_stage_task
from torchspec_core.stages import StageRef


@task(name="prompts", task_run_name="prompts[{run.slugs[prompts]}]", **STAGE_TASK)
def prompts(run: Run, target: StageRef) -> State[Any]:
    """First user turns, split into training and held-out, with the benchmark sets left out of training."""
    return run_stage_task(run, "prompts")
