"""EAGLE-3 as the drafter stage trains it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchspec_core.drafters.eagle3 import Eagle3Config, Eagle3Drafter, init_weights
from torchspec_core.drafters.rope import RopeConfig
from torchspec_core.objectives.alignment import MaskAlignment
from torchspec_core.objectives.eagle3 import Teacher, eagle3_loss
from torchspec_core.objectives.result import LossResult
from torchspec_core.objectives.ttt import TTTIndex, ttt_index
from torchspec_core.targets.engine import TargetHead
from torchspec_core.targets.facts import TargetFacts
from torchspec_core.training.batch import WIDTH_MULTIPLE, IndexBuilder, PackedBatch
from torchspec_core.training.method import Method, Objective, Setup
from torchspec_core.training.validation import validate


def drafter_config(settings: Mapping[str, Any], facts: TargetFacts, aux_layers: Sequence[int]) -> Eagle3Config:
    """The drafter's shape: what the recipe's `drafter` section leaves open is as the target's."""

    def size(name: str) -> int:
        return int(settings[name] if settings[name] is not None else getattr(facts, name))

    return Eagle3Config(
        hidden_size=facts.hidden_size,
        target_hidden_size=facts.hidden_size,
        num_heads=size("num_heads"),
        num_kv_heads=size("num_kv_heads"),
        head_dim=size("head_dim"),
        intermediate_size=size("intermediate_size"),
        vocab_size=facts.vocab_size,
        draft_vocab_size=settings["draft_vocab_size"],
        aux_layers=tuple(aux_layers),
        rms_norm_eps=facts.rms_norm_eps,
        rope=RopeConfig(theta=facts.rope_theta),
        max_position_embeddings=facts.max_position_embeddings,
        norm_before_residual=settings["norm_before_residual"],
    )


def new_drafter(config: Eagle3Config, init: str, seed: int, head: TargetHead, kept: Tensor) -> Eagle3Drafter:
    """An untrained fp32 drafter; `init="target"` copies the target's head rows and final norm."""
    drafter = Eagle3Drafter(config)
    init_weights(drafter, seed)
    if init == "target":
        with torch.no_grad():
            drafter.lm_head.weight.copy_(head.head_weight[kept])
            drafter.norm.weight.copy_(head.norm_weight)
    return drafter


def ttt_builder(depths: int, alignment: MaskAlignment, width_multiple: int = WIDTH_MULTIPLE) -> IndexBuilder:
    """Indices of training-time test, `depths` deep."""

    def build(lengths: Sequence[int], mask: np.ndarray, keys: Sequence[str], epoch: int, row_multiple: int) -> TTTIndex:
        return ttt_index(lengths, mask, depths, alignment, row_multiple, width_multiple)

    return build


def eagle3_objective(teacher: Teacher, depth_decay: float, chunk: int = 1024) -> Objective:
    """EAGLE-3's loss as the loop calls it."""

    def objective(drafter: Eagle3Drafter, batch: PackedBatch) -> LossResult:
        result = eagle3_loss(drafter, teacher, batch.ids, batch.aux, batch.last, batch.index, depth_decay, chunk=chunk)
        return LossResult(result.loss, result.numerator, result.correct, result.count)

    return objective


def eagle3_method(setup: Setup) -> Method:
    """EAGLE-3 under a recipe."""
    head, kept, training = setup.head, setup.kept, setup.training
    config = drafter_config(setup.drafter, setup.facts, setup.aux_layers)
    teacher = Teacher(setup.embedding, head.norm_weight, head.eps, head.head_weight[kept])

    def check(drafter: Eagle3Drafter, batches: Sequence[PackedBatch]) -> dict[str, float]:
        return validate(drafter, teacher, head.head_weight, kept, batches)

    return Method(
        config,
        new_drafter(config, setup.drafter["init"], setup.seed, head, kept),
        ttt_builder(training["ttt_length"], training["mask_alignment"]),
        eagle3_objective(teacher, training["depth_decay"]),
        check,
    )
