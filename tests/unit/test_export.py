"""Exported EAGLE-3 folders: round trip, every spelling that engines read, refusals by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from torchspec_core.drafters.eagle3 import Eagle3Config, Eagle3Drafter, init_weights
from torchspec_core.drafters.mla import MLAConfig
from torchspec_core.drafters.rope import RopeConfig
from torchspec_core.errors import UserError
from torchspec_core.export.checkpoint import build, export_eagle3, load_drafter
from torchspec_core.stages.job import local_job
from torchspec_core.targets.facts import read_facts

YARN = RopeConfig(5000.0, "yarn", factor=32.0, original_max_position_embeddings=64, mscale=1.0, mscale_all_dim=1.0)
V, V_D, WIDTH, LAYERS = 40, 12, 16, 9
KEPT = [0, 3, 4, 7, 11, 12, 20, 21, 22, 30, 38, 39]
TARGET = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": WIDTH,
    "intermediate_size": 24,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": V,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "max_position_embeddings": 128,
    "eos_token_id": 1,
    "torch_dtype": "float32",
}


def drafter_config(**changes: Any) -> Eagle3Config:
    sizes: dict[str, Any] = {
        "hidden_size": WIDTH,
        "target_hidden_size": WIDTH,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "intermediate_size": 24,
        "vocab_size": V,
        "draft_vocab_size": V_D,
        "aux_layers": (1, 3, 5),
        "rms_norm_eps": 1e-5,
        "rope": RopeConfig(5000.0),
        "max_position_embeddings": 128,
    }
    return Eagle3Config(**{**sizes, **changes})


def stages(folder: Path, config: Eagle3Config, target: dict[str, Any] | None = None) -> tuple[Path, Path, Path]:
    """Small drafter, target and vocabulary stage outputs."""
    paths = tuple(folder / name for name in ("drafter", "target", "vocabulary"))
    for path in paths:
        path.mkdir(parents=True)
    drafter = Eagle3Drafter(config)
    init_weights(drafter, 3)
    save_file(drafter.state_dict(), paths[0] / "drafter.safetensors")
    (paths[0] / "drafter.json").write_text(json.dumps(config.to_json()))
    (paths[1] / "config.json").write_text(json.dumps({**TARGET, **(target or {})}))
    np.save(paths[2] / "d2t.npy", np.array(KEPT) - np.arange(V_D))
    np.save(paths[2] / "t2d.npy", np.isin(np.arange(V), KEPT))
    np.save(paths[2] / "counts.npy", np.arange(V))
    return paths[0], paths[1], paths[2]


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    export_eagle3(*stages(tmp_path, drafter_config()), tmp_path / "out")
    return tmp_path / "out"


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_round_trip_gives_the_same_drafter(exported: Path) -> None:
    facts = read_facts(exported.parent / "target")
    drafter, d2t, t2d = load_drafter(exported, "float32", facts)
    assert drafter.config == drafter_config()
    trained = load_file(exported.parent / "drafter" / "drafter.safetensors")
    assert set(drafter.state_dict()) == set(trained)
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(tensor, trained[name]), name
    assert d2t is not None and t2d is not None
    assert (d2t + torch.arange(V_D)).tolist() == KEPT
    assert t2d.nonzero().squeeze(1).tolist() == KEPT
    assert not any(p.requires_grad for p in drafter.parameters())


FORMS: list[dict[str, Any]] = [
    {"norm_before_fc": True, "norm_before_residual": True},
    {"fc_norm": True, "norm_output": True},
    {"rope": RopeConfig(5000.0, "linear", factor=2.0)},
    {"mla": MLAConfig(6, 8, 4, 4, 3), "num_kv_heads": 4, "head_dim": 8, "fc_norm": True},
    {"mla": MLAConfig(None, 8, 4, 4, 3), "num_kv_heads": 4, "head_dim": 8, "rope": YARN},
]


@pytest.mark.parametrize("changes", FORMS, ids=lambda form: "-".join(form))
def test_every_form_comes_back_from_its_checkpoint(tmp_path: Path, changes: dict[str, Any]) -> None:
    config = drafter_config(**changes)
    folders = stages(tmp_path, config)
    export_eagle3(*folders, tmp_path / "out")
    drafter, _, _ = load_drafter(tmp_path / "out", "float32", read_facts(folders[1]))
    assert drafter.config == config
    trained = load_file(folders[0] / "drafter.safetensors")
    assert all(torch.equal(tensor, trained[name]) for name, tensor in drafter.state_dict().items())


def test_multi_latent_names_and_keys_are_the_engines(tmp_path: Path) -> None:
    config = drafter_config(mla=MLAConfig(6, 8, 4, 2, 3), num_kv_heads=4, head_dim=6, rope=YARN)
    export_eagle3(*stages(tmp_path, config), tmp_path / "out")
    values = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (values["architectures"], values["model_type"]) == (["Eagle3DeepseekV2ForCausalLM"], "kimi_k2")
    sizes = {"q_lora_rank": 6, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 3}
    assert {name: values[name] for name in sizes} == sizes
    assert values["rope_scaling"] == {
        "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 64, "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }  # fmt: skip
    assert values["rope_parameters"] == {**values["rope_scaling"], "rope_theta": 5000.0}
    shapes = {name: tuple(tensor.shape) for name, tensor in load_file(tmp_path / "out" / "model.safetensors").items()}
    prefix = "midlayer.self_attn."
    assert {name.removeprefix(prefix): shape for name, shape in shapes.items() if name.startswith(prefix)} == {
        "q_a_proj.weight": (6, 32),
        "q_a_layernorm.weight": (6,),
        "q_b_proj.weight": (24, 6),
        "kv_a_proj_with_mqa.weight": (10, 32),
        "kv_a_layernorm.weight": (8,),
        "kv_b_proj.weight": (28, 8),
        "o_proj.weight": (16, 12),
    }
    assert "multi-latent attention of 4 heads" in (tmp_path / "out" / "README.md").read_text()


def test_a_canonical_layer_is_vllms_next_one_in_every_place_that_is_read(exported: Path) -> None:
    values = json.loads((exported / "config.json").read_text())
    assert values["eagle_aux_hidden_state_layer_ids"] == [2, 4, 6]
    assert values["eagle_config"] == {"eagle_aux_hidden_state_layer_ids": [2, 4, 6], "use_aux_hidden_state": True}
    assert values["num_aux_hidden_states"] == 3
    assert values["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (values["draft_vocab_size"], values["vocab_size"]) == (V_D, V)
    assert values["torchspec"]["aux_layers_after_0_based_decoder_layer"] == [1, 3, 5]


def test_transformers_reads_sizes_and_rope_as_trained(exported: Path) -> None:
    config = AutoConfig.from_pretrained(exported)
    assert config.rope_parameters["rope_theta"] == 5000.0
    assert config.rope_parameters["rope_type"] == "default"
    assert (config.head_dim, config.num_hidden_layers, config.rms_norm_eps) == (8, 1, 1e-5)


def test_weights_hold_vllms_names_shapes_and_offsets(exported: Path) -> None:
    tensors = load_file(exported / "model.safetensors")
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert shapes == {
        "fc.weight": (16, 48),
        "norm.weight": (16,),
        "lm_head.weight": (12, 16),
        "d2t": (12,),
        "t2d": (40,),
        "midlayer.hidden_norm.weight": (16,),
        "midlayer.input_layernorm.weight": (16,),
        "midlayer.post_attention_layernorm.weight": (16,),
        "midlayer.self_attn.q_proj.weight": (32, 32),
        "midlayer.self_attn.k_proj.weight": (16, 32),
        "midlayer.self_attn.v_proj.weight": (16, 32),
        "midlayer.self_attn.o_proj.weight": (16, 32),
        "midlayer.mlp.gate_proj.weight": (24, 16),
        "midlayer.mlp.up_proj.weight": (24, 16),
        "midlayer.mlp.down_proj.weight": (16, 24),
    }
    assert tensors["d2t"].dtype == torch.int64 and tensors["d2t"].tolist() == [k - j for j, k in enumerate(KEPT)]
    assert tensors["t2d"].dtype == torch.bool


def test_weights_take_the_type_of_the_targets_and_a_full_vocabulary_needs_no_map(tmp_path: Path) -> None:
    folders = stages(tmp_path, drafter_config(draft_vocab_size=V), {"torch_dtype": "bfloat16"})
    export_eagle3(*folders, tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert "d2t" not in tensors and "t2d" not in tensors
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert load_drafter(tmp_path / "out", "bfloat16")[1:] == (None, None)


def test_the_card_names_the_target_and_the_coverage(exported: Path) -> None:
    card = (exported / "README.md").read_text()
    share = sum(KEPT) / sum(range(V))
    for words in (
        "LlamaForCausalLM, 9 layers, hidden size 16, vocabulary 40",
        f"{share:.1%}",
        "layers 1, 3, 5",
        "ids 2, 4, 6",
    ):
        assert words in card


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"vocab_size": 41}, "vocabulary 40.*41"),
        ({"hidden_size": 32}, "hidden size 16.*32"),
        ({"num_hidden_layers": 10}, "layer count 9.*10"),
    ],
)
def test_a_drafter_of_another_target_is_refused_by_name(exported: Path, change: dict[str, Any], name: str) -> None:
    config = exported.parent / "target" / "config.json"
    config.write_text(json.dumps({**TARGET, **change}))
    with pytest.raises(UserError, match=name):
        load_drafter(exported, "float32", read_facts(exported.parent / "target"))


def test_missing_extra_and_misshapen_tensors_are_named(exported: Path) -> None:
    path = exported / "model.safetensors"
    whole = load_file(path)
    save_file({name: t for name, t in whole.items() if name != "fc.weight"} | {"fc.bias": torch.zeros(16)}, path)
    with pytest.raises(UserError, match=r"missing fc\.weight; unknown fc\.bias"):
        load_drafter(exported, "float32")
    save_file({**whole, "norm.weight": torch.zeros(17)}, path)
    with pytest.raises(UserError, match=r"norm\.weight has shape \[17\]"):
        load_drafter(exported, "float32")
    save_file({name: t for name, t in whole.items() if name != "d2t"}, path)
    with pytest.raises(UserError, match="d2t is missing"):
        load_drafter(exported, "float32")
    save_file({**whole, "t2d": ~whole["t2d"]}, path)
    with pytest.raises(UserError, match="d2t and t2d"):
        load_drafter(exported, "float32")
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(UserError, match="no whole safetensors"):
        load_drafter(exported, "float32")
    path.unlink()
    with pytest.raises(UserError, match="missing"):
        load_drafter(exported, "float32")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["DFlashDraftModel"]}, "DFlashDraftModel is no EAGLE-3"),
        ({"attention_bias": True}, "attention_bias"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}}, "contradict"),
        ({"num_aux_hidden_states": 2}, "contradict"),
        ({"eagle_aux_hidden_state_layer_ids": None, "eagle_config": {}}, "is missing"),
    ],
)
def test_what_would_be_computed_differently_is_refused(exported: Path, change: dict[str, Any], words: str) -> None:
    change_config(exported, **change)
    with pytest.raises(UserError, match=words):
        load_drafter(exported, "float32")


def test_layers_that_engines_would_reorder_are_not_exported(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="ascending"):
        export_eagle3(*stages(tmp_path, drafter_config(aux_layers=(3, 1, 5))), tmp_path / "out")


def test_a_vocabulary_of_another_run_is_not_exported(tmp_path: Path) -> None:
    folders = stages(tmp_path, drafter_config())
    np.save(folders[2] / "d2t.npy", np.array(KEPT[:-1]) - np.arange(V_D - 1))
    with pytest.raises(UserError, match="11 draft tokens"):
        export_eagle3(*folders, tmp_path / "out")
    np.save(folders[2] / "d2t.npy", np.array(KEPT))  # ids instead of offsets
    with pytest.raises(UserError, match="offsets"):
        export_eagle3(*folders, tmp_path / "out")


def test_the_stage_writes_what_the_function_writes(tmp_path: Path, exported: Path) -> None:
    drafter, target, vocabulary = (tmp_path / name for name in ("drafter", "target", "vocabulary"))
    job = local_job(tmp_path / "stage", inputs={"drafter": drafter, "target": target, "vocabulary": vocabulary})
    build(job)
    for name in ("config.json", "model.safetensors", "README.md"):
        assert (tmp_path / "stage" / name).read_bytes() == (exported / name).read_bytes()
        assert job.workspace.done(name) is not None
