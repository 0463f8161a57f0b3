"""The tokens stage: answers and conversations to Arrow shards of token ids and loss masks, in parallel on Dask.

The parent plans: it cuts the rows of every input file, in order, into shards of `data.shard_rows` rows, as byte or row
ranges, without parsing them. Which worker writes which shard, and when, changes nothing in the bytes. Sealed shards
are skipped, so a killed run continues. At the end the parent reads the shards' small columns and writes the index; a
sample that occurs twice is kept once. Conversations that repeat a held-out or benchmark prompt are left out.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from torchspec_core.data import files
from torchspec_core.data.blocks import Block, blocks
from torchspec_core.data.cluster import run_shards
from torchspec_core.data.files import Layout, Span
from torchspec_core.data.jsonstream import Broken
from torchspec_core.data.prompts import check_rejected
from torchspec_core.data.render import load_renderer, target_vocab_size
from torchspec_core.data.shards import ANSWERS, Rows, ShardCounts, ShardTask, read_index, read_names, write_shard
from torchspec_core.data.sources import FORMATS, Kind, Rejected, source_files
from torchspec_core.data.tokenset import INDEX_FILE, INDEX_SCHEMA, TokenRow, TokenSet
from torchspec_core.errors import UserError

if TYPE_CHECKING:
    from torchspec_core.stages.job import Job

__all__ = ["TokenRow", "TokenSet", "build"]

log = logging.getLogger("torchspec.data")

DUPLICATE = "duplicate sample"


Place = tuple[str, str, Path, Layout]
"""Name of the source, label of its rows, file, layout."""
LENGTH_BINS = 24


def _answer_rows(folder: Path) -> Iterator[tuple[Place, Block]]:
    for path in sorted(folder.glob("answers-*.jsonl")):
        for block in blocks(path, "lines"):
            if isinstance(block, Block):
                yield (ANSWERS, path.name, path, "lines"), block


def _conversation_rows(
    source: dict[str, Any], broken: list[Rejected], unpacked: Path
) -> Iterator[tuple[Place, Block]]:  # fmt: skip
    """The first `rows` rows of a source; what stops a file from being read on is added to `broken`, and is a row."""
    left = source["rows"]
    for file in source_files(source["name"], source.get("path")):
        plain = files.unpack(file.path, unpacked)
        found = blocks(plain, file.layout)
        while left and (block := next(found, None)) is not None:
            if isinstance(block, Broken):
                left -= 1
                broken.append(Rejected(file.label, block.row, block.reason, FORMATS[file.name].bad))
                continue
            rows = min(left, len(block))
            left -= rows
            yield (file.name, file.label, plain, file.layout), Block(block.row, block.bounds[: rows + 1])


def _shards(found: Iterable[tuple[Place, Block]], size: int) -> Iterator[tuple[Rows, ...]]:
    """The rows in order, `size` of them at a time (the last time, what is left)."""
    taken: list[tuple[Place, Span]] = []
    room = size
    for place, block in found:
        while len(block):
            rows = min(room, len(block))
            span, block = block.split(rows)
            taken.append((place, span))
            room -= rows
            if not room:
                yield _grouped(taken)
                taken, room = [], size
    if taken:
        yield _grouped(taken)


def _grouped(taken: list[tuple[Place, Span]]) -> tuple[Rows, ...]:
    groups = itertools.groupby(taken, key=lambda entry: entry[0])
    return tuple(
        Rows(name, label, path, layout, files.joined([span for _, span in group], layout))
        for (name, label, path, layout), group in groups
    )


def plan(job: Job) -> tuple[list[ShardTask], list[Rejected]]:
    """The shards to write, and what could not be read while planning."""
    data = job.params["data"]
    broken: list[Rejected] = []
    unpacked = job.workspace.scratch("unpacked")
    rows = [_answer_rows(Path(job.inputs["answers"]))]
    rows += [_conversation_rows(source, broken, unpacked) for source in data["conversations"]]
    target = Path(job.inputs["target"])
    vocab_size = target_vocab_size(target)
    if data["conversations"]:
        load_renderer(target)  # a target without a template is found before any worker starts
    tasks: list[ShardTask] = []
    for parts in _shards(itertools.chain.from_iterable(rows), data["shard_rows"]):
        tasks.append(ShardTask(
            number=len(tasks), parts=parts, target=target, vocab_size=vocab_size,
            max_length=data["max_length"], min_supervised=data["min_supervised"], policy=data["supervise"],
            keep_reasoning=data.get("reasoning", "keep") == "keep",
            control_text=data.get("special_text", "text") == "token",
            prompts=Path(job.inputs["prompts"]) if data["conversations"] else None, workspace=job.workspace,
        ))  # fmt: skip
    if not tasks:
        raise UserError(
            f"{job.inputs['answers']} holds no answers and data.conversations gives no rows: nothing to train on"
        )
    return tasks, broken


@dataclass
class _Totals:
    """Everything counted over all shards; what was left out is in `rejected.jsonl`, here only how often and why."""

    counts: ShardCounts
    reasons: dict[Kind, Counter[str]]


def _uncount(total: ShardCounts, key: str, sample: dict[str, Any]) -> None:
    """Take a repeated sample out of the counts; it stays in its shard, but the index does not name it."""
    total.rows -= 1
    total.samples[key] -= 1
    total.tokens[key] -= sample["length"]
    total.supervised[key] -= sample["supervised"]


def _firsts(columns: list[pa.Array]) -> list[NDArray[np.bool_]]:
    """For each column of ids, whether each value is the first of its kind over all columns in order.

    Only 16 bytes of each id are held, its digest: a million ids take 16 MB, and two that differ and have the same
    digest will not be met.
    """
    flat = np.concatenate([np.zeros((0, 2), np.uint64), *map(_digests, columns)])
    order = np.lexsort(flat.T)  # stable: of equal ones the first comes first
    ordered = flat[order]
    first = np.ones(len(flat), dtype=np.bool_)
    first[order[1:]] = (ordered[1:] != ordered[:-1]).any(axis=1)
    return np.split(first, np.cumsum([len(column) for column in columns])[:-1])


def _digests(ids: pa.Array) -> NDArray[np.uint64]:
    """[ids, 2] 16 bytes of each id."""
    packed = b"".join(hashlib.blake2b(i.encode(), digest_size=16).digest() for i in ids.to_pylist())
    return np.frombuffer(packed, np.uint64).reshape(-1, 2)


def _index(job: Job, tasks: list[ShardTask], broken: list[Rejected]) -> tuple[pa.Table, _Totals]:
    """The index over all shards, each sample once, and the counts; writes `rejected.jsonl`."""
    total = _Totals(ShardCounts(rows_in=len(broken)), {"rejected": Counter(), "filtered": Counter()})
    tables = []
    with job.workspace.shard("rejected.jsonl") as path, path.open("w", encoding="utf-8") as out:

        def leave_out(rejected: Rejected, reason: str = "") -> None:
            total.reasons[rejected.kind][reason or rejected.reason] += 1
            out.write(f"{rejected.to_json()}\n")

        for item in broken:
            leave_out(item)
        for task in tasks:
            table, counts = read_index(job.workspace.path / task.file)
            for item in counts.left_out:
                leave_out(item)
            counts.left_out.clear()
            total.counts.add(counts)
            tables.append(table)
        parts = []
        columns = [pa.concat_arrays(table["sample_id"].chunks or [pa.array([], pa.string())]) for table in tables]
        for task, table, first in zip(tasks, tables, _firsts(columns), strict=True):
            for row in np.flatnonzero(~first).tolist():
                domain, source = read_names(job.workspace.path / task.file, row)
                _uncount(total.counts, f"{domain}/{source}", table.slice(row, 1).to_pylist()[0])
                leave_out(Rejected(source, 0, f"{DUPLICATE}: row {row} of {task.file}", "filtered"), DUPLICATE)
            kept = np.flatnonzero(first).astype(np.int32)
            small = table if first.all() else table.take(pa.array(kept))
            shard = pa.array(np.full(len(kept), task.number, dtype=np.int32))
            parts.append(pa.Table.from_arrays(
                [small["sample_id"], shard, pa.array(kept), small["length"], small["supervised"]], schema=INDEX_SCHEMA
            ))  # fmt: skip
    return pa.concat_tables(parts).combine_chunks(), total


def length_histogram(lengths: NDArray[np.int32], bins: int = LENGTH_BINS) -> dict[str, list[int]]:
    """Samples by length in at most `bins` equal bins: `counts` [n], and `edges` [n + 1] of which the last is inside."""
    top = int(lengths.max()) if len(lengths) else 1
    step = max(1, -(-top // bins))
    edges = list(range(0, top + step, step))
    return {"edges": edges, "counts": np.histogram(lengths, edges)[0].tolist()}


def _write_index(job: Job, index: pa.Table) -> None:
    if job.workspace.done(INDEX_FILE):
        return
    with job.workspace.shard(INDEX_FILE) as path, pa.ipc.new_file(str(path), index.schema) as out:
        out.write_table(index)


def _write_text(job: Job, name: str, text: str) -> None:
    with job.workspace.shard(name) as path:
        path.write_text(text, "utf-8")


def build(job: Job) -> None:
    """The tokens stage: reads `answers`, `target` (`prompts` for whole conversations), writes shards and the index."""
    runtime = job.runtime["data"]
    tasks, broken = plan(job)
    job.workspace.expect(len(tasks) + 3)
    missing = [task for task in tasks if not job.workspace.done(task.file)]
    log.info("tokens: %d shards, %d already written", len(tasks), len(tasks) - len(missing))
    run_shards(write_shard, missing, runtime["workers"], runtime["scheduler"], job, len(tasks))

    index, totals = _index(job, tasks, broken)
    total = totals.counts
    rejected, filtered = (dict(totals.reasons[kind].most_common()) for kind in ("rejected", "filtered"))
    where = str(job.workspace.path / "rejected.jsonl")
    check_rejected(rejected, total.rows_in, runtime["max_rejected"], where)
    if not total.supervised.total():
        raise UserError(f"no sample has a supervised token to train on: the reason of each row is in {where}")
    sizes = {
        "rows_in": total.rows_in, "rows": total.rows, "tokens": total.tokens.total(),
        "supervised": total.supervised.total(), "truncated": total.truncated,
    }  # fmt: skip
    counts = {
        **sizes, "rejected": rejected, "filtered": filtered,
        "by_source": {
            key: {"rows": total.samples[key], "tokens": total.tokens[key], "supervised": total.supervised[key]}
            for key in sorted(total.samples) if total.samples[key]
        },
        "lengths": length_histogram(index["length"].to_numpy()),
    }  # fmt: skip
    _write_text(job, "counts.json", json.dumps(counts, indent=1) + "\n")
    _write_index(job, index)
    job.workspace.record(
        **sizes, rejected=sum(rejected.values()), filtered=sum(filtered.values()),
        duplicates=filtered.get(DUPLICATE, 0), shards=len(tasks),
    )  # fmt: skip
