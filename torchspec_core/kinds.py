"""The one list of drafter kinds: where each kind's training, checkpoint and drafting live.

Stages ask this list by the recipe's `drafter.kind` or by an exported folder and never branch on a kind. A new kind is
one more entry; its parts are named as `module:function` and imported when they are first needed, so that the list
itself costs nothing to import.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchspec_core.errors import UserError


@dataclass(frozen=True)
class Kind:
    """One kind of drafter.

    Attributes:
        name: the recipe's word.
        method: `method` of vLLM's speculative config.
        architectures: `architectures[0]` of its exported config, the one that is written first.
        training: (training.method.Setup) -> training.method.Method.
        checkpoint: (drafter folder, target folder, vocabulary folder) -> export.checkpoint.Checkpoint.
        objective: fields of the recipe's `training` section that only it and kinds that name them too read.
        blocks: drafts a block in one pass (mask token, block size), not a chain.
        drafts: (export folder, dtype, TargetFacts) -> evaluation.drafts.Opened.
    """

    name: str
    method: str
    architectures: tuple[str, ...]
    training: str
    checkpoint: str
    drafts: str
    objective: frozenset[str]
    blocks: bool = False

    def part(self, name: str) -> Any:
        """The function behind `training`, `checkpoint` or `drafts`."""
        module, function = getattr(self, name).split(":")
        return getattr(importlib.import_module(module), function)


_TEXT = frozenset({"block_weighting", "dpace_alpha", "dflash_l1_weight"})


def _block_kind(name: str, method: str, architecture: str, objective: frozenset[str]) -> Kind:
    return Kind(
        name,
        method,
        (architecture,),
        "torchspec_core.training.dflash:block_method",
        "torchspec_core.export.dflash:block_checkpoint",
        "torchspec_core.evaluation.drafts:open_blocks",
        objective,
        blocks=True,
    )


KINDS: Mapping[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind(
            "eagle3",
            "eagle3",
            (
                "LlamaForCausalLMEagle3",
                "Eagle3LlamaForCausalLM",
                "Eagle3DeepseekV2ForCausalLM",
                "Eagle3DeepseekV3ForCausalLM",
            ),
            "torchspec_core.training.eagle3:eagle3_method",
            "torchspec_core.export.checkpoint:eagle3_checkpoint",
            "torchspec_core.evaluation.drafts:open_eagle3",
            frozenset({"loss", "lk_eta"}),
        ),
        _block_kind("dflash", "dflash", "DFlashDraftModel", _TEXT),
        _block_kind("dflash2", "dflash", "DFlash2DraftModel", _TEXT | {"selector_weight", "selector_stop_gradient"}),
        _block_kind(
            "dspark",
            "dspark",
            "Qwen3DSparkModel",
            frozenset({"cross_entropy_weight", "l1_weight", "confidence_weight", "confidence_stop_gradient"}),
        ),
    )
}
DEFAULT = "eagle3"


def kind_of_drafter(config: Mapping[str, Any]) -> Kind:
    """The kind of a trained drafter by its `drafter.json`; EAGLE-3's does not name one."""
    return KINDS[config.get("kind", DEFAULT)]


def kind_of_export(config: Mapping[str, Any], where: str) -> Kind:
    """The kind of an exported folder by its `config.json`.

    Raises:
        UserError: an architecture that no kind writes.
    """
    architecture = str((config.get("architectures") or ["(none)"])[0])
    for kind in KINDS.values():
        if architecture in kind.architectures:
            return kind
    known = ", ".join(kind.architectures[0] for kind in KINDS.values())
    raise UserError(
        f"{where}: {architecture} is no drafter of this project ({known}); serve it in an engine that knows it."
    )
