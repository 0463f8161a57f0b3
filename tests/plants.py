"""Faults that a nightly gate must name, planted from outside: stage bodies that break one thing and run the real one.

`PLANTS` says which stage each replaces. None of the product's code knows of them: a test
puts them in the place of the stage's function.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from torchspec_core.stages.job import Job


@dataclass(frozen=True)
class Plant:
    """stage: whose body is replaced; function: by what; gates: of which at least one must fail."""

    stage: str
    function: str
    gates: frozenset[str]


def learning_rate_times_ten(job: Job) -> None:
    """`training.lr` and `training.muon_lr` ten times too large."""
    from torchspec_core.training import stage

    training = dict(job.params["training"])
    training |= {name: 10 * training[name] for name in ("lr", "muon_lr")}
    stage.build(dataclasses.replace(job, params={**job.params, "training": training}))


@contextmanager
def _shifted_answers() -> Iterator[None]:
    from torchspec_core.data import shards

    parse = shards.parse_answer

    def shifted(*arguments: Any) -> Any:
        sample = parse(*arguments)
        first, *rest = sample.rendered.runs
        runs = [first + 1, rest[0] - 1, *rest[1:]]
        return dataclasses.replace(sample, rendered=dataclasses.replace(sample.rendered, runs=runs))

    with mock.patch.object(shards, "parse_answer", shifted):
        yield


def mask_off_by_one(job: Job) -> None:
    """The loss mask of each sample begins a token late. Without Dask, whose workers would not see the patch."""
    from torchspec_core.data import tokens

    with _shifted_answers():
        tokens.build(dataclasses.replace(job, runtime={**job.runtime, "data": {**job.runtime["data"], "workers": 0}}))


def layers_off_by_one(job: Job) -> None:
    """The states of the layers below the right ones are stored under the right ones' names."""
    from torchspec_core.capture import transformers_engine as engine

    taps = engine.residual_taps

    @contextmanager
    def below(model: Any, facts: Any, layers: tuple[int, ...]) -> Iterator[Mapping[int, Any]]:
        with taps(model, facts, tuple(layer - 1 for layer in layers)) as taken:
            yield _Shifted(taken)

    with (
        mock.patch.object(engine, "residual_taps", below),
        mock.patch.object(engine.TransformersCapture, "self_check", lambda *_: None),
    ):
        from torchspec_core.capture import states

        states.build(job)


class _Shifted(dict[int, Any]):
    """`taken` read one layer below."""

    def __init__(self, taken: dict[int, Any]) -> None:
        super().__init__()
        self.taken = taken

    def __getitem__(self, layer: int) -> Any:
        return self.taken[layer - 1]


def final_norm_dropped(job: Job) -> None:
    """The teacher's logits come from the final state as it is, not from the normed one."""
    from torchspec_core.objectives import eagle3
    from torchspec_core.training import stage

    with mock.patch.object(eagle3, "rms_norm", lambda states, *_: states):
        stage.build(job)


def resume_forgets_the_optimizer(job: Job) -> None:
    """A run that goes on from a checkpoint starts with an empty optimiser state."""
    from torchspec_core.training import loop, stage

    make = loop.make_optimizer

    def forgetful(*arguments: Any) -> Any:
        optimizer = make(*arguments)
        optimizer.load = lambda _: None  # type: ignore[method-assign]
        return optimizer

    with mock.patch.object(loop, "make_optimizer", forgetful):
        stage.build(job)


def steps_twice_as_slow(job: Job) -> None:
    """Each step waits as long as it took."""
    from torchspec_core.training import loop, stage

    load = loop._load
    began: list[float] = []

    def slowly(*arguments: Any) -> Any:
        if began:
            time.sleep(time.monotonic() - began[-1])
        began.append(time.monotonic())
        return load(*arguments)

    with mock.patch.object(loop, "_load", slowly):
        stage.build(job)


def _plant(stage: str, body: Callable[[Job], None], *gates: str) -> Plant:
    return Plant(stage, f"tests.plants:{body.__name__}", frozenset(gates))


PLANTS: Mapping[str, Plant] = {
    "lr-times-10": _plant("drafter", learning_rate_times_ten, "loss"),
    "mask-off-by-one": _plant("tokens", mask_off_by_one, "mask"),
    "layers-off-by-one": _plant("states", layers_off_by_one, "layers"),
    "final-norm-dropped": _plant("drafter", final_norm_dropped, "loss"),
    "resume-broken": _plant("drafter", resume_forgets_the_optimizer, "resume"),
    "step-twice-as-slow": _plant("drafter", steps_twice_as_slow, "throughput"),
}
