"""One token shard: rows of a file in, one Arrow file out. This is what a worker runs.

A worker is told where its rows are (a file, and byte or row ranges), reads them itself, encodes them in one call to the
fast tokenizer and writes flat NumPy bytes (ids, offsets, mask runs) into its own shard through the workspace; neither
input nor output crosses a pipe. What was left out and the counts travel inside the shard (schema metadata), so a
resumed run knows them without having done the work.
"""

from __future__ import annotations

import functools
import hashlib
import json
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from torchspec_core.data import files, runs
from torchspec_core.data.files import Layout, Span
from torchspec_core.data.jsonstream import Broken
from torchspec_core.data.messages import BadRow, Message, Pretokenised, content_id
from torchspec_core.data.overlap import OverlapIndex
from torchspec_core.data.render import BrokenPrefix, Piece, Policy, Rendered, Renderer, load_renderer
from torchspec_core.data.sources import FORMATS, Kind, Rejected
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
    """Rows of one file and where they are. `name`: the source (`answers` = rows of the answers stage)."""

    name: str
    label: str
    path: Path
    layout: Layout
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class ShardTask:
    """Everything a worker needs to write one shard; about a kilobyte. `prompts`: whose evaluation sets to keep out."""

    number: int
    parts: tuple[Rows, ...]
    target: Path
    vocab_size: int
    max_length: int
    min_supervised: int
    policy: Policy
    keep_reasoning: bool
    control_text: bool
    prompts: Path | None
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


def evaluation_prompts(folder: Path) -> OverlapIndex:
    """Every prompt that is evaluated on, from a prompts stage's folder."""
    texts: list[str] = []
    for name in ("heldout", "mtbench", "gsm8k"):
        with (folder / f"{name}.jsonl").open("rb") as file:
            texts += [turn for line in file for turn in json.loads(line)["turns"]]
    return OverlapIndex(texts)


_evaluated = functools.lru_cache(maxsize=2)(evaluation_prompts)


def _ids(value: object, vocab_size: int, what: str) -> list[int]:
    if not isinstance(value, list) or not value:
        raise BadRow(f"`{what}` is empty or not a list")
    if not all(type(i) is int for i in value) or min(value) < 0 or max(value) >= vocab_size:
        raise BadRow(f"`{what}` holds something that is not a token id below {vocab_size}")
    return value


def parse_answer(value: object, vocab_size: int) -> Sample:
    """A row of the answers stage: its token ids are the truth, the answers' are supervised. Raises `BadRow`."""
    if not isinstance(value, Mapping) or not isinstance(value.get("sample_id"), str):
        raise BadRow("the row has no `sample_id`")
    ids: list[int] = []
    lengths = []
    for turn in (value, *value.get("later", ())):
        for name in ("prompt_ids", "answer_ids"):
            part = _ids(turn.get(name), vocab_size, name)
            ids += part
            lengths.append(len(part))
    return Sample(value["sample_id"], Rendered(ids, lengths), "onpolicy", str(value.get("source", ANSWERS)))


def _from_tokens(value: Pretokenised, vocab_size: int, label: str) -> Sample:
    ids = _ids(value.input_ids, vocab_size, "input_ids")
    mask = runs.merge(zip([1] * len(ids), map(bool, value.loss_mask), strict=True))
    digest = hashlib.blake2b(array("i", ids).tobytes() + bytes(value.loss_mask), digest_size=16)
    return Sample(digest.hexdigest(), Rendered(ids, mask), value.domain or "pretokenised", label)


def _bad_kind(name: str) -> Kind:
    return "rejected" if name == ANSWERS else FORMATS[name].bad


def _read(task: ShardTask, counts: ShardCounts) -> Iterator[tuple[Rows, int, Any]]:
    for part in task.parts:
        for record in files.read_span(part.path, part.layout, part.spans):
            counts.rows_in += 1
            if isinstance(record, Broken):
                counts.left_out.append(Rejected(part.label, record.row, record.reason, _bad_kind(part.name)))
            else:
                yield part, record.row, record.value


