"""Drafters as the decoder sees them: told what was committed, they propose a chain of K tokens a row.

The EAGLE-3 chain first reads one row for every newly committed position (the target's true states there, the token that
followed), which also replaces the cached rows that it had made from its own guesses; then it walks K-1 single steps
on its own output. Table drafters (unigram, bigram, repeat) are the trivial baselines: the next token is looked up by
the last.

Shape legend: B rows, N newly committed positions (right-padded), K drafts, A captured layers of width Ht, V target
vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchspec_core.decoding.verify import draw
from torchspec_core.drafters.eagle3 import Eagle3Drafter

# Rows x positions that the drafter reads in one first pass: bounds its attention scores on long prompts.
FIRST_PASS_TOKENS = 4096


@dataclass(frozen=True)
class Committed:
    """What became certain since the last proposal.

    states: [B, N, A*Ht], the target's at each newly committed position i.
    tokens: [B, N] int64, the token that followed, x_{i+1}.
    start: [B] int64, the first of those positions.
    counts: [B] int64 >= 1, how many of the N are real.
    """

    states: Tensor
    tokens: Tensor
    start: Tensor
    counts: Tensor

    @property
    def last(self) -> Tensor:
        """[B] the newest committed token of each row."""
        return self.tokens.gather(1, (self.counts - 1).unsqueeze(1)).squeeze(1)


@dataclass(frozen=True)
class Proposal:
    """What was drafted.

    tokens: [B, K] int64, target ids. q: [B, K, V] fp32, the law each was drawn from; None = chosen greedily.
    confidence: [B, K], a trained estimate that each is accepted if those before it were; None = the drafter has none.
    peak: [B, K], the largest probability of each slot's law. Both are made only for a drafter that is `judging`, and
    depend on the tokens before a slot, never on the slot's own token.
    """

    tokens: Tensor
    q: Tensor | None = None
    confidence: Tensor | None = None
    peak: Tensor | None = None


class Drafts(Protocol):
    """A drafter with its own cache. `layers` are the canonical ids whose states it wants side by side; `judging` makes
    its proposals carry what dynamic verification reads.
    """

    layers: tuple[int, ...]
    judging: bool

    def start(self, rows: int, capacity: int) -> None:
        """Forget everything; the next batch has `rows` rows of at most `capacity` positions."""

    def propose(self, committed: Committed, k: int, temperature: float, u: Tensor | None) -> Proposal:
        """Draft `k` tokens a row: drawn at `temperature` with `u[B, k]` in [0, 1), or greedily where `u` is None."""

    def keep(self, rows: Tensor) -> None:
        """Row i becomes what row `rows[i]` was; the batch shrinks to len(rows)."""


def peak(scores: Tensor, temperature: float) -> Tensor:
    """Largest probability [N] of softmax(scores[N, C] / temperature); greedy drafts (temperature 0) are judged at 1."""
    return torch.softmax(scores.float() / (temperature or 1.0), dim=-1).amax(dim=-1)


def stacked(slots: list[Tensor]) -> Tensor:
    """One tensor a slot [N, ...] to [N, K, ...]."""
    return torch.stack(slots, dim=1)


class Eagle3Chain:
    """An EAGLE-3 drafter drafting a chain.

    embedding: [V, H], the target's. d2t: [V_d] int64 offsets (target id = j + d2t[j]); None = the target's own ids.
    """

    def __init__(self, drafter: Eagle3Drafter, embedding: Tensor, d2t: Tensor | None = None) -> None:
        self.drafter = drafter.eval()
        self.layers = tuple(drafter.config.aux_layers)
        self.judging = False
        self.embedding = embedding
        self.vocab_size = embedding.shape[0]
        self.ids = None if d2t is None else d2t + torch.arange(len(d2t))

    def start(self, rows: int, capacity: int) -> None:
        self.cache = self.drafter.new_cache(rows, capacity)

    def propose(self, committed: Committed, k: int, temperature: float, u: Tensor | None) -> Proposal:
        out = self._read(committed)
        position = committed.start + committed.counts - 1
        tokens: list[Tensor] = []
        laws: list[Tensor] = []
        peaks: list[Tensor] = []
        for step in range(k):
            if step:
                embeds = self.embedding[tokens[-1]].unsqueeze(1)
                before = self.drafter.feedback(out).unsqueeze(1)
                out = self.drafter.step(before, embeds, (position + step).unsqueeze(1), self.cache)[:, 0]
            logits = self.drafter.logits(out)
            if self.judging:
                peaks.append(peak(logits, temperature))
            if u is None:
                drafted = logits.argmax(dim=-1)
            else:
                law = torch.softmax(logits.float() / temperature, dim=-1)
                drafted = draw(law, u[:, step])
                laws.append(self._widen(law))
            tokens.append(drafted if self.ids is None else self.ids[drafted])
        return Proposal(stacked(tokens), stacked(laws) if laws else None, None, stacked(peaks) if peaks else None)

    def keep(self, rows: Tensor) -> None:
        self.cache = replace(self.cache, k=self.cache.k[rows], v=self.cache.v[rows])

    def _read(self, committed: Committed) -> Tensor:
        """Run the committed positions through the drafter; its output [B, H] at each row's newest one."""
        rows, length = committed.tokens.shape
        columns = torch.arange(length)
        positions = torch.where(columns < committed.counts.unsqueeze(1), committed.start.unsqueeze(1) + columns, -1)
        width = max(1, FIRST_PASS_TOKENS // rows)
        newest = committed.counts - 1
        parts = []
        for begin in range(0, length, width):
            part = slice(begin, begin + width)
            hidden = self.drafter.combine(committed.states[:, part])
            out = self.drafter.step(hidden, self.embedding[committed.tokens[:, part]], positions[:, part], self.cache)
            inside = (newest - begin).clamp(0, out.shape[1] - 1)
            parts.append(out[torch.arange(rows), inside])
        return torch.stack(parts)[newest // width, torch.arange(rows)]

    def _widen(self, law: Tensor) -> Tensor:
        """[B, V_d] over the draft vocabulary -> [B, V] over the target's, zero elsewhere."""
        if self.ids is None:
            return law
        return law.new_zeros(len(law), self.vocab_size).index_copy_(1, self.ids, law)


class TableDrafts:
    """Next token by the last one: `table[V]` int64. Reads no states, always drafts greedily."""

    layers: tuple[int, ...] = ()

    def __init__(self, table: Tensor) -> None:
        self.table = table
        self.judging = False

    def start(self, rows: int, capacity: int) -> None:
        pass

    def propose(self, committed: Committed, k: int, temperature: float, u: Tensor | None) -> Proposal:
        tokens = [committed.last]
        for _ in range(k):
            tokens.append(self.table[tokens[-1]])
        certain = torch.ones(len(tokens[0]), k) if self.judging else None
        return Proposal(stacked(tokens[1:]), peak=certain)

    def keep(self, rows: Tensor) -> None:
        pass


def baseline_tables(
    samples: Iterable[tuple[NDArray[np.integer], NDArray[np.bool_]]], vocab_size: int
) -> dict[str, NDArray[np.int64]]:
    """Tables of the trivial drafters, from the supervised tokens of `samples` (input ids, loss mask; one pair a
    sample).

    unigram: always the most frequent supervised token. bigram: the most frequent supervised successor of the last
    token, the unigram's where it has none. repeat: the last token again. Ties go to the smaller id.
    """
    counts = np.zeros(vocab_size, dtype=np.int64)
    pairs: list[NDArray[np.int64]] = []
    for ids, mask in samples:
        wide = np.asarray(ids, dtype=np.int64)
        supervised = np.asarray(mask, dtype=bool)
        counts += np.bincount(wide[supervised], minlength=vocab_size)
        pairs.append((wide[:-1] * vocab_size + wide[1:])[supervised[1:]])
    unigram = np.full(vocab_size, int(counts.argmax()), dtype=np.int64)
    bigram = unigram.copy()
    keys, times = np.unique(np.concatenate(pairs) if pairs else np.zeros(0, np.int64), return_counts=True)
    order = np.lexsort((-keys, times))  # most frequent last, and the smaller id last among equals: the last write stays
    bigram[keys[order] // vocab_size] = keys[order] % vocab_size
    return {"unigram": unigram, "bigram": bigram, "repeat": np.arange(vocab_size, dtype=np.int64)}
