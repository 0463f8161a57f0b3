"""Rotary positions against transformers' own functions, and the two pairings by hand. (vLLM's: tests/real.)"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from torchspec_core.drafters.rope import (
    _FREQUENCIES,
    RopeConfig,
    rope_angles,
    rope_frequencies,
    rotate_halves,
    rotate_pairs,
    yarn_mscale,
)
from torchspec_core.drafters.rope_config import SETTINGS, hub_rope
from torchspec_core.errors import UserError

WIDTH, LONGEST = 64, 4096
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}  # fmt: skip
K3 = {
    "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 128, "beta_fast": 32.0, "beta_slow": 1.0,
    "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 2.0},
    LLAMA3,
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "attention_factor": 0.7},
    {**K3, "mscale_all_dim": 0.5, "beta_fast": 16.0},
    K3,
]


def hub(scaling: dict[str, Any] | None) -> dict[str, Any]:
    return {"rope_theta": 5000.0, "rope_scaling": scaling, "max_position_embeddings": LONGEST}


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda s: s["rope_type"])
def test_frequencies_and_lengths_are_transformers(scaling: dict[str, Any]) -> None:
    theirs = LlamaConfig(
        hidden_size=2 * WIDTH, num_attention_heads=2, head_dim=WIDTH, max_position_embeddings=LONGEST,
        rope_parameters={**scaling, "rope_theta": 5000.0},
    )  # fmt: skip
    frequencies, length = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](theirs, device="cpu")
    mine = hub_rope(hub(scaling))
    torch.testing.assert_close(rope_frequencies(mine, WIDTH), frequencies, rtol=2e-6, atol=0)
    cos, sin = rope_angles(mine, WIDTH, torch.tensor([7]), torch.float64)
    torch.testing.assert_close((cos**2 + sin**2).sqrt(), torch.full_like(cos, length))


def test_released_yarn_scale() -> None:
    """Kimi-K3's drafters: factor 32, mscale_all_dim 1."""
    assert yarn_mscale(32.0) ** 2 == pytest.approx(1.81326, abs=1e-5)
    assert yarn_mscale(32.0) ** 2 * 192**-0.5 == pytest.approx(0.130861, abs=1e-6)


def test_pairings_by_hand_and_by_permutation() -> None:
    x = torch.randn(5, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    cos, sin = rope_angles(RopeConfig(100.0), 8, torch.arange(5), torch.float64)
    turned = rotate_pairs(x, cos, sin)
    as_complex = torch.view_as_complex(x.unflatten(-1, (4, 2)).contiguous()) * torch.complex(cos, sin).unsqueeze(1)
    torch.testing.assert_close(turned, torch.view_as_real(as_complex).flatten(-2), atol=1e-12, rtol=0)
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    torch.testing.assert_close(turned[..., order], rotate_halves(x[..., order], cos, sin), atol=1e-12, rtol=0)
    assert not torch.allclose(turned, rotate_halves(x, cos, sin))


@pytest.mark.parametrize("rotate", [rotate_halves, rotate_pairs])
def test_gradient_of_a_rotation(rotate: Any) -> None:
    x = torch.randn(2, 2, 4, dtype=torch.float64, requires_grad=True)
    angles = rope_angles(hub_rope(hub({**K3, "mscale_all_dim": 0.5})), 4, torch.arange(2), torch.float64)
    assert torch.autograd.gradcheck(lambda value: rotate(value, *angles), (x,))


def test_settings_survive_a_checkpoint_and_json() -> None:
    assert SETTINGS.keys() == _FREQUENCIES.keys()
    assert RopeConfig(7.0).to_json() == {"theta": 7.0, "kind": "default"}
    for scaling in SCALINGS:
        config = hub_rope(hub(scaling))
        assert RopeConfig.from_json(config.to_json()) == config
        assert hub_rope(hub(config.hub_scaling())) == config
        assert hub_rope({"rope_parameters": {**scaling, "rope_theta": 5000.0}, "max_position_embeddings": LONGEST}) == (
            config
        )


@pytest.mark.parametrize(
    ("scaling", "words"),
    [
        ({"rope_type": "longrope", "factor": 2.0}, "longrope"),
        ({"type": "su"}, "'su'"),
        ({"rope_type": "linear"}, "needs factor"),
        ({"rope_type": "default", "mrope_section": [1, 2]}, "mrope_section"),
        ({"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({**LLAMA3, "high_freq_factor": 1.0}, "high_freq_factor"),
        ({"rope_type": "linear", "factor": 0.5}, "factor must be"),
    ],
)
def test_unknown_settings_are_refused_by_name(scaling: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        hub_rope(hub(scaling))
