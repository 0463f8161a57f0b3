"""Prompts through the reference decoder, set after set, each set and mode a shard of its own.

An interrupted evaluation goes on at the first set and mode that is missing. Target and drafter are loaded once for each
compute type, and only if something is missing.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchspec_core.data.render import Renderer
from torchspec_core.decoding.decoder import Decoded, Sampling, decode
from torchspec_core.decoding.draft import Drafts
from torchspec_core.decoding.schedule import (
    AcceptanceEstimator,
    Dynamic,
    StepCost,
    below_threshold,
    early_stop,
    measure_step_cost,
)
from torchspec_core.decoding.target import CachedTarget, load_target
from torchspec_core.evaluation.drafts import open_export
from torchspec_core.stages.job import Job
from torchspec_core.targets.answers import Prompt
from torchspec_core.targets.facts import TargetFacts

_log = logging.getLogger("torchspec.evaluation")

GREEDY, SAMPLED = "greedy", "t1"


@dataclass(frozen=True)
class Mode:
    """One way of decoding a set. dtype: of target and drafter. max_new_tokens: of each text."""

    name: str
    dtype: str
    sampling: Sampling
    max_new_tokens: int


def modes(settings: Mapping[str, Any]) -> tuple[Mode, Mode]:
    """The two modes of a recipe's evaluation: greedy, and at its temperature with drafts drawn from their own law."""
    limit = settings["max_new_tokens"]
    sampling = Sampling(settings["temperature"], settings["top_p"], "probabilistic", settings["verification"])
    return (
        Mode(GREEDY, settings["dtype"], Sampling(), limit),
        Mode(SAMPLED, settings["sampled_dtype"], sampling, limit),
    )


class Work:
    """The decoding of one stage; `total` is the most new tokens that it will make, for its progress."""

    def __init__(self, job: Job, facts: TargetFacts, renderer: Renderer, total: int) -> None:
        self.job, self.facts, self.renderer, self.total = job, facts, renderer, total
        self.settings = job.params["evaluation"]
        self.done = 0
        self._loaded: tuple[str, CachedTarget, Drafts] | None = None

    def rows(self, name: str, mode: Mode, prompts: Sequence[Prompt]) -> list[dict[str, Any]]:
        """The rows of one set in one mode, from its shard if that is whole."""
        shard = f"{name}-{mode.name}.jsonl"
        if self.job.workspace.done(shard) is None:
            rows = self._decode(name, mode, prompts)
            with self.job.workspace.shard(shard) as path:
                write_rows(path, rows)
                self.job.workspace.facts(shard, rows=len(rows), tokens=sum(len(row["tokens"]) for row in rows))
        self.done += len(prompts) * mode.max_new_tokens
        self.job.progress.update(self.done, self.total, "tokens", f"{name} {mode.name}")
        with (self.job.workspace.path / shard).open(encoding="utf-8") as file:
            return [json.loads(line) for line in file]

    def target(self, dtype: str) -> CachedTarget:
        """The target in `dtype`."""
        return self._load(dtype)[0]

    def close(self) -> None:
        """Free the models: the next type, or vLLM, needs the memory."""
        if self._loaded is not None:
            self._loaded[1].close()
        self._loaded = None

    def costs(self) -> dict[str, float]:
        """Seconds of a verification step as the scheduler saw them: `cost.<dtype>.<rows>rows.<verified tokens>`."""
        numbers: dict[str, float] = {}
        for path in sorted(self.job.workspace.path.glob("cost-*.json")):
            values = json.loads(path.read_text(encoding="utf-8"))
            name = path.stem.removeprefix("cost-").replace("-", ".")
            numbers |= {f"cost.{name}.{n}": s for n, s in zip(values["tokens"], values["seconds"], strict=True)}
        return numbers

    def _load(self, dtype: str) -> tuple[CachedTarget, Drafts]:
        if self._loaded is None or self._loaded[0] != dtype:
            self.close()
            opened = open_export(self.job.inputs["export"], dtype, self.facts)
            threads = self.job.runtime["run"]["threads"]
            target = load_target(self.job.inputs["target"], dtype, opened.layers, threads)
            self._loaded = dtype, target, opened.attach(target)
        return self._loaded[1:]

    def _cost(self, dtype: str, rows: int) -> StepCost:
        """Measured once for each compute type and batch size, and kept: the schedule depends on it."""
        shard = f"cost-{dtype}-{rows}rows.json"
        if self.job.workspace.done(shard) is None:
            cost = measure_step_cost(self.target(dtype), rows, self.settings["k"])
            with self.job.workspace.shard(shard) as path:
                path.write_text(json.dumps({"tokens": cost.tokens, "seconds": cost.seconds}), encoding="utf-8")
        values = json.loads((self.job.workspace.path / shard).read_text(encoding="utf-8"))
        return StepCost(tuple(values["tokens"]), tuple(values["seconds"]))

    def _dynamic(self, dtype: str, rows: int) -> Dynamic | None:
        """The recipe's dynamic verification for a batch; an estimator starts anew with each."""
        if self.settings["dynamic"] == "none":
            return None
        threshold, estimator = self.settings["confidence_threshold"], AcceptanceEstimator(self.settings["k"])
        if self.settings["dynamic"] == "threshold":
            return Dynamic(lambda confidence: below_threshold(confidence, threshold), estimator)
        cost = self._cost(dtype, rows)
        return Dynamic(lambda confidence: early_stop(confidence, cost.rate), estimator)

    def _decode(self, name: str, mode: Mode, prompts: Sequence[Prompt]) -> list[dict[str, Any]]:
        target, drafts = self._load(mode.dtype)
        size, limit = self.job.runtime["evaluation"]["batch_size"], mode.max_new_tokens
        rows: list[dict[str, Any]] = []
        for start in range(0, len(prompts), size):
            batch = prompts[start : start + size]

            def report(finished: int, tokens: int, before: int = start) -> None:
                done = self.done + before * limit + tokens
                self.job.progress.update(done, self.total, "tokens", f"{name} {mode.name}")

            decoded = decode(
                target,
                drafts,
                [prompt.token_ids for prompt in batch],
                keys=[prompt.sample_id for prompt in batch],
                k=self.settings["k"],
                max_new_tokens=limit,
                eos=self.facts.eos_token_ids,
                sampling=mode.sampling,
                seed=self.job.params["run"]["seed"],
                dynamic=self._dynamic(mode.dtype, len(batch)),
                progress=report,
            )
            rows += [self._row(name, mode.name, prompt, result) for prompt, result in zip(batch, decoded, strict=True)]
        return rows

    def _row(self, name: str, mode: str, prompt: Prompt, result: Decoded) -> dict[str, Any]:
        return {
            "set": name,
            "mode": mode,
            "sample_id": prompt.sample_id,
            "prompt": prompt.turns[0],
            "text": self.renderer.decode(result.tokens),
            "finish": result.finish,
            "steps": result.steps,
            "after_end": result.after_end,
            "verified": result.verified,
            "tokens": result.tokens,
            "prompt_ids": prompt.token_ids,
        }


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """One JSON object a line."""
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def rejected_share(rows: Iterable[dict[str, Any]]) -> float:
    """Share of the verified drafts that were refused: what verification spent in vain."""
    verified = accepted = 0
    for row in rows:
        verified += sum(row["verified"])
        accepted += sum(row["steps"]) + row["after_end"]
    return 1.0 - accepted / max(verified, 1)
