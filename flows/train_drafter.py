"""`train-drafter`: from raw prompts to a drafter that vLLM loads, with the report that proves what it is worth.

Start it with `prefect deployment run train-drafter/quickstart`, or without Prefect:
`torchspec run configs/quickstart.yaml`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.logging import get_run_logger
from prefect.states import Completed, Failed
from prefect.utilities.annotations import quote

from flows.naming import run_name
from tasks.answers import answers
from tasks.common import Run, open_run
from tasks.drafter import drafter
from tasks.evaluation import evaluation
from tasks.export import export
from tasks.prompts import prompts
from tasks.report import report
from tasks.states import states
from tasks.target import target
from tasks.tokens import tokens
from tasks.vocabulary import vocabulary
from torchspec_core.errors import TorchspecError
from torchspec_core.stages import StageRef


def stages(shared: Run) -> Mapping[str, StageRef]:
    """Every stage in order; each is found in the store or made."""
    run: Any = quote(shared)  # Prefect would search it for results of other tasks, and draw arrows that mean nothing
    model = target(run).result()
    asked = prompts(run, model).result()
    said = answers(run, model, asked).result()
    rows = tokens(run, model, asked, said).result()
    words = vocabulary(run, model, asked, rows).result()
    hidden = states(run, model, rows).result()
    small = drafter(run, model, rows, words, hidden).result()
    served = export(run, model, words, small).result()
    measured = evaluation(run, model, asked, rows, served).result()
    page = report(run, model, asked, said, rows, words, hidden, small, served, measured).result()
    return {ref.stage: ref for ref in (model, asked, said, rows, words, hidden, small, served, measured, page)}


@flow(name="train-drafter", flow_run_name=run_name, persist_result=False)
def train_drafter(
    recipe: str = "configs/quickstart.yaml", overrides: list[str] | None = None, refresh: list[str] | None = None
) -> State[Any]:
    """Train a drafter as a recipe says, and measure it.

    Args:
        recipe: Path of the recipe, relative to the repository.
        overrides: Changes to the recipe, each `section.key=value`, such as `training.lr=5e-4`.
        refresh: Stages to run again although their output is in the store, such as `evaluation`.
    """
    try:
        made = stages(open_run(recipe, overrides or [], refresh or []))
    except TorchspecError as error:
        return Failed(message=str(error), data=error)
    page = made["report"].path / "report.html"
    get_run_logger().info("report: %s", page)
    return Completed(message=f"report: {page}")
