"""Pieces of `benchmarks.training`: the data, the unimproved ways of batching and updating, the arithmetic of a step."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from torchspec_core.config.load import load_recipe
from torchspec_core.data.tokenset import TokenSet
from torchspec_core.drafters.eagle3 import Eagle3Config
from torchspec_core.objectives.alignment import teacher_weight
from torchspec_core.objectives.eagle3 import Teacher
from torchspec_core.objectives.ttt import TTTIndex, ttt_index
from torchspec_core.pipeline import open_store, plan, run_stage
from torchspec_core.store.files import StateSet
from torchspec_core.targets.engine import TargetHead, load_embedding, load_head
from torchspec_core.targets.facts import read_facts
from torchspec_core.training.batch import Sample
from torchspec_core.training.eagle3 import drafter_config
from torchspec_core.training.optimizer import Masters
from torchspec_core.training.stage import StateSamples

_STAGES = ("target", "prompts", "answers", "tokens", "vocabulary", "states")


@dataclass(frozen=True)
class Material:
    """Real samples with their states, and what of the target is needed."""

    source: StateSamples
    config: Eagle3Config
    teacher: Teacher
    head: TargetHead
    kept: Tensor
    supervised: np.ndarray


def prepare(recipe: Path, overrides: Sequence[str]) -> Material:
    """Run the recipe's stages up to the states, as far as the store lacks them, and open them; bf16."""
    loaded = load_recipe(recipe, overrides).recipe
    store = open_store(loaded)
    folders = {name: Path(run_stage(name, loaded, store).path) for name in _STAGES}
    params = next(entry.params for entry in plan(loaded, store) if entry.name == "drafter")
    tokens, states = TokenSet(folders["tokens"]), StateSet(folders["states"])
    facts, head = read_facts(folders["target"]), load_head(folders["target"], torch.bfloat16)
    kept = torch.from_numpy(np.flatnonzero(np.load(folders["vocabulary"] / "t2d.npy")))
    teacher = Teacher(
        load_embedding(folders["target"], torch.bfloat16), head.norm_weight, head.eps, head.head_weight[kept], kept
    )
    config = drafter_config(params["drafter"], facts, states.layers[:-1])
    source = StateSamples(tokens, states, np.arange(len(tokens)))
    return Material(source, config, teacher, head, kept, np.array(tokens.supervised))


def pad_to_longest(samples: Sequence[Sample]) -> list[Sample]:
    """The same samples, as long as the longest of them: token 0, unsupervised, states zero."""
    longest = max(len(sample.ids) for sample in samples)

    def padded(state: Tensor) -> Tensor:
        return functional.pad(state, (0, 0, 0, longest - len(state)))

    return [
        Sample(
            np.pad(sample.ids, (0, longest - len(sample.ids))),
            np.pad(sample.mask, (0, longest - len(sample.mask))),
            tuple(padded(state) for state in sample.aux),
            padded(sample.last),
            sample.key,
        )
        for sample in samples
    ]


def every_row_builder(depths: int) -> Any:
    """Indices in which every row drafts and every row gets a distribution and a loss, which the mask then removes: the
    dense way. The loss is that of the supervised rows alone."""

    def build(lengths: Sequence[int], mask: np.ndarray, keys: Sequence[str], epoch: int, row_multiple: int) -> TTTIndex:
        total = int(sum(lengths))
        index = ttt_index(lengths, np.ones(total, dtype=bool), depths, rows=np.arange(total))
        counts = teacher_weight(mask, np.repeat(np.arange(len(lengths)), lengths), "predicted")
        return dataclasses.replace(index, weight=index.weight * torch.from_numpy(counts)[index.teacher])

    return build


class LoopOptimizer:
    """Clip and AdamW one parameter after the other, with a look at each norm: what `Optimizer` replaces."""

    def __init__(self, masters: Masters, lr: float, clip: float) -> None:
        self.masters, self.clip = masters, clip
        groups = [{"params": [m]} for m in masters.master]
        self.adamw = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), weight_decay=0.01, foreach=False, fused=False)

    @torch.no_grad()
    def step(self, factor: float) -> Tensor:
        """One update; `factor` is here for the same form as `Optimizer`."""
        squares = 0.0
        for working, master in zip(self.masters.working, self.masters.master, strict=True):
            assert working.grad is not None
            master.grad = working.grad.float()
            squares += float(master.grad.norm()) ** 2
        norm = squares**0.5
        if norm > self.clip:
            for master in self.masters.master:
                assert master.grad is not None
                master.grad.mul_(self.clip / norm)
        for group in self.adamw.param_groups:
            group["lr"] = group["lr"] * factor
        self.adamw.step()
        for working, master in zip(self.masters.working, self.masters.master, strict=True):
            working.copy_(master)
            working.grad = None
        return torch.tensor(norm)


@dataclass(frozen=True)
class Work:
    """Floating-point operations of the matrix products that a step cannot do without, by the shape of their matrix.

    Rows: those that a loss depends on, no padding. A product with trained weights counts forward, gradient of the
    input, gradient of the weights; `fc` has no gradient of its input, the target's head none at all. Attention scores
    (a few percent) and everything that is not a product are left out.
    """

    fc: float
    layer: float
    head: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.fc + self.layer + self.head


def needed_work(index: TTTIndex, tokens: int, config: Eagle3Config, head_trained: bool = True) -> Work:
    """The needed products of one batch of `tokens` tokens."""
    taught = index.weight > 0
    depths, pairs = len(taught), int(taught.sum())
    rows = len(torch.unique(index.student[taught]))
    size, queries = config.hidden_size, config.num_heads * config.head_dim
    keys = 2 * config.num_kv_heads * config.head_dim
    key_rows = tokens + (depths - 1) * rows
    row = 2 * size * queries + queries * size + 3 * size * config.intermediate_size
    head = size * config.draft_vocab_size
    return Work(
        fc=4.0 * tokens * config.num_aux * config.target_hidden_size * size,
        layer=6.0 * (depths * rows * row + key_rows * 2 * size * keys),
        head=2.0 * head * (pairs * (3 if head_trained else 2) + int(taught.any(dim=0).sum())),
    )


def matmul_rates(config: Eagle3Config, rows: int, repeats: int = 7) -> dict[str, float]:
    """Median operations per second of bf16 products of `rows` rows with `fc`, a matrix of the layer, and the head."""
    size = config.hidden_size
    shapes = {
        "fc": (size, config.num_aux * config.target_hidden_size),
        "layer": (config.intermediate_size, size),
        "head": (config.draft_vocab_size, size),
    }
    rates = {}
    for name, (out, into) in shapes.items():
        x, w = torch.randn(rows, into).bfloat16(), torch.randn(out, into).bfloat16()
        functional.linear(x, w)
        seconds = []
        for _ in range(repeats):
            started = time.perf_counter()
            functional.linear(x, w)
            seconds.append(time.perf_counter() - started)
        rates[name] = 2.0 * rows * out * into / statistics.median(seconds)
    return rates


def floor_seconds(work: Work, rates: dict[str, float]) -> float:
    """Seconds of the needed products at these rates."""
    return sum(getattr(work, name) / rate for name, rate in rates.items())


def teacher_entropy(teacher: Teacher, normed: Tensor) -> Tensor:
    """[P] fp32 entropy of the target's distribution over the draft vocabulary, from final-normed states."""
    p = torch.log_softmax((normed @ teacher.head.T).float(), dim=-1)
    return -(p.exp() * p).sum(dim=-1)
