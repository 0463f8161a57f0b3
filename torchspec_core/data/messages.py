"""What a row of training data says: messages and tools, or token ids; and what is wrong with it if it cannot be used.

Four shapes are read: OpenAI (`messages`: role, content, tool calls, reasoning, content in parts), ShareGPT
(`conversations`: from, value), Alpaca (`instruction`, `input`, `output`), and pretokenised (`input_ids`, `loss_mask`).
A row that cannot be used raises `BadRow` with its reason; nothing is mended silently.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

MAX_TURN_CHARS = 1_000_000
ROLES = {
    "system": "system", "developer": "system", "user": "user", "human": "user", "assistant": "assistant",
    "gpt": "assistant", "function_call": "assistant", "tool": "tool", "observation": "tool", "function": "tool",
}  # fmt: skip
_SPEAKERS = {name: role for name, role in ROLES.items() if name != "function_call"}
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking", "thinking_content")
TEXT_PARTS = ("text", "input_text", "output_text")
DROPPED_MEDIA = ("image", "images", "audio", "audios", "video", "videos")


_COMPACT = json.JSONEncoder(ensure_ascii=True, separators=(",", ":")).encode
TOKEN_IDS = "the row holds token ids, not messages"


class BadRow(ValueError):
    """A row that cannot be used; the message is the reason."""


class Message(NamedTuple):
    """One turn: role is system, user, assistant or tool. `tool_calls`: (name, arguments as JSON text, id) of each."""

    role: str
    content: str
    reasoning: str = ""
    tool_calls: tuple[tuple[str, str, str], ...] = ()
    name: str = ""
    tool_call_id: str = ""


class Chat(NamedTuple):
    """A conversation, and the tools that were offered to the model (JSON schemas)."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    domain: str = ""


class Pretokenised(NamedTuple):
    """A row that is token ids already; the mask has a 0 or 1 for each."""

    input_ids: list[int]
    loss_mask: list[int]
    domain: str = ""


def content_id(messages: Sequence[tuple[Any, ...]], tools: Sequence[Mapping[str, Any]] = ()) -> str:
    """Blake2b-128 (hex) of the messages and tools: the stable id of a sample."""
    plain: list[Any] = []
    for message in messages:
        extras = [part for part in message[2:] if part]
        plain.append([message[0], message[1], list(message[2:])] if extras else [message[0], message[1]])
    if tools:
        plain.append(list(tools))
    return hashlib.blake2b(_COMPACT(plain).encode(), digest_size=16).hexdigest()


def check_text(text: object, what: str, empty: bool = False) -> str:
    """`text` when it is text that a tokenizer can take; raises `BadRow` that names `what` otherwise."""
    if not isinstance(text, str):
        raise BadRow(f"{what} is not text")
    if not empty and not text.strip():
        raise BadRow(f"{what} is empty")
    if len(text) > MAX_TURN_CHARS:
        raise BadRow(f"{what} is longer than {MAX_TURN_CHARS} characters")
    if "\0" in text:
        raise BadRow(f"{what} holds a NUL character")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise BadRow(f"{what} holds bytes or surrogates that are not valid Unicode") from None
    return text


def _check_order(turns: Sequence[Message]) -> None:
    """User and assistant in turn; tool turns follow an assistant that called tools."""
    last = "assistant"
    calls = False
    for number, message in enumerate(turns, start=1):
        role = message.role
        wanted = "user" if last == "assistant" else "assistant"
        if role != wanted and not (role == "tool" and (last == "tool" or calls)):
            raise BadRow(f"turn {number} is by the {role}, expected the {wanted}")
        last, calls = role, bool(message.tool_calls)


def check_turns(messages: Sequence[Message]) -> tuple[Message, ...]:
    """`messages` when they are an optional system message, then turns in order; raises `BadRow` otherwise."""
    turns = messages[1:] if messages and messages[0].role == "system" else messages
    if not turns:
        raise BadRow("there are no messages")
    _check_order(turns)
    for number, message in enumerate(messages, start=1):
        check_text(message.content, f"turn {number}", empty=bool(message.tool_calls) or message.role == "tool")
        if message.reasoning:
            check_text(message.reasoning, f"the reasoning of turn {number}")
        for name, arguments, _ in message.tool_calls:
            check_text(name, f"a tool name of turn {number}")
            check_text(arguments, f"the tool arguments of turn {number}")
    return tuple(messages)


