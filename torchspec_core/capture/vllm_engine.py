"""Capture with vLLM: requests in the order of the plan, one token each, as many at once as the budget allows.

The engine only prefills. What its stages hold and have not written yet is bounded by what is admitted here: a sample is
admitted when its states still fit into `buffer_mib` beside those of all shards that are not sealed. Whole shards are
admitted in order and the buffer holds two, so the next one can always be completed.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchspec_core.capture.stage import CHECK, SCRATCH, RequestId, check_file, failure_file, figures_file
from torchspec_core.capture.transformers_engine import TransformersCapture
from torchspec_core.capture.work import CaptureWork
from torchspec_core.errors import StageError, UserError
from torchspec_core.store.files import shard_name
from torchspec_core.targets.engine import load_head
from torchspec_core.targets.facts import read_facts
from torchspec_core.targets.vllm_cpu import make_capture_llm

_PAUSE, _STALLED_SECONDS = 0.002, 300.0
# Relative to the layer's norm. Engines order their sums differently; another layer's state is off by a tenth or more.
_TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}
_SMALL_TARGET_BYTES = 8 << 30  # whose values are compared with a plain forward pass


@dataclass(frozen=True)
class EngineSettings:
    """The runtime side of the recipe's `capture` section."""

    pipeline_parallel: int = 1
    tensor_parallel: int = 1
    token_budget: int = 2048
    outstanding: int = 32
    buffer_mib: int = 512
    kv_cache_gib: int = 1
    threads: int = 0


@dataclass
class _Flow:
    """What is under way: requests in the engine, and bytes of each shard that are admitted and not sealed."""

    queue: Iterator[tuple[RequestId, list[int]]]
    live: dict[str, RequestId] = field(default_factory=dict)
    unsealed: dict[int, int] = field(default_factory=dict)
    first_tokens: dict[int, int] = field(default_factory=dict)
    ahead: tuple[RequestId, list[int]] | None = None


