"""The vocabulary stage: which target tokens the drafter can propose.

A drafter with a small head is faster, but can never propose a token that its vocabulary lacks. The supervised tokens
of a small run do not cover the tail of the distribution, so they are counted together with the answers of raw
conversations: the on-policy counts are scaled to the raw total, so both weigh the same and the raw ones order what
on-policy text lacks. Tokens that end a turn, and special tokens that occur in supervised text, are always in.

Training that goes on from an exported drafter keeps that drafter's vocabulary.
"""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer

from torchspec_core.data.overlap import OverlapIndex
from torchspec_core.data.prompts import prompt_of
from torchspec_core.data.render import eos_token_ids, load_tokenizer, target_vocab_size
from torchspec_core.data.sources import Conversation, read_conversations
from torchspec_core.data.tokenset import TokenSet
from torchspec_core.errors import UserError

if TYPE_CHECKING:
    from torchspec_core.stages.job import Job

log = logging.getLogger("torchspec.data")

Counts = NDArray[np.int64]
_BATCH = 256


def count_supervised(tokens: TokenSet, vocab_size: int) -> tuple[Counts, Counts]:
    """How often each id [V] is supervised, in the samples at even places and in those at odd places."""
    halves = np.zeros((2, vocab_size), dtype=np.int64)
    for i in range(len(tokens)):
        row = tokens.get(i)
        ids, counts = np.unique(row.input_ids[row.loss_mask], return_counts=True)
        halves[i % 2, ids] += counts
    return halves[0], halves[1]


def raw_answers(rows: int, heldout: OverlapIndex) -> Iterator[list[str]]:
    """The assistant turns of each of the first `rows` usable ShareGPT conversations, held-out prompts left out."""
    usable = (c for c in read_conversations("sharegpt") if isinstance(c, Conversation))
    fresh = (c for c in usable if heldout.match(prompt_of(c)) is None)
    for conversation in itertools.islice(fresh, rows):
        yield [m.content for m in conversation.messages if m.role == "assistant"]


def count_texts(texts: Iterable[str], tokenizer: Tokenizer, vocab_size: int) -> Counts:
    """How often each id [V] occurs in the texts."""
    total = np.zeros(vocab_size, dtype=np.int64)
    for encoded in tokenizer.encode_batch_fast(list(texts), add_special_tokens=False):
        total += np.bincount(encoded.ids, minlength=vocab_size)[:vocab_size]
    return total


def choose(on_policy: Counts, raw: Counts, size: int, always: Iterable[int] = ()) -> Counts:
    """The `size` ids to keep, ascending int64.

    First those of `always`, then by on-policy count scaled to the raw total plus raw count; equal ones, and ids that
    never occur, by the smaller id. `size` >= V keeps every id.
    """
    vocab_size = len(on_policy)
    if size >= vocab_size:
        return np.arange(vocab_size, dtype=np.int64)
    scale = max(1, int(raw.sum())) / max(1, int(on_policy.sum()))
    score = on_policy * scale + raw
    score[list(always)] = np.inf
    best = np.lexsort((np.arange(vocab_size), -score))[:size]
    return np.sort(best).astype(np.int64)


def maps(kept: Counts, vocab_size: int) -> tuple[Counts, NDArray[np.bool_]]:
    """`d2t` int64 [V_d], the offset from a draft id to its target id; `t2d` bool [V], whether a target id is kept."""
    t2d = np.zeros(vocab_size, dtype=np.bool_)
    t2d[kept] = True
    return kept - np.arange(len(kept), dtype=np.int64), t2d


def coverage(counts: Counts, kept: Counts) -> float:
    """Share of the counted tokens whose id is kept."""
    return float(counts[kept].sum() / max(1, int(counts.sum())))


