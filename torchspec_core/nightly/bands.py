"""The bands file: read, derived, written. It is reviewed like code; only `torchspec nightly calibrate` changes it.

For each variant and subject, each banded gate has `mean`, `sd`, `n` of runs with different seeds and the `low` and
`high` that follow: mean ± max(k·sd, least·|mean|). `least` keeps a band from being narrower than what n runs can
tell. Throughput has no upper end (faster is no fault), and its lower end is never below `SLOWEST` of the mean, or a
step twice as slow would pass on a noisy machine. Bands of throughput hold on the machine that they were measured on.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchspec_core.errors import UserError
from torchspec_core.nightly.gates import EXACT, Band
from torchspec_core.stages.disk import write_json

K = 4.0
LEAST = 0.03
SLOWEST = 0.65
THROUGHPUT = "throughput"


@dataclass(frozen=True)
class Bands:
    """The bands of one variant: subject -> gate -> band, and how they were made."""

    made: Mapping[str, Any]
    subjects: Mapping[str, Mapping[str, Band]]


def derive(gate: str, values: Sequence[float]) -> dict[str, float | int | None]:
    """The entry of a gate from its value in each run."""
    mean = statistics.fmean(values)
    sd = statistics.stdev(values) if len(values) > 1 else 0.0
    width = max(K * sd, LEAST * abs(mean))
    low: float = mean - width
    high: float | None = mean + width
    if gate == THROUGHPUT:
        low, high = max(low, SLOWEST * mean), None
    return {"mean": mean, "sd": sd, "n": len(values), "low": low, "high": high}


def derive_all(runs: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, dict[str, Any]]:
    """Subject -> gate -> entry, from runs of subject -> gate -> value; exact gates have no entry."""
    derived: dict[str, dict[str, Any]] = {}
    for subject in runs[0]:
        gates = [gate for gate in runs[0][subject] if gate not in EXACT]
        derived[subject] = {gate: derive(gate, [run[subject][gate] for run in runs]) for gate in gates}
    return derived


def read(path: Path, variant: str) -> Bands:
    """The bands of a variant; raises `UserError` when the file has none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))[variant]
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"{path} holds no bands of the variant {variant!r}: run `torchspec nightly calibrate --variant {variant}` "
            "on a commit that is known to be good"
        ) from error
    subjects = {
        subject: {gate: Band(entry["low"], entry["high"]) for gate, entry in gates.items()}
        for subject, gates in found["bands"].items()
    }
    return Bands(found["made"], subjects)


def write(path: Path, variant: str, made: Mapping[str, Any], derived: Mapping[str, Any]) -> None:
    """Put a variant's bands into the file; subjects that were not calibrated anew keep theirs."""
    whole = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    kept = whole.get(variant, {}).get("bands", {})
    whole[variant] = {"made": dict(made), "bands": {**kept, **derived}}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, whole)
