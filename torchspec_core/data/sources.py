"""Streaming readers of conversations: the packages of `packages.py` and a user's own JSON lines.

A reader yields, in file order, a `Conversation` for each row that can be used and a `Rejected` for each that cannot.
Rows of a fixed package that are merely of another shape (a dialogue that starts in the middle) are `filtered`: known,
counted, harmless. Rows of a user's file that break the format are `rejected`: a few are tolerated, many stop the run.
`sample_id` is a hash of the messages alone, so equal conversations have equal ids wherever they come from.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torchspec_core.data.jsonstream import Broken, Record, read_collection, read_lines
from torchspec_core.data.packages import SOURCE_FILES, ship
from torchspec_core.errors import UserError

MAX_TURN_CHARS = 1_000_000
ROLES = {"system": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant"}
Kind = Literal["rejected", "filtered"]


class Message(NamedTuple):
    """One turn; `role` is system, user or assistant."""

    role: str
    content: str


@dataclass(frozen=True)
class Conversation:
    """A usable conversation; [start, end) is its byte range in the source's file (0, 0 in the chatterbot corpus)."""

    sample_id: str
    messages: tuple[Message, ...]
    source: str
    domain: str
    row: int
    src_id: str = ""
    start: int = 0
    end: int = 0


@dataclass(frozen=True)
class Rejected:
    """A row that is not used: where it is (1-based), why, and whether it counts against `data.max_rejected`."""

    source: str
    row: int
    reason: str
    kind: Kind = "rejected"

    def to_json(self) -> str:
        """One line of `rejected.jsonl`."""
        return json.dumps(asdict(self), ensure_ascii=True)


class BadRow(ValueError):
    """A row that cannot be used; the message is the reason."""


