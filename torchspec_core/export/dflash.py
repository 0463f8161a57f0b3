"""Checkpoints of the block drafters as vLLM 0.32 reads them (`DFlashDraftModel`, `DFlash2DraftModel`,
`Qwen3DSparkModel`, with multi-latent attention `K3DSparkModel`): out, and strictly back in. DFlash with multi-latent
attention is in no vLLM yet; its layout is the one that the drafter released for Kimi-K3 has.

Layer ids are canonical (0-based) here, unlike EAGLE-3's: engines add one themselves. Embedding and head are left out,
engines share the target's; only the multi-latent layouts hold the embedding. A projected selector is written as the two
tables that it stands for, so loading always finds free ones. The target is named with vocabulary, width and depth, so
that a wrong pairing is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from torchspec_core.drafters.dflash import FULL, SLIDING, BlockConfig, BlockDrafter, ConvolutionConfig, SelectorConfig
from torchspec_core.drafters.mla import MLAConfig
from torchspec_core.drafters.rope_config import hub_rope
from torchspec_core.drafters.slots import CandidateSelector, Tables
from torchspec_core.errors import UserError
from torchspec_core.export.card import block_card
from torchspec_core.export.checkpoint import (
    CONFIG,
    MLA_SIZES,
    WEIGHTS,
    Checkpoint,
    check_target,
    named_tensors,
    read_tensors,
    stored_dtype,
    validation_numbers,
)
from torchspec_core.kinds import KINDS, kind_of_export
from torchspec_core.targets.engine import DTYPES, load_embedding, load_head
from torchspec_core.targets.facts import TargetFacts, read_facts, read_json

EMBEDDING = "embed_tokens.weight"
# K3DSparkModel's names of what other layouts call otherwise, by the first part of a tensor's name.
_K3_NAMES = {"fc": "context_proj", "hidden_norm": "context_norm", "norm": "final_norm"}
# Key -> its values that this project's block drafters compute, beside none: a checkpoint with another is refused.
_COMPUTED: Mapping[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "attention_mode": ("mla",),
    "final_logit_softcapping": (),
    "input_embedding_scale": (1.0,),
    "output_multiplier": (1.0,),
    "logit_scale": (1.0,),
    "use_swa": (False,),
    "swa_window_size": (),
    "markov_head_type": ("vanilla",),
    "sample_from_anchor": (True,),
    "mla_use_nope": (False,),
    "mla_use_output_gate": (False,),
    "mla_use_qk_norm": (False,),
    "dspark_bonus_anchor": (False,),
}


def _renamed(tensors: Mapping[str, Tensor], names: Mapping[str, str]) -> dict[str, Tensor]:
    """Tensors with the first part of their names changed."""
    out = {}
    for name, tensor in tensors.items():
        first, dot, rest = name.partition(".")
        out[names.get(first, first) + dot + rest] = tensor
    return out


def _file_names(config: BlockConfig) -> Mapping[str, str]:
    return _K3_NAMES if config.mla is not None and config.markov_rank is not None else {}


def engine_config(config: BlockConfig, target: TargetFacts, dtype: str) -> dict[str, Any]:
    """`config.json` of a block drafter."""
    if list(config.aux_layers) != sorted(config.aux_layers):
        raise UserError(
            f"the drafter reads layers {list(config.aux_layers)}, but engines sort the layers they hand over: "
            "train it with ascending layers in capture.layers."
        )
    kind = KINDS[config.kind]
    unread = config.mla and kind.unread(
        full_q=config.mla.q_lora_rank is None,
        sliding=SLIDING in config.layer_types,
        causal=bool(config.is_causal),
        fc_norm=config.fc_norm,
    )
    if unread:
        raise UserError(f"{unread}; train it anew.")
    values: dict[str, Any] = {
        "architectures": [kind.architectures[0]],
        "model_type": "qwen3",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": len(config.layer_types),
        "num_target_layers": target.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "block_size": config.block_size,
        "layer_types": list(config.layer_types),
        "sliding_window": config.sliding_window,
        "use_sliding_window": SLIDING in config.layer_types,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "rope_scaling": config.rope.hub_scaling(),
        "rope_parameters": config.rope.hub_parameters(),
        "max_position_embeddings": config.max_position_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "torchspec": {
            "kind": config.kind,
            "aux_layers_after_0_based_decoder_layer": list(config.aux_layers),
            "target_architecture": target.architecture,
            "target_num_hidden_layers": target.num_layers,
        },
    }
    if config.confidence_temperatures is not None:
        values["torchspec"]["confidence_temperatures"] = list(config.confidence_temperatures)
    if config.is_causal is not None:
        values["is_causal"] = config.is_causal
    if config.fc_norm:
        values["fc_norm"] = True
    if config.mla is not None:
        # vLLM's class of K3DSparkModel reads `rope_scaling` instead of `rope_parameters` where both stand, and then
        # without the base.
        del values["rope_scaling"]
        values |= {**asdict(config.mla), "architectures": [kind.latent], "head_dim": config.mla.qk_rope_head_dim}
    if config.markov_rank is not None:
        # K3DSparkModel sizes its projection by `num_target_layers`, where the others mean the target's depth.
        latent = {
            "model_type": "k3_dspark",
            "num_target_layers": len(config.aux_layers),
            "target_hidden_size": config.hidden_size,
        }
        return values | (latent if config.mla is not None else {}) | {
            "target_layer_ids": list(config.aux_layers),
            "mask_token_id": config.mask_token_id,
            "markov_rank": config.markov_rank,
            "markov_head_type": "vanilla",
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
        }
    nested: dict[str, Any] = {
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.aux_layers),
        "block_size": config.block_size,
    }
    if config.mla is not None:
        nested["attention_mode"] = "mla"
    if config.convolution is not None and config.selector is not None:
        nested |= {
            "conv_kernel_size": config.convolution.kernel_size,
            "conv_group_size": config.convolution.group_size,
            "selector_rank": config.selector.rank,
            "selector_top_k": config.selector.top_k,
        }
    return values | {"dflash_config": nested}


def block_checkpoint(drafter_folder: Path, target_folder: Path, vocabulary_folder: Path) -> Checkpoint:
    """The checkpoint of a trained block drafter, in the type that its target's weights are stored in.

    These kinds draft from the whole vocabulary: `vocabulary_folder` is not read. Raises UserError where drafter and
    target do not belong together, or a tensor is missing.
    """
    config = BlockConfig.from_json(read_json(drafter_folder / "drafter.json"))
    facts = read_facts(target_folder)
    check_target({"vocab_size": config.vocab_size, "hidden_size": config.hidden_size}, facts, where=str(drafter_folder))
    dtype = stored_dtype(target_folder)
    raw = read_tensors(drafter_folder / "drafter.safetensors")
    tensors = named_tensors(lambda: BlockDrafter(config), raw, drafter_folder)
    if config.selector is not None and config.selector.codebook == "projected":
        tensors = _with_codebooks(config, tensors, target_folder)
    tensors = _renamed(tensors, _file_names(config))
    if config.mla is not None:
        tensors[EMBEDDING] = load_embedding(target_folder, DTYPES[dtype])
    out = {name: tensor.to(DTYPES[dtype]).contiguous() for name, tensor in tensors.items()}
    values = engine_config(config, facts, dtype)
    return Checkpoint(values, out, block_card(values, config.kind, facts, validation_numbers(drafter_folder)))


def _with_codebooks(config: BlockConfig, tensors: Mapping[str, Tensor], target_folder: Path) -> dict[str, Tensor]:
    """Projections of the selector replaced by the tables that they make of the target's embedding and head."""
    assert config.selector is not None
    prefix = "candidate_selector."
    selector = CandidateSelector(config.vocab_size, config.hidden_size, config.selector.rank, "projected")
    selector.load_state_dict({n.removeprefix(prefix): t.float() for n, t in tensors.items() if n.startswith(prefix)})
    frozen = Tables(load_embedding(target_folder, torch.float32), load_head(target_folder, torch.float32).head_weight)
    predecessor, successor = selector.codebooks(frozen)
    projections = tuple(f"{prefix}{side}_projection.weight" for side in ("predecessor", "successor"))
    kept = {name: tensor for name, tensor in tensors.items() if name not in projections}
    return kept | {f"{prefix}predecessor_codebook": predecessor, f"{prefix}successor_codebook": successor}


