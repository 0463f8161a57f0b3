"""Training checkpoints: one file, replaced atomically; what is there is always whole."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

_FILE = "state.pt"


def save_checkpoint(folder: Path, state: dict[str, Any]) -> None:
    """Write `state` (tensors and plain values), sync it, and put it in place of the previous one."""
    draft = folder / f"{_FILE}.tmp"
    with open(draft, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, folder / _FILE)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def load_checkpoint(folder: Path) -> dict[str, Any] | None:
    """The last state saved in `folder`, or None."""
    path = folder / _FILE
    if not path.exists():
        return None
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state
