"""Quick looks before a run starts: a data file with no usable row, a scheduler that does not answer."""

from __future__ import annotations

import itertools
import socket
from pathlib import Path
from urllib.parse import urlsplit

from torchspec_core.data.messages import TOKEN_IDS
from torchspec_core.data.sources import Rejected, read_conversations
from torchspec_core.errors import UserError

LOOK_ROWS = 200
CONNECT_SECONDS = 3.0


def check_readable(name: str, path: str | None) -> None:
    """Refuse a user's file that is empty, or whose first rows are all bad; a few bad rows are the stages' matter."""
    if path is None or name == "hub":  # a data set of the Hub is fetched when the stage runs
        return
    rows = list(itertools.islice(read_conversations(name, path), LOOK_ROWS))
    if not rows and Path(path).is_file():
        raise UserError(f"{path} holds no rows: write one JSON object a line, with `messages` or `conversations`")
    bad = [row for row in rows if isinstance(row, Rejected) and row.reason != TOKEN_IDS]
    if bad and len(bad) == len(rows):
        raise UserError(
            f"{path}: none of the first {len(rows)} rows can be used (row {bad[0].row}: {bad[0].reason}): write one "
            "JSON object a line, with `messages` or `conversations`"
        )


def check_scheduler(address: str) -> None:
    """Refuse the address of a Dask scheduler at which nobody listens."""
    parts = urlsplit(address if "://" in address else f"tcp://{address}")
    try:
        with socket.create_connection((parts.hostname or "", parts.port or 8786), timeout=CONNECT_SECONDS):
            return
    except (OSError, ValueError) as error:
        raise UserError(
            f"no Dask scheduler answers at data.scheduler={address} ({error}): start it or leave it out"
        ) from error