class VllmCapture:
    """A vLLM engine whose workers capture (`vllm_worker`).

    Raises `UserError` when vLLM is not installed, refuses the target, or the buffer is too small.
    """

    def __init__(self, folder: Path, work: CaptureWork, settings: EngineSettings) -> None:
        self.folder, self.work, self.settings = folder, work, settings
        self.facts = read_facts(folder)
        layout = work.layout
        self.budget = settings.buffer_mib << 20
        largest = max(int(work.lengths[rows].sum()) for rows in work.plan.values()) * layout.bytes_per_token
        if self.budget < 2 * largest:
            raise UserError(
                f"capture.buffer_mib is {settings.buffer_mib}, but two shards of up to {largest / 2**20:.0f} MiB have "
                f"to fit: set it to {-(-2 * largest // 2**20)} or more, or lower capture.shard_mib"
            )
        scratch = work.workspace.scratch(SCRATCH)
        shutil.rmtree(scratch)
        scratch.mkdir()
        config = {
            "workspace": str(work.workspace.path), "layers": list(layout.layers), "dtype": layout.dtype,
            "hidden_size": layout.hidden_size, "num_layers": self.facts.num_layers,
        }  # fmt: skip
        work.report(work.done, work.total, "starting vLLM")
        self.llm: Any = make_capture_llm(
            folder, layout.dtype, int(work.lengths.max()) + 1, settings.outstanding, settings.token_budget,
            settings.pipeline_parallel, settings.tensor_parallel, settings.kv_cache_gib, settings.threads, config,
        )  # fmt: skip

        from torchspec_core.capture.vllm_worker import owned_layers

        owned = owned_layers(layout.layers, self.facts.num_layers, settings.pipeline_parallel)
        self.parts = sum(bool(layers) for layers in owned)

    def capture(self, work: CaptureWork) -> dict[str, float | int | str]:
        """Write the missing shards."""
        flow = _Flow(self._requests(work))
        self._run(flow, self._is_sealed, work)
        figures = [json.loads(path.read_text()) for path in self._stage_files(figures_file)]
        return {
            "pipeline_stages": self.settings.pipeline_parallel,
            "buffer_peak_mib": round(sum(f["peak_bytes"] for f in figures) / 2**20, 1),
        }

    def _is_sealed(self, number: int) -> bool:
        names = (shard_name(number, part, self.parts) for part in range(self.parts))
        return all(self.work.workspace.done(name) is not None for name in names)

    def prefill(self, work: CaptureWork) -> None:
        """Run the missing samples through the target and wait for no file: for measuring the engine alone."""
        self._run(_Flow(self._requests(work)), lambda number: True, work)

    def close(self) -> None:
        """End the engine and its workers."""
        self.llm.llm_engine.engine_core.shutdown()

    def self_check(self, samples: Sequence[np.ndarray]) -> None:
        """A few rows through the engine: norm and head on the final state give the token that the engine chose, and all
        layers are those of a plain forward pass (for targets of at most 8 GiB)."""
        requests = [
            (RequestId(CHECK, place, len(samples), len(ids), f"check{place}"), ids.tolist())
            for place, ids in enumerate(samples)
        ]
        flow = _Flow(iter(requests))
        self._run(flow, lambda number: len(self._stage_files(check_file)) == self.parts, None)
        states = self._check_states(len(samples))
        self._check_tokens(states, flow.first_tokens)
        weights = sum(path.stat().st_size for path in self.folder.glob("*.safetensors"))
        if weights <= _SMALL_TARGET_BYTES:
            self._check_values(samples, states)

    def _stage_files(self, place: Any) -> list[Path]:
        paths = [place(self.work.workspace.path, part) for part in range(self.parts)]
        return [path for path in paths if path.exists()]

    def _check_states(self, samples: int) -> list[Tensor]:
        """[layers, T, H] of each row of the check."""
        from safetensors.torch import load_file

        found: dict[str, Tensor] = {}
        for path in self._stage_files(check_file):
            found |= load_file(path)
        return [
            torch.stack([found[f"check{place}.{layer}"] for layer in self.work.layout.layers])
            for place in range(samples)
        ]

    def _check_tokens(self, states: list[Tensor], chosen: dict[int, int]) -> None:
        head = load_head(self.folder, states[0].dtype)
        for place, state in enumerate(states):
            scores = head.logits(state[-1, -1]).float()
            gap = float(scores.max() - scores[chosen[place]])
            if gap > 64 * torch.finfo(state.dtype).eps * float(scores.abs().max()):
                raise StageError(
                    f"capture self-check: norm and head on the state of layer {self.facts.final_layer} give token "
                    f"{int(scores.argmax())}, vLLM's own next token is {chosen[place]} ({gap:.3g} lower): what was "
                    "captured is not the state before the target's final norm"
                )

    def _check_values(self, samples: Sequence[np.ndarray], states: list[Tensor]) -> None:
        layers, dtype = self.work.layout.layers, self.work.layout.dtype
        plain = TransformersCapture(self.folder, layers, dtype).states(samples)
        for ours, theirs in zip(states, plain, strict=True):
            for layer, mine, other in zip(layers, ours.float(), theirs.float(), strict=True):
                difference = float((mine - other).norm() / other.norm())
                if difference > _TOLERANCE[dtype]:
                    raise StageError(
                        f"capture self-check: the state of layer {layer} differs by {difference:.2g} of its norm from "
                        f"that of a plain forward pass, more than {_TOLERANCE[dtype]:g}: vLLM runs another model than "
                        "the target's folder holds, or hands out other layers"
                    )

    def _requests(self, work: CaptureWork) -> Iterator[tuple[RequestId, list[int]]]:
        for number in work.missing:
            rows = work.plan[number]
            for place, i in enumerate(rows):
                row = work.row(i)
                ids = row.input_ids.tolist()
                yield RequestId(number, place, len(rows), len(ids), row.sample_id), ids

    def _run(self, flow: _Flow, sealed: Any, work: CaptureWork | None) -> None:
        """Admit, step, and watch the shards being sealed, until all are."""
        moved = time.monotonic()
        while True:
            self._admit(flow)
            if not flow.live and not flow.unsealed:
                return
            progress = False
            for output in self._step() if flow.live else ():
                if not output.finished:
                    continue
                request = flow.live.pop(output.request_id)
                flow.first_tokens[request.place] = int(output.outputs[0].token_ids[0])
                progress = True
                if work is not None:
                    work.advance(request.length, f"{len(flow.live)} requests in vLLM")
            done = [number for number in flow.unsealed if sealed(number)]
            for number in done:
                del flow.unsealed[number]
            self._check_failures()
            if progress or done:
                moved = time.monotonic()
            elif not flow.live:
                time.sleep(_PAUSE)
            if time.monotonic() - moved > _STALLED_SECONDS:
                raise StageError(
                    f"vLLM and its writers did nothing for {_STALLED_SECONDS:.0f} s with {len(flow.live)} requests and "
                    f"{len(flow.unsealed)} shards open; run the same command again"
                )

    def _step(self) -> list[Any]:
        try:
            return list(self.llm.llm_engine.step())
        except Exception:
            self._check_failures()  # knows the reason, if a worker is gone
            raise

    def _admit(self, flow: _Flow) -> None:
        from vllm import SamplingParams

        while len(flow.live) < self.settings.outstanding:
            entry = flow.ahead or next(flow.queue, None)
            flow.ahead = None
            if entry is None:
                return
            request, ids = entry
            size = request.length * self.work.layout.bytes_per_token
            if request.shard != CHECK and sum(flow.unsealed.values()) + size > self.budget:
                flow.ahead = entry
                return
            flow.unsealed[request.shard] = flow.unsealed.get(request.shard, 0) + size
            flow.live[str(request)] = request
            params = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
            self.llm.llm_engine.add_request(str(request), {"prompt_token_ids": ids}, params)

    def _check_failures(self) -> None:
        for path in self._stage_files(failure_file):
            told = json.loads(path.read_text())
            kind = UserError if told["type"] == "UserError" else StageError
            raise kind(told["reason"])
        if getattr(self.llm.llm_engine.model_executor, "is_failed", False):
            raise StageError(
                "a worker of vLLM died, its last words are in the log; run the same command again: it goes on at the "
                "first shard that is not sealed"
            )
