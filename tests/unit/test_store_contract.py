"""The contract of a state store on the backends without a server; addresses; retries."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.store_contract import StoreContract
from torchspec_core.errors import UserError
from torchspec_core.store.address import below, check_address, open_store, parse_bytes
from torchspec_core.store.local import FolderStore, MemoryStore
from torchspec_core.store.protocol import StateStore, StoreFullError, StoreUnavailableError
from torchspec_core.store.retry import Transient, retrying


class TestMemory(StoreContract):
    @pytest.fixture
    def store(self) -> StateStore:
        return MemoryStore("contract")


class TestFolder(StoreContract):
    @pytest.fixture(params=[True, False])
    def store(self, tmp_path: Path, request: pytest.FixtureRequest) -> StateStore:
        return FolderStore(tmp_path / "store", durable=request.param)


def test_memory_knows_its_bound() -> None:
    store = MemoryStore("bound", limit=10)
    store.put("a", b"123456")
    with pytest.raises(StoreFullError, match="6 of 10 bytes, no room for 5"):
        store.put("b", b"12345")
    store.put("a", b"1234567890")  # replaces, so it fits
    assert store.delete("a") and store.size("b") is None
    store.put("b", b"12345")


def test_a_full_disk_leaves_the_old_object_and_no_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FolderStore(tmp_path / "store")
    store.put("run/a", b"old")

    def full(number: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreFullError, match="run/a.*disk is full"):
        store.put("run/a", b"new")
    monkeypatch.undo()
    assert [path.name for path in (tmp_path / "store/run").iterdir()] == ["a"]
    assert (tmp_path / "store/run/a").read_bytes() == b"old"


@pytest.mark.parametrize(
    ("text", "count"),
    [("0", 0), ("1000", 1000), ("2K", 2048), ("1.5MiB", 3 << 19), ("4GiB", 4 << 30), ("1tb", 1 << 40)],
)
def test_numbers_of_bytes(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("ftp://x", "no store ftp://"),
        ("s3://", "missing"),
        ("mooncake:///x", "missing"),
        ("s3://bucket?endpiont=x", "no option 'endpiont'"),
        ("s3://key:secret@bucket/x", "no credentials"),
        ("memory://x?limit=many", "no number of bytes"),
    ],
)
def test_addresses_that_mean_nothing(url: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        open_store(url)


def test_addresses(tmp_path: Path) -> None:
    assert below("s3://b/p?endpoint=http://h:1", "x/y") == "s3://b/p/x/y?endpoint=http://h:1"
    assert below("/data/", "x") == "/data/x"
    check_address("mooncake://127.0.0.1:5/p?admin=7&segment=4GiB&protocol=rdma&device=mlx5_0")
    open_store(str(tmp_path / "a")).put("k", b"1")
    assert open_store(f"file://{tmp_path}/a").size("k") == 1
    open_store("memory://shared").put("k", b"1")
    assert open_store("memory://shared").size("k") == 1


def test_tries_end_at_the_deadline_with_the_last_reason() -> None:
    tries: Iterator[int] = iter(range(100))

    def never() -> int:
        raise Transient(f"reason {next(tries)}")

    with pytest.raises(StoreUnavailableError, match=r"could not read x after \d tries in 0.2 s \(reason \d\): mend it"):
        retrying("read x", never, 0.2, "mend it")


def test_a_later_try_succeeds() -> None:
    answers: Iterator[int | Exception] = iter([Transient("503"), Transient("503"), 7])

    def third() -> int:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert retrying("read x", third, 5.0, "mend it") == 7
