"""The real servers, started as `python -m infra.local` does, for tests that read and write through them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from infra import stores


@contextmanager
def running(start: Callable[[Path], stores.Server]) -> Iterator[stores.Server]:
    """A server of its own in a temporary folder, its credentials in the environment; ended by its pid."""
    before = dict(os.environ)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_ENDPOINT_URL"):
        os.environ.pop(name, None)
    with tempfile.TemporaryDirectory(prefix="torchspec-store-") as folder:
        home = Path(folder)
        try:
            server = start(home)
            os.environ.update(server.environment)
            yield server
        finally:
            stores.stop(home)
            os.environ.clear()
            os.environ.update(before)
