"""`Supervised`: one child process that cannot outlive us, hang for ever, or write to our terminal.

The command runs below a guard process (`guard.py`) in its own session; its output goes to a log file; its deadline is
kept by the guard, so it holds even while our thread is blocked. Use it as a context manager:

    with Supervised([sys.executable, "-m", "some.server"], log=folder / "server.log", grace_s=5) as server:
        server.wait_ready(lambda: port_answers(port), deadline_s=60)

When the parent is SIGKILLed the guard ends the whole tree; when the guard is SIGKILLed the command dies by its
parent-death signal, and the parent ends the rest, found by their session and by a marker in their environment.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from torchspec_core.errors import TorchspecError, UserError
from torchspec_core.processes import guard
from torchspec_core.processes.tail import last_error, tail_lines

MARKER = "TORCHSPEC_SUPERVISED"
_VARIABLE = f"{MARKER}=".encode()
GUARD_LIMIT_S = guard.KILL_LIMIT_S + 5.0


class ProcessError(TorchspecError):
    """A supervised process ended, or did not get ready, when it should have; names the log."""


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that is free now on `host` (another process can still take it before you do)."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def resolve_command(cmd: Sequence[str | os.PathLike[str]], env: Mapping[str, str]) -> list[str]:
    """The command as strings; UserError when its program does not exist."""
    words = [os.fspath(word) for word in cmd]
    if shutil.which(words[0], path=env.get("PATH")) is None:
        raise UserError(f"The program `{words[0]}` was not found on this machine; install it or correct the path.")
    return words


def marked(marker: str) -> list[int]:
    """Live pids whose environment carries the marker, alone or in a chain (a supervised process below another)."""
    pids = []
    for pid in guard.process_table():
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                names = file.read().split(b"\0")
        except OSError:
            continue
        chain = next((name for name in names if name.startswith(_VARIABLE)), b"").removeprefix(_VARIABLE)
        if marker.encode() in chain.split(b":"):
            pids.append(pid)
    return pids


def session_members(leader: int, start: int) -> list[int]:
    """Live pids of the session that `leader` (started at clock tick `start`) opened, never those of a stranger.

    A pid is not given away while a session of that number has members, so only a leader that was replaced is a
    stranger.
    """
    proc = guard.read_proc(leader)
    if proc is not None and proc.start != start:
        return []
    return [pid for pid, proc in guard.process_table().items() if proc.session == leader]


def end_marked(marker: str, grace_s: float, also: Callable[[], list[int]]) -> bool:
    """SIGTERM, then SIGKILL after `grace_s`, to every process with the marker and those that `also` lists; whether
    all ended."""
    start = time.monotonic()
    left = sorted({*marked(marker), *also()})
    guard.send(left, signal.SIGTERM)
    while left and time.monotonic() - start < grace_s + guard.KILL_LIMIT_S:
        if time.monotonic() - start >= grace_s:
            guard.send(left, signal.SIGKILL)
        time.sleep(0.02)
        left = sorted({*marked(marker), *also()})
    return not left


class Supervised:
    """A child process with a guard; see the module's docstring.

    cmd: program and arguments. log: file that stdout and stderr are appended to. env: the whole environment (default:
    ours). deadline_s: seconds after which it is ended. grace_s: seconds between SIGTERM and SIGKILL.
    pass_fds: descriptors that the child (and the guard) inherit, e.g. a held lock.
    """

    def __init__(
        self,
        cmd: Sequence[str | os.PathLike[str]],
        *,
        log: Path,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        deadline_s: float | None = None,
        grace_s: float = 10.0,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.log = Path(log)
        self.deadline_s = deadline_s
        self.grace_s = grace_s
        self.pid: int | None = None
        self.returncode: int | None = None
        self.reason: str | None = None
        self._marker = uuid.uuid4().hex
        self._start = 0
        chain = filter(None, (os.environ.get(MARKER), self._marker))
        self._env = {**(os.environ if env is None else env), MARKER: ":".join(chain)}
        self._cmd = resolve_command(cmd, self._env)
        self._cwd = os.fspath(cwd if cwd is not None else Path.cwd())
        self._pass_fds = tuple(pass_fds)
        self._guard: subprocess.Popen[bytes] | None = None
        self._buffer = b""

    @property
    def guard_pid(self) -> int | None:
        """Pid of the guard process once started."""
        return None if self._guard is None else self._guard.pid

    def start(self) -> Supervised:
        """Start the guard and the command; returns when the command's pid is known."""
        if self._guard is not None:
            raise RuntimeError("a Supervised object starts once")
        job = {"cmd": self._cmd, "cwd": self._cwd, "grace_s": self.grace_s, "deadline_s": self.deadline_s}
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log, "ab") as log:
            self._guard = subprocess.Popen(
                [sys.executable, "-I", "-S", "-E", guard.__file__, json.dumps(job)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=self._env,
                start_new_session=True,
                pass_fds=self._pass_fds,
            )
        try:
            limit = time.monotonic() + GUARD_LIMIT_S
            while self.pid is None and self.returncode is None:
                if time.monotonic() > limit:
                    raise ProcessError(
                        f"the guard of `{self._cmd[0]}` did not start within {GUARD_LIMIT_S:.0f} s; log: {self.log}"
                    )
                self._pump(0.5)
        except BaseException:
            self.stop(0.0)
            raise
        return self

    def _pump(self, timeout_s: float) -> None:
        """Read what the guard has to say, waiting at most `timeout_s` for it."""
        if self._guard is None or self.returncode is not None:
            return
        assert self._guard.stdout is not None
        stdout = self._guard.stdout.fileno()
        if not select.select([stdout], [], [], max(0.0, timeout_s))[0]:
            return
        data = os.read(stdout, 4096)
        self._buffer += data
        *lines, self._buffer = self._buffer.split(b"\n")
        for line in lines:
            said = json.loads(line)
            if "pid" in said:
                self.pid = int(said["pid"])
                proc = guard.read_proc(self.pid)
                self._start = proc.start if proc is not None else 0
            else:
                self._finish(said["exit"] if said["exit"] is not None else -signal.SIGKILL, said["reason"])
        if not data and self.returncode is None:  # the guard was killed: do its work
            leader, start = self.pid, self._start
            end_marked(self._marker, 0.0, lambda: session_members(leader, start) if leader else [])
            self._finish(-signal.SIGKILL, "guard")

    def _finish(self, returncode: int, reason: str) -> None:
        assert self._guard is not None and self._guard.stdin is not None and self._guard.stdout is not None
        self.returncode, self.reason = returncode, reason
        self._guard.stdin.close()
        self._guard.stdout.close()
        self._guard.wait()

    def is_alive(self) -> bool:
        """Whether the command is still running."""
        self._pump(0.0)
        return self._guard is not None and self.returncode is None

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Exit status once the command and all it started have ended (negative = signal); None when `timeout_s`
        passed first."""
        limit = None if timeout_s is None else time.monotonic() + timeout_s
        while self.returncode is None:
            left = 3600.0 if limit is None else limit - time.monotonic()
            self._pump(left)
            if limit is not None and time.monotonic() >= limit:
                break
        return self.returncode

    def wait_ready(self, probe: Callable[[], bool], deadline_s: float, interval_s: float = 0.1) -> None:
        """Call `probe` until it returns true; ProcessError when the process ends or `deadline_s` passes first."""
        limit = time.monotonic() + deadline_s
        while not probe():
            if not self.is_alive():
                raise ProcessError(
                    f"`{self._cmd[0]}` ended before it was ready ({self.describe_end()}); log: {self.log}"
                )
            if time.monotonic() > limit:
                raise ProcessError(f"`{self._cmd[0]}` was not ready within {deadline_s:g} s; log: {self.log}")
            self._pump(interval_s)

    def stop(self, grace_s: float | None = None) -> int | None:
        """End the command and everything it started: SIGTERM, grace, SIGKILL. Does nothing when it has ended."""
        if self._guard is None:
            return None
        grace = self.grace_s if grace_s is None else grace_s
        if self.is_alive():
            assert self._guard.stdin is not None
            try:
                self._guard.stdin.write(f"stop {grace}\n".encode())
                self._guard.stdin.flush()
            except OSError:  # the guard has just ended; `wait` finds out how
                pass
            if self.wait(grace + GUARD_LIMIT_S) is None:
                self._guard.kill()
                self.wait(GUARD_LIMIT_S)
        return self.returncode

    def tail(self, count: int = 20) -> list[str]:
        """The last lines of the log."""
        return tail_lines(self.log, count)

    def describe_end(self) -> str:
        """How it ended, in words: status or signal, and the line of the log that names the error."""
        if self.returncode is None:
            return "still running"
        if self.reason == "deadline":
            how = f"ended at its deadline of {self.deadline_s:g} s"
        elif self.returncode < 0:
            how = f"killed by {signal.Signals(-self.returncode).name}"
            if self.returncode == -signal.SIGKILL and self.reason == "exited":
                how += ", perhaps for want of memory"
        else:
            how = f"exit status {self.returncode}"
        error = last_error(self.log)
        return f"{how}; last error: {error}" if error and self.returncode != 0 else how

    def __enter__(self) -> Supervised:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
