"""Where conversations come from: packages by name, a user's own files or folder, a data set of the Hub.

A reader yields, in file order, a `Conversation` for each row that can be used and a `Rejected` for each that cannot.
Rows of a fixed package that are merely of another shape (a dialogue that starts in the middle) are `filtered`: known,
counted, harmless. Rows of a user's file that break the format are `rejected`: a few are tolerated, many stop the run.
`sample_id` is a hash of the messages alone, so equal conversations have equal ids wherever they come from.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from torchspec_core.data import files
from torchspec_core.data.files import Layout
from torchspec_core.data.jsonstream import Broken
from torchspec_core.data.messages import (
    TOKEN_IDS,
    BadRow,
    Chat,
    Message,
    Pretokenised,
    check_turns,
    content_id,
    parse_chat,
    parse_row,
)
from torchspec_core.data.packages import SDIST_FILES, SOURCE_FILES, sdist_file, ship
from torchspec_core.errors import UserError

__all__ = ["BadRow", "Conversation", "Message", "Rejected", "SourceFile", "content_id", "read_conversations"]

Kind = Literal["rejected", "filtered"]


@dataclass(frozen=True)
class Conversation:
    """A usable conversation."""

    sample_id: str
    messages: tuple[Message, ...]
    source: str
    domain: str
    row: int
    src_id: str = ""
    tools: tuple[Mapping[str, Any], ...] = ()


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


@dataclass(frozen=True)
class SourceFile:
    """One file of a source: the name of the source (which says how a row is read), the label its rows carry."""

    name: str
    label: str
    path: Path
    layout: Layout


def _parse_sharegpt(value: object) -> Chat:
    chat = parse_chat(value)
    if chat.messages[0].role == "system":
        raise BadRow("the conversation starts with the system")
    if len(chat.messages) < 2:
        raise BadRow("the conversation has no answer")
    return chat


def _parse_chitchat(value: object) -> Chat:
    """A chat between two people: bursts of messages, the speakers taking turns; the first one is the user."""
    bursts = value.get("messages") if isinstance(value, Mapping) else None
    if not isinstance(bursts, list):
        raise BadRow("the row has no `messages`")
    if len(bursts) < 4:
        raise BadRow("the chat has fewer than 4 turns")
    roles = ("user", "assistant")
    texts = ["\n".join(str(line["text"]) for line in burst) for burst in bursts]
    return Chat(check_turns([Message(roles[n % 2], text) for n, text in enumerate(texts)]))


@dataclass(frozen=True)
class _Format:
    """How the rows of one source are read: row parser, domain, and what a bad row counts as."""

    parse: Callable[[object], Chat | Pretokenised]
    domain: str
    bad: Kind


FORMATS: dict[str, _Format] = {
    "sharegpt": _Format(_parse_sharegpt, "chat", "filtered"),
    "chitchat": _Format(_parse_chitchat, "chitchat", "filtered"),
    "jsonl": _Format(parse_row, "user", "rejected"),
    "file": _Format(parse_row, "user", "rejected"),
    "hub": _Format(parse_row, "user", "rejected"),
    **{name: _Format(parse_row, name.split("_")[0], "filtered") for name in SDIST_FILES},
}
NEEDS_PATH = ("jsonl", "file", "hub")


def _hub_folder(name: str) -> Path:
    """A snapshot of the data set `ORG/NAME[@REVISION]`; raises `UserError` when there is no network for it."""
    repository, _, revision = name.partition("@")
    patterns = [f"*{suffix}{packed}" for suffix in files.SUFFIXES for packed in ("", *files.COMPRESSED)]
    try:
        from huggingface_hub import snapshot_download

        found = snapshot_download(
            repository, repo_type="dataset", revision=revision or None, allow_patterns=patterns, etag_timeout=10
        )
    except Exception as error:  # the library raises its own, requests' and httpx' errors
        offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") else ""
        raise UserError(
            f"the data set {name} could not be fetched from the Hub{offline}: {str(error).splitlines()[0][:200]}; "
            "check the name and the network, or download it and use the source `file` with its folder as `path`"
        ) from error
    return Path(found)


def source_paths(name: str, path: str | None = None) -> list[Path]:
    """The files that the source `name` reads: the package's, or those at the user's `path`. Raises `UserError`."""
    if path is None and name in SDIST_FILES:
        return [sdist_file(name)]
    if path is None and name in SOURCE_FILES:
        return [ship(file.dist, file.path) for file in SOURCE_FILES[name]]
    if path is None:
        raise UserError(f"the data source {name!r} needs a `path`: name the file in the recipe")
    if name == "hub":
        return files.data_files(_hub_folder(path))
    if name != "file" and not Path(path).is_file():
        raise UserError(f"the data source {name!r} names {path}, which is not a file: correct the path in the recipe")
    return files.data_files(Path(path).expanduser()) if name == "file" else [Path(path)]


def source_label(name: str, path: str | None = None) -> str:
    """The name that rows of a source carry."""
    return name if path is None else f"{name}:{path if name == 'hub' else Path(path).name}"


def source_files(name: str, path: str | None = None) -> list[SourceFile]:
    """The files of a source in the order they are read; several of one folder are told apart by their labels."""
    label = source_label(name, path)
    found = source_paths(name, path)
    root = Path(os.path.commonpath([p.parent for p in found]))
    labels = [label] if len(found) == 1 else [f"{label}/{p.relative_to(root).as_posix()}" for p in found]
    return [
        SourceFile(name, where, file, "lines" if name == "jsonl" else files.layout_of(file))
        for where, file in zip(labels, found, strict=True)
    ]


def _id_of(value: object, key: str) -> str:
    found = value.get("id") if isinstance(value, Mapping) else None
    return str(found) if isinstance(found, str | int) else key


def read_conversations(name: str, path: str | None = None) -> Iterator[Conversation | Rejected]:
    """The rows of a source in file order; holds one record at a time. Raises `UserError` when the file is missing."""
    if name == "chatterbot":
        yield from _read_chatterbot()
        return
    form = FORMATS[name]
    for file in source_files(name, path):
        for record in files.read_file(file.path, file.layout):
            if isinstance(record, Broken):
                yield Rejected(file.label, record.row, record.reason, form.bad)
                continue
            try:
                chat = form.parse(record.value)
                if isinstance(chat, Pretokenised):
                    raise BadRow(TOKEN_IDS)
            except BadRow as error:
                yield Rejected(file.label, record.row, str(error), form.bad)
                continue
            sample_id = content_id(chat.messages, chat.tools)
            domain = chat.domain or form.domain
            src_id = _id_of(record.value, record.key)
            yield Conversation(sample_id, chat.messages, file.label, domain, record.row, src_id, chat.tools)


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
