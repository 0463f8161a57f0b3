"""The `drafter` stage: target, tokens, vocabulary and hidden states in; a trained drafter out.

Output: `drafter.safetensors` (fp32, names as vLLM reads them), `drafter.json` (its shape), `metrics.jsonl` (a line each
`training.log_steps` steps), `validation.json` (a few samples that were held out of the training, chosen by their ids).
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from torchspec_core.data.tokenset import TokenSet
from torchspec_core.errors import UserError
from torchspec_core.kinds import KINDS
from torchspec_core.stages.job import Job
from torchspec_core.store.files import StateSet
from torchspec_core.store.remote import RemoteStates, open_states
from torchspec_core.targets.engine import DTYPES, load_embedding, load_head, set_threads
from torchspec_core.targets.facts import TargetFacts, read_facts
from torchspec_core.training.batch import IndexBuilder, PackedBatch, Sample, pack
from torchspec_core.training.loop import METRICS, LoopSettings, Report, train
from torchspec_core.training.memory import keep_freed_memory
from torchspec_core.training.method import Method, Setup
from torchspec_core.training.optimizer import OptimizerSettings
from torchspec_core.training.plan import Batch, PlannedStep, plan_epoch, plan_steps
from torchspec_core.training.start import warm_start

_log = logging.getLogger("torchspec.training")
_HELD_OUT_EACH, _HELD_OUT_MOST = 32, 64
WEIGHTS, CONFIG, VALIDATION = "drafter.safetensors", "drafter.json", "validation.json"


@dataclass(frozen=True)
class StateSamples:
    """Samples whose tokens and states are at rest; `places` are indices into the token set."""

    tokens: TokenSet
    states: StateSet
    places: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        """[samples] tokens."""
        return self.tokens.lengths[self.places]

    def get(self, i: int) -> Sample:
        """Sample i: views of the mapped files."""
        row = self.tokens.get(int(self.places[i]))
        *aux, last = self.states.get(row.sample_id).values()
        return Sample(row.input_ids, row.loss_mask, tuple(aux), last, row.sample_id)

    def expect(self, batch: Batch) -> None:
        """Samples that will be asked for next: those that lie elsewhere are read in the background."""
        if isinstance(self.states, RemoteStates):
            self.states.ahead([self.tokens.sample_ids[int(self.places[i])] for i in batch])


def hold_out(sample_ids: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """(training places, validation places): one sample in 32, 64 at most, by the smallest hashes of their ids.

    A sample's side depends on ids alone, so it does not move when a run is repeated with other settings.
    """
    order = sorted(range(len(sample_ids)), key=lambda i: hashlib.blake2b(sample_ids[i].encode()).digest())
    count = min(_HELD_OUT_MOST, max(1, len(order) // _HELD_OUT_EACH))
    held = np.sort(np.asarray(order[:count], dtype=np.int64))
    return np.setdiff1d(np.arange(len(order)), held), held


def loop_settings(training: dict[str, Any], runtime: dict[str, Any]) -> LoopSettings:
    """The recipe's `training` section, identity and runtime sides, as the loop takes it."""
    optimizer = OptimizerSettings(
        training["optimizer"],
        training["lr"],
        training["muon_lr"],
        training["weight_decay"],
        tuple(training["betas"]),
        training["clip"],
    )
    return LoopSettings(
        optimizer=optimizer,
        schedule=training["schedule"],
        warmup=training["warmup"],
        decay=training["decay"],
        dtype=DTYPES[training["dtype"]],
        ema=training["ema"],
        checkpoint_seconds=runtime["checkpoint_seconds"],
        validate_steps=training["validate_steps"],
        patience=training["patience"],
        keep_best=training["keep"] == "best",
        log_steps=runtime["log_steps"],
    )


@dataclass(frozen=True)
class Prepared:
    """Everything before the first step: the inputs opened and checked, the drafter made, the steps planned."""

    settings: LoopSettings
    source: StateSamples
    held: StateSamples
    method: Method
    plan: list[PlannedStep]


def prepare(job: Job) -> Prepared:
    """Open and check what the stage reads.

    Raises:
        UserError: states or vocabulary that do not belong to the tokens or the recipe; a sample longer than a step.
    """
    keep_freed_memory()
    set_threads(job.runtime["run"]["threads"])
    training, seed = job.params["training"], job.params["run"]["seed"]
    settings = loop_settings(training, job.runtime["training"])
    facts = read_facts(job.inputs["target"])
    head = load_head(job.inputs["target"], settings.dtype)
    kept = _kept_tokens(job.inputs["vocabulary"] / "t2d.npy", job.params["drafter"]["draft_vocab_size"], facts)
    source, held = _samples(job, facts)
    embedding = load_embedding(job.inputs["target"], settings.dtype)
    setup = Setup(job.params["drafter"], training, seed, facts, tuple(source.states.layers[:-1]), embedding, head, kept)
    kind = KINDS[job.params["drafter"]["kind"]]
    method: Method = kind.part("training")(setup)
    if training["start"] is not None:
        warm_start(method.drafter, method.config, kind, Path(training["start"]).expanduser(), facts)
    plan = plan_steps(source.lengths, seed, training["epochs"], training["tokens_per_step"], training["batching"])
    return Prepared(settings, source, held, method, plan)


