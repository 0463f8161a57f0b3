"""A process that lends memory to a Mooncake cluster: `python -m torchspec_core.store.lend ADDRESS`.

States stay as long as the process that holds them. Stages are short-lived processes, so that the states of one are
there for the next, some process with a segment must outlive them: this one, on each machine that has memory to spare.
"""

from __future__ import annotations

import signal
import sys
import threading

from torchspec_core.errors import UserError
from torchspec_core.store.address import open_store


def main(arguments: list[str]) -> int:
    """Join with the segment that the address names, stay until SIGTERM or Ctrl-C, leave."""
    if len(arguments) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    over = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: over.set())
    try:
        store = open_store(arguments[0])
    except UserError as error:
        print(f"torchspec: {error}", file=sys.stderr)
        return 2
    store.put(MARK, b"1")
    over.wait()
    store.close()
    return 0


MARK = "lent"
"""Key of an object that is there once memory was lent."""

if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
