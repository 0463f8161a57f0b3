"""Exported drafters opened for our decoder: the layers that a kind reads, and its way of drafting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from torchspec_core.decoding.blocks import BlockDrafts
from torchspec_core.decoding.draft import Drafts, Eagle3Chain
from torchspec_core.decoding.target import CachedTarget
from torchspec_core.drafters.slots import Tables
from torchspec_core.errors import UserError
from torchspec_core.export.checkpoint import CONFIG, load_drafter
from torchspec_core.export.dflash import load_blocks, stored_embedding
from torchspec_core.kinds import kind_of_export
from torchspec_core.targets.facts import TargetFacts, read_json


@dataclass(frozen=True)
class Opened:
    """layers: canonical ids whose states the drafter wants. attach: makes it draft for a loaded target."""

    layers: tuple[int, ...]
    attach: Callable[[CachedTarget], Drafts]


def open_export(folder: Path, dtype: str, facts: TargetFacts) -> Opened:
    """The drafter of an export folder, of whatever kind, in `dtype`.

    Raises:
        UserError: the folder holds no drafter of this project, or one of another target.
    """
    kind = kind_of_export(read_json(folder / CONFIG), where=str(folder / CONFIG))
    opened: Opened = kind.part("drafts")(folder, dtype, facts)
    return opened


def open_eagle3(folder: Path, dtype: str, facts: TargetFacts) -> Opened:
    """EAGLE-3, drafting a chain."""
    drafter, d2t, _ = load_drafter(folder, dtype, facts)
    return Opened(drafter.config.aux_layers, lambda target: Eagle3Chain(drafter, target.embedding, d2t))


def open_blocks(folder: Path, dtype: str, facts: TargetFacts) -> Opened:
    """DFlash, DFlash 2 or DSpark, drafting a block."""
    drafter = load_blocks(folder, dtype, facts)

    def attach(target: CachedTarget) -> Drafts:
        embedding, stored = target.embedding.detach(), stored_embedding(folder)
        if stored is not None and not torch.equal(stored.to(embedding.dtype), embedding):
            raise UserError(
                f"{folder} holds an embedding that is not the target's, as if it were trained for another one: use the "
                "drafter's own target, or train one for this target."
            )
        return BlockDrafts(drafter, Tables(embedding, target.head_weight.detach()))

    return Opened(drafter.config.aux_layers, attach)
