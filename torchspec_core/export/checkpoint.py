"""EAGLE-3 checkpoints in vLLM's format: out, and strictly back in.

The folder describes itself. The auxiliary layers are written in vLLM's ids (canonical + 1) in all three places where
different runners look; rotary positions, norms and sizes stand as trained; the target that it belongs to is named with
vocabulary, width and depth, so that a wrong pairing is refused instead of being served slowly. Embeddings are left out:
engines share the target's. Loading refuses whatever this project's EAGLE-3 would silently compute differently.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from torchspec_core.drafters.eagle3 import Eagle3Config, Eagle3Drafter, LowRankHead
from torchspec_core.drafters.mla import MLAConfig
from torchspec_core.drafters.rope_config import hub_rope
from torchspec_core.errors import UserError
from torchspec_core.export.card import model_card
from torchspec_core.kinds import KINDS, kind_of_drafter
from torchspec_core.stages.job import Job
from torchspec_core.targets.engine import DTYPES, load_head
from torchspec_core.targets.facts import TargetFacts, read_facts, read_json, vllm_layer_id

CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"
ARCHITECTURES = KINDS["eagle3"].architectures
MLA_ARCHITECTURES = tuple(name for name in ARCHITECTURES if "Deepseek" in name)
MLA_SIZES = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
# Forms of EAGLE-3 that this project's drafter does not compute; a checkpoint that switches one on is refused.
UNSUPPORTED = ("attention_bias",)


@dataclass(frozen=True)
class Checkpoint:
    """What an exported folder holds, before it is written."""

    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    card: str


def vllm_config(config: Eagle3Config, target: TargetFacts, dtype: str) -> dict[str, Any]:
    """`config.json` of an EAGLE-3 drafter as vLLM 0.32 reads it (V1 and V2 runners)."""
    if config.hidden_size != config.target_hidden_size:
        raise UserError(
            f"the drafter is {config.hidden_size} wide and its target {config.target_hidden_size}, but engines share "
            "the target's embeddings with an EAGLE-3 drafter: train it with the target's width."
        )
    ids = [vllm_layer_id(layer) for layer in config.aux_layers]
    if ids != sorted(set(ids)):
        raise UserError(
            f"the drafter reads layers {list(config.aux_layers)}, but engines sort the layers they hand over: "
            "train it with ascending, different layers."
        )
    return {
        "architectures": [ARCHITECTURES[0] if config.mla is None else MLA_ARCHITECTURES[0]],
        # vLLM takes `deepseek_v3` for its own multi-token prediction; `kimi_k2` is the same attention.
        "model_type": "llama" if config.mla is None else "kimi_k2",
        "hidden_size": config.hidden_size,
        "target_hidden_size": config.target_hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim if config.mla is None else config.mla.qk_rope_head_dim,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "rope_scaling": config.rope.hub_scaling(),
        "rope_parameters": config.rope.hub_parameters(),
        "max_position_embeddings": config.max_position_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        **({} if config.mla is None else asdict(config.mla)),
        # Three places for one list: the V1 runner reads the first, the model's width comes from the second or third.
        "eagle_aux_hidden_state_layer_ids": ids,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True},
        "num_aux_hidden_states": len(ids),
        "torchspec": {
            "kind": "eagle3",
            "aux_layers_after_0_based_decoder_layer": list(config.aux_layers),
            "target_architecture": target.architecture,
            "target_num_hidden_layers": target.num_layers,
        },
    }


def eagle3_checkpoint(drafter_folder: Path, target_folder: Path, vocabulary_folder: Path) -> Checkpoint:
    """The checkpoint of a trained drafter, in the type that its target's weights are stored in.

    Raises UserError where drafter, target and draft vocabulary do not belong together, or a tensor is missing.
    """
    config = Eagle3Config.from_json(read_json(drafter_folder / "drafter.json"))
    facts = read_facts(target_folder)
    check_target(
        {"vocab_size": config.vocab_size, "target_hidden_size": config.target_hidden_size},
        facts,
        where=str(drafter_folder),
    )
    dtype = stored_dtype(target_folder)
    tensors = named_tensors(
        lambda: Eagle3Drafter(config), read_tensors(drafter_folder / "drafter.safetensors"), drafter_folder
    )
    pruned = config.draft_vocab_size < config.vocab_size
    d2t, t2d = _vocabulary(vocabulary_folder, config) if pruned else (None, None)
    if config.head == "low_rank":
        tensors["lm_head.weight"] = LowRankHead.whole(
            tensors.pop("lm_head.up.weight"), tensors.pop("lm_head.down.weight")
        )
    elif config.head == "target":
        rows = load_head(target_folder, torch.float32).head_weight
        tensors["lm_head.weight"] = rows if t2d is None else rows[t2d]
    out = {name: tensor.to(DTYPES[dtype]).contiguous() for name, tensor in tensors.items()}
    coverage: dict[str, Any] = {}
    if d2t is not None and t2d is not None:
        out |= {"d2t": d2t, "t2d": t2d}
        counts = np.load(vocabulary_folder / "counts.npy")
        coverage["coverage"] = float(counts[t2d.numpy()].sum() / max(int(counts.sum()), 1))
    vllm = vllm_config(config, facts, dtype)
    return Checkpoint(vllm, out, model_card(vllm, facts, validation_numbers(drafter_folder) | coverage))


def export_eagle3(drafter_folder: Path, target_folder: Path, vocabulary_folder: Path, out: Path) -> None:
    """Write the exported folder `out` (made if missing): config.json, model.safetensors, README.md."""
    checkpoint = eagle3_checkpoint(drafter_folder, target_folder, vocabulary_folder)
    out.mkdir(parents=True, exist_ok=True)
    for name in (CONFIG, WEIGHTS, CARD):
        _write(checkpoint, name, out / name)


def build(job: Job) -> None:
    """Stage `export`: inputs target, vocabulary, drafter, of any kind."""
    names = (CONFIG, WEIGHTS, CARD)
    job.workspace.expect(len(names))
    kind = kind_of_drafter(read_json(job.inputs["drafter"] / "drafter.json"))
    checkpoint: Checkpoint = kind.part("checkpoint")(
        job.inputs["drafter"], job.inputs["target"], job.inputs["vocabulary"]
    )
    for done, name in enumerate(names):
        if job.workspace.done(name) is None:
            with job.workspace.shard(name) as path:
                _write(checkpoint, name, path)
        job.progress.update(done + 1, len(names), "files")
    parameters = sum(tensor.numel() for name, tensor in checkpoint.tensors.items() if name not in ("d2t", "t2d"))
    job.workspace.record(rows=1, parameters=parameters)


def load_drafter(
    folder: Path, dtype: str, target: TargetFacts | None = None
) -> tuple[Eagle3Drafter, Tensor | None, Tensor | None]:
    """(drafter in `dtype`, d2t [V_d] int64 offsets, t2d [V] bool) of an exported folder; both None with a full
    vocabulary.

    With `target` given, a drafter of another target is refused by name. Raises UserError for missing, extra or
    misshapen tensors, contradicting layer ids, an architecture or a form that this project does not compute.
    """
    values = read_json(folder / CONFIG)
    config = drafter_config(values, where=str(folder / CONFIG))
    if target is not None:
        check_target(values, target, where=str(folder))
    raw = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in read_tensors(folder / WEIGHTS).items()}
    maps = {name: raw.pop(name) for name in ("d2t", "t2d") if name in raw}
    drafter = Eagle3Drafter(config).to(DTYPES[dtype])
    drafter.load_state_dict(
        {
            name: tensor.to(DTYPES[dtype])
            for name, tensor in named_tensors(lambda: Eagle3Drafter(config), raw, folder).items()
        }
    )
    drafter.eval().requires_grad_(False)
    if config.draft_vocab_size == config.vocab_size:
        return drafter, None, None
    if "d2t" not in maps:
        raise UserError(
            f"{folder / WEIGHTS}: the tensor d2t is missing, but only {config.draft_vocab_size} of "
            f"{config.vocab_size} tokens can be drafted; export the drafter again."
        )
    d2t = maps["d2t"].long()
    _check_d2t(d2t, config, where=str(folder / WEIGHTS))
    t2d = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill_(0, d2t + torch.arange(len(d2t)), True)
    if "t2d" in maps and not torch.equal(maps["t2d"].bool(), t2d):
        raise UserError(f"{folder / WEIGHTS}: d2t and t2d name different draft vocabularies; export the drafter again.")
    return drafter, d2t, t2d


def load_eagle3(folder: Path, dtype: str, target: TargetFacts | None = None) -> Eagle3Drafter:
    """The drafter of `load_drafter` alone."""
    return load_drafter(folder, dtype, target)[0]


def drafter_config(values: Mapping[str, Any], where: str = CONFIG) -> Eagle3Config:
    """The drafter's shape from an exported `config.json`; layer ids back to canonical."""
    architecture = str((values.get("architectures") or ["(none)"])[0])
    latent = architecture in MLA_ARCHITECTURES
    if architecture not in ARCHITECTURES:
        raise UserError(
            f"{where}: {architecture} is no EAGLE-3 drafter of this project ({ARCHITECTURES[0]} or "
            f"{MLA_ARCHITECTURES[0]}); serve it in an engine that knows it."
        )
    switched_on = [name for name in UNSUPPORTED if values.get(name) or (values.get("eagle_config") or {}).get(name)]
    if switched_on:
        raise UserError(
            f"{where}: {switched_on[0]} is set, a form of EAGLE-3 that this project does not compute; serve it in vLLM."
        )
    nested = values.get("eagle_config") or {}
    try:
        mla = MLAConfig(**{name: values[name] for name in MLA_SIZES}) if latent else None
        return Eagle3Config(
            hidden_size=values["hidden_size"],
            target_hidden_size=values.get("target_hidden_size", values["hidden_size"]),
            num_heads=values["num_attention_heads"],
            num_kv_heads=values["num_key_value_heads"],
            head_dim=values["head_dim"] if mla is None else mla.qk_head_dim,
            intermediate_size=values["intermediate_size"],
            vocab_size=values["vocab_size"],
            draft_vocab_size=values.get("draft_vocab_size") or values["vocab_size"],
            aux_layers=tuple(vllm_id - 1 for vllm_id in _aux_ids(values, where)),
            rms_norm_eps=values["rms_norm_eps"],
            rope=hub_rope(values, where=where),
            max_position_embeddings=values["max_position_embeddings"],
            norm_before_residual=bool(values.get("norm_before_residual", False)),
            mla=mla,
            norm_before_fc=bool(nested.get("norm_before_fc", values.get("norm_before_fc", False))),
            fc_norm=bool(values.get("fc_norm", False)),
            norm_output=bool(values.get("norm_output", False)),
        )
    except KeyError as error:
        raise UserError(f"{where}: the key {error.args[0]} is missing; export the drafter again.") from None


