"""vLLM's own configuration class takes what a DSpark with multi-latent attention is exported with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.test_evaluation_stage import write_target
from tests.unit.test_export_blocks import SIZES, config
from torchspec_core.export.dflash import engine_config
from torchspec_core.targets.facts import read_facts

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def values(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    target: Path = tmp_path_factory.mktemp("target")
    write_target(target)
    return engine_config(config("dspark", target), read_facts(target), "float32")


def test_vllm_reads_the_exported_config(values: dict[str, Any]) -> None:
    from vllm.transformers_utils.configs.k3_dspark import K3DSparkConfig

    read = K3DSparkConfig(**values)
    assert {name: getattr(read, name) for name in SIZES} == SIZES
    assert (read.target_layer_ids, read.num_target_layers, read.target_hidden_size) == ([1, 3, 5], 3, 32)
    assert read.draft_vocab_size == read.vocab_size == values["vocab_size"]
    assert read.rope_parameters["mscale_all_dim"] == 1.0 and read.rope_parameters["rope_theta"] == 5000.0


@pytest.mark.parametrize("change", [{"q_lora_rank": None}, {"mla_use_nope": True}, {"num_target_layers": 8}])
def test_vllm_refuses_what_is_not_exported(values: dict[str, Any], change: dict[str, Any]) -> None:
    from vllm.transformers_utils.configs.k3_dspark import K3DSparkConfig

    with pytest.raises(ValueError, match="MLA DSpark"):
        K3DSparkConfig(**{**values, **change})
