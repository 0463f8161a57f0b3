"""Does the exported drafter read at inference what it was trained on? The same tokens, two ways.

The states that the trainer read are compared, layer by layer, with those that the running target gives at the layers
that the exported config names; then the exported drafter drafts from both, from the same places with the same random
numbers. Where they differ, or where drafts are as good as none, the cause is looked for and named: layers shifted by
one, a final state after the norm instead of before it, states of another target, another template, other rotary
frequencies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchspec_core.data.messages import Message
from torchspec_core.data.render import load_renderer
from torchspec_core.data.tokenset import TokenSet
from torchspec_core.decoding.draft import Committed, Drafts, Proposal
from torchspec_core.decoding.target import load_target
from torchspec_core.errors import UserError
from torchspec_core.evaluation.drafts import open_export
from torchspec_core.store.remote import open_states
from torchspec_core.targets.engine import load_head
from torchspec_core.targets.facts import TargetFacts, read_facts, read_json

# RMS of a difference over RMS of the stored states: above what a capture in bf16 does, below a neighbouring layer.
STATES_TOLERANCE = 0.05
# Mean total variation between the laws of the first draft.
LAW_TOLERANCE = 0.05
_PLACES = (0.25, 0.5, 0.75)  # of each sample: where drafting begins


@dataclass(frozen=True)
class Parity:
    """What was compared.

    states: by stored layer id, the relative RMS difference between the trainer's states and the running target's.
    law_max, law_mean: total variation between the laws of the first draft, over all places. drafts_equal: share of
    equal drafted tokens. likes: mean probability that the first draft's law, from live states, gives to the text's next
    token.
    causes: sentences, most likely first; empty where nothing is wrong.
    """

    samples: int
    places: int
    states: dict[int, float]
    law_max: float
    law_mean: float
    drafts_equal: float
    likes: float
    causes: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether the export drafts from live states as it does from the trainer's."""
        return max(self.states.values()) <= STATES_TOLERANCE and self.law_mean <= LAW_TOLERANCE


def input_folder(states: Path, stage: str) -> Path:
    """The folder of an input stage of a states stage, in the same store.

    Raises:
        UserError: `states` is no finished states stage, or its store does not hold the input any more.
    """
    spec = read_json(states / "spec.json") if (states / "spec.json").is_file() else {}
    key = ((spec.get("spec") or {}).get("inputs") or {}).get(stage)
    if key is None:
        raise UserError(f"{states} is no states stage of a store (spec.json names no {stage}): give its folder")
    found = sorted((states.resolve().parent.parent / stage).glob(f"*-{key[:12]}"))
    if not found:
        raise UserError(f"the {stage} that {states} was made from is gone from its store: run the recipe again")
    return found[0]


