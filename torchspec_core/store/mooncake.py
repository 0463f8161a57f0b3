"""`MooncakeStore`: objects in the memory of the machines of a Mooncake cluster, moved without a copy.

A process gives `segment` bytes of its memory to the cluster (0: it only reads and writes others') and registers the
buffers that `buffer` hands out; from and into these, `put_from` and `get_into` move the bytes themselves, over TCP or
RDMA. Objects are pinned: the master evicts none of them, and says so when there is no room. They go with the process
that holds them, so what lies here must be something that can be made again.
"""

from __future__ import annotations

import ctypes
import logging
import socket
import threading
import urllib.error
import urllib.request
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchspec_core.store.local import short_object
from torchspec_core.store.needs import LIBRARIES, PACKAGE
from torchspec_core.store.protocol import Buffer, MissingObjectError, StoreError, StoreFullError, check_key
from torchspec_core.store.protocol import joined as _joined
from torchspec_core.store.retry import Transient, retrying

_log = logging.getLogger("torchspec.store")
_NOT_FOUND, _NO_ROOM, _LEASED = -704, -200, -706
_LIST_SECONDS = 30.0


@dataclass(frozen=True)
class MooncakeSettings:
    """Where the cluster is and what this process brings to it.

    Attributes:
        master: host:port of `mooncake_master`.
        prefix: first words of every key, no slash at its ends.
        admin: port of the master's HTTP side, which lists keys; None: keys cannot be listed.
        metadata: address of the metadata service (etcd, http, redis); P2PHANDSHAKE needs none.
        host: name or address by which other clients reach this one.
        protocol, device: `tcp` or `rdma`, and the RDMA devices by name.
        segment: bytes of this process's memory that hold objects.
        replicas: copies of each object, on as many machines.
        deadline_s: of each operation, tries together.
    """

    master: str
    prefix: str = ""
    admin: int | None = None
    metadata: str = "P2PHANDSHAKE"
    host: str = "127.0.0.1"
    protocol: str = "tcp"
    device: str = ""
    segment: int = 0
    replicas: int = 1
    deadline_s: float = 60.0


def missing_libraries() -> list[str]:
    """Debian packages whose shared library this machine lacks."""
    missing = []
    for library, package in LIBRARIES.items():
        try:
            ctypes.CDLL(library)
        except OSError:
            missing.append(package)
    return missing


def import_mooncake() -> Any:
    """The module `mooncake.store`; StoreError says what to install."""
    if missing := missing_libraries():
        raise StoreError(
            f"a Mooncake store needs system libraries that are missing: apt-get install -y {' '.join(missing)}."
        )
    try:
        import mooncake.store
    except ImportError as error:
        raise StoreError(f"a Mooncake store needs a package ({error}): pip install {PACKAGE}.") from error
    return mooncake.store


