"""Every deployment of prefect.yaml: its entrypoint is a flow, its parameters are the flow's, its recipe can run."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect import Flow

from flows.benchmarks import benchmark
from infra.client import POOLS
from tasks.benchmark import scripts
from torchspec_core.config.load import load_recipe
from torchspec_core.errors import UserError
from torchspec_core.recipe_checks import check_fields

ROOT = Path(__file__).resolve().parents[2]
DEPLOYMENTS = yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]
NAMES = [f"{d['entrypoint'].rpartition(':')[2]}/{d['name']}" for d in DEPLOYMENTS]


def flow_of(deployment: dict[str, Any]) -> Flow[Any, Any]:
    """The flow that an entrypoint names, imported."""
    path, function = deployment["entrypoint"].split(":")
    found = getattr(importlib.import_module(path.removesuffix(".py").replace("/", ".")), function)
    assert isinstance(found, Flow)
    return found


def test_the_list_is_whole() -> None:
    assert len(set(NAMES)) == len(NAMES)
    recipes = {Path(d["parameters"]["recipe"]).name for d in DEPLOYMENTS if "recipe" in d["parameters"]}
    runnable = {path.name for path in (ROOT / "configs").glob("*.yaml") if "hub:" not in path.read_text()}
    assert runnable <= recipes, "a recipe has no deployment"


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=NAMES)
def test_a_deployment_is_right(deployment: dict[str, Any]) -> None:
    flow = flow_of(deployment)
    assert flow.validate_parameters(deployment["parameters"])  # refuses an unknown or ill-typed one
    assert deployment["description"] and "torchspec" in deployment["tags"] and deployment["version"]
    assert deployment["work_pool"]["name"] in POOLS
    assert deployment["work_pool"]["job_variables"]["env"]["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"] == "30"
    if "recipe" in deployment["parameters"]:
        check_fields(load_recipe(ROOT / deployment["parameters"]["recipe"], []).recipe)
    if flow.fn is benchmark.fn:
        assert deployment["parameters"]["name"] in scripts()


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=NAMES)
def test_the_form_has_a_type_and_a_sentence_for_each_field(deployment: dict[str, Any]) -> None:
    schema = flow_of(deployment).parameters
    for name, field in schema.properties.items():
        assert field.get("type") or field.get("anyOf") or field.get("enum"), name
        assert field.get("description"), f"{name} has no line in the flow's docstring"


def test_what_may_not_run_twice_at_once() -> None:
    limits = {n: d.get("concurrency_limit") for n, d in zip(NAMES, DEPLOYMENTS, strict=True)}
    assert limits["nightly_convergence/nightly"] == {"limit": 1, "collision_strategy": "CANCEL_NEW"}
    assert limits["nightly_convergence/quick"] == limits["benchmark/quick"] == {
        "limit": 1, "collision_strategy": "ENQUEUE"}  # fmt: skip
    assert POOLS["torchspec-training"] == POOLS["torchspec-inference"] == 1


def test_an_unknown_benchmark_is_refused() -> None:
    from tasks.benchmark import check_name

    with pytest.raises(UserError, match="there is no benchmark 'speed'; choose one of .*padding"):
        check_name("speed")
