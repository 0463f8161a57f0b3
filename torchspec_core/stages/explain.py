"""Why an entry has to be made: the difference to the nearest entry of the same stage, followed through input keys."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchspec_core.stages.manifest import Entry
from torchspec_core.stages.spec import SHORT_KEY, StageSpec


@dataclass(frozen=True)
class Explanation:
    """hit or not and why; nearest: the entry compared with (None when the stage was never made); changes: one phrase
    each."""

    stage: str
    hit: bool
    reason: str
    nearest: Path | None
    changes: tuple[str, ...]

    def __str__(self) -> str:
        """`cached (same key)`, or `to make (reason)` and one line for each change since the nearest entry."""
        if self.hit:
            return f"cached ({self.reason})"
        lines = [f"to make ({self.reason})"]
        if self.nearest is not None:
            lines[0] += f"; compared with {self.nearest.name}:"
        return "\n    ".join([*lines, *self.changes])


def flatten(value: Any, path: str = "") -> dict[str, Any]:
    """Leaves of nested JSON by dotted path; empty containers inside are leaves."""
    if not path and not value:
        return {}
    if isinstance(value, Mapping) and value:
        items = [(f"{path}.{key}" if path else key, item) for key, item in value.items()]
    elif isinstance(value, list) and any(isinstance(item, (dict, list)) for item in value):
        items = [(f"{path}[{index}]", item) for index, item in enumerate(value)]
    else:
        return {path: value}
    return {name: leaf for key, item in items for name, leaf in flatten(item, key).items()}


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    before, after = flatten(old), flatten(new)
    absent = object()

    def text(value: Any) -> str:
        return "(absent)" if value is absent else str(value)

    return [
        f"{name} {text(before.get(name, absent))} -> {text(after.get(name, absent))}"
        for name in sorted({*before, *after})
        if type(before.get(name, absent)) is not type(after.get(name, absent)) or before.get(name) != after.get(name)
    ]


def changes_between(old: StageSpec, new: StageSpec, specs: Mapping[str, StageSpec]) -> list[str]:
    """What differs, in phrases; a changed input is followed to the fields that changed it where both specs are
    known."""
    changes = []
    if old.version != new.version:
        changes.append(f"{new.stage} version {old.version} -> {new.version}")
    changes += _differences(old.identity, new.identity)
    if old.files != new.files:
        changes += [f"file {change}" for change in _differences(old.files, new.files)]
    for name in sorted({*old.inputs, *new.inputs}):
        before, after = old.inputs.get(name), new.inputs.get(name)
        if before == after:
            continue
        if before is None or after is None:
            changes.append(f"input {name} {'added' if before is None else 'removed'}")
        elif before in specs and after in specs:
            because = changes_between(specs[before], specs[after], specs)
            # Two inputs changed by one field say it once; the innermost phrase is the one that helps.
            inner = dict.fromkeys(phrase.partition(" changed because: ")[2] or phrase for phrase in because)
            changes.append(f"input {name} changed because: {', '.join(inner)}")
        else:
            changes.append(f"input {name} {before[:SHORT_KEY]} -> {after[:SHORT_KEY]}")
    return changes


def explain_miss(spec: StageSpec, reason: str, entries: Iterable[Entry], known: Iterable[StageSpec]) -> Explanation:
    """Compare with the entry that differs least (of equals the newest; sealed before unfinished)."""
    entries = list(entries)  # oldest first
    specs = {entry.key: entry.spec for entry in entries} | {other.key: other for other in known} | {spec.key: spec}
    others = [entry for entry in entries if entry.stage == spec.stage and entry.key != spec.key]
    if not others:
        return Explanation(spec.stage, False, reason, None, ())
    compared = [(entry, changes_between(entry.spec, spec, specs)) for entry in others]
    nearest, changes = min(
        reversed(compared),  # the newest first, and `min` keeps the first of equals
        key=lambda pair: (not pair[0].sealed, sum(1 + text.count(", ") for text in pair[1])),
    )
    return Explanation(spec.stage, False, reason, nearest.path, tuple(changes))
