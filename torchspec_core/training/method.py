"""What a drafter kind brings to training: its module, its index of a batch, its objective, its validation.

`Setup` goes in, `Method` comes out; the stage and the loop know nothing else of a kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from torchspec_core.objectives.result import LossResult
from torchspec_core.targets.engine import TargetHead
from torchspec_core.targets.facts import TargetFacts
from torchspec_core.training.batch import IndexBuilder, PackedBatch

Objective = Callable[[Any, PackedBatch], LossResult]


class DrafterConfig(Protocol):
    """A drafter's shape."""

    def to_json(self) -> dict[str, Any]:
        """The configuration as JSON types."""
        ...


@dataclass(frozen=True)
class Setup:
    """Everything a kind may read.

    Attributes:
        drafter, training: identity parts of the recipe's sections.
        facts: of the target.
        aux_layers: canonical ids of the captured layers that enter the drafter.
        embedding: [V, H_t] the target's, in the compute type.
        head: the target's final norm and whole head, in the compute type.
        kept: [V_d] int64, target ids of the draft vocabulary, ascending.
    """

    drafter: Mapping[str, Any]
    training: Mapping[str, Any]
    seed: int
    facts: TargetFacts
    aux_layers: tuple[int, ...]
    embedding: Tensor
    head: TargetHead
    kept: Tensor


@dataclass(frozen=True)
class Method:
    """A kind under one recipe.

    Attributes:
        config: the drafter's shape.
        drafter: fp32, initialised.
        index: makes the kind's index of a packed batch.
        objective: loss of a batch.
        validation_index: the same for validation, where it differs.
        validate: flat metrics of some batches; has `acc_0` and `estimated_acceptance_length`.
        calibrate: after training, what some batches add to the drafter's shape, and flat metrics of that.
    """

    config: DrafterConfig
    drafter: nn.Module
    index: IndexBuilder
    objective: Objective
    validate: Callable[[Any, Sequence[PackedBatch]], dict[str, float]]
    validation_index: IndexBuilder | None = None
    calibrate: Callable[[Any, Sequence[PackedBatch]], tuple[DrafterConfig, dict[str, float]]] | None = None
