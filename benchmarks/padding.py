"""How much of a batch is padding, on real conversations: random batches, batches of like lengths, packed batches.

    python -m benchmarks.padding --json FILE [--figure FILE.svg] [--quick]

The lengths are those of whole ShareGPT conversations after our tokens stage (SmolLM2's template and tokenizer, cut at
2,048 tokens). *Useful* is the share of computed rows that hold a token.

- `random`: two samples at a time in random order, padded to the longer one (batch size 2, as in the peers).
- `random_budget`: random order, as many as fit into the token budget when all are as long as the longest.
- `grouped`: the plan's `grouped` batches, padded to the longest; `packed`: its `packed` batches, each counted as a
  whole budget. `packed_rows` counts the rows that are really laid out (short batches at an epoch's end are smaller).
- `bound`: as few whole budgets as could hold all tokens. `packed_2_ranks`: two batches a step, one for each rank, the
  wait for the fuller one included.

`order.*` are correlations of a batch's place in the epoch with its mean length: near zero means no curriculum.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.preprocess import make_target
from torchspec_core.plots.padding import padding_figure
from torchspec_core.plots.style import standalone
from torchspec_core.training.batch import ROW_MULTIPLE
from torchspec_core.training.plan import Batch, Batching, plan_epoch

ROWS, QUICK_ROWS = 6000, 300
MAX_LENGTH, BUDGET = 2048, 8192
EPOCHS = 3
SHOWN = 24  # documents of a panel, for random and grouped batches


def conversation_lengths(rows: int, max_length: int = MAX_LENGTH) -> np.ndarray:
    """[samples] tokens of the first `rows` ShareGPT conversations, by the tokens stage."""
    from torchspec_core.data import tokens
    from torchspec_core.data.tokenset import TokenSet
    from torchspec_core.stages.job import local_job

    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        make_target(root / "target")
        (root / "answers").mkdir()
        (root / "prompts").mkdir()
        for name in ("heldout", "mtbench", "gsm8k"):
            (root / "prompts" / f"{name}.jsonl").touch()
        data = {"conversations": [{"name": "sharegpt", "rows": rows}], "max_length": max_length, "min_supervised": 8,
                "supervise": "all", "shard_rows": 4096}  # fmt: skip
        runtime = {"max_rejected": 0.1, "workers": 1, "scheduler": None}
        inputs = {name: root / name for name in ("target", "prompts", "answers")}
        job = local_job(root / "tokens", inputs, {"data": data}, {"data": runtime})
        tokens.build(job)
        return np.array(TokenSet(job.workspace.path).lengths, dtype=np.int64)


def random_batches(lengths: np.ndarray, seed: int, size: int | None = None, budget: int = BUDGET) -> list[Batch]:
    """Random order, `size` samples a batch, or as many as a padded batch within the budget holds."""
    order = np.random.default_rng(seed).permutation(len(lengths)).tolist()
    if size is not None:
        return [tuple(order[start : start + size]) for start in range(0, len(order), size)]
    batches: list[Batch] = []
    batch: list[int] = []
    longest = 0
    for sample in order:
        grown = max(longest, int(lengths[sample]))
        if batch and (len(batch) + 1) * grown > budget:
            batches.append(tuple(batch))
            batch, grown = [], int(lengths[sample])
        batch.append(sample)
        longest = grown
    return [*batches, tuple(batch)]


def planned_batches(lengths: np.ndarray, epoch: int, batching: Batching) -> list[Batch]:
    """The batches of one epoch as the trainer takes them."""
    return [step.batches[0] for step in plan_epoch(lengths, 0, epoch, BUDGET, batching)]


def padded(batches: Sequence[Batch], lengths: np.ndarray) -> int:
    """Rows when every document is padded to the longest of its batch."""
    return sum(len(batch) * int(lengths[list(batch)].max()) for batch in batches)


def order_correlation(batches: Sequence[Batch], lengths: np.ndarray) -> float:
    """Correlation of a batch's place with the mean length of its samples."""
    means = [lengths[list(batch)].mean() for batch in batches]
    return float(np.corrcoef(np.arange(len(means)), means)[0, 1])


