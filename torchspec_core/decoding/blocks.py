"""Block drafters as the decoder sees them: one pass over a block, then a walk that chooses one token after another.

The context's keys and values are cached a layer, from the target's true states at every committed position before the
newest token; the block's own keys are made anew each step, so nothing is ever rolled back. The walk serves all kinds:
DFlash's slots do not depend on each other, DFlash 2's selector and DSpark's Markov bias look at the token chosen just
before. The law of a drawn token is exactly what it was drawn from: for DFlash 2 the softmax over its few candidates.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from torchspec_core.decoding.draft import Committed, Proposal, peak, stacked
from torchspec_core.decoding.verify import draw
from torchspec_core.drafters.dflash import BlockDrafter
from torchspec_core.drafters.slots import Tables
from torchspec_core.errors import UserError


class BlockDrafts:
    """A block drafter with the target's embedding and head; drafts at most the tokens that it was trained for."""

    def __init__(self, drafter: BlockDrafter, tables: Tables) -> None:
        self.drafter = drafter.eval()
        self.config = drafter.config
        self.layers = tuple(drafter.config.aux_layers)
        self.tables = tables
        mask = tables.embedding[drafter.config.mask_token_id]
        self.mask = mask.view(1, 1, -1)
        self.judging = False

    def start(self, rows: int, capacity: int) -> None:
        self.caches = self.drafter.new_cache(rows, capacity)

    @torch.inference_mode()
    def propose(self, committed: Committed, k: int, temperature: float, u: Tensor | None) -> Proposal:
        if k > self.config.predictions:
            raise UserError(
                f"evaluation.k is {k}, but the drafter's blocks of {self.config.block_size} draft "
                f"{self.config.predictions} tokens: lower it, or train with a larger drafter.block_size"
            )
        columns = torch.arange(committed.tokens.shape[1])
        positions = torch.where(columns < committed.counts.unsqueeze(1), committed.start.unsqueeze(1) + columns, -1)
        self.drafter.extend(committed.states, positions, self.caches)
        previous = committed.last
        masks = k + self.config.block_size - self.config.predictions - 1
        first = self.tables.embedding[previous].unsqueeze(1)
        embeds = torch.cat((first, self.mask.expand(len(first), masks, -1)), dim=1)
        hidden = self.drafter.draft(embeds, committed.start + committed.counts, self.caches)
        tokens: list[Tensor] = []
        laws: list[Tensor] = []
        peaks: list[Tensor] = []
        confidences: list[Tensor] = []
        for slot in range(k):
            scores, ids = self.drafter.scores(hidden[:, slot], previous, self.tables)
            if self.judging:
                peaks.append(peak(scores, temperature))
                if self.config.markov_rank is not None:
                    confidences.append(self.drafter.confidence(hidden[:, slot], previous, slot))
            if u is None:
                chosen = scores.argmax(dim=-1)
            else:
                law = torch.softmax(scores.float() / temperature, dim=-1)
                chosen = draw(law, u[:, slot])
                laws.append(
                    law if ids is None else law.new_zeros(len(law), self.config.vocab_size).scatter(1, ids, law)
                )
            previous = chosen if ids is None else ids.gather(1, chosen.unsqueeze(1)).squeeze(1)
            tokens.append(previous)
        q, confidence, highest = (stacked(parts) if parts else None for parts in (laws, confidences, peaks))
        return Proposal(stacked(tokens), q, confidence, highest)

    def keep(self, rows: Tensor) -> None:
        self.caches = [replace(cache, k=cache.k[rows], v=cache.v[rows]) for cache in self.caches]
