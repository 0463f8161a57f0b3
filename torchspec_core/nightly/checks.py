"""What a night checks on the sealed stages themselves, by another way than the one that made them. Runs in a child.

Reads `target`, `answers`, `tokens`, `states`; writes `checks.json`: `mask` and `layers` of `gates.EXACT`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from torchspec_core.data.tokenset import TokenSet
from torchspec_core.stages.job import Job
from torchspec_core.store.files import StateSet
from torchspec_core.store.remote import open_states

CHECKS = "checks.json"
_SAMPLES = 6


def emitted(answers: Path) -> Iterator[tuple[str, np.ndarray]]:
    """(sample id, bool [T]) of each answered row: which of its tokens the engine gave out."""
    for path in sorted(answers.glob("answers-*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            parts: list[np.ndarray] = []
            for turn in (row, *row.get("later", ())):
                parts += [np.zeros(len(turn["prompt_ids"]), bool), np.ones(len(turn["answer_ids"]), bool)]
            yield row["sample_id"], np.concatenate(parts)


def mask_share(tokens: TokenSet, answers: Path) -> float:
    """Share of the samples whose loss mask is true exactly where the target's own tokens are (long ones are cut)."""
    places = {sample_id: place for place, sample_id in enumerate(tokens.sample_ids)}
    exact = compared = 0
    for sample_id, wanted in emitted(answers):
        if sample_id in places:
            found = tokens.get(places[sample_id]).loss_mask
            compared += 1
            exact += len(found) <= len(wanted) and bool((found == wanted[: len(found)]).all())
    return exact / compared if compared else 0.0


@torch.no_grad()
def layer_distance(target: Path, tokens: TokenSet, states: StateSet) -> float:
    """Largest |stored - own| / |own| over layers of a few samples; `own` is what transformers returns as hidden states.

    transformers counts the embedding as state 0, so the state after decoder layer j is its number j + 1. It gives the
    last one behind the final norm; there the stored state is normed before it is compared.
    """
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16)
    model.eval()
    worst = 0.0
    for place in np.argsort(tokens.lengths, kind="stable")[:_SAMPLES]:
        row = tokens.get(int(place))
        own = model(torch.from_numpy(row.input_ids.astype(np.int64))[None], output_hidden_states=True).hidden_states
        for layer, stored in states.get(row.sample_id).items():
            last = layer + 2 == len(own)
            found = model.model.norm(stored.to(torch.bfloat16)) if last else stored
            wanted = own[layer + 1][0].float()
            worst = max(worst, float((found.float() - wanted).norm() / wanted.norm()))
    return worst


def build(job: Job) -> None:
    """Write `checks.json`."""
    tokens, states = TokenSet(job.inputs["tokens"]), open_states(job.inputs["states"])
    numbers = {
        "mask": mask_share(tokens, Path(job.inputs["answers"])),
        "layers": layer_distance(Path(job.inputs["target"]), tokens, states),
    }
    with job.workspace.shard(CHECKS) as path:
        path.write_text(json.dumps(numbers))
