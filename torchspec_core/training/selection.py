"""Which weights a run ends with, and whether it should go on: the validations so far, remembered across a kill.

The measure is the estimated acceptance length on the held-out samples: every kind reports it, it is pooled over their
supervised rows, and it is what speed depends on. A tie is no improvement, and neither is a value that is not finite.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

MEASURE = "estimated_acceptance_length"


class Selection:
    """The best validation so far.

    Attributes:
        value, step: of the best validation; -inf and 0 before there is one.
        waited: validations since then.
        weights: fp32 weights of the best validation; empty unless `keep`.
    """

    def __init__(self, keep: bool, patience: int | None) -> None:
        """`keep`: hold the best weights; `patience`: validations without improvement that end the run."""
        self.keep, self.patience = keep, patience
        self.value, self.step, self.waited = -math.inf, 0, 0
        self.weights: list[Tensor] = []

    def see(self, step: int, numbers: Mapping[str, float], weights: Sequence[Tensor]) -> None:
        """Take in the validation of `weights` as they are after `step` steps."""
        value = numbers[MEASURE]
        if not (math.isfinite(value) and value > self.value):
            self.waited += 1
            return
        self.value, self.step, self.waited = value, step, 0
        if self.keep:
            self.weights = self.weights or [torch.empty_like(weight) for weight in weights]
            torch._foreach_copy_(self.weights, list(weights))

    @property
    def over(self) -> bool:
        """No validation of the last `patience` was better."""
        return self.patience is not None and self.waited >= self.patience

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds of it."""
        return {"value": self.value, "step": self.step, "waited": self.waited, "weights": self.weights}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`."""
        self.value, self.step, self.waited = state["value"], state["step"], state["waited"]
        self.weights = list(state["weights"])
