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
from torchspec_core.drafters.layers import rms_norm
from torchspec_core.drafters.slots import Tables
from torchspec_core.errors import UserError
from torchspec_core.objectives.blocks import BlockIndex, block_index, sample_anchors
from torchspec_core.objectives.dflash import BlockTeacher, BlockWeights, block_embeds, block_loss
from torchspec_core.objectives.result import LossResult
from torchspec_core.targets.facts import TargetFacts
from torchspec_core.training.batch import WIDTH_MULTIPLE, IndexBuilder, PackedBatch
from torchspec_core.training.method import Method, Setup

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
    return BlockConfig(
        kind=kind,
        hidden_size=facts.hidden_size,
        num_heads=size("num_heads"),
        num_kv_heads=size("num_kv_heads"),
        head_dim=size("head_dim"),
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


def block_builder(config: BlockConfig, anchors: int, gamma: float, seed: int) -> IndexBuilder:
    """Indices of block drafting with at most `anchors` anchors a sample, drawn anew in each epoch."""

    def build(
        lengths: Sequence[int], mask: np.ndarray, keys: Sequence[str], epoch: int, row_multiple: int
    ) -> BlockIndex:
        ends = np.cumsum(lengths)
        chosen = [
            sample_anchors(mask[end - length : end], anchors, seed, epoch, key)
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


@torch.no_grad()
def validate_blocks(drafter: BlockDrafter, teacher: BlockTeacher, batches: Sequence[PackedBatch]) -> dict[str, float]:
    """Flat metrics of greedy blocks from true anchors, on the path that the drafter would really take.

    `acc_n`: prediction n is the target's most likely token after the true text. `slot_n`: it and all before it are.
    `estimated_acceptance_length` (an estimate: later targets read the text, not the drafts) is 1 + the sum of slots.
    """
    config = drafter.config
    parts = []
    for batch in batches:
        index: BlockIndex = batch.index
        embeds = block_embeds(
            teacher.tables.embedding, batch.ids, index.anchor, config.block_size, config.mask_token_id
        )
        hidden = drafter(batch.aux, embeds, index.layout)
        previous = batch.ids.index_select(0, index.anchor)
        drafted = torch.empty(hidden.shape[:2], dtype=torch.int64)
        for place in range(config.predictions):
            chosen = []
            for states, before in zip(hidden[:, place].split(_CHUNK), previous.split(_CHUNK), strict=True):
                scores, ids = drafter.scores(states, before, teacher.tables)
                best = scores.argmax(dim=-1)
                chosen.append(best if ids is None else ids.gather(1, best.unsqueeze(1)).squeeze(1))
            drafted[:, place] = previous = torch.cat(chosen)
        taught = index.weight > 0
        states = rms_norm(batch.last.index_select(0, index.previous), teacher.norm, teacher.eps)
        wanted = torch.cat([(part @ teacher.tables.head.T).argmax(dim=-1) for part in states.split(_CHUNK)])
        hit = torch.zeros(drafted.numel(), dtype=torch.bool)
        valid = torch.zeros_like(hit)
        valid[index.slot[taught]] = True
        hit[index.slot[taught]] = drafted.flatten()[index.slot[taught]] == wanted[taught]
        parts.append((hit.view_as(drafted), valid.view_as(drafted)))
    hit, valid = (torch.cat(part) for part in zip(*parts, strict=True))
    count = valid.sum(dim=0).clamp(min=1)
    accuracy = hit.sum(dim=0) / count
    slots = hit.long().cumprod(dim=1).sum(dim=0) / count
    metrics = {f"acc_{n}": value for n, value in enumerate(accuracy.tolist())}
    metrics |= {f"slot_{n}": value for n, value in enumerate(slots.tolist())}
    return {**metrics, "estimated_acceptance_length": 1.0 + float(slots.sum()), "rows": float(valid[:, 0].sum())}


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

    index = block_builder(config, training["anchors"] or _ANCHORS, training["block_gamma"], setup.seed)
    return Method(config, drafter, index, objective, check)
