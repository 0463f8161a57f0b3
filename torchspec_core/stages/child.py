"""The child process of a stage: `python -m torchspec_core.stages.child FOLDER`.

Reads FOLDER/request.json (function, inputs, params, runtime), runs the function on a `Job`, and leaves
FOLDER/outcome.json for the parent. Typed by hand it does the same (it then takes the entry's lock itself); the next
`torchspec run` seals the folder. Exit status: 0, 2 for a UserError, 1 for anything else (the traceback is on stderr,
in the log).
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
import traceback
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from torchspec_core.errors import UserError
from torchspec_core.stages.disk import disk_errors, write_json
from torchspec_core.stages.job import Job
from torchspec_core.stages.lock import LOCK_FDS, hold
from torchspec_core.stages.manifest import read_spec
from torchspec_core.stages.progress import PROGRESS_FILE, Progress
from torchspec_core.stages.workspace import OUTCOME, REQUEST, Workspace

_THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "RAYON_NUM_THREADS",
)


def set_threads(runtime: dict[str, Any]) -> None:
    """Thread settings that libraries read once, when they are loaded; so before anything heavy is imported."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads would steal the cores of the other processes
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    threads = int(runtime.get("run", {}).get("threads", 0))
    if threads > 0:
        for name in _THREAD_VARIABLES:
            os.environ[name] = str(threads)


def load_function(name: str) -> Any:
    """The object that `package.module:function` names."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def run(folder: Path) -> int:
    """Run the request of `folder`; the exit status."""
    try:
        request = json.loads((folder / REQUEST).read_text())
    except (OSError, ValueError):
        sys.stderr.write(f"{folder / REQUEST} is missing or damaged; start the stage with `torchspec run` once.\n")
        return 2
    set_threads(request["runtime"])
    workspace = Workspace(folder)
    job = Job(
        inputs={name: Path(path) for name, path in request["inputs"].items()},
        params=request["params"],
        runtime=request["runtime"],
        workspace=workspace,
        progress=Progress(workspace.logs / PROGRESS_FILE),
    )
    outcome: dict[str, Any] = {"ok": True}
    said = ""
    try:
        with ExitStack() as stack:
            _take_lock(folder, stack)
            with disk_errors(folder):
                load_function(request["function"])(job)
    except UserError as error:
        outcome = {"ok": False, "user_error": str(error)}
        said = f"{error}\n"
    except Exception as error:
        outcome = {"ok": False, "error": f"{type(error).__name__}: {error}".strip()[:2000]}
        said = traceback.format_exc()
    # Both may fail on a full disk; the parent then sees a child without an outcome and looks at the free space.
    with suppress(OSError):
        write_json(folder / OUTCOME, outcome)
    with suppress(OSError):
        sys.stderr.write(said)
    return 0 if outcome["ok"] else 2 if "user_error" in outcome else 1


def _take_lock(folder: Path, stack: ExitStack) -> None:
    """Keep the inherited locks from our own children; without any (typed by hand) take the entry's lock."""
    inherited = os.environ.pop(LOCK_FDS, "")
    for number in filter(None, inherited.split(",")):
        os.set_inheritable(int(number), False)
    known = read_spec(folder)
    if not inherited and known is not None:
        stack.enter_context(hold(folder.parent.parent / ".locks" / f"{known[0].stage}-{known[1]}", wait_s=0))


def main() -> None:
    """Entry point."""
    if len(sys.argv) != 2:
        sys.exit("usage: python -m torchspec_core.stages.child FOLDER")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s", stream=sys.stderr)
    sys.exit(run(Path(sys.argv[1]).absolute()))


if __name__ == "__main__":
    main()
