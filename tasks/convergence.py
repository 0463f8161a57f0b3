"""The nightly gates as tasks: a subject's verdicts as a table, and the night's end with its suspects and its trend."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prefect import task
from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

from torchspec_core.errors import TorchspecError, UserError
from torchspec_core.nightly.bands import Bands
from torchspec_core.nightly.gates import Verdict, failed_to_complete
from torchspec_core.nightly.history import HISTORY, read
from torchspec_core.nightly.night import Plan, close, numbers_of, verdicts_of
from torchspec_core.stages import StageRef

REPOSITORY = Path(__file__).resolve().parents[1]
OPTIONS: dict[str, Any] = {"cache_policy": NO_CACHE, "persist_result": False}


def verdict_rows(verdicts: Sequence[Verdict]) -> list[dict[str, Any]]:
    """One row a gate, those that failed first."""
    rows = [{**verdict.to_json(), "ok": "yes" if verdict.ok else "NO"} for verdict in verdicts]
    return sorted(rows, key=lambda row: row["ok"] != "NO")


def night_message(verdicts: Sequence[Verdict], suspects: Sequence[str]) -> str:
    """The night in one line: what left its band and what may have done it."""
    bad = [str(verdict) for verdict in verdicts if not verdict.ok]
    if not bad:
        return f"{len(verdicts)} gates hold"
    return f"{len(bad)} of {len(verdicts)} gates failed: {'; '.join(bad)}. Suspects: {'; '.join(suspects)}"


@task(name="gates", task_run_name="gates[{subject}]", **OPTIONS)
def gates(plan: Plan, subject: str, made: Mapping[str, StageRef], bands: Bands) -> State[Any]:
    """Checks, short re-runs, and the subject's numbers against their bands; fails when one is outside."""
    try:
        verdicts = verdicts_of(subject, numbers_of(plan, subject, made), bands)
    except UserError as error:
        return Failed(message=str(error), data=error)
    except TorchspecError as error:
        verdicts = failed_to_complete(subject, str(error))
    create_table_artifact(verdict_rows(verdicts), key=f"nightly-{subject.replace('_', '-')}", description=subject)
    bad = [str(verdict) for verdict in verdicts if not verdict.ok]
    if bad:
        return Failed(message="; ".join(bad), data=verdicts)
    return Completed(message=f"{len(verdicts)} gates hold", data=verdicts)


@task(name="verdict", **OPTIONS)
def verdict(plan: Plan, verdicts: Sequence[Verdict], started: float) -> State[Any]:
    """The night into the history; the whole table and the trend as artifacts under fixed keys."""
    from torchspec_core.plots.nightly import trend  # matplotlib, once a night
    from torchspec_core.plots.style import standalone

    night, suspects = close(plan, verdicts, started, REPOSITORY)
    create_table_artifact(
        verdict_rows(verdicts), key="nightly-convergence", description="\n".join([night.night, *suspects])
    )
    nights = read(plan.root / HISTORY, plan.variant)
    picture = standalone(trend([dict(row) for row in past.verdicts] for past in nights)).encode()
    create_markdown_artifact(
        f"![nightly trend](data:image/svg+xml;base64,{base64.b64encode(picture).decode()})",
        key="nightly-trend", description=f"{len(nights)} nights; numbers by the middle of their band",
    )  # fmt: skip
    message = night_message(verdicts, suspects)
    return Completed(message=message) if night.green else Failed(message=message)

