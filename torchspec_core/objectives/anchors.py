"""Which rows of a sample draft in one epoch: anchors, a pure function of (seed, epoch, sample id).

Anchored drafting rolls out `count` rows of a sample instead of all that lead to a loss; every other row still gives
its key and value, so all tokens reach the loss. Both samplings include each candidate with the same probability,
min(1, count / candidates), so the loss is an unbiased estimate of the dense one up to the per-sample weight.

`strided` walks over the candidates with a fixed stride from a random start and wraps around: evenly spread context
lengths, and at most `max_gap` candidates between two anchors of a pass (0: one contiguous stretch). `uniform` draws
without replacement.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

import numpy as np

AnchorSampling = Literal["strided", "uniform"]


@dataclass(frozen=True)
class Anchors:
    """How anchors are chosen.

    Attributes:
        count: anchors of one sample at most.
        max_gap: candidates left out between two anchors at most, for `strided`.
        seed: the run's.
    """

    count: int
    max_gap: int
    sampling: AnchorSampling
    seed: int

    def choose(self, candidates: np.ndarray, sample_id: str, epoch: int) -> np.ndarray:
        """The anchors among `candidates` [c] int64 ascending rows; ascending, min(count, c) of them."""
        total = len(candidates)
        if total <= self.count:
            return candidates
        label = f"{self.seed}/{epoch}/{sample_id}".encode()
        random = np.random.default_rng(int.from_bytes(hashlib.blake2b(label, digest_size=16).digest(), "little"))
        if self.sampling == "uniform":
            return candidates[np.sort(random.choice(total, self.count, replace=False))]
        stride = min(max(total // self.count, 1), self.max_gap + 1)
        places = (int(random.integers(total)) + stride * np.arange(self.count)) % total
        return candidates[np.sort(places)]
