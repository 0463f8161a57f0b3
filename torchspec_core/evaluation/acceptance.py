"""Stage `evaluation`: how many drafted tokens the target accepts on prompts that nobody trained on.

Every set is decoded twice by the reference decoder: greedily, and at the recipe's temperature and top_p with lossless
verification and drafts drawn from the drafter's own distribution (the sampling of drafts changes acceptance, so it is
recorded beside it). Each set and mode is a shard of its own, so an interrupted evaluation continues at the next one.
The trivial drafters are replayed along the greedy text, which is what verification would have made of any drafter.
vLLM then serves the exported drafter, and its counters stand beside ours.

All numbers are flat in `evaluation.json`; `samples.jsonl` has every prompt with its text and its steps.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torchspec_core.data.render import Renderer, load_renderer
from torchspec_core.data.tokenset import TokenSet
from torchspec_core.decoding.decoder import Decoded, Sampling, decode
from torchspec_core.decoding.draft import Drafts, baseline_tables
from torchspec_core.decoding.schedule import (
    AcceptanceEstimator,
    Dynamic,
    StepCost,
    below_threshold,
    early_stop,
    measure_step_cost,
)
from torchspec_core.decoding.target import CachedTarget, load_target
from torchspec_core.errors import UserError
from torchspec_core.evaluation.drafts import open_export
from torchspec_core.evaluation.statistics import acceptance, engine_steps, replay
from torchspec_core.evaluation.vllm import ServingRequest, measure_in_child
from torchspec_core.export.checkpoint import CONFIG
from torchspec_core.kinds import kind_of_export, unserved
from torchspec_core.stages.job import Job
from torchspec_core.targets.answers import Prompt, read_prompts
from torchspec_core.targets.engine import set_threads
from torchspec_core.targets.facts import TargetFacts, read_facts, read_json

_log = logging.getLogger("torchspec.evaluation")

GREEDY, SAMPLED = "greedy", "t1"
VLLM_SHARD, RESULT, SAMPLES = "vllm.json", "evaluation.json", "samples.jsonl"
# The set whose greedy text the baselines replay and vLLM serves.
SERVED_SET = "heldout"


def build(job: Job) -> None:
    """Inputs target, prompts, tokens, export; parameters `evaluation`, `serving`, `run.seed`."""
    evaluation, serving = job.params["evaluation"], job.params["serving"]
    set_threads(job.runtime["run"]["threads"])
    facts = read_facts(job.inputs["target"])
    renderer = load_renderer(job.inputs["target"])
    sets = {name: _prompts(job, name, renderer, facts) for name in evaluation["sets"]}
    work = _Work(job, facts, renderer, total=2 * sum(map(len, sets.values())) * evaluation["max_new_tokens"])
    refused = unserved(read_json(job.inputs["export"] / CONFIG)) if serving["vllm"] else None
    serve = serving["vllm"] and SERVED_SET in sets and refused is None
    job.workspace.expect(2 * len(sets) + bool(serve) + 2)
    rows = {
        (name, mode): work.rows(name, mode, prompts) for mode in (GREEDY, SAMPLED) for name, prompts in sets.items()
    }
    work.close()

    numbers: dict[str, Any] = {
        "meta.k": evaluation["k"],
        "meta.temperature": evaluation["temperature"],
        "meta.top_p": evaluation["top_p"],
        f"meta.{GREEDY}.dtype": evaluation["dtype"],
        f"meta.{SAMPLED}.dtype": evaluation["sampled_dtype"],
        f"meta.{GREEDY}.drafting": "greedy",
        f"meta.{SAMPLED}.drafting": "probabilistic",
        f"meta.{SAMPLED}.verification": evaluation["verification"],
        "meta.max_new_tokens": evaluation["max_new_tokens"],
        "meta.dynamic": evaluation["dynamic"],
        "meta.definition": "1 + accepted drafts per verification step, bonus token included; slots are unconditional",
    }
    for (name, mode), done in rows.items():
        numbers |= acceptance([row["steps"] for row in done], evaluation["k"]).flat(f"{name}.{mode}")
        numbers |= {
            f"{name}.{mode}.prompts": len(done),
            f"{name}.{mode}.tokens": sum(len(row["tokens"]) for row in done),
            f"{name}.{mode}.rejected_share": rejected_share(done),
        }
    greedy = rows.get((SERVED_SET, GREEDY), [])
    if greedy:
        numbers |= _baselines(job, facts, greedy)
        if serve:
            numbers |= _served(job, greedy)
    if refused is not None:
        _log.warning("not served in vLLM: %s", refused)
        numbers["meta.vllm.skipped"] = f"{refused}, so only this project's decoder measured it"
    with job.workspace.shard(RESULT) as path:
        path.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    with job.workspace.shard(SAMPLES) as path:
        _write_rows(path, (row for done in rows.values() for row in done))
    headline = {
        name: value
        for name, value in numbers.items()
        if name.endswith("acceptance_length") and not isinstance(value, str)
    }
    job.workspace.record(
        rows=sum(map(len, rows.values())), **{name.replace(".", "_"): round(v, 4) for name, v in headline.items()}
    )
    _log.info("acceptance lengths: %s", ", ".join(f"{name} {value:.3f}" for name, value in headline.items()))


def _prompts(job: Job, name: str, renderer: Renderer, facts: TargetFacts) -> list[Prompt]:
    """The first prompts of a set that fit the target's context together with their answer."""
    settings = job.params["evaluation"]
    room = facts.max_position_embeddings - settings["max_new_tokens"] - settings["k"]
    path = job.inputs["prompts"] / f"{name}.jsonl"
    fitting = [prompt for prompt in read_prompts(path, renderer) if len(prompt.token_ids) <= room]
    if not fitting:
        raise UserError(
            f"{path}: no prompt fits the target's context of {facts.max_position_embeddings} tokens with "
            f"evaluation.max_new_tokens={settings['max_new_tokens']}; lower that, or leave the set out."
        )
    return fitting[: settings["prompts"]]


