"""The prompts stage: order, split, de-duplication, decontamination, counts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_chat import chat, write_jsonl, write_target
from torchspec_core.data import prompts
from torchspec_core.data.packages import GSM8K, MTBENCH
from torchspec_core.data.prompts import Source, build, heldout_quotas
from torchspec_core.errors import UserError
from torchspec_core.stages.job import local_job

QUESTION = "Compose an engaging travel blog post about a recent trip to Hawaii, highlighting cultural experiences."
PROBLEM = "Anna sold a third of her vacuum cleaners at the green house and two more at the red one; how many are left?"


@pytest.fixture
def benchmarks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    turns = [QUESTION, "Rewrite your previous response. Start every sentence with the letter A."]
    mtbench = {"question_id": 81, "category": "writing", "turns": turns}
    gsm8k = {"id": "gsm8k-test-1", "source": "gsm8k", "prompt": PROBLEM, "expected": "3", "upstream_answer": ""}
    files = {
        MTBENCH.dist: write_jsonl(tmp_path / "mtbench.jsonl", [mtbench]),
        GSM8K.dist: write_jsonl(tmp_path / "gsm8k.jsonl", [gsm8k]),
    }
    monkeypatch.setattr(prompts, "ship", lambda dist, path: files[dist])
    yield


def run(tmp_path: Path, rows: list[object], name: str = "out", **data: Any) -> Path:
    source = write_jsonl(tmp_path / "mine.jsonl", rows)
    params = {"prompts": [{"name": "jsonl", "rows": 10, "path": str(source)}], "max_prompt_tokens": 180, "heldout": 3}
    job = local_job(
        tmp_path / name,
        inputs={"target": write_target(tmp_path / "target")},
        params={"data": {**params, **data}, "run": {"seed": 0}},
        runtime={"data": {"max_rejected": 0.01}},
    )
    build(job)
    return job.workspace.path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def questions(n: int) -> list[object]:
    return [chat(question(i), "an answer") for i in range(n)]


def question(i: int) -> str:
    # No five words in a row are the same in two of them.
    return f"question number {i} about the topic {i * 7919 % 1009} in the big book"


def source_rows(tmp_path: Path, rows: int) -> list[dict[str, Any]]:
    return [{"name": "jsonl", "rows": rows, "path": str(tmp_path / "mine.jsonl")}]


@pytest.mark.usefixtures("benchmarks")
def test_rows_have_the_shape_of_the_contract(tmp_path: Path) -> None:
    out = run(tmp_path, questions(30))
    train, heldout = read(out / "train.jsonl"), read(out / "heldout.jsonl")
    assert (len(train), len(heldout)) == (7, 3)
    held = {r["turns"][0] for r in heldout}
    assert [r["turns"][0] for r in train] == [q for q in map(question, range(30)) if q not in held][:7]
    assert set(train[0]) == {
        "question_id", "category", "sub_category", "turns", "source", "src_id", "difficulty", "multiturn", "sample_id",
    }  # fmt: skip
    assert len({r["sample_id"] for r in train + heldout}) == 10
    (first,) = read(out / "mtbench.jsonl")
    assert (first["question_id"], first["category"], first["multiturn"]) == (81, "writing", True)
    assert read(out / "gsm8k.jsonl")[0]["turns"] == [PROBLEM]


@pytest.mark.usefixtures("benchmarks")
def test_golden_bytes_of_the_stage(tmp_path: Path) -> None:
    # When this fails, the stage writes something else: raise its version in the pipeline.
    out = run(tmp_path, [*questions(20), chat(PROBLEM, "x"), chat(question(3), "again")], heldout=2)
    content = b"".join((out / name).read_bytes() for name in prompts.OUTPUTS)
    assert hashlib.blake2b(content, digest_size=8).hexdigest() == "86768973f0bddd48"


@pytest.mark.usefixtures("benchmarks")
def test_later_turns_go_with_their_prompt_up_to_the_first_that_cannot_be_used(tmp_path: Path) -> None:
    def talk(number: int, *later: str) -> object:
        return chat(question(number), *(text for turn in later for text in ("an answer", turn)), "the last answer")

    rows = [
        talk(0, "and then?", "and now?", "and in the end?"),
        talk(1, "fine", PROBLEM, "what follows a benchmark's problem"),
        talk(2, "x" * 200, "what follows a turn that is too long"),
        talk(3),
    ]
    out = run(tmp_path, rows, heldout=0, prompts=[{**source_rows(tmp_path, 10)[0], "turns": 3}])
    assert [r["turns"] for r in read(out / "train.jsonl")] == [
        [question(0), "and then?", "and now?"], [question(1), "fine"], [question(2)], [question(3)],
    ]  # fmt: skip
    assert [r["multiturn"] for r in read(out / "train.jsonl")] == [True, True, False, False]


@pytest.mark.usefixtures("benchmarks")
def test_more_rows_leave_the_heldout_set_alone(tmp_path: Path) -> None:
    rows = questions(60)
    few = run(tmp_path, rows, "few", prompts=source_rows(tmp_path, 10))
    many = run(tmp_path, rows, "many", prompts=source_rows(tmp_path, 40))
    assert (few / "heldout.jsonl").read_bytes() == (many / "heldout.jsonl").read_bytes()
    assert (many / "train.jsonl").read_bytes().startswith((few / "train.jsonl").read_bytes())
    more = run(tmp_path, rows, "more", heldout=5)
    assert (more / "heldout.jsonl").read_bytes().startswith((few / "heldout.jsonl").read_bytes())


@pytest.mark.usefixtures("benchmarks")
def test_planted_benchmark_rows_and_repeats_are_left_out_and_counted(tmp_path: Path) -> None:
    planted = [
        chat(QUESTION.lower(), "x"),
        chat(f"Please help. {QUESTION} Make it long.", "x"),
        chat(f"{PROBLEM} Think step by step.", "x"),
        chat("Rewrite your previous response. Start every sentence with the letter A!", "x"),
        chat("Question number 0, about the topic 0 in the big book?", "x"),
        chat("x" * 200, "too long"),
    ]
    out = run(tmp_path, [*questions(10), *planted], heldout=1, prompts=source_rows(tmp_path, 50))
    counts = json.loads((out / "counts.json").read_text())
    reasons = {r["row"]: r["reason"] for r in read(out / "rejected.jsonl")}
    assert reasons[11] == "exact match of mtbench"
    assert reasons[12] == "near match of mtbench"
    assert reasons[13] == "near match of gsm8k"
    assert reasons[14] == "exact match of mtbench"
    assert reasons[15] in ("duplicate", "held out")
    assert reasons[16] == "longer than 180 tokens"
    assert counts["rows"] == {"train": 9, "heldout": 1, "mtbench": 1, "gsm8k": 1}
    assert counts["filtered"]["exact match of mtbench"] == 2
    assert counts["rejected"] == {}
    texts = [r["turns"][0] for name in ("train", "heldout") for r in read(out / f"{name}.jsonl")]
    assert not [text for text in texts if "Hawaii" in text or "vacuum" in text]


@pytest.mark.usefixtures("benchmarks")
def test_a_prompt_near_a_heldout_one_is_not_trained_on(tmp_path: Path) -> None:
    held = read(run(tmp_path, questions(30)) / "heldout.jsonl")[0]["turns"][0]
    family = [held, *(f"{held} {word}" for word in ("please", "now", "today", "again"))]
    rows = [*questions(30), *(chat(text, "x") for text in family)]
    out = run(tmp_path, rows, "again", heldout=1, prompts=source_rows(tmp_path, 40))
    # Whichever of the family is held out, none of the others is trained on.
    assert read(out / "heldout.jsonl")[0]["turns"][0] in family
    train = [r["turns"][0] for r in read(out / "train.jsonl")]
    assert len(train) == 29
    assert not set(family) & set(train)
    reasons = json.loads((out / "counts.json").read_text())["filtered"]
    assert reasons["near match of heldout"] >= 4


@pytest.mark.usefixtures("benchmarks")
def test_too_many_bad_rows_and_too_few_prompts_stop(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"1 of 12 rows of the data are bad, more than data\.max_rejected=0\.01 allows"):
        run(tmp_path, ["{broken", *questions(30)], "bad", heldout=1, prompts=source_rows(tmp_path, 11))
    with pytest.raises(UserError, match=r"gives 2 held-out and 0 training prompts, but data\.heldout=3"):
        run(tmp_path, questions(2), "few")
    with pytest.raises(UserError, match="1 of 2 rows of the data are bad"):  # the cause, not that prompts are too few
        run(tmp_path, ["{broken", *questions(1)], "few and bad")


def test_heldout_quotas_follow_the_rows() -> None:
    assert heldout_quotas([Source("a", 700), Source("b", 300)], 10) == [7, 3]
    assert heldout_quotas([Source("a", 1), Source("b", 1), Source("c", 1)], 10) == [4, 3, 3]
    assert heldout_quotas([Source("a", 5000)], 60) == [60]
