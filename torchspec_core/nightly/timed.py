"""A stage's body between two runs of a fixed piece of work, so that its speed can be told as a ratio. Runs in a child.

A night on a busy machine must not look like a slow commit. The yardstick is torch's own matrix product of the sizes
that a small drafter has; it slows down with the machine, but not with our code. `params.timed` names the body.
"""

from __future__ import annotations

import dataclasses
import json
import time

import torch

from torchspec_core.nightly.measure import fast
from torchspec_core.stages.child import load_function
from torchspec_core.stages.job import Job
from torchspec_core.targets.engine import set_threads

YARDSTICK = "yardstick.json"
_SECONDS, _ROWS, _WIDTH = 1.5, 1024, 1024


def products_per_second() -> float:
    """Fast-quartile rate of a bf16 [1024, 1024] x [1024, 1024] product and its two gradients."""
    x = torch.randn(_ROWS, _WIDTH, dtype=torch.bfloat16)
    w = torch.randn(_WIDTH, _WIDTH, dtype=torch.bfloat16, requires_grad=True)
    rates, end = [], time.monotonic() + _SECONDS
    while time.monotonic() < end:
        started = time.perf_counter()
        (x @ w).sum().backward()
        rates.append(1.0 / (time.perf_counter() - started))
        w.grad = None
    return fast(rates)


def build(job: Job) -> None:
    """Run the named body; `scratch/yardstick/yardstick.json` has the faster of the two rates around it."""
    params = {name: value for name, value in job.params.items() if name != "timed"}
    set_threads(job.runtime["run"]["threads"])
    before = products_per_second()
    load_function(job.params["timed"]["function"])(dataclasses.replace(job, params=params))
    rate = max(before, products_per_second())
    (job.workspace.scratch("yardstick") / YARDSTICK).write_text(json.dumps({"products_per_second": rate}))