def load_blocks(folder: Path, dtype: str, target: TargetFacts | None = None) -> BlockDrafter:
    """The drafter of an exported folder in `dtype`.

    With `target` given, a drafter of another target is refused by name. Raises UserError for missing, extra or
    misshapen tensors, and for forms that this project does not compute.
    """
    values, where = read_json(folder / CONFIG), str(folder / CONFIG)
    config = loaded_config(values, where)
    if target is not None:
        check_target(values, target, where=str(folder))
    names = {stored: own for own, stored in _file_names(config).items()}
    tensors = _renamed(read_tensors(folder / WEIGHTS), names)
    tensors.pop(EMBEDDING, None)
    raw = named_tensors(lambda: BlockDrafter(config), tensors, folder)
    drafter = BlockDrafter(config).to(DTYPES[dtype])
    drafter.load_state_dict({name: tensor.to(DTYPES[dtype]) for name, tensor in raw.items()})
    drafter.eval().requires_grad_(False)
    return drafter


def stored_embedding(folder: Path) -> Tensor | None:
    """[V, H] the embedding that an exported folder holds; None where engines take the target's."""
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        return file.get_tensor(EMBEDDING) if EMBEDDING in file.keys() else None


def loaded_config(values: Mapping[str, Any], where: str = CONFIG) -> BlockConfig:
    """The drafter's shape from an exported `config.json`."""
    kind = kind_of_export(values, where).name
    nested = values.get("dflash_config") or values
    own = values.get("torchspec") or {}
    for name, computed in _COMPUTED.items():
        given = nested.get(name, values.get(name))
        if given is not None and given not in computed:
            raise UserError(
                f"{where}: {name} is {given!r}, a form of {kind} that this project does not compute; serve it in vLLM."
            )
    latent = values["architectures"][0] == "K3DSparkModel" or nested.get("attention_mode") == "mla"
    try:
        mla = MLAConfig(**{name: values[name] for name in MLA_SIZES}) if latent else None
        heads = values["num_attention_heads"]
        return BlockConfig(
            kind=kind,
            hidden_size=values["hidden_size"],
            num_heads=heads,
            num_kv_heads=values["num_key_value_heads"] if mla is None else heads,
            head_dim=values["head_dim"] if mla is None else mla.qk_head_dim,
            intermediate_size=values["intermediate_size"],
            vocab_size=values["vocab_size"],
            aux_layers=tuple(nested["target_layer_ids"]),
            block_size=values["block_size"],
            mask_token_id=nested["mask_token_id"],
            layer_types=tuple(values.get("layer_types") or (FULL,) * values["num_hidden_layers"]),
            sliding_window=values.get("sliding_window"),
            is_causal=values.get("is_causal", nested.get("causal")),
            rms_norm_eps=values["rms_norm_eps"],
            rope=hub_rope(values, where=where),
            max_position_embeddings=values["max_position_embeddings"],
            convolution=(
                ConvolutionConfig(nested["conv_kernel_size"], nested["conv_group_size"]) if kind == "dflash2" else None
            ),
            selector=(
                SelectorConfig(nested["selector_rank"], nested["selector_top_k"], "free") if kind == "dflash2" else None
            ),
            markov_rank=nested["markov_rank"] if kind == "dspark" else None,
            mla=mla,
            fc_norm=bool(values.get("fc_norm") or nested.get("fc_norm")),
            confidence_temperatures=tuple(own["confidence_temperatures"]) if "confidence_temperatures" in own else None,
        )
    except KeyError as error:
        raise UserError(f"{where}: the key {error.args[0]} is missing; export the drafter again.") from None
