"""The stage store in this process: hits, reasons, resuming, locks, maintenance."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import multiprocessing
import os
import pickle
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from torchspec_core.errors import UserError
from torchspec_core.stages import (
    BusyError,
    Holder,
    Progress,
    StageRef,
    StageSpec,
    StageStore,
    Workspace,
    WorkspaceError,
    digest_file,
    local_job,
)
from torchspec_core.stages.disk import explain_disk_error
from torchspec_core.stages.lock import hold


def spec(value: int = 1, stage: str = "tokens", **inputs: str) -> StageSpec:
    return StageSpec(stage, 1, {"data": {"value": value}}, inputs, slug="smol")


@pytest.fixture
def store(tmp_path: Path) -> StageStore:
    return StageStore(tmp_path / "store")


class Body:
    """Writes shards a, b, c with 3, 4, 5 bytes; `made` lists the ones it really wrote; fails before shard `fail`."""

    def __init__(self, fail: str | None = None) -> None:
        self.made: list[str] = []
        self.fail = fail

    def __call__(self, workspace: Workspace) -> None:
        workspace.expect(3)
        for size, name in enumerate("abc", start=3):
            if name == self.fail:
                raise RuntimeError("crash")
            if workspace.done(name):
                continue
            with workspace.shard(name) as path:
                path.write_bytes(name.encode() * size)
                workspace.facts(name, rows=size)
            self.made.append(name)
        workspace.record(loss=0.5)


def make(store: StageStore, value: int = 1, stage: str = "tokens", **inputs: str) -> StageRef:
    return store.materialize(spec(value, stage, **inputs), Body())


def test_made_once_then_a_hit_with_the_same_facts(store: StageStore) -> None:
    body = Body()
    first = store.materialize(spec(), body, runtime={"run": {"threads": 2}})
    again = store.materialize(spec(), body)
    assert body.made == ["a", "b", "c"]
    assert (first.cached, first.reason, first.rows, first.bytes) == (False, "not made yet", 12, 12)
    assert (again.cached, again.reason, again.metrics) == (True, "same key", {"loss": 0.5})
    assert first.path == store.root / "tokens" / f"smol-{spec().key[:12]}"
    assert (first.seconds, first.key) == (again.seconds, spec().key)
    assert len(pickle.dumps(again)) < 1000 and pickle.loads(pickle.dumps(again)) == again


def test_the_manifest_says_what_and_how(store: StageStore) -> None:
    ref = store.materialize(spec(), Body(), runtime={"run": {"threads": 2}})
    manifest = json.loads((ref.path / "manifest.json").read_text())
    assert manifest["files"]["b"] == {
        "bytes": 4,
        "blake2b": hashlib.blake2b(b"bbbb", digest_size=16).hexdigest(),
        "rows": 4,
    }
    assert manifest["key"] == spec().key and manifest["spec"] == spec().document()
    assert manifest["runtime"] == {"run": {"threads": 2}}
    assert {"inputs", "code", "libraries", "host", "created", "seconds"} <= manifest.keys()
    assert json.loads((ref.path / "spec.json").read_text())["key"] == spec().key
    assert not list(ref.path.rglob(".tmp-*"))


def test_a_failed_attempt_is_continued_at_the_missing_shard(store: StageStore) -> None:
    with pytest.raises(RuntimeError):
        store.materialize(spec(), Body(fail="c"))
    assert store.lookup(spec()).reason == "unfinished, 2 of 3 shards are kept"
    assert store.plan(spec()).shards_kept == 2
    body = Body()
    ref = store.materialize(spec(), body)
    assert body.made == ["c"] and ref.reason == "unfinished, 2 of 3 shards are kept" and ref.rows == 12


def damage_truncate(folder: Path) -> None:
    (folder / "b").write_bytes(b"b")


def damage_remove(folder: Path) -> None:
    (folder / "b").unlink()


def damage_remove_with_journal(folder: Path) -> None:
    (folder / "b").unlink()
    (folder / "shards.jsonl").unlink()


def damage_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text('{"format": 1, "ke')


def damage_all(folder: Path) -> None:
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("damage", "reason", "remade"),
    [
        (damage_truncate, "b has 1 bytes instead of 4", ["b"]),
        (damage_remove, "b is missing", ["b"]),
        (damage_remove_with_journal, "b is missing", ["b"]),
        (damage_manifest, "its manifest is damaged", []),
        (damage_all, "not made yet", ["a", "b", "c"]),
    ],
)
def test_damage_is_a_miss_with_the_reason_and_only_what_is_lost_is_made(
    store: StageStore, damage: Callable[[Path], None], reason: str, remade: list[str]
) -> None:
    first = make(store)
    damage(first.path)
    found = store.lookup(spec())
    assert (found.hit, found.reason) == (False, reason)
    body = Body()
    ref = store.materialize(spec(), body)
    assert (body.made, ref.reason, ref.rows, ref.bytes) == (remade, reason, 12, 12)
    assert store.verify() == [] and store.lookup(spec()).hit


def test_verify_finds_changed_bytes_of_the_same_size(store: StageStore) -> None:
    ref = make(store)
    (ref.path / "c").write_bytes(b"ccccx")
    assert store.lookup(spec()).hit
    assert store.verify() == [f"{ref.path}: c differs from its recorded digest"]


def test_damage_that_is_discarded_is_made_again_and_nothing_else(store: StageStore) -> None:
    ref = make(store)
    (ref.path / "b").write_bytes(b"x" * (ref.path / "b").stat().st_size)
    (ref.path / "c").unlink()
    with store.reading(ref.path), pytest.raises(BusyError):
        store.verify(discard=True)
    assert (ref.path / "b").exists()
    told = [f"{ref.path}: b differs from its recorded digest", f"{ref.path}: c is missing"]
    assert store.verify(discard=True) == told
    body = Body()
    store.materialize(spec(), body)
    assert body.made == ["b", "c"] and store.verify() == []


def test_refresh_makes_it_anew(store: StageStore) -> None:
    make(store)
    body = Body()
    ref = store.materialize(spec(), body, refresh=True)
    assert (body.made, ref.cached, ref.reason) == (["a", "b", "c"], False, "refresh asked for")


def test_another_slug_finds_the_same_entry(store: StageStore) -> None:
    first = make(store)
    renamed = StageSpec("tokens", 1, {"data": {"value": 1}}, slug="renamed")
    assert store.materialize(renamed, Body(fail="a")).path == first.path


def test_halves_of_a_crashed_attempt_are_swept_away(store: StageStore) -> None:
    with pytest.raises(RuntimeError):
        store.materialize(spec(), Body(fail="b"))
    folder = store.folder(spec())
    (folder / ".tmp-99-b").write_bytes(b"half")
    (folder / "unrecorded").write_bytes(b"renamed, but the record was never written")
    ref = store.materialize(spec(), Body())
    assert sorted(p.name for p in ref.path.iterdir() if p.suffix not in (".json", ".jsonl")) == ["a", "b", "c"]


def test_a_torn_record_is_as_if_the_shard_was_not_made(store: StageStore) -> None:
    with pytest.raises(RuntimeError):
        store.materialize(spec(), Body(fail="c"))
    journal = store.folder(spec()) / "shards.jsonl"
    journal.write_bytes(journal.read_bytes()[:-20])
    body = Body()
    store.materialize(spec(), body)
    assert body.made == ["b", "c"]


def test_a_shard_that_is_replaced_has_no_record_meanwhile(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    with workspace.shard("a") as path:
        path.write_bytes(b"old")
    with pytest.raises(RuntimeError), workspace.shard("a") as path:
        path.write_bytes(b"new")
        raise RuntimeError
    assert Workspace(tmp_path).done("a") is None and (tmp_path / "a").read_bytes() == b"old"


def test_trees_facts_and_names(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    with workspace.tree("hub") as folder:
        (folder / "sub").mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "sub" / "x").write_text("abc")
    workspace.facts("hub", rows=2)
    other = pickle.loads(pickle.dumps(workspace))
    assert other.done("hub") == {"bytes": 5, "rows": 2}
    assert sorted(other.sealed_files()) == ["hub/config.json", "hub/sub/x"]
    (tmp_path / "hub" / "sub" / "x").unlink()
    assert other.done("hub") is None
    with workspace.shard("plots/loss.svg") as path:
        assert path.suffix == ".svg" and path.parent == tmp_path / "plots"
        path.write_text("x")
    assert workspace.done("plots/loss.svg") == {"bytes": 1, "blake2b": digest_file(tmp_path / "plots" / "loss.svg")}
    for name in ("../x", "/x", "", "manifest.json", "spec.json", "logs/x", "scratch/x", ".tmp-x"):
        with pytest.raises(WorkspaceError), workspace.shard(name):
            pass
    for value in (float("nan"), None, [1], b"x"):
        with pytest.raises(WorkspaceError, match="loss"):
            workspace.record(loss=value)  # type: ignore[arg-type]


def test_an_unwritten_shard_and_a_file_past_the_workspace_are_refused(store: StageStore) -> None:
    def forgets(workspace: Workspace) -> None:
        with workspace.shard("a"):
            pass

    def sneaks(workspace: Workspace) -> None:
        (workspace.path / "sneaked").write_text("x")

    with pytest.raises(WorkspaceError, match="a was not written"):
        store.materialize(spec(), forgets)
    with pytest.raises(WorkspaceError, match="sneaked"):
        store.materialize(spec(), sneaks)


def seal_some(workspace: Workspace, first: int) -> None:
    for number in range(first, first + 20):
        with workspace.shard(f"s{number}") as path:
            path.write_text(str(number))
            workspace.facts(f"s{number}", rows=number)


def test_several_processes_seal_shards_of_one_workspace(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(seal_some, [workspace, workspace], [0, 20]))
    assert [workspace.done(f"s{number}")["rows"] for number in range(40)] == list(range(40))  # type: ignore[index]
    assert workspace.totals()[0] == sum(range(40)) and len(workspace.sealed_files()) == 40


def test_scratch_survives_a_crash_and_goes_when_sealed(store: StageStore) -> None:
    def body(workspace: Workspace) -> None:
        checkpoint = workspace.scratch("training") / "step"
        if not checkpoint.exists():
            checkpoint.write_text("7")
            raise RuntimeError
        with workspace.shard("a") as path:
            path.write_text(checkpoint.read_text())

    with pytest.raises(RuntimeError):
        store.materialize(spec(), body)
    ref = store.materialize(spec(), body)
    assert (ref.path / "a").read_text() == "7" and not (ref.path / "scratch").exists()


def test_foreign_folders_and_collisions_are_named(store: StageStore) -> None:
    folder = store.folder(spec())
    folder.mkdir(parents=True)
    (folder / "precious.txt").write_text("mine")
    with pytest.raises(UserError, match="was not made by this store"):
        make(store)
    assert (folder / "precious.txt").read_text() == "mine"
    (folder / "precious.txt").unlink()
    ref = make(store)
    document = json.loads((ref.path / "spec.json").read_text())
    document["key"] = document["key"][:12] + "0" * 20
    (ref.path / "spec.json").write_text(json.dumps(document))
    with pytest.raises(UserError, match="collision"):
        make(store)


def test_stores_elsewhere_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"s3://bucket/x is not a local folder"):
        StageStore("s3://bucket/x")
    assert StageStore(f"file://{tmp_path}").root == tmp_path


def test_a_second_run_waits_is_told_for_whom_and_then_hits(store: StageStore) -> None:
    inside, go = threading.Event(), threading.Event()
    holders: list[Holder] = []
    refs: dict[str, StageRef] = {}

    def slow(workspace: Workspace) -> None:
        inside.set()
        assert go.wait(20)
        Body()(workspace)

    def waiting(holder: Holder) -> None:
        holders.append(holder)
        go.set()

    first = threading.Thread(target=lambda: refs.update(first=store.materialize(spec(), slow)))
    first.start()
    assert inside.wait(20)
    with pytest.raises(BusyError, match=f"in use by process {os.getpid()} since"):
        store.materialize(spec(), Body(fail="a"), wait_s=0)
    with pytest.raises(BusyError):
        store.rm("tokens", spec().key)
    assert store.gc(keep=1, last=["report"]) == []
    refs["second"] = store.materialize(spec(), Body(fail="a"), on_wait=waiting)
    first.join(20)
    assert [holder.pid for holder in holders] == [os.getpid()]
    assert (refs["first"].cached, refs["second"].cached) == (False, True)


def test_a_lock_file_that_is_deleted_between_open_and_lock_protects_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lock"
    really_lock = fcntl.flock
    deleted: list[Path] = []

    def lock_after_gc(handle: int, operation: int) -> None:
        if not deleted:
            path.unlink()
            deleted.append(path)
        really_lock(handle, operation)

    monkeypatch.setattr(fcntl, "flock", lock_after_gc)
    with hold(path, wait_s=0), pytest.raises(BusyError), hold(path, wait_s=0):
        pass


def test_many_may_read_and_one_may_write(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with hold(path, shared=True), hold(path, shared=True), pytest.raises(BusyError), hold(path, wait_s=0):
        pass


def test_an_entry_that_is_read_cannot_be_removed(store: StageStore) -> None:
    ref = make(store)
    with store.reading(ref.path), pytest.raises(BusyError):
        store.rm("tokens", ref.key)
    assert store.rm("tokens", ref.key[:8]).path == ref.path
    assert not ref.path.exists() and store.ls() == []
    with pytest.raises(UserError, match="not a stage of this store"), store.reading(ref.path):
        pass
    with pytest.raises(UserError, match="no entry of tokens"):
        store.rm("tokens", ref.key)


def chain(store: StageStore, temperature: float, lr: float) -> dict[str, StageSpec]:
    answers = StageSpec("answers", 1, {"answers": {"temperature": temperature}})
    tokens = StageSpec("tokens", 1, {"data": {"max_length": 512}}, {"answers": answers.key})
    drafter = StageSpec("drafter", 1, {"training": {"lr": lr}}, {"tokens": tokens.key, "answers": answers.key})
    return {"answers": answers, "tokens": tokens, "drafter": drafter}


def run_chain(store: StageStore, temperature: float, lr: float) -> dict[str, StageSpec]:
    specs = chain(store, temperature, lr)
    for each in specs.values():
        store.materialize(each, Body())
    return specs


def test_explain_names_the_changed_fields_through_the_inputs(store: StageStore) -> None:
    run_chain(store, 0.8, 0.001)
    new = chain(store, 0.7, 0.001)
    assert store.explain(new["answers"]).changes == ("answers.temperature 0.8 -> 0.7",)
    explained = store.explain(new["drafter"], known=new.values())
    assert explained.changes == (
        "input answers changed because: answers.temperature 0.8 -> 0.7",
        "input tokens changed because: answers.temperature 0.8 -> 0.7",
    )
    assert "answers.temperature 0.8 -> 0.7" in str(explained)
    unknown = store.explain(new["drafter"]).changes
    assert unknown[0].startswith("input answers ") and " -> " in unknown[0]
    for name in ("answers", "tokens"):  # now made: their own spec.json is followed
        store.materialize(new[name], Body())
    assert store.explain(new["drafter"]).changes == explained.changes
    assert store.explain(chain(store, 0.8, 0.01)["drafter"]).changes == ("training.lr 0.001 -> 0.01",)
    hit = store.explain(chain(store, 0.8, 0.001)["drafter"])
    assert (hit.hit, hit.changes, str(hit)) == (True, (), "cached (same key)")
    first = store.explain(StageSpec("report", 1))
    assert (first.nearest, first.changes, str(first)) == (None, (), "to make (not made yet)")


def test_explain_compares_with_the_entry_that_differs_least(store: StageStore) -> None:
    def two(a: int, b: object) -> StageSpec:
        return StageSpec("tokens", 1, {"data": {"a": a, "b": b}})

    near = store.materialize(two(1, 2), Body())
    store.materialize(two(5, 6), Body())
    explained = store.explain(two(1, [{"x": 3}]))
    assert explained.nearest == near.path
    assert explained.changes == ("data.b 2 -> (absent)", "data.b[0].x (absent) -> 3")
    versioned = StageSpec("tokens", 2, {"data": {"a": 1, "b": 2}}, files={"tokenizer.json": "ff"})
    assert store.explain(versioned).changes == ("tokens version 1 -> 2", "file tokenizer.json (absent) -> ff")


def test_plan_estimates_from_the_newest_entry(store: StageStore) -> None:
    assert (store.plan(spec()).hit, store.plan(spec()).bytes) == (False, None)
    ref = make(store)
    assert store.plan(spec()) == store.plan(spec())
    assert (store.plan(spec()).hit, store.plan(spec()).bytes) == (True, 12)
    other = store.plan(spec(2))
    assert (other.hit, other.bytes, other.seconds) == (False, 12, ref.seconds)


def test_gc_keeps_what_the_newest_results_reach(store: StageStore) -> None:
    old = run_chain(store, 0.8, 0.001)
    middle = run_chain(store, 0.7, 0.001)
    new = run_chain(store, 0.7, 0.01)
    assert middle["tokens"].key == new["tokens"].key
    would = store.gc(keep=1)
    assert {entry.key for entry in would} == {
        old["answers"].key,
        old["tokens"].key,
        old["drafter"].key,
        middle["drafter"].key,
    }
    assert len(store.ls()) == 7  # a dry run
    assert [entry.key for entry in store.gc(keep=2)] == [old[name].key for name in ("answers", "tokens", "drafter")]
    store.gc(keep=1, dry_run=False)
    assert {entry.key for entry in store.ls()} == {each.key for each in new.values()}
    assert all(store.lookup(each).hit for each in new.values())
    interrupted = chain(store, 0.1, 0.001)["answers"]
    with pytest.raises(RuntimeError):
        store.materialize(interrupted, Body(fail="b"))
    assert store.gc(keep=1) == []  # younger than the newest result: somebody's run
    with pytest.raises(UserError, match="at least one"):
        store.gc(keep=0)


def test_adopt_copies_and_seals(store: StageStore, tmp_path: Path) -> None:
    source = tmp_path / "elsewhere"
    (source / "sub").mkdir(parents=True)
    (source / "sub" / "x").write_bytes(b"abc")
    ref = store.adopt(source, spec(), metrics={"rows": 9})
    assert (ref.rows, ref.bytes, ref.reason) == (9, 3, f"adopted from {source}")
    assert json.loads((ref.path / "manifest.json").read_text())["adopted_from"] == str(source)
    assert store.lookup(spec()).hit and (source / "sub" / "x").exists()
    with pytest.raises(UserError, match="already there"):
        store.adopt(source, spec())
    with pytest.raises(UserError, match="no files"):
        store.adopt(tmp_path / "nowhere", spec(2))


def test_adopt_takes_a_stage_out_of_another_store(store: StageStore, tmp_path: Path) -> None:
    def build(workspace: Workspace) -> None:
        with workspace.shard("part/x") as path:
            path.write_bytes(b"abc")
            workspace.facts("part/x", rows=7)
        (workspace.logs / "attempt-001.log").write_text("said")
        workspace.record(loss=0.5)

    other = StageStore(tmp_path / "other")
    made = other.materialize(spec(), build)
    ref = store.adopt(made.path, spec())
    assert (ref.rows, ref.bytes, dict(ref.metrics)) == (7, 3, {"loss": 0.5, "rows": 7})
    files = json.loads((ref.path / "manifest.json").read_text())["files"]
    assert set(files) == {"part/x"} and files["part/x"]["rows"] == 7
    (made.path / "part" / "x").write_bytes(b"abd")
    with pytest.raises(UserError, match="is damaged: part/x differs"):
        store.adopt(made.path, spec(2))


def test_verify_names_a_damaged_manifest(store: StageStore) -> None:
    ref = store.materialize(spec(), Body())
    (ref.path / "manifest.json").write_text("{")
    assert store.verify() == [f"{ref.path}: it has no readable manifest"]


def test_disk_errors_in_words(tmp_path: Path) -> None:
    full = explain_disk_error(OSError(errno.ENOSPC, "No space left on device"), tmp_path / "not" / "there")
    assert full is not None and "The disk is full" in str(full) and "bytes free" in str(full)
    rust = explain_disk_error(RuntimeError("I/O error: No space left on device (os error 28)"), tmp_path)
    assert rust is not None and str(tmp_path) in str(rust)
    denied = explain_disk_error(PermissionError(errno.EACCES, "Permission denied", "/x/y"), tmp_path)
    assert denied is not None and "/x/y" in str(denied)
    assert explain_disk_error(FileNotFoundError(errno.ENOENT, "no"), tmp_path) is None
    assert explain_disk_error(ValueError("x"), tmp_path) is None


def test_progress_is_rate_limited_and_always_says_the_end(tmp_path: Path) -> None:
    progress = Progress(tmp_path / "p.jsonl", every_s=3600)
    for done in range(1, 11):
        progress.update(done, 10, "shards", loss=done / 2)
    rows = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text().splitlines()]
    assert [row["done"] for row in rows] == [1, 10]
    assert rows[0]["rate"] is None and rows[1]["numbers"] == {"loss": 5.0} and rows[1]["eta_s"] == 0
    assert set(rows[0]) == {"done", "total", "unit", "message", "rate", "eta_s", "numbers"}


def test_local_job_has_what_a_body_needs(tmp_path: Path) -> None:
    job = local_job(tmp_path / "out", inputs={"target": tmp_path}, params={"run": {"seed": (1, 2)}})
    with job.workspace.shard("a") as path:
        path.write_text("x")
    job.progress.update(1, 1)
    assert job.params == {"run": {"seed": [1, 2]}} and job.inputs["target"] == tmp_path
    assert (tmp_path / "out" / "logs" / "progress.jsonl").exists()