def measure(lengths: np.ndarray, epoch: int) -> dict[str, float]:
    """Useful shares of one epoch (or one order)."""
    total = int(lengths.sum())
    started = time.perf_counter()
    packed = planned_batches(lengths, epoch, "packed")
    seconds = time.perf_counter() - started
    grouped = planned_batches(lengths, epoch, "grouped")
    used = np.array([lengths[list(batch)].sum() for batch in packed])
    ranks = plan_epoch(lengths, 0, epoch, 2 * BUDGET, "packed", 2)
    waiting = sum(2 * max(int(lengths[list(batch)].sum()) for batch in step.batches) for step in ranks)
    return {
        "useful.random": total / padded(random_batches(lengths, epoch, 2), lengths),
        "useful.random_budget": total / padded(random_batches(lengths, epoch), lengths),
        "useful.grouped": total / padded(grouped, lengths),
        "useful.packed": total / (len(packed) * BUDGET),
        "useful.packed_rows": total / float((-(-used // ROW_MULTIPLE) * ROW_MULTIPLE).sum()),
        "useful.packed_2_ranks": total / waiting,
        "useful.bound": total / (-(-total // BUDGET) * BUDGET),
        "order.grouped": order_correlation(grouped, lengths),
        "order.packed": order_correlation(packed, lengths),
        "plan_seconds": seconds,
    }


def figure(lengths: np.ndarray, numbers: dict[str, float]) -> str:
    """The first batches of an epoch, as they are laid out, under the shares of whole epochs; SVG text."""

    def title(text: str, key: str) -> str:
        return f"{text}: {100 * numbers[f'useful.{key}']:.1f} % tokens"

    panels = {
        title("random, batch size 2", "random"): random_batches(lengths, 0, 2),
        title("grouped", "grouped"): planned_batches(lengths, 0, "grouped"),
        title("packed", "packed"): planned_batches(lengths, 0, "packed"),
    }
    shown: dict[str, list[list[int]]] = {}
    for name, batches in panels.items():
        shown[name], documents = [], 0
        for batch in batches:
            if documents >= SHOWN:
                break
            shown[name].append(lengths[list(batch)].tolist())
            documents += 1 if name.startswith("packed") else len(batch)
    return padding_figure(shown, BUDGET)


def main(arguments: Sequence[str]) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="share of computed rows that hold a token")
    parser.add_argument("--json", type=Path, required=True, help="file for the flat numbers")
    parser.add_argument("--figure", type=Path, help="SVG file for the picture")
    parser.add_argument("--quick", action="store_true", help="few conversations: shows that it runs, proves nothing")
    options = parser.parse_args(arguments)
    lengths = conversation_lengths(QUICK_ROWS if options.quick else ROWS)
    epochs = [measure(lengths, epoch) for epoch in range(EPOCHS)]
    numbers: dict[str, Any] = {
        "meta.samples": len(lengths), "meta.tokens": int(lengths.sum()), "meta.budget": BUDGET,
        "meta.max_length": MAX_LENGTH, "meta.epochs": EPOCHS, "meta.quick": options.quick,
    }  # fmt: skip
    print(f"{len(lengths)} conversations, {int(lengths.sum())} tokens, budget {BUDGET}, {EPOCHS} epochs")
    for name in epochs[0]:
        values = [epoch[name] for epoch in epochs]
        numbers[name] = statistics.median(values)
        numbers[f"{name}.spread"] = max(values) - min(values)
        print(f"{name:<24} {numbers[name]:8.4f}   spread {numbers[f'{name}.spread']:.4f}")
    options.json.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    if options.figure:
        options.figure.write_text(standalone(figure(lengths, numbers)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
