"""Tries again what may work a moment later, until a deadline: growing pauses with jitter, each failure in the log."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from typing import TypeVar

from torchspec_core.store.protocol import StoreUnavailableError

_log = logging.getLogger("torchspec.store")
_FIRST_S, _MOST_S, _GROWTH = 0.05, 3.0, 2.0

T = TypeVar("T")


class Transient(Exception):
    """A failure worth another try; its text is the reason."""


def retrying(what: str, call: Callable[[], T], deadline_s: float, remedy: str) -> T:
    """The result of `call`, which is tried again whenever it raises `Transient`.

    Args:
        what: the operation and its place, for the log and the error ("read x from s3://b").
        deadline_s: seconds from now after which there is no further try. A try in progress is not cut short: it
            has its own limit in the client's settings.
        remedy: what a person can do; ends the sentence of the error.

    Raises:
        StoreUnavailableError: the deadline passed.
    """
    end = time.monotonic() + deadline_s
    pause, tries = _FIRST_S, 0
    while True:
        tries += 1
        try:
            return call()
        except Transient as error:
            left = end - time.monotonic()
            if left <= 0:
                times = "one try" if tries == 1 else f"{tries} tries"
                raise StoreUnavailableError(
                    f"could not {what} after {times} in {deadline_s:g} s ({error}): {remedy}."
                ) from None
            wait = min(left, pause * random.uniform(0.5, 1.5))
            _log.warning("could not %s (%s); trying again in %.2g s", what, error, wait)
        time.sleep(wait)
        pause = min(_MOST_S, pause * _GROWTH)
