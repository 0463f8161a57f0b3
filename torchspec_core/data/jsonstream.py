"""Reading large JSON files record by record, with the byte range of each record.

A reader holds one chunk (4 MiB) and the record it is in, whatever the file's size; a worker that is given the byte
range of a record reads exactly those bytes again. Three layouts: JSON lines, one JSON array, and one JSON object whose
values are the records. A file that is cut off yields every whole record and then one `Broken`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

CHUNK_BYTES = 4 << 20
MAX_RECORD_CHARS = 64 << 20
# Bytes that are not UTF-8 come through as lone surrogates, so that the row, not the file, is refused for them.
DECODING = ("utf-8", "surrogateescape")
_AFTER_VALUE = tuple(" \t\r\n,:]}")
_GAP = re.compile(r"[\s,]*")
_DECODER = json.JSONDecoder()


@dataclass(frozen=True)
class Record:
    """One record of a file: its 1-based number, byte range and value; `key` is its name in an object of records."""

    row: int
    start: int
    end: int
    value: Any
    key: str = ""


@dataclass(frozen=True)
class Broken:
    """A record that is not JSON: its 1-based number and why."""

    row: int
    reason: str


class _Window:
    """The part of a file that is in memory, as text; `base` is the byte offset of `text[0]`."""

    def __init__(self, file: BinaryIO) -> None:
        import codecs

        self.file = file
        self.decoder = codecs.getincrementaldecoder(DECODING[0])(DECODING[1])
        self.text = ""
        self.base = 0
        self.ended = False

    def grow(self) -> bool:
        """Read one more chunk; False at the end of the file."""
        if self.ended:
            return False
        data = self.file.read(CHUNK_BYTES)
        self.ended = not data
        self.text += self.decoder.decode(data, final=not data)
        return True

    def drop(self, chars: int) -> None:
        """Forget the first `chars` characters."""
        self.base += len(self.text[:chars].encode(*DECODING))
        self.text = self.text[chars:]

    def skip(self, pattern: re.Pattern[str], at: int) -> int:
        """Position after `pattern` from `at`, reading on while the match reaches the end of the window."""
        while True:
            match = pattern.match(self.text, at)
            end = match.end() if match else at
            if end < len(self.text) or not self.grow():
                return end

    def decode(self, at: int) -> tuple[Any, int]:
        """The JSON value at `at` and the position after it; raises `ValueError` when there is none."""
        while True:
            try:
                value, end = _DECODER.raw_decode(self.text, at)
                # At the window's end, or before a character that ends no value, it may be the start of a longer number.
                if self.text[end : end + 1] in _AFTER_VALUE or not self.grow():
                    return value, end
            except (ValueError, RecursionError) as error:
                if len(self.text) - at > MAX_RECORD_CHARS or not self.grow():
                    raise ValueError(str(error)) from error


def read_lines(path: Path) -> Iterator[Record | Broken]:
    """The records of a JSON-lines file; blank lines are counted but not records."""
    start = 0
    with path.open("rb") as file:
        for row, line in enumerate(file, start=1):
            end = start + len(line)
            if line.strip():
                try:
                    yield Record(row, start, end, json.loads(line.decode(*DECODING)))
                except (ValueError, RecursionError) as error:
                    yield Broken(row, f"invalid JSON: {error}")
            start = end


def read_collection(path: Path) -> Iterator[Record | Broken]:
    """The records of a file that holds one JSON array, or one object whose values are the records."""
    with path.open("rb") as file:
        window = _Window(file)
        at = window.skip(re.compile(r"\ufeff?\s*"), 0)
        opening = window.text[at : at + 1]
        if opening not in ("[", "{"):
            yield Broken(1, "the file is neither a JSON array nor a JSON object")
            return
        at += 1
        row = 0
        while True:
            row += 1
            at = window.skip(_GAP, at)
            if window.text[at : at + 1] in ("]", "}"):
                return
            key = ""
            try:
                if opening == "{":
                    key, at = window.decode(at)
                    at = window.skip(re.compile(r"[\s:]*"), at)
                value, end = window.decode(at)
            except ValueError as error:
                # Neither layout can be picked up again after a broken record: nothing marks where the next one starts.
                yield Broken(row, f"the file is cut off or broken in this record, nothing after it was read: {error}")
                return
            window.drop(at)
            length = len(window.text[: end - at].encode(*DECODING))
            yield Record(row, window.base, window.base + length, value, str(key))
            at = end - at


def read_range(file: BinaryIO, start: int, end: int) -> Any:
    """The value of the record at the byte range [start, end) of an open file."""
    file.seek(start)
    return json.loads(file.read(end - start).decode(*DECODING))
