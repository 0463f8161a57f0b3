"""What the stage store promises when things die: nothing finished is lost or made twice, nobody is left behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.faults import stage_bodies
from tests.faults.stage_bodies import SHARDS, SPEC, content, run
from tests.watch import alive, until
from torchspec_core.errors import StageError, UserError
from torchspec_core.processes.guard import process_table, read_proc
from torchspec_core.stages import StageStore, run_stage

pytestmark = pytest.mark.faults


class Scene:
    """A store, the trace that the bodies leave, and the parents that were started."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "store"
        self.trace = folder / "trace"
        self.store = StageStore(self.root)
        self.parents: list[subprocess.Popen[str]] = []

    def parent(self, **options: object) -> subprocess.Popen[str]:
        """A run in a process of its own."""
        env = {**os.environ, "PYTHONPATH": os.getcwd()}
        cmd = [sys.executable, stage_bodies.__file__, self.root, self.trace, json.dumps(options)]
        self.parents.append(
            subprocess.Popen(
                cmd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, start_new_session=True
            )
        )
        return self.parents[-1]

    def steps(self, word: str) -> list[tuple[int, int]]:
        """(pid, number) of each note of this kind."""
        lines = [line.split() for line in self.trace.read_text().splitlines()] if self.trace.exists() else []
        return [(int(pid), int(rest[0]) if rest else 0) for pid, kind, *rest in lines if kind == word]

    def wait_for_middle(self) -> int:
        """Pid of the child that is in the middle of its slow shard."""
        until(lambda: self.steps("middle"))
        return self.steps("middle")[-1][0]

    def started(self) -> dict[int, int]:
        """How often each shard was begun."""
        return dict(Counter(number for _, number in self.steps("start")))

    def check_sealed(self, reason: str | None = None) -> None:
        """The entry is a hit with the right bytes."""
        ref = self.store.lookup(SPEC).ref
        assert ref is not None and ref.rows == SHARDS
        assert [(ref.path / f"shard-{number}").read_bytes() for number in range(SHARDS)] == [
            content(n) for n in range(SHARDS)
        ]
        assert self.store.verify() == [] and not list(ref.path.rglob(".tmp-*"))

    def processes(self) -> list[int]:
        """Live processes whose command line names this store."""
        return [pid for pid in process_table() if str(self.root) in command_line(pid)]


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path)
    yield made
    for parent in made.parents:
        if parent.poll() is None:
            parent.kill()
        parent.communicate()
    until(lambda: not made.processes())  # whatever the test did, nobody is left


def in_middle(scene: Scene, act: Callable[[int], None]) -> Callable[[Mapping[str, Any]], None]:
    """A progress callback that does something to the child, once, in the middle of its slow shard."""
    acted: list[int] = []

    def on_progress(event: Mapping[str, Any]) -> None:
        if event["message"] == "in the middle" and not acted:
            acted.append(scene.wait_for_middle())
            act(acted[0])

    return on_progress


def run_with(
    scene: Scene,
    on_progress: Callable[[Mapping[str, Any]], None] | None = None,
    deadline_s: float | None = None,
    **options: object,
) -> None:
    env = {"PYTHONPATH": os.pathsep.join((os.path.dirname(stage_bodies.__file__), os.getcwd()))}
    runtime = {"test": {"trace": str(scene.trace), **options}}
    run_stage(
        scene.store, SPEC, "stage_bodies:build", {}, SPEC.identity, runtime, on_progress,
        env=env, deadline_s=deadline_s, grace_s=1,
    )  # fmt: skip


def test_the_child_is_killed_in_the_middle_of_a_shard(scene: Scene) -> None:
    with pytest.raises(StageError) as caught:
        run_with(scene, in_middle(scene, lambda pid: os.kill(pid, signal.SIGKILL)), slow=2)
    message = str(caught.value)
    assert "stage tokens" in message and "SIGKILL" in message and "2 of 4 shards are kept" in message
    assert Path(message.rsplit("log: ", 1)[1]).is_file()
    assert scene.store.lookup(SPEC).reason == "unfinished, 2 of 4 shards are kept"
    run(scene.root, scene.trace)
    assert scene.started() == {0: 1, 1: 1, 2: 2, 3: 1}
    scene.check_sealed()


