"""Warm start: training goes on from an exported drafter instead of from random weights.

Strict: the same kind, shape and target, and every tensor. The draft vocabulary is the exported drafter's too (the
vocabulary stage takes it from there), so no head row ever changes the token that it stands for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from torchspec_core.errors import UserError
from torchspec_core.kinds import Kind, kind_of_export
from torchspec_core.targets.facts import TargetFacts, read_json
from torchspec_core.training.method import DrafterConfig

# What a checkpoint does not keep, because engines need no word of it: its tensors decide.
_NOT_KEPT = ("head", "head_rank", "confidence_temperatures")


def warm_start(drafter: nn.Module, config: DrafterConfig, kind: Kind, folder: Path, facts: TargetFacts) -> None:
    """Give `drafter` (fp32, made by the recipe) the weights of the exported drafter in `folder`.

    Raises:
        UserError: a folder that holds no drafter, or one of another kind, shape or target.
    """
    where = str(folder / "config.json")
    found = kind_of_export(read_json(folder / "config.json"), where)
    if found.name != kind.name:
        raise UserError(
            f"training.start={folder} holds a drafter of kind {found.name}, drafter.kind is {kind.name}: make them "
            "agree or leave training.start out"
        )
    exported: Any = kind.part("exported")(folder, "float32", facts)
    ours, theirs = config.to_json(), exported.config.to_json()
    other = [name for name in ours if name not in _NOT_KEPT and ours[name] != theirs.get(name)]
    if other:
        pairs = ", ".join(f"{name} {theirs.get(name)} there and {ours[name]} here" for name in other)
        raise UserError(
            f"training.start={folder} holds a drafter of another shape than the recipe's: {pairs}; make the recipe's "
            "drafter and capture sections agree or leave training.start out"
        )
    weights, mine = exported.state_dict(), drafter.state_dict()
    missing = sorted(set(mine) - set(weights))
    if missing:
        raise UserError(
            f"training.start={folder}: an exported drafter holds a whole head, but the recipe trains "
            f"{', '.join(missing)}: set drafter.head=own or leave training.start out"
        )
    drafter.load_state_dict({name: weights[name] for name in mine})
