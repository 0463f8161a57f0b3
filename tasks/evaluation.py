"""Stage `evaluation`: how many tokens the drafter saves, on prompts it never saw."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from prefect import task
from prefect.artifacts import create_table_artifact
from prefect.client.schemas.objects import State

from tasks.common import STAGE_TASK, Run, run_stage_task
from torchspec_core.stages import StageRef

DEFINITION = "Acceptance length = 1 + accepted draft tokens per verification step, by real verification."


def acceptance_rows(flat: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row for each `heldout.greedy`, `baseline.bigram`, ... that has an acceptance length."""
    rows = []
    for name in flat:
        if name.endswith(".acceptance_length"):
            prefix = name.removesuffix("acceptance_length")
            own = {key.removeprefix(prefix): value for key, value in flat.items() if key.startswith(prefix)}
            rows.append({"measured": prefix.rstrip("."), "acceptance_length": own.pop("acceptance_length"), **own})
    return rows


def _show(ref: StageRef) -> None:
    flat = json.loads((ref.path / "evaluation.json").read_text())
    create_table_artifact(acceptance_rows(flat), key="acceptance", description=DEFINITION)


@task(name="evaluation", task_run_name="evaluation[{run.slugs[evaluation]}]", **STAGE_TASK)
def evaluation(run: Run, target: StageRef, prompts: StageRef, tokens: StageRef, export: StageRef) -> State[Any]:
    """Acceptance on held-out prompts and benchmark slices, by our decoder and by vLLM's own counters."""
    return run_stage_task(run, "evaluation", _show)
