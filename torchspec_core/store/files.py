"""Hidden states at rest as files: the index of all shards, and the reader.

`index.arrow` is small (about 40 bytes a sample) and is read whole; states are mapped and handed out as slices of the
mapping, so a read costs no copy and memory stays bounded by the page cache. Checksums are verified by policy:
`always`, `sample` (the first read of each shard and every 16th after it), `never`. Shard sizes are always checked.

A shard is one file, or one for each pipeline stage of the engine that wrote it: the same samples, other layers. The
index then has a row for each sample and file, and names the files and their layers; nobody has to gather them.
"""

from __future__ import annotations

import json
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
_FILES = "files"  # of the index's metadata: name and layers of each file, where they are not plain whole shards
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


def shard_name(shard: int, part: int = 0, parts: int = 1) -> str:
    """File name of a shard by its number, or of one of its `parts`."""
    return f"states-{shard:05d}.safetensors" if parts == 1 else f"states-{shard:05d}.{part + 1}of{parts}.safetensors"


@dataclass(frozen=True)
class ShardFile:
    """A file of states: its name, the layers it holds, where each sample lies."""

    name: str
    layers: tuple[int, ...]
    entries: Sequence[Entry]


def write_index(path: Path, layout: Layout, files: Sequence[ShardFile]) -> int:
    """Writes the Arrow index of all files, in their order; returns the number of samples.

    Raises `ValueError` unless every sample has every layer of `layout` exactly once.
    """
    held: dict[str, list[int]] = {}
    for file in files:
        for entry in file.entries:
            held.setdefault(entry.sample_id, []).extend(file.layers)
    wrong = [sample for sample, layers in held.items() if sorted(layers) != sorted(layout.layers)]
    if wrong:
        raise ValueError(f"{path.parent}: sample {wrong[0]} has layers {held[wrong[0]]}, expected {layout.layers}")
    numbers = [number for number, file in enumerate(files) for _ in file.entries]
    flat = [entry for file in files for entry in file.entries]
    columns = {
        "shard": numbers,
        **{name: [getattr(e, name) for e in flat] for name in ("sample_id", "length", "offset", "nbytes", "crc32")},
    }
    metadata = layout.metadata()
    plain = [ShardFile(shard_name(n), layout.layers, file.entries) for n, file in enumerate(files)]
    if list(files) != plain:
        metadata[_FILES] = json.dumps([[file.name, list(file.layers)] for file in files])
    schema = _SCHEMA.with_metadata(metadata)
    table = pa.table(
        {name: pa.array(columns[name], type=_SCHEMA.field(name).type) for name in _SCHEMA.names}, schema=schema
    )
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        writer.write_table(table)
    return len(held)


def read_files(folder: Path) -> list[ShardFile]:
    """The files of states in a folder, by their headers, in the order of shards and parts."""
    found = []
    for path in sorted(folder.glob("states-*.safetensors")):
        layout, entries = read_shard_entries(path)
        found.append(ShardFile(path.name, layout.layers, entries))
    return found


