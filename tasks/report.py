"""Stage `report`: one page that says what was run and what came of it."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any

from prefect import task
from prefect.artifacts import create_link_artifact, create_markdown_artifact
from prefect.client.schemas.objects import State

from tasks.common import STAGE_TASK, Run, run_stage_task
from torchspec_core.stages import StageRef

MARKDOWN_LIMIT = 300_000
"""Bytes; a larger artifact bloats the server's database and is left out of its events."""

_IMAGE = re.compile(r"!\[([^\]]*)\]\(([^():]+\.svg)\)")


def inline_images(markdown: str, folder: Path) -> str:
    """`markdown` with its SVG files as `data:` images, which the UI shows; those past the size limit are named only."""
    room = MARKDOWN_LIMIT - len(markdown.encode())

    def image(match: re.Match[str]) -> str:
        nonlocal room
        file = folder / match[2]
        data = base64.b64encode(file.read_bytes()).decode() if file.is_file() else ""
        picture = f"![{match[1]}](data:image/svg+xml;base64,{data})"
        if not data or len(picture) > room:
            return f"{match[1]}: `{file}`"
        room -= len(picture)
        return picture

    return _IMAGE.sub(image, markdown)


def _show(ref: StageRef) -> None:
    folder = ref.path
    page = folder / "report.html"
    text = inline_images((folder / "report.md").read_text(), folder)
    create_markdown_artifact(text, key="report", description=str(page))
    create_link_artifact(page.resolve().as_uri(), key="report-page", link_text="report.html", description=str(page))


@task(name="report", task_run_name="report[{run.slugs[report]}]", **STAGE_TASK)
def report(run: Run, *stages: StageRef) -> State[Any]:
    """What was run, its curves, its acceptance, its seconds and bytes."""
    return run_stage_task(run, "report", _show)
