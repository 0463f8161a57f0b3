"""What the recipe's fields are called, which side each is on, and which type each wants, read from the schema."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from torchspec_core.config.schema import IDENTITY, RUNTIME, Recipe, Section


def nested_model(annotation: Any) -> type[BaseModel] | None:
    """The model inside `Model`, `tuple[Model, ...]` or `Model | None`; None for other types."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for part in get_args(annotation) if (model := nested_model(part)) is not None), None)


def side_of(field: FieldInfo) -> str:
    """ "identity" or "runtime"; raises TypeError for a field that was declared as neither."""
    extra = field.json_schema_extra
    side = extra.get("side") if isinstance(extra, dict) else None
    if side not in (IDENTITY, RUNTIME):
        raise TypeError(f"the recipe field {field!r} is declared neither Identity nor Runtime")
    return str(side)


def _walk(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, str]]:
    for name, field in model.model_fields.items():
        inner = nested_model(field.annotation)
        yield f"{prefix}.{name}", side_of(field)
        if inner is not None:
            yield from _walk(inner, f"{prefix}.{name}[]")


def schema_sides() -> dict[str, str]:
    """Every dotted field of the recipe and its side; fields of list items as `data.prompts[].rows`."""
    sides: dict[str, str] = {}
    for name, field in Recipe.model_fields.items():
        section = nested_model(field.annotation)
        assert section is not None
        sides.update(_walk(section, name))
    return sides


def _is_neutral(field: FieldInfo, value: object) -> bool:
    extra = field.json_schema_extra
    return isinstance(extra, dict) and bool(extra.get("neutral")) and value == field.default


def _select(section: BaseModel, side: str, keyed: bool = False) -> dict[str, Any]:
    chosen: dict[str, Any] = {}
    plain = section.model_dump(mode="json")
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if side_of(field) != side or (keyed and _is_neutral(field, value)):
            continue
        if isinstance(value, BaseModel):
            chosen[name] = _select(value, side, keyed)
        elif isinstance(value, tuple) and nested_model(field.annotation) is not None:
            chosen[name] = [_select(item, side, keyed) for item in value]
        else:
            chosen[name] = plain[name]
    return chosen


def identity_of(section: Section) -> dict[str, Any]:
    """The identity fields of a section as JSON values; items of lists of sections keep their identity fields only."""
    return _select(section, IDENTITY)


def keyed_of(section: Section) -> dict[str, Any]:
    """`identity_of` without the neutral fields at their default (`schema.Identity`): what a stage's key is made of."""
    return _select(section, IDENTITY, keyed=True)


def runtime_of(section: Section) -> dict[str, Any]:
    """The runtime fields of a section as JSON values."""
    return _select(section, RUNTIME)


def field_at(path: tuple[str | int, ...]) -> FieldInfo | None:
    """The field that a path such as ("data", "prompts", 0, "rows") or ("training", "betas", 1) is in; None if
    unknown."""
    model: type[BaseModel] | None = Recipe
    found: FieldInfo | None = None
    for part in path:
        if isinstance(part, int):
            continue
        if model is None or part not in model.model_fields:
            return None
        found = model.model_fields[part]
        model = nested_model(found.annotation)
    return found


def describe_type(annotation: Any) -> str:
    """The type in words that a person who writes YAML knows."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return describe_type(parts[0])
    if origin is Literal:
        return " or ".join(str(part) for part in parts)
    if origin in (Union, types.UnionType):
        return " or ".join("null" if part is type(None) else describe_type(part) for part in parts)
    if origin is tuple:
        if len(parts) == 2 and parts[1] is Ellipsis:
            return f"a list, each item {describe_type(parts[0])}"
        return f"a list of {len(parts)}: {', '.join(describe_type(part) for part in parts)}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"a mapping with {', '.join(annotation.model_fields)}"
    return {str: "a text", bool: "true or false", int: "a whole number", float: "a number"}.get(
        annotation, str(annotation)
    )


def nearest_name(path: tuple[str | int, ...]) -> str | None:
    """The valid dotted name closest to an unknown one: in the same place first, then the same name in another
    section."""
    parents: Mapping[str, Any] = Recipe.model_fields
    if len(path) > 1:
        parent = field_at(path[:-1])
        model = nested_model(parent.annotation) if parent is not None else None
        parents = model.model_fields if model is not None else {}
    name = str(path[-1])
    prefix = "".join(f"{part}." for part in path[:-1])
    close = difflib.get_close_matches(name, parents, n=1, cutoff=0.6)
    if close:
        return prefix + close[0]
    everywhere = [dotted for dotted in schema_sides() if "[]" not in dotted]
    for dotted in everywhere:
        if dotted.endswith(f".{name}"):
            return dotted
    if len(path) == 1:
        return next(iter(difflib.get_close_matches(name, everywhere, n=1, cutoff=0.6)), None)
    by_field = {dotted.partition(".")[2]: dotted for dotted in everywhere}
    close = difflib.get_close_matches(name, by_field, n=1, cutoff=0.75)
    return by_field[close[0]] if close else None
