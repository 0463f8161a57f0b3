"""A pipeline stage's capture under every kind of schedule: chunks, mixed requests, requests that start again."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from torchspec_core.capture.stage import SCRATCH, RequestId, StageCapture, failure_file
from torchspec_core.capture.work import CaptureWork
from torchspec_core.errors import StageError
from torchspec_core.stages.workspace import Workspace
from torchspec_core.store.files import shard_name
from torchspec_core.store.format import Layout
from torchspec_core.targets.vllm_cpu import thread_binding

WIDTH, LAYERS = 6, (2, 5)
SHARDS = ((7, 4), (9, 1, 3))  # lengths of the samples of each shard


class Layer(nn.Module):
    """As vLLM's: what is added and the stream that it is added to, both of which the next layer overwrites."""

    def forward(self, hidden: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return hidden, residual


def numbers(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randint(-50, 50, shape, generator=generator).float()  # whole: their sums are exact


def requests() -> dict[str, tuple[RequestId, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    found = {}
    for shard, lengths in enumerate(SHARDS):
        for place, length in enumerate(lengths):
            request = RequestId(shard, place, len(lengths), length, f"id{shard}{place}")
            found[f"{request}-5eed{place}"] = (request, numbers((len(LAYERS), length, WIDTH), generator))
    return found


def make_stage(folder: Path, part: int = 0, parts: int = 1) -> tuple[StageCapture, dict[int, nn.Module]]:
    Workspace(folder).scratch(SCRATCH)
    modules: dict[int, nn.Module] = {layer: Layer() for layer in range(8)}
    return StageCapture(folder, Layout(LAYERS, WIDTH, "float32"), part, parts, modules), modules


def forward(
    stage: StageCapture, modules: dict[int, nn.Module], rows: list[tuple[str, int, int]], states: dict[str, Tensor]
) -> None:
    generator = torch.Generator().manual_seed(len(rows))
    for place, layer in enumerate(LAYERS):
        wanted = torch.cat([states[name][place, start : start + count] for name, start, count in rows])
        residual = torch.cat((numbers(tuple(wanted.shape), generator), torch.zeros(3, WIDTH)))  # padding at the end
        hidden = torch.cat((wanted, torch.zeros(3, WIDTH))) - residual
        modules[layer](hidden, residual)
        hidden.fill_(7)
        residual.fill_(7)
    stage.take(rows)


def wait(path: Path) -> None:
    deadline = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} was not written"
        time.sleep(0.01)


@pytest.mark.parametrize("seed", range(5))
def test_any_schedule_gives_every_samples_states(tmp_path: Path, seed: int) -> None:
    random = np.random.default_rng(seed)
    todo = requests()
    states = {name: state for name, (_, state) in todo.items()}
    stage, modules = make_stage(tmp_path)
    position = dict.fromkeys(todo, 0)
    restarted = False
    while position:
        chosen = [name for name in position if random.random() < 0.7]
        random.shuffle(chosen)
        rows = []
        for name in chosen:
            if position[name] and not restarted:  # preempted: its cache is gone, it is computed from the start
                position[name], restarted = 0, True
            count = int(random.integers(1, todo[name][0].length - position[name] + 1))
            rows.append((name, position[name], count))
            position[name] += count
            if position[name] == todo[name][0].length:
                del position[name]
        if rows:
            forward(stage, modules, rows, states)
    for shard, lengths in enumerate(SHARDS):
        wait(tmp_path / shard_name(shard))
        written = load_file(tmp_path / shard_name(shard))
        assert len(written) == len(lengths) * len(LAYERS)
        for request, expected in todo.values():
            if request.shard == shard:
                for place, layer in enumerate(LAYERS):
                    assert torch.equal(written[f"{request.sample_id}.{layer}"], expected[place])
    assert stage.peak <= sum(map(sum, SHARDS)) * len(LAYERS) * WIDTH * 4
    assert not stage.open and not stage.shards


def test_a_state_that_is_not_finite_is_told_to_the_parent_by_sample_and_layer(tmp_path: Path) -> None:
    todo = requests()
    states = {name: state for name, (_, state) in todo.items()}
    bad = next(name for name, (request, _) in todo.items() if request.sample_id == "id01")
    states[bad][1, 2, 0] = float("nan")
    stage, modules = make_stage(tmp_path, 1, 2)
    forward(stage, modules, [(name, 0, r.length) for name, (r, _) in todo.items() if r.shard == 0], states)
    wait(failure_file(tmp_path, 1))
    told = json.loads(failure_file(tmp_path, 1).read_text())
    assert told["type"] == "StageError" and "sample id01: the hidden state of layer 5" in told["reason"]
    assert not list(tmp_path.glob("states-*"))


def test_a_layer_without_its_hook_is_refused(tmp_path: Path) -> None:
    stage, modules = make_stage(tmp_path)
    name, (request, _) = next(iter(requests().items()))
    modules[2](torch.zeros(7, WIDTH), torch.zeros(7, WIDTH))
    with pytest.raises(StageError, match="layer 5 ran past its hook"):
        stage.take([(name, 0, request.length)])


def test_a_shard_counts_when_it_is_whole_or_all_its_parts_are(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)

    def seal(number: int, part: int = 0, parts: int = 1) -> None:
        with workspace.shard(shard_name(number, part, parts)) as path:
            path.write_bytes(b"x")

    seal(0)
    seal(1, 0, 2)
    seal(1, 1, 2)
    seal(2, 0, 2)
    seal(3, 1, 2)
    seal(3)

    class Tokens:
        lengths = np.array([5, 5, 5, 5])

    tokens: Any = Tokens()
    work = CaptureWork(
        workspace, Layout(LAYERS, WIDTH, "float32"), tokens, {i: np.array([i]) for i in range(4)}, print
    )  # fmt: skip
    assert work.missing == [2] and (work.done, work.total) == (15, 20)
    assert work.sealed()[1] == ["states-00001.1of2.safetensors", "states-00001.2of2.safetensors"]
    work.discard_leftovers()
    assert sorted(path.name for path in tmp_path.glob("states-*")) == [
        "states-00000.safetensors", "states-00001.1of2.safetensors", "states-00001.2of2.safetensors",
        "states-00003.safetensors",
    ]  # fmt: skip


def test_cores_are_shared_out_among_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {4, 5, 6, 7, 9})
    assert thread_binding(2) == "4,5,6|7,9"
    assert thread_binding(1) is None and thread_binding(6) is None
