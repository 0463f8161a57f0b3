"""Stage `states`: every token sample through the target once, its hidden states into shards.

Shards are planned from the token lengths before anything runs, so an interrupted run skips the sealed ones. Which
engine captures (`capture.engine`) does not move a sample to another shard. The index is rebuilt from the shards' own
headers at the end.

Several machines can capture a part of the shards each (`part` i of n: every n-th shard); the stage then takes over what
they have sealed.

With `store.url` the finished set is copied there and read back, and only its index and its address stay here.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from torchspec_core.capture.plan import shard_plan
from torchspec_core.capture.transformers_engine import TransformersCapture
from torchspec_core.capture.work import CaptureWork, TargetEngine
from torchspec_core.data.tokenset import TokenSet
from torchspec_core.errors import UserError
from torchspec_core.stages.disk import digest_file
from torchspec_core.stages.job import Job
from torchspec_core.stages.manifest import MANIFEST
from torchspec_core.stages.workspace import Workspace
from torchspec_core.store.address import below, open_store
from torchspec_core.store.files import INDEX, write_index
from torchspec_core.store.format import Layout
from torchspec_core.store.local import FolderStore
from torchspec_core.store.move import copy_set
from torchspec_core.store.remote import LOCATION
from torchspec_core.targets.facts import captured_layers, read_facts

_log = logging.getLogger("torchspec.capture")
_CHECK_ROWS = 3


def build(job: Job) -> None:
    """Reads `tokens` and `target`, writes `states-*.safetensors` and `index.arrow`.

    Raises `StageError` naming the sample whose states are not finite, or when the engine fails its self-check.
    """
    if job.workspace.done(LOCATION) is not None:
        _drop_moved(job.workspace)
        return
    capture, runtime = job.params["capture"], job.runtime["capture"]
    facts = read_facts(job.inputs["target"])
    layers = captured_layers(facts, capture["layers"])
    layout = Layout(layers, facts.hidden_size, capture["dtype"])
    tokens = TokenSet(job.inputs["tokens"])
    lengths = np.asarray(tokens.lengths)
    _check_lengths(lengths, facts.max_position_embeddings, runtime["token_budget"])
    part, parts = capture.get("part", (0, 1))
    shards = shard_plan(lengths, layout.bytes_per_token, capture["shard_mib"] << 20)
    plan = {number: rows for number, rows in enumerate(shards) if number % parts == part}
    job.workspace.expect(len(plan) + 1)

    def report(done: int, total: int, message: str) -> None:
        job.progress.update(done, total, unit="tokens", message=message)

    take_over(job.workspace, [Path(folder) for folder in runtime.get("parts", ())])
    work = CaptureWork(job.workspace, layout, tokens, plan, report)
    if work.missing:
        job.workspace.discard(INDEX)  # its checksums may be of other bytes than those that are captured now
        _capture(job, work)
    if job.workspace.done(INDEX) is None:
        work.discard_leftovers()
        with job.workspace.shard(INDEX) as path:
            rows = write_index(path, layout, work.files())
            job.workspace.facts(INDEX, rows=rows)
    samples = sum(len(rows) for rows in plan.values())
    job.workspace.record(rows=samples, tokens=work.total, layers=",".join(map(str, layers)), final_state="prenorm")
    if (url := job.runtime.get("store", {}).get("url")) is not None:
        _move(job, below(url, job.workspace.path.name))


def _move(job: Job, url: str) -> None:
    """Copy the set to `url` and read it back, leave the address here, delete the shards here."""

    def report(done: int, total: int, name: str) -> None:
        job.progress.update(done, total, unit="bytes", message=f"{name} to {url}")

    store = open_store(url)
    try:
        copied = copy_set(FolderStore(job.workspace.path), store, report)
    finally:
        store.close()
    _log.info("%d files to %s, %d were there", copied.files, url, copied.kept)
    with job.workspace.shard(LOCATION) as path:
        path.write_text(json.dumps({"url": url}) + "\n")
    _drop_moved(job.workspace)


def _drop_moved(workspace: Workspace) -> None:
    for name in sorted(workspace.recorded()):
        if name not in (INDEX, LOCATION):
            workspace.discard(name)


def take_over(workspace: Workspace, parts: Sequence[Path]) -> None:
    """Link the sealed shards of other folders into the workspace, as far as it lacks them and their bytes are whole."""
    for folder in parts:
        files = json.loads((folder / MANIFEST).read_text())["files"]
        for name in sorted(set(files) - {INDEX}):
            if workspace.done(name) is not None:
                continue
            if digest_file(folder / name) != files[name]["blake2b"]:
                _log.warning("%s is not what was sealed: its samples are captured again", folder / name)
                continue
            with workspace.shard(name) as path:
                try:
                    os.link(folder / name, path)
                except OSError:  # another file system
                    shutil.copyfile(folder / name, path)


def _capture(job: Job, work: CaptureWork) -> None:
    engine = _engine(job, work)
    try:
        engine.self_check([work.row(i).input_ids for i in _check_rows(work.lengths)])
        started, before = time.monotonic(), work.done
        facts = engine.capture(work)
        seconds, captured = time.monotonic() - started, work.done - before
    finally:
        engine.close()
    _log.info("captured %d tokens in %.1f s, %.0f tokens/s", captured, seconds, captured / seconds)
    job.workspace.record(tokens_per_second=round(captured / seconds, 1), **facts)


def _engine(job: Job, work: CaptureWork) -> TargetEngine:
    target, layers = job.inputs["target"], work.layout.layers
    runtime, threads = job.runtime["capture"], job.runtime["run"]["threads"]
    if runtime["engine"] == "transformers":
        return TransformersCapture(target, layers, work.layout.dtype, threads, runtime["token_budget"])
    from torchspec_core.capture.vllm_engine import EngineSettings, VllmCapture

    settings = EngineSettings(
        pipeline_parallel=runtime["pipeline_parallel"], tensor_parallel=runtime["tensor_parallel"],
        token_budget=runtime["token_budget"], outstanding=runtime["outstanding"], buffer_mib=runtime["buffer_mib"],
        kv_cache_gib=runtime["kv_cache_gib"], threads=threads,
    )  # fmt: skip
    return VllmCapture(target, work, settings)


def _check_lengths(lengths: np.ndarray, limit: int, token_budget: int) -> None:
    if not len(lengths):
        raise UserError(
            "There are no token samples to capture: every row was rejected, see rejected.jsonl of the tokens stage."
        )
    longest = int(lengths.max())
    if longest > limit:
        raise UserError(
            f"data.max_length: a sample has {longest} tokens, but the target takes {limit}; set it to {limit} or less."
        )
    if longest > token_budget:
        raise UserError(
            f"capture.token_budget is {token_budget}, but a sample has {longest} tokens; set it to {longest} or more."
        )


def _check_rows(lengths: np.ndarray) -> list[int]:
    """A few rows of unequal length for the self-check: short ones, so that it stays cheap, and padding occurs."""
    order = np.argsort(lengths, kind="stable")
    return sorted({int(order[len(order) * part // 100]) for part in (5, 15, 25)})[:_CHECK_ROWS]
