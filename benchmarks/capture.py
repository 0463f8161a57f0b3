"""Hidden states out of vLLM: what capturing costs, one pipeline stage against two, and how many requests it takes.

    python -m benchmarks.capture --json FILE [--samples N] [--rounds N] [--figure FILE.svg]

SmolLM2-135M-Instruct in bf16, real conversations cut at 1,024 tokens, the layers of the default recipe (three and the
final one). A side is one engine in a process of its own that prefills all samples, `rounds` times; starting it is not
counted. `plain` is the same engine, settings and order of requests with vLLM's own worker: nothing is hooked, kept or
written. The sides take turns. With two stages each has one core and with one stage the same two cores.
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
from pathlib import Path
from typing import Any

SIDES = {
    "pp1_plain": (1, False, 32),
    "pp1_capture": (1, True, 32),
    "pp2_plain": (2, False, 32),
    "pp2_capture": (2, True, 32),
    **{f"outstanding_{n}": (2, True, n) for n in (1, 2, 4, 8, 16, 64)},
}  # fmt: skip
LENGTH, BUDGET = 1024, 2048
PLAIN_WORKER = "vllm.v1.worker.cpu_worker.CPUWorker"


def make_tokens(root: Path, samples: int) -> None:
    """The target and a tokens stage of real conversations."""
    from torchspec_core.data import tokens
    from torchspec_core.stages.job import local_job
    from torchspec_core.targets.made import PACKAGE
    from torchspec_core.targets.source import build

    target = {"target": {"source": PACKAGE, "dtype": "bfloat16"}}
    build(local_job(root / "target", params=target, runtime={"run": {"threads": 0}}))
    for name in ("answers", "prompts"):
        (root / name).mkdir()
    for name in ("heldout", "mtbench", "gsm8k"):
        (root / "prompts" / f"{name}.jsonl").touch()
    data = {
        "conversations": [{"name": "sharegpt", "rows": samples, "path": None}], "max_length": LENGTH,
        "min_supervised": 1, "supervise": "all", "shard_rows": 512,
    }  # fmt: skip
    inputs = {name: root / name for name in ("target", "answers", "prompts")}
    runtime = {"max_rejected": 1.0, "workers": 0, "scheduler": None}
    tokens.build(local_job(root / "tokens", inputs, {"data": data}, {"data": runtime}))


def run_one(root: Path, side: str, rounds: int) -> list[float]:
    """Tokens per second of each round of one side."""
    import numpy as np

    from torchspec_core.capture.plan import shard_plan
    from torchspec_core.capture.vllm_engine import EngineSettings, VllmCapture
    from torchspec_core.capture.work import CaptureWork
    from torchspec_core.data.tokenset import TokenSet
    from torchspec_core.stages.workspace import Workspace
    from torchspec_core.store.format import Layout
    from torchspec_core.targets import vllm_cpu
    from torchspec_core.targets.facts import captured_layers, read_facts

    stages, captures, outstanding = SIDES[side]
    facts = read_facts(root / "target")
    layout = Layout(captured_layers(facts, None), facts.hidden_size, "bfloat16")
    tokens = TokenSet(root / "tokens")
    lengths = np.asarray(tokens.lengths)
    plan = dict(enumerate(shard_plan(lengths, layout.bytes_per_token, 64 << 20)))
    rates = []
    if not captures:
        vllm_cpu.CAPTURE_WORKER = PLAIN_WORKER
    with tempfile.TemporaryDirectory(dir=root) as folder:
        settings = EngineSettings(stages, 1, BUDGET, outstanding, 512, 1, 0)

        def fresh() -> CaptureWork:
            return CaptureWork(Workspace(Path(folder)), layout, tokens, plan, lambda done, total, message: None)

        engine = VllmCapture(root / "target", fresh(), settings)
        for _ in range(rounds):
            work = fresh()
            started = time.perf_counter()
            if captures:
                engine.capture(work)
            else:
                engine.prefill(work)
            rates.append(work.total / (time.perf_counter() - started))
            for path in Path(folder).glob("s*"):
                if path.is_file():
                    path.unlink()
        engine.close()
    return rates


def start_one(root: Path, side: str, rounds: int) -> list[float]:
    """Run one side in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.capture", "--side", side, "--root", str(root), "--rounds", str(rounds)]
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{side} failed: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def summarise(rates: dict[str, list[float]]) -> dict[str, float]:
    """Flat numbers: medians, spreads and the ratios that the goals are about."""
    middle = {side: statistics.median(found) for side, found in rates.items()}
    out = {f"tokens_per_s.{side}": value for side, value in middle.items()}
    out |= {f"spread.{side}": (max(found) - min(found)) / middle[side] for side, found in rates.items()}
    for name, ours, theirs in (
        ("pp1_with_capture", "pp1_capture", "pp1_plain"), ("pp2_with_capture", "pp2_capture", "pp2_plain"),
        ("pp2_vs_pp1", "pp2_capture", "pp1_capture"),
    ):  # fmt: skip
        if ours in middle and theirs in middle:
            out[f"fraction.{name}"] = middle[ours] / middle[theirs]
    for side, (_, _, outstanding) in SIDES.items():
        if side in middle and (side.startswith("outstanding_") or side == "pp2_capture"):
            out[f"curve.outstanding.{outstanding}"] = middle[side]
    return out


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="What capturing hidden states from vLLM costs.")
    parser.add_argument("--json", type=Path, help="write the numbers there")
    parser.add_argument("--figure", type=Path, help="draw throughput against outstanding requests there (SVG)")
    parser.add_argument("--samples", type=int, default=160, help="conversations (default 160)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each engine (default 3)")
    parser.add_argument("--sides", default=",".join(SIDES), help="sides to run (default: all)")
    parser.add_argument("--side", choices=tuple(SIDES), help=argparse.SUPPRESS)
    parser.add_argument("--root", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        print(json.dumps(run_one(args.root, args.side, args.rounds)))
        return
    rates: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="torchspec-capture-") as folder:
        root = Path(folder)
        make_tokens(root, args.samples)
        # Two engines of each side, in turns, so that a slow minute of the machine does not fall on one side alone.
        for side in itertools.chain.from_iterable([args.sides.split(",")] * 2):
            rates.setdefault(side, []).extend(start_one(root, side, args.rounds))
    numbers: dict[str, Any] = summarise(rates)
    for name, value in numbers.items():
        print(f"{name:<36}{value:>12.4g}")
    if args.figure:
        from torchspec_core.plots.speed import outstanding_curve

        points = {int(k.rsplit(".", 1)[1]): v for k, v in numbers.items() if k.startswith("curve.")}
        args.figure.write_text(outstanding_curve(points, numbers.get("tokens_per_s.pp2_plain")), "utf-8")
    if args.json:
        args.json.write_text(json.dumps(numbers, indent=1) + "\n")


if __name__ == "__main__":
    main()
