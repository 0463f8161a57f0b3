"""Conversations to token ids and a loss mask, by the target tokenizer's own chat template.

One mask rule: supervised tokens are those that the model itself would have emitted, the end-of-turn token included;
never text that the template inserts (headers, generation prompt, an empty think block, the newline after the end of
turn).

How: the whole conversation is rendered once. For each supervised assistant turn the messages before it are rendered
with the generation prompt, which is exactly what a server would have put before the model; that text must be a prefix
of the whole (a template for which it is not cannot be supervised at that turn: `BrokenPrefix`). What follows, up to the
end-of-turn token, the model emitted: reasoning, content, tool calls. The text is cut at these places and each piece is
encoded by itself, as a server encodes the prompt by itself, so a token never straddles the border and the mask is the
pieces' token counts. Where a template puts other text before the content, or trims it, the place of the content is
found by rendering once more with a mark in its stead.

A tokenizer that adds a space at the start of every text (Llama 2, Mistral) cannot encode pieces: there the whole text
is encoded once and a token is supervised when it covers a character of a supervised piece.

Control-token text inside a message ("<|im_end|>" typed by a user) is broken up before encoding, so that it stays text.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from jinja2 import TemplateError
from tokenizers import Tokenizer

from torchspec_core.data import runs
from torchspec_core.data.messages import BadRow, Message
from torchspec_core.data.template import ChatTemplate
from torchspec_core.data.words import word_encoder
from torchspec_core.errors import UserError

Policy = Literal["all", "last", "last-if-thinking"]
Tools = Sequence[Mapping[str, Any]]
# Unicode noncharacters, never in valid text: where control-token text is to be broken up, and where content stands.
_BREAK = "\ufdd0"
_MARK = "\ufdd1"
# An opened and closed block of reasoning with nothing in it, or the rest of one that the generation prompt opened.
_EMPTY_BLOCK = re.compile(r"\s*(?:[<\[]\w+[>\]])?\s*[<\[]/\w+[>\]]\s*")
_THINK_END = "</think>"
_NO_REASONING = "the template leaves out its reasoning"
_KEEP_OR_DROP = "set data.supervise=last-if-thinking if it keeps the last turn's, else data.reasoning=drop"


class BrokenPrefix(UserError):
    """The template cannot be supervised at a turn: what a server would have sent before it is not in the whole text."""


@dataclass(frozen=True)
class Piece:
    """A stretch of the rendered text, and whether the model would have emitted it."""

    text: str
    supervised: bool


@dataclass(frozen=True)
class Rendered:
    """Token ids and run lengths of the mask (`runs`)."""

    input_ids: list[int]
    runs: list[int]


def _thought(message: Message) -> str:
    """The reasoning of an assistant turn: its own field, or what its content has before the closing tag."""
    if message.reasoning or _THINK_END not in message.content:
        return message.reasoning.strip()
    return message.content.split(_THINK_END)[0].split("<think>")[-1].strip()


def _without_thought(message: Message) -> Message:
    content = message.content
    if message.role == "assistant" and content.lstrip().startswith("<think>") and _THINK_END in content:
        content = content.split(_THINK_END, 1)[1].lstrip("\n")
    if not content.strip() and not message.tool_calls:
        raise BadRow("a turn is empty without its reasoning")
    return message._replace(content=content, reasoning="")


def supervised_turns(messages: Sequence[Message], policy: Policy) -> list[int]:
    """The assistant turns to supervise.

    `last`: the last one, and those before it that only tool turns separate from it; `last-if-thinking`: `last` where a
    turn has reasoning (templates drop it from earlier turns), else `all`.
    """
    answers = [i for i, m in enumerate(messages) if m.role == "assistant"]
    if policy == "last-if-thinking":
        policy = "last" if any(_thought(messages[i]) for i in answers) else "all"
    if policy == "all" or not answers:
        return answers
    first = len(answers) - 1
    while first and all(m.role == "tool" for m in messages[answers[first - 1] + 1 : answers[first]]):
        first -= 1
    return answers[first:]


class Renderer:
    """The chat template and tokenizer of one target folder."""

    def __init__(
        self, tokenizer: Tokenizer, template: str, name: str, eos_ids: Sequence[int], variables: dict[str, Any]
    ) -> None:
        """`name` is how errors call the template; `variables` are the template's own (`bos_token`, ...)."""
        self.tokenizer = tokenizer
        self.name = name
        self.template = ChatTemplate(template, variables)
        self.end_tokens = tuple(filter(None, (tokenizer.id_to_token(i) for i in eos_ids)))
        added = tokenizer.get_added_tokens_decoder().values()
        # An assistant may write tokens such as <think> itself; nobody else may write one that the template uses.
        self.special = _any_of(t.content for t in added if t.special)
        self.control = _any_of(t.content for t in added if t.special or t.content in template)
        # Pieces can be encoded one by one only if the tokenizer adds nothing at the start of a text.
        self.by_piece = self.decode([*self._ids("a:"), *self._ids("b")]) == "a:b"
        self.words = word_encoder(tokenizer) if self.by_piece else None

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, control tokens shown."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=False)

    def text(self, messages: Sequence[Message], generate: bool = False, tools: Tools = ()) -> str:
        """The template's text of `messages`; `generate` adds the generation prompt. Raises `BadRow` if it refuses."""
        return self.template.render(messages, tools, generate)

    def pieces(
        self, messages: Sequence[Message], policy: Policy = "all", tools: Tools = (), keep_reasoning: bool = True,
        control_text: bool = False,
    ) -> list[Piece]:  # fmt: skip
        """The rendered text of a conversation cut into unsupervised and supervised pieces.

        keep_reasoning: False leaves the reasoning out of every turn. control_text: True lets control-token text inside
        a message become the token. Raises `BadRow` when the template refuses the conversation, `BrokenPrefix` when it
        breaks the prefix rule.
        """
        if not keep_reasoning:
            messages = [_without_thought(m) for m in messages]
        if not control_text:
            messages, tools = [self._shielded(m) for m in messages], self._shielded_tools(tools)
        full = self.text(messages, tools=tools)
        pieces: list[Piece] = []
        at = 0
        for index in supervised_turns(messages, policy):
            start, end = self._emitted(full, messages, tools, index)
            pieces += [Piece(full[at:start], False), Piece(full[start:end], True)]
            at = end
        pieces.append(Piece(full[at:], False))
        if not self.by_piece and _BREAK in full:
            raise BadRow("a message holds control-token text, which this tokenizer cannot keep as text")
        return [piece for piece in pieces if piece.text]

    def prompt(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        """Token ids of `messages` and the generation prompt: what a server puts before the model's next turn."""
        shielded = [self._shielded(m) for m in messages]
        text = self.text(shielded, generate=True, tools=self._shielded_tools(tools))
        return self.encode([[Piece(text, False)]])[0].input_ids

    def _broken(self, text: str, pattern: re.Pattern[str] | None) -> str:
        if _BREAK in text or _MARK in text:
            raise BadRow("a turn holds the noncharacter U+FDD0 or U+FDD1")
        if pattern is None or not pattern.search(text):
            return text
        return pattern.sub(lambda m: m[0][:1] + _BREAK + m[0][1:], text)

    def _shielded(self, message: Message) -> Message:
        pattern = self.special if message.role == "assistant" else self.control
        content = self._broken(message.content, pattern)
        if not message.reasoning and not message.tool_calls:
            return message if content is message.content else message._replace(content=content)
        calls = tuple((name, self._broken(arguments, pattern), i) for name, arguments, i in message.tool_calls)
        reasoning = self._broken(message.reasoning, pattern)
        return message._replace(content=content, reasoning=reasoning, tool_calls=calls)

    def _shielded_tools(self, tools: Tools) -> Tools:
        if not tools:
            return tools
        return tuple(json.loads(self._broken(json.dumps(list(tools), ensure_ascii=False), self.control)))

    def _emitted(self, full: str, messages: Sequence[Message], tools: Tools, index: int) -> tuple[int, int]:
        """Where, in `full`, the text lies that the model emitted as message `index`."""
        prompt = self.text(messages[:index], True, tools)
        if not full.startswith(prompt):
            self._refuse(index, "what a server sends before the turn is not how the whole conversation starts")
        message, start = messages[index], len(prompt)
        if not message.reasoning and not message.tool_calls and full.startswith(message.content, start):
            end = self._end_of_turn(full, start + len(message.content))
            if end is not None:
                return start, end
        start, end = self._located(full, messages, tools, index, start)
        if message.tool_calls:
            end = self._end_of_calls(full, messages, tools, index, end)
            if not all(name in full[start:end] for name, _, _ in message.tool_calls):
                raise BadRow(f"the chat template leaves out the tool calls of turn {index + 1}")
            if message.reasoning.strip() not in full[start:end]:
                self._refuse(index, _NO_REASONING, _KEEP_OR_DROP)
            return start, end
        return start, self._end_of_turn(full, end) or end

    def _end_of_turn(self, full: str, place: int) -> int | None:
        """Where the end-of-turn token ends that follows `place`, if nothing but white space lies between."""
        found = [(full.find(token, place), len(token)) for token in self.end_tokens]
        ends = [(at, length) for at, length in found if at >= 0 and not full[place:at].strip()]
        return sum(min(ends)) if ends else None

    def _marked(self, messages: Sequence[Message], tools: Tools, index: int, content: str) -> str:
        turn = messages[index]._replace(content=content)
        return self.text([*messages[:index], turn, *messages[index + 1 :]], False, tools)

    def _located(
        self, full: str, messages: Sequence[Message], tools: Tools, index: int, start: int
    ) -> tuple[int, int]:  # fmt: skip
        """The start of what was emitted and the end of the content, where the template adds to it or trims it."""
        message = messages[index]
        head = message.content[: message.content.rfind(_THINK_END) + len(_THINK_END)] if (
            not message.reasoning and _THINK_END in message.content
        ) else ""  # fmt: skip
        marked = self._marked(messages, tools, index, head + _MARK)
        if _MARK not in marked[start:] and message.tool_calls and not message.content:
            return start, start  # a call is all there is, and the template has no place for content beside it
        opening = marked[start : max(start, marked.find(_MARK))]
        at = start + len(opening)
        content = message.content[len(head) :]
        forms = (content, content.lstrip("\n"), content.lstrip(), content.rstrip(), content.strip())
        shown = next((text for text in forms if full.startswith(text, at)), None)
        if not full.startswith(opening, start) or shown is None or _MARK not in marked[start:]:
            later = index + 1 < len(messages)
            self._refuse(
                index, "the turn is rendered differently once another one follows it" if later
                else "the turn's text is not found after the generation prompt",
            )  # fmt: skip
        thought = _thought(message)
        if thought and thought not in opening:
            self._refuse(index, _NO_REASONING, _KEEP_OR_DROP)
        # An empty block that stands before the turn's own thought, too, is the template's.
        empty = _EMPTY_BLOCK.match(opening)
        added = empty.end() if empty and thought in opening[empty.end() :] else 0
        return start + added, at + len(shown)

    def _end_of_calls(self, full: str, messages: Sequence[Message], tools: Tools, index: int, place: int) -> int:
        """Where a turn that calls tools ends: its end-of-turn token, before the next message's content."""
        until = len(full)
        if index + 1 < len(messages):
            marked = self._marked(messages, tools, index + 1, _MARK)
            until = marked.find(_MARK) if _MARK in marked else until
        found = [(full.find(token, place, until), len(token)) for token in self.end_tokens]
        ends = [(at, length) for at, length in found if at >= 0]
        if ends:
            return sum(min(ends))
        alone = self.text(messages[: index + 1], False, tools)
        if not full.startswith(alone):
            self._refuse(index, "no end-of-turn token follows its tool calls")
        return len(alone)

    def _refuse(self, index: int, why: str, advice: str = "") -> NoReturn:
        advice = advice or "set data.supervise=last or use another template"
        where = f"the chat template of {self.name} cannot be supervised at turn {index + 1}"
        raise BrokenPrefix(f"{where}: {why}; {advice}")

    def encode(self, batch: Sequence[Sequence[Piece]]) -> list[Rendered]:
        """Token ids and mask runs of each conversation of a batch ."""
        if not self.by_piece:
            return self._encode_whole(batch)
        texts = [part for pieces in batch for piece in pieces for part in piece.text.split(_BREAK)]
        encoded = iter(self._encode_texts(texts))
        rendered = []
        for pieces in batch:
            ids: list[int] = []
            lengths = []
            for piece in pieces:
                before = len(ids)
                for _ in range(piece.text.count(_BREAK) + 1):
                    ids += next(encoded)
                lengths.append((len(ids) - before, piece.supervised))
            rendered.append(Rendered(ids, runs.merge(lengths)))
        return rendered

    def _encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text: by words where that is certain to be the same, the others by the tokenizer."""
        if self.words is None:
            return [e.ids for e in self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
        found = [self.words.encode(text) for text in texts]
        rest = [text for text, ids in zip(texts, found, strict=True) if ids is None]
        others = iter(self.tokenizer.encode_batch_fast(rest, add_special_tokens=False)) if rest else iter(())
        return [next(others).ids if ids is None else ids for ids in found]

    def _encode_whole(self, batch: Sequence[Sequence[Piece]]) -> list[Rendered]:
        texts = ["".join(piece.text for piece in pieces) for pieces in batch]
        rendered = []
        for pieces, encoded in zip(batch, self.tokenizer.encode_batch(texts, add_special_tokens=False), strict=True):
            emitted, at = [], 0
            for piece in pieces:
                if piece.supervised:
                    emitted.append((at, at + len(piece.text)))
                at += len(piece.text)
            mask = ((1, any(start < b and end > a for a, b in emitted)) for start, end in encoded.offsets)
            rendered.append(Rendered(encoded.ids, runs.merge(mask)))
        return rendered


def _any_of(texts: Iterable[str]) -> re.Pattern[str] | None:
    longest_first = sorted(set(texts), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


def load_tokenizer(folder: Path) -> Tokenizer:
    """The fast tokenizer of a target folder, without truncation or padding."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise UserError(f"{folder} has no tokenizer.json: use a target that ships a fast tokenizer")
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _token_text(value: Any) -> str | None:
    return value.get("content") if isinstance(value, dict) else value


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text("utf-8")) if path.is_file() else {}


