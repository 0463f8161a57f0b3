"""The two sides of the anchored benchmark compute the same thing: outputs and gradients, against the boolean mask."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import anchored_eagle
from benchmarks.anchored_eagle import SCALE, Inputs, anchored_attention, main, make_inputs, merged_attention
from torchspec_core.drafters.ttt import DenseTTT
from torchspec_core.objectives.ttt import ttt_index

LENGTH = 24


def by_the_mask(inputs: Inputs) -> list[torch.Tensor]:
    index = ttt_index([LENGTH], np.ones(LENGTH, dtype=bool), len(inputs.q), rows=np.arange(LENGTH))
    form = DenseTTT(index.layout)
    context = form.context(inputs.k, inputs.v)
    return [form.attend(q, context, inputs.own[:depth], SCALE) for depth, q in enumerate(inputs.q)]


def results(outs: list[torch.Tensor], inputs: Inputs, rows: np.ndarray) -> list[torch.Tensor]:
    """Outputs of these rows, then the gradients of their squares."""
    picked = [out if len(out) == len(rows) else out[rows] for out in outs]
    gradients = torch.autograd.grad(torch.stack([out.square().sum() for out in picked]).sum(), inputs.leaves)
    sides = [g if len(g) != LENGTH or i < 2 else g[rows] for i, g in enumerate(gradients)]
    return [*picked, *sides]


@pytest.mark.parametrize("rows", [np.arange(LENGTH), np.array([3, 4, 9, 20])], ids=["all", "some"])
def test_both_sides_are_the_definition(rows: np.ndarray) -> None:
    every = make_inputs(LENGTH, torch.float64)
    some = every.pick(rows)
    expected = results(by_the_mask(every), every, rows)
    for mine in (results(merged_attention(every), every, rows), results(anchored_attention(some, rows), some, rows)):
        for a, b in zip(expected, mine, strict=True):
            torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-10)


def test_the_script_writes_flat_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anchored_eagle, "QUICK", (64, 96))
    monkeypatch.setattr(anchored_eagle, "MOST_ROUNDS", 2)
    assert main(["--json", str(tmp_path / "out.json"), "--quick"]) == 0
    numbers = json.loads((tmp_path / "out.json").read_text())
    for length in (64, 96):
        for name in ("speedup", "memory_ratio", "seconds.dense", "seconds.anchored", "bytes.dense", "bytes.anchored"):
            assert numbers[f"{name}.{length}"] > 0
    assert not any(isinstance(value, (dict, list)) for value in numbers.values())