class _Work:
    """Decodes set after set; target and drafter are loaded once for each type, and only if some shard is missing."""

    def __init__(self, job: Job, facts: TargetFacts, renderer: Renderer, total: int) -> None:
        self.job, self.facts, self.renderer, self.total = job, facts, renderer, total
        self.done = 0
        self._loaded: tuple[str, CachedTarget, Drafts] | None = None

    def rows(self, name: str, mode: str, prompts: Sequence[Prompt]) -> list[dict[str, Any]]:
        """The rows of one set in one mode, from its shard if that is whole."""
        shard = f"{name}-{mode}.jsonl"
        settings = self.job.params["evaluation"]
        if self.job.workspace.done(shard) is None:
            sampling = (
                Sampling()
                if mode == GREEDY
                else Sampling(settings["temperature"], settings["top_p"], "probabilistic", settings["verification"])
            )
            rows = self._decode(name, mode, prompts, sampling)
            with self.job.workspace.shard(shard) as path:
                _write_rows(path, rows)
                self.job.workspace.facts(shard, rows=len(rows), tokens=sum(len(row["tokens"]) for row in rows))
        self.done += len(prompts) * settings["max_new_tokens"]
        self.job.progress.update(self.done, self.total, "tokens", f"{name} {mode}")
        with (self.job.workspace.path / shard).open(encoding="utf-8") as file:
            return [json.loads(line) for line in file]

    def close(self) -> None:
        """Free the models: the next type, or vLLM, needs the memory."""
        if self._loaded is not None:
            self._loaded[1].close()
        self._loaded = None

    def _load(self, dtype: str) -> tuple[CachedTarget, Drafts]:
        if self._loaded is None or self._loaded[0] != dtype:
            self.close()
            opened = open_export(self.job.inputs["export"], dtype, self.facts)
            threads = self.job.runtime["run"]["threads"]
            target = load_target(self.job.inputs["target"], dtype, opened.layers, threads)
            self._loaded = dtype, target, opened.attach(target)
        return self._loaded[1:]

    def _dynamic(self, target: CachedTarget, rows: int) -> Dynamic | None:
        """The recipe's dynamic verification for a batch; an estimator starts anew with each."""
        settings = self.job.params["evaluation"]
        if settings["dynamic"] == "none":
            return None
        threshold, k = settings["confidence_threshold"], settings["k"]
        if settings["dynamic"] == "threshold":
            return Dynamic(lambda confidence: below_threshold(confidence, threshold), AcceptanceEstimator(k))
        cost: StepCost = measure_step_cost(target, rows, k)
        _log.info("seconds of a step by verified tokens: %s", dict(zip(cost.tokens, cost.seconds, strict=True)))
        return Dynamic(lambda confidence: early_stop(confidence, cost.rate), AcceptanceEstimator(k))

    def _decode(self, name: str, mode: str, prompts: Sequence[Prompt], sampling: Sampling) -> list[dict[str, Any]]:
        settings, run = self.job.params["evaluation"], self.job.params["run"]
        target, drafts = self._load(settings["dtype" if sampling.greedy else "sampled_dtype"])
        size = self.job.runtime["evaluation"]["batch_size"]
        limit = settings["max_new_tokens"]
        rows: list[dict[str, Any]] = []
        for start in range(0, len(prompts), size):
            batch = prompts[start : start + size]

            def report(finished: int, tokens: int, before: int = start) -> None:
                self.job.progress.update(self.done + before * limit + tokens, self.total, "tokens", f"{name} {mode}")

            decoded = decode(
                target,
                drafts,
                [prompt.token_ids for prompt in batch],
                keys=[prompt.sample_id for prompt in batch],
                k=settings["k"],
                max_new_tokens=limit,
                eos=self.facts.eos_token_ids,
                sampling=sampling,
                seed=run["seed"],
                dynamic=self._dynamic(target, len(batch)),
                progress=report,
            )
            rows += [self._row(name, mode, prompt, result) for prompt, result in zip(batch, decoded, strict=True)]
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


