"""The real servers, started as `python -m infra.local` does, for tests that read and write through them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from infra import stores

_AWS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_ENDPOINT_URL")


@contextmanager
def running(start: Callable[[Path], stores.Server], credentials: bool = False) -> Iterator[stores.Server]:
    """A server of its own in a temporary folder, ended by its pid; its own `credentials` in the environment."""
    before = dict(os.environ)
    for name in _AWS if credentials else ():
        os.environ.pop(name, None)
    with tempfile.TemporaryDirectory(prefix="torchspec-store-") as folder:
        home = Path(folder)
        try:
            server = start(home)
            os.environ.update(server.environment)
            yield server
        finally:
            stores.stop(home)
            if credentials:
                os.environ.clear()
                os.environ.update(before)
