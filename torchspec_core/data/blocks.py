"""Where the rows of a file are, many at a time: what the parent of parallel work needs to know of its input."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from torchspec_core.data.files import PIECE, Layout, Span, open_text, table_length
from torchspec_core.data.jsonstream import Broken, read_collection

_NEWLINE = ord("\n")
_BLANK = np.frombuffer(b" \t\n\r\x0b\f", np.uint8)


@dataclass(frozen=True)
class Block:
    """Neighbouring rows from the 1-based number `row` on; row i of it is [bounds[i], bounds[i + 1]), as in a `Span`."""

    row: int
    bounds: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def split(self, rows: int) -> tuple[Span, Block]:
        """The first `rows` rows, at least one and at most all, and what is left."""
        head = Span(self.row, int(self.bounds[0]), int(self.bounds[rows]))
        return head, Block(self.row + rows, self.bounds[rows:])


def _lines(path: Path) -> Iterator[Block]:
    """The lines that are not blank, found a piece at a time without a step of Python for each."""
    start, row, tail = 0, 1, b""
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            data = tail + piece
            ends = np.flatnonzero(np.frombuffer(data, np.uint8) == _NEWLINE) + 1
            tail = data[ends[-1] :] if len(ends) else data
            if len(ends):
                yield from _filled(data, np.concatenate([[0], ends]), start, row)
                start, row = start + int(ends[-1]), row + len(ends)
    if tail:
        yield from _filled(tail, np.array([0, len(tail)]), start, row)


def _filled(data: bytes, bounds: NDArray[np.int64], start: int, row: int) -> Iterator[Block]:
    """Blocks of the lines that are not blank; `start` and `row` are where `data` begins in its file."""
    # A line that is not blank seldom begins with a space: only those that do are looked at.
    doubtful = np.flatnonzero(np.isin(np.frombuffer(data, np.uint8)[bounds[:-1]], _BLANK)).tolist()
    at = 0
    for line in [n for n in doubtful if data[bounds[n] : bounds[n + 1]].isspace()] + [len(bounds) - 1]:
        if line > at:
            yield Block(row + at, start + bounds[at : line + 1])
        at = line + 1


def blocks(path: Path, layout: Layout) -> Iterator[Block | Broken]:
    """Where the rows of a plain file are; `Broken` where a JSON array cannot be read on."""
    if layout == "lines":
        yield from _lines(path)
    elif layout == "collection":
        for record in read_collection(path, open_text):
            if isinstance(record, Broken):
                yield record
            else:
                yield Block(record.row, np.array([record.start, record.end]))
    else:
        yield Block(1, np.arange(table_length(path, layout) + 1))


