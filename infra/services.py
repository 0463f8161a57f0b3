"""The local Prefect server and worker: where they live, whether they answer, how they start and stop.

Everything is under `.torchspec/`: own `PREFECT_HOME` with its SQLite database, logs, pid files, the port. Telemetry is
off and the server listens on 127.0.0.1 only. A server that the user names in `PREFECT_API_URL` is used as it is, never
started or stopped from here; only the worker is. This module imports no Prefect, so `status` and `stop` are quick.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torchspec_core.errors import StageError, UserError
from torchspec_core.processes import find_detached, free_port, start_detached, stop_detached

ROOT = Path(__file__).resolve().parents[1]
POOL = "torchspec-cpu"
POOLS: Mapping[str, int | None] = {POOL: None, "torchspec-inference": 1, "torchspec-training": 1}
"""Work pool -> the runs it takes at once (None: no limit of its own). One GPU job at a time until its owner raises the
limit to the number of nodes: `prefect work-pool set-concurrency-limit torchspec-training N`."""
SERVER, WORKER = "prefect-server", "prefect-worker"
START_SECONDS = 300.0
"""Generous: a start took two minutes where other work kept every core busy. A server that ends is noticed at once."""


@dataclass(frozen=True)
class Place:
    """Where the services live, and the address of the API."""

    home: Path
    api: str
    named: bool
    """Whether the user named the server, in `PREFECT_API_URL`."""

    @property
    def ui(self) -> str:
        """Address of the UI."""
        return self.api.removesuffix("/").removesuffix("/api")

    def pidfile(self, service: str) -> Path:
        """The pid file of a service."""
        return self.home / "pids" / f"{service}.json"

    def log(self, service: str) -> Path:
        """The log of a service."""
        return self.home / "logs" / f"{service}.log"

    def pid(self, service: str) -> int | None:
        """Pid of a service that was started here and runs."""
        found = find_detached(self.pidfile(service))
        return found.pid if found else None


def locate(environ: Mapping[str, str], home: Path | None = None) -> Place:
    """The server named in `environ`, or the local one at its remembered port (a free one the first time)."""
    home = home or Path(environ.get("TORCHSPEC_HOME") or ROOT / ".torchspec")
    if url := environ.get("PREFECT_API_URL"):
        return Place(home, url.rstrip("/"), named=True)
    memory = home / "server.json"
    try:
        port = int(json.loads(memory.read_text())["port"])
    except (OSError, ValueError, KeyError):
        port = remember_port(home, free_port())
    return Place(home, f"http://127.0.0.1:{port}/api", named=False)


def remember_port(home: Path, port: int) -> int:
    """Keep the local server's port for the next command; returns it."""
    home.mkdir(parents=True, exist_ok=True)
    (home / "server.json").write_text(json.dumps({"port": port}) + "\n")
    return port


def environment(place: Place) -> dict[str, str]:
    """Settings of every Prefect process of this place; a user's own value wins over the tuning ones."""
    own = {"PREFECT_API_URL": place.api, "DO_NOT_TRACK": "1", "PREFECT_SERVER_ANALYTICS_ENABLED": "false"}
    if not place.named:
        own["PREFECT_HOME"] = str(place.home / "prefect")
    tuning = {
        "PREFECT_WORKER_QUERY_SECONDS": "1",
        "PREFECT_LOGGING_EXTRA_LOGGERS": "torchspec",
        "PREFECT_LOGGING_TO_API_BATCH_INTERVAL": "1",
        "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
        "PYTHONUNBUFFERED": "1",
    }
    return {**{name: os.environ.get(name, value) for name, value in tuning.items()}, **own}


def healthy(api: str, seconds: float = 2.0) -> bool:
    """Whether a Prefect server answers at `api` within `seconds`."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{api}/health", timeout=seconds) as answer:
            return bool(answer.status == 200 and json.loads(answer.read()) is True)
    except (OSError, ValueError, urllib.error.URLError):
        return False


def _require_named(place: Place) -> None:
    if not healthy(place.api):
        raise UserError(
            f"the Prefect server at {place.api} (PREFECT_API_URL) does not answer; start it with `prefect server "
            "start`, or use the local one with `unset PREFECT_API_URL`"
        )


def _start(place: Place, service: str, *arguments: str) -> None:
    start_detached(
        [sys.executable, "-m", "prefect", *arguments], place.log(service), place.pidfile(service),
        env={**os.environ, **environment(place)}, cwd=ROOT,
    )


def ensure_server(place: Place) -> tuple[Place, bool]:
    """A server that answers, started if none does; returns its place and whether it was started here.

    Raises `UserError` when the user's own server does not answer, `StageError` when the local one does not come up.
    """
    if place.named:
        _require_named(place)
        return place, False
    if healthy(place.api):
        return place, False
    if place.pid(SERVER) is None:
        if _taken(place.api):
            place = Place(place.home, f"http://127.0.0.1:{remember_port(place.home, free_port())}/api", named=False)
        port = place.ui.rsplit(":", 1)[1]
        _start(place, SERVER, "server", "start", "--host", "127.0.0.1", "--port", port)
    deadline = time.monotonic() + START_SECONDS
    while not healthy(place.api):
        log = place.log(SERVER)
        if place.pid(SERVER) is None:
            raise StageError(f"the Prefect server stopped while it started; its log is {log}")
        if time.monotonic() > deadline:
            raise StageError(f"the Prefect server does not answer after {START_SECONDS:g} s; its log is {log}")
        time.sleep(0.2)
    return place, True


def _taken(api: str) -> bool:
    host, port = api.removesuffix("/api").rsplit("/", 1)[1].rsplit(":", 1)
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


def ensure_worker(place: Place) -> bool:
    """A worker of this machine that serves the pool at this server; returns whether it was started here."""
    served = place.home / "pids" / f"{WORKER}.api"
    if place.pid(WORKER) is not None and served.is_file() and served.read_text() == place.api:
        return False
    stop_detached(place.pidfile(WORKER))  # one that serves another address, or flow processes that a dead one left
    name = f"torchspec-{os.uname().nodename}"
    _start(place, WORKER, "worker", "start", "--pool", POOL, "--type", "process", "--name", name)
    served.write_text(place.api)
    return True


def stop(place: Place) -> list[str]:
    """End the worker and the server that were started here; returns the names of those that ran."""
    return [name for name in (WORKER, SERVER) if stop_detached(place.pidfile(name))]


def status(place: Place) -> list[tuple[str, str]]:
    """What runs: pairs of a name and a description."""
    rows = [("server", f"{place.api} {'answers' if healthy(place.api) else 'does not answer'}"), ("ui", place.ui)]
    for name in (SERVER, WORKER):
        pid = place.pid(name)
        rows.append((name, f"process {pid}, log {place.log(name)}" if pid else "not started here"))
    return rows