class MooncakeStore:
    """Objects of one cluster below `settings.prefix`; see the module's docstring."""

    def __init__(self, settings: MooncakeSettings) -> None:
        self.settings = settings
        self.url = f"mooncake://{settings.master}/{settings.prefix}".rstrip("/")
        if settings.admin is not None:
            self.url += f"?admin={settings.admin}"
        self._module = import_mooncake()
        self._config = self._module.ReplicateConfig()
        self._config.with_hard_pin = True
        self._config.replica_num = settings.replicas
        self._registered: dict[int, int] = {}
        self._scratch = threading.local()
        self._client: Any = self._connect()

    def _connect(self) -> Any:
        s = self.settings

        def attempt() -> Any:
            # `setup` alone waits a minute and a half for a master that is not there.
            host, _, port = s.master.rpartition(":")
            try:
                socket.create_connection((host, int(port)), timeout=max(0.2, min(5.0, s.deadline_s))).close()
            except OSError as error:
                raise Transient(error.strerror or str(error)) from error
            client = self._module.MooncakeDistributedStore()
            # The second size is for copies inside the client; ours go through registered buffers.
            code = client.setup(s.host, s.metadata, s.segment, 16 << 20, s.protocol, s.device, s.master)
            if code != 0:
                raise Transient(f"code {code}")
            return client

        return retrying(f"join {self.url}", attempt, s.deadline_s, self._remedy)

    @property
    def _remedy(self) -> str:
        return f"check that mooncake_master runs at {self.settings.master} (python -m infra.local mooncake starts one)"

    def _name(self, key: str) -> str:
        return f"{self.settings.prefix}/{check_key(key)}" if self.settings.prefix else check_key(key)

    def _run(self, what: str, key: str, call: Callable[[], int]) -> int:
        """The non-negative result of a client call; each negative code as its error."""

        def attempt() -> int:
            code = int(call())
            if code >= 0:
                return code
            if code == _NOT_FOUND:
                raise MissingObjectError(f"{self.url} has no object {key}.")
            if code == _NO_ROOM:
                raise StoreFullError(
                    f"{self.url} has no room to {what} {key}: give it a larger segment or lower the byte budget."
                )
            raise Transient(f"code {code}")

        return retrying(f"{what} {key} at {self.url}", attempt, self.settings.deadline_s, self._remedy)

    def buffer(self, nbytes: int) -> np.ndarray:
        """See `StateStore.buffer`: registered memory, given back when the last view of it is gone."""
        owner = np.empty(max(1, nbytes), dtype=np.uint8)
        address = owner.ctypes.data
        if self._client.register_buffer(address, owner.nbytes) != 0:
            raise StoreError(f"{self.url}: {nbytes:,} bytes of memory could not be registered: lower the byte budget.")
        self._registered[address] = owner.nbytes
        weakref.finalize(owner, _forget, weakref.ref(self), address).atexit = False
        return owner[:nbytes]

    def _registers(self, address: int, nbytes: int) -> bool:
        return any(start <= address and address + nbytes <= start + size for start, size in self._registered.items())

    def _staged(self, nbytes: int) -> np.ndarray:
        """Registered memory of this thread for bytes that lie elsewhere; kept for the next time."""
        kept: np.ndarray | None = getattr(self._scratch, "memory", None)
        if kept is None or len(kept) < nbytes:
            kept = self._scratch.memory = self.buffer(nbytes)
        return kept[:nbytes]

    def put(self, key: str, *parts: Buffer) -> None:
        """See `StateStore.put`; no copy for one part that lies in memory of `buffer`."""
        views, total = _joined(key, parts)
        source = np.frombuffer(views[0], dtype=np.uint8)
        if len(views) > 1 or not self._registers(source.ctypes.data, total):
            source = self._staged(total)
            done = 0
            for view in views:
                source[done : done + view.nbytes] = np.frombuffer(view, dtype=np.uint8)
                done += view.nbytes
        name = self._name(key)
        address = source.ctypes.data
        self._run("write", key, lambda: self._client.upsert_from(name, address, total, self._config))

    def get_into(self, key: str, out: Buffer, start: int = 0) -> None:
        """See `StateStore.get_into`; no copy into memory of `buffer`."""
        target = np.frombuffer(out, dtype=np.uint8) if not isinstance(out, np.ndarray) else out.view(np.uint8).ravel()
        name, count = self._name(key), target.nbytes
        direct = self._registers(target.ctypes.data, count)
        into = target if direct else self._staged(count)
        address = into.ctypes.data

        def read() -> int:
            if not start:
                size = self._client.get_size(name)
                if size < count:
                    return self._short(int(size), key, count)
                if size == count:
                    return int(self._client.get_into(name, address, count))
            [[[moved]]] = self._client.get_into_ranges([address], [[name]], [[[0]]], [[[start]]], [[[count]]])
            if moved < 0 and moved != _NOT_FOUND:
                size = self._client.get_size(name)
                return self._short(int(size), key, start + count) if size < start + count else int(moved)
            return int(moved)

        moved = self._run("read", key, read)
        if moved != count:
            raise short_object(self.url, key, start + moved, start + count)
        if not direct:
            target[:] = into

    def _short(self, size: int, key: str, wanted: int) -> int:
        if size < 0:
            return size
        raise short_object(self.url, key, size, wanted)

    def size(self, key: str) -> int | None:
        """See `StateStore.size`."""
        name = self._name(key)
        try:
            return self._run("look up", key, lambda: self._client.get_size(name))
        except MissingObjectError:
            return None

    def delete(self, key: str) -> bool:
        """See `StateStore.delete`; also while another client's read lease lasts."""
        name = self._name(key)
        try:
            self._run("delete", key, lambda: self._client.remove(name, True))
        except MissingObjectError:
            return False
        return True

    def list(self, prefix: str = "") -> Iterator[tuple[str, int]]:
        """See `StateStore.list`: asks the master's HTTP side.

        Raises:
            StoreError: its port is not known.
        """
        if self.settings.admin is None:
            raise StoreError(f"{self.url} cannot list its objects: add ?admin=PORT (mooncake_master's -metrics_port).")
        root = f"{self.settings.prefix}/" if self.settings.prefix else ""
        address = f"http://{self.settings.master.rsplit(':', 1)[0]}:{self.settings.admin}/get_all_keys"
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

        def ask() -> str:
            try:
                with opener.open(address, timeout=_LIST_SECONDS) as answer:
                    return str(answer.read().decode())
            except (OSError, urllib.error.URLError) as error:
                raise Transient(str(error)) from error

        names = retrying(f"list {self.url}", ask, self.settings.deadline_s, self._remedy).split()
        for name in sorted(name for name in names if name.startswith(root + prefix)):
            if (size := self.size(name.removeprefix(root))) is not None:
                yield name.removeprefix(root), size

    def close(self) -> None:
        """Leave the cluster; objects in this process's segment are gone."""
        self._scratch = threading.local()
        self._client.close()
        self._registered.clear()


def _forget(store: weakref.ref[MooncakeStore], address: int) -> None:
    alive = store()
    if alive is not None and alive._registered.pop(address, None) is not None:
        alive._client.unregister_buffer(address)
