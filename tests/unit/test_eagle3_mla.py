"""Multi-latent attention: naive and absorbed form, special cases, transformers' own module, the released sizes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

from torchspec_core.config.fields import identity_of
from torchspec_core.config.load import load_recipe
from torchspec_core.decoding.draft import Committed, Eagle3Chain
from torchspec_core.drafters import mla
from torchspec_core.drafters.eagle3 import Eagle3Config, Eagle3Drafter, init_weights
from torchspec_core.drafters.mla import MLAConfig, MultiLatentAttention
from torchspec_core.drafters.rope import RopeConfig, rotate_halves
from torchspec_core.drafters.ttt import DenseTTT, GroupedTTT
from torchspec_core.errors import UserError
from torchspec_core.objectives.eagle3 import embed_rows
from torchspec_core.objectives.ttt import ttt_index
from torchspec_core.targets.facts import TargetFacts
from torchspec_core.training.eagle3 import drafter_config

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
SIZES = MLAConfig(q_lora_rank=10, kv_lora_rank=7, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5)
YARN = RopeConfig(100.0, "yarn", factor=32.0, original_max_position_embeddings=64, mscale=1.0, mscale_all_dim=1.0)
WIDTH, HEADS = 12, 3


def randomise(module: torch.nn.Module, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(0.4 * noise if parameter.ndim > 1 else 1 + 0.2 * noise)


def attention(sizes: MLAConfig = SIZES, rope: RopeConfig = YARN, eps: float = 1e-6) -> MultiLatentAttention:
    module = MultiLatentAttention(2 * WIDTH, WIDTH, HEADS, sizes, rope, eps).double()
    randomise(module)
    return module


def rows(count: int, width: int = 2 * WIDTH, seed: int = 3) -> Tensor:
    return torch.randn(count, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def naive(module: MultiLatentAttention, u: Tensor, start: int = 0) -> Tensor:
    """Causal attention of one document in the naive form."""
    angles = module.angles(torch.arange(len(u)) + start, u.dtype)
    q, (k, v) = module.project_queries(u, angles), module.project_keys(u, angles)
    scores = torch.einsum("qhd,khd->hqk", q, k) * module.scale
    scores = scores.masked_fill(torch.ones(len(u), len(u)).triu(1).bool(), float("-inf"))
    return module.combine(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))


@pytest.mark.parametrize("sizes", [SIZES, replace(SIZES, q_lora_rank=None)], ids=["q_lora", "full_q"])
def test_absorbed_equals_naive(sizes: MLAConfig) -> None:
    module, u = attention(sizes), rows(9)
    cache = module.new_cache(1, 16)
    assert (cache.k.shape, cache.v.shape) == ((1, 1, 17, 4), (1, 1, 17, 7))  # the shared rotary key and the latent row
    parts = [module.cached(u[None, a:b], torch.arange(a, b)[None], cache)[0] for a, b in ((0, 4), (4, 5), (5, 9))]
    torch.testing.assert_close(torch.cat(parts), naive(module, u), atol=1e-12, rtol=0)


def test_shifting_all_positions_changes_nothing() -> None:
    module, u = attention(), rows(8)
    torch.testing.assert_close(naive(module, u), naive(module, u, 500), atol=1e-10, rtol=0)


def test_rotary_numbers_are_paired_with_their_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Halves instead of neighbours: another result, unless the rotary rows of the weights are reordered to fit."""
    module, u = attention(), rows(8)
    expected = naive(module, u)
    monkeypatch.setattr(mla, "rotate_pairs", rotate_halves)
    assert not torch.allclose(naive(module, u), expected)
    order = torch.tensor([0, 2, 1, 3])
    with torch.no_grad():
        queries = module.q_b_proj.weight.view(HEADS, 10, -1)
        queries[:, 6:] = queries[:, 6:][:, order]
        module.kv_a_proj_with_mqa.weight[7:] = module.kv_a_proj_with_mqa.weight[7:][order]
    torch.testing.assert_close(naive(module, u), expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("rope", [RopeConfig(100.0), YARN], ids=["default", "yarn"])
@pytest.mark.parametrize("rank", [10, None])
def test_it_is_transformers_attention(rope: RopeConfig, rank: int | None) -> None:
    """Weights by name into DeepSeek's module (its norms have epsilon 1e-6), positions far from 0."""
    sizes = replace(SIZES, q_lora_rank=rank)
    module, u = attention(sizes, rope), rows(8)
    config = DeepseekV3Config(
        hidden_size=2 * WIDTH, num_attention_heads=HEADS, num_key_value_heads=HEADS, q_lora_rank=rank, kv_lora_rank=7,
        qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5, max_position_embeddings=2048, rope_interleave=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0, **(rope.hub_scaling() or {})},
    )  # fmt: skip
    config._attn_implementation = "eager"
    theirs = DeepseekV3Attention(config, 0).double().eval()
    theirs.o_proj = torch.nn.Linear(HEADS * 5, WIDTH, bias=False).double()
    theirs.load_state_dict(module.state_dict())
    positions = 300 + torch.arange(8)[None]
    angles = DeepseekV3RotaryEmbedding(config)(u[None], positions)
    mask = torch.full((8, 8), float("-inf"), dtype=torch.float64).triu(1)[None, None]
    expected = theirs(u[None], position_embeddings=angles, attention_mask=mask)[0][0]
    torch.testing.assert_close(naive(module, u, 300), expected, atol=2e-4, rtol=0)  # their angles are fp32


