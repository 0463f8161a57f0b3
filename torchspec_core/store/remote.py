"""A set of states in any store: the index is read once, samples by their byte ranges, ahead of their use.

The set lies there as it does in a folder: `index.arrow` and the shards, each an object. What was read is kept up to a
number of bytes, the least recently used going first, and `ahead` fetches in the background what will be asked next.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa

from torchspec_core.errors import UserError
from torchspec_core.store.address import below, open_store
from torchspec_core.store.files import INDEX, CorruptStatesError, Policy, StateSet
from torchspec_core.store.protocol import MissingObjectError, StateStore, get

LOCATION = "location.json"
"""In a states folder whose shards were moved: `{"url": address of the set}`."""
_THREADS = 4

_Range = tuple[int, int, int]


class RemoteStates(StateSet):
    """Reader of the set at the root of `store`; see `StateSet`.

    Args:
        cache_bytes: most bytes that are kept, those on their way included; one sample is kept in any case.
    """

    def __init__(self, store: StateStore, verify: Policy = "sample", cache_bytes: int = 1 << 30) -> None:
        self._store, self._most = store, cache_bytes
        self._kept: OrderedDict[_Range, Future[memoryview]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(_THREADS, "states")
        self._sized: set[int] = set()
        super().__init__(Path(store.url), verify)

    def _read_index(self) -> pa.Table:
        try:
            data = get(self._store, INDEX)
        except MissingObjectError:
            raise UserError(
                f"{self._store.url} holds no set of states (no {INDEX}): capture again with `torchspec run RECIPE "
                "--refresh states`, or correct the address."
            ) from None
        return pa.ipc.open_file(pa.py_buffer(data)).read_all()

    def _named(self, shard: int) -> str:
        return below(self._store.url, self._files[shard][0])

    def _range(self, shard: int, start: int, count: int) -> memoryview:
        return self._future((shard, start, count)).result()

    def _future(self, key: _Range) -> Future[memoryview]:
        with self._lock:
            found = self._kept.get(key)
            if found is not None and not (found.done() and found.exception()):
                self._kept.move_to_end(key)
                return found
            if found is None:
                self._bytes += key[2]
            made = self._kept[key] = self._pool.submit(self._fetch, key)
            while self._bytes > self._most and len(self._kept) > 1:
                # Dropped, not freed: tensors handed out keep the bytes alive.
                (_, _, count), _ = self._kept.popitem(last=False)
                self._bytes -= count
            return made

    def _fetch(self, key: _Range) -> memoryview:
        shard, start, count = key
        name = self._files[shard][0]
        if shard not in self._sized:
            size = self._store.size(name)
            if size != self._sizes[shard]:
                found = "is missing" if size is None else f"has {size} bytes instead of {self._sizes[shard]}"
                raise CorruptStatesError(
                    f"{self._named(shard)} {found}: mend the set with `torchspec store repair`, or capture again with "
                    "--refresh states."
                )
            self._sized.add(shard)
        out = self._store.buffer(count)
        self._store.get_into(name, out, start)
        return out.data

    def ahead(self, samples: Sequence[str | int]) -> None:
        """Start to read samples that will be asked for soon, as many as fit into half of the kept bytes."""
        room = self._most // 2
        for sample in samples:
            i = self.position(sample)
            for row in (int(self._rows[i]), *self._others.get(self._ids[i].as_py(), ())):
                count = int(self._nbytes[row])
                room -= count
                if room < 0:
                    return
                self._future((int(self._shard[row]), int(self._offset[row]), count))


def open_states(place: Path | str, verify: Policy = "sample", cache_bytes: int = 1 << 30) -> StateSet:
    """The set in a folder, where a folder's `location.json` points to, or at an address.

    Raises:
        UserError: there is no set.
        StoreError: its store refuses or does not answer.
    """
    folder = Path(place)
    if "://" not in str(place):
        try:
            place = str(json.loads((folder / LOCATION).read_text())["url"])
        except FileNotFoundError:
            return StateSet(folder, verify)
    return RemoteStates(open_store(str(place)), verify, cache_bytes)
