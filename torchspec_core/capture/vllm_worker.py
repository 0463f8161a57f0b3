"""vLLM's worker with the capture inside: named to the engine as `worker_cls`, so stock vLLM runs unchanged.

Each worker of a pipeline registers hooks on the decoder layers that it owns and puts their states together itself
(`StageCapture`). Of a tensor-parallel group the first rank captures: the residual stream is the same on all.
Facts of vLLM 0.32.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn
from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank
from vllm.distributed.utils import get_pp_indices
from vllm.platforms import current_platform

from torchspec_core.capture.stage import StageCapture
from torchspec_core.store.format import Layout
from torchspec_core.targets.vllm_cpu import CAPTURE_CONFIG

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as Worker
else:
    from vllm.v1.worker.gpu_worker import Worker


def owned_layers(layers: tuple[int, ...], num_layers: int, stages: int) -> list[tuple[int, ...]]:
    """Of the wanted layers those of each stage, in their order."""
    bounds = [get_pp_indices(num_layers, rank, stages) for rank in range(stages)]
    return [tuple(layer for layer in layers if start <= layer < end) for start, end in bounds]


def _decoder_layers(model: nn.Module, num_layers: int) -> nn.ModuleList:
    found = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == num_layers]
    if len(found) != 1:
        raise ValueError(
            f"{type(model).__name__}: {len(found)} module lists of {num_layers} layers found, expected one; vLLM's "
            "form of this model cannot be captured: use capture.engine=transformers"
        )
    return found[0]


class CaptureWorker(Worker):
    """A worker that captures; see the module."""

    stage: StageCapture | None = None

    def load_model(self, **options: Any) -> None:
        """Load as ever, then hook the layers."""
        super().load_model(**options)
        settings = self.vllm_config.additional_config[CAPTURE_CONFIG]
        wanted, num_layers, group = tuple(settings["layers"]), settings["num_layers"], get_pp_group()
        owned = owned_layers(wanted, num_layers, group.world_size)
        mine = owned[group.rank_in_group]
        if not mine or get_tensor_model_parallel_rank() != 0:
            return
        writers = [rank for rank, layers in enumerate(owned) if layers]
        layers = _decoder_layers(self.get_model(), num_layers)
        self.stage = StageCapture(
            Path(settings["workspace"]), Layout(mine, settings["hidden_size"], settings["dtype"]),
            writers.index(group.rank_in_group), len(writers), {layer: layers[layer] for layer in mine},
        )  # fmt: skip

    def compile_or_warm_up_model(self) -> Any:
        """Also make the buffers that a later stage receives into: on CPU only a warm-up pass, which eager mode skips,
        would make them."""
        found = super().compile_or_warm_up_model()
        runner = self.model_runner
        if not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
            runner.intermediate_tensors = self.get_model().make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )
        return found

    def execute_model(self, scheduler_output: Any) -> Any:
        """Run the step, then take its rows."""
        output = super().execute_model(scheduler_output)
        if self.stage is not None and scheduler_output.total_num_scheduled_tokens:
            cached = scheduler_output.scheduled_cached_reqs
            starts = {new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs}
            starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
            scheduled = scheduler_output.num_scheduled_tokens
            self.stage.take((name, starts[name], scheduled[name]) for name in self.model_runner.input_batch.req_ids)
        return output
