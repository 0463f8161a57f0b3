"""Stages and the one cache: spec -> key -> sealed folder.

`StageSpec` is what decides a stage's bytes, `StageStore` keeps the folders, `run_stage` makes one in a supervised
child, `Job` is what a stage body gets. `python -m torchspec_core.stages.child FOLDER` is the child's entry point.
"""

from torchspec_core.stages.disk import digest_file
from torchspec_core.stages.explain import Explanation
from torchspec_core.stages.job import Job, local_job
from torchspec_core.stages.lock import BusyError, Holder
from torchspec_core.stages.manifest import Entry
from torchspec_core.stages.progress import Progress, ProgressEvent
from torchspec_core.stages.run import StageInterrupted, run_stage
from torchspec_core.stages.spec import StageRef, StageSpec
from torchspec_core.stages.store import Lookup, Plan, StageStore
from torchspec_core.stages.workspace import Workspace, WorkspaceError

__all__ = [
    "BusyError",
    "Entry",
    "Explanation",
    "Holder",
    "Job",
    "Lookup",
    "Plan",
    "Progress",
    "ProgressEvent",
    "StageInterrupted",
    "StageRef",
    "StageSpec",
    "StageStore",
    "Workspace",
    "WorkspaceError",
    "digest_file",
    "local_job",
    "run_stage",
]
