"""The prompts stage: real user turns, cleaned, kept apart from the evaluation sets, and split.

A prompt is a conversation's first user turn. A source may give more of them (`turns`): they go with the prompt, up to
the first that could not be a prompt itself. Held-out prompts are first turns.

The held-out prompts are drawn from all usable prompts of a source by a seeded hash of their text, whatever number of
training prompts is asked for; so raising `rows` never moves a prompt from training to held-out or back. The rest is
taken in file order. Prompts that repeat, or nearly repeat, a benchmark prompt or a held-out one are left out and
counted. A source is read twice, streaming: once to draw the held-out prompts, once to take the training ones until
there are enough.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from torchspec_core.data.overlap import OverlapIndex, fingerprint
from torchspec_core.data.packages import GSM8K, MTBENCH, ship
from torchspec_core.data.render import load_tokenizer
from torchspec_core.data.sources import Conversation, Rejected, content_id, read_conversations, source_label
from torchspec_core.errors import UserError

if TYPE_CHECKING:
    from torchspec_core.stages.job import Job

log = logging.getLogger("torchspec.data")

OUTPUTS = ("train.jsonl", "heldout.jsonl", "mtbench.jsonl", "gsm8k.jsonl", "rejected.jsonl", "counts.json")


@dataclass(frozen=True)
class Source:
    """One entry of `data.prompts`."""

    name: str
    rows: int
    path: str | None = None
    turns: int = 1

    @property
    def label(self) -> str:
        """The name that its rows carry."""
        return source_label(self.name, self.path)


@dataclass(frozen=True)
class Rules:
    """What a prompt must satisfy: its length in tokens, and no overlap with any benchmark."""

    tokenizer: Tokenizer
    max_tokens: int
    benchmarks: Mapping[str, OverlapIndex]

    def refuse(self, prompt: str) -> str | None:
        """Why the prompt cannot be used, or None."""
        if len(self.tokenizer.encode(prompt, add_special_tokens=False).ids) > self.max_tokens:
            return f"longer than {self.max_tokens} tokens"
        for name, index in self.benchmarks.items():
            if how := index.match(prompt):
                return f"{how} match of {name}"
        return None


def row(
    turns: Sequence[str], source: str, src_id: str, category: str, question_id: str | int, sub_category: str = ""
) -> dict[str, Any]:
    """One row of a prompt file."""
    return {
        "question_id": question_id, "category": category, "sub_category": sub_category, "turns": list(turns),
        "source": source, "src_id": src_id, "difficulty": "", "multiturn": len(turns) > 1,
        "sample_id": content_id([("user", turn) for turn in turns]),
    }


def read_mtbench() -> list[dict[str, Any]]:
    """The 80 two-turn questions of MT-Bench."""
    lines = ship(MTBENCH.dist, MTBENCH.path).read_text("utf-8").splitlines()
    rows = [json.loads(line) for line in lines if line.strip()]
    return [row(r["turns"], "mtbench", str(r["question_id"]), r["category"], r["question_id"]) for r in rows]


def read_gsm8k() -> list[dict[str, Any]]:
    """100 problems of GSM8K's test split."""
    lines = ship(GSM8K.dist, GSM8K.path).read_text("utf-8").splitlines()
    rows = [json.loads(line) for line in lines if line.strip()]
    return [row([r["prompt"]], "gsm8k", r["id"], "math", r["id"]) for r in rows]


def user_turns(conversation: Conversation) -> list[str]:
    """What the user says, turn by turn."""
    return [m.content for m in conversation.messages if m.role == "user"]


def prompt_of(conversation: Conversation) -> str:
    """The first user turn."""
    return user_turns(conversation)[0]


def heldout_quotas(sources: Sequence[Source], heldout: int) -> list[int]:
    """How many held-out prompts each source gives: in proportion to its rows, the rest to the largest fractions."""
    total = sum(source.rows for source in sources)
    exact = [heldout * source.rows / total for source in sources]
    quotas = [int(share) for share in exact]
    by_fraction = sorted(range(len(sources)), key=lambda i: (quotas[i] - exact[i], i))
    for i in by_fraction[: heldout - sum(quotas)]:
        quotas[i] += 1
    return quotas


def _usable(source: Source) -> Iterator[Conversation]:
    return (c for c in read_conversations(source.name, source.path) if isinstance(c, Conversation))


def draw_heldout(source: Source, count: int, rules: Rules, seed: int, taken: set[bytes]) -> list[Conversation]:
    """The `count` usable prompts with the smallest seeded hash, in that order.

    The rules are costly, so they are asked only about a prompt whose hash would put it among the first `count`.
    """
    kept: list[tuple[int, int, Conversation]] = []  # a heap with the largest hash on top, by its negative
    seen = set(taken)
    for conversation in _usable(source) if count else ():
        mark = fingerprint(prompt_of(conversation))
        score = int.from_bytes(hashlib.blake2b(mark, digest_size=8, key=seed.to_bytes(16, "big")).digest())
        full = len(kept) == count
        if mark in seen or (full and score >= -kept[0][0]) or rules.refuse(prompt_of(conversation)):
            continue
        seen.add(mark)
        entry = (-score, -conversation.row, conversation)
        heapq.heapreplace(kept, entry) if full else heapq.heappush(kept, entry)
    return [conversation for _, _, conversation in sorted(kept, reverse=True)]


