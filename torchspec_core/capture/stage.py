"""One pipeline stage's side of the capture: rows of each forward pass put together to samples, samples to shard files.

The stage sees flat batches of rows. `take` copies each request's rows to the sample that they belong to, so it does not
matter how the scheduler cuts prompts into chunks, mixes requests, or starts one again. When all samples of a shard are
complete a background thread checks them and writes the stage's file of that shard; no rows leave the stage otherwise.

A request says in its id where its sample belongs (`RequestId`), so a stage needs no plan of its own.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchspec_core.capture.work import check_finite
from torchspec_core.errors import StageError
from torchspec_core.stages.disk import write_atomic
from torchspec_core.stages.workspace import Workspace
from torchspec_core.store.files import shard_name
from torchspec_core.store.format import DTYPES, Layout, write_shard

CHECK = -1
"""Shard number of the self-check's rows; their files are in the scratch folder."""
SCRATCH = "capture"


@dataclass(frozen=True)
class RequestId:
    """Where a request's sample belongs: its `place` among the `count` samples of a shard, and how long it is."""

    shard: int
    place: int
    count: int
    length: int
    sample_id: str

    def __str__(self) -> str:
        return f"{self.shard}.{self.place}.{self.count}.{self.length}.{self.sample_id}."

    @staticmethod
    def parse(text: str) -> RequestId:
        """The reverse; an engine may have added something after the last dot."""
        shard, place, count, length, rest = text.split(".", 4)
        return RequestId(int(shard), int(place), int(count), int(length), rest.rpartition(".")[0])


@dataclass
class _Sample:
    request: RequestId
    states: Tensor  # [layers, T, H]
    filled: int = 0


@dataclass
class _Shard:
    count: int
    complete: dict[int, _Sample] = field(default_factory=dict)


def check_file(workspace: Path, part: int) -> Path:
    """Where part `part` of the self-check's states is written."""
    return workspace / "scratch" / SCRATCH / f"check-{part}.safetensors"


def failure_file(workspace: Path, part: int) -> Path:
    """Where a stage says why it cannot go on."""
    return workspace / "scratch" / SCRATCH / f"failure-{part}.json"


def figures_file(workspace: Path, part: int) -> Path:
    """Where a stage keeps its own figures, as JSON."""
    return workspace / "scratch" / SCRATCH / f"figures-{part}.json"


class StageCapture:
    """Captures `layout.layers`, which are those of the wanted layers that this stage owns.

    Args:
        workspace: the folder that is being filled.
        part, parts: which of the stages that own wanted layers this one is.
        modules: the decoder layers by canonical id.
    """

    def __init__(
        self, workspace: Path, layout: Layout, part: int, parts: int, modules: dict[int, nn.Module]
    ) -> None:  # fmt: skip
        self.workspace, self.layout, self.part, self.parts = Workspace(workspace), layout, part, parts
        self.dtype = DTYPES[layout.dtype][0]
        self.taken: dict[int, Tensor] = {}
        self.open: dict[tuple[int, int], _Sample] = {}
        self.shards: dict[int, _Shard] = {}
        self.held, self.peak = 0, 0
        self.lock = threading.Lock()
        self.full: queue.Queue[tuple[int, _Shard]] = queue.Queue()
        for layer in layout.layers:
            modules[layer].register_forward_hook(self._hook(layer))
        threading.Thread(target=self._write_all, name="states-writer", daemon=True).start()

    def _hook(self, layer: int) -> Any:
        def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
            # vLLM's layers hand on what they add and the stream that it is to be added to; the next layer changes both
            # in place, so the sum is made here.
            hidden, residual = output if isinstance(output, tuple) else (output, None)
            self.taken[layer] = hidden.clone() if residual is None else hidden + residual

        return keep

    def take(self, rows: Iterable[tuple[str, int, int]]) -> None:
        """Rows of the forward pass that has just run, in their order: (request id, first position, rows)."""
        taken = [self.taken.get(layer) for layer in self.layout.layers]
        at = 0
        for name, start, count in rows:
            request = RequestId.parse(name)
            sample = self._sample(request)
            for place, stream in enumerate(taken):
                if stream is None:
                    raise StageError(
                        f"layer {self.layout.layers[place]} ran past its hook: capture needs the engine in eager mode"
                    )
                sample.states[place, start : start + count].copy_(stream[at : at + count])
            sample.filled = start + count
            at += count
            if sample.filled >= request.length:
                self._complete(sample)
        self.taken.clear()

    def _sample(self, request: RequestId) -> _Sample:
        key = (request.shard, request.place)
        found = self.open.get(key)
        if found is None:
            size = (len(self.layout.layers), request.length, self.layout.hidden_size)
            found = self.open[key] = _Sample(request, torch.empty(size, dtype=self.dtype))
            with self.lock:
                self.held += found.states.nbytes
                self.peak = max(self.peak, self.held)
        return found

    def _complete(self, sample: _Sample) -> None:
        request = sample.request
        del self.open[request.shard, request.place]
        shard = self.shards.setdefault(request.shard, _Shard(request.count))
        shard.complete[request.place] = sample
        if len(shard.complete) == shard.count:
            self.full.put((request.shard, self.shards.pop(request.shard)))

    def _write_all(self) -> None:
        while True:
            number, shard = self.full.get()
            try:
                self._write(number, [shard.complete[place] for place in range(shard.count)])
            except Exception as error:  # whatever it is, the run has to hear of it
                told = json.dumps({"reason": str(error), "type": type(error).__name__})
                write_atomic(failure_file(self.workspace.path, self.part), told.encode())
                return
            with self.lock:
                self.held -= sum(sample.states.nbytes for sample in shard.complete.values())

    def _write(self, number: int, samples: list[_Sample]) -> None:
        ids = [sample.request.sample_id for sample in samples]
        check_finite(ids, [sample.states for sample in samples], self.layout.layers)
        named = [(sample_id, sample.states) for sample_id, sample in zip(ids, samples, strict=True)]
        figures = json.dumps({"peak_bytes": self.peak, "layers": list(self.layout.layers)})
        write_atomic(figures_file(self.workspace.path, self.part), figures.encode())
        if number == CHECK:
            path = check_file(self.workspace.path, self.part)
            draft = path.with_suffix(".part")
            write_shard(draft, self.layout, named)
            draft.rename(path)
            return
        name = shard_name(number, self.part, self.parts)
        with self.workspace.shard(name) as path:
            write_shard(path, self.layout, named)
            tokens = sum(sample.request.length for sample in samples)
            self.workspace.facts(name, samples=len(samples), tokens=tokens)
