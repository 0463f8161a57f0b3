"""DFlash, DFlash 2 and DSpark as the drafter stage trains them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from torchspec_core.drafters.dflash import (
    FULL,
    BlockConfig,
    BlockDrafter,
    ConvolutionConfig,
    SelectorConfig,
    init_blocks,
)
from torchspec_core.drafters.slots import Tables
from torchspec_core.errors import UserError
from torchspec_core.objectives.anchors import Anchors
from torchspec_core.objectives.blocks import BlockIndex, block_index, candidate_anchors
from torchspec_core.objectives.dflash import BlockTeacher, BlockWeights, block_loss
from torchspec_core.objectives.result import LossResult
from torchspec_core.targets.facts import TargetFacts
from torchspec_core.training.batch import WIDTH_MULTIPLE, IndexBuilder, PackedBatch
from torchspec_core.training.block_validation import calibrate, validate_blocks
from torchspec_core.training.method import Method, Setup
from torchspec_core.training.shape import mla_config

_BLOCK_MULTIPLE = 8
_CHUNK = 512
_ANCHORS = 64  # blocks of a sample where the recipe says nothing


def block_config(settings: Mapping[str, Any], facts: TargetFacts, aux_layers: Sequence[int]) -> BlockConfig:
    """The drafter's shape from the recipe's `drafter` section; what it leaves open is as the target's.

    Raises:
        UserError: sizes, layers or a mask token that do not fit, by their recipe keys.
    """

    def size(name: str) -> int:
        return int(settings[name] if settings[name] is not None else getattr(facts, name))

    kind, layers = settings["kind"], settings["num_layers"]
    types = tuple(settings["layer_types"] or (FULL,) * layers)
    if len(types) != layers:
        raise UserError(f"drafter.layer_types names {len(types)} layers, drafter.num_layers says {layers}")
    if settings["mask_token_id"] is None:
        raise UserError(
            f"drafter.kind {kind} needs drafter.mask_token_id: an id from 0 to {facts.vocab_size - 1} that the "
            "target's texts never use"
        )
    mla, heads = mla_config(settings), size("num_heads")
    return BlockConfig(
        kind=kind,
        hidden_size=facts.hidden_size,
        num_heads=heads,
        num_kv_heads=size("num_kv_heads") if mla is None else heads,
        head_dim=size("head_dim") if mla is None else mla.qk_head_dim,
        intermediate_size=size("intermediate_size"),
        vocab_size=facts.vocab_size,
        aux_layers=tuple(aux_layers),
        block_size=settings["block_size"],
        mask_token_id=settings["mask_token_id"],
        layer_types=types,
        sliding_window=settings["sliding_window"],
        is_causal=settings["is_causal"],
        rms_norm_eps=facts.rms_norm_eps,
        rope=facts.rope,
        max_position_embeddings=facts.max_position_embeddings,
        mla=mla,
        fc_norm=settings["fc_norm"],
        **_heads(kind, settings),
    )


def _heads(kind: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    if kind == "dflash2":
        return {
            "convolution": ConvolutionConfig(settings["conv_kernel_size"], settings["conv_group_size"]),
            "selector": SelectorConfig(
                settings["selector_rank"], settings["selector_top_k"], settings["selector_codebook"]
            ),
        }
    return {"markov_rank": settings["markov_rank"]} if kind == "dspark" else {}


def block_builder(config: BlockConfig, anchors: Anchors, gamma: float) -> IndexBuilder:
    """Indices of block drafting from the anchors of each sample, chosen anew in each epoch."""

    def build(
        lengths: Sequence[int], mask: np.ndarray, keys: Sequence[str], epoch: int, row_multiple: int
    ) -> BlockIndex:
        ends = np.cumsum(lengths)
        chosen = [
            anchors.choose(candidate_anchors(mask[end - length : end]), key, epoch)
            for length, end, key in zip(lengths, ends, keys, strict=False)
        ]
        return block_index(
            lengths,
            mask,
            chosen,
            config.block_size,
            config.predictions,
            gamma,
            row_multiple,
            _BLOCK_MULTIPLE,
            WIDTH_MULTIPLE,
        )

    return build


def block_method(setup: Setup) -> Method:
    """A block drafter under a recipe."""
    training = setup.training
    config = block_config(setup.drafter, setup.facts, setup.aux_layers)
    drafter = BlockDrafter(config)
    init_blocks(drafter, setup.seed)
    if setup.drafter["init"] == "target":
        with torch.no_grad():
            drafter.norm.weight.copy_(setup.head.norm_weight)
    teacher = BlockTeacher(Tables(setup.embedding, setup.head.head_weight), setup.head.norm_weight, setup.head.eps)
    weights = BlockWeights(
        distance=training["dflash_l1_weight"],
        dpace_alpha=training["dpace_alpha"] if training["block_weighting"] == "dpace" else None,
        normalisation=training["normalisation"],
        selector=training["selector_weight"],
        selector_stop_gradient=training["selector_stop_gradient"],
        cross_entropy=training["cross_entropy_weight"],
        l1=training["l1_weight"],
        confidence=training["confidence_weight"],
        confidence_stop_gradient=training["confidence_stop_gradient"],
    )

    def objective(model: BlockDrafter, batch: PackedBatch) -> LossResult:
        return block_loss(model, teacher, batch.ids, batch.aux, batch.last, batch.index, weights, _CHUNK)

    def check(model: BlockDrafter, batches: Sequence[PackedBatch]) -> dict[str, float]:
        return validate_blocks(model, teacher, batches)

    gap = config.block_size if training["anchor_max_gap"] is None else training["anchor_max_gap"]
    anchors = Anchors(training["anchors"] or _ANCHORS, gap, training["anchor_sampling"] or "uniform", setup.seed)

    def judge(model: BlockDrafter, batches: Sequence[PackedBatch]) -> tuple[BlockConfig, dict[str, float]]:
        return calibrate(model, teacher, batches)

    index = block_builder(config, anchors, training["block_gamma"])
    return Method(config, drafter, index, objective, check, calibrate=judge if config.markov_rank is not None else None)
