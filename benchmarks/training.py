"""Training speed by improvement, and against a peer, on real hidden states: supervised tokens per second.

    python -m benchmarks.training --json FILE [--quick] [--peer FOLDER] [--store FOLDER] [--figures FOLDER]

The data are those of `configs/quickstart.yaml` with 300 prompts (made on the first call, then cached): an EAGLE-3
drafter for SmolLM2-135M-Instruct, 8,192 draft tokens, three depths, bf16 with fp32 masters, AdamW.

**The ablation**, at two samples a batch; each line adds to the one above it:

- `baseline`: random pairs padded to the longer one; every row drafts and gets a loss, which the mask removes; AdamW and
  clipping loop over the parameters; loss, accuracies and norm are read in every step
- `grouping`: pairs of like lengths
- `anchored`: 32 rows of a sample draft
- `optimizer`: fused AdamW, `_foreach_` copies and norm, clipping inside the update
- `no_sync`: metrics are read after the last step
- `packing`: no padding; batches of as many tokens as two samples have on average

A line's tokens are all loss-mask tokens of its batches; with anchors about a third of them teach, so `dense` is
`packing` without anchors: every supervised token teaches every depth.

**The peer**: `speculators` 0.9.0, its model and loss (`benchmarks.training_peer` says how), the same weights, the same
packed batches of 1,024 tokens without padding, the same supervised rows; ours trains the head as well, theirs keeps it
frozen. FOLDER: `pip install --no-deps --target FOLDER speculators==0.9.0 hs-connectors==0.9.0 loguru datasets
multiprocess dill xxhash pandas`.

**The floor**: operations of the needed matrix products (`Work`) over the rate of such products, measured between the
rounds. All sides take turns; numbers are medians over the rounds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from benchmarks.training_output import draw, show
from benchmarks.training_parts import (
    LoopOptimizer,
    Material,
    every_row_builder,
    floor_seconds,
    matmul_rates,
    needed_work,
    pad_to_longest,
    prepare,
    teacher_entropy,
)
from torchspec_core.drafters.layers import rms_norm
from torchspec_core.objectives.alignment import teacher_weight
from torchspec_core.objectives.anchors import Anchors
from torchspec_core.objectives.eagle3 import Eagle3Loss
from torchspec_core.objectives.result import LossResult
from torchspec_core.training.batch import IndexBuilder, PackedBatch, pack
from torchspec_core.training.eagle3 import eagle3_objective, new_drafter, ttt_builder
from torchspec_core.training.memory import keep_freed_memory
from torchspec_core.training.optimizer import Masters, OptimizerSettings, make_masters, make_optimizer
from torchspec_core.training.phases import PHASES, Phases
from torchspec_core.training.plan import Batch, plan_epoch

DEPTHS, ANCHORS, BUDGET, LR, CLIP = 3, 32, 1024, 1e-3, 1.0
ROUNDS, STEPS, LARGE_STEPS = 5, 20, 6
RECIPE = Path("configs/quickstart.yaml")
ROWS = ("data.prompts=[{name: sharegpt, rows: 300}]", "data.heldout=20")
LOSS = Eagle3Loss(depth_decay=1.0)
SETTINGS = OptimizerSettings("adamw", LR, 0.02, 0.01, (0.9, 0.95), CLIP)


class Update(Protocol):
    """An optimiser over masters."""

    def step(self, factor: float) -> Tensor: ...


@dataclass
class Variant:
    """One way to train: its own copy of the same drafter, its batches, and how a step ends."""

    name: str
    material: Material
    batches: list[Batch]
    index: IndexBuilder
    pad: bool = False
    loop: bool = False
    sync: bool = False
    rates: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        material = self.material
        self.drafter = new_drafter(material.config, "random", 0, material.head, material.kept)
        masters: Masters = make_masters(self.drafter, torch.bfloat16)
        self.optimizer: Update = LoopOptimizer(masters, LR, CLIP) if self.loop else make_optimizer(masters, SETTINGS)
        self.objective = eagle3_objective(material.teacher, LOSS)
        self.next = 0
        self.phase = Phases()
        self.phases: list[dict[str, float]] = []

    def load(self, batch: Batch) -> PackedBatch:
        """The batch as this way lays it out."""
        samples = [self.material.source.get(i) for i in batch]
        if self.pad:
            return pack(pad_to_longest(samples), self.index, torch.bfloat16, row_multiple=1)
        return pack(samples, self.index, torch.bfloat16)

    def step(self, batch: Batch, late: list[tuple[Any, ...]]) -> int:
        """One update; returns the batch's loss-mask tokens."""
        with self.phase("data"):
            loaded = self.load(batch)
        with self.phase("forward"):
            result: LossResult = self.objective(self.drafter, loaded)
        with self.phase("backward"):
            result.loss.backward()
        with self.phase("optimizer"):
            norm = self.optimizer.step(1.0)
        measured = (result.loss.detach(), result.numerator, result.count, *result.extras.values(), norm)
        if self.sync:
            with self.phase("metrics"):
                for value in measured:
                    [part.item() for part in value.flatten()]
        else:
            late.append(measured)
        return loaded.supervised

    def run(self, steps: int) -> None:
        """A round of the next `steps` batches."""
        chosen = [self.batches[(self.next + i) % len(self.batches)] for i in range(steps)]
        self.next += steps
        late: list[tuple[Any, ...]] = []
        started = time.perf_counter()
        supervised = sum(self.step(batch, late) for batch in chosen)
        with self.phase("metrics"):
            for measured in late:
                [value.tolist() for value in measured]
        seconds = time.perf_counter() - started
        self.rates.append(supervised / seconds)
        self.step_seconds.append(seconds / steps)
        self.phases.append({name: 1e3 * value / steps for name, value in self.phase.take().items()})


