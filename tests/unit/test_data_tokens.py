"""The tokens and vocabulary stages: rows, masks, limits, resume, the same bytes for any number of workers."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from distributed import LocalCluster

from tests.tiny_chat import END_OF_TURN, VOCAB_SIZE, byte_tokenizer, chat, write_jsonl, write_target
from torchspec_core.data import tokens, vocabulary
from torchspec_core.data.tokens import TokenSet
from torchspec_core.errors import UserError
from torchspec_core.stages.job import Job, local_job


def answer(name: str, prompt: list[int], reply: list[int]) -> dict[str, Any]:
    return {"sample_id": name, "prompt_ids": prompt, "answer_ids": reply, "finish": "stop", "source": "s"}


def make_job(
    tmp_path: Path,
    answers: list[object],
    name: str = "tokens",
    workers: int = 0,
    scheduler: str | None = None,
    **data: Any,
) -> Job:
    half = len(answers) // 2
    write_jsonl(tmp_path / "answers" / "answers-00000.jsonl", answers[:half])
    write_jsonl(tmp_path / "answers" / "answers-00001.jsonl", answers[half:])
    for empty in ("mtbench", "gsm8k"):
        write_jsonl(tmp_path / "prompts" / f"{empty}.jsonl", [])
    write_jsonl(tmp_path / "prompts" / "heldout.jsonl", [{"turns": ["a held out question"]}])
    params = {"conversations": [], "max_length": 12, "min_supervised": 2, "supervise": "all", "shard_rows": 4}
    inputs = {name: tmp_path / name for name in ("target", "answers", "prompts")}
    write_target(inputs["target"])
    runtime = {"max_rejected": 0.5, "workers": workers, "scheduler": scheduler}
    return local_job(tmp_path / name, inputs, {"data": {**params, **data}}, {"data": runtime})


def outputs(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file() and p.name != "shards.jsonl"}


def test_every_answer_of_a_row_is_supervised(tmp_path: Path) -> None:
    row = {**answer("a", [5, 6], [8, 2]), "later": [{"prompt_ids": [9], "answer_ids": [10, 11, 2]}]}
    job = make_job(tmp_path, [row, answer("b", [5], [6, 2])])
    tokens.build(job)
    first = TokenSet(job.workspace.path).get(0)
    assert first.input_ids.tolist() == [5, 6, 8, 2, 9, 10, 11, 2]
    assert first.loss_mask.tolist() == [0, 0, 1, 1, 0, 1, 1, 1]


def test_answers_keep_their_ids_and_only_the_answer_is_supervised(tmp_path: Path) -> None:
    rows: list[object] = [answer("a", [5, 6, 7], [8, 9, END_OF_TURN]), answer("b", list(range(10, 20)), [20, 21, 22])]
    job = make_job(tmp_path, rows)
    tokens.build(job)
    got = TokenSet(job.workspace.path)
    assert len(got) == 2
    assert got.sample_ids == ["a", "b"]
    first, second = got.get(0), got.get(1)
    assert first.input_ids.tolist() == [5, 6, 7, 8, 9, END_OF_TURN]
    assert first.loss_mask.tolist() == [False] * 3 + [True] * 3
    assert first.input_ids.dtype == np.int32
    assert second.input_ids.tolist() == [*range(10, 20), 20, 21]  # cut on the right to max_length
    assert second.loss_mask.tolist() == [False] * 10 + [True] * 2
    assert got.lengths.tolist() == [6, 12]
    assert got.supervised.tolist() == [3, 2]


def test_shard_has_the_columns_of_the_contract(tmp_path: Path) -> None:
    job = make_job(tmp_path, [answer("a", [5], [8, 9]), answer("b", [5], [8, 9, 3])])
    tokens.build(job)
    table = pa.ipc.open_file(str(job.workspace.path / "tokens-00000.arrow")).read_all()
    kind = {"domain": "onpolicy", "source": "s"}
    assert table.to_pylist() == [
        {"sample_id": "a", "input_ids": [5, 8, 9], "loss_mask": [1, 2], "length": 3, "supervised": 2, **kind},
        {"sample_id": "b", "input_ids": [5, 8, 9, 3], "loss_mask": [1, 3], "length": 4, "supervised": 3, **kind},
    ]
    assert table.schema.field("input_ids").type == pa.list_(pa.int32())


def test_each_bad_answer_has_its_reason(tmp_path: Path) -> None:
    rows: list[object] = [
        answer("ok", [5], [8, 9]),
        "{broken",
        answer("empty", [5], []),
        answer("range", [5], [8, VOCAB_SIZE]),
        answer("no-prompt", [], [8, 9]),
        answer("short", [5], [8]),
        answer("late", list(range(5, 16)), [8, 9, 10]),
        answer("ok", [6], [8, 9]),
    ]
    job = make_job(tmp_path, rows)
    strict = {"data": {**job.runtime["data"], "max_rejected": 0.1}}
    with pytest.raises(UserError, match=r"4 of 8 rows of the data are bad, more than data\.max_rejected=0\.1 allows"):
        tokens.build(dataclasses.replace(job, runtime=strict))
    tokens.build(job)
    rejected = [json.loads(line) for line in (job.workspace.path / "rejected.jsonl").read_text().splitlines()]
    assert [(r["source"], r["row"], r["kind"], r["reason"].split(":")[0]) for r in rejected] == [
        ("answers-00000.jsonl", 2, "rejected", "invalid JSON"),
        ("answers-00000.jsonl", 3, "rejected", "`answer_ids` is empty or not a list"),
        ("answers-00000.jsonl", 4, "rejected", "`answer_ids` holds something that is not a token id below 300"),
        ("answers-00001.jsonl", 1, "rejected", "`prompt_ids` is empty or not a list"),
        ("s", 2, "filtered", "fewer than 2 supervised tokens"),
        ("s", 3, "filtered", "fewer than 2 supervised tokens in the first 12"),
        ("s", 0, "filtered", "duplicate sample"),
    ]
    counts = json.loads((job.workspace.path / "counts.json").read_text())
    assert {name: counts[name] for name in ("rows_in", "rows", "tokens", "supervised")} == {
        "rows_in": 8, "rows": 1, "tokens": 3, "supervised": 2,
    }  # fmt: skip
    assert counts["by_source"] == {"onpolicy/s": {"rows": 1, "tokens": 3, "supervised": 2}}
    assert TokenSet(job.workspace.path).sample_ids == ["ok"]


def test_an_all_empty_mask_stops(tmp_path: Path) -> None:
    job = make_job(tmp_path, [answer("a", [5], [8]), answer("b", [5], [8])])
    with pytest.raises(UserError, match="no sample has a supervised token"):
        tokens.build(job)
    with pytest.raises(UserError, match="nothing to train on"):
        tokens.build(make_job(tmp_path, [], "none"))


def _conversations(tmp_path: Path) -> list[dict[str, Any]]:
    rows = [chat(f"q{i}", f"answer {i}", "more", "ok") for i in range(30)]
    rows[3] = chat("A held-out question!", "must not be trained on")
    path = write_jsonl(tmp_path / "mine.jsonl", list(rows))
    return [{"name": "jsonl", "rows": 28, "path": str(path)}]


@pytest.mark.parametrize("policy, ends", [("all", 2), ("last", 1)])
def test_conversations_are_rendered_and_heldout_ones_left_out(tmp_path: Path, policy: str, ends: int) -> None:
    twice: list[object] = [answer("a", [5], [8, 9])] * 2
    job = make_job(tmp_path, twice, conversations=_conversations(tmp_path), max_length=200, supervise=policy)
    tokens.build(job)
    got = TokenSet(job.workspace.path)
    assert len(got) == 28  # one answer, and 28 rows less the held-out one
    row = got.get(1)
    text = byte_tokenizer().decode(row.input_ids[row.loss_mask].tolist(), skip_special_tokens=False)
    assert text == ("answer 0<|im_end|>ok<|im_end|>" if policy == "all" else "ok<|im_end|>")
    assert (row.input_ids[row.loss_mask] == END_OF_TURN).sum() == ends
    counts = json.loads((job.workspace.path / "counts.json").read_text())
    assert counts["filtered"] == {"exact match of an evaluation prompt": 1, "duplicate sample": 1}
    assert set(counts["by_source"]) == {"onpolicy/s", "offpolicy/jsonl:mine.jsonl"}


def test_any_number_of_workers_writes_the_same_bytes(tmp_path: Path) -> None:
    # 17 shards: more than the futures that two workers have in flight.
    rows: list[object] = [answer(f"a{i}", [5, 6], list(range(7, 10 + i % 9))) for i in range(38)]
    extra = {"conversations": _conversations(tmp_path), "max_length": 60}
    one = make_job(tmp_path, rows, "one", workers=0, **extra)
    two = make_job(tmp_path, rows, "two", workers=2, **extra)
    tokens.build(one)
    tokens.build(two)
    assert outputs(one.workspace.path) == outputs(two.workspace.path)
    assert len([name for name in outputs(one.workspace.path) if name.startswith("tokens-")]) == 17


def test_a_cluster_that_is_already_up_writes_the_same_bytes(tmp_path: Path) -> None:
    rows: list[object] = [answer(f"a{i}", [5, 6], list(range(7, 10 + i % 9))) for i in range(20)]
    here = make_job(tmp_path, rows, "here")
    tokens.build(here)
    with LocalCluster(n_workers=1, processes=True, host="127.0.0.1", dashboard_address=None) as cluster:
        there = make_job(tmp_path, rows, "there", scheduler=cluster.scheduler_address)
        tokens.build(there)
    assert outputs(here.workspace.path) == outputs(there.workspace.path)


def test_golden_bytes_of_the_stages(tmp_path: Path) -> None:
    # When this fails, the stage writes something else: raise its version in the pipeline.
    rows: list[object] = [answer(f"a{i}", [5, 6], list(range(7, 10 + i % 9))) for i in range(6)]
    job = make_job(tmp_path, rows, conversations=_conversations(tmp_path), max_length=60)
    tokens.build(job)
    shards = sorted(job.workspace.path.glob("*.arrow"))
    content = [pa.ipc.open_file(str(path)).read_all().to_pylist() for path in shards]
    params = {"drafter": {"draft_vocab_size": 30}, "data": {"vocabulary_rows": 0}, "training": {"start": None}}
    out = local_job(tmp_path / "vocabulary", {**job.inputs, "tokens": job.workspace.path}, params)
    vocabulary.build(out)
    content.append([np.load(path).tolist() for path in sorted(out.workspace.path.glob("*.npy"))])
    assert hashlib.blake2b(json.dumps(content).encode(), digest_size=8).hexdigest() == "3b2984cc8a7c2fd6"


def test_sealed_shards_are_not_written_again(tmp_path: Path) -> None:
    rows: list[object] = [answer(f"a{i}", [5, 6], [7, 8, 9]) for i in range(12)]
    job = make_job(tmp_path, rows)
    tokens.build(job)
    before = outputs(job.workspace.path)
    kept, lost = job.workspace.path / "tokens-00000.arrow", job.workspace.path / "tokens-00001.arrow"
    stamp = kept.stat().st_mtime_ns
    lost.unlink()
    tokens.build(job)
    assert kept.stat().st_mtime_ns == stamp
    assert outputs(job.workspace.path) == before


def test_a_folder_that_is_no_token_set_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no index\.arrow"):
        TokenSet(tmp_path)


def test_vocabulary_takes_the_frequent_the_special_and_fills_up() -> None:
    on_policy = np.array([0, 0, 0, 5, 1, 0, 0, 0], dtype=np.int64)
    raw = np.array([0, 0, 0, 0, 10, 0, 50, 0], dtype=np.int64)
    # scaled by 60 / 6: id 3 -> 50, id 4 -> 10 + 10, id 6 -> 50; the tie of 3 and 6 goes to the smaller id
    assert vocabulary.choose(on_policy, raw, 1).tolist() == [3]
    assert vocabulary.choose(on_policy, raw, 2).tolist() == [3, 6]
    assert vocabulary.choose(on_policy, raw, 3).tolist() == [3, 4, 6]
    assert vocabulary.choose(on_policy, raw, 5).tolist() == [0, 1, 3, 4, 6]  # filled with the smallest unused ids
    assert vocabulary.choose(on_policy, raw, 2, always=[7]).tolist() == [3, 7]
    assert vocabulary.choose(on_policy, raw, 8).tolist() == list(range(8))
    d2t, t2d = vocabulary.maps(np.array([3, 4, 6]), 8)
    assert d2t.tolist() == [3, 3, 4]
    assert (np.arange(3) + d2t).tolist() == np.flatnonzero(t2d).tolist() == [3, 4, 6]


def test_vocabulary_stage(tmp_path: Path) -> None:
    rows: list[object] = [answer(f"a{i}", [200, 201], [50, 50, 60 + i, END_OF_TURN]) for i in range(4)]
    job = make_job(tmp_path, rows)
    tokens.build(job)
    for size in (3, 10_000):
        params = {"drafter": {"draft_vocab_size": size}, "data": {"vocabulary_rows": 0}, "training": {"start": None}}
        out = local_job(tmp_path / f"vocabulary{size}", {**job.inputs, "tokens": job.workspace.path}, params)
        vocabulary.build(out)
        d2t, t2d, counts = (np.load(out.workspace.path / f"{name}.npy") for name in ("d2t", "t2d", "counts"))
        metrics = out.workspace.totals()[2]
        assert (d2t.dtype, t2d.dtype, counts.dtype) == (np.int64, np.bool_, np.int64)
        assert t2d.shape == counts.shape == (VOCAB_SIZE,)
        assert counts[50] == 8
        assert counts.sum() == 16
        if size == 3:
            assert (np.arange(3) + d2t).tolist() == [END_OF_TURN, 50, 60]
            assert metrics["coverage"] == pytest.approx(13 / 16)
            # Chosen on one half, the other half's own 6x id is never in: 6 of 8 tokens are.
            assert metrics["coverage_crossfit"] == pytest.approx(12 / 16)
        else:
            assert d2t.tolist() == [0] * VOCAB_SIZE
            assert t2d.all()
