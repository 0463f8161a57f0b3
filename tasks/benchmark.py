"""A script of `benchmarks/` as a task: in a child process, its flat numbers as a table."""

from __future__ import annotations

import json
import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

from prefect import task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

from torchspec_core.errors import UserError
from torchspec_core.processes import Supervised

log = logging.getLogger("torchspec.tasks")
FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"
DEADLINE_S = 4 * 3600.0


def scripts() -> list[str]:
    """Names of the benchmarks: the modules that take `--json`."""
    return sorted(path.stem for path in FOLDER.glob("*.py") if '"--json"' in path.read_text(encoding="utf-8"))


def check_name(name: str) -> str:
    """The name; raises `UserError` where there is no such script."""
    if name not in scripts():
        raise UserError(f"there is no benchmark {name!r}; choose one of {', '.join(scripts())}")
    return name


@task(name="benchmark", task_run_name="benchmark[{name}]", cache_policy=NO_CACHE, persist_result=False)
def benchmark(name: str, arguments: list[str]) -> State[Any]:
    """Run `python -m benchmarks.NAME --json FILE ARGUMENTS`; its numbers are the artifact `benchmark-NAME`."""
    with tempfile.TemporaryDirectory(prefix="torchspec-benchmark-") as folder:
        found, printed = Path(folder) / "numbers.json", Path(folder) / "output.log"
        command = [sys.executable, "-m", f"benchmarks.{name}", "--json", str(found), *arguments]
        with Supervised(command, log=printed, cwd=FOLDER.parent, deadline_s=DEADLINE_S) as child:
            while child.wait(1.0) is None:
                pass
        text = printed.read_text(encoding="utf-8", errors="replace")
        log.info("%s", text)
        if child.returncode != 0 or not found.is_file():
            last = text.strip().splitlines()[-1:] or ["no output"]
            return Failed(message=f"benchmarks.{name} failed ({child.describe_end()}): {last[0]}")
        numbers = json.loads(found.read_text(encoding="utf-8"))
    rows = [{"name": key, "value": value} for key, value in numbers.items()]
    create_table_artifact(rows, key=f"benchmark-{name.replace('_', '-')}", description=" ".join(command[1:3]))
    return Completed(message=f"{len(rows)} numbers of benchmarks.{name}", data=numbers)
