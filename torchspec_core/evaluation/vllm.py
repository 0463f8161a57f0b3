"""The drafter in a real vLLM: the same prompts with and without it, greedy, then sampled beside it, and the engine's
own counters.

`measure` starts two engines one after the other, in this process; a stage runs it as a child,
`python -m torchspec_core.evaluation.vllm REQUEST.json RESULT.json`, because vLLM takes over threads and memory for
good. vLLM drafts greedily, and its counters count whole steps, tokens after the end of the sequence included.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from torchspec_core.errors import StageError, UserError
from torchspec_core.processes import Supervised
from torchspec_core.targets.vllm_cpu import DraftCounters, draft_counters, make_llm, prepare_environment

LIMIT_S = 1800.0


@dataclass(frozen=True)
class ServingRequest:
    """What to serve. prompts: token ids. target, drafter: folders. threads: 0 = all cores. method: as
    vLLM names the kind of drafter. temperature: of a second, sampled run beside the drafter, at `top_p`, each prompt
    seeded from `seed` and its number; 0 = none."""

    target: str
    drafter: str
    prompts: list[list[int]]
    k: int
    max_new_tokens: int
    dtype: str
    threads: int = 0
    max_num_seqs: int = 64
    method: str = "eagle3"
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class ServingResult:
    """texts: new tokens of each prompt with the drafter; plain: without. counters: vLLM's. seconds: of the two
    generations. sampled, sampled_counters: of the sampled run beside the drafter; empty if none was asked.
    """

    texts: list[list[int]]
    plain: list[list[int]]
    counters: DraftCounters
    seconds: float
    plain_seconds: float
    sampled: list[list[int]] = field(default_factory=list)
    sampled_counters: DraftCounters | None = None

    @property
    def equal(self) -> float:
        """Share of the prompts whose text is the same with and without the drafter."""
        return sum(a == b for a, b in zip(self.texts, self.plain, strict=True)) / max(len(self.plain), 1)


def measure(request: ServingRequest) -> ServingResult:
    """Run both engines in this process; raises UserError where vLLM refuses target or drafter."""
    speculative = {"method": request.method, "model": request.drafter, "num_speculative_tokens": request.k}
    (plain,) = _generate(request, None, [0.0])
    greedy, *more = _generate(request, speculative, [0.0, request.temperature] if request.temperature else [0.0])
    result = ServingResult(greedy.texts, plain.texts, greedy.counters, greedy.seconds, plain.seconds)
    return replace(result, sampled=more[0].texts, sampled_counters=more[0].counters) if more else result


@dataclass(frozen=True)
class _Generated:
    texts: list[list[int]]
    counters: DraftCounters
    seconds: float


def _generate(
    request: ServingRequest, speculative: dict[str, Any] | None, temperatures: Sequence[float]
) -> list[_Generated]:
    """One engine; the prompts once at each temperature."""
    prepare_environment(request.threads)
    from vllm import SamplingParams, TokensPrompt
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    longest = max(len(prompt) for prompt in request.prompts)
    llm = make_llm(
        Path(request.target),
        request.dtype,
        longest + request.max_new_tokens + request.k + 1,
        min(request.max_num_seqs, len(request.prompts)),
        speculative,
        threads=request.threads,
    )
    runs: list[_Generated] = []
    for temperature in temperatures:
        before, started = draft_counters(llm), time.perf_counter()
        outputs = llm.generate(
            [TokensPrompt(prompt_token_ids=prompt) for prompt in request.prompts],
            [
                SamplingParams(
                    temperature=temperature,
                    top_p=request.top_p if temperature else 1.0,
                    seed=request.seed + number if temperature else None,
                    max_tokens=request.max_new_tokens,
                    detokenize=False,
                )
                for number in range(len(request.prompts))
            ],
            use_tqdm=False,
        )
        seconds = time.perf_counter() - started
        texts = [list(output.outputs[0].token_ids) for output in outputs]
        runs.append(_Generated(texts, draft_counters(llm).minus(before), seconds))
    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()
    return runs


def measure_in_child(request: ServingRequest, folder: Path, log: Path) -> ServingResult:
    """`measure` in a supervised child that keeps its request and result in `folder` and its output in `log`."""
    asked, answered = folder / "request.json", folder / "result.json"
    asked.write_text(json.dumps(asdict(request)))
    answered.unlink(missing_ok=True)
    command = [sys.executable, "-m", "torchspec_core.evaluation.vllm", str(asked), str(answered)]
    with Supervised(command, log=log, deadline_s=LIMIT_S) as child:
        status = child.wait()
        if status == 2:
            raise UserError(next(iter(child.tail(1)), f"vLLM refused the drafter; see {log}."))
        if status != 0 or not answered.is_file():
            raise StageError(f"the vLLM run of the evaluation failed: {child.describe_end()}")
    values = json.loads(answered.read_text())
    counters, sampled = (_counters(values.pop(name)) for name in ("counters", "sampled_counters"))
    assert counters is not None
    return ServingResult(**values, counters=counters, sampled_counters=sampled)


def _counters(values: dict[str, Any] | None) -> DraftCounters | None:
    if values is None:
        return None
    return DraftCounters(**{**values, "accepted_by_slot": tuple(values["accepted_by_slot"])})


def main(arguments: Sequence[str]) -> int:
    """Command line: a request file in, a result file out."""
    asked, answered = map(Path, arguments)
    try:
        result = measure(ServingRequest(**json.loads(asked.read_text())))
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    answered.write_text(json.dumps(asdict(result)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
