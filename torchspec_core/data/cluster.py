"""Running the shards of a stage: in this process, on a local Dask cluster, or on one that is already up.

Dask is imported here only, inside the function that uses it: the rest of the library works without it. The cluster
starts before any data is read by a worker; a worker that dies has its shard given to another one.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torchspec_core.data.shards import ShardTask
from torchspec_core.errors import StageError, UserError
from torchspec_core.stages.disk import TEMPORARY

if TYPE_CHECKING:
    from torchspec_core.stages.job import Job

log = logging.getLogger("torchspec.data")

# Each worker encodes on one core: the parallelism is in the workers.
WORKER_ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
# Futures in flight a worker: enough to keep it busy, few enough that the scheduler stays small with many shards.
IN_FLIGHT = 4
RETRIES = 2


@contextlib.contextmanager
def _client(workers: int, scheduler: str | None, job: Job) -> Iterator[Any]:
    import dask
    from distributed import Client, LocalCluster

    if scheduler is not None:
        try:
            client = Client(scheduler, timeout="10s")
        except (OSError, ValueError) as error:
            raise UserError(
                f"no Dask scheduler answers at data.scheduler={scheduler} ({error}): start it or leave it out"
            ) from error
        with client:
            yield client
        return
    settings = {"distributed.admin.log-length": 0, "distributed.nanny.environ": WORKER_ENVIRONMENT}
    with dask.config.set(settings):
        cluster = LocalCluster(
            n_workers=workers, threads_per_worker=1, processes=True, host="127.0.0.1",
            dashboard_address=None, local_directory=str(job.workspace.scratch("dask")), silence_logs=logging.ERROR,
        )
        with cluster, Client(cluster) as client:
            yield client


def _name(task: ShardTask) -> str:
    rows = [f"{part.label} rows {part.spans[0][0]}-{part.spans[-1][0]}" for part in task.parts]
    return f"{task.file} ({', '.join(rows)})"


def _on_dask(
    function: Callable[[ShardTask], dict[str, int]], tasks: Sequence[ShardTask], client: Any
) -> Iterator[dict[str, int]]:
    from distributed import as_completed

    waiting = iter(tasks)
    owner: dict[str, ShardTask] = {}

    def submit(task: ShardTask) -> Any:
        future = client.submit(function, task, key=f"{task.file}-{task.workspace.path}", pure=False, retries=RETRIES)
        owner[future.key] = task
        return future

    slots = IN_FLIGHT * max(1, len(client.scheduler_info(n_workers=-1)["workers"]))
    first = [submit(task) for task in itertools.islice(waiting, slots)]
    finished = as_completed(first)
    for future in finished:
        task = owner.pop(future.key)
        try:
            facts = future.result()
        except UserError:
            raise
        except Exception as error:
            raise StageError(f"the shard {_name(task)} failed {RETRIES + 1} times: {error}") from error
        future.release()
        if (following := next(waiting, None)) is not None:
            finished.add(submit(following))
        yield facts


def run_shards(
    function: Callable[[ShardTask], dict[str, int]], tasks: Sequence[ShardTask], workers: int, scheduler: str | None,
    job: Job, total: int,
) -> None:
    """Run `function` on every task and report progress; `total` counts the shards of earlier attempts too.

    workers: processes of a local cluster, 0 = in this process. scheduler: address of a running cluster to use instead.
    """
    done = total - len(tasks)
    tokens = 0
    with contextlib.ExitStack() as stack:
        if not tasks:
            return
        if workers or scheduler:
            results = _on_dask(function, tasks, stack.enter_context(_client(min(workers, len(tasks)), scheduler, job)))
        else:
            results = map(function, tasks)
        for facts in results:
            done += 1
            tokens += facts["tokens"]
            job.progress.update(done, total, unit="shards", tokens=tokens)
    # A worker that was killed leaves its half-written draft; the shard itself was written again by another.
    for draft in job.workspace.path.glob(f"{TEMPORARY}*"):
        draft.unlink(missing_ok=True)