def test_the_guard_is_killed(scene: Scene) -> None:
    def kill_guard(pid: int) -> None:
        proc = read_proc(pid)
        assert proc is not None and "guard.py" in command_line(proc.parent)
        os.kill(proc.parent, signal.SIGKILL)

    with pytest.raises(StageError, match="SIGKILL"):
        run_with(scene, in_middle(scene, kill_guard), slow=1, daemon=True)
    assert not alive(scene.steps("middle")[0][0]) and not alive(scene.steps("daemon")[0][1])
    run(scene.root, scene.trace)
    assert scene.started() == {0: 1, 1: 2, 2: 1, 3: 1}
    scene.check_sealed()


def test_the_parent_is_killed_and_all_its_processes_end(scene: Scene) -> None:
    parent = scene.parent(slow=1, daemon=True)
    child = scene.wait_for_middle()
    daemon = scene.steps("daemon")[0][1]
    assert alive(daemon)
    parent.kill()
    until(lambda: not alive(child) and not alive(daemon) and not scene.processes(), seconds=10)
    run(scene.root, scene.trace)
    assert scene.started() == {0: 1, 1: 2, 2: 1, 3: 1}
    scene.check_sealed()


def test_a_new_run_waits_for_the_orphan_of_a_killed_one(scene: Scene) -> None:
    parent = scene.parent(slow=1, deaf=True)
    orphan = scene.wait_for_middle()
    parent.kill()
    parent.wait()
    run(scene.root, scene.trace)  # the orphan ignores SIGTERM, so it lives through its grace of 1.5 s
    pids = [int(line.split()[0]) for line in scene.trace.read_text().splitlines()]
    assert pids.count(orphan) > 5 and pids == sorted(pids, key=lambda pid: pid != orphan)
    scene.check_sealed()


def test_sigterm_of_the_parent_says_how_to_continue(scene: Scene) -> None:
    parent = scene.parent(slow=1, daemon=True)
    child = scene.wait_for_middle()
    parent.terminate()
    _, errors = parent.communicate(timeout=20)
    assert errors.strip().endswith("run the same command again to continue: 1 of 4 shards are kept.")
    assert "Traceback" not in errors
    assert not alive(child) and not alive(scene.steps("daemon")[0][1])


def test_two_runs_at_once_make_it_once(scene: Scene) -> None:
    first = scene.parent(slow=1, seconds=1.5)
    scene.wait_for_middle()
    second = scene.parent()
    outputs = [run.communicate(timeout=30)[0] for run in (first, second)]
    assert outputs == ["cached False\n", f"waiting {first.pid}\ncached True\n"]
    assert scene.started() == {0: 1, 1: 1, 2: 1, 3: 1}
    scene.check_sealed()


def test_a_truncated_shard_of_a_sealed_stage_is_made_again_alone(scene: Scene) -> None:
    ref = run(scene.root, scene.trace)
    os.truncate(ref.path / "shard-2", 10)
    assert scene.store.lookup(SPEC).reason == "shard-2 has 10 bytes instead of 200,000"
    assert run(scene.root, scene.trace).reason == "shard-2 has 10 bytes instead of 200,000"
    assert scene.started() == {0: 1, 1: 1, 2: 2, 3: 1}
    scene.check_sealed()


def test_the_folder_vanishes_while_it_is_written(scene: Scene) -> None:
    def remove(pid: int) -> None:
        shutil.rmtree(scene.store.folder(SPEC))

    with pytest.raises(UserError, match="vanished"):
        run_with(scene, in_middle(scene, remove), slow=1, seconds=0.3)
    run(scene.root, scene.trace)
    scene.check_sealed()


