"""Stage `answers`: the target answers every training prompt, so that the drafter learns the target's own words.

One vLLM engine for the whole stage, kept full across shard borders: prompts enter in their order as others finish,
and a shard is sealed when its last answer is there. Each prompt has its own random stream, seeded from (run.seed,
sample_id): an answer depends neither on the sharding nor on where an interrupted run continued, up to the low bits
that batching changes. Token ids are the truth; the text beside them is for people.

A prompt of several user turns is answered turn by turn, each with the target's own earlier answers before it, as a
server would send them. A conversation ends early where an answer was cut off at `max_new_tokens` or the next prompt has
no room. Turns whose prompt begins with exactly the tokens so far are one row; where it does not (a template that leaves
out earlier reasoning, an answer whose text the tokenizer splits otherwise), the turn is a row of its own.
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
from torchspec_core.data.sources import BadRow, Message, content_id
from torchspec_core.errors import StageError, UserError
from torchspec_core.stages.job import Job
from torchspec_core.targets.facts import TargetFacts, read_facts
from torchspec_core.targets.vllm_cpu import make_llm

_log = logging.getLogger("torchspec.targets")
_ROUND = 64


@dataclass(frozen=True)
class Prompt:
    """One prompt: its user turns, the token ids that the engine gets for the first, and an upper bound on the tokens
    of the later ones with their headers.
    """

    sample_id: str
    turns: tuple[str, ...]
    source: str
    token_ids: list[int]
    later_tokens: int = 0


@dataclass(frozen=True)
class Turn:
    """One answered turn: what the engine got and gave."""

    prompt_ids: list[int]
    answer_ids: list[int]
    text: str
    finish: str


@dataclass
class Dialogue:
    """A prompt being answered: its place among the shards, and its answered turns."""

    number: int
    place: int
    prompt: Prompt
    turns: list[Turn] = field(default_factory=list)

    def messages(self) -> list[Message]:
        """The turns that have been answered."""
        pairs = zip(self.prompt.turns, self.turns, strict=False)
        return [m for user, turn in pairs for m in (Message("user", user), Message("assistant", turn.text))]


@dataclass
class _Shard:
    """A shard being filled: the rows of each prompt by its place."""

    number: int
    size: int
    rows: dict[int, list[dict[str, Any]]] = field(default_factory=dict)


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
    prompts = []
    for row in rows:
        first, *later = ([Message("user", turn)] for turn in row["turns"])
        more = sum(len(renderer.prompt(turn)) for turn in later)
        prompts.append(Prompt(row["sample_id"], tuple(row["turns"]), row["source"], renderer.prompt(first), more))
    return prompts


def model_length(prompts: list[Prompt], max_new_tokens: int, facts: TargetFacts) -> int:
    """Context the engine needs, at most what the target has. Raises `UserError` for a prompt that leaves no room for
    its first answer.
    """
    longest = max(prompts, key=lambda p: len(p.token_ids))
    needed = len(longest.token_ids) + max_new_tokens
    if needed > facts.max_position_embeddings:
        raise UserError(
            f"prompt {longest.sample_id} has {len(longest.token_ids)} tokens; with "
            f"answers.max_new_tokens={max_new_tokens} that is "
            f"more than the target's {facts.max_position_embeddings}: lower data.max_prompt_tokens or "
            "answers.max_new_tokens."
        )
    needed = max(len(p.token_ids) + p.later_tokens + len(p.turns) * max_new_tokens for p in prompts)
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
    tokens, turns, stopped = (sum(f[name] for f in facts) for name in ("tokens", "turns", "stopped"))
    job.workspace.record(
        rows=sum(f["rows"] for f in facts),
        turns=turns,
        tokens=tokens,
        mean_tokens=round(tokens / turns, 2),
        stop_share=round(stopped / turns, 4),
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
    queue = iter([
        Dialogue(number, place, prompt) for number in missing for place, prompt in enumerate(shards[number])
    ])  # fmt: skip
    for dialogue in _run_engine(llm.llm_engine, queue, settings, seed, renderer, active, max_model_len):
        number = dialogue.number
        shard = open_shards.setdefault(number, _Shard(number, len(shards[number])))
        shard.rows[dialogue.place] = dialogue_rows(dialogue)
        tokens += sum(len(turn.answer_ids) for turn in dialogue.turns)
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
    queue: Iterator[Dialogue],
    settings: dict[str, Any],
    seed: int,
    renderer: Renderer,
    active: int,
    max_model_len: int,
) -> Iterator[Dialogue]:
    """Keeps `active` requests in the engine; yields each dialogue when its last turn is answered."""
    from vllm import SamplingParams

    live: dict[str, tuple[Dialogue, list[int]]] = {}
    greedy = settings["temperature"] == 0.0

    def ask(dialogue: Dialogue, prompt_ids: list[int]) -> None:
        turn = len(dialogue.turns)
        request = f"{dialogue.number}-{dialogue.place}-{turn}"
        live[request] = dialogue, prompt_ids
        stream = f"{dialogue.prompt.sample_id}/{turn}" if turn else dialogue.prompt.sample_id
        params = SamplingParams(
            temperature=settings["temperature"],
            top_p=1.0 if greedy else settings["top_p"],
            max_tokens=settings["max_new_tokens"],
            seed=None if greedy else prompt_seed(seed, stream),
            detokenize=False,
        )
        engine.add_request(request, {"prompt_token_ids": prompt_ids}, params)

    while True:
        while len(live) < active and (dialogue := next(queue, None)) is not None:
            ask(dialogue, dialogue.prompt.token_ids)
        if not live:
            return
        for output in engine.step():
            if not output.finished:
                continue
            dialogue, prompt_ids = live.pop(output.request_id)
            dialogue.turns.append(_turn(dialogue.prompt, prompt_ids, output.outputs[0], renderer))
            following = _next_prompt(dialogue, renderer)
            if following is None or len(following) + settings["max_new_tokens"] > max_model_len:
                yield dialogue
            else:
                ask(dialogue, following)


def _turn(prompt: Prompt, prompt_ids: list[int], completion: Any, renderer: Renderer) -> Turn:
    ids = [int(i) for i in completion.token_ids]
    finish = completion.finish_reason
    if finish not in ("stop", "length") or not ids:
        raise StageError(f"prompt {prompt.sample_id}: vLLM ended its answer with {finish!r} after {len(ids)} tokens.")
    return Turn(prompt_ids, ids, renderer.decode(ids[:-1] if finish == "stop" else ids), finish)


def _next_prompt(dialogue: Dialogue, renderer: Renderer) -> list[int] | None:
    """Token ids of the next turn's prompt; None when the conversation is over."""
    done = len(dialogue.turns)
    if done == len(dialogue.prompt.turns) or dialogue.turns[-1].finish != "stop":
        return None
    try:
        return renderer.prompt([*dialogue.messages(), Message("user", dialogue.prompt.turns[done])])
    except BadRow:  # what the target said cannot stand in a prompt
        return None


