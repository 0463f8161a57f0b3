"""Hidden states at rest as files: the index of all shards, and the reader.

`index.arrow` is small (about 40 bytes a sample) and is read whole; states are mapped and handed out as slices of the
mapping, so a read costs no copy and memory stays bounded by the page cache. Checksums are verified by policy:
`always`, `sample` (the first read of each shard and every 16th after it), `never`. Shard sizes are always checked.
"""

from __future__ import annotations

import mmap
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from torchspec_core.errors import UserError
from torchspec_core.store.format import DTYPES, Entry, Layout, read_shard_entries

INDEX = "index.arrow"
Policy = Literal["always", "sample", "never"]
_SAMPLE_EVERY = 16
_OPEN_SHARDS = 64

_SCHEMA = pa.schema(
    [
        ("sample_id", pa.string()),
        ("shard", pa.int32()),
        ("length", pa.int32()),
        ("offset", pa.int64()),
        ("nbytes", pa.int64()),
        ("crc32", pa.uint32()),
    ]
)


class CorruptStatesError(UserError):
    """Bytes on disk that are not the ones that were written; the message names file and sample."""


def shard_name(shard: int) -> str:
    """File name of a shard by its number."""
    return f"states-{shard:05d}.safetensors"


def write_index(path: Path, layout: Layout, shards: Sequence[Sequence[Entry]]) -> int:
    """Writes the Arrow index of all shards, in shard order; returns the number of samples."""
    numbers = [number for number, entries in enumerate(shards) for _ in entries]
    flat = [entry for entries in shards for entry in entries]
    columns = {
        "shard": numbers,
        **{name: [getattr(e, name) for e in flat] for name in ("sample_id", "length", "offset", "nbytes", "crc32")},
    }
    schema = _SCHEMA.with_metadata(layout.metadata())
    table = pa.table(
        {name: pa.array(columns[name], type=_SCHEMA.field(name).type) for name in _SCHEMA.names}, schema=schema
    )
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        writer.write_table(table)
    return len(flat)


def rebuild_index(folder: Path) -> int:
    """Writes `index.arrow` anew from the headers of the shards of a folder; returns the number of samples."""
    shards: list[list[Entry]] = []
    layout: Layout | None = None
    while (path := folder / shard_name(len(shards))).exists():
        layout, entries = read_shard_entries(path)
        shards.append(entries)
    if layout is None:
        raise UserError(f"{folder} holds no hidden-state shards: run the states stage first.")
    return write_index(folder / INDEX, layout, shards)


@dataclass(frozen=True)
class Problem:
    """One thing `StateSet.verify` found."""

    shard: str
    sample_id: str | None
    reason: str


