"""Child processes that behave: own session, output to a file, a deadline, and never an orphan.

`Supervised` runs one command under a guard; `start_detached`/`stop_detached` keep servers that outlive a command.
"""

from torchspec_core.processes.detached import Detached, find_detached, start_detached, stop_detached
from torchspec_core.processes.supervised import ProcessError, Supervised, free_port
from torchspec_core.processes.tail import JsonlTail, last_error, tail_lines

__all__ = [
    "Detached",
    "JsonlTail",
    "ProcessError",
    "Supervised",
    "find_detached",
    "free_port",
    "last_error",
    "start_detached",
    "stop_detached",
    "tail_lines",
]
