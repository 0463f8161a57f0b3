"""What every objective returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class LossResult:
    """Loss of one batch and its additive parts; a *place* is a depth (EAGLE-3) or a slot of a block.

    Attributes:
        loss: scalar that carries the gradient.
        numerator: [D] the loss's term summed over the taught rows of each place, detached.
        count: [D] taught rows, detached.
        extras: measures by name (`acc_0`, ..), each a detached [2]: numerator and denominator.
    """

    loss: Tensor
    numerator: Tensor
    count: Tensor
    extras: Mapping[str, Tensor] = field(default_factory=dict)