def rebuild_index(folder: Path) -> int:
    """Writes `index.arrow` anew from the headers of the shards of a folder; returns the number of samples."""
    files = read_files(folder)
    if not files:
        raise UserError(f"{folder} holds no hidden-state shards: run the states stage first.")
    one = read_shard_entries(folder / files[0].name)[0]
    # Stages own ascending layers, so the parts of a shard in their order give the layers in theirs.
    layers = tuple(dict.fromkeys(layer for file in files for layer in file.layers))
    return write_index(folder / INDEX, Layout(layers, one.hidden_size, one.dtype), files)


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
            table = self._read_index()
            metadata = {k.decode(): v.decode() for k, v in (table.schema.metadata or {}).items()}
            self.layout = Layout.from_metadata(metadata)
            named = json.loads(metadata[_FILES]) if _FILES in metadata else None
        except FileNotFoundError:
            raise UserError(f"{self.path / INDEX} is missing: {self.path} is no finished states folder.") from None
        except (pa.ArrowInvalid, KeyError, ValueError) as error:
            raise UserError(
                f"{self.path / INDEX} is not a states index ({error}): delete the folder and capture again."
            ) from None
        self.layers = self.layout.layers
        self.hidden_size = self.layout.hidden_size
        self.dtype = DTYPES[self.layout.dtype][0]
        self._shard: np.ndarray = table["shard"].to_numpy()
        self._offset: np.ndarray = table["offset"].to_numpy()
        self._nbytes: np.ndarray = table["nbytes"].to_numpy()
        self._crc32: np.ndarray = table["crc32"].to_numpy()
        self._row_ids = table["sample_id"]
        files = int(self._shard.max()) + 1 if len(self._shard) else 0
        self._files: list[tuple[str, tuple[int, ...]]] = (
            [(shard_name(n), self.layers) for n in range(files)] if named is None
            else [(name, tuple(layers)) for name, layers in named]
        )  # fmt: skip
        # A sample is addressed by the row that holds its first layer; the others follow from its id.
        first = np.array([self.layers[0] in layers for _, layers in self._files], dtype=bool)
        whole = bool(first.all())
        self._rows: np.ndarray = np.arange(len(self._shard)) if whole else np.flatnonzero(first[self._shard])
        self._ids = self._row_ids if whole else self._row_ids.take(pa.array(self._rows))
        self.lengths: np.ndarray = table["length"].to_numpy()[self._rows]
        self._others: dict[str, list[int]] = {}
        if not whole:
            rest = np.flatnonzero(~first[self._shard])
            for row, sample_id in zip(rest.tolist(), self._row_ids.take(pa.array(rest)).to_pylist(), strict=True):
                self._others.setdefault(sample_id, []).append(row)
        self._maps: OrderedDict[int, mmap.mmap] = OrderedDict()
        self._reads = 0
        self._sampled: set[int] = set()

    def _read_index(self) -> pa.Table:
        with pa.memory_map(str(self.path / INDEX)) as source:
            return pa.ipc.open_file(source).read_all()

    def _range(self, shard: int, start: int, count: int) -> memoryview:
        """Bytes of a file, without a copy; `CorruptStatesError` for a file that is missing or of another size."""
        return memoryview(self._map(shard))[start : start + count]

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def files(self) -> dict[str, int]:
        """Name -> bytes of each file of states."""
        return {self._files[shard][0]: size for shard, size in sorted(self._sizes.items())}

    @property
    def nbytes(self) -> int:
        """Bytes of all states."""
        return int(self._nbytes.sum())

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

    def _block(self, row: int) -> Tensor:
        """All layers of a row of the index: `[layers, T, H]`, a view of the mapped file (read when it is touched)."""
        shard, start, count = int(self._shard[row]), int(self._offset[row]), int(self._nbytes[row])
        found = self._range(shard, start, count)
        if self._checks(shard) and zlib.crc32(found) != self._crc32[row]:
            raise CorruptStatesError(self._corrupt(shard, self._row_ids[row].as_py()))
        flat = torch.frombuffer(found, dtype=self.dtype)
        return flat.view(len(self._files[shard][1]), -1, self.hidden_size)

    def get(self, sample: str | int) -> dict[int, Tensor]:
        """One sample by layer: canonical id -> `[T, H]`; the last layer is the pre-norm final state.

        Raises `CorruptStatesError` for a shard of the wrong size or, where the policy checks this read, wrong bytes.
        """
        i = self.position(sample)
        row = int(self._rows[i])
        if not self._others:
            return dict(zip(self.layers, self._block(row), strict=True))
        found: dict[int, Tensor] = {}
        for part in (row, *self._others.get(self._ids[i].as_py(), ())):
            found |= zip(self._files[int(self._shard[part])][1], self._block(part), strict=True)
        return {layer: found[layer] for layer in self.layers}

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
                found = self._range(shard, int(self._offset[i]), int(self._nbytes[i]))
            except CorruptStatesError as error:
                broken.add(shard)
                yield Problem(self._files[shard][0], None, str(error))
                continue
            if zlib.crc32(found) != self._crc32[i]:
                sample_id = self._row_ids[int(i)].as_py()
                yield Problem(self._files[shard][0], sample_id, self._corrupt(shard, sample_id))

    def _checks(self, shard: int) -> bool:
        if self.policy != "sample":
            return self.policy == "always"
        self._reads += 1
        first = shard not in self._sampled
        self._sampled.add(shard)
        return first or self._reads % _SAMPLE_EVERY == 0

    def _corrupt(self, shard: int, sample_id: str) -> str:
        name = self._named(shard)
        return f"{name}: the states of sample {sample_id} fail their checksum; delete this file and run again."

    def _named(self, shard: int) -> str:
        return str(self.path / self._files[shard][0])

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
        path = self.path / self._files[shard][0]
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
