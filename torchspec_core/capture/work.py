"""What an engine has to capture, and how it is done: the shards of a plan, written to a workspace.

A shard is sealed when its one file, or one file of each pipeline stage that owns captured layers, is in the workspace.
Both forms may stand in one set: an interrupted run may go on with another engine.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from torch import Tensor

from torchspec_core.data.tokenset import TokenRow, TokenSet
from torchspec_core.errors import StageError
from torchspec_core.stages.workspace import Workspace
from torchspec_core.store.files import ShardFile, shard_name
from torchspec_core.store.format import Layout, read_shard_entries

_FILE = re.compile(r"states-(\d+)(?:\.\d+of(\d+))?\.safetensors")


@dataclass
class CaptureWork:
    """The samples of each shard.

    Attributes:
        plan: shard number -> row numbers in the token set, in the order in which they lie in its file.
        missing: numbers of the shards that are not sealed yet.
        report: called with (tokens done, tokens in all, a word on what is going on).
    """

    workspace: Workspace
    layout: Layout
    tokens: TokenSet
    plan: Mapping[int, np.ndarray]
    report: Callable[[int, int, str], None]
    missing: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.lengths = np.asarray(self.tokens.lengths)
        sealed = self.sealed()
        self.missing = [number for number in self.plan if number not in sealed]
        self.total = self.tokens_of(list(self.plan))
        self.done = self.total - self.tokens_of(self.missing)

    def tokens_of(self, shards: Sequence[int]) -> int:
        """Tokens of some shards."""
        return sum(int(self.lengths[self.plan[number]].sum()) for number in shards)

    def advance(self, tokens: int, message: str) -> None:
        """So many more tokens have been through the target."""
        self.done += tokens
        self.report(self.done, self.total, message)

    def row(self, row: int) -> TokenRow:
        """One sample."""
        return self.tokens.get(int(row))

    def sealed(self) -> dict[int, list[str]]:
        """Number of each shard that is sealed -> its file, or the files of its parts; the form with fewer of two."""
        whole = {name for name in self.workspace.recorded() if self.workspace.done(name) is not None}
        forms = {(int(match[1]), int(match[2] or 1)) for match in map(_FILE.fullmatch, whole) if match}
        found: dict[int, list[str]] = {}
        for number, parts in sorted(forms):
            names = [shard_name(number, part, parts) for part in range(parts)]
            if number not in found and whole.issuperset(names):
                found[number] = names
        return found

    def discard_leftovers(self) -> None:
        """Parts of shards that were never completed, or that were written again in another form, go."""
        kept = {name for names in self.sealed().values() for name in names}
        for name in sorted(self.workspace.recorded() - kept):
            if _FILE.fullmatch(name):
                self.workspace.discard(name)

    def files(self) -> list[ShardFile]:
        """The sealed files of all shards, in order. Raises `StageError` for a shard that is not sealed."""
        found, sealed = [], self.sealed()
        for number in self.plan:
            if number not in sealed:
                raise StageError(f"the shard {shard_name(number)} was not written; run the same command again")
            for name in sealed[number]:
                layout, entries = read_shard_entries(self.workspace.path / name)
                found.append(ShardFile(name, layout.layers, entries))
        return found


class TargetEngine(Protocol):
    """A target that is ready to be captured."""

    def self_check(self, samples: Sequence[np.ndarray]) -> None:
        """Prove on a few rows of token ids that the states are those of the layers that were asked for.

        Raises:
            StageError: the layer and the difference.
        """
        ...

    def capture(self, work: CaptureWork) -> dict[str, float | int | str]:
        """Write the missing shards; returns facts for the manifest.

        Raises:
            StageError: the sample and layer whose state is not finite.
        """
        ...

    def close(self) -> None:
        """Free what the engine holds."""
        ...


def check_finite(sample_ids: Sequence[str], states: Sequence[Tensor], layers: tuple[int, ...]) -> None:
    """Raises `StageError` naming the first sample and layer with a NaN or an infinity in `states[layers, T, H]`."""
    for sample_id, state in zip(sample_ids, states, strict=True):
        finite = state.isfinite().flatten(1).all(1)
        if not finite.all():
            layer = layers[int((~finite).nonzero()[0])]
            raise StageError(
                f"sample {sample_id}: the hidden state of layer {layer} holds NaN or infinity; "
                f"set capture.dtype=float32, or look at this sample's tokens."
            )
