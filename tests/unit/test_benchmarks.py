"""The ten benchmarks and user files as rows, and the stage that measures them on a tiny target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit import test_evaluation_stage as tiny
from torchspec_core.config.schema import BenchmarksSection
from torchspec_core.data.benchmarks import BENCHMARKS, CATEGORIES, _facts, read_file
from torchspec_core.errors import UserError
from torchspec_core.evaluation import benchmarks as stage
from torchspec_core.evaluation.statistics import acceptance
from torchspec_core.stages.job import Job, local_job

inputs = tiny.inputs
SPEED_BENCH = {"question_id", "category", "sub_category", "turns", "source", "src_id", "difficulty", "multiturn"}


def test_ten_benchmarks_in_five_categories_in_speed_benchs_shape() -> None:
    assert tuple(BENCHMARKS) == BenchmarksSection().names
    assert len(BENCHMARKS) == 10
    assert {benchmark.category for benchmark in BENCHMARKS.values()} == set(CATEGORIES)
    sizes = {}
    for name, benchmark in BENCHMARKS.items():
        rows = benchmark.read()
        sizes[name] = len(rows)
        assert {r["source"] for r in rows} == {name}
        assert len({r["question_id"] for r in rows}) == len(rows)
        for r in rows:
            assert SPEED_BENCH < r.keys() == SPEED_BENCH | {"sample_id"}
            assert r["turns"] and all(turn.strip() for turn in r["turns"])
    # The sizes that the packages' own descriptions give.
    published = {"gsm8k": 100, "math500": 311, "aime": 45, "humaneval": 164, "fanoutqa": 310, "truthfulqa": 100}
    assert {name: sizes[name] for name in published} == published
    assert (sizes["mmath_zh"], sizes["mtbench"]) == (311, 80)


def test_chinese_sets_are_chinese() -> None:
    for name in ("mmath_zh", "chatterbot_zh"):
        texts = [r["turns"][0] for r in BENCHMARKS[name].read()]
        assert sum(any("一" <= c <= "鿿" for c in text) for text in texts) > 0.95 * len(texts)


def test_a_question_stands_under_the_facts_of_its_parts() -> None:
    parts = [
        {"question": "Which?", "answer": ["x", "y"], "evidence": {"title": "A"}, "decomposition": []},
        {"question": "Deep?", "answer": None, "evidence": None, "decomposition": [
            {"question": "How?", "answer": "so", "evidence": {"title": "B"}, "decomposition": []},
        ]},
    ]  # fmt: skip
    assert list(_facts(parts)) == ['[A] Which? ["x", "y"]', "[B] How? so"]
    turn = BENCHMARKS["fanoutqa"].read()[0]["turns"][0]
    assert turn.splitlines()[-2:] == [
        "",
        "Question: What is the batting hand of each of the first five picks in the 1998 MLB draft?",
    ]
    assert "[Pat Burrell] What is the batting hand of Pat Burrell? Right" in turn


def test_a_file_in_speed_benchs_shape_and_one_with_turns_alone_are_read(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    full = {"question_id": "q7", "category": "roleplay", "sub_category": "s", "turns": ["a", "b"], "source": "set",
            "src_id": "9", "difficulty": "", "multiturn": True}  # fmt: skip
    path.write_text(json.dumps(full) + "\n\n" + json.dumps({"turns": ["c"]}) + "\n")
    first, second = read_file(path)
    assert {key: first[key] for key in full} == full
    assert (second["turns"], second["question_id"], second["category"], second["source"]) == (["c"], 3, "mine", "mine")


def test_bad_rows_are_named_by_number_and_reason(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"turns": ["fine"]}\n{"turns": []}\n[1]\n{"turns": ["x", 3]}\n{oops\n')
    with pytest.raises(UserError) as error:
        read_file(path)
    said = str(error.value)
    assert "row 1" not in said
    assert "row 2: `turns` must be a list of texts" in said
    assert "row 3: is list, not an object" in said
    assert "row 4: every one of `turns`" in said
    assert "row 5: Expecting property name" in said
    path.write_text("\n")
    with pytest.raises(UserError, match="has no row"):
        read_file(path)


def job(folder: Path, inputs: dict[str, Path], files: list[str], prompts: int = 3) -> Job:
    params: dict[str, Any] = {
        "evaluation": tiny.SETTINGS["evaluation"],
        "benchmarks": {"names": [], "prompts": prompts},
        "target": {"source": "tiny"},
        "run": {"seed": 0},
    }
    runtime = {"evaluation": {"batch_size": 2}, "run": {"threads": 0}, "benchmarks": {"files": files}}
    return local_job(folder, inputs, params, runtime)


def test_every_set_is_measured_and_training_prompts_are_left_out(inputs: dict[str, Path], tmp_path: Path) -> None:
    prompts = tmp_path / "prompts"
    prompts.mkdir()
    (prompts / "train.jsonl").write_text(json.dumps({"turns": ["seen before"]}) + "\n")
    texts = ["one", "Seen  BEFORE!", "two", "x" * 300, "three", "four", "five"]
    for name in ("alpha", "beta"):
        lines = "".join(json.dumps({"turns": [f"{t} {name}" if "een" not in t.lower() else t]}) + "\n" for t in texts)
        (tmp_path / f"{name}.jsonl").write_text(lines)
    files = [str(tmp_path / f"{name}.jsonl") for name in ("alpha", "beta")]
    folder = tmp_path / "out"
    stage.build(job(folder, {**inputs, "prompts": prompts}, files))
    numbers = json.loads((folder / "benchmarks.json").read_text())
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert {(r["set"], r["mode"]) for r in samples} == {(s, m) for s in ("alpha", "beta") for m in ("greedy", "t1")}
    asked = [r["prompt"] for r in samples if (r["set"], r["mode"]) == ("alpha", "greedy")]
    # Six clean rows, every second one first; the third does not fit the context of 128, so the second stands in.
    assert asked == ["one alpha", "four alpha", "two alpha"]
    for name in ("alpha", "beta"):
        assert numbers[f"meta.overlap.{name}"] == 1
        for mode in ("greedy", "t1"):
            steps = [r["steps"] for r in samples if (r["set"], r["mode"]) == (name, mode)]
            found = acceptance(steps, tiny.K)
            prefix = f"{name}.{mode}"
            assert numbers[f"{prefix}.acceptance_length"] == pytest.approx(found.length)
            assert numbers[f"{prefix}.ci95_high"] == pytest.approx(found.length + 1.96 * found.stderr)
            slots = sum(numbers[f"{prefix}.slot_{k}"] for k in (1, 2))
            assert numbers[f"{prefix}.acceptance_length"] == pytest.approx(1 + slots)
    means = [numbers[f"{name}.greedy.acceptance_length"] for name in ("alpha", "beta")]
    assert numbers["mean.greedy.acceptance_length"] == pytest.approx(sum(means) / 2)
    figure = (folder / "benchmarks.svg").read_text()
    assert all(word in figure for word in ("alpha", "beta", "greedy", "t1", "eagle3 on tiny, K=2"))


def test_a_set_that_only_repeats_training_prompts_is_refused(inputs: dict[str, Path], tmp_path: Path) -> None:
    prompts = tmp_path / "prompts"
    prompts.mkdir()
    (prompts / "train.jsonl").write_text(json.dumps({"turns": ["seen before"]}) + "\n")
    (tmp_path / "own.jsonl").write_text(json.dumps({"turns": ["seen before"]}) + "\n")
    with pytest.raises(UserError, match="benchmark own: none of its 1 rows"):
        stage.build(job(tmp_path / "out", {**inputs, "prompts": prompts}, [str(tmp_path / "own.jsonl")]))
