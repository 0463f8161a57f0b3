"""A target's chat template: messages and tools to the text that a server would put before the model.

The dialect of Jinja is the one that `transformers` gives to templates. Templates disagree on how a turn that only calls
tools has to be passed (no content or empty content, arguments as an object or as text); a server picks one way, here
the first way that the template takes is used.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from torchspec_core.data.messages import BadRow, Message

# (content of a turn without text that calls tools, arguments as JSON text)
_FORMS: tuple[tuple[str | None, bool], ...] = ((None, False), (None, True), ("", False), ("", True))
_LOOP = frozenset({"first", "last", "index", "index0", "previtem", "nextitem"})
_MISUSE = (TypeError, AttributeError, ValueError, KeyError)


class _Generation(Extension):
    """Accepts the `{% generation %}` blocks that some templates carry; they do not change the text."""

    tags = {"generation"}  # noqa: RUF012 - the attribute that jinja reads

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The block's body, as if the tags were not there."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with its verdict on an attribute remembered: it depends on the object's type and the name only, and
    asking anew is a fifth of the time of a rendering.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._verdicts: dict[tuple[type, str], bool] = {}

    def getattr(self, obj: Any, attribute: str) -> Any:
        """As the sandbox says; what a loop tells of itself is harmless."""
        if type(obj) is LoopContext and attribute in _LOOP:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """As the sandbox says."""
        key = type(obj), attr
        found = self._verdicts.get(key)
        if found is None:
            found = self._verdicts[key] = super().is_safe_attribute(obj, attr, value)
        return found


def _environment() -> ImmutableSandboxedEnvironment:
    # Without `strftime_now`: a rendered sample must not depend on the day it was made, and templates fall back to a
    # fixed date.
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], keep_trailing_newline=False
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    return environment


def as_dict(message: Message, empty: str | None = None, as_text: bool = False) -> dict[str, Any]:
    """A message as servers pass it to a template; what it does not have is absent."""
    if len(message) == 2 or not any(message[2:]):
        return {"role": message.role, "content": message.content}
    out: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning:
        out |= {"reasoning_content": message.reasoning, "reasoning": message.reasoning, "thinking": message.reasoning}
    if message.tool_calls:
        out["content"] = message.content or empty
        out["tool_calls"] = [
            {
                "type": "function", "id": call_id,
                "function": {"name": name, "arguments": arguments if as_text else json.loads(arguments)},
            }
            for name, arguments, call_id in message.tool_calls
        ]  # fmt: skip
    out |= {key: getattr(message, key) for key in ("name", "tool_call_id") if getattr(message, key)}
    return out


class ChatTemplate:
    """The compiled template of one target; `variables` are its own (`bos_token`, ...)."""

    def __init__(self, source: str, variables: Mapping[str, Any]) -> None:
        self.source = source
        self.template = _environment().from_string(source)
        # A plain copy: jinja merges the chained one anew, key by key, at each rendering.
        self.template.globals = dict(self.template.globals)
        self.variables = dict(variables)

    def _render(self, messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]], generate: bool) -> str:
        variables = {**self.variables, "tools": list(tools)} if tools else self.variables
        try:
            return self.template.render(messages=messages, add_generation_prompt=generate, **variables)
        except TemplateError as error:
            raise BadRow(f"the chat template refuses the conversation: {error}") from error

    def render(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), generate: bool = False
    ) -> str:
        """The text of `messages`; `generate` adds the generation prompt. Raises `BadRow` if the template refuses."""
        if not any(m.tool_calls for m in messages):
            try:
                return self._render([as_dict(m) for m in messages], tools, generate)
            except _MISUSE as error:
                if isinstance(error, BadRow):
                    raise
                raise BadRow(f"the chat template fails on the conversation: {error}") from error
        found: dict[str | None, str] = {}
        problem: Exception | None = None
        for empty, as_text in _FORMS:
            if empty in found:
                continue
            try:
                found[empty] = self._render([as_dict(m, empty, as_text) for m in messages], tools, generate)
            except BadRow as error:
                problem = error
            except _MISUSE as error:
                problem = BadRow(f"the chat template fails on the tool calls: {error}")
        if not found:
            assert problem is not None
            raise problem
        first = found.get(None, found.get("", ""))
        # A template that simply prints the content would write "None".
        return found[""] if "" in found and found[""].count("None") < first.count("None") else first
