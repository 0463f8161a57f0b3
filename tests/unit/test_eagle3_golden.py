"""EAGLE-3 against the printed golden numbers of the formula-defined tiny model, in fp64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from torchspec_core.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from torchspec_core.drafters.mla import MLAConfig
from torchspec_core.drafters.rope import RopeConfig
from torchspec_core.drafters.ttt import DenseTTT, GroupedTTT
from torchspec_core.objectives.eagle3 import Teacher, eagle3_loss, embed_rows
from torchspec_core.objectives.ttt import ttt_index

MASK = np.array([0, 0, 0, 1, 1, 1, 1, 0, 1, 1], dtype=bool)
IDS = torch.tensor([(i * i + 3 * i + 2) % 11 for i in range(10)])


def formula(seed: int, shape: tuple[int, ...], scale: float = 1.0) -> torch.Tensor:
    n = torch.arange(1, math.prod(shape) + 1, dtype=torch.float64)
    return (scale * torch.sin(0.7 * n * n + 1.9 * seed + 0.3 * n)).view(shape)


def norm_weight(seed: int, size: int) -> torch.Tensor:
    return 1 + 0.1 * formula(seed, (size,))


GQA = {
    "q_proj.weight": formula(20, (8, 16), 0.3),
    "k_proj.weight": formula(21, (4, 16), 0.3),
    "v_proj.weight": formula(22, (4, 16), 0.3),
    "o_proj.weight": formula(23, (8, 8), 0.3),
}
MLA = {
    "q_a_proj.weight": formula(30, (6, 16), 0.3),
    "q_a_layernorm.weight": norm_weight(31, 6),
    "q_b_proj.weight": formula(32, (12, 6), 0.3),
    "kv_a_proj_with_mqa.weight": formula(33, (6, 16), 0.3),
    "kv_a_layernorm.weight": norm_weight(34, 4),
    "kv_b_proj.weight": formula(35, (14, 4), 0.3),
    "o_proj.weight": formula(36, (8, 6), 0.3),
}


def tiny_drafter(mla: bool = False) -> Eagle3Drafter:
    config = Eagle3Config(
        hidden_size=8,
        target_hidden_size=8,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        intermediate_size=12,
        vocab_size=11,
        draft_vocab_size=11,
        aux_layers=(0, 1, 2),
        rms_norm_eps=1e-6,
        rope=RopeConfig(theta=100.0),
        mla=MLAConfig(6, 4, 4, 2, 3) if mla else None,
    )
    drafter = Eagle3Drafter(config).double()
    drafter.load_state_dict(
        {
            "fc.weight": formula(10, (8, 24), 0.3),
            "midlayer.input_layernorm.weight": norm_weight(11, 8),
            "midlayer.hidden_norm.weight": norm_weight(12, 8),
            "midlayer.post_attention_layernorm.weight": norm_weight(13, 8),
            "norm.weight": norm_weight(14, 8),
            "lm_head.weight": formula(15, (11, 8)),
            "midlayer.mlp.gate_proj.weight": formula(16, (12, 8), 0.3),
            "midlayer.mlp.up_proj.weight": formula(17, (12, 8), 0.3),
            "midlayer.mlp.down_proj.weight": formula(18, (8, 12), 0.3),
            **{f"midlayer.self_attn.{name}": weight for name, weight in (MLA if mla else GQA).items()},
        }
    )
    return drafter


def tiny_teacher() -> Teacher:
    return Teacher(formula(1, (11, 8)), torch.ones(8, dtype=torch.float64), 1e-6, formula(2, (11, 8)))


@pytest.mark.parametrize("mask", [DenseTTT, GroupedTTT])
@pytest.mark.parametrize(
    ("mla", "alignment", "losses", "total", "counts"),
    [
        (False, "reference", (3.1614022695, 3.5984868573, 3.3517536114), 8.1853140666, (5, 5, 5)),
        (False, "predicted", (3.4579785511, 3.9153881462, 3.7256650941), 8.9747147283, (6, 6, 5)),
        (True, "reference", (3.7153557787, 4.4153075960, 4.5883731548), 10.1841606746, (5, 5, 5)),
    ],
)
def test_losses(mask, mla, alignment, losses, total, counts) -> None:
    index = ttt_index([10], MASK, 3, alignment)
    result = eagle3_loss(
        tiny_drafter(mla), tiny_teacher(), IDS, formula(4, (10, 24)), formula(3, (10, 8)), index, mask=mask
    )
    assert tuple(result.count.tolist()) == counts
    assert (result.numerator / result.count).tolist() == pytest.approx(losses, abs=1e-9)
    assert result.loss.item() == pytest.approx(total, abs=1e-9)


@pytest.mark.parametrize(
    ("mla", "golden"),
    [
        (
            False,
            [
                (-0.9030670896, -1.9837619163, -2.5198407833),
                (-0.9871682792, -2.2142280764, -1.9423254248),
                (-0.8880566558, -2.2292677516, -1.5327477515),
            ],
        ),
        (True, [(-2.2060656114, -2.1104762952, -3.5822119528)]),
    ],
)
def test_row_logits(mla: bool, golden: list[tuple[float, ...]]) -> None:
    drafter = tiny_drafter(mla)
    index = ttt_index([10], MASK, len(golden), rows=np.arange(10))
    embeds = [embed_rows(formula(1, (11, 8)), IDS, following) for following in index.next_token]
    outs = drafter.rollout(formula(4, (10, 24)), embeds, index.layout)
    for out, expected in zip(outs, golden, strict=True):
        assert drafter.logits(out[4])[:3].tolist() == pytest.approx(expected, abs=1e-9)