def parity(export: Path, states: Path, tokens: Path, target: Path, samples: int = 8, k: int = 1) -> Parity:
    """Compare on the first `samples` of a states stage, in fp32, `k` drafts from each place.

    Raises:
        UserError: the export is for another target or reads another number of layers than the states hold.
    """
    facts = read_facts(target)
    stored, text = open_states(states, "always"), TokenSet(tokens)
    opened = open_export(export, "float32", facts)
    *fed, final = stored.layers
    if len(opened.layers) != len(fed):
        raise UserError(
            f"{export} reads {len(opened.layers)} layers and {states} holds {len(fed)}: they belong to different runs"
        )
    rows = [text.get(i) for i in range(min(samples, len(text)))]
    model = load_target(target, "float32", (*opened.layers, facts.final_layer))
    drafts = opened.attach(model)
    squares: dict[int, list[float]] = {layer: [0.0, 0.0] for layer in stored.layers}
    normed = [0.0, 0.0]
    laws: list[float] = []
    equal = drafted = 0
    likes: list[float] = []
    head = load_head(target, torch.float32)
    for row in rows:
        ids = [int(token) for token in row.input_ids]
        own = {layer: value.float() for layer, value in stored.get(row.sample_id).items()}
        live = model.prefill([ids], len(ids)).states[0].split(facts.hidden_size, dim=-1)
        for layer, found in zip(stored.layers, live, strict=True):
            _add(squares[layer], found, own[layer])
        _add(normed, head.normed(live[-1]), own[final])
        trained, served = torch.cat([own[layer] for layer in fed], -1), torch.cat(live[:-1], -1)
        for place in sorted({max(1, int(share * (len(ids) - 1))) for share in _PLACES}):
            ours, theirs = (_propose(drafts, values, ids, place, k) for values in (trained, served))
            assert ours.q is not None and theirs.q is not None
            laws.append(0.5 * float((ours.q[:, 0] - theirs.q[:, 0]).abs().sum()))
            equal += int((ours.tokens == theirs.tokens).sum())
            drafted += ours.tokens.numel()
            if place + 1 < len(ids):
                likes.append(float(theirs.q[0, 0, ids[place + 1]]))
    model.close()
    differences = {layer: (wrong / max(whole, 1e-30)) ** 0.5 for layer, (wrong, whole) in squares.items()}
    liked = sum(likes) / max(len(likes), 1)
    named = (*opened.layers, facts.final_layer)
    causes = [
        *_layer_causes(named, stored.layers, differences),
        *_final_cause(differences[final], (normed[0] / max(normed[1], 1e-30)) ** 0.5),
        *_other_causes(drafts, facts, target, [int(t) for t in rows[0].input_ids], liked),
    ]
    return Parity(
        len(rows), len(laws), differences, max(laws), sum(laws) / len(laws), equal / drafted, liked, tuple(causes)
    )


def _add(sums: list[float], found: Tensor, own: Tensor) -> None:
    sums[0] += float((found - own).double().square().sum())
    sums[1] += float(own.double().square().sum())


def _propose(drafts: Drafts, states: Tensor, ids: Sequence[int], place: int, k: int) -> Proposal:
    """Draft after tokens 0..place of a text, whose positions 0..place-1 have these states [T, A*H]."""
    drafts.judging = False
    drafts.start(1, place + k + 2)
    following = torch.tensor([ids[1 : place + 1]], dtype=torch.int64)
    committed = Committed(states[None, :place], following, torch.zeros(1, dtype=torch.int64), torch.tensor([place]))
    with torch.inference_mode():
        return drafts.propose(committed, k, 1.0, torch.full((1, k), 0.5, dtype=torch.float64))


def _layer_causes(named: Sequence[int], trained: Sequence[int], differences: dict[int, float]) -> list[str]:
    shifts = {mine - theirs for mine, theirs in zip(named, trained, strict=True) if mine != theirs}
    if shifts:
        by = f", all by {shifts.pop():+d}" if len(shifts) == 1 else ""
        return [
            f"layer shift: the export names layers {list(named[:-1])} (0-based, after which layer), the trainer read "
            f"{list(trained[:-1])}{by}; an engine's ids are one higher than these"
        ]
    far = [layer for layer in trained[:-1] if differences[layer] > STATES_TOLERANCE]
    if far:
        return [f"the target at layers {far} does not give the stored states: they come from other weights or tokens"]
    return []


def _final_cause(plain: float, normed: float) -> list[str]:
    if plain > STATES_TOLERANCE and normed < plain:
        return ["wrong norm: the stored final state is the one after the target's final norm, not before it"]
    return []


def _other_causes(drafts: Any, facts: TargetFacts, target: Path, ids: Sequence[int], liked: float) -> list[str]:
    """What can make a drafter useless although both ways agree; only where its drafts are as good as none."""
    if liked > 10.0 / facts.vocab_size:
        return []
    causes = []
    rope = getattr(getattr(getattr(drafts, "drafter", None), "config", None), "rope", None)
    if rope is not None and rope != facts.rope:
        causes.append(f"rope: the export's rotary positions are {rope}, the target's {facts.rope}")
    begin = load_renderer(target).prompt([Message("user", "a")])
    if list(ids[:1]) != begin[:1]:
        causes.append("template: the samples begin otherwise than the target's chat template does")
    causes.append("the drafts are no better than chance: the drafter is untrained, or trained on other states")
    return causes