def _pieces(task: ShardTask, renderer: Renderer, messages: tuple[Message, ...], tools: Any) -> list[Piece]:
    return renderer.pieces(messages, task.policy, tools, task.keep_reasoning, task.control_text)


def _samples(task: ShardTask, counts: ShardCounts) -> Iterator[tuple[Sample, int]]:
    """Every readable row as token ids: rows that are ids already first, then the rendered ones, each in row order."""
    pending: list[tuple[str, Rows, int, str, list[Piece]]] = []
    renderer: Renderer | None = None
    for part, row, value in _read(task, counts):
        try:
            if part.name == ANSWERS:
                yield parse_answer(value, task.vocab_size), row
                continue
            parsed = FORMATS[part.name].parse(value)
            if isinstance(parsed, Pretokenised):
                yield _from_tokens(parsed, task.vocab_size, part.label), row
                continue
            renderer = renderer or load_renderer(task.target)
            question = next(m.content for m in parsed.messages if m.role == "user")
            if task.prompts is not None and (match := _evaluated(task.prompts).match(question)):
                reason = f"{match} match of an evaluation prompt"
                counts.left_out.append(Rejected(part.label, row, reason, "filtered"))
                continue
            pieces = _pieces(task, renderer, parsed.messages, parsed.tools)
            sample_id = content_id(parsed.messages, parsed.tools)
            pending.append((sample_id, part, row, parsed.domain or "offpolicy", pieces))
        except BadRow as error:
            counts.left_out.append(Rejected(part.label, row, str(error), _bad_kind(part.name)))
        except BrokenPrefix as error:
            counts.left_out.append(Rejected(part.label, row, str(error)))
    if renderer is not None:
        encoded = renderer.encode([p[4] for p in pending])
        for (sample_id, part, row, domain, _), rendered in zip(pending, encoded, strict=True):
            yield Sample(sample_id, rendered, domain, part.label), row


def cut(whole: Rendered, max_length: int, min_supervised: int) -> Rendered:
    """A sample that is too long, cut: after the last turn that fits as a whole, or on the right where no turn does (or
    what it leaves has fewer than `min_supervised` supervised tokens).
    """
    if len(whole.input_ids) <= max_length:
        return whole
    ends = np.cumsum(whole.runs)[1::2]
    fitting = ends[ends <= max_length]
    length = int(fitting[-1]) if len(fitting) else max_length
    if runs.supervised(runs.truncate(whole.runs, length)) < min_supervised:
        length = max_length
    return Rendered(whole.input_ids[:length], runs.truncate(whole.runs, length))


def _fit(sample: Sample, task: ShardTask) -> tuple[Rendered, str | None]:
    """The sample cut to `max_length`, and why it is left out, if it is."""
    whole = sample.rendered
    if len(whole.input_ids) == runs.supervised(whole.runs):
        return whole, ALL_SUPERVISED
    fitted = cut(whole, task.max_length, task.min_supervised)
    if runs.supervised(whole.runs) < task.min_supervised:
        return fitted, f"fewer than {task.min_supervised} supervised tokens"
    if runs.supervised(fitted.runs) < task.min_supervised:
        return fitted, f"fewer than {task.min_supervised} supervised tokens in the first {task.max_length}"
    return fitted, None


def _lists(rows: list[list[int]]) -> pa.ListArray:
    offsets = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    flat = array("i")
    for row in rows:
        flat.fromlist(row)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.frombuffer(flat, dtype=np.int32)))


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
    """What the index needs of a sealed shard (sample_id, length, supervised), and its counts."""
    with pa.memory_map(str(path)) as file:
        reader = pa.ipc.open_file(file)
        counts = ShardCounts.from_json(json.loads(reader.schema.metadata[METADATA_KEY]))
        return reader.read_all().select(["sample_id", "length", "supervised"]).combine_chunks(), counts


def read_names(path: Path, row: int) -> tuple[str, str]:
    """Domain and source of one row of a sealed shard."""
    with pa.memory_map(str(path)) as file:
        found = pa.ipc.open_file(file).read_all().select(["domain", "source"]).slice(row, 1).to_pylist()[0]
        return found["domain"], found["source"]
