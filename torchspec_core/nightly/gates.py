"""Gates: numbers against bands. Pure; a gate that fails carries its name, its value and its band.

Two kinds. An *exact* gate has one right value on every machine (a resumed run ends with the same bits). A *banded* gate
lies inside mean ± k·sd of runs with other seeds (`bands.py`), so a change that is no better and no worse passes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

COMPLETES = "completes"
"""The gate of a subject whose stage failed: it has no numbers."""


@dataclass(frozen=True)
class Band:
    """Values that count as healthy, both ends included; None is an open end."""

    low: float | None = None
    high: float | None = None

    def holds(self, value: float) -> bool:
        """Whether `value` is a finite number inside the band."""
        low = -math.inf if self.low is None else self.low
        high = math.inf if self.high is None else self.high
        return math.isfinite(value) and low <= value <= high

    def __str__(self) -> str:
        if self.high is None:
            return f"at least {self.low:.6g}" if self.low is not None else "any number"
        return f"at most {self.high:.6g}" if self.low is None else f"{self.low:.6g} to {self.high:.6g}"


EXACT: Mapping[str, Band] = {
    "mask": Band(1.0, 1.0),
    "layers": Band(None, 0.02),
    "resume": Band(0.0, 0.0),
    "resume.continued": Band(1.0, 1.0),
    "acceptance.floor": Band(0.0, None),
}
"""Gates that need no calibration.

mask: share of samples whose supervised tokens are exactly those that the target emitted. layers: largest relative
distance of stored states to the target's own (bf16 passes of unlike shape differ by less than 0.01; a neighbouring
layer by far more). resume: largest difference between the weights of a run that was killed and one that was not.
resume.continued: whether the killed run went on at its checkpoint. acceptance.floor: accepted drafts a step above
those of always drafting the most frequent token, on the same texts.
"""


@dataclass(frozen=True)
class Verdict:
    """One gate of one subject. value: None when there is none; band: in words; note: why it could not be judged, or
    what went wrong."""

    subject: str
    gate: str
    value: float | None
    low: float | None
    high: float | None
    ok: bool
    note: str = ""

    def __str__(self) -> str:
        value = "no value" if self.value is None else f"{self.value:.6g}"
        said = f"{self.subject}: {self.gate} = {value}, band {Band(self.low, self.high)}"
        return f"{said} ({self.note})" if self.note else said

    def to_json(self) -> dict[str, Any]:
        """JSON types."""
        return asdict(self)


def judge(subject: str, numbers: Mapping[str, float], bands: Mapping[str, Band]) -> list[Verdict]:
    """A verdict for each gate that applies: every band, every exact gate and every number is looked at.

    A band without a number is a failure (something stopped being measured); a number without a band is one too (the
    bands were not derived for it), so neither side can shrink unnoticed.
    """
    verdicts = []
    for gate in dict.fromkeys([*EXACT, *bands, *numbers]):
        value = numbers.get(gate)
        band = EXACT.get(gate) or bands.get(gate)
        if value is None:
            assert band is not None
            verdicts.append(Verdict(subject, gate, None, band.low, band.high, False, "it was not measured"))
        elif band is None:
            note = "it has no band: run `torchspec nightly calibrate`"
            verdicts.append(Verdict(subject, gate, value, None, None, False, note))
        else:
            verdicts.append(Verdict(subject, gate, value, band.low, band.high, band.holds(value)))
    return verdicts


def failed_to_complete(subject: str, why: str) -> list[Verdict]:
    """The verdict of a subject whose pipeline ended early."""
    return [Verdict(subject, COMPLETES, None, None, None, False, why)]
