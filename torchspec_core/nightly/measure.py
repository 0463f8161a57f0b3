"""The banded numbers of a subject, out of what its stages left."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

_LAST_SHARE = 4
_TRIVIAL = "baseline.unigram.acceptance_length"


def fast(values: list[float]) -> float:
    """The value that three quarters of `values` are not above: what the machine does when it is left alone."""
    return sorted(values)[(3 * len(values)) // 4]


def metrics_rows(drafter: Path) -> list[dict[str, Any]]:
    """The lines of a drafter folder's `metrics.jsonl`."""
    return [json.loads(line) for line in (drafter / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def trained(drafter: Path) -> dict[str, float]:
    """`loss` (mean over the last quarter of the logged steps) and `accuracy.slot_N` on held-out samples (N from 1)."""
    rows = metrics_rows(drafter)
    last = [float(row["loss"]) for row in rows[-max(1, len(rows) // _LAST_SHARE) :]]
    validation = json.loads((drafter / "validation.json").read_text(encoding="utf-8"))
    slots = {
        f"accuracy.slot_{int(name.removeprefix('acc_')) + 1}": float(value)
        for name, value in validation.items()
        if name.startswith("acc_") and name.removeprefix("acc_").isdigit()
    }
    return {"loss": statistics.fmean(last), **slots}


def accepted(evaluation: Path) -> dict[str, float]:
    """`acceptance` (greedy, held-out prompts, by real verification), `acceptance.t1` (sampled), and
    `acceptance.floor`: what the greedy drafts gain over always drafting the most frequent token."""
    flat = json.loads((evaluation / "evaluation.json").read_text(encoding="utf-8"))
    greedy = float(flat["heldout.greedy.acceptance_length"])
    return {
        "acceptance": greedy,
        "acceptance.t1": float(flat["heldout.t1.acceptance_length"]),
        "acceptance.floor": greedy - float(flat[_TRIVIAL]),
    }
