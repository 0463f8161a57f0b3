"""vLLM's own acceptance beside our decoder's, on the same prompts: greedy, and sampled if the engine samples rightly.

Sampled text is first compared with the target's nucleus; nothing is recorded of an engine that leaves it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from torchspec_core.decoding.decoder import Sampling
from torchspec_core.decoding.target import load_target
from torchspec_core.evaluation.nucleus import TOLERANCE, check_nucleus, refuse_outside
from torchspec_core.evaluation.statistics import acceptance, engine_steps
from torchspec_core.evaluation.vllm import ServingRequest, measure_in_child
from torchspec_core.evaluation.work import GREEDY, SAMPLED, Mode
from torchspec_core.export.checkpoint import CONFIG
from torchspec_core.kinds import kind_of_export
from torchspec_core.stages.job import Job
from torchspec_core.targets.facts import read_json

VLLM_SHARD = "vllm.json"


def as_vllm(job: Job) -> Mode:
    """What vLLM does at the recipe's temperature on a CPU: drafts chosen greedily, the standard rule."""
    evaluation, serving = job.params["evaluation"], job.params["serving"]
    sampling = Sampling(evaluation["temperature"], evaluation["top_p"], "greedy", "standard")
    return Mode(f"{SAMPLED}-as-vllm", serving["dtype"], sampling, serving["max_new_tokens"])


def served(
    job: Job, set_name: str, greedy: Sequence[Mapping[str, Any]], sampled: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """vLLM's acceptance and text on the served prompts, and what our decoder counts there by vLLM's rules.

    Args:
        greedy: our rows of the set; the first `serving.prompts` are served.
        sampled: our rows of the mode `as_vllm`, of the same prompts; empty = no sampled run.

    Raises:
        StageError: the engine's sampled text leaves the target's nucleus.
    """
    serving, evaluation = job.params["serving"], job.params["evaluation"]
    chosen = greedy[: serving["prompts"]]
    if job.workspace.done(VLLM_SHARD) is None:
        _measure(job, chosen, bool(sampled))
    values = json.loads((job.workspace.path / VLLM_SHARD).read_text(encoding="utf-8"))
    equal = [a == b for a, b in zip(values["texts"], values["plain"], strict=True)]
    same = [text == row["tokens"][: len(text)] for text, row in zip(values["texts"], chosen, strict=True)]
    limit, every_draft = serving["max_new_tokens"], evaluation["dynamic"] == "none"
    prefix = f"{set_name}.{GREEDY}"
    numbers = {
        **_counted(prefix, values["counters"]),
        f"{prefix}.vllm_prompts": len(chosen),
        f"{prefix}.vllm_text_equal": sum(equal) / len(equal),
        f"{prefix}.vllm_text_as_decoder": sum(same) / len(same),
        f"{prefix}.vllm_seconds": values["seconds"],
        f"{prefix}.vllm_plain_seconds": values["plain_seconds"],
        "meta.vllm.dtype": serving["dtype"],
        "meta.vllm.max_new_tokens": limit,
    }
    # vLLM verifies every draft here, so only a run of ours that does too can stand beside it.
    if every_draft:
        numbers |= _ours(prefix, chosen, limit, evaluation["k"])
    if sampled:
        prefix = f"{set_name}.{SAMPLED}"
        numbers |= _counted(prefix, values["sampled_counters"])
        numbers |= {
            f"{prefix}.vllm_prompts": len(chosen),
            f"{prefix}.vllm_checked_tokens": values["nucleus"]["tokens"],
            f"{prefix}.vllm_outside_nucleus": values["nucleus"]["outside"],
            "meta.vllm.drafting": "greedy",
        }
        if every_draft:
            numbers |= _ours(prefix, sampled, limit, evaluation["k"])
    return numbers


def _counted(prefix: str, counters: Mapping[str, Any]) -> dict[str, Any]:
    drafts = max(counters["drafts"], 1)
    return {
        f"{prefix}.vllm_acceptance_length": 1.0 + counters["accepted"] / drafts,
        **{f"{prefix}.vllm_slot_{slot}": n / drafts for slot, n in enumerate(counters["accepted_by_slot"], start=1)},
        f"{prefix}.vllm_drafts": counters["drafts"],
    }


def _ours(prefix: str, rows: Sequence[Mapping[str, Any]], limit: int, k: int) -> dict[str, Any]:
    found = acceptance([engine_steps(len(row["tokens"]), row["steps"], row["after_end"], limit) for row in rows], k)
    return {
        f"{prefix}.decoder_acceptance_length_as_vllm": found.length,
        f"{prefix}.decoder_acceptance_length_as_vllm_stderr": found.stderr,
    }


def _measure(job: Job, rows: Sequence[Mapping[str, Any]], sampled: bool) -> None:
    """Run the engines and seal their answers, unless sampled text leaves the nucleus."""
    serving, evaluation = job.params["serving"], job.params["evaluation"]
    exported = job.inputs["export"] / CONFIG
    request = ServingRequest(
        target=str(job.inputs["target"]),
        drafter=str(job.inputs["export"]),
        prompts=[row["prompt_ids"] for row in rows],
        k=evaluation["k"],
        method=kind_of_export(read_json(exported), where=str(exported)).method,
        max_new_tokens=serving["max_new_tokens"],
        dtype=serving["dtype"],
        threads=job.runtime["run"]["threads"],
        temperature=evaluation["temperature"] if sampled else 0.0,
        top_p=evaluation["top_p"],
        seed=job.params["run"]["seed"],
    )
    said = "vLLM, with and without the drafter"
    job.progress.update(0, 1, "engines", said)
    result = measure_in_child(request, job.workspace.scratch("vllm"), job.workspace.logs / "vllm.log")
    values = asdict(result)
    if sampled:
        target = load_target(job.inputs["target"], "float32", threads=job.runtime["run"]["threads"])
        found = check_nucleus(
            target, request.prompts, result.sampled, request.temperature, request.top_p, TOLERANCE[request.dtype]
        )
        target.close()
        refuse_outside(found, request.temperature, request.top_p, "vLLM")
        values["nucleus"] = asdict(found)
    with job.workspace.shard(VLLM_SHARD) as path:
        path.write_text(json.dumps(values), encoding="utf-8")
    job.progress.update(1, 1, "engines", said)
