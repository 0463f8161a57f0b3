"""The loop: prefill, then draft, verify, commit, until every row has stopped.

What is counted. A *step* is one verification of K drafts; acceptance length = 1 + accepted drafts per step, the bonus
token included. Drafts accepted after an end-of-sequence token are not emitted and do not count; they are kept apart,
because engines that count before they look for the end count them. A step cut by `max_new_tokens` counts whole: the
limit says nothing about the drafter.

Randomness. Every row has its own numbers, made from (seed, row key): a row's text does not depend on its neighbours,
the batch size, or the order. Drafting, acceptance and the following token each take numbers of their own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from torchspec_core.decoding.draft import Committed, Drafts, Proposal
from torchspec_core.decoding.schedule import Dynamic
from torchspec_core.decoding.target import CachedTarget
from torchspec_core.decoding.verify import Verdict, distribution, draw, verify_block, verify_greedy, verify_sampled


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    temperature: 0 is greedy. drafting: how the drafter picks when it is not. verification: the rule that decides then;
    both rules give the target's law, `block` accepts at least as much on average.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    drafting: Literal["greedy", "probabilistic"] = "greedy"
    verification: Literal["standard", "block"] = "standard"

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True)
class Decoded:
    """One row's result.

    tokens: the new tokens, the end-of-sequence token included. steps: accepted drafts of each verification step.
    verified: drafts that were verified in each step, K unless verification is dynamic.
    after_end: drafts of the last step that were accepted after an end-of-sequence token; not in `steps`.
    """

    key: str
    tokens: tuple[int, ...]
    finish: Literal["stop", "length"]
    steps: tuple[int, ...]
    verified: tuple[int, ...]
    after_end: int


class _Row:
    """One row in progress."""

    def __init__(self, key: str, prompt: Sequence[int]) -> None:
        self.key = key
        self.length = len(prompt)  # positions whose token is known; the newest token sits at length - 1
        self.tokens: list[int] = []
        self.steps: list[int] = []
        self.verified: list[int] = []
        self.after_end = 0
        self.finish: Literal["stop", "length"] | None = None

    def commit(self, tokens: list[int], eos: frozenset[int], limit: int) -> int:
        """Append `tokens` up to an end-of-sequence token (included) or the limit; how many the end alone lets
        through.
        """
        self.length += len(tokens)
        end = next((i + 1 for i, token in enumerate(tokens) if token in eos), None)
        emitted = tokens if end is None else tokens[:end]
        room = limit - len(self.tokens)
        self.tokens.extend(emitted[:room])
        if end is not None and end <= room:
            self.finish = "stop"
        elif len(self.tokens) >= limit:
            self.finish = "length"
        return len(emitted)

    def result(self) -> Decoded:
        assert self.finish is not None
        tokens, steps, verified = tuple(self.tokens), tuple(self.steps), tuple(self.verified)
        return Decoded(self.key, tokens, self.finish, steps, verified, self.after_end)


def row_uniforms(seed: int, key: str, steps: int, width: int) -> np.ndarray:
    """fp64 [steps, width] in [0, 1), a pure function of (seed, key)."""
    digest = hashlib.blake2b(f"{seed}|{key}".encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little"))).random((steps, width))


def surviving_rows(alive: Sequence[bool]) -> list[int]:
    """For each place of the shrunk batch, the old row that goes there: live rows stay, the last ones fill the holes."""
    count = sum(alive)
    movers = [row for row in range(count, len(alive)) if alive[row]]
    return [row if alive[row] else movers.pop() for row in range(count)]


@torch.inference_mode()
def decode(
    target: CachedTarget,
    drafts: Drafts | None,
    prompts: Sequence[Sequence[int]],
    *,
    keys: Sequence[str],
    k: int,
    max_new_tokens: int,
    eos: Sequence[int] = (),
    sampling: Sampling = Sampling(),
    seed: int = 0,
    dynamic: Dynamic | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Decoded]:
    """Continue `prompts` (token ids) by at most `max_new_tokens` each, drafting `k` tokens a step; results in the
    order given.

    `drafts` None decodes plainly, one token a step. `keys` name the rows and seed their randomness.
    `dynamic` verifies as many of the drafts as it finds worth it; none verifies all.
    `progress` is called with (rows finished, new tokens so far) after each step.
    """
    k = k if drafts is not None else 0
    ends = frozenset(eos)
    rows = [_Row(key, prompt) for key, prompt in zip(keys, prompts, strict=True)]
    live = list(rows)
    capacity = max(len(prompt) for prompt in prompts) + max_new_tokens + k + 1
    # Draw K drafts, decide K acceptances, draw one token a step; a row takes at most max_new_tokens steps.
    uniforms = (
        None
        if sampling.greedy
        else torch.from_numpy(np.stack([row_uniforms(seed, key, max_new_tokens + 1, 2 * k + 1) for key in keys]))
    )
    if drafts is not None:
        drafts.judging = dynamic is not None
        drafts.start(len(rows), capacity)

    read = target.prefill(prompts, capacity)
    first = _first_tokens(read.logits[:, 0], uniforms, sampling)
    counts = torch.tensor([row.length for row in rows])
    following = torch.zeros(len(rows), int(counts.max()), dtype=torch.int64)
    for i, prompt in enumerate(prompts):
        following[i, : len(prompt) - 1] = torch.as_tensor(prompt[1:], dtype=torch.int64)
    following[torch.arange(len(rows)), counts - 1] = first
    committed = Committed(read.states, following, torch.zeros_like(counts), counts)
    for row, token in zip(live, first.tolist(), strict=True):
        row.commit([token], ends, max_new_tokens)

    step = 0
    while True:
        if any(row.finish for row in live):
            kept = surviving_rows([row.finish is None for row in live])
            live, index = [live[i] for i in kept], torch.tensor(kept, dtype=torch.int64)
            committed = Committed(
                committed.states[index], committed.tokens[index], committed.start[index], committed.counts[index]
            )
            uniforms = None if uniforms is None else uniforms[index]
            if live:
                target.keep(index)
                if drafts is not None:
                    drafts.keep(index)
        if progress is not None:
            progress(len(rows) - len(live), sum(len(row.tokens) for row in rows))
        if not live:
            return [row.result() for row in rows]
        step += 1
        committed = _step(
            target,
            drafts,
            live,
            committed,
            k,
            ends,
            max_new_tokens,
            sampling,
            None if uniforms is None else uniforms[:, step],
            dynamic,
        )


def _first_tokens(logits: Tensor, uniforms: Tensor | None, sampling: Sampling) -> Tensor:
    if uniforms is None:
        return logits.argmax(dim=-1)
    return draw(distribution(logits, sampling.temperature, sampling.top_p), uniforms[:, 0, -1])


def _step(
    target: CachedTarget,
    drafts: Drafts | None,
    live: list[_Row],
    committed: Committed,
    k: int,
    ends: frozenset[int],
    limit: int,
    sampling: Sampling,
    u: Tensor | None,
    dynamic: Dynamic | None,
) -> Committed:
    """Draft, verify and commit once for all live rows; what became certain."""
    root = committed.last.unsqueeze(1)
    proposal, limits = Proposal(root[:, :0]), None
    if drafts is not None:
        draw_drafts = u is not None and sampling.drafting == "probabilistic"
        proposal = drafts.propose(
            committed, k, sampling.temperature, u[:, :k] if u is not None and draw_drafts else None
        )
        if dynamic is not None:
            limits = dynamic.limits(proposal)
    # The longest schedule sets the width that the target reads; what a row does not want verified is ignored there.
    width = k if limits is None else int(limits.max())
    drafted, q = proposal.tokens[:, :width], None if proposal.q is None else proposal.q[:, :width]
    start = torch.tensor([row.length - 1 for row in live])
    read = target.verify(torch.cat([root, drafted], dim=1), start.unsqueeze(1) + torch.arange(width + 1))
    verdict: Verdict
    if u is None:
        verdict = verify_greedy(read.logits, drafted, limits)
    else:
        verify = verify_block if sampling.verification == "block" else verify_sampled
        judge = torch.cat((u[:, k : k + width], u[:, 2 * k :]), dim=1)
        verdict = verify(read.logits, drafted, q, judge, sampling.temperature, sampling.top_p, limits)
    if dynamic is not None and limits is not None:
        dynamic.observe(proposal, verdict.accepted, limits)
    tokens = torch.cat([drafted, root], dim=1).scatter_(
        1, verdict.accepted.unsqueeze(1), verdict.following.unsqueeze(1)
    )
    counts = [width] * len(live) if limits is None else limits.tolist()
    for row, accepted, verified, chain in zip(live, verdict.accepted.tolist(), counts, tokens.tolist(), strict=True):
        emitted = row.commit(chain[: accepted + 1], ends, limit)
        if drafts is not None:
            row.steps.append(min(accepted, emitted))
            row.verified.append(verified)
            row.after_end = accepted - row.steps[-1]
    return Committed(read.states, tokens, start, verdict.accepted + 1)