def rejected_share(rows: Iterable[dict[str, Any]]) -> float:
    """Share of the verified drafts that were refused: what verification spent in vain."""
    verified = accepted = 0
    for row in rows:
        verified += sum(row["verified"])
        accepted += sum(row["steps"]) + row["after_end"]
    return 1.0 - accepted / max(verified, 1)


def _baselines(job: Job, facts: TargetFacts, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Acceptance of the trivial drafters on the greedy texts, their tables from the supervised training tokens."""
    tokens = TokenSet(job.inputs["tokens"])
    samples = (tokens.get(i) for i in range(len(tokens)))
    tables = baseline_tables(((sample.input_ids, sample.loss_mask) for sample in samples), facts.vocab_size)
    k = job.params["evaluation"]["k"]
    numbers: dict[str, Any] = {}
    for name, table in tables.items():
        steps = [replay(row["tokens"], row["finish"] == "stop", table.tolist(), k) for row in rows]
        numbers |= acceptance(steps, k).flat(f"baseline.{name}")
    return numbers


def _served(job: Job, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """vLLM's acceptance and text on the served prompts, and what our decoder counts there by vLLM's rules."""
    serving, k = job.params["serving"], job.params["evaluation"]["k"]
    chosen = rows[: serving["prompts"]]
    if job.workspace.done(VLLM_SHARD) is None:
        exported = job.inputs["export"] / CONFIG
        request = ServingRequest(
            target=str(job.inputs["target"]),
            drafter=str(job.inputs["export"]),
            prompts=[row["prompt_ids"] for row in chosen],
            k=k,
            method=kind_of_export(read_json(exported), where=str(exported)).method,
            max_new_tokens=serving["max_new_tokens"],
            dtype=serving["dtype"],
            threads=job.runtime["run"]["threads"],
        )
        job.progress.update(0, 1, "engines", "vLLM, with and without the drafter")
        result = measure_in_child(request, job.workspace.scratch("vllm"), job.workspace.logs / "vllm.log")
        with job.workspace.shard(VLLM_SHARD) as path:
            path.write_text(json.dumps(asdict(result)), encoding="utf-8")
        job.progress.update(1, 1, "engines", "vLLM, with and without the drafter")
    values = json.loads((job.workspace.path / VLLM_SHARD).read_text(encoding="utf-8"))
    counters = values["counters"]
    drafts = max(counters["drafts"], 1)
    equal = [a == b for a, b in zip(values["texts"], values["plain"], strict=True)]
    same = [text == row["tokens"][: len(text)] for text, row in zip(values["texts"], chosen, strict=True)]
    limit = serving["max_new_tokens"]
    ours = acceptance([engine_steps(len(row["tokens"]), row["steps"], row["after_end"], limit) for row in chosen], k)
    prefix = f"{SERVED_SET}.{GREEDY}"
    return {
        f"{prefix}.vllm_acceptance_length": 1.0 + counters["accepted"] / drafts,
        **{f"{prefix}.vllm_slot_{slot}": n / drafts for slot, n in enumerate(counters["accepted_by_slot"], start=1)},
        f"{prefix}.vllm_drafts": counters["drafts"],
        f"{prefix}.vllm_prompts": len(chosen),
        f"{prefix}.vllm_text_equal": sum(equal) / len(equal),
        f"{prefix}.vllm_text_as_decoder": sum(same) / len(same),
        # vLLM verifies every draft here, so only a run of ours that does too can stand beside it.
        **(
            {}
            if job.params["evaluation"]["dynamic"] != "none"
            else {f"{prefix}.decoder_acceptance_length_as_vllm": ours.length}
        ),
        f"{prefix}.vllm_seconds": values["seconds"],
        f"{prefix}.vllm_plain_seconds": values["plain_seconds"],
        "meta.vllm.dtype": serving["dtype"],
        "meta.vllm.max_new_tokens": limit,
    }


def _write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
