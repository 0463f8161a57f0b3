"""Stage `tokens`: what the drafter trains on."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from prefect import task
from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.client.schemas.objects import State

from tasks.common import STAGE_TASK, Run, run_stage_task
from torchspec_core.stages import StageRef

SAMPLES = 5
SAMPLE_CHARS = 12_000


def count_rows(counts: dict[str, Any]) -> list[dict[str, Any]]:
    """The counts of a tokens stage as a table: rows in, what became of them and why, tokens by domain and source."""
    sizes = ("rows_in", "rows", "tokens", "supervised", "truncated")
    rows = [{"what": name.replace("_", " "), "count": counts[name], "tokens": "", "supervised": ""} for name in sizes]
    for kind in ("rejected", "filtered"):
        rows += [
            {"what": f"{kind}: {reason}", "count": count, "tokens": "", "supervised": ""}
            for reason, count in counts[kind].items()
        ]
    rows += [
        {"what": source, "count": part["rows"], "tokens": part["tokens"], "supervised": part["supervised"]}
        for source, part in counts["by_source"].items()
    ]
    return rows


def samples_markdown(folder: Path, target: Path) -> str:
    """A few samples with the supervised text marked, each cut to a size that the UI can show."""
    from torchspec_core.data.inspect import samples, to_markdown

    parts = to_markdown(samples(folder, target, SAMPLES)).split("\n\n**")
    return "\n\n**".join(part if len(part) <= SAMPLE_CHARS else f"{part[:SAMPLE_CHARS]}\n…\n~~~~" for part in parts)


def _show(ref: StageRef, target: Path) -> None:
    from torchspec_core.plots.lengths import length_histogram
    from torchspec_core.plots.style import standalone

    counts = json.loads((ref.path / "counts.json").read_text())
    where = f"Left-out rows and their reasons: {ref.path / 'rejected.jsonl'}"
    create_table_artifact(count_rows(counts), key="tokens-counts", description=where)
    picture = standalone(length_histogram(counts["lengths"]["edges"], counts["lengths"]["counts"]))
    image = base64.b64encode(picture.encode()).decode()
    text = f"![samples by length](data:image/svg+xml;base64,{image})"
    create_markdown_artifact(text, key="tokens-lengths", description="Length of the training samples in tokens")
    create_markdown_artifact(samples_markdown(ref.path, target), key="tokens-samples", description=str(ref.path))


@task(name="tokens", task_run_name="tokens[{run.slugs[tokens]}]", **STAGE_TASK)
def tokens(run: Run, target: StageRef, prompts: StageRef, answers: StageRef) -> State[Any]:
    """Conversations as token ids and loss masks in Arrow shards."""
    return run_stage_task(run, "tokens", lambda ref: _show(ref, target.path))
