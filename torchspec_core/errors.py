"""Errors that end a run.

`UserError` is for what a person can mend (a wrong key, a missing file, a server that is down): one sentence that says
what is wrong, where, and what to do. Commands print it alone, without a traceback, and exit with 2.
`StageError` is for work that failed after it started: exit code 1, and it names the log to read.
"""

from __future__ import annotations


class TorchspecError(Exception):
    """Base of every error this project raises on purpose."""


class UserError(TorchspecError):
    """A mistake in what was asked; the message is one sentence: what, where, what to do."""


class StageError(TorchspecError):
    """A stage that started and failed; the message names the stage, the reason and the log file."""
