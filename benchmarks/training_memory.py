"""Resident peak of one training step, by tokens and by vocabulary, and of one sample of 32,768 tokens.

    python -m benchmarks.training_memory --json FILE [--quick]

Drafters of SmolLM2-135M's shape (width 576) on random states, bf16 with fp32 masters, AdamW. Each case is one step in a
process of its own. `peak_mb` is the peak above what the process held when drafter, target head and batch were ready:
activations, gradients, moments. `logits_mb` is what the scores of all taught rows alone would take in fp32, as a dense
implementation holds them (twice, with their gradient).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.anchored_eagle import peak_bytes
from torchspec_core.config.schema import Recipe
from torchspec_core.kinds import KINDS
from torchspec_core.targets.engine import TargetHead
from torchspec_core.targets.facts import TargetFacts
from torchspec_core.training.batch import Sample, pack
from torchspec_core.training.method import Method, Setup
from torchspec_core.training.optimizer import OptimizerSettings, make_masters, make_optimizer

VOCABULARY, WIDTH, SAMPLE = 49152, 576, 256


@dataclass(frozen=True)
class Case:
    """documents x length tokens; `vocabulary`: tokens that the drafter can propose; anchors of a document, or all."""

    kind: str
    documents: int
    length: int
    vocabulary: int
    anchors: int | None = None

    @property
    def name(self) -> str:
        """Of its keys."""
        return f"{self.kind}.{self.documents * self.length}.{self.vocabulary}"


GRID = tuple(Case("eagle3", tokens // SAMPLE, SAMPLE, size) for tokens in (2048, 8192) for size in (8192, VOCABULARY))
LONG = (Case("eagle3", 1, 32768, 8192, anchors=512), Case("dflash", 1, 32768, VOCABULARY, anchors=64))


def method_of(case: Case) -> Method:
    """The kind's method under the default recipe."""
    values = Recipe().model_dump(mode="json")
    values["drafter"] |= {"kind": case.kind, "draft_vocab_size": case.vocabulary, "mask_token_id": 0, "block_size": 8}
    values["training"] |= {"anchors": case.anchors}
    facts = TargetFacts(
        "LlamaForCausalLM", 30, WIDTH, 9, 3, 64, 1536, VOCABULARY, 1e-5, 1e5, case.length, (0,), tied=True
    )
    random = torch.Generator().manual_seed(0)
    table = torch.randn(VOCABULARY, WIDTH, generator=random).mul_(0.05).bfloat16()
    head = TargetHead(torch.ones(WIDTH).bfloat16(), 1e-5, table)
    setup = Setup(
        values["drafter"], values["training"], 0, facts, (1, 14, 26), table, head, torch.arange(case.vocabulary)
    )
    made: Method = KINDS[case.kind].part("training")(setup)
    return made


def measure(case: Case) -> dict[str, float]:
    """One step in this process: its peak, its time, its loss."""
    method = method_of(case)
    optimizer = make_optimizer(
        make_masters(method.drafter, torch.bfloat16), OptimizerSettings("adamw", 1e-3, 0.02, 0.01, (0.9, 0.95), 1.0)
    )
    random = torch.Generator().manual_seed(1)
    samples = [
        Sample(
            np.random.default_rng(number).integers(0, VOCABULARY, case.length),
            np.arange(case.length) >= case.length // 3,
            tuple(torch.randn(case.length, WIDTH, generator=random).bfloat16() for _ in range(3)),
            torch.randn(case.length, WIDTH, generator=random).bfloat16(),
            str(number),
        )
        for number in range(case.documents)
    ]
    batch = pack(samples, method.index, torch.bfloat16)
    found: dict[str, float] = {}

    def step() -> None:
        started = time.perf_counter()
        result = method.objective(method.drafter, batch)
        result.loss.backward()
        norm = optimizer.step(1.0)
        found["seconds"] = time.perf_counter() - started
        found["loss"], found["norm"] = float(result.loss.detach()), float(norm)
        found["rows"] = float(result.count.sum())

    found["peak_mb"] = peak_bytes(step) / 1e6
    found["logits_mb"] = found["rows"] * case.vocabulary * 4 / 1e6
    return found


def in_a_process(case: Case) -> dict[str, float]:
    """`measure` in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.training_memory", "--case", json.dumps(asdict(case))]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found: dict[str, float] = json.loads(out.splitlines()[-1])
    return found


def main(arguments: Sequence[str]) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="resident peak of a training step")
    parser.add_argument("--json", type=Path, help="file for the flat numbers")
    parser.add_argument("--quick", action="store_true", help="the smallest case alone")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.case:
        print(json.dumps(measure(Case(**json.loads(options.case)))))
        return 0
    numbers: dict[str, float] = {"meta.threads": torch.get_num_threads(), "meta.quick": float(options.quick)}
    print(f"{'case (kind.tokens.vocabulary)':<32}{'peak MB':>9}{'logits MB':>11}{'seconds':>9}{'rows':>9}")
    for case in GRID[:1] if options.quick else (*GRID, *LONG):
        found = in_a_process(case)
        numbers |= {f"{key}.{case.name}": value for key, value in found.items()}
        print(
            f"{case.name:<32}{found['peak_mb']:>9,.0f}{found['logits_mb']:>11,.0f}{found['seconds']:>9.1f}"
            f"{found['rows']:>9,.0f}",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
