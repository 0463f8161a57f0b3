"""A stage body for tests of the walk: three small shards, held where the test asks, and the files that tasks show.

Beside the store's stage folders it keeps `ran.jsonl` (which shard was made, by which process) and obeys `hold-STAGE`:
while that file exists, the stage makes its first shard and then waits.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from torchspec_core.stages.job import Job
from torchspec_core.targets.made import PACKAGE_CONFIG

SHARDS = 3

ACCEPTANCE = {"heldout.greedy.acceptance_length": 1.5, "heldout.t1.acceptance_length": 1.4}
STEPS = [{"step": i, "loss": 2.0 - i / 10, "acc_0": i / 20, "lr": 1e-3, "tokens": 64} for i in range(9)]
COUNTS = {
    **dict.fromkeys(("rows_in", "rows", "tokens", "supervised", "truncated"), 3),
    "rejected": {"bad role": 1}, "filtered": {}, "by_source": {"sharegpt": {"rows": 3, "tokens": 9, "supervised": 6}},
    "lengths": {"edges": [0, 8, 16], "counts": [2, 1]},
}  # fmt: skip
FILES = {
    "target": {"config.json": json.dumps(PACKAGE_CONFIG)},
    "tokens": {"counts.json": json.dumps(COUNTS)},
    "drafter": {"metrics.jsonl": "".join(json.dumps(step) + "\n" for step in STEPS)},
    "evaluation": {"evaluation.json": json.dumps({**ACCEPTANCE, "heldout.greedy.drafts": 40})},
    "report": {
        "report.html": "<h1>Report</h1>",
        "report.md": "# Report\n\n![loss](loss.svg)\n",
        "loss.svg": "<svg xmlns='http://www.w3.org/2000/svg'/>",
        "report.json": json.dumps(ACCEPTANCE),
    },
}


def build(job: Job) -> None:
    """Make the shards that are missing."""
    stage, root = job.workspace.path.parent.name, job.workspace.path.parents[1]
    for index in range(SHARDS):
        name = f"shard-{index}.txt"
        if job.workspace.done(name) is None:
            _hold(root / f"hold-{stage}", index)
            with job.workspace.shard(name) as path:
                path.write_text(f"{stage} {index}\n")
            _note(root, stage, index)
        job.progress.update(index + 1, SHARDS, unit="shards")
    for name, text in FILES.get(stage, {}).items():
        with job.workspace.shard(name) as path:
            path.write_text(text)
    job.workspace.record(rows=SHARDS)


def _hold(file: Path, index: int) -> None:
    deadline = time.monotonic() + 120
    while index > 0 and file.exists() and time.monotonic() < deadline:
        time.sleep(0.05)


def _note(root: Path, stage: str, index: int) -> None:
    with open(root / "ran.jsonl", "a") as file:
        file.write(json.dumps({"stage": stage, "shard": index, "pid": os.getpid()}) + "\n")
