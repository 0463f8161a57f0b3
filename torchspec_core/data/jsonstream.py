"""Reading large JSON files record by record, with the byte range of each record.

A reader holds one chunk (4 MiB) and the record it is in, whatever the file's size; a worker that is given the byte
range of a record reads exactly those bytes again. Three layouts: JSON lines, one JSON array, and one JSON object whose
values are the records. A file that is cut off yields every whole record and then one `Broken`.
"""

from __future__ import annotations

import codecs
import itertools
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

CHUNK_BYTES = 4 << 20
MAX_RECORD_CHARS = 64 << 20
# Bytes that are not UTF-8 come through as lone surrogates, so that the row, not the file, is refused for them.
DECODING = ("utf-8", "surrogateescape")
_AFTER_VALUE = tuple(" \t\r\n,:]}")
_START = re.compile(r"\ufeff?\s*")
_COLON = re.compile(r"[\s:]*")
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
    """The part of a file that is in memory, as text; `at` is a place in it, `offset` that place's byte in the file."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.decoder = codecs.getincrementaldecoder(DECODING[0])(DECODING[1])
        self.text = ""
        self.at = 0
        self.offset = 0
        self.ended = False

    def grow(self) -> bool:
        """Forget what lies behind and read one more chunk; False at the end of the file."""
        if self.ended:
            return False
        data = self.file.read(CHUNK_BYTES)
        self.ended = not data
        self.text = self.text[self.at :] + self.decoder.decode(data, final=not data)
        self.at = 0
        return True

    def advance(self, end: int) -> None:
        """Move to the place `end` of the window."""
        self.offset += len(self.text[self.at : end].encode(*DECODING))
        self.at = end

    def peek(self) -> str:
        """The next character; empty at the end of the file."""
        return self.text[self.at : self.at + 1]

    def skip(self, pattern: re.Pattern[str]) -> None:
        """Move past `pattern`, reading on while the match reaches the end of the window."""
        while True:
            match = pattern.match(self.text, self.at)
            end = match.end() if match else self.at
            if end < len(self.text) or not self.grow():
                self.advance(end)
                return

    def decode(self) -> Any:
        """The JSON value here, moving past it; raises `ValueError` when there is none."""
        while True:
            try:
                value, end = _DECODER.raw_decode(self.text, self.at)
                # At the window's end, or before a character that ends no value, it may be a part of a longer number.
                if self.text[end : end + 1] in _AFTER_VALUE or not self.grow():
                    self.advance(end)
                    return value
            except (ValueError, RecursionError) as error:
                if len(self.text) - self.at > MAX_RECORD_CHARS or not self.grow():
                    raise ValueError(str(error)) from error


def _open(path: Path) -> BinaryIO:
    return path.open("rb")


def read_lines(path: Path, opener: Callable[[Path], BinaryIO] = _open) -> Iterator[Record | Broken]:
    """The records of a JSON-lines file; blank lines are counted but not records."""
    start = 0
    with opener(path) as file:
        for row, line in enumerate(file, start=1):
            end = start + len(line)
            if line.strip():
                try:
                    yield Record(row, start, end, json.loads(line.decode(*DECODING)))
                except (ValueError, RecursionError) as error:
                    yield Broken(row, f"invalid JSON: {error}")
            start = end


def read_collection(path: Path, opener: Callable[[Path], BinaryIO] = _open) -> Iterator[Record | Broken]:
    """The records of a file that holds one JSON array, or one object whose values are the records."""
    with opener(path) as file:
        window = _Window(file)
        window.skip(_START)
        opening = window.peek()
        if opening not in ("[", "{"):
            yield Broken(1, "the file is neither a JSON array nor a JSON object")
            return
        window.advance(window.at + 1)
        for row in itertools.count(1):
            window.skip(_GAP)
            if window.peek() in ("]", "}"):
                return
            key = ""
            try:
                if opening == "{":
                    key = str(window.decode())
                    window.skip(_COLON)
                start = window.offset
                value = window.decode()
            except ValueError as error:
                # Neither layout can be picked up again after a broken record: nothing marks where the next one starts.
                yield Broken(row, f"the file is cut off or broken in this record, nothing after it was read: {error}")
                return
            yield Record(row, start, window.offset, value, key)


def read_range(file: BinaryIO, start: int, end: int) -> Any:
    """The value of the record at the byte range [start, end) of an open file."""
    file.seek(start)
    return json.loads(file.read(end - start).decode(*DECODING))