class StateSet:
    """Reader of a folder of hidden states. Samples are addressed by id or by their position in the index."""

    def __init__(self, path: Path, verify: Policy = "sample") -> None:
        self.path = Path(path)
        self.policy: Policy = verify
        try:
            with pa.memory_map(str(self.path / INDEX)) as source:
                table = pa.ipc.open_file(source).read_all()
            self.layout = Layout.from_metadata(
                {k.decode(): v.decode() for k, v in (table.schema.metadata or {}).items()}
            )
        except FileNotFoundError:
            raise UserError(f"{self.path / INDEX} is missing: {self.path} is no finished states folder.") from None
        except (pa.ArrowInvalid, KeyError, ValueError) as error:
            raise UserError(
                f"{self.path / INDEX} is not a states index ({error}): delete the folder and capture again."
            ) from None
        self.layers = self.layout.layers
        self.hidden_size = self.layout.hidden_size
        self.dtype = DTYPES[self.layout.dtype][0]
        self.lengths: np.ndarray = table["length"].to_numpy()
        self._ids = table["sample_id"]
        self._shard: np.ndarray = table["shard"].to_numpy()
        self._offset: np.ndarray = table["offset"].to_numpy()
        self._nbytes: np.ndarray = table["nbytes"].to_numpy()
        self._crc32: np.ndarray = table["crc32"].to_numpy()
        self._maps: OrderedDict[int, mmap.mmap] = OrderedDict()
        self._reads = 0
        self._sampled: set[int] = set()

    def __len__(self) -> int:
        return len(self.lengths)

    @cached_property
    def ids(self) -> list[str]:
        """Sample ids by position."""
        ids: list[str] = self._ids.to_pylist()
        return ids

    @cached_property
    def _positions(self) -> dict[str, int]:
        return {sample_id: i for i, sample_id in enumerate(self.ids)}

    def position(self, sample: str | int) -> int:
        """Position of a sample; `KeyError` for an id that is not in the set."""
        return self._positions[sample] if isinstance(sample, str) else int(sample)

    def block(self, sample: str | int) -> Tensor:
        """All layers of one sample: `[layers, T, H]`, a view of the mapped file (pages are read when they are touched).

        Raises `CorruptStatesError` for a shard of the wrong size or, where the policy checks this read, wrong bytes.
        """
        i = self.position(sample)
        shard, start, count = int(self._shard[i]), int(self._offset[i]), int(self._nbytes[i])
        mapped = self._map(shard)
        if self._checks(shard) and zlib.crc32(memoryview(mapped)[start : start + count]) != self._crc32[i]:
            raise CorruptStatesError(self._corrupt(shard, self._ids[i].as_py()))
        flat = torch.frombuffer(mapped, dtype=self.dtype, count=count // self.dtype.itemsize, offset=start)
        return flat.view(len(self.layers), int(self.lengths[i]), self.hidden_size)

    def get(self, sample: str | int) -> dict[int, Tensor]:
        """One sample by layer: canonical id -> `[T, H]`; the last layer is the pre-norm final state."""
        return dict(zip(self.layers, self.block(sample), strict=True))

    def verify(self) -> list[Problem]:
        """Reads every byte; empty when all shards have their size and all samples their checksum."""
        return list(self._problems())

    def _problems(self) -> Iterator[Problem]:
        order = np.lexsort((self._offset, self._shard))
        broken: set[int] = set()
        for i in order:
            shard = int(self._shard[i])
            if shard in broken:
                continue
            try:
                mapped = self._map(shard)
            except CorruptStatesError as error:
                broken.add(shard)
                yield Problem(shard_name(shard), None, str(error))
                continue
            start, count = int(self._offset[i]), int(self._nbytes[i])
            if zlib.crc32(memoryview(mapped)[start : start + count]) != self._crc32[i]:
                sample_id = self._ids[i].as_py()
                yield Problem(shard_name(shard), sample_id, self._corrupt(shard, sample_id))

    def _checks(self, shard: int) -> bool:
        if self.policy != "sample":
            return self.policy == "always"
        self._reads += 1
        first = shard not in self._sampled
        self._sampled.add(shard)
        return first or self._reads % _SAMPLE_EVERY == 0

    def _corrupt(self, shard: int, sample_id: str) -> str:
        path = self.path / shard_name(shard)
        return f"{path}: the states of sample {sample_id} fail their checksum; delete this file and run again."

    @cached_property
    def _sizes(self) -> dict[int, int]:
        sizes: dict[int, int] = {}
        for shard, end in zip(self._shard, self._offset + self._nbytes, strict=True):
            sizes[int(shard)] = max(int(end), sizes.get(int(shard), 0))
        return sizes

    def _map(self, shard: int) -> mmap.mmap:
        mapped = self._maps.get(shard)
        if mapped is not None:
            self._maps.move_to_end(shard)
            return mapped
        path = self.path / shard_name(shard)
        size = path.stat().st_size if path.exists() else -1
        if size != self._sizes[shard]:
            found = "is missing" if size < 0 else f"has {size} bytes instead of {self._sizes[shard]}"
            raise CorruptStatesError(f"{path} {found}: delete the file if it is there and run again.")
        with path.open("rb") as file:
            # A private mapping counts as writable, which torch wants of a buffer; nothing is ever written to it.
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self._maps[shard] = mapped
        if len(self._maps) > _OPEN_SHARDS:
            # Dropped, not closed: tensors handed out may still point into it, and they keep it alive.
            self._maps.popitem(last=False)
        return mapped

    def __getstate__(self) -> dict[str, Any]:
        """Mappings do not travel to another process; they are opened again there."""
        return {**self.__dict__, "_maps": OrderedDict()}
