"""What every backend of `StateStore` must do; run on memory and files by the unit tests, on all by the real ones."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from torchspec_core.store.protocol import MissingObjectError, StateStore, StoreError, get, stats


def pattern(count: int, seed: int = 0) -> bytes:
    """`count` bytes that no shift of themselves equals."""
    return np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8).tobytes()


class StoreContract:
    """Subclasses give the fixture `store`; every test starts with an empty one."""

    @pytest.mark.parametrize("count", [1, 7, 4096, 3_000_001])
    def test_what_was_put_comes_back(self, store: StateStore, count: int) -> None:
        store.put("run/1/sample", pattern(count))
        assert get(store, "run/1/sample") == pattern(count)
        assert store.size("run/1/sample") == count

    def test_an_object_of_several_parts_is_their_bytes_in_order(self, store: StateStore) -> None:
        body = np.arange(6, dtype=np.float32).reshape(2, 3)
        store.put("a", b"head", memoryview(b"neck"), body)
        assert get(store, "a") == b"headneck" + body.tobytes()

    def test_large_objects(self, store: StateStore) -> None:
        data = pattern(40_000_003)  # three parts of an upload
        store.put("large", data)
        assert get(store, "large") == data

    def test_ranges(self, store: StateStore) -> None:
        data = pattern(100_000)
        store.put("a", data)
        for start, count in ((0, 1), (0, 100_000), (1, 10), (99_999, 1), (31_415, 50_000)):
            out = bytearray(count)
            store.get_into("a", out, start)
            assert out == data[start : start + count]

    @pytest.mark.parametrize(("start", "count"), [(0, 11), (5, 6), (10, 1), (400, 2)])
    def test_a_read_past_the_end_is_refused(self, store: StateStore, start: int, count: int) -> None:
        store.put("a", b"0123456789")
        with pytest.raises(StoreError, match="a"):
            store.get_into("a", bytearray(count), start)

    @pytest.mark.parametrize("sizes", [(1000, 1000), (1000, 2000), (2000, 10)])
    def test_putting_again_replaces_the_whole_object(self, store: StateStore, sizes: tuple[int, int]) -> None:
        for seed, size in enumerate(sizes):
            store.put("a", pattern(size, seed))
        assert get(store, "a") == pattern(sizes[1], 1)

    def test_what_is_not_there(self, store: StateStore) -> None:
        assert store.size("no") is None and store.delete("no") is False
        with pytest.raises(MissingObjectError, match="no"):
            store.get_into("no", bytearray(3))
        with pytest.raises(MissingObjectError, match="no"):
            store.get_into("no", bytearray(3), 5)
        with pytest.raises(MissingObjectError):
            get(store, "no")

    def test_delete_also_right_after_a_read(self, store: StateStore) -> None:
        store.put("a/b", b"1")
        assert get(store, "a/b") == b"1"
        assert store.delete("a/b") is True
        assert store.size("a/b") is None and store.delete("a/b") is False
        store.put("a/b", b"22")
        assert get(store, "a/b") == b"22"

    def test_list_is_sorted_and_by_prefix(self, store: StateStore) -> None:
        for key, count in (("run/1/b", 2), ("run/1/a", 1), ("run/10/a", 3), ("other", 4)):
            store.put(key, pattern(count))
        assert list(store.list()) == [("other", 4), ("run/1/a", 1), ("run/1/b", 2), ("run/10/a", 3)]
        assert list(store.list("run/1/")) == [("run/1/a", 1), ("run/1/b", 2)]
        assert [key for key, _ in store.list("run/1")] == ["run/1/a", "run/1/b", "run/10/a"]
        assert list(store.list("none")) == []
        assert (stats(store).objects, stats(store, "run/").bytes) == (4, 6)

    @pytest.mark.parametrize("key", ["", "/a", "a//b", "a/", "../a", "a b", ".hidden", "a/.tmp-x", "ä", "a" * 600])
    def test_keys_that_some_backend_could_not_hold_are_refused(self, store: StateStore, key: str) -> None:
        with pytest.raises(ValueError):
            store.put(key, b"1")
        with pytest.raises(ValueError):
            store.size(key)

    def test_an_object_without_bytes_is_refused(self, store: StateStore) -> None:
        with pytest.raises(ValueError, match="without bytes"):
            store.put("a")
        with pytest.raises(ValueError, match="without bytes"):
            store.put("a", b"", b"")
        assert store.size("a") is None

    def test_own_buffers_carry_bytes_both_ways(self, store: StateStore) -> None:
        source, target = store.buffer(70_000), store.buffer(50_000)
        source[:] = np.frombuffer(pattern(70_000), np.uint8)
        store.put("a", source)
        store.put("b", source[100:40_100])
        store.get_into("a", target[1000:41_000], 300)
        assert target[1000:41_000].tobytes() == pattern(70_000)[300:40_300]
        assert get(store, "b") == pattern(70_000)[100:40_100]

    def test_views_of_a_buffer_outlive_it(self, store: StateStore) -> None:
        store.put("a", pattern(5000))
        views = []
        for _ in range(20):
            buffer = store.buffer(5000)
            store.get_into("a", buffer)
            views.append(buffer[10:20])
        assert all(view.tobytes() == pattern(5000)[10:20] for view in views)

    def test_a_reader_never_sees_half_of_a_write(self, store: StateStore) -> None:
        stop, seen = threading.Event(), []
        store.put("a", bytes([0]) * 200_000)

        def write() -> None:
            turn = 0
            while not stop.is_set():
                turn = (turn + 1) % 250
                store.put("a", bytes([turn]) * 200_000)
                stop.wait(0.003)

        writer = threading.Thread(target=write)
        writer.start()
        try:
            for _ in range(40):
                out = bytearray(200_000)
                try:
                    store.get_into("a", out)
                except MissingObjectError:
                    continue
                seen.append(len(set(out)))
        finally:
            stop.set()
            writer.join()
        assert seen and set(seen) == {1}

    def test_many_threads(self, store: StateStore) -> None:
        wrong: list[str] = []

        def work(number: int) -> None:
            for turn in range(8):
                key, data = f"t{number}/{turn}", pattern(2000 + number, 10 * number + turn)
                store.put(key, data)
                if get(store, key) != data:
                    wrong.append(key)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == [] and stats(store).objects == 48

