"""kill -9 of an S3 server in the middle of a copy: nothing half-written looks whole, and the copy goes on."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

from infra import stores
from tests.real.stores import running
from torchspec_core.errors import UserError
from torchspec_core.store.address import below, open_store
from torchspec_core.store.files import INDEX, ShardFile, shard_name, write_index
from torchspec_core.store.format import Layout, write_shard
from torchspec_core.store.local import FolderStore
from torchspec_core.store.move import copy_set, open_set
from torchspec_core.store.protocol import StateStore, StoreUnavailableError

pytestmark = pytest.mark.faults

LAYOUT, SHARDS = Layout((1, 3), 512, "bfloat16"), 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A set of twelve shards of 4 MB."""
    path = tmp_path_factory.mktemp("set")
    generator = torch.Generator().manual_seed(0)
    files = []
    for number in range(SHARDS):
        samples = [(f"s{number}-{i}", torch.randn(2, 1024, 512, generator=generator).bfloat16()) for i in range(2)]
        entries = write_shard(path / shard_name(number), LAYOUT, samples)
        files.append(ShardFile(shard_name(number), LAYOUT.layers, entries))
    write_index(path / INDEX, LAYOUT, files)
    return path


def shards_in(store: StateStore) -> int:
    return len(list(store.list("states-")))


def test_a_server_killed_in_a_copy_is_an_error_in_time_and_the_copy_goes_on(folder: Path) -> None:
    homes: list[Path] = []

    def start(home: Path) -> stores.Server:
        homes.append(home)
        return stores.start_s3(home)

    with running(start, credentials=True) as server:
        url = below(server.url, "set") + "&deadline=2"
        store = open_store(url)
        count = 0

        def report(moved: int, total: int, name: str) -> None:
            nonlocal count
            count += 1
            if count == 1:
                os.kill(server.pid, signal.SIGKILL)

        with pytest.raises(StoreUnavailableError, match="check that the server http://127.0.0.1"):
            copy_set(FolderStore(folder), store, report)
        assert count == 1
        again = stores.start_s3(homes[0])
        assert again.url == server.url
        store = open_store(url.replace("deadline=2", "deadline=30"))
        assert store.size(INDEX) is None and 1 <= shards_in(store) < SHARDS
        with pytest.raises(UserError, match="holds no set"):
            open_set(store)
        copied = copy_set(FolderStore(folder), store)
        assert copied.kept >= 1 and copied.kept + copied.files == SHARDS
        assert open_set(store).verify() == []
