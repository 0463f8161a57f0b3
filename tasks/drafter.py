"""Stage `drafter`: training, with its curves as an artifact."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from prefect import task
from prefect.artifacts import create_markdown_artifact
from prefect.client.schemas.objects import State

from tasks.common import STAGE_TASK, Run, run_stage_task
from torchspec_core.stages import StageRef


def curves_markdown(folder: Path) -> str:
    """The training curves of a drafter folder as one Markdown image (the UI draws `data:` images, not inline SVG)."""
    from torchspec_core.plots.curves import training_curves  # matplotlib: only for a drafter that was just trained
    from torchspec_core.plots.style import standalone

    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines() if line.strip()]
    if not rows:
        return "No step was logged."
    validation = folder / "validation.json"
    picture = standalone(training_curves(rows, json.loads(validation.read_text()) if validation.is_file() else {}))
    return f"![loss and accuracy](data:image/svg+xml;base64,{base64.b64encode(picture.encode()).decode()})"


def _show(ref: StageRef) -> None:
    if not ref.cached:  # the report of a cached drafter shows the same curves
        picture = curves_markdown(ref.path)
        create_markdown_artifact(picture, key="training-curves", description="Loss, and accuracy by depth")


@task(name="drafter", task_run_name="drafter[{run.slugs[drafter]}]", **STAGE_TASK)
def drafter(run: Run, target: StageRef, tokens: StageRef, vocabulary: StageRef, states: StageRef) -> State[Any]:
    """The draft model, trained from the hidden states; resumes at its last checkpoint."""
    return run_stage_task(run, "drafter", _show)
