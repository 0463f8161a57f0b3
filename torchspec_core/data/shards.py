"""One token shard: rows of a file in, one Arrow file out. This is what a worker runs.

A worker is told where its rows are (a file and byte ranges), reads them itself, encodes them in one call to the fast
tokenizer and writes its own shard through the workspace; neither input nor output crosses a pipe. What was left out
and the counts travel inside the shard (schema metadata), so a resumed run knows them without having done the work.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from torchspec_core.data import runs
from torchspec_core.data.jsonstream import read_range
from torchspec_core.data.render import Policy, Rendered, Renderer, load_renderer
from torchspec_core.data.sources import FORMATS, BadRow, Kind, Message, Rejected, content_id
from torchspec_core.data.tokenset import shard_name
from torchspec_core.stages.workspace import Workspace

SCHEMA = pa.schema([
    ("sample_id", pa.string()), ("input_ids", pa.list_(pa.int32())), ("loss_mask", pa.list_(pa.int32())),
    ("length", pa.int32()), ("supervised", pa.int32()), ("domain", pa.string()), ("source", pa.string()),
])
ANSWERS = "answers"
ALL_SUPERVISED = "every token is supervised"
METADATA_KEY = b"torchspec"


@dataclass(frozen=True)
class Rows:
    """Rows of one file: byte range and 1-based number of each. `name`: the source (`answers` = rows with token ids)."""

    name: str
    label: str
    path: Path
    spans: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class ShardTask:
    """Everything a worker needs to write one shard; a few kilobytes."""

    number: int
    parts: tuple[Rows, ...]
    target: Path
    vocab_size: int
    max_length: int
    min_supervised: int
    policy: Policy
    workspace: Workspace

    @property
    def file(self) -> str:
        """Name of the shard."""
        return shard_name(self.number)


@dataclass(frozen=True)
class Sample:
    """One row of a shard."""

    sample_id: str
    rendered: Rendered
    domain: str
    source: str


@dataclass
class ShardCounts:
    """What happened to the rows of a shard; the keys of `tokens` and `supervised` are `domain/source`."""

    rows_in: int = 0
    rows: int = 0
    left_out: list[Rejected] = field(default_factory=list)
    samples: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    supervised: Counter[str] = field(default_factory=Counter)
    truncated: int = 0

    def to_json(self) -> dict[str, Any]:
        """JSON types only."""
        return {
            "rows_in": self.rows_in, "rows": self.rows, "truncated": self.truncated, "samples": dict(self.samples),
            "tokens": dict(self.tokens), "supervised": dict(self.supervised),
            "left_out": [[r.source, r.row, r.reason, r.kind] for r in self.left_out],
        }

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> ShardCounts:
        """The counts that `to_json` wrote."""
        return ShardCounts(
            rows_in=value["rows_in"], rows=value["rows"], truncated=value["truncated"],
            left_out=[Rejected(*r) for r in value["left_out"]], samples=Counter(value["samples"]),
            tokens=Counter(value["tokens"]), supervised=Counter(value["supervised"]),
        )

    def add(self, other: ShardCounts) -> None:
        """Count another shard in."""
        self.rows_in += other.rows_in
        self.rows += other.rows
        self.truncated += other.truncated
        self.left_out += other.left_out
        self.samples += other.samples
        self.tokens += other.tokens
        self.supervised += other.supervised


def _ids(value: object, vocab_size: int, what: str) -> list[int]:
    if not isinstance(value, list) or not value:
        raise BadRow(f"`{what}` is empty or not a list")
    if not all(type(i) is int and 0 <= i < vocab_size for i in value):
        raise BadRow(f"`{what}` holds something that is not a token id below {vocab_size}")
    return value


def parse_answer(value: object, vocab_size: int) -> Sample:
    """A row of the answers stage: its token ids are the truth, the answer's are supervised. Raises `BadRow`."""
    if not isinstance(value, Mapping) or not isinstance(value.get("sample_id"), str):
        raise BadRow("the row has no `sample_id`")
    prompt = _ids(value.get("prompt_ids"), vocab_size, "prompt_ids")
    answer = _ids(value.get("answer_ids"), vocab_size, "answer_ids")
    rendered = Rendered(prompt + answer, [len(prompt), len(answer)])
    return Sample(value["sample_id"], rendered, "onpolicy", str(value.get("source", ANSWERS)))


def _read(task: ShardTask, counts: ShardCounts) -> Iterator[tuple[Rows, int, Any]]:
    for part in task.parts:
        with part.path.open("rb") as file:
            for row, start, end in part.spans:
                counts.rows_in += 1
                try:
                    yield part, row, read_range(file, start, end)
                except (ValueError, RecursionError) as error:
                    counts.left_out.append(Rejected(part.label, row, f"invalid JSON: {error}"))


