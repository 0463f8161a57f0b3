"""The block drafters against the printed golden numbers of the formula-defined tiny model, in fp64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.unit.test_eagle3_golden import IDS, MASK, formula, norm_weight
from torchspec_core.drafters.blocks import DenseBlocks, GatheredBlocks
from torchspec_core.drafters.dflash import BlockConfig, BlockDrafter, ConvolutionConfig, SelectorConfig
from torchspec_core.drafters.rope import RopeConfig
from torchspec_core.drafters.slots import Tables
from torchspec_core.objectives.blocks import BlockIndex, block_index
from torchspec_core.objectives.dflash import BlockTeacher, BlockWeights, block_embeds, block_loss

FORMS = [DenseBlocks, GatheredBlocks]
TEACHER = BlockTeacher(Tables(formula(1, (11, 8)), formula(2, (11, 8))), torch.ones(8, dtype=torch.float64), 1e-6)
AUX, LAST = formula(40, (10, 16)), formula(3, (10, 8))


def tiny(kind: str = "dflash", convolution: str = "", selector: bool = False, markov: bool = False) -> BlockDrafter:
    config = BlockConfig(
        kind=kind,
        hidden_size=8,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        intermediate_size=12,
        vocab_size=11,
        aux_layers=(0, 1),
        block_size=4,
        mask_token_id=10,
        rms_norm_eps=1e-6,
        rope=RopeConfig(theta=100.0),
        convolution=ConvolutionConfig(2, 4) if convolution else None,
        selector=SelectorConfig(3, 4, "free") if selector else None,
        markov_rank=3 if markov else None,
    )
    drafter = BlockDrafter(config).double()
    state: dict[str, Tensor] = {
        "fc.weight": formula(41, (8, 16), 0.3),
        "hidden_norm.weight": norm_weight(42, 8),
        "norm.weight": norm_weight(43, 8),
    }
    for layer in range(2):
        b, name = 100 + 20 * layer, f"layers.{layer}"
        state |= {
            f"{name}.input_layernorm.weight": norm_weight(b, 8),
            f"{name}.post_attention_layernorm.weight": norm_weight(b + 1, 8),
            f"{name}.self_attn.q_norm.weight": norm_weight(b + 6, 4),
            f"{name}.self_attn.k_norm.weight": norm_weight(b + 7, 4),
        }
        for i, (part, shape) in enumerate((("q", (8, 8)), ("k", (4, 8)), ("v", (4, 8)), ("o", (8, 8)))):
            state[f"{name}.self_attn.{part}_proj.weight"] = formula(b + 2 + i, shape, 0.3)
        for i, (part, shape) in enumerate((("gate", (12, 8)), ("up", (12, 8)), ("down", (8, 12)))):
            state[f"{name}.mlp.{part}_proj.weight"] = formula(b + 8 + i, shape, 0.3)
        identity = torch.zeros(2, 2, 8, dtype=torch.float64)
        identity[:, 0] = 1
        for i, part in ((11, "attention"), (14, "mlp")) if convolution else ():
            real = convolution == "formula"
            base = formula(b + i, (2, 2, 8), 0.2) if real else 0.0
            projection = formula(b + i + 1, (8, 8), 0.2)
            state[f"{name}.{part}_conv.base_kernel"] = identity + base
            state[f"{name}.{part}_conv.kernel_projection.weight"] = projection if real else torch.zeros_like(projection)
    if selector:
        state["candidate_selector.predecessor_codebook"] = formula(50, (11, 3))
        state["candidate_selector.successor_codebook"] = formula(51, (11, 3))
        state["candidate_selector.hidden_projection.weight"] = formula(52, (3, 8), 0.5)
    if markov:
        state["markov_head.markov_w1.weight"] = formula(60, (11, 3))
        state["markov_head.markov_w2.weight"] = formula(61, (11, 3), 0.5)
        state["confidence_head.proj.weight"] = formula(62, (1, 11), 0.5)
        state["confidence_head.proj.bias"] = torch.tensor([0.1], dtype=torch.float64)
    drafter.load_state_dict(state)
    return drafter


def tiny_index(predictions: int = 3, **multiples: int) -> BlockIndex:
    return block_index([10], MASK, [np.array([3, 4, 5])], 4, predictions, 4.0, **multiples)


@pytest.mark.parametrize("form", FORMS)
def test_dflash(form) -> None:
    drafter, index = tiny(), tiny_index()
    embeds = block_embeds(TEACHER.tables.embedding, IDS, index.anchor, 4, 10)
    logits = drafter(AUX, embeds, index.layout, form) @ TEACHER.tables.head.T
    assert logits[1, 0, :3].tolist() == pytest.approx((-2.3385563738, -0.3288726785, -1.1976556033), abs=1e-9)
    assert index.weight.sum().item() == pytest.approx(5.7706628856, abs=1e-9)
    loss = block_loss(drafter, TEACHER, IDS, AUX, LAST, index, form=form).loss
    assert loss.item() == pytest.approx(2.4386332654, abs=1e-9)


def test_an_identity_convolution_changes_nothing() -> None:
    loss = block_loss(tiny(convolution="identity"), TEACHER, IDS, AUX, LAST, tiny_index()).loss
    assert loss.item() == pytest.approx(2.4386332654, abs=1e-9)


@pytest.mark.parametrize("form", FORMS)
def test_dflash2_selector(form) -> None:
    index = tiny_index(row_multiple=16, block_multiple=8)
    assert index.chain.sum().item() == pytest.approx(5.1641322259, abs=1e-9)
    drafter = tiny("dflash2", "formula", selector=True)
    result = block_loss(drafter, TEACHER, IDS, AUX, LAST, index, chunk=2, form=form)
    top, bottom = result.extras["selector_loss"].tolist()
    assert top / bottom == pytest.approx(1.5825842675, abs=1e-9)
    alone = block_loss(drafter, TEACHER, IDS, AUX, LAST, index, BlockWeights(selector=0.0))
    assert result.loss.item() - alone.loss.item() == pytest.approx(1.5825842675, abs=1e-9)


@pytest.mark.parametrize("form", FORMS)
def test_dspark(form) -> None:
    drafter, index = tiny("dspark", markov=True), tiny_index(4)
    golden = {"cross_entropy": 4.3072266994, "l1": 1.2823809917, "confidence": 0.8413393577}
    for name, value in golden.items():
        weights = BlockWeights(**{**dict.fromkeys(golden, 0.0), name: 1.0})
        loss = block_loss(drafter, TEACHER, IDS, AUX, LAST, index, weights, form=form).loss
        assert loss.item() == pytest.approx(value, abs=1e-9)
    whole = block_loss(drafter, TEACHER, IDS, AUX, LAST, index, form=form).loss.item()
    assert whole == pytest.approx(0.1 * 4.3072266994 + 0.9 * 1.2823809917 + 0.8413393577, abs=1e-9)
