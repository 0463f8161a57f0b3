"""Every drafter learns a periodic text of a tiny target until the reference decoder accepts all it drafts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from torchspec_core.config.fields import identity_of
from torchspec_core.config.schema import Recipe
from torchspec_core.decoding.blocks import BlockDrafts
from torchspec_core.decoding.decoder import decode
from torchspec_core.decoding.draft import Drafts, Eagle3Chain
from torchspec_core.decoding.target import CachedTarget
from torchspec_core.drafters.dflash import BlockDrafter
from torchspec_core.drafters.slots import Tables
from torchspec_core.kinds import KINDS
from torchspec_core.targets.engine import TargetHead
from torchspec_core.targets.facts import facts_from_config
from torchspec_core.training.batch import Sample, pack
from torchspec_core.training.method import Setup

WIDTH, PERIOD, FIRST, LENGTH, K, STEPS = 16, 5, 3, 22, 3, 60
AUX = (0, 2)
LATENT = {
    "attention": "mla", "q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}  # fmt: skip
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4, "is_causal": False}
DRAFTERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "eagle3": ({}, {}),
    "eagle3-anchored": ({}, {"anchors": 6}),
    "eagle3-mla": (LATENT, {}),
    "eagle3-mla-anchored": (LATENT, {"anchors": 6}),
    **{
        f"{kind}{name}": ({"kind": kind, **form}, {})
        for kind in ("dflash", "dflash2", "dspark")
        for name, form in (("", MIXED), ("-mla", LATENT | (MIXED if kind != "dspark" else {})))
    },
}


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def target() -> CachedTarget:
    """A Llama that answers t with the next token of the period, surely: its layers add nothing to the embeddings, which
    are orthogonal, and the head looks the successor up."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WIDTH, hidden_size=WIDTH, intermediate_size=24, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, rms_norm_eps=1e-5,
    )  # fmt: skip
    model = LlamaForCausalLM(config).float().eval()
    embedding = torch.linalg.qr(torch.randn(WIDTH, WIDTH)).Q
    following = torch.full((WIDTH,), FIRST)
    following[FIRST : FIRST + PERIOD] = FIRST + (torch.arange(PERIOD) + 1) % PERIOD
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(embedding)
        model.lm_head.weight.zero_().index_add_(0, following, 4 * embedding)
    return CachedTarget(model, facts_from_config({**config.to_dict(), "architectures": ["LlamaForCausalLM"]}), AUX)


def text(phase: int, length: int) -> np.ndarray:
    return FIRST + (np.arange(length) + phase) % PERIOD


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_periodic_text_is_drafted_without_a_miss(name: str, target: CachedTarget) -> None:
    form, training = DRAFTERS[name]
    recipe = Recipe()
    kind = KINDS[form.get("kind", "eagle3")]
    settings = identity_of(recipe.drafter) | {
        "draft_vocab_size": WIDTH, "num_heads": 2, "intermediate_size": 32, "block_size": 3 if kind.first_slot else 4,
        "mask_token_id": 15, "conv_group_size": 8, "selector_rank": 4, "selector_top_k": 4, "markov_rank": 4, **form,
    }  # fmt: skip
    embedding, head = target.embedding.detach(), target.head_weight.detach()
    states = TargetHead(torch.ones(WIDTH), 1e-5, head)
    method = kind.part("training")(
        Setup(
            settings, identity_of(recipe.training) | training, 0, target.facts, AUX, embedding, states,
            torch.arange(WIDTH),
        )
    )  # fmt: skip
    samples = []
    for phase in range(PERIOD):
        ids = text(phase, LENGTH)
        state = embedding[torch.from_numpy(ids)]  # of every layer
        samples.append(Sample(ids, np.arange(LENGTH) >= 1, (state,) * len(AUX), state, str(phase)))
    drafter = method.drafter
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-2, weight_decay=0.0)
    for step in range(STEPS):
        optimizer.zero_grad()
        method.objective(drafter, pack(samples, method.index, torch.float32, step, 32)).loss.backward()
        optimizer.step()
    drafts: Drafts = (
        BlockDrafts(drafter, Tables(embedding, head))
        if isinstance(drafter, BlockDrafter)
        else Eagle3Chain(drafter, embedding)
    )
    prompts = [text(phase, length).tolist() for phase, length in ((0, 2), (3, 5), (1, 7))]
    rows = decode(target, drafts, prompts, keys=["a", "b", "c"], k=K, max_new_tokens=13)
    for row, prompt in zip(rows, prompts, strict=True):
        assert list(row.tokens) == text(prompt[0] - FIRST, 20).tolist()[len(prompt) :][:13]
        assert row.steps == (K,) * 3, row.steps
