"""The tokens stage: answers and conversations to Arrow shards of token ids and loss masks, in parallel on Dask.

The parent plans: it cuts the rows of every input file, in order, into shards of `data.shard_rows` rows, as byte
ranges. Which worker writes which shard, and when, changes nothing in the bytes. Sealed shards are skipped, so a
killed run continues. At the end the parent reads the shards' small columns and writes the index; a sample that occurs
twice is kept once. Conversations that repeat a held-out or benchmark prompt never enter the plan.
"""

from __future__ import annotations

import itertools
import json
import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from torchspec_core.data.cluster import run_shards
from torchspec_core.data.overlap import OverlapIndex
from torchspec_core.data.prompts import check_rejected, prompt_of
from torchspec_core.data.render import target_vocab_size
from torchspec_core.data.shards import ANSWERS, Rows, ShardCounts, ShardTask, read_index, write_shard
from torchspec_core.data.sources import Rejected, read_conversations, source_label, source_path
from torchspec_core.data.tokenset import INDEX_FILE, INDEX_SCHEMA, TokenRow, TokenSet
from torchspec_core.errors import UserError

if TYPE_CHECKING:
    from torchspec_core.stages.job import Job

__all__ = ["TokenRow", "TokenSet", "build"]

log = logging.getLogger("torchspec.data")

Span = tuple[int, int, int]
DUPLICATE = "duplicate sample"


def _line_spans(path: Path) -> Iterator[Span]:
    start = 0
    with path.open("rb") as file:
        for row, line in enumerate(file, start=1):
            if line.strip():
                yield row, start, start + len(line)
            start += len(line)


def _answer_rows(folder: Path) -> Iterator[tuple[str, str, Path, Span]]:
    for path in sorted(folder.glob("answers-*.jsonl")):
        for span in _line_spans(path):
            yield ANSWERS, path.name, path, span


def evaluation_prompts(folder: Path) -> OverlapIndex:
    """Every prompt that is evaluated on, from a prompts stage's folder."""
    texts: list[str] = []
    for name in ("heldout", "mtbench", "gsm8k"):
        with (folder / f"{name}.jsonl").open("rb") as file:
            texts += [turn for line in file for turn in json.loads(line)["turns"]]
    return OverlapIndex(texts)


def _conversation_rows(
    source: dict[str, Any], evaluated: OverlapIndex, left_out: list[Rejected]
) -> Iterator[tuple[str, str, Path, Span]]:
    """The first `rows` usable conversations of a source; what is passed over is added to `left_out`."""
    path = source_path(source["name"], source.get("path"))
    label = source_label(source["name"], source.get("path"))
    taken = 0
    rows = read_conversations(source["name"], source.get("path"))
    while taken < source["rows"] and (item := next(rows, None)) is not None:
        if isinstance(item, Rejected):
            left_out.append(item)
        elif match := evaluated.match(prompt_of(item)):
            left_out.append(Rejected(label, item.row, f"{match} match of an evaluation prompt", "filtered"))
        else:
            taken += 1
            yield source["name"], label, path, (item.row, item.start, item.end)


def _grouped(rows: list[tuple[str, str, Path, Span]]) -> tuple[Rows, ...]:
    groups = itertools.groupby(rows, key=lambda r: r[:3])
    return tuple(Rows(name, label, path, tuple(r[3] for r in group)) for (name, label, path), group in groups)


def plan(job: Job) -> tuple[list[ShardTask], list[Rejected]]:
    """The shards to write, and the rows that were passed over while planning."""
    data = job.params["data"]
    left_out: list[Rejected] = []
    rows: list[Iterator[tuple[str, str, Path, Span]]] = [_answer_rows(Path(job.inputs["answers"]))]
    if data["conversations"]:
        evaluated = evaluation_prompts(Path(job.inputs["prompts"]))
        rows += [_conversation_rows(source, evaluated, left_out) for source in data["conversations"]]
    target = Path(job.inputs["target"])
    vocab_size = target_vocab_size(target)
    chained = itertools.chain.from_iterable(rows)
    tasks: list[ShardTask] = []
    while batch := list(itertools.islice(chained, data["shard_rows"])):
        tasks.append(ShardTask(
            number=len(tasks), parts=_grouped(batch), target=target, vocab_size=vocab_size,
            max_length=data["max_length"], min_supervised=data["min_supervised"], policy=data["supervise"],
            workspace=job.workspace,
        ))
    if not tasks:
        raise UserError(
            f"{job.inputs['answers']} holds no answers and data.conversations gives no rows: nothing to train on"
        )
    return tasks, left_out


