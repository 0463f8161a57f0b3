"""Files of rows, whatever their format: JSON lines, JSON, Parquet, Arrow, plain or compressed, or a folder of them.

Two ways in. `read_file` streams every row. For parallel work the parent finds where the rows are (`blocks`) and a
worker reads its own span with `read_span`: byte ranges of JSON, row ranges of Parquet and Arrow. Compressed text has no
places to jump to, so it is unpacked once, in pieces, before that. Nothing holds a whole file.
"""

from __future__ import annotations

import functools
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

from torchspec_core.data.jsonstream import DECODING, Broken, Record, read_collection, read_lines, read_range
from torchspec_core.errors import UserError

Layout = Literal["lines", "collection", "parquet", "arrow"]
COMPRESSED = (".gz", ".zst")
SUFFIXES: dict[str, Layout] = {
    ".jsonl": "lines", ".ndjson": "lines", ".json": "collection", ".parquet": "parquet", ".arrow": "arrow",
}  # fmt: skip
PIECE = 1 << 22


class Span(NamedTuple):
    """Rows from the 1-based number `row` on: bytes [start, end) of JSON text, rows [start, end) of a table."""

    row: int
    start: int
    end: int


def bare_suffix(path: Path) -> str:
    """The suffix that tells the format, compression taken off."""
    return path.with_suffix("").suffix if path.suffix in COMPRESSED else path.suffix


def open_text(path: Path) -> BinaryIO:
    """The bytes of a JSON file, unpacked while they are read."""
    if path.suffix == ".gz":
        import gzip

        return gzip.open(path)  # type: ignore[return-value]
    if path.suffix == ".zst":
        import pyarrow as pa

        return io.BufferedReader(pa.CompressedInputStream(str(path), "zstd"), PIECE)
    return path.open("rb")


def layout_of(path: Path) -> Layout:
    """How the rows of a file are laid out, by its suffix; `.json` that holds one object a line is `lines`."""
    layout = SUFFIXES.get(bare_suffix(path))
    if layout is None:
        known = ", ".join(SUFFIXES)
        raise UserError(f"{path} is of no known format: give a file that ends in {known} (.gz, .zst), or a folder")
    if layout == "collection":
        with open_text(path) as file:
            head = file.read(PIECE).lstrip(b"\xef\xbb\xbf \t\r\n")
        if head[:1] == b"{":
            try:
                first = json.loads(head.split(b"\n", 1)[0])
            except ValueError:
                return "collection"
            rows = all(isinstance(value, dict) for value in first.values())
            return "collection" if rows and b"\n" not in head.rstrip() else "lines"
    return layout


def data_files(path: Path) -> list[Path]:
    """The files of rows at `path`: itself, or those of a folder and its folders in the order of their names."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise UserError(f"{path} is neither a file nor a folder: correct the path in the recipe")
    inside = [p for p in path.rglob("*") if p.is_file() and not any(x[0] == "." for x in p.relative_to(path).parts)]
    found = sorted((p for p in inside if bare_suffix(p) in SUFFIXES), key=lambda p: p.relative_to(path).as_posix())
    if not found:
        raise UserError(f"the folder {path} holds no file that ends in one of {', '.join(SUFFIXES)} (.gz, .zst)")
    return found


def _parquet(path: Path) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(path)
    except pa.ArrowInvalid as error:
        raise UserError(f"{path} is not a whole Parquet file: {error}") from error


@functools.lru_cache(maxsize=4)
def _arrow(path: Path) -> Any:
    """An Arrow file or stream, memory-mapped."""
    import pyarrow as pa

    try:
        try:
            return pa.ipc.open_file(pa.memory_map(str(path))).read_all()
        except pa.ArrowInvalid:
            return pa.ipc.open_stream(pa.memory_map(str(path))).read_all()
    except pa.ArrowInvalid as error:
        raise UserError(f"{path} is not a whole Arrow file: {error}") from error


@functools.lru_cache(maxsize=2)
def _row_group(path: Path, group: int) -> Any:
    # A worker gets neighbouring spans one after the other: a group is decoded once for them all.
    return _parquet(path).read_row_group(group)


def _plain(value: Any) -> Any:
    """A table's value as JSON would have it: fields that are null are absent."""
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items() if part is not None}
    return [_plain(part) for part in value] if isinstance(value, list) else value


def _group_starts(path: Path) -> list[int]:
    metadata = _parquet(path).metadata
    starts = [0]
    for group in range(metadata.num_row_groups):
        starts.append(starts[-1] + metadata.row_group(group).num_rows)
    return starts


def _table_rows(path: Path, layout: Layout, start: int, end: int) -> Iterator[Record]:
    pieces: Iterator[tuple[int, Any]]
    if layout == "arrow":
        pieces = iter([(start, _arrow(path).slice(start, end - start))])
    else:
        bounds = _group_starts(path)
        inside = [g for g in range(len(bounds) - 1) if bounds[g] < end and bounds[g + 1] > start]
        pieces = (
            (max(start, bounds[g]), _row_group(path, g).slice(max(0, start - bounds[g]), end - max(start, bounds[g])))
            for g in inside
        )
    for first, table in pieces:
        for batch in table.to_batches(max_chunksize=1024):
            for value in batch.to_pylist():
                yield Record(first + 1, first, first + 1, _plain(value))
                first += 1


def table_length(path: Path, layout: Layout) -> int:
    return _arrow(path).num_rows if layout == "arrow" else _parquet(path).metadata.num_rows


def read_file(path: Path, layout: Layout) -> Iterator[Record | Broken]:
    """Every row of a file, in order."""
    if layout == "lines":
        yield from read_lines(path, open_text)
    elif layout == "collection":
        yield from read_collection(path, open_text)
    else:
        yield from _table_rows(path, layout, 0, table_length(path, layout))


def unpack(path: Path, folder: Path) -> Path:
    """A plain copy of a compressed file in `folder`; the file itself when it is plain."""
    if path.suffix not in COMPRESSED:
        return path
    stat = path.stat()
    out = folder / f"{stat.st_ino}-{stat.st_size}-{stat.st_mtime_ns}{bare_suffix(path)}"
    if not out.is_file():
        draft = out.with_name(out.name + ".part")
        with open_text(path) as source, draft.open("wb") as sink:
            while piece := source.read(PIECE):
                sink.write(piece)
        draft.rename(out)
    return out


def joined(found: list[Span], layout: Layout) -> tuple[Span, ...]:
    """Neighbouring rows as one span; rows of a JSON array stay apart, since what lies between them is not a row."""
    out: list[Span] = []
    for span in found:
        if out and layout != "collection" and out[-1].end == span.start:
            out[-1] = Span(out[-1].row, out[-1].start, span.end)
        else:
            out.append(span)
    return tuple(out)


def read_span(path: Path, layout: Layout, found: tuple[Span, ...]) -> Iterator[Record | Broken]:
    """The rows of spans that `joined` made."""
    if layout in ("parquet", "arrow"):
        for span in found:
            yield from _table_rows(path, layout, span.start, span.end)
        return
    with path.open("rb") as file:
        for row, start, end in found:
            if layout == "collection":
                yield Record(row, start, end, read_range(file, start, end))
                continue
            file.seek(start)
            for number, line in enumerate(file.read(end - start).removesuffix(b"\n").split(b"\n"), start=row):
                try:
                    yield Record(number, start, end, json.loads(line.decode(*DECODING)))
                except (ValueError, RecursionError) as error:
                    yield Broken(number, f"invalid JSON: {error}")