def build(job: Job) -> None:
    """Train and write the drafter; a killed run continues at its last checkpoint.

    Raises:
        UserError: as `prepare`.
    """
    if job.workspace.done(WEIGHTS) and job.workspace.done(VALIDATION):
        return
    made = prepare(job)
    settings, source, held, method, plan = made.settings, made.source, made.held, made.method, made.plan
    drafter = method.drafter
    batches = _validation_batches(
        held, job.params["training"]["tokens_per_step"], method.validation_index or method.index, settings.dtype
    )

    def check(drafter: Any) -> dict[str, float]:
        return method.validate(drafter, batches)

    scratch = job.workspace.scratch("checkpoint")
    parameters = sum(p.numel() for p in drafter.parameters())
    _log.info(
        "%d samples, %d held out, %d steps, %d parameters", len(source.places), len(held.places), len(plan), parameters
    )
    trained = train(
        drafter, method.objective, method.index, source, plan, settings, scratch, partial(_report, job), check,
        source.expect,
    )  # fmt: skip
    metrics, config = check(drafter), method.config
    if method.calibrate is not None:
        config, errors = method.calibrate(drafter, batches)
        metrics |= errors
    names = [name for name, _ in drafter.named_parameters()]
    tensors = {name: weight.contiguous() for name, weight in zip(names, trained.weights, strict=True)}
    with job.workspace.shard(METRICS) as path:
        shutil.copyfile(scratch / METRICS, path)
    with job.workspace.shard(CONFIG) as path:
        path.write_text(json.dumps(config.to_json(), indent=1))
    with job.workspace.shard(WEIGHTS) as path:
        save_file(tensors, path, metadata={"format": "pt"})
    with job.workspace.shard(VALIDATION) as path:
        path.write_text(json.dumps({**metrics, "samples": len(held.places)}, indent=1))
    job.workspace.record(
        rows=trained.steps,
        steps=trained.steps,
        weights_of_step=trained.best,
        samples=len(source.places),
        parameters=parameters,
        tokens=int(sum(source.lengths[list(step.batches[0])].sum() for step in plan[: trained.steps])),
        estimated_acceptance_length=metrics["estimated_acceptance_length"],
        acc_0=metrics["acc_0"],
    )


def _kept_tokens(path: Path, size: int, facts: TargetFacts) -> Tensor:
    """[V_d] int64 ascending target ids of the draft vocabulary."""
    in_vocabulary = np.load(path)
    if in_vocabulary.shape != (facts.vocab_size,) or int(in_vocabulary.sum()) != size:
        raise UserError(
            f"{path} keeps {int(in_vocabulary.sum())} of {len(in_vocabulary)} tokens, not the {size} of "
            f"drafter.draft_vocab_size out of the target's {facts.vocab_size}: delete that folder and run again"
        )
    return torch.from_numpy(np.flatnonzero(in_vocabulary))


def _samples(job: Job, facts: TargetFacts) -> tuple[StateSamples, StateSamples]:
    """(training, validation) samples; states that do not fit the tokens are refused before the first step."""
    tokens = TokenSet(job.inputs["tokens"])
    settings = job.runtime["store"]
    states = open_states(job.inputs["states"], settings["verify"], settings["cache_mib"] << 20)
    lengths = dict(zip(states.ids, states.lengths.tolist(), strict=True))
    wrong = [i for i, n in zip(tokens.sample_ids, tokens.lengths.tolist(), strict=True) if lengths.get(i) != n]
    if wrong:
        raise UserError(
            f"{states.path} has no states of the right length for {len(wrong)} samples (first: {wrong[0]}): "
            "delete that folder and run again"
        )
    if states.hidden_size != facts.hidden_size or states.layers[-1] != facts.final_layer:
        raise UserError(
            f"{states.path} holds states of width {states.hidden_size} and final layer {states.layers[-1]}, the target "
            f"has width {facts.hidden_size} and final layer {facts.final_layer}: they come from another target"
        )
    if len(tokens) < 2:
        raise UserError(
            f"{tokens.folder} holds {len(tokens)} sample(s); training needs two at least: raise data.prompts.rows"
        )
    chosen, held = hold_out(tokens.sample_ids)
    return StateSamples(tokens, states, chosen), StateSamples(tokens, states, held)


def _validation_batches(
    held: StateSamples, tokens_per_step: int, index: IndexBuilder, dtype: torch.dtype
) -> list[PackedBatch]:
    plan = plan_epoch(held.lengths, 0, 0, tokens_per_step)
    return [pack([held.get(i) for i in step.batches[0]], index, dtype) for step in plan]


def _report(job: Job, report: Report) -> None:
    numbers = report.numbers
    job.progress.update(
        report.step,
        report.steps,
        unit="steps",
        message=f"loss {numbers['loss']:.3f}",
        loss=numbers["loss"],
        acc_0=numbers["acc_0"],
        supervised_per_second=numbers["supervised_per_second"],
        padding=numbers["padding"],
        skipped=numbers["skipped"],
    )
