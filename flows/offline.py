"""Training in two phases, as flows: `generate-hidden-states` on machines that run the target, `train-offline` where the
drafter is trained.

    prefect deployment run generate-hidden-states/quickstart -p output=/data/states
    prefect deployment run train-offline/quickstart -p data_path=/data/states
"""

from __future__ import annotations

from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.logging import get_run_logger
from prefect.states import Completed, Failed
from prefect.utilities.annotations import quote

from flows.naming import run_name
from flows.train_drafter import stages
from tasks.answers import answers
from tasks.common import open_run
from tasks.prompts import prompts
from tasks.states import states
from tasks.target import target
from tasks.tokens import tokens
from torchspec_core.errors import TorchspecError


@flow(name="generate-hidden-states", flow_run_name=run_name, persist_result=False)
def generate_hidden_states(
    output: str, recipe: str = "configs/quickstart.yaml", overrides: list[str] | None = None
) -> State[Any]:
    """Everything up to the target's hidden states, into a folder to train from.

    Args:
        output: Folder to fill; a run that was stopped goes on there.
        recipe: Path of the recipe, relative to the repository.
        overrides: Changes to the recipe, each `section.key=value`, such as `capture.engine=vllm`.
    """
    try:
        run: Any = quote(open_run(recipe, [*(overrides or []), f"run.store={output}"], []))
        model = target(run).result()
        asked = prompts(run, model).result()
        said = answers(run, model, asked).result()
        rows = tokens(run, model, asked, said).result()
        hidden = states(run, model, rows).result()
    except TorchspecError as error:
        return Failed(message=str(error), data=error)
    get_run_logger().info("hidden states: %s", hidden.path)
    return Completed(message=f"hidden states: {hidden.path}; train with data_path={output}")


@flow(name="train-offline", flow_run_name=run_name, persist_result=False)
def train_offline(
    data_path: str, recipe: str = "configs/quickstart.yaml", overrides: list[str] | None = None
) -> State[Any]:
    """Train and measure a drafter from hidden states that were generated before; the target makes none here.

    Args:
        data_path: Folder that `generate-hidden-states` filled with the same recipe.
        recipe: Path of the recipe, relative to the repository.
        overrides: Changes to the recipe, each `section.key=value`, such as `training.lr=5e-4`.
    """
    offline = ["capture.engine=offline", f"capture.data_path={data_path}"]
    try:
        made = stages(open_run(recipe, [*(overrides or []), *offline], []))
    except TorchspecError as error:
        return Failed(message=str(error), data=error)
    page = made["report"].path / "report.html"
    get_run_logger().info("report: %s", page)
    return Completed(message=f"report: {page}")