def test_with_an_identity_latent_it_is_plain_attention_with_a_shared_rotary_key() -> None:
    """Keys and values from the (normed) input itself: W_kva = identity, so c = RMS(u)."""
    width = 2 * WIDTH
    module = attention(replace(SIZES, kv_lora_rank=width), RopeConfig(100.0))
    with torch.no_grad():
        module.kv_a_proj_with_mqa.weight[:width].copy_(torch.eye(width))
        module.kv_a_layernorm.weight.fill_(1.0)
    u = rows(7)
    c = u / (u.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    per_head = module.kv_b_proj.weight.view(HEADS, 6 + 5, width)
    rotary = u @ module.kv_a_proj_with_mqa.weight[width:].T
    angle = torch.arange(7)[:, None] * 100.0 ** (-torch.arange(0, 4, 2, dtype=torch.float64) / 4)
    turn = torch.polar(torch.ones_like(angle), angle)
    out = torch.zeros(7, WIDTH, dtype=torch.float64)
    latent = module.q_a_proj(u)
    latent = latent / (latent.square().mean(-1, keepdim=True) + 1e-6).sqrt() * module.q_a_layernorm.weight
    queries = module.q_b_proj(latent)
    for head in range(HEADS):
        q = queries[:, head * 10 : head * 10 + 10]
        k, v = c @ per_head[head, :6].T, c @ per_head[head, 6:].T
        turned = [torch.view_as_complex(x.reshape(7, 2, 2).contiguous()) * turn for x in (q[:, 6:], rotary)]
        scores = (q[:, :6] @ k.T + (turned[0] @ turned[1].conj().T).real) / 10**0.5
        weights = scores.masked_fill(torch.ones(7, 7).triu(1).bool(), float("-inf")).softmax(-1)
        out = out + weights @ v @ module.o_proj.weight[:, head * 5 : head * 5 + 5].T
    torch.testing.assert_close(naive(module, u), out, atol=1e-12, rtol=0)


def drafter(rope: RopeConfig = YARN, **forms: bool) -> Eagle3Drafter:
    config = Eagle3Config(
        hidden_size=WIDTH, target_hidden_size=WIDTH, num_heads=HEADS, num_kv_heads=HEADS, head_dim=10,
        intermediate_size=20, vocab_size=24, draft_vocab_size=16, aux_layers=(0, 1), rope=rope, mla=SIZES, **forms,
    )  # fmt: skip
    model = Eagle3Drafter(config).double()
    randomise(model)
    return model


@pytest.mark.parametrize("mask", [DenseTTT, GroupedTTT])
@pytest.mark.parametrize("forms", [{}, {"fc_norm": True, "norm_output": True}], ids=["plain", "normed"])
def test_training_logits_are_those_of_absorbed_cached_decoding(mask: type, forms: dict[str, bool]) -> None:
    model, aux, table = drafter(**forms), rows(10), rows(24, WIDTH, 5)
    ids = torch.arange(10) * 7 % 24
    index = ttt_index([10], np.ones(10, dtype=bool), 3, rows=np.arange(10))
    outs = model.rollout(aux, [embed_rows(table, ids, n) for n in index.next_token], index.layout, mask)
    g = model.combine(aux)
    with torch.no_grad():
        for row in range(7):
            cache = model.new_cache(1, 16)
            out = model.step(g[None, : row + 1], table[ids[1 : row + 2]][None], torch.arange(row + 1)[None], cache)
            for depth in range(3):
                torch.testing.assert_close(model.logits(out[0, -1]), model.logits(outs[depth][row]), atol=1e-9, rtol=0)
                token = table[ids[row + 2 + depth]] if row + 2 + depth < 10 else table[0]
                hidden = model.feedback(out[:, -1:])
                out = model.step(hidden, token[None, None], torch.tensor([[row + 1 + depth]]), cache)


@pytest.mark.parametrize("forms", [{}, {"norm_output": True}], ids=["plain", "normed"])
def test_the_decoders_chain_drafts_what_the_rollout_says(forms: dict[str, bool]) -> None:
    """Each greedy draft is the most likely token of the uncached rollout over everything before it."""
    model, aux, table = drafter(**forms), rows(6), rows(24, WIDTH, 5)
    d2t = torch.arange(16) // 2  # target ids 0, 1, 3, 4, 6, ...
    chain, ids = Eagle3Chain(model, table, d2t), [3, 20, 7, 11, 2, 5, 14]
    chain.start(1, 16)
    one = torch.ones(1, dtype=torch.int64)
    known = [(0, 4), (4, 6)]
    for start, end in known:
        committed = Committed(
            aux[None, start:end], torch.tensor([ids[start + 1 : end + 1]]), one * start, one * (end - start)
        )
        with torch.no_grad():
            drafts = chain.propose(committed, 3, 0.0, None).tokens[0].tolist()
        text = torch.tensor(ids[: end + 1] + drafts)
        layout = ttt_index([len(text)], np.ones(len(text), dtype=bool), 3, rows=np.array([end - 1]))
        states = torch.cat((aux[:end], aux.new_zeros(len(text) - end, aux.shape[1])))
        outs = model.rollout(states, [embed_rows(table, text, n) for n in layout.next_token], layout.layout)
        best = [int(model.logits(out[0]).argmax()) for out in outs]
        assert drafts == [j + j // 2 for j in best]


@pytest.mark.parametrize(
    ("rope", "forms", "words"),
    [
        (RopeConfig(100.0, "linear", factor=2.0), {}, "linear"),
        (replace(YARN, mscale_all_dim=None), {}, "pair"),
        (replace(YARN, attention_factor=1.0), {}, "attention_factor"),
        (YARN, {"norm_before_fc": True}, "norm_before_fc"),
    ],
)
def test_what_engines_would_compute_differently_is_refused(
    rope: RopeConfig, forms: dict[str, bool], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        drafter(rope, **forms)


def test_sizes_without_meaning_are_refused() -> None:
    recipe = load_recipe(CONFIGS / "eagle3_mla.yaml", ["drafter.head_dim=64"]).recipe
    facts = TargetFacts("LlamaForCausalLM", 30, 576, 9, 3, 64, 1536, 49152, 1e-5, 1e5, 2048, (2,), True)
    with pytest.raises(UserError, match=r"drafter\.head_dim"):
        drafter_config(identity_of(recipe.drafter), facts, (1, 14, 26))
    with pytest.raises(UserError, match="qk_rope_head_dim 3"):
        replace(SIZES, qk_rope_head_dim=3)


def test_initial_weights_depend_on_the_seed_alone() -> None:
    first, second = drafter(), drafter()
    for model in (first, second):
        init_weights(model, 4)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
