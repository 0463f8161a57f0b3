"""Acceptance statistics from verification steps, and the trivial drafters replayed along a greedy text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Acceptance:
    """Acceptance over the steps of several prompts.

    length: 1 + accepted drafts per step, the bonus token included. stderr: its standard error, with the prompts as
    clusters (steps of one prompt are alike). slots: for k = 1..K, the share of steps in which draft k was accepted
    (unconditional, so length = 1 + sum of slots). drafts: steps; draft_tokens = K * drafts were proposed.
    """

    length: float
    stderr: float
    slots: tuple[float, ...]
    drafts: int

    def flat(self, prefix: str) -> dict[str, float | int]:
        """The numbers under `<prefix>.acceptance_length` and so on."""
        rates = {f"{prefix}.slot_{k}": rate for k, rate in enumerate(self.slots, start=1)}
        return {
            f"{prefix}.acceptance_length": self.length,
            f"{prefix}.acceptance_length_stderr": self.stderr,
            f"{prefix}.drafts": self.drafts,
            **rates,
        }


def acceptance(prompts: Sequence[Sequence[int]], k: int) -> Acceptance:
    """Statistics of `prompts`: for each, the accepted drafts (0..k) of each step.

    The standard error is that of a ratio estimator over clusters: sqrt(n/(n-1) * sum (a_i - r d_i)^2) / sum d_i, with
    a_i accepted and d_i steps of prompt i; 0 where fewer than two prompts took a step.
    """
    taken = [steps for steps in prompts if len(steps)]
    drafts = sum(len(steps) for steps in taken)
    if drafts == 0:
        return Acceptance(1.0, 0.0, (0.0,) * k, 0)
    rate = sum(sum(steps) for steps in taken) / drafts
    clusters = len(taken)
    spread = sum((sum(steps) - rate * len(steps)) ** 2 for steps in taken)
    stderr = math.sqrt(spread * clusters / (clusters - 1)) / drafts if clusters > 1 else 0.0
    slots = tuple(sum(accepted >= slot for steps in taken for accepted in steps) / drafts for slot in range(1, k + 1))
    return Acceptance(1.0 + rate, stderr, slots, drafts)


def engine_steps(tokens: int, steps: Sequence[int], after_end: int, limit: int) -> list[int]:
    """The steps an engine would count for a text of `tokens` new tokens cut at `limit` of them.

    Engines count whole steps, drafts accepted after the end of the sequence included, until the text is long enough.
    """
    written, counted = 1, []  # the first token comes from prefill
    for number, accepted in enumerate(steps):
        if written >= min(limit, tokens):
            break
        counted.append(accepted + (after_end if number == len(steps) - 1 else 0))
        written += accepted + 1
    return counted


def replay(tokens: Sequence[int], ended: bool, table: Sequence[int], k: int) -> list[int]:
    """The steps that a drafter with next-token `table` would take through the greedy text `tokens` of the target.

    Greedy verification is exact, so the text is what the target would have answered to any drafter: nothing needs to be
    computed again. A step whose k drafts reach past the known text is left out, unless the sequence `ended` there.
    """
    steps: list[int] = []
    root = 0
    while root < len(tokens) - 1 and (ended or root + k < len(tokens)):
        accepted, drafted = 0, table[tokens[root]]
        while accepted < k and root + accepted + 1 < len(tokens) and drafted == tokens[root + accepted + 1]:
            accepted += 1
            drafted = table[drafted]
        steps.append(accepted)
        root += accepted + 1
    return steps
