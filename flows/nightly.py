"""`nightly-convergence`: trains a small recipe anew every night and fails when a result leaves its band."""

from __future__ import annotations

import json
from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

from flows.naming import run_name
from flows.train_drafter import stages
from tasks.common import open_run
from tasks.convergence import SMOKE_BANDS, convergence
from torchspec_core.errors import TorchspecError

TRAINED = ("drafter", "export", "evaluation", "report")
"""Run anew each night: a night that finds everything in the store has tested nothing."""


@flow(name="nightly-convergence", flow_run_name=run_name, persist_result=False)
def nightly_convergence(
    recipe: str = "configs/smoke.yaml", overrides: list[str] | None = None, refresh: list[str] | None = None
) -> State[Any]:
    """Run a recipe's training again and hold the results against their bands.

    Args:
        recipe: Path of the recipe, relative to the repository.
        overrides: Changes to the recipe, each `section.key=value`.
        refresh: Stages to run again; none means the training and all that follows it.
    """
    try:
        made = stages(open_run(recipe, overrides or [], list(refresh or TRAINED)))
    except TorchspecError as error:
        return Failed(message=str(error), data=error)
    folder = made["report"].path
    verdict = convergence(json.loads((folder / "report.json").read_text()), SMOKE_BANDS, return_state=True)
    if verdict.is_failed():
        return Failed(message=str(verdict.message))
    return Completed(message=f"{verdict.message}; report: {folder / 'report.html'}")
