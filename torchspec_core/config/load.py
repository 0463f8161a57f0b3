"""Recipes from YAML files and dotted overrides: defaults < `base:` < recipe < overrides, with the source of every
value.

A recipe may name another in `base:` (a path relative to its own file). Mappings merge, everything else replaces. What
the schema does not know, or a value of another type, is a UserError that names the key, the file and line, and what is
wanted.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from torchspec_core.config.fields import (
    describe_type,
    field_at,
    identity_of,
    nearest_name,
    nested_model,
    runtime_of,
    schema_sides,
)
from torchspec_core.config.schema import Recipe
from torchspec_core.config.yaml_lines import Parsed, parse, scalar
from torchspec_core.errors import UserError

__all__ = ["LoadedRecipe", "identity_of", "load_recipe", "render_recipe", "runtime_of", "schema_sides"]

Key = tuple[str | int, ...]
DEFAULT = "default"
OVERRIDE = "override"


@dataclass(frozen=True)
class LoadedRecipe:
    """recipe: the validated object. sources: dotted field -> "default", "configs/x.yaml:12" or "override"."""

    recipe: Recipe
    sources: Mapping[str, str]


def dotted(key: Key) -> str:
    """("data", "prompts", 0, "rows") -> "data.prompts.0.rows"."""
    return ".".join(str(part) for part in key)


def _shown(path: Path) -> str:
    relative = os.path.relpath(path)
    return os.fspath(path) if relative.startswith("..") else relative


def _read(path: Path) -> Parsed:
    name = _shown(path)
    try:
        parsed = parse(path.read_text(encoding="utf-8"), name)
    except FileNotFoundError:
        raise UserError(f"The recipe {name} does not exist; check the path.") from None
    except IsADirectoryError:
        raise UserError(f"The recipe {name} is a folder; name a YAML file in it.") from None
    except UnicodeDecodeError:
        raise UserError(f"The recipe {name} is not a text file in UTF-8.") from None
    except OSError as error:
        raise UserError(f"The recipe {name} cannot be read ({error.strerror}).") from None
    if parsed.data is not None and not isinstance(parsed.data, dict):
        raise UserError(f"{name}: a recipe is a mapping of sections, not {describe_value(parsed.data)}.")
    return parsed


def describe_value(value: Any) -> str:
    """A short quotation of a value for an error message."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _chain(path: Path) -> list[tuple[Path, Parsed]]:
    """The recipe and its bases, the base first."""
    layers: list[tuple[Path, Parsed]] = []
    asked_by = ""
    while True:
        if any(path.resolve() == seen.resolve() for seen, _ in layers):
            names = " -> ".join(_shown(seen) for seen, _ in [*layers, (path, None)])
            raise UserError(f"The recipes name each other as base in a circle: {names}.")
        if asked_by and not path.is_file():
            raise UserError(
                f"{asked_by}: the base recipe {_shown(path)} does not exist; `base` is relative to its own file."
            )
        parsed = _read(path)
        layers.append((path, parsed))
        base = (parsed.data or {}).get("base")
        if base is None:
            return layers[::-1]
        asked_by = f"{_shown(path)}:{parsed.lines.get(('base',), 1)}"
        if not isinstance(base, str):
            raise UserError(f"{asked_by}: base must be the path of another recipe, not {describe_value(base)}.")
        path = path.parent / base