def test_the_folder_vanishes_after_it_was_sealed(scene: Scene) -> None:
    shutil.rmtree(run(scene.root, scene.trace).path)
    assert run(scene.root, scene.trace).reason == "not made yet"
    assert scene.started() == {0: 2, 1: 2, 2: 2, 3: 2}
    scene.check_sealed()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 600 kB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", folder], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("needs the right to mount a tmpfs, to fill it")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_a_full_disk_is_one_sentence_and_loses_nothing(scene: Scene, small_disk: Path) -> None:
    scene.root, scene.store = small_disk / "store", StageStore(small_disk / "store")
    with pytest.raises(UserError) as caught:
        run(scene.root, scene.trace)
    message = str(caught.value)
    assert message.startswith(f"The disk is full: writing into {scene.store.folder(SPEC)} failed with ")
    assert "bytes free" in message and "\n" not in message
    assert scene.store.lookup(SPEC).reason == "unfinished, 2 of 4 shards are kept"
    subprocess.run(["mount", "-o", "remount,size=4m", small_disk], check=True)
    run(scene.root, scene.trace)
    assert scene.started() == {0: 1, 1: 1, 2: 2, 3: 1}
    scene.check_sealed()


def test_a_disk_without_a_single_byte_is_the_same_sentence(scene: Scene, small_disk: Path) -> None:
    scene.root, scene.store = small_disk / "store", StageStore(small_disk / "store")
    with open(small_disk / "filler", "wb") as filler, pytest.raises(OSError, match="No space left"):
        while True:
            os.write(filler.fileno(), bytes(4096))
    with pytest.raises(UserError, match=r"The disk is full: writing into .* failed with 0 bytes free"):
        run(scene.root, scene.trace)
    (small_disk / "filler").unlink()
    subprocess.run(["mount", "-o", "remount,size=4m", small_disk], check=True)
    run(scene.root, scene.trace)
    scene.check_sealed()


def test_a_child_that_cannot_even_say_so_on_a_full_disk(scene: Scene, small_disk: Path) -> None:
    scene.root, scene.store = small_disk / "store", StageStore(small_disk / "store")
    with pytest.raises(UserError, match=r"The disk is full: .* failed with 0 bytes free"):
        run(scene.root, scene.trace, hog=True)


def test_a_read_only_disk_is_one_sentence(scene: Scene, small_disk: Path) -> None:
    scene.root, scene.store = small_disk / "store", StageStore(small_disk / "store")
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(UserError, match=f"Permission denied: .*{small_disk}"):
        run(scene.root, scene.trace)


def test_a_user_error_in_the_child_is_the_same_sentence_here(scene: Scene) -> None:
    with pytest.raises(UserError) as caught:
        run(scene.root, scene.trace, mistake=True)
    assert str(caught.value) == "The file x.json has no rows; add some."


def test_an_error_in_the_child_names_itself_and_the_log(scene: Scene) -> None:
    with pytest.raises(
        StageError, match=r"tokens failed \(exit status 1; last error: ValueError: nothing adds up\)"
    ) as caught:
        run(scene.root, scene.trace, crash=True)
    log = Path(str(caught.value).rsplit("log: ", 1)[1])
    assert "Traceback" in log.read_text()


def test_a_deadline_ends_the_stage(scene: Scene) -> None:
    with pytest.raises(StageError, match=r"ended at its deadline of 2 s"):
        run_with(scene, deadline_s=2, slow=1)
    assert not scene.processes()


def test_the_child_can_be_typed_by_hand_but_not_beside_a_run(scene: Scene) -> None:
    parent = scene.parent(slow=1)
    scene.wait_for_middle()
    folder = scene.store.folder(SPEC)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((os.path.dirname(stage_bodies.__file__), os.getcwd()))}
    by_hand = [sys.executable, "-m", "torchspec_core.stages.child", folder]
    beside = subprocess.run(by_hand, env=env, capture_output=True, text=True)
    assert beside.returncode == 2 and f"in use by process {parent.pid}" in beside.stderr
    parent.kill()
    until(lambda: not scene.processes(), seconds=10)
    request = json.loads((folder / "request.json").read_text())
    del request["runtime"]["test"]["slow"]
    (folder / "request.json").write_text(json.dumps(request))
    assert subprocess.run(by_hand, env=env).returncode == 0
    before = scene.started()
    run(scene.root, scene.trace)
    assert scene.started() == before
    scene.check_sealed()