def eos_token_ids(folder: Path, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The ids that end a turn: what `facts.json` says, else the generation config's and the tokenizer's own."""
    facts, generation = _read(folder / "facts.json"), _read(folder / "generation_config.json")
    ids = facts.get("eos_token_ids") or generation.get("eos_token_id")
    listed = list(ids) if isinstance(ids, list) else [ids] if isinstance(ids, int) else []
    own = _token_text(_read(folder / "tokenizer_config.json").get("eos_token"))
    if own is not None and tokenizer.token_to_id(own) is not None:
        listed.append(tokenizer.token_to_id(own))
    return tuple(dict.fromkeys(listed))


def target_vocab_size(folder: Path) -> int:
    """V of a sealed target: the width of its head, which may be more than the tokenizer's tokens."""
    return int(_read(folder / "config.json")["vocab_size"])


def _template_of(folder: Path, config: dict[str, Any]) -> str:
    file = folder / "chat_template.jinja"
    template = file.read_text("utf-8") if file.is_file() else config.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    if not isinstance(template, str):
        raise UserError(
            f"the tokenizer in {folder} has no chat template: use an instruct model, or add chat_template.jinja"
        )
    return template


@functools.lru_cache(maxsize=4)
def load_renderer(folder: Path) -> Renderer:
    """The renderer of a target folder; raises `UserError` when it has no fast tokenizer or no chat template."""
    config = _read(folder / "tokenizer_config.json")
    tokenizer = load_tokenizer(folder)
    names = [name for name in config if name.endswith("_token") and _token_text(config[name]) is not None]
    variables = {name: _token_text(config[name]) for name in names}
    template = _template_of(folder, config)
    try:
        return Renderer(tokenizer, template, folder.name, eos_token_ids(folder, tokenizer), variables)
    except TemplateError as error:
        raise UserError(f"the chat template in {folder} is not valid: {error}") from error