def _json_value(value: object, what: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise BadRow(f"{what} is not JSON") from None


def _tool_call(value: object, number: int) -> tuple[str, str, str]:
    """A call as OpenAI writes it (under `function`) or as plain `name` and `arguments`."""
    call = value.get("function", value) if isinstance(value, Mapping) else None
    name = call.get("name") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(value, Mapping) or not isinstance(name, str):
        raise BadRow(f"a tool call of turn {number} has no `name`")
    arguments = _json_value(call.get("arguments", {}), f"the arguments of a tool call of turn {number}")
    return name, json.dumps(arguments, ensure_ascii=False), str(value.get("id") or "")


def _tool_calls(value: object, number: int) -> tuple[tuple[str, str, str], ...]:
    calls = _json_value(value, f"the tool call of turn {number}")
    return tuple(_tool_call(call, number) for call in (calls if isinstance(calls, list) else [calls]))


def _parts(parts: list[Any], number: int) -> tuple[str, str, tuple[tuple[str, str, str], ...]]:
    """Text, reasoning and tool calls of content in parts; text parts are joined by a newline, as vLLM does."""
    texts: list[str] = []
    reasoning: list[str] = []
    calls: tuple[tuple[str, str, str], ...] = ()
    for part in parts:
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type") if isinstance(part, Mapping) else None
        value = part.get("text", part.get("value")) if isinstance(part, Mapping) else None
        if kind in TEXT_PARTS and isinstance(value, str):
            texts.append(value)
        elif kind in ("reasoning", "thinking"):
            reasoning.append(str(value if value is not None else part.get("thinking", "")))
        elif kind == "tool_call":
            calls += _tool_calls(value, number)
        else:
            raise BadRow(f"turn {number} holds a part of type {str(kind)[:40]!r}; only text can be trained on")
    return "\n".join(texts), "\n".join(reasoning), calls


def _message(turn: object, number: int, role_key: str, text_key: str) -> Message:
    content: Any
    if type(turn) is dict and len(turn) == 2:  # by far the most turns are a role and a text
        role, content = turn.get(role_key), turn.get(text_key)
        if type(content) is str and role in _SPEAKERS:
            return Message(_SPEAKERS[role], content)
    if not isinstance(turn, Mapping) or role_key not in turn or (text_key not in turn and not turn.get("tool_calls")):
        raise BadRow(f"turn {number} has no `{role_key}` and `{text_key}`")
    role = turn[role_key]
    if not isinstance(role, str) or role not in ROLES:
        raise BadRow(f"turn {number} has the unknown role {str(role)[:40]!r}")
    if role == "function_call":
        return Message("assistant", "", tool_calls=_tool_calls(turn[text_key], number))
    content = turn.get(text_key)
    reasoning = next((turn[name] for name in REASONING_FIELDS if isinstance(turn.get(name), str) and turn[name]), "")
    calls = _tool_calls(turn["tool_calls"], number) if turn.get("tool_calls") else ()
    if isinstance(content, list):
        content, part_reasoning, part_calls = _parts(content, number)
        reasoning, calls = reasoning or part_reasoning, calls or part_calls
    if content is None and calls:
        content = ""
    name, call_id = turn.get("name"), turn.get("tool_call_id")
    return Message(
        ROLES[role], content, reasoning, calls, name if isinstance(name, str) else "",
        call_id if isinstance(call_id, str) else "",
    )  # fmt: skip


def _merge_calls(messages: list[Message]) -> list[Message]:
    """ShareGPT puts a call in a turn of its own; one that follows the assistant's text belongs to that turn."""
    merged: list[Message] = []
    for message in messages:
        before = merged[-1] if merged else None
        if message.tool_calls and not message.content and before and before.role == "assistant":
            merged[-1] = before._replace(tool_calls=before.tool_calls + message.tool_calls)
        else:
            merged.append(message)
    return merged


def _tools(value: object) -> tuple[Mapping[str, Any], ...]:
    """Tools as a list or as its JSON text; a bare function is put under `function`, as servers pass it to templates."""
    tools = _json_value(value, "`tools`") if value else []
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise BadRow("`tools` is not a list of JSON objects")
    found = tuple(t if "function" in t else {"type": "function", "function": dict(t)} for t in tools)
    for tool in found:
        check_text(json.dumps(tool, ensure_ascii=False), "a tool")
    return found


def _domain(value: Mapping[str, Any]) -> str:
    found = value.get("domain") or value.get("category")
    return found if isinstance(found, str) else ""


def _pretokenised(value: Mapping[str, Any]) -> Pretokenised:
    ids, mask = value["input_ids"], value.get("loss_mask")
    if not isinstance(mask, list) or not isinstance(ids, list) or len(ids) != len(mask):
        raise BadRow("`input_ids` and `loss_mask` are not two lists of the same length")
    if not all(m in (0, 1) for m in mask):
        raise BadRow("`loss_mask` holds something other than 0 and 1")
    if not any(mask):
        raise BadRow("`loss_mask` is empty: no token is supervised")
    return Pretokenised(ids, [int(m) for m in mask], _domain(value))


def _alpaca(value: Mapping[str, Any]) -> Chat:
    question, extra = value["instruction"], value.get("input")
    if extra:
        question = f"{question}\n{check_text(extra, '`input`')}"
    turns = [Message("user", question), Message("assistant", value.get("output"))]  # type: ignore[arg-type]
    if value.get("system"):
        turns.insert(0, Message("system", value["system"]))
    return Chat(check_turns(turns), (), _domain(value))


def parse_row(value: object) -> Chat | Pretokenised:
    """The conversation, or the token ids, of a row in any of the shapes above. Raises `BadRow`."""
    if not isinstance(value, Mapping):
        raise BadRow("the row is not a JSON object")
    if value.get("input_ids") is not None:
        return _pretokenised(value)
    for field, role_key, text_key in (("messages", "role", "content"), ("conversations", "from", "value")):
        turns = value.get(field)
        if turns is None:
            continue
        if not isinstance(turns, list):
            raise BadRow(f"`{field}` is not a list")
        if turns and isinstance(turns[0], Mapping) and role_key not in turns[0] and "role" in turns[0]:
            role_key, text_key = "role", "content"
        for media in DROPPED_MEDIA:
            if value.get(media):
                raise BadRow(f"the row has `{media}`; only text can be trained on")
        messages = _merge_calls([_message(turn, n, role_key, text_key) for n, turn in enumerate(turns, start=1)])
        if field == "conversations" and value.get("system") and messages and messages[0].role != "system":
            messages.insert(0, Message("system", value["system"]))
        return Chat(check_turns(messages), _tools(value.get("tools")), _domain(value))
    if "instruction" in value:
        return _alpaca(value)
    raise BadRow("the row has neither `messages` nor `conversations`")


def parse_chat(value: object) -> Chat:
    """As `parse_row`, for a place that needs text. Raises `BadRow` for token ids."""
    parsed = parse_row(value)
    if isinstance(parsed, Pretokenised):
        raise BadRow(TOKEN_IDS)
    return parsed
