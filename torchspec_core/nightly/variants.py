"""What a night trains, and how large: the subjects are recipes, a variant is a list of changes to all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchspec_core.errors import UserError

SUBJECTS = ("eagle3", "eagle3_anchored", "dflash2", "dspark")
"""Recipes in `FOLDER`, in the order they run; later ones find the first one's answers and states in the store."""

FOLDER = Path("configs/nightly")
BANDS = FOLDER / "bands.json"


@dataclass(frozen=True)
class Variant:
    """A size of the night. changes: overrides of every subject's recipe; about: for people."""

    name: str
    changes: tuple[str, ...]
    about: str


_QUICK = (
    'data.prompts=[{name: sharegpt, rows: 120}]', "data.heldout=16", "data.max_length=112", "data.vocabulary_rows=400",
    "answers.max_new_tokens=40", "answers.kv_cache_gib=1", "drafter.draft_vocab_size=4096",
    "training.tokens_per_step=512", "evaluation.prompts=10", "evaluation.max_new_tokens=32",
)  # fmt: skip
_TINY = (
    "target.source=random:tiny-llama", 'data.prompts=[{name: chitchat, rows: 64}]', "data.heldout=8",
    "data.max_length=96", "data.vocabulary_rows=100", "data.shard_rows=32", "data.workers=0",
    "answers.max_new_tokens=24", "answers.kv_cache_gib=1", "drafter.draft_vocab_size=512",
    "training.tokens_per_step=256", "training.epochs=6.0", "evaluation.prompts=6", "evaluation.max_new_tokens=12",
)  # fmt: skip

VARIANTS: Mapping[str, Variant] = {
    variant.name: variant
    for variant in (
        Variant("nightly", (), "the real small model, 700 prompts"),
        Variant("quick", _QUICK, "the real small model, 120 prompts"),
        Variant("tiny", _TINY, "a random model: says that gates work, not that drafters do"),
    )
}


def variant(name: str) -> Variant:
    """The variant of that name; raises `UserError`."""
    if name not in VARIANTS:
        raise UserError(f"there is no nightly variant {name!r}; choose one of {', '.join(VARIANTS)}")
    return VARIANTS[name]


def check_subjects(names: Sequence[str]) -> tuple[str, ...]:
    """The named subjects, all when none is named; raises `UserError`."""
    unknown = [name for name in names if name not in SUBJECTS]
    if unknown:
        raise UserError(f"there is no nightly subject {unknown[0]!r}; the subjects are {', '.join(SUBJECTS)}")
    return tuple(names) or SUBJECTS
