"""The guard of one supervised child: a tiny process that outlives nobody.

`Supervised` starts this file as `python -I -S -E guard.py JOB` in its own session. The guard starts the real command in
another session, and ends it with everything it started when the parent dies (end of file on stdin, or a new parent
pid), when the parent asks (`stop SECONDS`), when the deadline passes, or when the command itself ends and leaves others
behind.

Design: the guard is a child subreaper, so a descendant that daemonises or changes its session is still found below it
in `/proc`; the command has a parent-death signal, so it dies as well if the guard itself is killed. Standard library
only and no package import: it must start in milliseconds and keep working while the package is edited.
It speaks JSON lines on stdout: `{"pid": N}` once, `{"exit": STATUS, "reason": WHY}` when nothing is left.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import sys
import time
from typing import NamedTuple

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
PARENT_CHECK_S = 1.0
LEFTOVER_GRACE_S = 2.0
KILL_LIMIT_S = 30.0


class Proc(NamedTuple):
    """One line of the process table; `start` is in clock ticks since boot and makes a pid unique."""

    state: str
    parent: int
    session: int
    start: int


def read_proc(pid: int) -> Proc | None:
    """The process `pid`, or None when there is none (a zombie is still listed, with state Z)."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    fields = text[text.rindex(b")") + 2 :].split()  # the command name may hold spaces and brackets
    return Proc(fields[0].decode(), int(fields[1]), int(fields[3]), int(fields[19]))


def process_table() -> dict[int, Proc]:
    """All processes of this machine (of this pid namespace) by pid, zombies left out."""
    table = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            proc = read_proc(int(name))
            if proc is not None and proc.state not in "ZX":
                table[int(name)] = proc
    return table


def descendants(root: int) -> list[int]:
    """Live pids below `root`, parents before children."""
    table = process_table()
    children: dict[int, list[int]] = {}
    for pid, proc in table.items():
        children.setdefault(proc.parent, []).append(pid)
    found: list[int] = []
    frontier = [root]
    while frontier:
        below = [pid for parent in frontier for pid in children.get(parent, ())]
        found += below
        frontier = below
    return found


def prctl(option: int, value: int) -> None:
    """Linux `prctl(option, value)`; raises OSError when the kernel refuses."""
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def send(pids: list[int], number: int) -> None:
    """Send a signal to each pid; one that is already gone is no error."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):
            continue


def spawn(cmd: list[str], cwd: str) -> int:
    """Fork and run the command in its own session, with stdin from /dev/null and stdout and stderr into the log (fd
    2)."""
    guard = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard:  # the guard died before the line above
            os._exit(1)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)
        os.chdir(cwd)
        os.execvp(cmd[0], cmd)
    except OSError as error:
        os.write(2, f"cannot start {cmd[0]}: {error}\n".encode())
    finally:
        os._exit(127)


class Guard:
    """The watch loop; one instance per process."""

    def __init__(self, cmd: list[str], cwd: str, grace_s: float, deadline_s: float | None) -> None:
        self.grace_s = grace_s
        self.parent = os.getppid()
        self.deadline = None if deadline_s is None else time.monotonic() + deadline_s
        self.status: int | None = None
        self.asked = False
        self.wake, write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._ask)
        self.child = spawn(cmd, cwd)

    def _ask(self, *_: object) -> None:
        self.asked = True

    def reap(self) -> None:
        """Collect every ended child, adopted ones included; remember the status of the command."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.child:
                self.status = os.waitstatus_to_exitcode(status)

    def watch(self) -> str:
        """Block until there is a reason to end; the reason."""
        while True:
            self.reap()
            if self.status is not None:
                return "exited"
            if self.asked:
                return "stopped"
            if os.getppid() != self.parent:  # a forked copy of the parent may hold our stdin open
                return "parent"
            timeout = PARENT_CHECK_S
            if self.deadline is not None:
                timeout = min(timeout, self.deadline - time.monotonic())
                if timeout <= 0:
                    return "deadline"
            ready, _, _ = select.select([0, self.wake], [], [], timeout)
            if self.wake in ready:
                os.read(self.wake, 4096)
            if 0 in ready:
                words = os.read(0, 256).split()
                if not words:
                    return "parent"
                self.grace_s = float(words[1])
                return "stopped"

    def end(self, grace_s: float) -> None:
        """SIGTERM to all that is left, then SIGKILL until nothing is."""
        start = time.monotonic()
        left = descendants(os.getpid())
        if left:
            send(left, signal.SIGTERM)
        while left and time.monotonic() - start < KILL_LIMIT_S + grace_s:
            if time.monotonic() - start >= grace_s:
                send(left, signal.SIGKILL)
            time.sleep(0.01)
            self.reap()
            left = descendants(os.getpid())
        self.reap()


def report(**fields: object) -> None:
    """One JSON line to the parent; a parent that is gone is no error."""
    try:
        os.write(1, json.dumps(fields).encode() + b"\n")
    except OSError:
        return


def main() -> None:
    """Run the job in argv[1]: {"cmd", "cwd", "grace_s", "deadline_s"}."""
    job = json.loads(sys.argv[1])
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    guard = Guard(job["cmd"], job["cwd"], job["grace_s"], job["deadline_s"])
    report(pid=guard.child)
    reason = guard.watch()
    guard.end(min(guard.grace_s, LEFTOVER_GRACE_S) if reason == "exited" else guard.grace_s)
    report(exit=guard.status, reason=reason)


if __name__ == "__main__":
    main()
