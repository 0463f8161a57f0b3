"""Stage `states`: every token sample through the target once, its hidden states into shards.

Shards are planned from the token lengths before anything runs, so an interrupted run skips the sealed ones and
repeats at most one. Memory holds one shard and one batch. The index is rebuilt from the shards' own headers at the
end.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from torchspec_core.capture.plan import shard_plan, token_batches
from torchspec_core.capture.transformers_engine import TransformersCapture
from torchspec_core.data.tokenset import TokenSet
from torchspec_core.errors import StageError, UserError
from torchspec_core.stages.job import Job
from torchspec_core.store.files import INDEX, shard_name, write_index
from torchspec_core.store.format import Entry, Layout, read_shard_entries, write_shard
from torchspec_core.targets.facts import captured_layers, read_facts

_log = logging.getLogger("torchspec.capture")
_CHECK_ROWS = 3


def build(job: Job) -> None:
    """Reads `tokens` and `target`, writes `states-*.safetensors` and `index.arrow`.

    Raises `StageError` naming the sample whose states are not finite, or when the engine fails its self-check.
    """
    capture, runtime = job.params["capture"], job.runtime["capture"]
    target = job.inputs["target"]
    facts = read_facts(target)
    layers = captured_layers(facts, capture["layers"])
    layout = Layout(layers, facts.hidden_size, capture["dtype"])
    tokens = TokenSet(job.inputs["tokens"])
    lengths = np.asarray(tokens.lengths)
    _check_lengths(lengths, facts.max_position_embeddings, runtime["token_budget"])
    plan = shard_plan(lengths, layout.bytes_per_token, capture["shard_mib"] << 20)
    job.workspace.expect(len(plan) + 1)

    missing = [number for number in range(len(plan)) if job.workspace.done(shard_name(number)) is None]
    total = int(lengths.sum())
    done = total - sum(int(lengths[plan[number]].sum()) for number in missing)
    padded = 0
    if missing:
        engine = TransformersCapture(target, layers, capture["dtype"], job.runtime["run"]["threads"])
        engine.self_check([tokens.get(int(i)).input_ids for i in _check_rows(lengths)])
        started = time.monotonic()
        for number in missing:
            done, padded = _write(job, engine, layout, tokens, plan[number], number, (done, total, padded))
        captured = sum(int(lengths[plan[number]].sum()) for number in missing)
        seconds = time.monotonic() - started
        _log.info(
            "captured %d tokens in %.1f s, %.0f tokens/s, %.1f%% padding",
            captured,
            seconds,
            captured / seconds,
            100 * (1 - captured / padded),
        )
        job.workspace.record(tokens_per_second=round(captured / seconds, 1), padding=round(1 - captured / padded, 4))
    if job.workspace.done(INDEX) is None:
        with job.workspace.shard(INDEX) as path:
            rows = write_index(path, layout, [_entries(job, number) for number in range(len(plan))])
            job.workspace.facts(INDEX, rows=rows)
    job.workspace.record(rows=len(tokens), tokens=total, layers=",".join(map(str, layers)), final_state="prenorm")


def _check_lengths(lengths: np.ndarray, limit: int, token_budget: int) -> None:
    if not len(lengths):
        raise UserError(
            "There are no token samples to capture: every row was rejected, see rejected.jsonl of the tokens stage."
        )
    longest = int(lengths.max())
    if longest > limit:
        raise UserError(
            f"data.max_length: a sample has {longest} tokens, but the target takes {limit}; set it to {limit} or less."
        )
    if longest > token_budget:
        raise UserError(
            f"capture.token_budget is {token_budget}, but a sample has {longest} tokens; set it to {longest} or more."
        )


def _check_rows(lengths: np.ndarray) -> list[int]:
    """A few rows of unequal length for the self-check: short ones, so that it stays cheap, and padding occurs."""
    order = np.argsort(lengths, kind="stable")
    return sorted({int(order[len(order) * part // 100]) for part in (5, 15, 25)})[:_CHECK_ROWS]


def _entries(job: Job, number: int) -> list[Entry]:
    return read_shard_entries(job.workspace.path / shard_name(number))[1]


def _write(
    job: Job,
    engine: TransformersCapture,
    layout: Layout,
    tokens: TokenSet,
    rows: np.ndarray,
    number: int,
    counts: tuple[int, int, int],
) -> tuple[int, int]:
    """Captures and seals one shard; returns the tokens done so far and the padded tokens computed so far."""
    done, total, padded = counts
    lengths = np.asarray(tokens.lengths)
    name = shard_name(number)
    samples: list[tuple[str, Tensor]] = []
    for batch in token_batches(rows, lengths, job.runtime["capture"]["token_budget"]):
        taken = [tokens.get(int(i)) for i in batch]
        states = engine.states([row.input_ids for row in taken])
        check_finite([row.sample_id for row in taken], states, engine.layers)
        samples += [(row.sample_id, state) for row, state in zip(taken, states, strict=True)]
        done += int(lengths[batch].sum())
        padded += len(batch) * int(lengths[batch].max())
        job.progress.update(done, total, unit="tokens", message=name)
    with job.workspace.shard(name) as path:
        write_shard(path, layout, samples)
        job.workspace.facts(name, samples=len(samples), tokens=int(lengths[rows].sum()))
    return done, padded


def check_finite(sample_ids: Sequence[str], states: Sequence[Tensor], layers: tuple[int, ...]) -> None:
    """Raises `StageError` naming the first sample and layer with a NaN or an infinity in `states[layers, T, H]`."""
    for sample_id, state in zip(sample_ids, states, strict=True):
        finite = state.isfinite().flatten(1).all(1)
        if not finite.all():
            layer = layers[int((~finite).nonzero()[0])]
            raise StageError(
                f"sample {sample_id}: the hidden state of layer {layer} holds NaN or infinity; "
                f"set capture.dtype=float32, or look at this sample's tokens."
            )
