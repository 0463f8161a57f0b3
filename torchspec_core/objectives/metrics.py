"""How well drafts agree with the target, as additive parts: numerators and denominators that batches add up.

A *place* is a depth (EAGLE-3) or a slot of a block; a row drafts one chain of places. `acc` and `alpha` look at one
place alone; `slot` and `slot_tv` at a place and all before it in the same row, which is what a verifier accepts. From
the last two come two *estimates* of the acceptance length. Neither is a measured acceptance: later places read the
text's past, not the drafted one.

| name | of one row | summed over places |
|---|---|---|
| `slot_n` | every draft up to n is the target's most likely token | `estimated_acceptance_length` |
| `slot_tv_n` | product of the overlaps sum_v min(p, q) up to n | `estimated_acceptance_length_tv` |
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def acceptance(hit: Tensor, overlap: Tensor | None, valid: Tensor) -> dict[str, Tensor]:
    """`acc_n`, `alpha_n`, `slot_n`, `slot_tv_n` of all places, each [2]: numerator and denominator.

    Args:
        hit: [D, R] 1 where the draft is the wanted token.
        overlap: [D, R] probability that a drawn draft is accepted; None where the target's distribution is not known.
        valid: [D, R] 1 where the target is supervised; `slot` counts rows that are valid up to the place.
    """
    whole = valid.cumprod(dim=0)
    parts = {"acc": (hit * valid, valid), "slot": ((hit * valid).cumprod(dim=0), whole)}
    if overlap is not None:
        parts |= {"alpha": (overlap * valid, valid), "slot_tv": ((overlap * valid).cumprod(dim=0), whole)}
    return by_place(parts)


def by_place(parts: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Numerators and denominators [D, R] of each name, summed over rows: `name_n` -> [2] for every place n."""
    return {
        f"{name}_{place}": pair
        for name, (top, bottom) in parts.items()
        for place, pair in enumerate(torch.stack((top.sum(dim=1), bottom.sum(dim=1)), dim=1))
    }


def by_row(values: Tensor, student: Tensor, rows: int) -> Tensor:
    """[D, P] of teacher positions, 0 where nothing is taught, to [D, rows] of the rows `student` [D, P] they teach."""
    return values.new_zeros(len(values), rows).scatter_add(1, student, values)


def estimates(means: Mapping[str, float]) -> dict[str, float]:
    """The two estimates, from the means of `acceptance`'s parts; 1 is the token that every verification adds."""
    found: dict[str, float] = {}
    for prefix, name in (("slot_", "estimated_acceptance_length"), ("slot_tv_", "estimated_acceptance_length_tv")):
        slots = [value for key, value in means.items() if key.startswith(prefix) and key[len(prefix) :].isdigit()]
        found |= {name: 1.0 + sum(slots)} if slots else {}
    return found


def means_of(parts: Mapping[str, Tensor]) -> dict[str, float]:
    """Numerators [2] over denominators; 0 where nothing was counted."""
    pairs = torch.stack([*parts.values()]).double()
    return dict(zip(parts, (pairs[:, 0] / pairs[:, 1].clamp(min=1e-9)).tolist(), strict=True))


def add_parts(batches: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Sum the parts of several batches, name by name."""
    return {name: torch.stack([parts[name] for parts in batches]).sum(dim=0) for name in batches[0]}
