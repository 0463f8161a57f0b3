"""A small set of random hidden states in a folder."""

from __future__ import annotations

from pathlib import Path

import torch

from torchspec_core.store.files import INDEX, ShardFile, shard_name, write_index
from torchspec_core.store.format import Layout, write_shard

LAYOUT = Layout((1, 3, 5), 8, "bfloat16")


def write_set(folder: Path, parts: int = 1, count: int = 7, per_shard: int = 4) -> dict[str, torch.Tensor]:
    """Samples `s0`, `s1`, ... of 3, 5, 7 ... tokens; with two parts the last layer lies in files of its own."""
    generator = torch.Generator().manual_seed(count)
    samples = {f"s{i}": torch.randn(3, 3 + 2 * i, 8, generator=generator).bfloat16() for i in range(count)}
    split = [(0, 3)] if parts == 1 else [(0, 2), (2, 3)]
    files = []
    items = list(samples.items())
    for number in range(-(-count // per_shard)):
        mine = items[per_shard * number : per_shard * (number + 1)]
        for part, (low, high) in enumerate(split):
            name = shard_name(number, part, parts)
            layers = LAYOUT.layers[low:high]
            entries = write_shard(folder / name, Layout(layers, 8, "bfloat16"), [(k, v[low:high]) for k, v in mine])
            files.append(ShardFile(name, layers, entries))
    write_index(folder / INDEX, LAYOUT, files)
    return samples
