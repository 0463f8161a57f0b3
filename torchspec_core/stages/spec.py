"""What a stage is made from (`StageSpec`, whose digest is its key) and what it became (`StageRef`)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from torchspec_core.stages.canonical import digest, to_plain

SHORT_KEY = 12
SLUG_LIMIT = 60


@dataclass(frozen=True)
class StageSpec:
    """Everything that decides the bytes a stage writes.

    identity: identity parameters, nested by recipe section. inputs: input stage name -> its key. files: name ->
    digest of a file that is read. slug: readable part of the folder's name, not part of the key.
    """

    stage: str
    version: int
    identity: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    slug: str = ""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z][a-z0-9_]*", self.stage):
            raise ValueError(f"a stage is named in lower-case letters, digits and _, not {self.stage!r}")
        for name in ("identity", "inputs", "files"):
            object.__setattr__(self, name, to_plain(getattr(self, name), name))

    def document(self) -> dict[str, Any]:
        """The document that the key is the digest of (JSON types)."""
        return {
            "stage": self.stage,
            "version": self.version,
            "identity": self.identity,
            "inputs": self.inputs,
            "files": self.files,
        }

    @cached_property
    def key(self) -> str:
        """blake2b-128 of the canonical document, 32 hex digits."""
        return digest(self.document())

    @property
    def folder_name(self) -> str:
        """`<slug>-<first 12 digits of the key>`."""
        slug = re.sub(r"[^A-Za-z0-9._]+", "-", self.slug).strip("-.")[:SLUG_LIMIT].strip("-.")
        return f"{slug or self.stage}-{self.key[:SHORT_KEY]}"

    @staticmethod
    def from_document(document: Mapping[str, Any], slug: str = "") -> StageSpec:
        """The spec of a `document()`; raises KeyError or TypeError for anything else."""
        return StageSpec(
            document["stage"], document["version"], document["identity"], document["inputs"], document["files"], slug
        )


@dataclass(frozen=True)
class StageRef:
    """A sealed stage, small enough to hand from task to task: where it is, what it holds, whether it was made just now.

    seconds: what making it took (also for a hit: what was saved). reason: why it was a hit, or had to be made.
    """

    stage: str
    key: str
    path: Path
    rows: int
    bytes: int
    seconds: float
    cached: bool
    reason: str
    metrics: Mapping[str, float | int | str] = field(default_factory=dict)
