"""The parity check on a tiny target: a right export passes, an export with shifted layer ids fails and says so."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.unit import test_evaluation_stage as tiny
from torchspec_core.capture import states as states_stage
from torchspec_core.errors import UserError
from torchspec_core.evaluation.parity import Parity, input_folder, parity
from torchspec_core.stages.job import local_job

inputs = tiny.inputs


@pytest.fixture(scope="module")
def states(inputs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parity") / "states"
    states_stage.build(local_job(
        folder, {name: inputs[name] for name in ("target", "tokens")},
        {"capture": {"layers": [1, 3, 4], "dtype": "float32", "shard_mib": 1}},
        {"capture": {"token_budget": 64, "engine": "transformers"}, "run": {"threads": 0}},
    ))  # fmt: skip
    return folder


def compared(export: Path, states: Path, inputs: dict[str, Path]) -> Parity:
    return parity(export, states, inputs["tokens"], inputs["target"], samples=4, k=2)


def test_a_right_export_drafts_the_same_from_both_states(states: Path, inputs: dict[str, Path]) -> None:
    found = compared(inputs["export"], states, inputs)
    assert found.passed
    assert set(found.states) == {1, 3, 4, 7}
    assert max(found.states.values()) < 1e-5
    assert found.law_max < 1e-5
    assert found.drafts_equal == 1.0
    assert not any("shift" in cause or "norm" in cause for cause in found.causes)


@pytest.mark.parametrize("by", [1, -1])
def test_layer_ids_shifted_by_one_fail_and_are_named(
    states: Path, inputs: dict[str, Path], tmp_path: Path, by: int
) -> None:
    """The canary: nothing else of the export is wrong."""
    shifted = tmp_path / "export"
    shutil.copytree(inputs["export"], shifted)
    values = json.loads((shifted / "config.json").read_text())
    ids = [i + by for i in values["eagle_aux_hidden_state_layer_ids"]]
    values |= {"eagle_aux_hidden_state_layer_ids": ids}
    values["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = ids
    (shifted / "config.json").write_text(json.dumps(values))
    found = compared(shifted, states, inputs)
    assert not found.passed
    assert f"all by {by:+d}" in found.causes[0]
    assert found.law_max > 1e-3
    assert min(found.states[layer] for layer in (1, 3, 4)) > 0.05
    assert found.states[7] < 1e-5


def test_the_input_stages_are_found_in_the_states_store(tmp_path: Path) -> None:
    key = "a471b84d1d12996f7ff110ef1a79de63"
    states, tokens = tmp_path / "states/x-1", tmp_path / f"tokens/y-{key[:12]}"
    states.mkdir(parents=True)
    with pytest.raises(UserError, match="is no states stage"):
        input_folder(states, "tokens")
    (states / "spec.json").write_text(json.dumps({"spec": {"inputs": {"tokens": key}}}))
    with pytest.raises(UserError, match="gone from its store"):
        input_folder(states, "tokens")
    tokens.mkdir(parents=True)
    assert input_folder(states, "tokens") == tokens