def exported(folder: Path, vocab_size: int) -> Counts:
    """The ids that the drafter of an exported folder drafts, ascending int64. Raises `UserError` for no such folder."""
    weights = folder / "model.safetensors"
    try:
        with safe_open(weights, framework="np") as file:
            offsets = file.get_tensor("d2t").astype(np.int64) if "d2t" in file.keys() else None
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"training.start: {weights} cannot be read ({error}); name a folder of the export stage"
        ) from error
    return np.arange(vocab_size, dtype=np.int64) if offsets is None else offsets + np.arange(len(offsets))


def _always(on_policy: Counts, eos: Iterable[int], tokenizer: Tokenizer) -> list[int]:
    special = [i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special and i < len(on_policy)]
    return sorted({*eos, *(i for i in special if on_policy[i])})


def _heldout(prompts: Path) -> OverlapIndex:
    with (prompts / "heldout.jsonl").open("rb") as file:
        return OverlapIndex(turn for line in file for turn in json.loads(line)["turns"])


def _count_raw(job: Job, rows: int, tokenizer: Tokenizer, vocab_size: int) -> Counts:
    total = np.zeros(vocab_size, dtype=np.int64)
    if not rows:
        return total
    done = 0
    conversations = raw_answers(rows, _heldout(Path(job.inputs["prompts"])))
    while batch := list(itertools.islice(conversations, _BATCH)):
        total += count_texts(itertools.chain.from_iterable(batch), tokenizer, vocab_size)
        done += len(batch)
        job.progress.update(done, rows, unit="conversations")
    return total


def build(job: Job) -> None:
    """The vocabulary stage: `d2t.npy`, `t2d.npy`, and `counts.npy` (int64 [V], supervised tokens by id).

    Metrics: `coverage` = share of the supervised tokens that are in the vocabulary; `coverage_crossfit` = the same on
    one half of the samples with the vocabulary chosen without it, which is what to expect on text not yet seen.
    """
    target = Path(job.inputs["target"])
    vocab_size = target_vocab_size(target)
    size = min(job.params["drafter"]["draft_vocab_size"], vocab_size)
    tokenizer = load_tokenizer(target)
    even, odd = count_supervised(TokenSet(job.inputs["tokens"]), vocab_size)
    on_policy = even + odd
    always = _always(on_policy, eos_token_ids(target, tokenizer), tokenizer)
    start = job.params["training"]["start"]
    rows = job.params["data"]["vocabulary_rows"] if size < vocab_size and start is None else 0
    raw = _count_raw(job, rows, tokenizer, vocab_size)
    if start is None:
        kept = choose(on_policy, raw, size, always)
    else:
        kept = exported(Path(start).expanduser(), vocab_size)
        if len(kept) != size or kept[-1] >= vocab_size:
            raise UserError(
                f"the drafter of training.start={start} drafts {len(kept)} tokens, drafter.draft_vocab_size is {size} "
                f"of the target's {vocab_size}: make them agree or leave training.start out"
            )
    d2t, t2d = maps(kept, vocab_size)
    for name, values in (("d2t.npy", d2t), ("t2d.npy", t2d), ("counts.npy", on_policy)):
        with job.workspace.shard(name) as path, path.open("wb") as file:
            np.save(file, values)
    # A vocabulary that is taken over was chosen without any of these samples.
    pairs = [(kept, on_policy)] if start else [(choose(a, raw, size, always), b) for a, b in ((even, odd), (odd, even))]
    unseen = sum(coverage(counts, chosen) * int(counts.sum()) for chosen, counts in pairs)
    job.workspace.record(
        rows=size, vocab_size=vocab_size, supervised=int(on_policy.sum()), distinct=int(np.count_nonzero(on_policy)),
        raw_tokens=int(raw.sum()), coverage=coverage(on_policy, kept),
        coverage_crossfit=unseen / max(1, int(on_policy.sum())),
    )
    log.info("vocabulary: %d of %d tokens, coverage %.4f", size, vocab_size, coverage(on_policy, kept))