def _samples(task: ShardTask, counts: ShardCounts) -> Iterator[tuple[Sample, int]]:
    """Every readable row as token ids, in the order of the rows."""
    pending: list[tuple[str, Rows, int, list[Any]]] = []
    renderer: Renderer | None = None
    for part, row, value in _read(task, counts):
        try:
            if part.name == ANSWERS:
                yield parse_answer(value, task.vocab_size), row
                continue
            form = FORMATS[part.name]
            renderer = renderer or load_renderer(task.target)
            messages: tuple[Message, ...] = form.parse(value)
            pending.append((content_id(messages), part, row, renderer.pieces(messages, task.policy)))
        except BadRow as error:
            kind = "rejected" if part.name == ANSWERS else FORMATS[part.name].bad
            counts.left_out.append(Rejected(part.label, row, str(error), kind))
    if renderer is not None:
        for (sample_id, part, row, _), rendered in zip(pending, renderer.encode([p[3] for p in pending]), strict=True):
            yield Sample(sample_id, rendered, "offpolicy", part.label), row


def _fit(sample: Sample, task: ShardTask) -> tuple[Rendered, str | None]:
    """The sample cut on the right to `max_length`, and why it is left out, if it is."""
    whole = sample.rendered
    if len(whole.input_ids) == runs.supervised(whole.runs):
        return whole, ALL_SUPERVISED
    cut = Rendered(whole.input_ids[: task.max_length], runs.truncate(whole.runs, task.max_length))
    if runs.supervised(whole.runs) < task.min_supervised:
        return cut, f"fewer than {task.min_supervised} supervised tokens"
    if runs.supervised(cut.runs) < task.min_supervised:
        return cut, f"fewer than {task.min_supervised} supervised tokens in the first {task.max_length}"
    return cut, None


def _lists(rows: list[list[int]]) -> pa.ListArray:
    offsets = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    flat = np.fromiter((i for row in rows for i in row), dtype=np.int32, count=int(offsets[-1]))
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat))


def _batch(samples: list[Sample]) -> pa.RecordBatch:
    rendered = [s.rendered for s in samples]
    return pa.RecordBatch.from_arrays([
        pa.array([s.sample_id for s in samples], pa.string()),
        _lists([r.input_ids for r in rendered]),
        _lists([r.runs for r in rendered]),
        pa.array([len(r.input_ids) for r in rendered], pa.int32()),
        pa.array([runs.supervised(r.runs) for r in rendered], pa.int32()),
        pa.array([s.domain for s in samples], pa.string()),
        pa.array([s.source for s in samples], pa.string()),
    ], schema=SCHEMA)


def tokenize(task: ShardTask) -> tuple[list[Sample], ShardCounts]:
    """The samples of a shard and what happened to its rows."""
    counts = ShardCounts()
    kept: list[Sample] = []
    for sample, row in _samples(task, counts):
        rendered, refused = _fit(sample, task)
        if refused:
            kind: Kind = "rejected" if refused == ALL_SUPERVISED else "filtered"
            counts.left_out.append(Rejected(sample.source, row, refused, kind))
            continue
        kept.append(Sample(sample.sample_id, rendered, sample.domain, sample.source))
        key = f"{sample.domain}/{sample.source}"
        counts.samples[key] += 1
        counts.tokens[key] += len(rendered.input_ids)
        counts.supervised[key] += runs.supervised(rendered.runs)
        counts.truncated += len(rendered.input_ids) < len(sample.rendered.input_ids)
    counts.rows = len(kept)
    return kept, counts


def write_shard(task: ShardTask) -> dict[str, int]:
    """Write the shard unless it is already sealed; returns its facts (about a hundred bytes)."""
    sealed = task.workspace.done(task.file)
    if sealed:
        return {name: int(sealed[name]) for name in ("rows", "tokens", "supervised")}
    samples, counts = tokenize(task)
    facts = {"rows": counts.rows, "tokens": counts.tokens.total(), "supervised": counts.supervised.total()}
    metadata = {METADATA_KEY: json.dumps(counts.to_json(), sort_keys=True).encode()}
    with task.workspace.shard(task.file) as path:
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, SCHEMA.with_metadata(metadata)) as writer:
            writer.write_batch(_batch(samples).replace_schema_metadata(metadata))
        task.workspace.facts(task.file, **facts)
    return facts


def read_index(path: Path) -> tuple[pa.Table, ShardCounts]:
    """The small columns of a sealed shard (sample_id, length, supervised, domain, source), and its counts."""
    with pa.memory_map(str(path)) as file:
        reader = pa.ipc.open_file(file)
        counts = ShardCounts.from_json(json.loads(reader.schema.metadata[METADATA_KEY]))
        return reader.read_all().select(["sample_id", "length", "supervised", "domain", "source"]), counts
