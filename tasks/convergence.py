"""The nightly gate: results of a run against the bands they must stay in."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prefect import task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed


@dataclass(frozen=True)
class Band:
    """The values of one number of `report.json` that count as healthy; both ends belong to the band."""

    name: str
    low: float
    high: float = math.inf


SMOKE_BANDS = (Band("heldout.greedy.acceptance_length", 1.0), Band("heldout.t1.acceptance_length", 1.0))
"""A random target teaches nothing, so these say only that verification ran and gave finite numbers of at least 1."""


def against(numbers: Mapping[str, Any], bands: Sequence[Band]) -> list[dict[str, Any]]:
    """A row for each band: the value, and whether it is inside. A missing or non-finite value is outside."""
    rows = []
    for band in bands:
        value = numbers.get(band.name)
        inside = isinstance(value, (int, float)) and math.isfinite(value) and band.low <= value <= band.high
        rows.append({"name": band.name, "value": value, "low": band.low, "high": str(band.high), "inside": inside})
    return rows


@task(name="convergence", cache_policy=NO_CACHE, persist_result=False)
def convergence(numbers: Mapping[str, Any], bands: Sequence[Band]) -> State[Any]:
    """Fails, and names each number that left its band."""
    rows = against(numbers, bands)
    create_table_artifact(rows, key="nightly-convergence", description="Results against their bands")
    bad = [f"{row['name']} = {row['value']} (band {row['low']} to {row['high']})" for row in rows if not row["inside"]]
    if bad:
        return Failed(message=f"outside the band: {'; '.join(bad)}")
    return Completed(message=f"{len(rows)} numbers inside their bands")