def _uncount(total: ShardCounts, sample: dict[str, Any], where: str) -> None:
    """Take a repeated sample out of the counts; it stays in its shard, but the index does not name it."""
    key = f"{sample['domain']}/{sample['source']}"
    total.rows -= 1
    total.samples[key] -= 1
    total.tokens[key] -= sample["length"]
    total.supervised[key] -= sample["supervised"]
    total.left_out.append(Rejected(sample["source"], 0, f"{DUPLICATE}: {where}", "filtered"))


def _index(job: Job, tasks: list[ShardTask], total: ShardCounts) -> pa.Table:
    """The index over all shards, each sample once; adds every shard's counts to `total`, less the repeated samples."""
    seen: set[str] = set()
    parts = []
    for task in tasks:
        table, counts = read_index(job.workspace.path / task.file)
        total.add(counts)
        kept = []
        for row, sample_id in enumerate(table["sample_id"].to_pylist()):
            if sample_id in seen:
                _uncount(total, table.slice(row, 1).to_pylist()[0], f"row {row} of {task.file}")
            else:
                seen.add(sample_id)
                kept.append(row)
        small = table.take(pa.array(kept, pa.int64()))
        rows = pa.array(np.array(kept, dtype=np.int32))
        shard = pa.array(np.full(len(kept), task.number, dtype=np.int32))
        columns = [small["sample_id"], shard, rows, small["length"], small["supervised"]]
        parts.append(pa.Table.from_arrays(columns, schema=INDEX_SCHEMA))
    return pa.concat_tables(parts).combine_chunks()


def _write_index(job: Job, index: pa.Table) -> None:
    if job.workspace.done(INDEX_FILE):
        return
    with job.workspace.shard(INDEX_FILE) as path, pa.ipc.new_file(str(path), index.schema) as out:
        out.write_table(index)


def _write_text(job: Job, name: str, text: str) -> None:
    with job.workspace.shard(name) as path:
        path.write_text(text, "utf-8")


def _reasons(left_out: list[Rejected], kind: str) -> dict[str, int]:
    # Which row of which shard repeats a sample is in `rejected.jsonl`; here all repetitions count together.
    reasons = (DUPLICATE if r.reason.startswith(DUPLICATE) else r.reason for r in left_out if r.kind == kind)
    return dict(Counter(reasons).most_common())


def build(job: Job) -> None:
    """The tokens stage: reads `answers`, `target` (`prompts` for whole conversations), writes shards and the index."""
    runtime = job.runtime["data"]
    tasks, passed_over = plan(job)
    job.workspace.expect(len(tasks) + 3)
    missing = [task for task in tasks if not job.workspace.done(task.file)]
    log.info("tokens: %d shards, %d already written", len(tasks), len(tasks) - len(missing))
    run_shards(write_shard, missing, runtime["workers"], runtime["scheduler"], job, len(tasks))

    total = ShardCounts(rows_in=len(passed_over), left_out=list(passed_over))
    index = _index(job, tasks, total)
    _write_text(job, "rejected.jsonl", "".join(f"{r.to_json()}\n" for r in total.left_out))
    rejected, filtered = _reasons(total.left_out, "rejected"), _reasons(total.left_out, "filtered")
    where = str(job.workspace.path / "rejected.jsonl")
    check_rejected(sum(rejected.values()), total.rows_in, runtime["max_rejected"], where)
    if not total.supervised.total():
        raise UserError(f"no sample has a supervised token to train on: the reason of each row is in {where}")
    sizes = {
        "rows_in": total.rows_in, "rows": total.rows, "tokens": total.tokens.total(),
        "supervised": total.supervised.total(), "truncated": total.truncated,
    }
    counts = {
        **sizes, "rejected": rejected, "filtered": filtered,
        "by_source": {
            key: {"rows": total.samples[key], "tokens": total.tokens[key], "supervised": total.supervised[key]}
            for key in sorted(total.samples)
        },
    }
    _write_text(job, "counts.json", json.dumps(counts, indent=1) + "\n")
    _write_index(job, index)
    job.workspace.record(
        **sizes, rejected=sum(rejected.values()), filtered=sum(filtered.values()), shards=len(tasks),
    )
