"""Writes that survive a crash, digests, and what to say when the disk says no."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torchspec_core.errors import UserError

TEMPORARY = ".tmp-"
DIGEST_BYTES = 16
_CHUNK = 1 << 20
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
_NEARLY_FULL = 1 << 20
_FULL_WORDS = ("No space left on device", "os error 28", "Errno 28", "Disk quota exceeded")


def fsync_folder(folder: Path) -> None:
    """Make renames inside `folder` durable."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def fsync_file(path: Path) -> None:
    """Make a file's content durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def temporary_path(path: Path) -> Path:
    """Where a file is written before it gets its name; the suffix stays, as some writers look at it."""
    return path.with_name(f"{TEMPORARY}{os.getpid()}-{path.name}")


def write_atomic(path: Path, data: bytes) -> None:
    """The whole file or the old one, even through a power cut: temporary file, fsync, rename, fsync of the folder."""
    draft = temporary_path(path)
    try:
        with open(draft, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


def write_json(path: Path, value: Any) -> None:
    """`write_atomic` of readable JSON."""
    write_atomic(path, json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False).encode() + b"\n")


def digest_file(path: Path) -> str:
    """blake2b-128 of a file's bytes, 32 hex digits."""
    state = hashlib.blake2b(digest_size=DIGEST_BYTES)
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            state.update(chunk)
    return state.hexdigest()


def remove_tree(path: Path) -> None:
    """Delete a folder that we know is ours; a missing one is no error."""
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        return


def _existing(folder: Path) -> Path:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def free_bytes(folder: Path) -> int:
    """Bytes free on the disk that `folder` is on, or will be on."""
    return shutil.disk_usage(_existing(folder)).free


def explain_disk_error(error: BaseException, folder: Path) -> UserError | None:
    """The sentence for a full disk or a refused write below `folder`, or None when the error is about something else.

    Libraries report a full disk in their own ways (NumPy with no errno at all), so the text and the free space count
    too.
    """
    number = error.errno if isinstance(error, OSError) else None
    try:
        free = free_bytes(folder)
    except OSError:
        return None
    said_full = any(words in str(error) for words in _FULL_WORDS)
    if number in _FULL or said_full or (isinstance(error, OSError) and number is None and free < _NEARLY_FULL):
        return UserError(
            f"The disk is full: writing into {folder} failed with {free:,} bytes free; free some space or set "
            f"run.store "
            "to a folder on a larger disk, then run the same command again (finished shards are kept)."
        )
    if number in _DENIED:
        where = error.filename if isinstance(error, OSError) and error.filename else folder
        return UserError(
            f"Permission denied: {where} cannot be used ({free:,} bytes free); "
            "change the permissions of that folder or set run.store to a folder of yours."
        )
    return None


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Turn a full disk or a refused write inside the block into a UserError that names the folder and the bytes
    free."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        explained = explain_disk_error(error, folder)
        if explained is None:
            raise
        raise explained from error
