"""Supervised children: output, exit, deadline, stop, and that nothing they started is left."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.watch import alive, number_in, until
from torchspec_core.errors import UserError
from torchspec_core.processes import JsonlTail, ProcessError, Supervised, free_port, last_error
from torchspec_core.processes.guard import descendants


def python(code: str) -> list[str]:
    return [sys.executable, "-I", "-c", code]


def test_output_goes_to_the_log_and_the_status_comes_back(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "child.log"
    with Supervised(["sh", "-c", "echo out; echo err >&2; exit 3"], log=log) as child:
        assert child.wait(20) == 3
    assert sorted(log.read_text().split()) == ["err", "out"]
    assert (child.reason, child.is_alive(), child.tail(1)) == ("exited", False, [log.read_text().split()[-1]])


def test_the_child_leads_its_own_session_with_an_empty_stdin(tmp_path: Path) -> None:
    code = "import os, sys; print(os.getsid(0) == os.getpid(), repr(sys.stdin.read()))"
    with Supervised(python(code), log=tmp_path / "log") as child:
        assert child.wait(20) == 0
    assert (tmp_path / "log").read_text() == "True ''\n"


def test_environment_and_folder_are_what_was_asked_for(tmp_path: Path) -> None:
    env = {"PATH": os.environ["PATH"], "COLOUR": "red"}
    with Supervised(["sh", "-c", "echo $COLOUR $(pwd)"], log=tmp_path / "log", env=env, cwd=tmp_path) as child:
        child.wait(20)
    assert (tmp_path / "log").read_text() == f"red {tmp_path}\n"


def test_a_deadline_ends_it(tmp_path: Path) -> None:
    with Supervised(["sleep", "300"], log=tmp_path / "log", deadline_s=0.2) as child:
        assert child.wait(20) == -signal.SIGTERM
    assert child.reason == "deadline"
    assert "deadline of 0.2 s" in child.describe_end()


def test_a_child_that_ignores_sigterm_is_killed_after_the_grace(tmp_path: Path) -> None:
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('on', flush=True); time.sleep(300)"
    )
    child = Supervised(python(code), log=tmp_path / "log", grace_s=0.2).start()
    until(lambda: child.tail() == ["on"])
    assert child.stop() == -signal.SIGKILL
    assert child.reason == "stopped"


def test_a_child_may_clean_up_in_its_grace(tmp_path: Path) -> None:
    code = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('bye', flush=True), sys.exit(7)))\n"
        "print('on', flush=True); time.sleep(300)"
    )
    with Supervised(python(code), log=tmp_path / "log", grace_s=60) as child:
        until(lambda: child.tail() == ["on"])
    assert (child.returncode, child.tail()) == (7, ["on", "bye"])


DAEMON = (
    "import os, subprocess, sys\n"
    "child = subprocess.Popen(['sleep', '300'], start_new_session=True)\n"
    "open(sys.argv[1], 'w').write(f'{child.pid}\\n')\n"
)


@pytest.mark.parametrize("ending", ["exit", "stop"])
def test_descendants_that_left_the_group_end_too(tmp_path: Path, ending: str) -> None:
    pidfile = tmp_path / "pid"
    code = DAEMON + ("" if ending == "exit" else "import time; time.sleep(300)")
    with Supervised([*python(code), str(pidfile)], log=tmp_path / "log") as child:
        pid = number_in(pidfile)
        if ending == "exit":
            assert child.wait(20) == 0
    assert not alive(pid)


@pytest.mark.parametrize("forked", [False, True])
def test_when_the_parent_is_killed_nothing_is_left(tmp_path: Path, forked: bool) -> None:
    # A forked copy of the parent keeps the guard's stdin open: then the guard must notice by its new parent pid.
    pidfile = tmp_path / "pid"
    code = (
        "import sys, time; from pathlib import Path; from torchspec_core.processes import Supervised\n"
        f"child = Supervised([sys.executable, '-c', {DAEMON + 'import time; time.sleep(300)'!r}, {str(pidfile)!r}],"
        f" log=Path({str(tmp_path / 'log')!r})).start()\n"
        f"import os; {forked} and os.fork()\n"
        "print(child.pid, child.guard_pid, flush=True); time.sleep(300)"
    )
    log = tmp_path / "parent.log"
    with Supervised([sys.executable, "-c", code], log=log, env={**os.environ, "PYTHONPATH": os.getcwd()}) as parent:
        grandchild = number_in(pidfile)
        until(lambda: parent.tail())
        pids = [int(word) for word in parent.tail()[0].split()]
        assert parent.pid is not None
        # The outer guard would clean up as well; only the inner one is under test.
        outer = parent.guard_pid
        assert outer is not None
        os.kill(outer, signal.SIGSTOP)
        try:
            os.kill(parent.pid, signal.SIGKILL)
            until(lambda: not any(alive(pid) for pid in [*pids, grandchild]))
        finally:
            os.kill(outer, signal.SIGCONT)


def test_when_the_guard_is_killed_nothing_is_left(tmp_path: Path) -> None:
    pidfile = tmp_path / "pid"
    code = DAEMON + "import time; time.sleep(300)"
    with Supervised([*python(code), str(pidfile)], log=tmp_path / "log") as child:
        grandchild = number_in(pidfile)
        assert child.guard_pid is not None and child.pid is not None
        os.kill(child.guard_pid, signal.SIGKILL)
        assert child.wait(20) == -signal.SIGKILL
        assert child.reason == "guard"
        assert not alive(child.pid) and not alive(grandchild)


def test_a_supervised_process_below_another_ends_with_it(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from torchspec_core.processes import Supervised\n"
        f"Supervised(['sleep', '300'], log=Path({str(tmp_path / 'inner')!r}), grace_s=300).start()\n"
        "print('up', flush=True); time.sleep(300)"
    )
    env = {**os.environ, "PYTHONPATH": os.getcwd()}
    with Supervised([sys.executable, "-c", code], log=tmp_path / "log", env=env) as outer:
        until(lambda: outer.tail() == ["up"])
        assert outer.pid is not None and outer.guard_pid is not None
        below = [pid for pid in descendants(outer.pid) if alive(pid)]
        os.kill(outer.guard_pid, signal.SIGKILL)
        assert outer.wait(20) == -signal.SIGKILL
    assert len(below) == 2 and not any(alive(pid) for pid in below)


def test_when_the_guard_is_killed_the_child_dies_even_if_nobody_looks(tmp_path: Path) -> None:
    child = Supervised(["sleep", "300"], log=tmp_path / "log").start()
    assert child.guard_pid is not None and child.pid is not None
    os.kill(child.guard_pid, signal.SIGKILL)
    pid = child.pid
    until(lambda: not alive(pid))
    child.stop()


def test_ready_probe(tmp_path: Path) -> None:
    flag = tmp_path / "ready"
    with Supervised(["sh", "-c", f"sleep 0.2; touch {flag}; sleep 300"], log=tmp_path / "log") as child:
        child.wait_ready(flag.exists, deadline_s=20)
        assert child.is_alive()
        with pytest.raises(ProcessError, match=r"not ready within 0\.1 s"):
            child.wait_ready(lambda: False, deadline_s=0.1)
    with Supervised(["sh", "-c", "echo 'OSError: port taken' >&2; exit 4"], log=tmp_path / "log2") as child:
        with pytest.raises(ProcessError, match=r"exit status 4; last error: OSError: port taken"):
            child.wait_ready(lambda: False, deadline_s=20)


def test_a_program_that_does_not_exist_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="`no-such-program`"):
        Supervised(["no-such-program"], log=tmp_path / "log")


def test_inherited_descriptors_reach_the_child(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    try:
        code = f"import os; os.write({write_end}, b'hello')"
        with Supervised(python(code), log=tmp_path / "log", pass_fds=(write_end,)) as child:
            assert child.wait(20) == 0
        assert os.read(read_end, 100) == b"hello"
    finally:
        os.close(read_end)
        os.close(write_end)


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    def run() -> int:
        with Supervised(["true"], log=tmp_path / "log") as child:
            child.wait(20)
        return len(os.listdir("/proc/self/fd"))

    assert run() == run()


def test_free_port_can_be_bound() -> None:
    import socket

    with socket.socket() as server:
        server.bind(("127.0.0.1", free_port()))


def test_jsonl_tail_reads_whole_lines_once(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    tail = JsonlTail(path)
    assert tail.read() == []
    path.write_text('{"a": 1}\nnonsense\n{"a": 2}\n{"a"')
    assert tail.read() == [{"a": 1}, {"a": 2}]
    with open(path, "a") as file:
        file.write(": 3}\n")
    assert tail.read() == [{"a": 3}]
    path.write_text('{"a": 4}\n')
    assert tail.read() == [{"a": 4}]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a\nTraceback\n  File x\nValueError: bad\nleaked objects\n", "ValueError: bad"),
        ("ValueError: first\npackage.CustomError: second\n", "package.CustomError: second"),
        ("fine\nERROR: cannot bind\nbye\n", "ERROR: cannot bind"),
        ("only\nthis\n\n", "this"),
        ("", ""),
    ],
)
def test_last_error_line(tmp_path: Path, text: str, line: str) -> None:
    (tmp_path / "log").write_text(text)
    assert last_error(tmp_path / "log") == line
