"""Rotary angles of every known rope type against the tables of vLLM's own classes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope

from torchspec_core.drafters.rope import rope_angles
from torchspec_core.drafters.rope_config import hub_rope

WIDTH, LONGEST = 64, 4096
YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 128}
BOTH = {"mscale": 1.0, "mscale_all_dim": 1.0}


@pytest.mark.parametrize(
    ("theirs", "scaling"),
    [
        ({"rope_type": "default"}, None),
        (None, {"rope_type": "linear", "factor": 4.0}),
        (None, {"rope_type": "dynamic", "factor": 2.0}),
        (None, {"rope_type": "dynamic", "factor": 2.0, "max_trained_positions": 1024}),
        (
            None,
            {
                "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 512,
            },
        ),
        (None, YARN),
        (None, {**YARN, "attention_factor": 0.7, "truncate": False}),
        (None, {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5, "beta_fast": 16.0}),
        # What vLLM makes of yarn in multi-latent attention.
        ({**YARN, "rope_type": "deepseek_yarn"}, YARN),
        ({**YARN, **BOTH, "rope_type": "deepseek_yarn"}, {**YARN, **BOTH}),
    ],
)  # fmt: skip
def test_angles_are_those_of_the_engine(theirs: dict[str, Any] | None, scaling: dict[str, Any] | None) -> None:
    settings = {"rope_theta": 5000.0, **(theirs or scaling or {})}
    with set_current_vllm_config(VllmConfig()):
        rope = get_rope(WIDTH, max_position=LONGEST, rope_parameters=settings, dtype=torch.float32)
    config = hub_rope({"rope_theta": 5000.0, "rope_scaling": scaling, "max_position_embeddings": LONGEST})
    positions = torch.tensor([0, 1, 17, 500, 4000])
    mine = torch.cat(rope_angles(config, WIDTH, positions, torch.float32), dim=-1)
    torch.testing.assert_close(mine, rope.cos_sin_cache[positions], atol=2e-3, rtol=0)
