"""Strict canonical JSON: the one text that a stage key is the digest of.

Accepts None, bool, int, finite float, str, list and tuple, mappings with str keys, Path (POSIX form), Enum (its value)
and frozen dataclasses. Anything else raises with the path of the field: a permissive fallback is what silently makes
two keys for one thing, or one key for two. -0.0 and 0.0 are equal, so both are written 0.0; 1 and 1.0 stay different.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from enum import Enum
from pathlib import PurePath
from typing import Any

KEY_BYTES = 16


class CanonicalError(TypeError):
    """A value that has no canonical form; the message names the field."""


def to_plain(value: Any, path: str = "spec") -> Any:
    """The value in JSON types only (tuples become lists); CanonicalError names `path` where that is not possible."""
    if isinstance(value, Enum):
        return to_plain(value.value, path)
    if value is None or type(value) in (bool, int):
        return value
    if type(value) is str:
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            raise CanonicalError(f"{path} is a text that is not valid Unicode (a lone surrogate)") from None
        return value
    if type(value) is float:
        if not math.isfinite(value):
            raise CanonicalError(f"{path} is {value}; only finite numbers can be part of a key")
        return value + 0.0  # -0.0 + 0.0 is 0.0
    if type(value) in (list, tuple):
        return [to_plain(item, f"{path}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, Mapping):
        for key in value:
            if type(key) is not str:
                raise CanonicalError(f"{path} has the key {key!r}; keys must be text")
        return {to_plain(key, f"{path} key"): to_plain(item, f"{path}.{key}") for key, item in value.items()}
    if isinstance(value, PurePath):
        return to_plain(value.as_posix(), path)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        if not value.__dataclass_params__.frozen:  # type: ignore[attr-defined]
            raise CanonicalError(f"{path} is a dataclass that is not frozen ({type(value).__name__})")
        return {f.name: to_plain(getattr(value, f.name), f"{path}.{f.name}") for f in dataclasses.fields(value)}
    raise CanonicalError(
        f"{path} is a {type(value).__module__}.{type(value).__qualname__}, which has no canonical form; "
        "convert it to JSON types first"
    )


def canonical_json(value: Any, path: str = "spec") -> bytes:
    """The value as UTF-8 JSON with sorted keys and no spaces; equal values give equal bytes in every process."""
    plain = to_plain(value, path)
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def digest(value: Any, path: str = "spec") -> str:
    """blake2b-128 of the canonical JSON, 32 hex digits."""
    return hashlib.blake2b(canonical_json(value, path), digest_size=KEY_BYTES).hexdigest()
