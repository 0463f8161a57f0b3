"""Writes the tables of `docs/recipe.md` from the recipe's schema: `python -m scripts.recipe_docs [--check]`.

What stands above the marker line is written by hand and kept. `--check` exits with 1 when the page is not up to date.
"""

from __future__ import annotations

import argparse
import json
import sys
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from torchspec_core.config.schema import ConversationSource, PromptSource, Recipe, Section

PAGE = Path(__file__).resolve().parent.parent / "docs" / "recipe.md"
MARKER = "<!-- Below: written by `python -m scripts.recipe_docs` from torchspec_core/config/schema.py. -->"
WORDS = {int: "whole number", float: "number", str: "text", bool: "true or false", type(None): "none"}


def readable(annotation: Any) -> str:
    """A field's type in words."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return readable(arguments[0])
    if origin is typing.Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if origin in (typing.Union, types.UnionType):
        return ", or ".join(readable(argument) for argument in arguments)
    if origin is tuple:
        inner = readable(arguments[0])
        return f"list of {inner}" if arguments[-1] is Ellipsis else f"{len(arguments)} of {inner}"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return f"`{annotation.__name__}` (below)"
    return WORDS[annotation]


def limits(field: FieldInfo) -> str:
    """The bounds of a number: `> 0, <= 1`."""
    signs = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
    found = [
        f"{sign} {getattr(rule, name):g}"
        for rule in field.metadata
        for name, sign in signs.items()
        if getattr(rule, name, None) is not None
    ]
    return f" ({', '.join(found)})" if found else ""


def default(field: FieldInfo) -> str:
    """The default as it would stand in a recipe."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    plain = (
        [item.model_dump(exclude_none=True) if isinstance(item, Section) else item for item in value]
        if isinstance(value, tuple)
        else value
    )
    return f"`{json.dumps(plain)}`" if plain is not None else "none"


def table(section: type[Section]) -> str:
    """One section's fields as a Markdown table."""
    lines = ["| field | type | default | side | meaning |", "|---|---|---|---|---|"]
    for name, field in section.model_fields.items():
        extra = field.json_schema_extra
        side = extra["side"] if isinstance(extra, dict) else ""
        cells = (
            f"`{name}`",
            readable(field.annotation) + limits(field),
            default(field),
            str(side),
            field.description or "",
        )
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def tables() -> str:
    """Every section, in the order of a recipe."""
    parts = []
    for name, field in Recipe.model_fields.items():
        section = typing.cast(type[Section], field.annotation)
        parts.append(f"## {name}\n\n{(section.__doc__ or '').strip()}\n\n{table(section)}")
    for extra in (PromptSource, ConversationSource):
        parts.append(f"## {extra.__name__}\n\n{(extra.__doc__ or '').strip()}\n\n{table(extra)}")
    return "\n\n".join(parts) + "\n"


def page(text: str) -> str:
    """`text` with everything under the marker written anew."""
    return text.split(MARKER)[0] + MARKER + "\n\n" + tables()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m scripts.recipe_docs", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 when the page is out of date")
    args = parser.parse_args(argv)
    old = PAGE.read_text(encoding="utf-8")
    new = page(old)
    if args.check:
        if new != old:
            print(f"{PAGE} is out of date: run `python -m scripts.recipe_docs`", file=sys.stderr)
        return int(new != old)
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