def ablation(material: Material) -> list[Variant]:
    """The lines of the ablation, then `dense` and the large batches."""
    lengths = material.source.lengths
    order = np.random.default_rng(0).permutation(len(lengths))
    alike = order[np.argsort(-lengths[order], kind="stable")]
    shuffled = np.random.default_rng(1).permutation(len(alike) // 2)
    random_pairs = [tuple(order[i : i + 2].tolist()) for i in range(0, len(order) - 1, 2)]
    like_pairs = [tuple(alike[2 * i : 2 * i + 2].tolist()) for i in shuffled]
    pair_budget = max(int(2 * lengths.mean()), int(lengths.max()))
    packed = [step.batches[0] for step in plan_epoch(lengths, 0, 0, pair_budget)]
    large = [step.batches[0] for step in plan_epoch(lengths, 0, 0, BUDGET)]
    dense, every = ttt_builder(DEPTHS, "predicted"), every_row_builder(DEPTHS)
    anchored = ttt_builder(DEPTHS, "predicted", anchors=Anchors(ANCHORS, DEPTHS, "strided", 0))
    return [
        Variant("baseline", material, random_pairs, every, pad=True, loop=True, sync=True),
        Variant("grouping", material, like_pairs, every, pad=True, loop=True, sync=True),
        Variant("anchored", material, like_pairs, anchored, pad=True, loop=True, sync=True),
        Variant("optimizer", material, like_pairs, anchored, pad=True, sync=True),
        Variant("no_sync", material, like_pairs, anchored, pad=True),
        Variant("packing", material, packed, anchored),
        Variant("dense", material, packed, dense),
        Variant("large", material, large, dense),
    ]


class Peer:
    """The peer's process; batch 0 is one document (the check), the others are `large`'s."""

    def __init__(self, folder: Path, large: Variant, scratch: Path) -> None:
        material = large.material
        self.batches = large.batches
        torch.save(
            {"described": _described(material), "weights": _peer_weights(large), "batches":
             [_peer_batch(large, batch) for batch in [self.batches[0][:1], *self.batches]]},
            scratch / "peer.pt",
        )  # fmt: skip
        path = os.pathsep.join([str(folder.resolve()), *sys.path[1:]])
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.training_peer", str(scratch)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip
        self.supervised = [sum(int(material.supervised[i]) for i in batch) for batch in self.batches]
        self.rates: list[float] = []
        self.step_seconds: list[float] = []
        self.next = 0

    def ask(self, number: int) -> dict[str, float]:
        """One step of theirs."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(f"{number}\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("the peer's process ended; its own message is above")
        answer: dict[str, float] = json.loads(line)
        return answer

    def run(self, steps: int) -> None:
        """A round."""
        places = [(self.next + i) % len(self.batches) for i in range(steps)]
        self.next += steps
        seconds = sum(self.ask(1 + place)["seconds"] for place in places)
        self.rates.append(sum(self.supervised[place] for place in places) / seconds)
        self.step_seconds.append(seconds / steps)

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()


def _described(material: Material) -> dict[str, Any]:
    config = material.config
    layer = {
        "hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads, "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim, "vocab_size": config.vocab_size, "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope.theta},
    }  # fmt: skip
    return {
        "layer": layer, "draft_vocab_size": config.draft_vocab_size, "aux_layers": list(config.aux_layers),
        "norm_before_residual": config.norm_before_residual, "depths": DEPTHS,
    }  # fmt: skip


def _peer_weights(variant: Variant) -> dict[str, Tensor]:
    names = {name.replace("midlayer.", "layers.0."): w for name, w in variant.drafter.state_dict().items()}
    teacher = variant.material.teacher
    names |= {"embed_tokens.weight": teacher.embedding, "verifier_norm.weight": teacher.norm,
              "verifier_lm_head.weight": teacher.head}  # fmt: skip
    return {name: weight.detach().float().contiguous() for name, weight in names.items()}


def _peer_batch(variant: Variant, batch: Batch) -> dict[str, Any]:
    samples = [variant.material.source.get(i) for i in batch]
    lengths = [len(sample.ids) for sample in samples]
    mask, document = np.concatenate([s.mask for s in samples]), np.repeat(np.arange(len(samples)), lengths)
    return {
        "lengths": lengths, "ids": torch.from_numpy(np.concatenate([s.ids for s in samples]).astype(np.int64)),
        "mask": torch.from_numpy(teacher_weight(mask, document, "predicted")),
        "aux": torch.cat([torch.cat(list(s.aux), dim=-1) for s in samples]),
        "last": torch.cat([s.last for s in samples]),
    }  # fmt: skip


def check_peer(peer: Peer, large: Variant) -> dict[str, float]:
    """Both sides' loss (KL, summed over depths) and rate of right first drafts on one document, before any update."""
    answer = peer.ask(0)
    batch = large.load(peer.batches[0][:1])
    teacher = large.material.teacher
    index = batch.index
    entropy = teacher_entropy(teacher, rms_norm(batch.last[index.teacher], teacher.norm, teacher.eps))
    with torch.no_grad():
        result = large.objective(large.drafter, batch)
    ours = (result.numerator - (index.weight * entropy).sum(dim=1)) / result.count
    return {
        "check.loss_ours": float(ours.sum()), "check.loss_peer": answer["loss"],
        "check.right_ours": float(result.extras["acc_0"][0]), "check.right_peer": answer["full_acc_0_sum"],
        "check.rows_ours": float(result.count[0]), "check.rows_peer": answer["full_acc_0_total"],
    }  # fmt: skip


def summarise(variants: Sequence[Variant], peer: Peer | None, rates: list[dict[str, float]]) -> dict[str, Any]:
    """Flat numbers: medians over the rounds, spreads, ratios."""
    numbers: dict[str, Any] = {}
    sides: list[Variant | Peer] = [*variants, *([peer] if peer else [])]
    for side in sides:
        name = side.name if isinstance(side, Variant) else "speculators"
        numbers[f"supervised_per_second.{name}"] = statistics.median(side.rates)
        numbers[f"supervised_per_second.{name}.spread"] = max(side.rates) - min(side.rates)
        numbers[f"step_seconds.{name}"] = statistics.median(side.step_seconds)
        if isinstance(side, Variant):
            rounds = side.phases[-len(side.rates) :]
            numbers |= {f"ms.{name}.{phase}": statistics.median(r[phase] for r in rounds) for phase in PHASES}

    def ratio(top: Variant, bottom: Variant | Peer) -> float:
        return statistics.median(a / b for a, b in zip(top.rates, bottom.rates, strict=True))

    by_name = {variant.name: variant for variant in variants}
    chain = ("baseline", "grouping", "anchored", "optimizer", "no_sync", "packing")
    for before, after in itertools.pairwise(chain):
        numbers[f"speedup.{after}"] = ratio(by_name[after], by_name[before])
    numbers["speedup.all"] = ratio(by_name["packing"], by_name["baseline"])
    numbers["speedup.all_without_anchors"] = ratio(by_name["dense"], by_name["baseline"])
    large = by_name["large"]
    median_rates = {name: statistics.median(r[name] for r in rates) for name in rates[0]}
    numbers |= {f"gflops.{name}": rate / 1e9 for name, rate in median_rates.items()}
    works = [needed_work(batch.index, batch.tokens, large.material.config) for batch in map(large.load, large.batches)]
    numbers["gflop_per_step"] = statistics.mean(work.total for work in works) / 1e9
    floor = statistics.mean(floor_seconds(work, median_rates) for work in works)
    numbers["floor_seconds"] = floor
    numbers["fraction.of_matmul_floor"] = floor / numbers["step_seconds.large"]
    if peer:
        numbers["speedup.vs_speculators"] = ratio(large, peer)
        less = [
            needed_work(batch.index, batch.tokens, large.material.config, head_trained=False)
            for batch in map(large.load, large.batches)
        ]
        peer_floor = statistics.mean(floor_seconds(work, median_rates) for work in less)
        numbers["fraction.of_matmul_floor_speculators"] = peer_floor / numbers["step_seconds.speculators"]
    return numbers


def main(arguments: Sequence[str]) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="training speed by improvement, and against a peer")
    parser.add_argument("--json", type=Path, required=True, help="file for the flat numbers")
    parser.add_argument("--quick", action="store_true", help="few steps: shows that it runs, proves nothing")
    parser.add_argument("--peer", type=Path, help="folder in which `speculators` 0.9.0 is installed")
    parser.add_argument("--store", default=".torchspec/store", help="where the data are, or are made")
    parser.add_argument("--figures", type=Path, help="folder for the pictures")
    options = parser.parse_args(arguments)
    keep_freed_memory()
    material = prepare(RECIPE, [*ROWS, f"run.store={options.store}"])
    rounds, steps, large_steps = (2, 2, 2) if options.quick else (ROUNDS, STEPS, LARGE_STEPS)
    variants = ablation(material)
    large = variants[-1]
    numbers: dict[str, Any] = {
        "meta.samples": len(material.source.lengths), "meta.tokens": int(material.source.lengths.sum()),
        "meta.supervised": int(material.supervised.sum()), "meta.threads": torch.get_num_threads(),
        "meta.rounds": rounds, "meta.steps": steps, "meta.anchors": ANCHORS, "meta.budget": BUDGET,
        "meta.quick": options.quick, "meta.load": os.getloadavg()[0],
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        peer = Peer(options.peer, large, Path(scratch)) if options.peer else None
        if peer:
            numbers |= check_peer(peer, large)
        sides: list[tuple[Callable[[int], None], int]] = [
            *((variant.run, large_steps if variant is large else steps) for variant in variants),
            *([(peer.run, large_steps)] if peer else []),
        ]
        for run, _ in sides:  # warm up: kernels, moments, pages
            run(1)
        measured: list[Variant | Peer] = [*variants, *([peer] if peer else [])]
        for side in measured:
            side.rates.clear()
            side.step_seconds.clear()
        rates = []
        for _ in range(rounds):
            rates.append(matmul_rates(material.config, BUDGET))
            for run, count in sides:
                run(count)
        if peer:
            peer.close()
    numbers |= summarise(variants, peer, rates)
    show(numbers)
    options.json.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    if options.figures:
        draw(numbers, options.figures)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
