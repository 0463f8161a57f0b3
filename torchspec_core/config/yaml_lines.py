"""YAML with the line of every key, through PyYAML's node tree; used for error messages and `config show`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import yaml

from torchspec_core.errors import UserError


class _Loader(yaml.SafeLoader):
    """SafeLoader that reads 1e-3 as a number (YAML 1.1 wants a dot, and would make it a text)."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?[0-9][0-9_]*(?:\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


@dataclass(frozen=True)
class Parsed:
    """data: plain Python values. lines: path of keys and list indices -> 1-based line."""

    data: Any
    lines: dict[tuple[str | int, ...], int]


def _collect(node: yaml.Node, path: tuple[str | int, ...], lines: dict[tuple[str | int, ...], int], name: str) -> None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            line = key.start_mark.line + 1
            if key.tag == "tag:yaml.org,2002:merge":
                continue
            if not isinstance(key, yaml.ScalarNode) or key.tag != "tag:yaml.org,2002:str":
                raise UserError(f"{name}:{line}: the key {getattr(key, 'value', key)!r} is not a text; quote it.")
            here = (*path, key.value)
            if here in lines:
                raise UserError(
                    f"{name}:{line}: the key `{key.value}` is there twice (first in line {lines[here]}); keep one."
                )
            lines[here] = line
            _collect(value, here, lines, name)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            lines[(*path, index)] = item.start_mark.line + 1
            _collect(item, (*path, index), lines, name)


def parse(text: str, name: str) -> Parsed:
    """Parse one document; UserError `name:LINE: ...` for broken YAML, keys that are no text, and keys given twice."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        lines: dict[tuple[str | int, ...], int] = {}
        if node is None:
            return Parsed(None, lines)
        _collect(node, (), lines, name)
        return Parsed(loader.construct_document(node), lines)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f":{mark.line + 1}" if mark is not None else ""
        raise UserError(f"{name}{where}: this is not valid YAML ({error.problem or error.context}).") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{name}: this is not valid YAML ({str(error).splitlines()[0]}).") from None
    finally:
        loader.dispose()


def scalar(text: str, name: str) -> Any:
    """The value of one YAML text such as an override's right-hand side."""
    return parse(text, name).data
