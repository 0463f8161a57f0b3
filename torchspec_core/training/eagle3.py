"""EAGLE-3 as the drafter stage trains it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from torchspec_core.drafters.eagle3 import Eagle3Config, Eagle3Drafter, FrozenHead, LowRankHead, init_weights
from torchspec_core.objectives.alignment import MaskAlignment
from torchspec_core.objectives.anchors import Anchors
from torchspec_core.objectives.eagle3 import Eagle3Loss, Teacher, eagle3_loss
from torchspec_core.objectives.result import LossResult
from torchspec_core.objectives.ttt import TTTIndex, candidate_rows, ttt_index
from torchspec_core.targets.engine import TargetHead
from torchspec_core.targets.facts import TargetFacts
from torchspec_core.training.batch import WIDTH_MULTIPLE, IndexBuilder, PackedBatch
from torchspec_core.training.method import Method, Objective, Setup
from torchspec_core.training.shape import mla_config
from torchspec_core.training.validation import validate


def drafter_config(settings: Mapping[str, Any], facts: TargetFacts, aux_layers: Sequence[int]) -> Eagle3Config:
    """The drafter's shape: what the recipe's `drafter` section leaves open is as the target's, rotary positions
    always."""

    def size(name: str) -> int:
        return int(settings[name] if settings[name] is not None else getattr(facts, name))

    mla = mla_config(settings)
    heads = size("num_heads")
    return Eagle3Config(
        hidden_size=facts.hidden_size,
        target_hidden_size=facts.hidden_size,
        num_heads=heads,
        num_kv_heads=size("num_kv_heads") if mla is None else heads,
        head_dim=size("head_dim") if mla is None else mla.qk_head_dim,
        intermediate_size=size("intermediate_size"),
        vocab_size=facts.vocab_size,
        draft_vocab_size=settings["draft_vocab_size"],
        aux_layers=tuple(aux_layers),
        rms_norm_eps=facts.rms_norm_eps,
        rope=facts.rope,
        max_position_embeddings=facts.max_position_embeddings,
        norm_before_residual=settings["norm_before_residual"],
        mla=mla,
        norm_before_fc=settings["norm_before_fc"],
        fc_norm=settings["fc_norm"],
        norm_output=settings["norm_output"],
        head=settings["head"],
        head_rank=settings["head_rank"],
    )


def anchor_settings(training: Mapping[str, Any], seed: int) -> Anchors | None:
    """How the recipe's `training` section chooses anchors; None = every row that leads to a loss drafts."""
    if training["anchors"] is None:
        return None
    gap = training["anchor_max_gap"]
    return Anchors(
        training["anchors"],
        training["ttt_length"] if gap is None else gap,
        training["anchor_sampling"] or "strided",
        seed,
    )


def new_drafter(config: Eagle3Config, init: str, seed: int, head: TargetHead, kept: Tensor) -> Eagle3Drafter:
    """An untrained fp32 drafter.

    `init="target"` starts from the target's final norm and head rows; of a low-rank head, from their best
    approximation of that rank. A `target` head is the target's whatever `init` says.
    """
    drafter = Eagle3Drafter(config)
    init_weights(drafter, seed)
    rows = head.head_weight[kept]
    with torch.no_grad():
        if isinstance(drafter.lm_head, FrozenHead):
            drafter.lm_head.weight.copy_(rows)
        elif init == "target" and isinstance(drafter.lm_head, LowRankHead):
            left, values, right = torch.linalg.svd(rows.float(), full_matrices=False)
            rank, root = drafter.lm_head.down.out_features, values.sqrt()
            drafter.lm_head.up.weight.copy_(left[:, :rank] * root[:rank])
            drafter.lm_head.down.weight.copy_(root[:rank, None] * right[:rank])
        elif init == "target" and isinstance(drafter.lm_head, nn.Linear):
            drafter.lm_head.weight.copy_(rows)
        if init == "target":
            drafter.norm.weight.copy_(head.norm_weight)
    return drafter


def ttt_builder(
    depths: int, alignment: MaskAlignment, width_multiple: int = WIDTH_MULTIPLE, anchors: Anchors | None = None
) -> IndexBuilder:
    """Indices of training-time test, `depths` deep; with `anchors`, from the rows that it chooses for each epoch."""

    def build(lengths: Sequence[int], mask: np.ndarray, keys: Sequence[str], epoch: int, row_multiple: int) -> TTTIndex:
        rows = None
        if anchors is not None:
            candidates = candidate_rows(lengths, mask, depths, alignment)[: len(keys)]
            rows = np.concatenate(
                [anchors.choose(places, key, epoch) for places, key in zip(candidates, keys, strict=True)]
            )
        return ttt_index(lengths, mask, depths, alignment, row_multiple, width_multiple, rows)

    return build


def eagle3_objective(teacher: Teacher, loss: Eagle3Loss) -> Objective:
    """EAGLE-3's loss as the loop calls it."""

    def objective(drafter: Eagle3Drafter, batch: PackedBatch) -> LossResult:
        return eagle3_loss(drafter, teacher, batch.ids, batch.aux, batch.last, batch.index, loss)

    return objective


def eagle3_method(setup: Setup) -> Method:
    """EAGLE-3 under a recipe."""
    head, kept, training = setup.head, setup.kept, setup.training
    config = drafter_config(setup.drafter, setup.facts, setup.aux_layers)
    teacher = Teacher(setup.embedding, head.norm_weight, head.eps, head.head_weight[kept], kept)
    loss = Eagle3Loss(training["loss"], training["depth_decay"], training["lk_eta"], training["normalisation"])

    def check(drafter: Eagle3Drafter, batches: Sequence[PackedBatch]) -> dict[str, float]:
        return validate(drafter, teacher, head.head_weight, kept, batches)

    return Method(
        config,
        new_drafter(config, setup.drafter["init"], setup.seed, head, kept),
        ttt_builder(training["ttt_length"], training["mask_alignment"], anchors=anchor_settings(training, setup.seed)),
        eagle3_objective(teacher, loss),
        check,
        ttt_builder(training["ttt_length"], training["mask_alignment"]),
    )
