"""Hidden states out of the transformers target: one forward pass per batch, hooks on the decoder layers.

Batches are padded on the right and need no attention mask: attention is causal, so a real row never sees the padding
behind it, and attention keeps its fast path. Only the base model runs; the LM head is never computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchspec_core.capture.plan import token_batches
from torchspec_core.capture.work import CaptureWork, check_finite
from torchspec_core.errors import StageError
from torchspec_core.store.files import shard_name
from torchspec_core.store.format import write_shard
from torchspec_core.targets.engine import TargetHead, load_head, load_model, residual_taps
from torchspec_core.targets.facts import TargetFacts, hf_hidden_index, read_facts


def pad_batch(samples: Sequence[np.ndarray]) -> Tensor:
    """Token ids of unequal length -> `[B, T]` int64, padded on the right with 0."""
    batch = torch.zeros(len(samples), max(len(s) for s in samples), dtype=torch.int64)
    for row, sample in enumerate(samples):
        batch[row, : len(sample)] = torch.from_numpy(sample.astype(np.int64))
    return batch


class TransformersCapture:
    """A loaded target and the layers to take from it (canonical ids, auxiliary ones first, the final one last)."""

    def __init__(
        self, folder: Path, layers: tuple[int, ...], dtype: str, threads: int = 0, token_budget: int = 2048
    ) -> None:
        """token_budget: tokens of one forward pass, padding included."""
        self.token_budget = token_budget
        self.facts: TargetFacts = read_facts(folder)
        self.layers = layers
        self.model: Any = load_model(folder, dtype, threads)
        self.head: TargetHead = load_head(folder, self.model.dtype)

    @torch.no_grad()
    def states(self, samples: Sequence[np.ndarray]) -> list[Tensor]:
        """Residual streams of a batch of token-id rows: for each sample `[layers, T, H]`, without padding."""
        with residual_taps(self.model, self.facts, self.layers) as taken:
            self.model.base_model(input_ids=pad_batch(samples), use_cache=False)
        return [
            torch.stack([taken[layer][row, : len(sample)] for layer in self.layers])
            for row, sample in enumerate(samples)
        ]

    def capture(self, work: CaptureWork) -> dict[str, float | int | str]:
        """Write the missing shards, one after the other; memory holds one shard and one batch."""
        padded, before = 0, work.done
        for number in work.missing:
            rows, name = work.plan[number], shard_name(number)
            samples: list[tuple[str, Tensor]] = []
            for batch in token_batches(rows, work.lengths, self.token_budget):
                taken = [work.row(i) for i in batch]
                states = self.states([row.input_ids for row in taken])
                check_finite([row.sample_id for row in taken], states, self.layers)
                samples += [(row.sample_id, state) for row, state in zip(taken, states, strict=True)]
                padded += len(batch) * int(work.lengths[batch].max())
                work.advance(int(work.lengths[batch].sum()), name)
            with work.workspace.shard(name) as path:
                write_shard(path, work.layout, samples)
                work.workspace.facts(name, samples=len(samples), tokens=int(work.lengths[rows].sum()))
        return {"padding": round(1 - (work.done - before) / padded, 4)}

    def close(self) -> None:
        """Nothing is held beyond this object."""

    @torch.inference_mode()
    def self_check(self, samples: Sequence[np.ndarray]) -> None:
        """Proves on real rows that the layers are the ones that were asked for, or raises `StageError`.

        Against the model's own `output_hidden_states` (equal values at the right index) and its own logits (the final
        state is pre-norm: norm and head of the target, applied to it, give the model's argmax).
        """
        with residual_taps(self.model, self.facts, self.layers) as taken:
            own = self.model(input_ids=pad_batch(samples), use_cache=False, output_hidden_states=True)
        for layer in self.layers:
            expected = own.hidden_states[hf_hidden_index(layer)]
            if layer != self.facts.final_layer and not torch.equal(taken[layer], expected):
                raise StageError(
                    f"capture self-check: the state of layer {layer} is not the model's own hidden "
                    f"state {hf_hidden_index(layer)}."
                )
        proposed = self.head.logits(taken[self.facts.final_layer]).argmax(-1)
        best = own.logits.amax(-1)
        # Another order of summation may swap tokens that differ by an ulp or two; a wrong norm is off by far more.
        gap = best - own.logits.gather(-1, proposed.unsqueeze(-1)).squeeze(-1)
        if (gap > 4 * torch.finfo(gap.dtype).eps * best.abs()).any():
            raise StageError(
                "capture self-check: norm and head on the final state give another next token than the model; "
                "the captured state is not the one before the target's final norm."
            )
