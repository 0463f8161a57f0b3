"""Sets of states that lie in a store: reading by ranges, copying, mending, clearing away."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.states_sets import LAYOUT, write_set
from torchspec_core.cli import main
from torchspec_core.errors import UserError
from torchspec_core.store.address import below, open_store
from torchspec_core.store.files import INDEX, CorruptStatesError, StateSet, shard_name
from torchspec_core.store.local import FolderStore, MemoryStore
from torchspec_core.store.move import copy_set, delete_keys, repair_set, stat_set, unreachable
from torchspec_core.store.protocol import Buffer, StoreError
from torchspec_core.store.remote import LOCATION, RemoteStates, open_states


class Counting(MemoryStore):
    """Counts the reads of shards; `broken` names objects that come back with a flipped bit."""

    def __init__(self) -> None:
        super().__init__("counting")
        self.reads: list[tuple[str, int]] = []
        self.broken: set[str] = set()
        self.fail_after: int | None = None

    def get_into(self, key: str, out: Buffer, start: int = 0) -> None:
        super().get_into(key, out, start)
        if key != INDEX:
            self.reads.append((key, memoryview(out).nbytes))
        if key in self.broken:
            memoryview(out)[-1] ^= 1

    def put(self, key: str, *parts: Buffer) -> None:
        if self.fail_after is not None and len(list(self.list())) >= self.fail_after:
            raise StoreError("the server went away")
        super().put(key, *parts)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "set").mkdir()
    write_set(tmp_path / "set")
    return tmp_path / "set"


@pytest.fixture
def store(folder: Path) -> Iterator[Counting]:
    counting = Counting()
    copy_set(FolderStore(folder), counting)
    counting.reads.clear()
    yield counting


@pytest.mark.parametrize("policy", ["always", "sample", "never"])
def test_a_set_in_a_store_reads_as_in_its_folder(folder: Path, store: Counting, policy: str) -> None:
    near, far = StateSet(folder), RemoteStates(store, policy)  # type: ignore[arg-type]
    assert far.ids == near.ids and far.layers == near.layers and far.lengths.tolist() == near.lengths.tolist()
    for sample in near.ids:
        assert all(torch.equal(far.get(sample)[layer], near.get(sample)[layer]) for layer in near.layers)
    # A sample is one range of its own bytes: layers x tokens x width x 2.
    assert [count for _, count in store.reads] == [3 * int(n) * 8 * 2 for n in near.lengths]


def test_parts_of_pipeline_stages_are_put_together(tmp_path: Path) -> None:
    samples = write_set(tmp_path, parts=2)
    store = MemoryStore()
    copy_set(FolderStore(tmp_path), store)
    states = RemoteStates(store, "always")
    assert [name for name, _ in store.list("states")] == [shard_name(n, p, 2) for n in range(2) for p in range(2)]
    assert all(torch.equal(torch.stack([*states.get(name).values()]), whole) for name, whole in samples.items())


def test_what_is_kept_is_bounded_by_bytes_and_read_once(store: Counting) -> None:
    states = RemoteStates(store, "never", cache_bytes=3 * 8 * 2 * (15 + 13))  # room for the two longest samples
    for _ in range(3):
        states.get("s6"), states.get("s5")
    assert len(store.reads) == 2
    states.get("s0")  # one of the two must go
    states.get("s5")
    assert len(store.reads) == 3
    states.get("s6")
    assert len(store.reads) == 4


def test_reading_ahead_takes_half_of_the_room_and_no_second_read(store: Counting) -> None:
    states = RemoteStates(store, "never", cache_bytes=2 * 3 * 8 * 2 * (3 + 5 + 7))
    states.ahead(["s0", "s1", "s2", "s3"])
    for name in ("s0", "s1", "s2"):
        states.get(name)
    assert sorted(count for _, count in store.reads) == [48 * 3, 48 * 5, 48 * 7]


def test_wrong_bytes_and_missing_shards_are_named(store: Counting) -> None:
    store.broken.add(shard_name(1))
    with pytest.raises(CorruptStatesError, match=r"memory://counting/states-00001\.safetensors.*s6.*checksum"):
        RemoteStates(store, "always").get("s6")
    RemoteStates(store, "never").get("s6")
    store.delete(shard_name(1))
    with pytest.raises(CorruptStatesError, match="states-00001.*is missing: mend"):
        RemoteStates(store, "never").get("s6")
    store.delete(INDEX)
    with pytest.raises(UserError, match="memory://counting holds no set"):
        RemoteStates(store)


def test_a_failed_read_is_tried_again_when_it_is_asked_for_again(store: Counting) -> None:
    states = RemoteStates(store, "never")
    data = bytes(store._objects[shard_name(0)])
    store.delete(shard_name(0))
    with pytest.raises(CorruptStatesError):
        states.get("s0")
    store.put(shard_name(0), data)
    states.get("s0")


def test_many_threads_read_one_set(folder: Path, store: Counting) -> None:
    near, far = StateSet(folder, "never"), RemoteStates(store, "always", cache_bytes=1000)
    wrong: list[str] = []

    def work() -> None:
        for name in near.ids * 5:
            if not torch.equal(far.get(name)[3], near.get(name)[3]):
                wrong.append(name)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_copy_has_no_index_before_it_is_whole_and_goes_on(folder: Path) -> None:
    target = Counting()
    target.fail_after = 1
    with pytest.raises(StoreError, match="went away"):
        copy_set(FolderStore(folder), target)
    assert [key for key, _ in target.list()] == [shard_name(0)]
    target.fail_after = None
    copied = copy_set(FolderStore(folder), target)
    assert (copied.files, copied.kept) == (1, 1)
    assert copied.bytes == (folder / shard_name(1)).stat().st_size
    assert copy_set(FolderStore(folder), target).files == 0
    target.put(shard_name(0), b"x" * (folder / shard_name(0)).stat().st_size)  # right size, wrong bytes
    assert copy_set(FolderStore(folder), target).files == 1
    assert RemoteStates(target, "always").verify() == []


def test_a_copy_that_comes_back_wrong_is_refused_and_has_no_index(folder: Path) -> None:
    target = Counting()
    target.broken.add(shard_name(1))
    with pytest.raises(StoreError, match=r"other bytes of states-00001"):
        copy_set(FolderStore(folder), target)
    assert target.size(INDEX) is None


def test_another_set_is_not_overwritten(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    write_set(tmp_path / "other", count=3)
    with pytest.raises(UserError, match="holds another set"):
        copy_set(FolderStore(folder), FolderStore(tmp_path / "other"))


def test_facts_of_a_set(store: Counting) -> None:
    tokens = sum(3 + 2 * i for i in range(7))
    facts = stat_set(store)
    assert (facts["samples"], facts["tokens"], facts["layers"]) == (7, tokens, "1, 3, 5")
    assert (facts["bytes"], facts["bytes_per_token"], facts["files"]) == (tokens * 48, 48, 2)
    assert LAYOUT.bytes_per_token == 48


def test_repair_writes_broken_files_again(folder: Path, store: Counting) -> None:
    good = bytes(store._objects[shard_name(1)])
    store.put(shard_name(1), good[:-1] + bytes([good[-1] ^ 1]))
    problems, mended = repair_set(store)
    assert [(p.shard, p.sample_id) for p in problems] == [(shard_name(1), "s6")] and mended == []
    assert repair_set(store, FolderStore(folder))[1] == [shard_name(1)]
    assert store._objects[shard_name(1)] == good and repair_set(store)[0] == []


def test_what_no_stage_names_is_found_and_removed_index_first() -> None:
    store = MemoryStore()
    for key in ("kept-1/index.arrow", "kept-1/a", "gone-2/a", "gone-2/index.arrow", "alone"):
        store.put(key, b"12345")
    doomed = unreachable(store, {"kept-1"})
    assert doomed == {"gone-2": (10, ["gone-2/a", "gone-2/index.arrow"])}
    deleted: list[str] = []
    store.delete = lambda key: deleted.append(key) or True  # type: ignore[method-assign,func-returns-value]
    assert delete_keys(store, doomed["gone-2"][1]) == 2
    assert deleted == ["gone-2/index.arrow", "gone-2/a"]


def test_commands(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy, place = str(tmp_path / "place/lost"), str(tmp_path / "place")
    assert main(["store", "copy", str(folder), copy]) == 0
    assert "2 files" in capsys.readouterr().out
    assert main(["store", "stat", copy]) == 0
    assert "samples          7" in capsys.readouterr().out
    assert main(["store", "verify", copy]) == 0
    damaged = Path(copy, shard_name(0))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert main(["store", "verify", copy]) == 1
    assert main(["store", "repair", copy]) == 1
    assert main(["store", "repair", copy, "--from", str(folder)]) == 0
    assert main(["store", "verify", copy]) == 0
    assert main(["store", "gc", place, "--store", str(tmp_path / "none")]) == 0
    assert "would remove" in capsys.readouterr().out and Path(copy, INDEX).exists()
    assert main(["store", "gc", place, "--store", str(tmp_path / "none"), "--delete"]) == 0
    assert not Path(copy, INDEX).exists()
    assert main(["store", "stat", str(tmp_path / "nothing")]) == 2
    assert "is no folder" in capsys.readouterr().err


def test_a_folder_that_says_where_its_set_went(folder: Path, tmp_path: Path) -> None:
    url = below(f"file://{tmp_path}/elsewhere", "x")
    copy_set(FolderStore(folder), open_store(url))
    near = StateSet(folder)
    expected = {name: torch.stack([*near.get(name).values()]) for name in near.ids}
    for path in folder.glob("states-*"):
        path.unlink()
    (folder / LOCATION).write_text(f'{{"url": "{url}"}}\n')
    moved = open_states(folder)
    assert isinstance(moved, RemoteStates)
    assert all(torch.equal(torch.stack([*moved.get(name).values()]), whole) for name, whole in expected.items())
