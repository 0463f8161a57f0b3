"""A real training step in a process of its own: its memory peak by tokens and vocabulary, and samples of 32k tokens."""

from __future__ import annotations

import math

import pytest

from benchmarks.training_memory import GRID, LONG, Case, in_a_process


def test_the_peak_grows_with_tokens_and_with_the_vocabulary_but_not_with_their_product() -> None:
    """A dense implementation holds a score for each taught row and token: `logits_mb`, the product. Of what that grows
    by from the small corner to the large one beyond both edges, the peak may show a quarter at most."""
    found = [in_a_process(case) for case in GRID]
    (small, wide), (long, both) = found[:2], found[2:]

    def product(key: str) -> float:
        return (both[key] - long[key]) - (wide[key] - small[key])

    assert product("logits_mb") > 1500
    assert product("peak_mb") < product("logits_mb") / 4
    assert long["peak_mb"] < 4.5 * small["peak_mb"]  # four times the tokens


@pytest.mark.parametrize("case", LONG, ids=lambda case: case.kind)
def test_a_sample_of_32k_tokens_trains(case: Case) -> None:
    found = in_a_process(case)
    assert math.isfinite(found["loss"]) and 0 < found["norm"] < math.inf
    assert found["rows"] > 400
    assert found["peak_mb"] < 6000