class _Merged:
    """The values so far, and where each came from."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.sources: dict[Key, str] = {}

    def put(self, key: Key, value: Any, sources: Mapping[Key, str], default: str) -> None:
        """Set the value at `key`; mappings merge into mappings, except inside lists."""
        if isinstance(value, dict) and not any(isinstance(part, int) for part in key):
            if value or len(key) <= 1:
                self._container(key)
                for name, item in value.items():
                    self.put((*key, name), item, sources, default)
                self.sources.setdefault(key, sources.get(key, default))
                return
        self.sources = {known: source for known, source in self.sources.items() if known[: len(key)] != key}
        target: Any = self._container(key[:-1])
        target[key[-1]] = value
        self.sources[key] = sources.get(key, default)
        self.sources.update({known: source for known, source in sources.items() if known[: len(key)] == key})

    def _container(self, key: Key) -> Any:
        target: Any = self.values
        for part in key:
            if isinstance(part, int):
                target = target[part]
                continue
            if not isinstance(target.get(part), (dict, list)):
                target[part] = {}
            target = target[part]
        return target

    def source(self, key: Key) -> str | None:
        """Where the value at `key`, or the nearest one around it, came from."""
        for size in range(len(key), 0, -1):
            if key[:size] in self.sources:
                return self.sources[key[:size]]
        return None


def _override_key(name: str, merged: _Merged, text: str) -> Key:
    """("data", "prompts", 0, "rows") of `data.prompts.0.rows`; indices must exist in the recipe."""
    parts = name.split(".")
    if len(parts) < 2 or not all(parts):
        raise UserError(f"The override `{text}` must have the form section.key=value.")
    key: Key = ()
    value: Any = merged.values
    for part in parts:
        here = (*key, part)
        if not isinstance(value, list) and field_at(key) is not None and part.isdigit():
            # The list itself comes from the defaults: bring it in, so that one item of it can be changed.
            value = _default_at(key)
            if isinstance(value, list):
                merged.put(key, value, {}, DEFAULT)
        if isinstance(value, list):
            if not part.isdigit() or int(part) >= len(value):
                raise UserError(
                    f"The override `{text}`: {dotted(key)} has items 0 to {len(value) - 1}, there is no {part}."
                )
            key, value = (*key, int(part)), value[int(part)]
            continue
        key = here
        value = value.get(part) if isinstance(value, dict) else None
    return key


def _default_at(key: Key) -> Any:
    value: Any = Recipe().model_dump(mode="json")
    for part in key:
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _apply_override(merged: _Merged, text: str) -> None:
    name, equals, right = text.partition("=")
    if not equals:
        raise UserError(f"The override `{text}` must have the form section.key=value.")
    key = _override_key(name.strip(), merged, text)
    field = field_at(key)
    if field is None:
        raise UserError(_unknown(key, f"override `{text}`"))
    value = scalar(right, f"override `{text}`")
    wants_text = field.annotation is str or field.annotation == (str | None)
    if wants_text and not isinstance(value, str) and not (value is None and field.annotation is not str):
        value = right  # run.name=2026 means the text "2026"
    merged.put(key, value, {}, OVERRIDE)


def _unknown(key: Key, where: str) -> str:
    near = nearest_name(key)
    hint = f"; did you mean `{near}`?" if near else "; `torchspec config show` lists what there is."
    kind = "section" if len(key) == 1 else "key"
    return f"{where}: there is no {kind} `{dotted(key)}`{hint}"


def _refuse_non_json(value: Any, key: Key, merged: _Merged) -> None:
    """Dates, bytes, sets, NaN: YAML has them, recipes do not."""
    if isinstance(value, dict):
        for name, item in value.items():
            _refuse_non_json(item, (*key, name), merged)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _refuse_non_json(item, (*key, index), merged)
    elif not (
        value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and abs(value) < float("inf"))
    ):
        field = field_at(key)
        if field is None:
            raise UserError(_unknown(key, merged.source(key) or "recipe"))
        raise UserError(
            f"{merged.source(key)}: `{dotted(key)}` must be {describe_type(field.annotation)}, not {str(value)!r}."
        )


def _explain(error: ValidationError, merged: _Merged) -> UserError:
    """One sentence for the first mistake, unknown keys before all else (they often cause the others)."""
    found = error.errors()
    # A bad item also makes its list "too short": that is a consequence, not a mistake.
    problems = [
        problem
        for problem in found
        if not any(other["loc"][: len(problem["loc"])] == problem["loc"] for other in found if other is not problem)
    ]
    problems.sort(key=lambda problem: problem["type"] != "extra_forbidden")
    problem = problems[0]
    key: Key = tuple(problem["loc"])
    where = merged.source(key) or "recipe"
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    if problem["type"] == "extra_forbidden":
        return UserError(_unknown(key, where) + more)
    field = field_at(key)
    wanted = describe_type(field.annotation) if field is not None else problem["msg"]
    if problem["type"] == "missing":
        inner = isinstance(key[-1], int)
        what = (
            f"`{dotted(key[:-1])}` must be {wanted}" if inner else f"`{dotted(key[:-1])}` needs `{key[-1]}` ({wanted})"
        )
        return UserError(f"{where}: {what}{more}.")
    if problem["type"] in _LIMITS:
        limit = ", ".join(str(value) for name, value in (problem.get("ctx") or {}).items() if name in _LIMIT_NAMES)
        return UserError(
            f"{where}: `{dotted(key)}` must be {_LIMITS[problem['type']]} {limit}, "
            f"not {describe_value(problem['input'])}{more}."
        )
    return UserError(f"{where}: `{dotted(key)}` must be {wanted}, not {describe_value(problem['input'])}{more}.")


_LIMIT_NAMES = ("gt", "ge", "lt", "le", "min_length", "pattern")
_LIMITS = {
    "greater_than": "greater than",
    "greater_than_equal": "at least",
    "less_than": "less than",
    "less_than_equal": "at most",
    "too_short": "a list with at least this many items:",
    "string_too_short": "a text with at least this many characters:",
    "string_pattern_mismatch": "a text of the form",
}


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """Read a recipe with its bases, apply `section.key=value` overrides, validate.

    The right-hand side of an override is YAML (`training.lr=1e-3`, `data.prompts=[{name: sharegpt, rows: 5}]`); an
    item of a list is named by its index (`data.prompts.0.rows=5`). Raises UserError with one sentence.
    """
    merged = _Merged()
    for file, parsed in _chain(Path(path)):
        sources = {key: f"{_shown(file)}:{line}" for key, line in parsed.lines.items()}
        for name, value in (parsed.data or {}).items():
            if name == "base":
                continue
            if name in Recipe.model_fields and value is None:
                continue  # `data:` with everything below it commented out
            merged.put((name,), value, sources, _shown(file))
    for text in overrides:
        _apply_override(merged, text)
    _refuse_non_json(merged.values, (), merged)
    try:
        # JSON mode: lists become tuples and mappings become sections, while everything else stays strict.
        recipe = Recipe.model_validate_json(json.dumps(merged.values))
    except ValidationError as error:
        raise _explain(error, merged) from None
    return LoadedRecipe(recipe, _field_sources(recipe, merged))


def _field_sources(recipe: Recipe, merged: _Merged) -> dict[str, str]:
    sources = {}
    for section in Recipe.model_fields:
        for name in type(getattr(recipe, section)).model_fields:
            key = (section, name)
            below = sorted({source for known, source in merged.sources.items() if known[:2] == key and len(known) > 2})
            own = merged.sources.get(key, DEFAULT)
            sources[dotted(key)] = OVERRIDE if OVERRIDE in below else own
    return sources


def render_recipe(loaded: LoadedRecipe) -> str:
    """The resolved recipe as YAML that can be read again, the source of each value in a comment."""
    lines = []
    for section in Recipe.model_fields:
        lines.append(f"{section}:")
        model: BaseModel = getattr(loaded.recipe, section)
        values = model.model_dump(mode="json")
        for name, field in type(model).model_fields.items():
            source = f"# {loaded.sources[f'{section}.{name}']}"
            value = values[name]
            if isinstance(value, list) and value and nested_model(field.annotation) is not None:
                lines.append(f"  {name}:{' ' * max(1, 42 - len(name) - 1)}{source}")
                lines += [f"    - {json.dumps(item, ensure_ascii=False)}" for item in value]
            else:
                lines.append(f"  {f'{name}: {json.dumps(value, ensure_ascii=False)}':<42} {source}")
    return "\n".join(lines)
