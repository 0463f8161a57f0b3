"""Exported block drafters with multi-latent attention: names and keys, round trip into the decoder, refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.unit.test_evaluation_stage import write_target
from torchspec_core.decoding.blocks import BlockDrafts
from torchspec_core.decoding.decoder import decode
from torchspec_core.decoding.target import CachedTarget
from torchspec_core.drafters.dflash import (
    FULL,
    SLIDING,
    BlockConfig,
    BlockDrafter,
    ConvolutionConfig,
    SelectorConfig,
    init_blocks,
)
from torchspec_core.drafters.mla import MLAConfig
from torchspec_core.drafters.rope import RopeConfig
from torchspec_core.drafters.slots import Tables
from torchspec_core.errors import UserError
from torchspec_core.evaluation.drafts import open_export
from torchspec_core.export.dflash import block_checkpoint, load_blocks
from torchspec_core.kinds import unserved
from torchspec_core.targets.engine import load_model
from torchspec_core.targets.facts import read_facts

K, WIDTH, LAYERS = 3, 32, (1, 3, 5)
SIZES = {"q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}
MLA = MLAConfig(**SIZES)
YARN = RopeConfig(5000.0, "yarn", factor=32.0, original_max_position_embeddings=64, mscale=1.0, mscale_all_dim=1.0)
PARTS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "dflash2": {"convolution": ConvolutionConfig(2, 8), "selector": SelectorConfig(8, 4, "free")},
    "dspark": {"markov_rank": 6},
}
MIXED = {"layer_types": (SLIDING, FULL), "sliding_window": 8, "is_causal": False}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    write_target(folder)
    return folder


def config(kind: str, target: Path, **changes: Any) -> BlockConfig:
    sizes: dict[str, Any] = {
        "kind": kind, "hidden_size": WIDTH, "num_heads": 2, "num_kv_heads": 2, "head_dim": MLA.qk_head_dim,
        "intermediate_size": 40, "vocab_size": read_facts(target).vocab_size, "aux_layers": LAYERS,
        "block_size": K if kind == "dspark" else K + 1, "mask_token_id": 256, "rope": YARN,
        "max_position_embeddings": 128, "mla": MLA,
    }  # fmt: skip
    return BlockConfig(**{**sizes, **PARTS[kind], **({} if kind == "dspark" else MIXED), **changes})


def export(shape: BlockConfig, target: Path, folder: Path) -> BlockDrafter:
    """The trained drafter of `folder / drafter`, exported into `folder / export`."""
    for name in ("drafter", "export"):
        (folder / name).mkdir()
    drafter = BlockDrafter(shape)
    init_blocks(drafter, 1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    save_file(drafter.state_dict(), folder / "drafter/drafter.safetensors")
    (folder / "drafter/drafter.json").write_text(json.dumps(shape.to_json()))
    made = block_checkpoint(folder / "drafter", target, folder)
    save_file(dict(made.tensors), folder / "export/model.safetensors")
    (folder / "export/config.json").write_text(json.dumps(made.config))
    (folder / "export/README.md").write_text(made.card)
    return drafter


def change(folder: Path, nested: str | None = None, **values: Any) -> None:
    path = folder / "config.json"
    stored = json.loads(path.read_text())
    (stored if nested is None else stored[nested]).update(values)
    path.write_text(json.dumps(stored))


@pytest.mark.parametrize("kind", PARTS)
def test_the_decoder_drafts_from_the_file_what_it_drafts_from_the_trained_one(
    kind: str, target: Path, tmp_path: Path
) -> None:
    shape = config(kind, target)
    trained = export(shape, target, tmp_path)
    facts = read_facts(target)
    opened = open_export(tmp_path / "export", "float32", facts)
    model = CachedTarget(load_model(target, "float32", 1), facts, opened.layers)
    read = opened.attach(model)
    assert isinstance(read, BlockDrafts) and read.drafter.config == shape
    for name, tensor in read.drafter.state_dict().items():
        assert torch.equal(tensor, trained.state_dict()[name]), name
    tables = Tables(model.embedding.detach(), model.head_weight.detach())
    prompts = [[256, 10, 11], [5, 6, 7, 8, 9]]
    results = [
        decode(model, drafts, prompts, keys=["a", "b"], k=K, max_new_tokens=8)
        for drafts in (read, BlockDrafts(trained, tables))
    ]
    assert results[0] == results[1]


def test_dflash2_has_the_released_layout(target: Path, tmp_path: Path) -> None:
    export(config("dflash2", target), target, tmp_path)
    folder, size = tmp_path / "export", read_facts(target).vocab_size
    values = json.loads((folder / "config.json").read_text())
    assert (values["architectures"], values["is_causal"]) == (["DFlash2DraftModel"], False)
    assert values["dflash_config"] == {
        "mask_token_id": 256, "target_layer_ids": [1, 3, 5], "block_size": 4, "conv_kernel_size": 2,
        "conv_group_size": 8, "selector_rank": 8, "selector_top_k": 4, "attention_mode": "mla",
    }  # fmt: skip
    assert {name: values[name] for name in SIZES} == SIZES
    assert values["layer_types"] == [SLIDING, FULL] and values["sliding_window"] == 8
    assert values["rope_parameters"] == {
        "rope_type": "yarn", "rope_theta": 5000.0, "factor": 32.0, "original_max_position_embeddings": 64,
        "mscale": 1.0, "mscale_all_dim": 1.0,
    }  # fmt: skip
    assert values["num_target_layers"] == 8
    tensors = load_file(folder / "model.safetensors")
    prefix = "layers.1.self_attn."
    assert {n.removeprefix(prefix): tuple(t.shape) for n, t in tensors.items() if n.startswith(prefix)} == {
        "q_a_proj.weight": (12, 32),
        "q_a_layernorm.weight": (12,),
        "q_b_proj.weight": (20, 12),
        "kv_a_proj_with_mqa.weight": (12, 32),
        "kv_a_layernorm.weight": (8,),
        "kv_b_proj.weight": (22, 8),
        "o_proj.weight": (32, 10),
    }
    embedding = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(tensors["embed_tokens.weight"], embedding) and embedding.shape == (size, WIDTH)
    assert {"fc.weight", "hidden_norm.weight", "norm.weight"} <= tensors.keys()
    card = (folder / "README.md").read_text()
    assert "Not served by stock vLLM: vLLM 0.32 has no DFlash with multi-latent attention" in card
    assert "speculative_config" not in card and "in this folder; head" in card
    assert "no DFlash with multi-latent" in str(unserved(values, latent_target=True))


def test_dspark_has_the_names_and_keys_of_k3dspark(target: Path, tmp_path: Path) -> None:
    export(config("dspark", target), target, tmp_path)
    folder, size = tmp_path / "export", read_facts(target).vocab_size
    values = json.loads((folder / "config.json").read_text())
    expected = {
        "architectures": ["K3DSparkModel"], "model_type": "k3_dspark", "num_target_layers": 3,
        "target_layer_ids": [1, 3, 5], "target_hidden_size": WIDTH, "mask_token_id": 256, "block_size": 3,
        "markov_rank": 6, "markov_head_type": "vanilla", "enable_confidence_head": True,
        "confidence_head_with_markov": True, **SIZES,
    }  # fmt: skip
    assert {name: values[name] for name in expected} == expected
    tensors = load_file(folder / "model.safetensors")
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items() if not name.startswith("layers.")}
    assert shapes == {
        "context_proj.weight": (WIDTH, 3 * WIDTH),
        "context_norm.weight": (WIDTH,),
        "final_norm.weight": (WIDTH,),
        "markov_head.markov_w1.weight": (size, 6),
        "markov_head.markov_w2.weight": (size, 6),
        "confidence_head.proj.weight": (1, WIDTH + 6),
        "confidence_head.proj.bias": (1,),
        "embed_tokens.weight": (size, WIDTH),
    }
    assert "NVIDIA GPUs and multi-latent targets only" in (folder / "README.md").read_text()
    assert "the target (LlamaForCausalLM) has not" in str(unserved(values)) and unserved(values, True) is None


def test_norms_before_fc_come_back_and_are_said_to_be_unknown_to_vllm(target: Path, tmp_path: Path) -> None:
    shape = config("dflash2", target, mla=None, num_kv_heads=1, head_dim=8, fc_norm=True)
    export(shape, target, tmp_path)
    assert load_blocks(tmp_path / "export", "float32").config == shape
    assert "no norm before fc" in (tmp_path / "export/README.md").read_text()
    assert "no norm before fc" in str(unserved(json.loads((tmp_path / "export/config.json").read_text())))


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"mla": replace(MLA, q_lora_rank=None)}, "drafter.q_lora_rank"),
        ({"layer_types": (FULL, SLIDING), "sliding_window": 8}, "full_attention"),
        ({"is_causal": True}, "drafter.is_causal"),
        ({"fc_norm": True}, "drafter.fc_norm=false"),
    ],
)
def test_what_k3dspark_does_not_compute_is_not_exported(
    changes: dict[str, Any], remedy: str, target: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=f"K3DSparkModel.*{remedy}"):
        export(config("dspark", target, **changes), target, tmp_path)


@pytest.mark.parametrize(
    ("kind", "nested", "values"),
    [
        ("dspark", None, {"mla_use_nope": True}),
        ("dspark", None, {"mla_use_output_gate": True}),
        ("dspark", None, {"mla_use_qk_norm": True}),
        ("dspark", None, {"dspark_bonus_anchor": True}),
        ("dspark", None, {"markov_head_type": "gated"}),
        ("dspark", None, {"sample_from_anchor": False}),
        ("dflash2", "dflash_config", {"attention_mode": "linear"}),
        ("dflash2", "dflash_config", {"input_embedding_scale": 2.0}),
        ("dflash2", "dflash_config", {"final_logit_softcapping": 30.0}),
    ],
)
def test_forms_that_are_not_computed_here_are_not_opened(
    kind: str, nested: str | None, values: dict[str, Any], target: Path, tmp_path: Path
) -> None:
    export(config(kind, target), target, tmp_path)
    change(tmp_path / "export", nested, **values)
    with pytest.raises(UserError, match=next(iter(values))):
        load_blocks(tmp_path / "export", "float32")


def test_the_embedding_of_another_target_is_refused(target: Path, tmp_path: Path) -> None:
    export(config("dflash", target), target, tmp_path)
    path = tmp_path / "export/model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, "embed_tokens.weight": tensors["embed_tokens.weight"] + 1}, path)
    facts = read_facts(target)
    opened = open_export(tmp_path / "export", "float32", facts)
    with pytest.raises(UserError, match="embedding that is not the target's"):
        opened.attach(CachedTarget(load_model(target, "float32", 1), facts, opened.layers))


def test_causality_is_read_where_vllm_reads_it(target: Path, tmp_path: Path) -> None:
    """Top level first, then `dflash_config.causal`, then by layer."""
    export(config("dflash", target, is_causal=None), target, tmp_path)
    folder = tmp_path / "export"
    assert load_blocks(folder, "float32").config.is_causal is None
    change(folder, "dflash_config", causal=False)
    assert load_blocks(folder, "float32").config.is_causal is False
    change(folder, is_causal=True)
    assert load_blocks(folder, "float32").config.is_causal is True
