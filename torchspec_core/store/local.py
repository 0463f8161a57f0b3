"""The two backends without a server: `MemoryStore` inside this process, `FolderStore` in a folder of files."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from torchspec_core.stages.disk import TEMPORARY, explain_disk_error, fsync_folder
from torchspec_core.store.protocol import Buffer, MissingObjectError, StoreError, StoreFullError, as_bytes, check_key
from torchspec_core.store.protocol import joined as _joined


class MemoryStore:
    """Objects in a dictionary of this process, bounded by `limit` bytes (None: by the machine)."""

    def __init__(self, name: str = "", limit: int | None = None) -> None:
        self.url = f"memory://{name}"
        self.limit = limit
        self._objects: dict[str, bytes] = {}
        self._bytes = 0
        self._lock = threading.Lock()

    def put(self, key: str, *parts: Buffer) -> None:
        """See `StateStore.put`."""
        views, total = _joined(check_key(key), parts)
        data = b"".join(views)
        with self._lock:
            grown = self._bytes + total - len(self._objects.get(key, b""))
            if self.limit is not None and grown > self.limit:
                raise StoreFullError(
                    f"{self.url} holds {self._bytes:,} of {self.limit:,} bytes, no room for {total:,} more: raise its "
                    "limit or lower the byte budget."
                )
            self._objects[key], self._bytes = data, grown

    def get_into(self, key: str, out: Buffer, start: int = 0) -> None:
        """See `StateStore.get_into`."""
        data = self._objects.get(check_key(key))
        if data is None:
            raise MissingObjectError(f"{self.url} has no object {key}.")
        view = as_bytes(out)
        if start + view.nbytes > len(data):
            raise short_object(self.url, key, len(data), start + view.nbytes)
        view[:] = memoryview(data)[start : start + view.nbytes]

    def size(self, key: str) -> int | None:
        """See `StateStore.size`."""
        data = self._objects.get(check_key(key))
        return None if data is None else len(data)

    def delete(self, key: str) -> bool:
        """See `StateStore.delete`."""
        with self._lock:
            data = self._objects.pop(check_key(key), None)
            self._bytes -= len(data or b"")
        return data is not None

    def list(self, prefix: str = "") -> Iterator[tuple[str, int]]:
        """See `StateStore.list`."""
        with self._lock:
            found = [(key, len(data)) for key, data in self._objects.items() if key.startswith(prefix)]
        yield from sorted(found)

    def buffer(self, nbytes: int) -> np.ndarray:
        """See `StateStore.buffer`."""
        return np.empty(nbytes, dtype=np.uint8)

    def close(self) -> None:
        """Nothing to let go of: the objects live as long as this object."""


class FolderStore:
    """One file an object, below `root`; written under another name, then renamed.

    durable: an object is on the disk when `put` returns, not only in the page cache. States in transit can be made
    anew and do without.
    """

    def __init__(self, root: Path, durable: bool = True) -> None:
        self.root = Path(root).absolute()
        self.url = f"file://{self.root}"
        self.durable = durable
        try:
            self.root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise explain_disk_error(error, self.root) or StoreError(
                f"{self.root} cannot be a store ({error.strerror}): give a folder that can be made and written."
            ) from error

    def _path(self, key: str) -> Path:
        return self.root / check_key(key)

    def put(self, key: str, *parts: Buffer) -> None:
        """See `StateStore.put`."""
        views, total = _joined(key, parts)
        path = self._path(key)
        draft = path.with_name(f"{TEMPORARY}{os.getpid()}-{threading.get_ident()}-{path.name}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(draft, "wb", buffering=0) as file:
                for view in views:
                    done = 0
                    while done < view.nbytes:
                        done += file.write(view[done:]) or 0
                if self.durable:
                    os.fsync(file.fileno())
            os.replace(draft, path)
            if self.durable:
                fsync_folder(path.parent)
        except OSError as error:
            draft.unlink(missing_ok=True)
            explained = explain_disk_error(error, self.root)
            reason = str(explained) if explained else f"{path} could not be written ({error.strerror})."
            raise (StoreFullError if explained else StoreError)(f"{total:,} bytes of {key}: {reason}") from error

    def get_into(self, key: str, out: Buffer, start: int = 0) -> None:
        """See `StateStore.get_into`."""
        view = as_bytes(out)
        try:
            with open(self._path(key), "rb", buffering=0) as file:
                file.seek(start)
                done = 0
                while done < view.nbytes:
                    count = file.readinto(view[done:])
                    if not count:
                        raise short_object(self.url, key, os.fstat(file.fileno()).st_size, start + view.nbytes)
                    done += count
        except FileNotFoundError:
            raise MissingObjectError(f"{self.url} has no object {key}.") from None
        except OSError as error:
            raise StoreError(f"{self.root / key} cannot be read ({error.strerror}): look at that disk.") from error

    def size(self, key: str) -> int | None:
        """See `StateStore.size`."""
        try:
            return self._path(key).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    def delete(self, key: str) -> bool:
        """See `StateStore.delete`; folders that are left empty stay."""
        try:
            self._path(key).unlink()
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def list(self, prefix: str = "") -> Iterator[tuple[str, int]]:
        """See `StateStore.list`."""
        top = self.root / prefix.rpartition("/")[0]
        found: list[tuple[str, int]] = []
        for folder, _, names in os.walk(top):
            for name in names:
                path = Path(folder, name)
                key = path.relative_to(self.root).as_posix()
                if not name.startswith(TEMPORARY) and key.startswith(prefix):
                    try:
                        found.append((key, path.stat().st_size))
                    except FileNotFoundError:  # deleted by another process since it was listed
                        continue
        yield from sorted(found)

    def buffer(self, nbytes: int) -> np.ndarray:
        """See `StateStore.buffer`."""
        return np.empty(nbytes, dtype=np.uint8)

    def close(self) -> None:
        """Nothing is kept open."""


def short_object(url: str, key: str, size: int, wanted: int) -> StoreError:
    """The error of a read past an object's end."""
    return StoreError(
        f"{url}: object {key} has {size:,} bytes, {wanted:,} were expected; it was written by something else or cut "
        "off: delete it and run again."
    )
