"""Long-lived servers that outlive the command that started them (`make demo`'s Prefect server and worker).

`start_detached` leaves a pid file that names the process beyond doubt: pid, its start time, the boot it belongs to
and a random marker in its environment. `stop_detached` ends that process and what it started, and never a stranger
that has been given the same pid since.
"""

from __future__ import annotations

import json
import os
import subprocess
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from torchspec_core.errors import UserError
from torchspec_core.processes import guard
from torchspec_core.processes.supervised import MARKER, end_marked, marked, resolve_command, session_members

_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Detached:
    """A running detached process: pid (also its session), start time in clock ticks since boot, and its marker."""

    pid: int
    start: int
    boot: str
    marker: str
    cmd: tuple[str, ...]
    log: str


def _read(pidfile: Path) -> Detached | None:
    try:
        fields = json.loads(pidfile.read_text())
        return Detached(**{**fields, "cmd": tuple(fields["cmd"])})
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError):
        raise UserError(
            f"The pid file {pidfile} is damaged; look for the process by hand and delete the file."
        ) from None


def _is_ours(known: Detached) -> bool:
    proc = guard.read_proc(known.pid)
    same_boot = _BOOT.read_text().strip() == known.boot
    return same_boot and proc is not None and proc.state not in "ZX" and proc.start == known.start


def find_detached(pidfile: Path) -> Detached | None:
    """The process of the pid file if it is running and really ours, else None."""
    known = _read(Path(pidfile))
    return known if known is not None and _is_ours(known) else None


def start_detached(
    cmd: Sequence[str | os.PathLike[str]],
    log: Path,
    pidfile: Path,
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Detached:
    """Start a command in its own session, output appended to `log`, and write the pid file.

    When the pid file's process is already running, nothing is started and it is returned.
    """
    pidfile, log = Path(pidfile), Path(log)
    running = find_detached(pidfile)
    if running is not None:
        return running
    marker = uuid.uuid4().hex
    environment = {**(os.environ if env is None else env), MARKER: marker}
    words = resolve_command(cmd, environment)
    log.parent.mkdir(parents=True, exist_ok=True)
    pidfile.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "ab") as output:
        child = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            cwd=cwd,
            start_new_session=True,
        )
    child.returncode = 0  # it is meant to outlive us: no ResourceWarning when this object goes
    proc = guard.read_proc(child.pid)
    start = proc.start if proc is not None else 0
    known = Detached(child.pid, start, _BOOT.read_text().strip(), marker, tuple(words), os.fspath(log))
    draft = pidfile.with_name(pidfile.name + ".tmp")
    draft.write_text(json.dumps(asdict(known)))
    os.replace(draft, pidfile)
    return known


def stop_detached(pidfile: Path, grace_s: float = 10.0) -> bool:
    """End the process of the pid file and what it started, delete the file; whether there was anything to end."""
    pidfile = Path(pidfile)
    known = _read(pidfile)
    if known is None:
        return False
    same_boot = _BOOT.read_text().strip() == known.boot

    def session() -> list[int]:
        return session_members(known.pid, known.start) if same_boot else []

    running = bool(session() or marked(known.marker))
    if not end_marked(known.marker, grace_s, session):
        raise UserError(f"The process {known.pid} of {pidfile} could not be ended; end it by hand.")
    pidfile.unlink(missing_ok=True)
    return running
