"""Stage `answers`: the target answers every training prompt, so that the drafter learns the target's own words.

One vLLM engine for the whole stage, kept full across shard borders: prompts enter in their order as others finish,
and a shard is sealed when its last answer is there. Each prompt has its own random stream, seeded from (run.seed,
sample_id): an answer depends neither on the sharding nor on where an interrupted run continued, up to the low bits
that batching changes. Token ids are the truth; the text beside them is for people.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchspec_core.data.render import Renderer, load_renderer
from torchspec_core.data.sources import Message
from torchspec_core.errors import StageError, UserError
from torchspec_core.stages.job import Job
from torchspec_core.targets.facts import TargetFacts, read_facts
from torchspec_core.targets.vllm_cpu import make_llm

_log = logging.getLogger("torchspec.targets")
_ROUND = 64


@dataclass(frozen=True)
class Prompt:
    """One prompt as the engine gets it."""

    sample_id: str
    text: str
    source: str
    token_ids: list[int]


@dataclass
class _Shard:
    """A shard being filled: rows by their place."""

    number: int
    size: int
    rows: dict[int, dict[str, Any]] = field(default_factory=dict)


def shard_name(number: int) -> str:
    """File name of a shard by its number."""
    return f"answers-{number:05d}.jsonl"


def prompt_seed(seed: int, sample_id: str) -> int:
    """Seed of one prompt's random stream: 62 bits of a hash of the run's seed and the sample."""
    digest = hashlib.blake2b(f"{seed}/{sample_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 2


def read_prompts(path: Path, renderer: Renderer) -> list[Prompt]:
    """The prompts of a `prompts` stage file, rendered with the generation prompt."""
    with path.open("rb") as file:
        rows = [json.loads(line) for line in file]
    return [
        Prompt(r["sample_id"], r["turns"][0], r["source"], renderer.prompt([Message("user", r["turns"][0])]))
        for r in rows
    ]


def model_length(prompts: list[Prompt], max_new_tokens: int, facts: TargetFacts) -> int:
    """Context the engine needs. Raises `UserError` for a prompt that leaves no room for its answer."""
    longest = max(prompts, key=lambda p: len(p.token_ids))
    needed = len(longest.token_ids) + max_new_tokens
    if needed > facts.max_position_embeddings:
        raise UserError(
            f"prompt {longest.sample_id} has {len(longest.token_ids)} tokens; with "
            f"answers.max_new_tokens={max_new_tokens} that is "
            f"more than the target's {facts.max_position_embeddings}: lower data.max_prompt_tokens or "
            "answers.max_new_tokens."
        )
    return min(-(-needed // _ROUND) * _ROUND, facts.max_position_embeddings)


def build(job: Job) -> None:
    """Reads `prompts/train.jsonl` and `target`, writes `answers-*.jsonl`."""
    target = job.inputs["target"]
    settings = job.params["answers"]
    renderer = load_renderer(target)
    prompts = read_prompts(job.inputs["prompts"] / "train.jsonl", renderer)
    if not prompts:
        raise UserError("There are no prompts to answer: data.prompts left none, see counts.json of the prompts stage.")
    size = settings["shard_prompts"]
    shards = [prompts[start : start + size] for start in range(0, len(prompts), size)]
    job.workspace.expect(len(shards))
    missing = [number for number in range(len(shards)) if job.workspace.done(shard_name(number)) is None]
    if missing:
        _answer(job, renderer, shards, missing, model_length(prompts, settings["max_new_tokens"], read_facts(target)))
    facts = [job.workspace.done(shard_name(number)) or {} for number in range(len(shards))]
    tokens, stopped = sum(f["tokens"] for f in facts), sum(f["stopped"] for f in facts)
    job.workspace.record(
        rows=len(prompts),
        tokens=tokens,
        mean_tokens=round(tokens / len(prompts), 2),
        stop_share=round(stopped / len(prompts), 4),
    )


def _answer(job: Job, renderer: Renderer, shards: list[list[Prompt]], missing: list[int], max_model_len: int) -> None:
    settings, runtime = job.params["answers"], job.runtime["answers"]
    seed, threads = job.params["run"]["seed"], job.runtime["run"]["threads"]
    total = sum(len(shard) for shard in shards)
    done = total - sum(len(shards[number]) for number in missing)
    job.progress.update(done, total, unit="prompts", message="starting vLLM")
    active = runtime["max_num_seqs"]
    llm = make_llm(
        job.inputs["target"],
        settings["dtype"],
        max_model_len,
        active,
        seed=seed,
        kv_cache_gib=runtime["kv_cache_gib"],
        threads=threads,
    )
    started = time.monotonic()
    tokens = 0
    open_shards: dict[int, _Shard] = {}
    queue = iter([(number, place, prompt) for number in missing for place, prompt in enumerate(shards[number])])
    for number, place, row in _run_engine(llm.llm_engine, queue, settings, seed, renderer, active):
        shard = open_shards.setdefault(number, _Shard(number, len(shards[number])))
        shard.rows[place] = row
        tokens += len(row["answer_ids"])
        done += 1
        rate = round(tokens / (time.monotonic() - started), 1)
        if len(shard.rows) == shard.size:
            _seal(job, open_shards.pop(number))
        job.progress.update(done, total, unit="prompts", message=f"{tokens} tokens", tokens_per_second=rate)
    seconds = time.monotonic() - started
    _log.info("answered %d prompts, %d tokens in %.1f s, %.0f tokens/s", total, tokens, seconds, tokens / seconds)
    job.workspace.record(tokens_per_second=round(tokens / seconds, 1))


def _run_engine(
    engine: Any,
    queue: Iterator[tuple[int, int, Prompt]],
    settings: dict[str, Any],
    seed: int,
    renderer: Renderer,
    active: int,
) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Keeps `active` requests in the engine; yields (shard, place, row) as answers finish."""
    from vllm import SamplingParams

    live: dict[str, tuple[int, int, Prompt]] = {}
    greedy = settings["temperature"] == 0.0
    while True:
        while len(live) < active and (entry := next(queue, None)) is not None:
            number, place, prompt = entry
            request = f"{number}-{place}"
            live[request] = entry
            params = SamplingParams(
                temperature=settings["temperature"],
                top_p=1.0 if greedy else settings["top_p"],
                max_tokens=settings["max_new_tokens"],
                seed=None if greedy else prompt_seed(seed, prompt.sample_id),
                detokenize=False,
            )
            engine.add_request(request, {"prompt_token_ids": prompt.token_ids}, params)
        if not live:
            return
        for output in engine.step():
            if output.finished:
                number, place, prompt = live.pop(output.request_id)
                yield number, place, _row(prompt, output.outputs[0], renderer)


def _row(prompt: Prompt, completion: Any, renderer: Renderer) -> dict[str, Any]:
    ids = [int(i) for i in completion.token_ids]
    finish = completion.finish_reason
    if finish not in ("stop", "length") or not ids:
        raise StageError(f"prompt {prompt.sample_id}: vLLM ended its answer with {finish!r} after {len(ids)} tokens.")
    text = renderer.decode(ids[:-1] if finish == "stop" else ids)
    return {
        "sample_id": prompt.sample_id,
        "messages": [{"role": "user", "content": prompt.text}, {"role": "assistant", "content": text}],
        "prompt_ids": prompt.token_ids,
        "answer_ids": ids,
        "finish": finish,
        "source": prompt.source,
    }


def _seal(job: Job, shard: _Shard) -> None:
    rows = [shard.rows[place] for place in range(shard.size)]
    name = shard_name(shard.number)
    with job.workspace.shard(name) as path:
        with path.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        stopped = sum(row["finish"] == "stop" for row in rows)
        job.workspace.facts(name, rows=len(rows), tokens=sum(len(row["answer_ids"]) for row in rows), stopped=stopped)
