"""Names of flow runs: what runs, on which model, since when."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

from prefect.runtime import flow_run

from torchspec_core.config.load import load_recipe
from torchspec_core.errors import UserError


def describe(parameters: dict[str, Any], now: datetime) -> str:
    """`quickstart: smollm2-135m-instruct, eagle3, Nov 29 22:30`; of an unreadable recipe, its file name only."""
    path, overrides = Path(parameters["recipe"]), list(parameters.get("overrides") or [])
    when = f"{now:%b %d %H:%M}"
    try:
        recipe = load_recipe(path, overrides).recipe
    except UserError:
        return f"{path.stem}: {when}"
    model = recipe.target.source.split("@")[0].rstrip("/").split("/")[-1].split(":")[-1]
    changes = "".join(f", {change}" for change in overrides[:2])
    return f"{path.stem}: {model}, {recipe.drafter.kind}{changes}, {when}"


def run_name() -> str:
    """The name of the flow run in progress, from its parameters."""
    return describe(dict(flow_run.parameters), datetime.now())