def content_id(messages: Sequence[tuple[str, str]]) -> str:
    """Blake2b-128 (hex) of the messages: the stable id of a sample."""
    text = json.dumps([list(message) for message in messages], ensure_ascii=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def check_text(text: object, what: str) -> str:
    """`text` when it is text that a tokenizer can take; raises `BadRow` that names `what` otherwise."""
    if not isinstance(text, str):
        raise BadRow(f"{what} is not text")
    if not text.strip():
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


def check_turns(messages: Sequence[Message]) -> tuple[Message, ...]:
    """`messages` when they are an optional system message, then user and assistant in turn; else raises `BadRow`."""
    turns = messages[1:] if messages and messages[0].role == "system" else messages
    if not turns:
        raise BadRow("there are no messages")
    for number, message in enumerate(turns, start=1):
        wanted = "user" if number % 2 else "assistant"
        if message.role != wanted:
            raise BadRow(f"turn {number} is by the {message.role}, expected the {wanted}")
    return tuple(Message(m.role, check_text(m.content, f"turn {n}")) for n, m in enumerate(messages, start=1))


def parse_messages(value: object) -> tuple[Message, ...]:
    """The messages of an OpenAI row (`messages`: role, content) or a ShareGPT row (`conversations`: from, value)."""
    if not isinstance(value, Mapping):
        raise BadRow("the row is not a JSON object")
    for field, role_key, text_key in (("messages", "role", "content"), ("conversations", "from", "value")):
        if field not in value:
            continue
        turns = value[field]
        if not isinstance(turns, list):
            raise BadRow(f"`{field}` is not a list")
        messages = []
        for number, turn in enumerate(turns, start=1):
            if not isinstance(turn, Mapping) or role_key not in turn or text_key not in turn:
                raise BadRow(f"turn {number} has no `{role_key}` and `{text_key}`")
            role = turn[role_key]
            if not isinstance(role, str) or role not in ROLES:
                raise BadRow(f"turn {number} has the unknown role {str(role)[:40]!r}")
            messages.append(Message(ROLES[role], turn[text_key]))
        return check_turns(messages)
    raise BadRow("the row has neither `messages` nor `conversations`")


def _parse_sharegpt(value: object) -> tuple[Message, ...]:
    messages = parse_messages(value)
    if messages[0].role == "system":
        raise BadRow("the conversation starts with the system")
    if len(messages) < 2:
        raise BadRow("the conversation has no answer")
    return messages


def _parse_chitchat(value: object) -> tuple[Message, ...]:
    """A chat between two people: bursts of messages, the speakers taking turns; the first one is the user."""
    bursts = value.get("messages") if isinstance(value, Mapping) else None
    if not isinstance(bursts, list):
        raise BadRow("the row has no `messages`")
    if len(bursts) < 4:
        raise BadRow("the chat has fewer than 4 turns")
    roles = ("user", "assistant")
    texts = ["\n".join(str(line["text"]) for line in burst) for burst in bursts]
    return check_turns([Message(roles[n % 2], text) for n, text in enumerate(texts)])


@dataclass(frozen=True)
class _Format:
    """How the rows of one source are read: layout, row parser, domain, and what a bad row counts as."""

    read: Callable[[Path], Iterator[Record | Broken]]
    parse: Callable[[object], tuple[Message, ...]]
    domain: str
    bad: Kind


FORMATS: dict[str, _Format] = {
    "sharegpt": _Format(read_collection, _parse_sharegpt, "chat", "filtered"),
    "chitchat": _Format(read_collection, _parse_chitchat, "chitchat", "filtered"),
    "jsonl": _Format(read_lines, parse_messages, "user", "rejected"),
}


def source_path(name: str, path: str | None = None) -> Path:
    """The file that the source `name` reads: the package's, or the user's `path`."""
    if path is None and name in FORMATS and name in SOURCE_FILES:
        (file,) = SOURCE_FILES[name]
        return ship(file.dist, file.path)
    if path is None:
        raise UserError(f"the data source {name!r} needs a `path`: name the file in the recipe")
    if not Path(path).is_file():
        raise UserError(f"the data source {name!r} names {path}, which is not a file: correct the path in the recipe")
    return Path(path)


def source_label(name: str, path: str | None = None) -> str:
    """The name that rows of a source carry."""
    return name if path is None else f"{name}:{Path(path).name}"


def _id_of(record: Record) -> str:
    value = record.value.get("id") if isinstance(record.value, Mapping) else None
    return str(value) if isinstance(value, str | int) else record.key


def read_conversations(name: str, path: str | None = None) -> Iterator[Conversation | Rejected]:
    """The rows of a source in file order; holds one record at a time. Raises `UserError` when the file is missing."""
    if name == "chatterbot":
        yield from _read_chatterbot()
        return
    form = FORMATS[name]
    label = source_label(name, path)
    for record in form.read(source_path(name, path)):
        if isinstance(record, Broken):
            yield Rejected(label, record.row, record.reason, form.bad)
            continue
        try:
            messages = form.parse(record.value)
        except BadRow as error:
            yield Rejected(label, record.row, str(error), form.bad)
            continue
        yield Conversation(
            content_id(messages), messages, label, form.domain, record.row, _id_of(record), record.start, record.end
        )


def _read_chatterbot() -> Iterator[Conversation | Rejected]:
    """The English dialogues of the ChatterBot corpus: small YAML files, each read whole."""
    import yaml

    row = 0
    for file in SOURCE_FILES["chatterbot"]:
        corpus: Mapping[str, Any] = yaml.load(ship(file.dist, file.path).read_text("utf-8"), yaml.CSafeLoader)
        for dialogue in corpus["conversations"]:
            row += 1
            roles = ("user", "assistant")
            try:
                # YAML reads some one-word turns as numbers or booleans.
                messages = check_turns([Message(roles[n % 2], str(text)) for n, text in enumerate(dialogue)])
            except BadRow as error:
                yield Rejected("chatterbot", row, str(error), "filtered")
                continue
            yield Conversation(content_id(messages), messages, "chatterbot", Path(file.path).stem, row)
