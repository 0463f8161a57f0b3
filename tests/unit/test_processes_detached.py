"""Servers that outlive their starter: found again, ended with all they started, and no stranger harmed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.watch import alive, number_in, until
from torchspec_core.errors import UserError
from torchspec_core.processes import find_detached, start_detached, stop_detached


def test_start_find_stop(tmp_path: Path) -> None:
    pidfile, child_pid = tmp_path / "run" / "server.pid", tmp_path / "child"
    code = (
        "import subprocess, sys, time; child = subprocess.Popen(['sleep', '300'], start_new_session=True);"
        "open(sys.argv[1], 'w').write(f'{child.pid}\\n'); print('up', flush=True); time.sleep(300)"
    )
    started = start_detached([sys.executable, "-c", code, child_pid], tmp_path / "log", pidfile)
    try:
        grandchild = number_in(child_pid)
        assert find_detached(pidfile) == started
        assert os.getsid(started.pid) == started.pid
        assert start_detached(["false"], tmp_path / "log", pidfile) == started  # already running: nothing is started
        until(lambda: (tmp_path / "log").read_text() == "up\n")
    finally:
        assert stop_detached(pidfile)
    assert not alive(started.pid) and not alive(grandchild)
    assert find_detached(pidfile) is None and not pidfile.exists()
    assert not stop_detached(pidfile)


def test_what_a_dead_server_left_behind_is_ended(tmp_path: Path) -> None:
    pidfile, child_pid = tmp_path / "pid", tmp_path / "child"
    started = start_detached(["sh", "-c", f"sleep 300 & echo $! > {child_pid}"], tmp_path / "log", pidfile)
    orphan = number_in(child_pid)
    until(lambda: not alive(started.pid))
    assert find_detached(pidfile) is None and alive(orphan)
    assert stop_detached(pidfile)
    assert not alive(orphan)


@pytest.mark.parametrize("field", ["start", "boot"])
def test_a_stranger_with_the_same_pid_is_left_alone(tmp_path: Path, field: str) -> None:
    pidfile = tmp_path / "pid"
    started = start_detached(["true"], tmp_path / "log", pidfile)
    until(lambda: not alive(started.pid))
    stranger = subprocess.Popen(["sleep", "300"], start_new_session=True)
    try:
        known = json.loads(pidfile.read_text())
        with open(f"/proc/{stranger.pid}/stat") as file:
            start = int(file.read().rsplit(")", 1)[1].split()[19])
        known.update(pid=stranger.pid, start=start)
        known[field] = {"start": start - 1, "boot": "another boot"}[field]
        pidfile.write_text(json.dumps(known))
        assert find_detached(pidfile) is None
        assert not stop_detached(pidfile)
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_a_damaged_pid_file_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "pid").write_text("123")
    with pytest.raises(UserError, match="damaged"):
        stop_detached(tmp_path / "pid")
