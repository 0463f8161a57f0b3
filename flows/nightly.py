"""`nightly-convergence`: trains small recipes from nothing every night and fails when a number leaves its band.

Start it with `prefect deployment run nightly-convergence/quick`, or without Prefect: `torchspec nightly run`.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Literal

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run
from prefect.states import Completed, Failed
from prefect.utilities.annotations import quote

from flows.train_drafter import stages
from tasks.common import open_run
from tasks.convergence import gates, verdict
from torchspec_core.errors import StageError, TorchspecError
from torchspec_core.nightly import bands as bands_file
from torchspec_core.nightly.gates import Verdict, failed_to_complete
from torchspec_core.nightly.night import new_night

Subject = Literal["eagle3", "eagle3_anchored", "dflash2", "dspark"]


def run_name() -> str:
    """`nightly: quick, Nov 29 02:30`."""
    start = flow_run.scheduled_start_time
    return f"nightly: {flow_run.parameters['variant']}, {start:%b %d %H:%M}"


@flow(name="nightly-convergence", flow_run_name=run_name, persist_result=False)
def nightly_convergence(
    variant: Literal["nightly", "quick", "tiny"] = "quick",
    subjects: list[Subject] | None = None,
    overrides: list[str] | None = None,
    root: str = ".torchspec/nightly",
    bands: str = "configs/nightly/bands.json",
) -> State[Any]:
    """Train each subject from nothing and hold its numbers against their bands.

    Args:
        variant: How large: `nightly`, `quick` or `tiny`.
        subjects: Recipes of configs/nightly; none means all.
        overrides: Changes to every recipe, each `section.key=value`.
        root: Folder of the history and of the results.
        bands: The bands file.
    """
    started = time.time()
    verdicts: list[Verdict] = []
    try:
        # A run that was interrupted and is retried goes on in its own store; another run starts from nothing.
        name = f"{variant}-{flow_run.scheduled_start_time:%Y%m%d-%H%M%S}-{str(flow_run.id)[:8]}"
        night = new_night(variant, subjects or [], overrides or [], Path(root), Path(bands), name)
        limits = bands_file.read(night.bands, variant)
        for subject in night.subjects:
            recipe, changes = night.recipe(subject)
            try:
                made = stages(open_run(recipe, changes, []))
            except StageError as error:
                verdicts += failed_to_complete(subject, str(error))
                continue
            judged = gates(quote(night), subject, quote(made), quote(limits), return_state=True)
            if not isinstance(judged.data, list):
                return Failed(message=str(judged.message))
            verdicts += judged.data
    except TorchspecError as error:
        return Failed(message=str(error), data=error)
    end = verdict(quote(night), quote(verdicts), started, return_state=True)
    return Completed(message=end.message) if end.is_completed() else Failed(message=end.message)