def take_train(
    source: Source, count: int, rules: Rules, heldout: OverlapIndex, seen: set[bytes]
) -> Iterator[Conversation | Rejected]:
    """The first `count` usable prompts in file order, and every row passed over on the way; adds to `seen`."""
    taken = 0
    rows = read_conversations(source.name, source.path)
    while taken < count and (item := next(rows, None)) is not None:
        if isinstance(item, Rejected):
            yield item
            continue
        prompt = prompt_of(item)
        mark = fingerprint(prompt)
        match = heldout.match(prompt)
        reason = (
            "held out" if match == "exact" else "near match of heldout" if match else "duplicate" if mark in seen
            else rules.refuse(prompt)
        )
        if reason:
            yield Rejected(item.source, item.row, reason, "filtered")
            continue
        seen.add(mark)
        taken += 1
        yield item


def check_rejected(reasons: Mapping[str, int], rows: int, limit: float, where: str) -> None:
    """Stop when the share of bad rows, counted by reason, is above `data.max_rejected`."""
    rejected = sum(reasons.values())
    if rejected > limit * rows:
        first, count = max(reasons.items(), key=lambda item: item[1])
        raise UserError(
            f"{rejected} of {rows} rows of the data are bad, more than data.max_rejected={limit:g} allows; "
            f"of {count} the reason is: {first}; see {where}, mend the data or raise the limit"
        )


def usable_turns(conversation: Conversation, most: int, rules: Rules, heldout: OverlapIndex) -> list[str]:
    """The first user turn, which is known to be usable, and those after it up to the first that is not."""
    turns = user_turns(conversation)[:most]
    refused = (n for n, turn in enumerate(turns) if n and (heldout.match(turn) or rules.refuse(turn)))
    return turns[: next(refused, most)]


def _prompt_row(conversation: Conversation, turns: Sequence[str]) -> dict[str, Any]:
    source_row = f"{conversation.source}-{conversation.row}"
    return row(turns, conversation.source, conversation.src_id, conversation.domain, source_row)


def _write(job: Job, name: str, lines: Iterable[str]) -> None:
    if job.workspace.done(name):
        return
    with job.workspace.shard(name) as path:
        path.write_text("".join(f"{line}\n" for line in lines), "utf-8")


def build(job: Job) -> None:
    """The prompts stage: reads the sources and the target's tokenizer, writes the files of `OUTPUTS`."""
    data = job.params["data"]
    sources = [Source(s["name"], s["rows"], s.get("path"), s.get("turns", 1)) for s in data["prompts"]]
    benchmarks = {"mtbench": read_mtbench(), "gsm8k": read_gsm8k()}
    indexes = {name: OverlapIndex(turn for r in rows for turn in r["turns"]) for name, rows in benchmarks.items()}
    rules = Rules(load_tokenizer(Path(job.inputs["target"])), data["max_prompt_tokens"], indexes)

    heldout: list[Conversation] = []
    quotas = heldout_quotas(sources, data["heldout"])
    for source, quota in zip(sources, quotas, strict=True):
        taken = {fingerprint(prompt_of(c)) for c in heldout}
        heldout += draw_heldout(source, quota, rules, job.params["run"]["seed"], taken)
        job.progress.update(len(heldout), data["heldout"], unit="prompts", message=f"held out from {source.label}")

    index = OverlapIndex(prompt_of(c) for c in heldout)
    train: list[dict[str, Any]] = []
    left_out: list[Rejected] = []
    seen: set[bytes] = set()
    wanted = sum(s.rows for s in sources) - data["heldout"]
    for source, quota in zip(sources, quotas, strict=True):
        for item in take_train(source, source.rows - quota, rules, index, seen):
            if isinstance(item, Rejected):
                left_out.append(item)
                continue
            train.append(_prompt_row(item, usable_turns(item, source.turns, rules, index)))
            job.progress.update(len(train), wanted, unit="prompts", message=f"taken from {source.label}")
    bad = [r for r in left_out if r.kind == "rejected"]
    _write(job, "rejected.jsonl", (r.to_json() for r in left_out))
    where = str(job.workspace.path / "rejected.jsonl")
    reasons = Counter(r.reason for r in bad)
    check_rejected(reasons, len(train) + len(left_out), job.runtime["data"]["max_rejected"], where)
    if not train or len(heldout) < data["heldout"]:
        raise UserError(
            f"data.prompts gives {len(heldout)} held-out and {len(train)} training prompts, but "
            f"data.heldout={data['heldout']} and at least one training prompt are needed: lower data.heldout or raise "
            "the rows of a source"
        )
    sets = {"train": train, "heldout": [_prompt_row(c, [prompt_of(c)]) for c in heldout], **benchmarks}
    for name, rows in sets.items():
        _write(job, f"{name}.jsonl", (json.dumps(r, ensure_ascii=False) for r in rows))
    filtered = Counter(r.reason for r in left_out if r.kind == "filtered")
    counts = {
        "rows": {name: len(rows) for name, rows in sets.items()},
        "read": len(train) + len(left_out),
        "taken": dict(Counter(r["source"] for r in train)),
        "heldout": dict(Counter(c.source for c in heldout)),
        "rejected": dict(Counter(r.reason for r in bad).most_common()),
        "filtered": dict(filtered.most_common()),
    }
    _write(job, "counts.json", [json.dumps(counts, indent=1)])
    contaminated = sum(n for reason, n in filtered.items() if "match of" in reason)
    job.workspace.record(
        rows=len(train), turns=sum(len(r["turns"]) for r in train), heldout=len(heldout),
        mtbench=len(benchmarks["mtbench"]), gsm8k=len(benchmarks["gsm8k"]),
        read=len(train) + len(left_out), rejected=len(bad), filtered=len(left_out) - len(bad),
        duplicates=filtered["duplicate"], contaminated=contaminated,
    )
    log.info("prompts: %d to train on, %d held out, %d rows left out", len(train), len(heldout), len(left_out))
