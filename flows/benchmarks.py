"""`benchmark`: one script of `benchmarks/` on a worker, its numbers in the UI."""

from __future__ import annotations

from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

from tasks.benchmark import benchmark as measured
from tasks.benchmark import check_name
from torchspec_core.errors import UserError


@flow(name="benchmark", flow_run_name="benchmark: {name}", persist_result=False)
def benchmark(name: str, quick: bool = False, arguments: list[str] | None = None) -> State[Any]:
    """Run a benchmark alone on its worker.

    Args:
        name: A script of benchmarks/, such as `padding`, `preprocess`, `training`.
        quick: Small sizes: shows that it runs, proves nothing.
        arguments: More arguments of the script, as on its command line.
    """
    try:
        words = [*(["--quick"] if quick else []), *(arguments or [])]
        end = measured(check_name(name), words, return_state=True)
    except UserError as error:
        return Failed(message=str(error), data=error)
    return Completed(message=end.message) if end.is_completed() else Failed(message=str(end.message))
