"""`Job`: all that a stage body gets. Every body is a function `build(job: Job) -> None`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchspec_core.stages.canonical import to_plain
from torchspec_core.stages.progress import PROGRESS_FILE, Progress
from torchspec_core.stages.workspace import Workspace


@dataclass(frozen=True)
class Job:
    """inputs: input stage name -> sealed folder. params: identity parameters, runtime: runtime parameters, both
    nested by recipe section (JSON types)."""

    inputs: Mapping[str, Path]
    params: Mapping[str, Any]
    runtime: Mapping[str, Any]
    workspace: Workspace
    progress: Progress


def local_job(
    folder: Path,
    inputs: Mapping[str, Path] | None = None,
    params: Mapping[str, Any] | None = None,
    runtime: Mapping[str, Any] | None = None,
) -> Job:
    """A job on a plain folder, without store or child process: for tests of a body and for work by hand."""
    workspace = Workspace(Path(folder))
    workspace.path.mkdir(parents=True, exist_ok=True)
    return Job(
        inputs={name: Path(path) for name, path in (inputs or {}).items()},
        params=to_plain(params or {}, "params"),
        runtime=to_plain(runtime or {}, "runtime"),
        workspace=workspace,
        progress=Progress(workspace.logs / PROGRESS_FILE),
    )
