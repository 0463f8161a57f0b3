"""Addresses of stores: `open_store` takes a URL, or a plain path, and gives the backend of its scheme.

    file:///data/states            /data/states            a folder
    memory://NAME[?limit=BYTES]                            inside this process, shared by name
    s3://BUCKET/PREFIX[?endpoint=http://HOST:PORT]         credentials from the environment
    mooncake://HOST:PORT/PREFIX[?admin=PORT&segment=BYTES&protocol=rdma&device=NAME&metadata=ADDRESS&host=NAME]

Every one with a server also takes `deadline=SECONDS`, the longest that one operation is tried.
"""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Callable, Mapping
from pathlib import Path

from torchspec_core.errors import UserError
from torchspec_core.store.local import FolderStore, MemoryStore
from torchspec_core.store.protocol import StateStore

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_MEMORY: dict[str, MemoryStore] = {}


def parse_bytes(text: str) -> int:
    """`4G`, `512MiB`, `1000` -> bytes; ValueError otherwise."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if found is None:
        raise ValueError(f"{text!r} is no number of bytes (512MiB, 4GiB)")
    return int(float(found[1]) * _UNITS[found[2].upper()])


def _file(url: urllib.parse.SplitResult, options: Mapping[str, str], durable: bool) -> StateStore:
    return FolderStore(Path(urllib.parse.unquote(url.netloc + url.path)).expanduser(), durable)


def _memory(url: urllib.parse.SplitResult, options: Mapping[str, str], durable: bool) -> StateStore:
    limit = parse_bytes(options["limit"]) if "limit" in options else None
    return _MEMORY.setdefault(url.netloc, MemoryStore(url.netloc, limit))


def _s3(url: urllib.parse.SplitResult, options: Mapping[str, str], durable: bool) -> StateStore:
    from torchspec_core.store.s3 import S3Store

    return S3Store(url.netloc, url.path.strip("/"), options.get("endpoint"), float(options.get("deadline", 60.0)))


def _mooncake(url: urllib.parse.SplitResult, options: Mapping[str, str], durable: bool) -> StateStore:
    from torchspec_core.store.mooncake import MooncakeSettings, MooncakeStore

    settings = MooncakeSettings(
        url.netloc,
        url.path.strip("/"),
        int(options["admin"]) if "admin" in options else None,
        options.get("metadata", "P2PHANDSHAKE"),
        options.get("host", "127.0.0.1"),
        options.get("protocol", "tcp"),
        options.get("device", ""),
        parse_bytes(options.get("segment", "0")),
        int(options.get("replicas", 1)),
        float(options.get("deadline", 60.0)),
    )
    return MooncakeStore(settings)


_Open = Callable[[urllib.parse.SplitResult, Mapping[str, str], bool], StateStore]
_SCHEMES: dict[str, tuple[_Open, frozenset[str]]] = {
    "file": (_file, frozenset()),
    "memory": (_memory, frozenset({"limit"})),
    "s3": (_s3, frozenset({"endpoint", "deadline"})),
    "mooncake": (
        _mooncake,
        frozenset({"admin", "metadata", "host", "protocol", "device", "segment", "replicas", "deadline"}),
    ),
}


def _parse(url: str) -> tuple[urllib.parse.SplitResult, dict[str, str]]:
    parts = urllib.parse.urlsplit(url if "://" in url else f"file://{Path(url).expanduser().absolute()}")
    if parts.scheme not in _SCHEMES:
        raise UserError(f"{url}: there is no store {parts.scheme}://; use {', '.join(f'{s}://' for s in _SCHEMES)}.")
    options = dict(urllib.parse.parse_qsl(parts.query, keep_blank_values=True))
    unknown = options.keys() - _SCHEMES[parts.scheme][1]
    if unknown:
        known = ", ".join(sorted(_SCHEMES[parts.scheme][1])) or "none"
        raise UserError(f"{url}: {parts.scheme}:// has no option {sorted(unknown)[0]!r}; it has {known}.")
    if parts.username or parts.password:
        raise UserError("a store's address holds no credentials: put them into the environment.")
    if parts.scheme != "file" and not parts.netloc:
        raise UserError(f"{url}: the part after {parts.scheme}:// is missing; see docs/stores.md.")
    return parts, options


def check_address(url: str) -> None:
    """Refuse an address that `open_store` would refuse, without asking a server."""
    _parse(url)


def open_store(url: str, durable: bool = True) -> StateStore:
    """The store at `url`; see the module's docstring.

    Args:
        durable: of a folder: objects are on the disk when they were put, not only in the page cache.

    Raises:
        UserError: an address that means nothing.
        StoreError: a server that refuses or does not answer.
    """
    parts, options = _parse(url)
    try:
        return _SCHEMES[parts.scheme][0](parts, options, durable)
    except ValueError as error:
        raise UserError(f"{url}: {error}.") from None


def below(url: str, name: str) -> str:
    """The address of `name` inside the store at `url`, its options kept."""
    base, mark, query = url.partition("?")
    return f"{base.rstrip('/')}/{name}{mark}{query}"
