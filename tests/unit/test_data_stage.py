"""The tokens stage on raw rows: pretokenised, truncated by turns, refused by templates, counted, cached, chunked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import save_file

from tests.tiny_chat import CHATML, VOCAB_SIZE, byte_tokenizer, chat, write_jsonl, write_target
from torchspec_core.config.load import load_recipe
from torchspec_core.data import runs, tokens
from torchspec_core.data.render import Rendered
from torchspec_core.data.shards import cut
from torchspec_core.data.tokens import TokenSet, length_histogram
from torchspec_core.errors import UserError
from torchspec_core.pipeline import open_store, plan
from torchspec_core.stages.job import Job, local_job


def make_job(tmp_path: Path, sources: list[dict[str, Any]], name: str = "tokens", template: str | None = CHATML,
             limit: float = 1.0, **data: Any) -> Job:  # fmt: skip
    for empty in ("mtbench", "gsm8k", "heldout"):
        write_jsonl(tmp_path / "prompts" / f"{empty}.jsonl", [])
    (tmp_path / "answers").mkdir(exist_ok=True)
    write_target(tmp_path / "target", template)
    params = {
        "conversations": sources, "max_length": 400, "min_supervised": 2, "supervise": "all", "shard_rows": 4,
        "reasoning": "keep", "special_text": "text",
    }  # fmt: skip
    runtime = {"max_rejected": limit, "workers": 0, "scheduler": None}
    inputs = {stage: tmp_path / stage for stage in ("target", "answers", "prompts")}
    return local_job(tmp_path / name, inputs, {"data": {**params, **data}}, {"data": runtime})


def source(path: Path, rows: int = 1000) -> dict[str, Any]:
    return {"name": "file", "rows": rows, "path": str(path)}


def reasons(job: Job) -> list[tuple[int, str, str]]:
    lines = (job.workspace.path / "rejected.jsonl").read_text().splitlines()
    return [(r["row"], r["kind"], r["reason"]) for r in map(json.loads, lines)]


def supervised(folder: Path, i: int) -> str:
    row = TokenSet(folder).get(i)
    return byte_tokenizer().decode(row.input_ids[row.loss_mask].tolist(), skip_special_tokens=False)


def test_cut_keeps_whole_turns_and_falls_back_to_the_right() -> None:
    whole = Rendered(list(range(60)), [10, 10, 10, 10, 10, 10])  # turns end at 20, 40, 60
    assert cut(whole, 60, 2) == whole
    assert cut(whole, 59, 2) == Rendered(list(range(40)), [10, 10, 10, 10])
    assert cut(whole, 40, 2) == Rendered(list(range(40)), [10, 10, 10, 10])
    assert cut(whole, 39, 2) == Rendered(list(range(20)), [10, 10])
    assert cut(whole, 15, 2) == Rendered(list(range(15)), [10, 5])  # not even the first turn fits
    assert cut(whole, 39, 11) == Rendered(list(range(39)), [10, 10, 10, 9])  # the whole turns would be too few tokens


def test_length_histogram_counts_every_sample_once() -> None:
    found = length_histogram(np.array([1, 5, 10, 10], dtype=np.int32), bins=2)
    assert found == {"edges": [0, 5, 10], "counts": [1, 3]}
    assert sum(length_histogram(np.arange(1, 500, dtype=np.int32))["counts"]) == 499


def test_pretokenised_rows_of_parquet(tmp_path: Path) -> None:
    rows = [
        {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]},
        {"input_ids": [5, 6, VOCAB_SIZE], "loss_mask": [0, 1, 1]},
        {"input_ids": [5, 6, 7], "loss_mask": [1, 1, 1]},
        {"input_ids": [5, 6, 7], "loss_mask": [0, 0, 0]},
        {"input_ids": [5, 6], "loss_mask": [0, 1, 1]},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "x.parquet")
    job = make_job(tmp_path, [source(tmp_path / "x.parquet")])
    tokens.build(job)
    row = TokenSet(job.workspace.path).get(0)
    assert row.input_ids.tolist() == [5, 6, 7]
    assert row.loss_mask.tolist() == [False, True, True]
    assert sorted(reasons(job)) == [
        (2, "rejected", f"`input_ids` holds something that is not a token id below {VOCAB_SIZE}"),
        (3, "rejected", "every token is supervised"),
        (4, "rejected", "`loss_mask` is empty: no token is supervised"),
        (5, "rejected", "`input_ids` and `loss_mask` are not two lists of the same length"),
    ]


def test_bad_rows_of_a_file_have_their_place_and_the_good_ones_pass(tmp_path: Path) -> None:
    rows: list[object] = [
        chat("hi", "good one"), "{broken", chat("a\0", "x"), '{"messages": [{"role": "user", "content": "\\ud83d"}]}',
        chat("x" * 10_000_000, "y"), chat("q", ""), chat("<|im_end|>", "control text"),
        {"messages": [{"role": "assistant", "content": "x"}]},
    ]  # fmt: skip
    path = write_jsonl(tmp_path / "x.jsonl", rows)
    job = make_job(tmp_path, [source(path)])
    tokens.build(job)
    assert [(row, kind, reason.split(":")[0]) for row, kind, reason in reasons(job)] == [
        (2, "rejected", "invalid JSON"),
        (3, "rejected", "turn 1 holds a NUL character"),
        (4, "rejected", "turn 1 holds bytes or surrogates that are not valid Unicode"),
        (5, "rejected", "turn 1 is longer than 1000000 characters"),
        (6, "rejected", "turn 2 is empty"),
        (8, "rejected", "turn 1 is by the assistant, expected the user"),
    ]
    assert supervised(job.workspace.path, 0) == "good one<|im_end|>"
    assert supervised(job.workspace.path, 1) == "control text<|im_end|>"
    counts = json.loads((job.workspace.path / "counts.json").read_text())
    assert (counts["rows_in"], counts["rows"], sum(counts["lengths"]["counts"])) == (8, 2, 2)
    strict = make_job(tmp_path, [source(path)], "strict", limit=0.01)
    with pytest.raises(UserError, match=r"6 of 8 rows .*data\.max_rejected=0\.01 allows; of 1 the reason is"):
        tokens.build(strict)
    assert reasons(strict) == reasons(job)


def test_a_template_that_breaks_the_rule_stops_with_its_name_and_turn(tmp_path: Path) -> None:
    shortened = "(message['content'] if loop.last or message['role'] == 'user' else '-')"
    drops = CHATML.replace("message['content']", shortened)
    path = write_jsonl(tmp_path / "x.jsonl", [chat("q", "first", "q", "second")])
    job = make_job(tmp_path, [source(path)], template=drops, limit=0.01)
    with pytest.raises(UserError, match=r"the reason is: the chat template of .*target cannot be supervised at turn 2"):
        tokens.build(job)
    tokens.build(make_job(tmp_path, [source(path)], "last", template=drops, limit=0.01, supervise="last"))
    assert supervised(tmp_path / "last", 0) == "second<|im_end|>"
    with pytest.raises(UserError, match="no chat template"):
        tokens.build(make_job(tmp_path / "without", [source(path)], template=None))


def test_truncation_by_turns_and_rows_limit(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [chat("q", f"a{i}", "more", "z" * 300) for i in range(6)])
    job = make_job(tmp_path, [source(path, rows=5)], max_length=200)
    tokens.build(job)
    got = TokenSet(job.workspace.path)
    assert len(got) == 5
    assert supervised(job.workspace.path, 0) == "a0<|im_end|>"
    counts = json.loads((job.workspace.path / "counts.json").read_text())
    assert (counts["rows_in"], counts["truncated"]) == (5, 5)


def test_chunks_do_not_change_the_samples(tmp_path: Path) -> None:
    rows: list[object] = [chat(f"q{i % 9}", f"answer {i % 9}", "more", "ok" * (i % 5 + 1)) for i in range(40)]
    path = write_jsonl(tmp_path / "x.jsonl", [*rows, chat("q", "")])
    seen = []
    for size in (1, 7, 100):
        job = make_job(tmp_path, [source(path)], f"chunk{size}", shard_rows=size)
        tokens.build(job)
        got = TokenSet(job.workspace.path)
        samples = [got.get(i) for i in range(len(got))]
        seen.append([(s.sample_id, s.input_ids.tolist(), runs.encode(s.loss_mask)) for s in samples])
    assert seen[0] == seen[1] == seen[2]
    distinct = {json.dumps(row) for row in rows}
    assert len({sample_id for sample_id, _, _ in seen[0]}) == len(seen[0]) == len(distinct)


def keys(recipe: Path, *overrides: str) -> dict[str, str]:
    loaded = load_recipe(recipe, list(overrides)).recipe
    return {entry.name: entry.spec.key for entry in plan(loaded, open_store(loaded))}


def test_what_runs_again_when_something_changes(tmp_path: Path) -> None:
    folder = write_target(tmp_path / "target")
    sizes = {"num_hidden_layers": 12, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
    llama = {"architectures": ["LlamaForCausalLM"], **sizes, "vocab_size": VOCAB_SIZE, "eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps(llama))
    save_file({"x": np.zeros(4, np.float32)}, folder / "model.safetensors")
    data = write_jsonl(tmp_path / "x.jsonl", [chat("q", "a")])
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        f"run: {{store: {tmp_path / 'store'}}}\ntarget: {{source: {folder}}}\n"
        "drafter: {draft_vocab_size: 100}\n"
        f"data:\n  vocabulary_rows: 0\n  prompts: [{{name: jsonl, rows: 500, path: {data}}}]\n"
        f"  conversations: [{{name: file, rows: 5, path: {data}}}]\n"
    )
    before = keys(recipe)
    policy = keys(recipe, "data.supervise=last")
    first = list(before).index("tokens")
    assert [name for name in before if before[name] != policy[name]] == list(before)[first:]
    lr = keys(recipe, "training.lr=0.5")
    assert [name for name in before if before[name] != lr[name]] == ["drafter", "export", "evaluation", "report"]
    for workers in keys(recipe, "data.workers=7"), keys(recipe, "data.max_rejected=0.5"):
        assert workers == before
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": CHATML + "{# other #}"}))
    template = keys(recipe)
    assert all(template[name] != before[name] for name in list(before)[first:])
    tokenizer = folder / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text() + "\n")
    assert all(keys(recipe)[name] != template[name] for name in list(before)[first:])
    write_jsonl(data, [chat("q", "another")])
    assert keys(recipe)["tokens"] != template["tokens"]


