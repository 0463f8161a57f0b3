"""The states file form: round trip, other readers, damage that is found and named, bounded reads."""

import pickle
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from torchspec_core.errors import UserError
from torchspec_core.store.files import (
    INDEX,
    CorruptStatesError,
    ShardFile,
    StateSet,
    rebuild_index,
    shard_name,
    write_index,
)
from torchspec_core.store.format import Layout, write_shard

LAYOUT = Layout((1, 3, 5), 8, "bfloat16")


def states_of(length: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(3, length, 8, generator=torch.Generator().manual_seed(seed)).to(dtype)


def write_set(folder: Path, layout: Layout = LAYOUT) -> dict[str, torch.Tensor]:
    dtype = torch.bfloat16 if layout.dtype == "bfloat16" else torch.float32
    samples = {f"s{i}": states_of(3 + 2 * i, i, dtype) for i in range(7)}
    items = list(samples.items())
    names = [shard_name(n) for n in range(2)]
    shards = [write_shard(folder / name, layout, items[4 * n : 4 * n + 4]) for n, name in enumerate(names)]
    files = [ShardFile(name, layout.layers, entries) for name, entries in zip(names, shards, strict=True)]
    write_index(folder / INDEX, layout, files)
    return samples


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_round_trip_is_exact(tmp_path: Path, dtype: str) -> None:
    samples = write_set(tmp_path, Layout((1, 3, 5), 8, dtype))
    states = StateSet(tmp_path, verify="always")
    assert (states.layers, states.hidden_size, len(states)) == ((1, 3, 5), 8, 7)
    assert states.ids == list(samples)
    assert states.lengths.tolist() == [3, 5, 7, 9, 11, 13, 15]
    for name, expected in samples.items():
        taken = states.get(name)
        assert list(taken) == [1, 3, 5]
        assert all(torch.equal(taken[layer], expected[place]) for place, layer in enumerate((1, 3, 5)))
    assert torch.equal(torch.stack(list(states.get(6).values())), samples["s6"])
    assert states.verify() == []


def write_parts(folder: Path) -> dict[str, torch.Tensor]:
    """Two shards: the first written whole, the second by two stages, whose files hold other layers."""
    samples = {f"s{i}": states_of(3 + 2 * i, i) for i in range(7)}
    items = list(samples.items())
    files = []
    for name, places, part in (
        (shard_name(0), (0, 1, 2), items[:4]),
        (shard_name(1, 0, 2), (0,), items[4:]),
        (shard_name(1, 1, 2), (1, 2), items[4:]),
    ):
        layout = Layout(tuple((1, 3, 5)[place] for place in places), 8, "bfloat16")
        entries = write_shard(folder / name, layout, [(i, states[list(places)].contiguous()) for i, states in part])
        files.append(ShardFile(name, layout.layers, entries))
    write_index(folder / INDEX, LAYOUT, files)
    return samples


def test_a_shard_in_parts_is_read_as_one(tmp_path: Path) -> None:
    samples = write_parts(tmp_path)
    states = StateSet(tmp_path, verify="always")
    assert states.ids == list(samples) and states.lengths.tolist() == [3, 5, 7, 9, 11, 13, 15]
    for position, (name, expected) in enumerate(samples.items()):
        for taken in (states.get(name), states.get(position)):
            assert list(taken) == [1, 3, 5]
            assert all(torch.equal(state, expected[place]) for place, state in enumerate(taken.values()))
    before = (tmp_path / INDEX).read_bytes()
    assert rebuild_index(tmp_path) == 7 and (tmp_path / INDEX).read_bytes() == before
    flip(tmp_path / shard_name(1, 1, 2), 1)
    (problem,) = StateSet(tmp_path).verify()
    assert (problem.shard, problem.sample_id) == ("states-00001.2of2.safetensors", "s6")
    with pytest.raises(CorruptStatesError, match=r"2of2.safetensors: the states of sample s6"):
        StateSet(tmp_path, verify="always").get("s6")


def test_an_index_wants_every_layer_of_every_sample(tmp_path: Path) -> None:
    write_parts(tmp_path)
    (tmp_path / shard_name(1, 0, 2)).unlink()
    with pytest.raises(ValueError, match=r"sample s4 has layers \[3, 5\]"):
        rebuild_index(tmp_path)


def test_any_safetensors_reader_opens_a_shard(tmp_path: Path) -> None:
    samples = write_set(tmp_path)
    with safe_open(tmp_path / shard_name(1), framework="pt") as shard:
        assert torch.equal(shard.get_tensor("s5.3"), samples["s5"][1])
        assert shard.metadata()["final_state"] == "prenorm"


def test_equal_samples_give_equal_bytes(tmp_path: Path) -> None:
    write_shard(tmp_path / "a", LAYOUT, [("x", states_of(4, 0))])
    write_shard(tmp_path / "b", LAYOUT, [("x", states_of(4, 0))])
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_the_index_is_rebuilt_from_the_shards(tmp_path: Path) -> None:
    write_set(tmp_path)
    before = (tmp_path / INDEX).read_bytes()
    (tmp_path / INDEX).unlink()
    assert rebuild_index(tmp_path) == 7
    assert (tmp_path / INDEX).read_bytes() == before


def flip(path: Path, from_end: int) -> None:
    data = bytearray(path.read_bytes())
    data[-from_end] ^= 1
    path.write_bytes(data)


def test_a_flipped_bit_is_found_and_named(tmp_path: Path) -> None:
    write_set(tmp_path)
    flip(tmp_path / shard_name(1), 1)  # the last byte belongs to the last sample of the shard
    states = StateSet(tmp_path, verify="always")
    states.get("s5")
    with pytest.raises(CorruptStatesError, match=r"states-00001\.safetensors.*s6.*checksum"):
        states.get("s6")
    assert [(p.shard, p.sample_id) for p in states.verify()] == [("states-00001.safetensors", "s6")]
    StateSet(tmp_path, verify="never").get("s6")


def test_sampling_checks_the_first_read_of_a_shard_and_every_16th(tmp_path: Path) -> None:
    write_set(tmp_path)
    flip(tmp_path / shard_name(0), 1)  # sample s3
    with pytest.raises(CorruptStatesError):
        StateSet(tmp_path, verify="sample").get("s3")
    states = StateSet(tmp_path, verify="sample")
    for _ in range(14):
        states.get("s0")
    states.get("s3")  # the 15th read is not checked
    with pytest.raises(CorruptStatesError):
        states.get("s3")


@pytest.mark.parametrize("how", ["cut", "grown", "gone"])
def test_a_shard_of_the_wrong_size_is_named(tmp_path: Path, how: str) -> None:
    write_set(tmp_path)
    path = tmp_path / shard_name(0)
    data = path.read_bytes()
    path.unlink()
    if how != "gone":
        path.write_bytes(data[:-1] if how == "cut" else data + b"x")
    states = StateSet(tmp_path, verify="never")
    with pytest.raises(CorruptStatesError, match=r"states-00000\.safetensors"):
        states.get("s0")
    states.get("s4")
    assert [(p.shard, p.sample_id) for p in states.verify()] == [("states-00000.safetensors", None)]


def test_a_folder_without_index_and_a_foreign_index_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="missing"):
        StateSet(tmp_path)
    (tmp_path / INDEX).write_bytes(b"not arrow")
    with pytest.raises(UserError, match="not a states index"):
        StateSet(tmp_path)


def test_what_does_not_fit_the_layout_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="s0"):
        write_shard(tmp_path / "x", LAYOUT, [("s0", states_of(4, 0).float())])
    with pytest.raises(ValueError, match="twice"):
        write_shard(tmp_path / "x", LAYOUT, [("s0", states_of(4, 0)), ("s0", states_of(4, 1))])


def test_tensors_outlive_the_set_and_the_set_travels_to_another_process(tmp_path: Path) -> None:
    samples = write_set(tmp_path)
    states = StateSet(tmp_path)
    block = states.get("s2")[3]
    travelled = pickle.loads(pickle.dumps(states))
    del states
    assert torch.equal(block, samples["s2"][1])
    assert torch.equal(travelled.get("s2")[3], samples["s2"][1])