def _aux_ids(values: Mapping[str, Any], where: str) -> list[int]:
    """vLLM's ids of the auxiliary layers; the places that name them must agree."""
    nested = (values.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    ids = values.get("eagle_aux_hidden_state_layer_ids") or nested
    if not ids:
        raise UserError(
            f"{where}: eagle_aux_hidden_state_layer_ids is missing: nobody can tell which layers the drafter reads."
        )
    if nested not in (None, ids) or values.get("num_aux_hidden_states", len(ids)) != len(ids):
        raise UserError(
            f"{where}: eagle_aux_hidden_state_layer_ids {list(ids)}, its copy in eagle_config {nested} and "
            f"num_aux_hidden_states {values.get('num_aux_hidden_states')} contradict each other; export again."
        )
    return list(ids)


def check_target(values: Mapping[str, Any], target: TargetFacts, where: str) -> None:
    """Refuse, by name, a target that the drafter with this exported config was not trained for."""
    known = values.get("torchspec") or {}
    pairs = (
        ("vocabulary", values.get("vocab_size"), target.vocab_size),
        ("hidden size", values.get("target_hidden_size", values.get("hidden_size")), target.hidden_size),
        ("layer count", known.get("target_num_hidden_layers"), target.num_layers),
    )
    for name, mine, theirs in pairs:
        if mine is not None and mine != theirs:
            raise UserError(
                f"{where} was trained for a target with {name} {mine}, but this one ({target.architecture}) has "
                f"{theirs}: use the drafter's own target, or train one for this target."
            )


def stored_dtype(target_folder: Path) -> str:
    """The type that the target's weights are stored in, which its drafter is exported in; fp32 for an unusual one."""
    stored = read_json(target_folder / CONFIG)
    dtype = str(stored.get("torch_dtype") or stored.get("dtype") or "float32")
    return dtype if dtype in DTYPES else "float32"


def validation_numbers(folder: Path) -> dict[str, Any]:
    """The training run's validation; empty where there is none."""
    path = folder / "validation.json"
    return read_json(path) if path.is_file() else {}


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file; UserError where it is missing or broken."""
    if not path.is_file():
        raise UserError(f"{path} is missing: {path.parent} holds no trained drafter.")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise UserError(f"{path} is no whole safetensors file ({error}): export or train the drafter again.") from None


def named_tensors(make: Callable[[], nn.Module], tensors: Mapping[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """The tensors of this drafter in order; missing, extra and misshapen ones are errors that name them."""
    with torch.device("meta"):
        expected = {name: tensor.shape for name, tensor in make().state_dict().items()}
    missing, extra = sorted(set(expected) - set(tensors)), sorted(set(tensors) - set(expected))
    if missing or extra:
        parts = [f"missing {', '.join(missing)}"] * bool(missing) + [f"unknown {', '.join(extra)}"] * bool(extra)
        raise UserError(f"{folder}: the tensors are not those of its config: {'; '.join(parts)}.")
    for name, shape in expected.items():
        if tensors[name].shape != shape:
            raise UserError(
                f"{folder}: the tensor {name} has shape {list(tensors[name].shape)}, its config says {list(shape)}."
            )
    return {name: tensors[name] for name in expected}


def _vocabulary(folder: Path, config: Eagle3Config) -> tuple[Tensor, Tensor]:
    """(d2t, t2d) of the vocabulary stage, checked against the drafter."""
    d2t = torch.from_numpy(np.load(folder / "d2t.npy").astype(np.int64))
    t2d = torch.from_numpy(np.load(folder / "t2d.npy").astype(bool))
    _check_d2t(d2t, config, where=str(folder / "d2t.npy"))
    ids = (d2t + torch.arange(len(d2t))).tolist()
    if len(t2d) != config.vocab_size or t2d.nonzero().squeeze(1).tolist() != ids:
        raise UserError(f"{folder}: d2t.npy and t2d.npy name different draft vocabularies; build the vocabulary again.")
    return d2t, t2d


def _check_d2t(d2t: Tensor, config: Eagle3Config, where: str) -> None:
    if len(d2t) != config.draft_vocab_size:
        raise UserError(
            f"{where} maps {len(d2t)} draft tokens, but the drafter's head has {config.draft_vocab_size}; they "
            "come from different runs."
        )
    ids = d2t + torch.arange(len(d2t))
    if bool((ids.diff() <= 0).any()) or int(ids[0]) < 0 or int(ids[-1]) >= config.vocab_size:
        raise UserError(
            f"{where}: d2t must hold offsets (target id = j + d2t[j]) to ascending ids below {config.vocab_size}."
        )


def _write(checkpoint: Checkpoint, name: str, path: Path) -> None:
    if name == WEIGHTS:
        save_file(dict(checkpoint.tensors), path, metadata={"format": "pt"})
    else:
        text = checkpoint.card if name == CARD else json.dumps(checkpoint.config, indent=1) + "\n"
        path.write_text(text, encoding="utf-8")
