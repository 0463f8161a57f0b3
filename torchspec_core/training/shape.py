"""Parts of a drafter's shape that all kinds read from the recipe in the same way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchspec_core.drafters.mla import MLAConfig
from torchspec_core.errors import UserError

_WIDTHS = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def mla_config(settings: Mapping[str, Any]) -> MLAConfig | None:
    """Widths of multi-latent attention from the recipe's `drafter` section; None for grouped-query attention."""
    if settings["attention"] != "mla":
        return None
    for name in ("num_kv_heads", "head_dim"):
        if settings[name] is not None:
            raise UserError(
                f"drafter.{name} has no meaning with drafter.attention: mla; leave it out and set the widths by "
                "kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim and v_head_dim"
            )
    return MLAConfig(**{name: settings[name] for name in _WIDTHS})
