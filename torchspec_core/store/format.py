"""How hidden states lie in a file: one safetensors shard of many unpadded samples, written once, read by slice.

A shard holds one tensor per sample and layer, named `<sample_id>.<layer>`, shape `[T, H]`. Samples follow each other
and the layers of a sample are adjacent in the order of `Layout.layers`, so one sample is one contiguous byte range:
one `pread`, one ranged GET, one checksum. The header's metadata carries the ids, lengths and checksums: the index can
be rebuilt from the shards alone. Any safetensors reader opens these files.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

FORMAT = "torchspec-states-1"
FINAL_STATE = "prenorm"
DTYPES = {"bfloat16": (torch.bfloat16, "BF16"), "float32": (torch.float32, "F32")}


@dataclass(frozen=True)
class Layout:
    """What every sample of a set has in common."""

    layers: tuple[int, ...]  # canonical ids, auxiliary ones in their order, then the final one
    hidden_size: int
    dtype: str

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token over all layers."""
        return len(self.layers) * self.hidden_size * DTYPES[self.dtype][0].itemsize

    def metadata(self) -> dict[str, str]:
        """The flags that go into every shard and into the index; the final state is the one before the target's final
        norm.
        """
        return {
            "format": FORMAT,
            "layers": json.dumps(list(self.layers)),
            "hidden_size": str(self.hidden_size),
            "dtype": self.dtype,
            "final_state": FINAL_STATE,
        }

    @staticmethod
    def from_metadata(metadata: dict[str, str]) -> Layout:
        """The reverse of `metadata`; `KeyError` or `ValueError` where it is not one of ours."""
        if metadata.get("format") != FORMAT or metadata["final_state"] != FINAL_STATE:
            raise ValueError(f"format {metadata.get('format')}, final state {metadata.get('final_state')}")
        return Layout(tuple(json.loads(metadata["layers"])), int(metadata["hidden_size"]), metadata["dtype"])


@dataclass(frozen=True)
class Entry:
    """Where one sample lies in its shard."""

    sample_id: str
    length: int  # tokens
    offset: int  # absolute first byte in the shard file
    nbytes: int
    crc32: int


def _raw(states: Tensor) -> memoryview:
    return states.contiguous().view(torch.uint8).numpy().data.cast("B")


def write_shard(path: Path, layout: Layout, samples: Sequence[tuple[str, Tensor]]) -> list[Entry]:
    """Writes samples `(sample_id, states[layers, T, H])` in their order; returns where each one lies.

    The tensors are written as they are, without an intermediate copy of the shard. Equal input gives equal bytes.
    """
    torch_dtype, name = DTYPES[layout.dtype]
    item = layout.hidden_size * torch_dtype.itemsize
    header: dict[str, Any] = {}
    rows: list[list[Any]] = []
    position = 0
    for sample_id, states in samples:
        length = states.shape[1]
        if states.shape != (len(layout.layers), length, layout.hidden_size) or states.dtype != torch_dtype:
            raise ValueError(f"sample {sample_id}: states {tuple(states.shape)} {states.dtype} do not fit {layout}")
        for layer in layout.layers:
            end = position + length * item
            tensor = {"dtype": name, "shape": [length, layout.hidden_size], "data_offsets": [position, end]}
            header[f"{sample_id}.{layer}"] = tensor
            position = end
        rows.append([sample_id, length, zlib.crc32(_raw(states))])
    if len(header) != len(rows) * len(layout.layers):
        raise ValueError(f"{path.name}: a sample id occurs twice in one shard")
    header["__metadata__"] = {**layout.metadata(), "rows": json.dumps(rows)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format wants the data 8-byte aligned
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)))
        file.write(text)
        for _, states in samples:
            file.write(_raw(states))
    return _entries(rows, layout, 8 + len(text))


def _entries(rows: Sequence[Sequence[Any]], layout: Layout, start: int) -> list[Entry]:
    entries = []
    for sample_id, length, crc32 in rows:
        nbytes = length * layout.bytes_per_token
        entries.append(Entry(sample_id, length, start, nbytes, crc32))
        start += nbytes
    return entries


def _read_header(file: BinaryIO) -> tuple[dict[str, str], int]:
    (size,) = struct.unpack("<Q", file.read(8))
    if size > 1 << 30:
        raise ValueError("header length out of range")
    return json.loads(file.read(size))["__metadata__"], 8 + size


def read_shard_entries(path: Path) -> tuple[Layout, list[Entry]]:
    """Layout and entries of a shard, from its header alone. Raises `ValueError` naming a file that is no whole shard
    of ours.
    """
    try:
        with path.open("rb") as file:
            metadata, start = _read_header(file)
        layout = Layout.from_metadata(metadata)
        entries = _entries(json.loads(metadata["rows"]), layout, start)
    except (KeyError, ValueError, struct.error, UnicodeDecodeError) as error:
        raise ValueError(f"{path} has no readable states header ({error})") from None
    return layout, entries
