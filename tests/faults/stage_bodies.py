"""Stage bodies and a parent process for the fault tests; run by child processes, so they live in a module of their own.

`python stage_bodies.py STORE TRACE SLOW` is a run that a test can kill: it makes the stage and prints its reference.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from torchspec_core.errors import UserError
from torchspec_core.stages import Holder, Job, StageInterrupted, StageRef, StageSpec, StageStore, run_stage

SHARDS, HALF = 4, 100_000
SPEC = StageSpec("tokens", 1, {"data": {"shards": SHARDS}}, slug="fault")


def content(number: int) -> bytes:
    """The bytes of one shard."""
    return bytes([65 + number]) * (2 * HALF)


def build(job: Job) -> None:
    """Writes the shards in two halves; notes each step in the trace file; lingers in the middle of shard `slow`."""
    runtime = job.runtime["test"]

    def note(*words: object) -> None:
        with open(runtime["trace"], "a") as file:
            file.write(" ".join(map(str, (os.getpid(), *words))) + "\n")

    if runtime.get("deaf"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if runtime.get("daemon"):
        note("daemon", subprocess.Popen(["sleep", "300"], start_new_session=True).pid)
    if runtime.get("mistake"):
        raise UserError("The file x.json has no rows; add some.")
    if runtime.get("crash"):
        raise ValueError("nothing adds up")
    if runtime.get("hog"):
        with open(job.workspace.scratch("hog") / "file", "wb", buffering=0) as hog:
            while True:
                hog.write(bytes(4096))
    job.workspace.expect(SHARDS)
    for number in range(job.params["data"]["shards"]):
        name = f"shard-{number}"
        if job.workspace.done(name):
            continue
        note("start", number)
        with job.workspace.shard(name) as path, open(path, "wb") as file:
            file.write(content(number)[:HALF])
            file.flush()
            if number == runtime.get("slow"):
                note("middle", number)
                job.progress.update(number, SHARDS, "shards", "in the middle")
                until = time.monotonic() + runtime.get("seconds", 300)
                while time.monotonic() < until:
                    time.sleep(0.02)
                    if runtime.get("deaf"):
                        note("tick")
            file.write(content(number)[HALF:])
        job.workspace.facts(name, rows=1)
        note("end", number)


def run(store: Path, trace: Path, **options: object) -> StageRef:
    """One run of the stage, as a flow would make it."""

    def waiting(holder: Holder) -> None:
        sys.stdout.write(f"waiting {holder.pid}\n")
        sys.stdout.flush()

    return run_stage(
        StageStore(store), SPEC, "stage_bodies:build", {}, SPEC.identity, {"test": {"trace": str(trace), **options}},
        env={"PYTHONPATH": os.pathsep.join((os.path.dirname(os.path.abspath(__file__)), os.getcwd()))},
        on_wait=waiting, grace_s=1.5,
    )  # fmt: skip


def main() -> None:
    """The parent that a test kills."""
    try:
        ref = run(Path(sys.argv[1]), Path(sys.argv[2]), **json.loads(sys.argv[3]))
    except StageInterrupted as stopped:
        sys.exit(str(stopped))
    sys.stdout.write(f"cached {ref.cached}\n")


if __name__ == "__main__":
    main()
