"""`TokenSet`: the tokens of a sealed tokens stage, memory-mapped.

Opening reads the index alone (24 bytes a sample); a sample is a view of its shard's pages, so any number of processes
share one copy and a set larger than memory can be read in any order.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from torchspec_core.data import runs
from torchspec_core.errors import UserError

INDEX_FILE = "index.arrow"
INDEX_SCHEMA = pa.schema([
    ("sample_id", pa.string()), ("shard", pa.int32()), ("row", pa.int32()),
    ("length", pa.int32()), ("supervised", pa.int32()),
])


def shard_name(number: int) -> str:
    """File name of a token shard."""
    return f"tokens-{number:05d}.arrow"


@dataclass(frozen=True)
class TokenRow:
    """One training sample: `input_ids` int32 [T] (read-only view), `loss_mask` bool [T]."""

    sample_id: str
    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]


@dataclass(frozen=True)
class _Shard:
    """The memory-mapped columns of one shard as NumPy views: flat values and the offsets of the rows."""

    ids: NDArray[np.int32]
    id_offsets: NDArray[np.int32]
    runs: NDArray[np.int32]
    run_offsets: NDArray[np.int32]


def _flat(column: pa.ListArray) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    return column.values.to_numpy(), column.offsets.to_numpy()


class TokenSet:
    """The samples of `folder` in index order; `lengths` and `supervised` are int32 [N]."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        path = self.folder / INDEX_FILE
        if not path.is_file():
            raise UserError(f"{self.folder} holds no {INDEX_FILE}: it is not a finished tokens stage, run that first")
        with pa.memory_map(str(path)) as file:
            index = pa.ipc.open_file(file).read_all()
        self.sample_ids: list[str] = index["sample_id"].to_pylist()
        self.lengths: NDArray[np.int32] = index["length"].to_numpy()
        self.supervised: NDArray[np.int32] = index["supervised"].to_numpy()
        self._shard_of = index["shard"].to_numpy()
        self._row_of = index["row"].to_numpy()
        self._shards: dict[int, _Shard] = {}

    def __len__(self) -> int:
        return len(self.sample_ids)

    def _shard(self, number: int) -> _Shard:
        if number not in self._shards:
            table = pa.ipc.open_file(pa.memory_map(str(self.folder / shard_name(number)))).get_batch(0)
            self._shards[number] = _Shard(*_flat(table.column("input_ids")), *_flat(table.column("loss_mask")))
        return self._shards[number]

    def get(self, i: int) -> TokenRow:
        """Sample `i` of the index."""
        shard, row = self._shard(int(self._shard_of[i])), self._row_of[i]
        ids = shard.ids[shard.id_offsets[row] : shard.id_offsets[row + 1]]
        mask = runs.decode(shard.runs[shard.run_offsets[row] : shard.run_offsets[row + 1]])
        return TokenRow(self.sample_ids[i], ids, mask)
