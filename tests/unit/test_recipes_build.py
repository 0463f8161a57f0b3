"""Every recipe in configs/ becomes a drafter on the meta device; the released ones have their published sizes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from torchspec_core.config.fields import identity_of
from torchspec_core.config.load import load_recipe
from torchspec_core.config.schema import Recipe
from torchspec_core.drafters.dflash import BlockDrafter
from torchspec_core.drafters.rope import RopeConfig
from torchspec_core.kinds import KINDS
from torchspec_core.recipe_checks import check_fields, check_target
from torchspec_core.targets.engine import TargetHead
from torchspec_core.targets.facts import TargetFacts, aux_layers
from torchspec_core.targets.made import known_facts
from torchspec_core.training.dflash import block_config
from torchspec_core.training.method import Method, Setup

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
K3 = TargetFacts(
    architecture="LlamaForCausalLM", num_layers=93, hidden_size=7168, num_heads=64, num_kv_heads=64, head_dim=192,
    intermediate_size=18432, vocab_size=163840, rms_norm_eps=1e-5, rope_theta=50000.0,
    max_position_embeddings=1048576, eos_token_ids=(1,), tied=False,
    rope=RopeConfig(
        50000.0, "yarn", factor=32.0, original_max_position_embeddings=32768, mscale=1.0, mscale_all_dim=1.0
    ),
)  # fmt: skip
EMBEDDING = K3.vocab_size * K3.hidden_size


def build(name: str) -> tuple[Recipe, Method]:
    """The method of a recipe, checked as a run would, with tensors that have shapes only."""
    recipe = load_recipe(CONFIGS / f"{name}.yaml", []).recipe
    check_fields(recipe)
    facts = known_facts(recipe.target.source, None) or K3
    check_target(recipe, facts)
    drafter = identity_of(recipe.drafter)
    with torch.device("meta"):
        table, norm = torch.empty(facts.vocab_size, facts.hidden_size), torch.empty(facts.hidden_size)
        kept = torch.empty(recipe.drafter.draft_vocab_size, dtype=torch.int64)
        layers = aux_layers(facts, recipe.capture.layers)
        head = TargetHead(norm, facts.rms_norm_eps, table)
        setup = Setup(drafter, identity_of(recipe.training), 0, facts, layers, table, head, kept)
        return recipe, KINDS[recipe.drafter.kind].part("training")(setup)


def parameters(method: Method) -> int:
    assert all(p.is_meta for p in method.drafter.parameters())
    return sum(p.numel() for p in method.drafter.parameters())


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("*.yaml")))
def test_every_recipe_becomes_a_drafter(name: str) -> None:
    recipe, method = build(name)
    assert parameters(method) > 1e5
    assert type(method.config).from_json(method.config.to_json()) == method.config  # type: ignore[attr-defined]
    kind = KINDS[recipe.drafter.kind]
    assert not kind.blocks or recipe.evaluation.k <= kind.predictions(recipe.drafter.block_size)


def test_the_released_eagle3() -> None:
    _, method = build("kimi_k3_eagle3_mla")
    assert parameters(method) == 1_841_199_104
    assert parameters(method) + EMBEDDING == 3_015_604_224
    assert method.drafter.midlayer.self_attn.scale == pytest.approx(0.130861, abs=1e-6)  # type: ignore[union-attr]


def test_the_released_dflash2() -> None:
    """lightseekorg/kimi-k3-dflash2; its file holds the embedding as well."""
    recipe, method = build("kimi_k3_dflash2")
    assert parameters(method) + EMBEDDING == 3_692_877_824
    drafter = method.drafter
    assert isinstance(drafter, BlockDrafter)
    assert drafter.config.aux_layers == (19, 37, 66, 78, 90) and recipe.drafter.mask_token_id == 163592
    assert [(rule.causal, rule.window) for rule in drafter.config.rules] == [(False, 4096)] * 4 + [(False, None)]
    assert drafter.stack[0].self_attn.scale == pytest.approx(0.130861, abs=1e-6)
    with torch.device("meta"):
        caches = drafter.new_cache(1, 1)
    assert [cache.k.shape[3] + cache.v.shape[3] for cache in caches] == [576] * 5  # numbers a token and layer


def test_the_released_dspark() -> None:
    """Inferact's, and lightseekorg/kimi-k3-dspark, which norms each captured state."""
    recipe, method = build("kimi_k3_dspark")
    assert parameters(method) + EMBEDDING == 3_562_312_961
    shape = block_config(identity_of(recipe.drafter), K3, (7, 31, 47, 63, 87))
    assert (shape.predictions, shape.mask_token_id) == (7, 163837)
    with torch.device("meta"):
        normed = BlockDrafter(replace(shape, fc_norm=True))
    assert sum(p.numel() for p in normed.parameters()) + EMBEDDING == 3_562_348_801
