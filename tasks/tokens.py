"""Stage `tokens`: what the drafter trains on."""

from __future__ import annotations

from typing import Any

from prefect import task
from prefect.client.schemas.objects import State

from tasks.common import STAGE_TASK, Run, run_stage_task
from torchspec_core.stages import StageRef


@task(name="tokens", task_run_name="tokens[{run.slugs[tokens]}]", **STAGE_TASK)
def tokens(run: Run, target: StageRef, prompts: StageRef, answers: StageRef) -> State[Any]:
    """Conversations as token ids and loss masks in Arrow shards."""
    return run_stage_task(run, "tokens")
