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
        latent: the one that is written for multi-latent attention.
        training: (training.method.Setup) -> training.method.Method.
        checkpoint: (drafter folder, target folder, vocabulary folder) -> export.checkpoint.Checkpoint.
        objective: fields of the recipe's `training` section that only it and kinds that name them too read.
        blocks: drafts a block in one pass (mask token, block size), not a chain.
        first_slot: the anchor's slot of a block predicts too.
        latent_forms: what the engine's class for multi-latent attention leaves out, as `unread` words it.
        drafts: (export folder, dtype, TargetFacts) -> evaluation.drafts.Opened.
        exported: (export folder, dtype, TargetFacts) -> the drafter's module, which has its shape as `config`.
    """

    name: str
    method: str
    architectures: tuple[str, ...]
    latent: str
    training: str
    checkpoint: str
    drafts: str
    exported: str
    objective: frozenset[str]
    blocks: bool = False
    first_slot: bool = False
    latent_forms: frozenset[str] = frozenset()

    def predictions(self, block_size: int) -> int:
        """Tokens that a block of `block_size` slots drafts."""
        return block_size if self.first_slot else block_size - 1

    def unread(self, *, full_q: bool, sliding: bool, causal: bool, fc_norm: bool) -> str | None:
        """What to change, by recipe key, because the engine's class for multi-latent attention would not compute it;
        None if it reads everything.

        Args:
            full_q: the query projection has no low rank.
            sliding, causal: some layer is.
            fc_norm: a norm stands before the projection of each captured state.
        """
        for name, asked, remedy in (
            ("full_q", full_q, "set drafter.q_lora_rank"),
            ("sliding", sliding, "leave out drafter.layer_types or make all layers full_attention"),
            ("causal", causal, "leave out drafter.is_causal or set it to false"),
            ("fc_norm", fc_norm, "set drafter.fc_norm=false"),
        ):
            if asked and name in self.latent_forms:
                return (
                    f"drafter.attention=mla: {self.latent}, the engine's class for such a {self.name}, does not "
                    f"compute what the recipe asks: {remedy}"
                )
        return None

    def part(self, name: str) -> Any:
        """The function behind `training`, `checkpoint`, `drafts` or `exported`."""
        module, function = getattr(self, name).split(":")
        return getattr(importlib.import_module(module), function)


_TEXT = frozenset({"block_weighting", "dpace_alpha", "dflash_l1_weight"})


def _block_kind(
    name: str, method: str, architectures: tuple[str, ...], objective: frozenset[str], **more: Any
) -> Kind:
    return Kind(
        name,
        method,
        architectures,
        architectures[-1],
        "torchspec_core.training.dflash:block_method",
        "torchspec_core.export.dflash:block_checkpoint",
        "torchspec_core.evaluation.drafts:open_blocks",
        "torchspec_core.export.dflash:load_blocks",
        objective,
        blocks=True,
        **more,
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
            "Eagle3DeepseekV2ForCausalLM",
            "torchspec_core.training.eagle3:eagle3_method",
            "torchspec_core.export.checkpoint:eagle3_checkpoint",
            "torchspec_core.evaluation.drafts:open_eagle3",
            "torchspec_core.export.checkpoint:load_eagle3",
            frozenset({"loss", "lk_eta"}),
        ),
        _block_kind("dflash", "dflash", ("DFlashDraftModel",), _TEXT),
        _block_kind(
            "dflash2", "dflash", ("DFlash2DraftModel",), _TEXT | {"selector_weight", "selector_stop_gradient"}
        ),
        _block_kind(
            "dspark",
            "dspark",
            ("Qwen3DSparkModel", "K3DSparkModel"),
            frozenset({"cross_entropy_weight", "l1_weight", "confidence_weight", "confidence_stop_gradient"}),
            first_slot=True,
            latent_forms=frozenset({"full_q", "sliding", "causal", "fc_norm"}),
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


def unserved(config: Mapping[str, Any], latent_target: bool = False) -> str | None:
    """Why vLLM 0.32 cannot serve the drafter of this exported `config.json`; None if it can.

    Args:
        latent_target: the target has multi-latent attention too, as none that this project trains for has
            (`targets.facts.SUPPORTED_ARCHITECTURES`): the engine gives drafter and target one kind of cache.
    """
    if (config.get("dflash_config") or {}).get("attention_mode") == "mla":
        return "vLLM 0.32 has no DFlash with multi-latent attention"
    if config.get("fc_norm") and kind_of_export(config, "config.json").blocks:
        return "vLLM 0.32 has no norm before fc (fc_norm) in a drafter of blocks"
    if "kv_lora_rank" in config and not latent_target:
        architecture = (config.get("torchspec") or {}).get("target_architecture", "of another kind")
        return (
            f"the drafter has multi-latent attention and the target ({architecture}) has not: vLLM serves such a "
            "drafter with a multi-latent target only"
        )
    return None