def dialogue_rows(dialogue: Dialogue) -> list[dict[str, Any]]:
    """The rows of an answered prompt. In a row `later` holds the turns after its first one: the token ids between the
    last answer and the next, and that answer's.
    """
    rows: list[dict[str, Any]] = []
    so_far: list[int] = []
    messages = dialogue.messages()
    for number, turn in enumerate(dialogue.turns):
        history = [{"role": m.role, "content": m.content} for m in messages[: 2 * number + 2]]
        length = len(so_far)
        if rows and turn.prompt_ids[:length] == so_far and len(turn.prompt_ids) > length:
            added = {"prompt_ids": turn.prompt_ids[length:], "answer_ids": turn.answer_ids}
            rows[-1].setdefault("later", []).append(added)
            rows[-1] |= {"messages": history, "finish": turn.finish}
        else:
            rows.append({
                "sample_id": content_id(messages[: 2 * number + 1]) if number else dialogue.prompt.sample_id,
                "messages": history,
                "prompt_ids": turn.prompt_ids,
                "answer_ids": turn.answer_ids,
                "finish": turn.finish,
                "source": dialogue.prompt.source,
            })  # fmt: skip
        so_far = turn.prompt_ids + turn.answer_ids
    return rows


def _seal(job: Job, shard: _Shard) -> None:
    rows = [row for place in range(shard.size) for row in shard.rows[place]]
    turns = [turn for row in rows for turn in (row, *row.get("later", ()))]
    stopped = len(turns) - sum(row["finish"] != "stop" for row in rows)
    tokens = sum(len(turn["answer_ids"]) for turn in turns)
    name = shard_name(shard.number)
    with job.workspace.shard(name) as path:
        with path.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        job.workspace.facts(name, rows=len(rows), turns=len(turns), tokens=tokens, stopped=stopped)
