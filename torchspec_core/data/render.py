"""Conversations to token ids and a loss mask, by the target tokenizer's own chat template.

One mask rule: supervised tokens are those that the model itself would have emitted, the end-of-turn token included;
never text that the template inserts (headers, generation prompt, an empty think block, the newline after the end of
turn).

How: the whole conversation is rendered once. For each supervised assistant turn the messages before it are rendered
with the generation prompt, which is exactly what a server would have put before the model; that text must be a prefix
of the whole (a template for which it is not cannot be supervised at that turn: `UserError`). The turn's content
follows it, then the end-of-turn token. The text is cut at these places and each piece is encoded by itself, as a
server encodes the prompt by itself, so a token never straddles the border and the mask is the pieces' token counts.

Special-token text inside a message ("<|im_end|>" typed by a user) is broken up before encoding, so that it stays
text.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from torchspec_core.data import runs
from torchspec_core.data.sources import BadRow, Message
from torchspec_core.errors import UserError

Policy = Literal["all", "last"]
# A Unicode noncharacter: never in valid text, so it can mark where special-token text is to be broken up.
_BREAK = "\ufdd0"


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


def _environment() -> ImmutableSandboxedEnvironment:
    # The same dialect as `transformers` gives to templates, but without `strftime_now`: a rendered sample must not
    # depend on the day it was made, and templates fall back to a fixed date.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], keep_trailing_newline=False
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    return environment


def _token_text(value: Any) -> str | None:
    return value.get("content") if isinstance(value, dict) else value


class Renderer:
    """The chat template and tokenizer of one target folder."""

    def __init__(
        self, tokenizer: Tokenizer, template: str, name: str, eos_ids: Sequence[int], variables: dict[str, Any]
    ) -> None:
        """`name` is how errors call the template; `variables` are the template's own (`bos_token`, ...)."""
        self.tokenizer = tokenizer
        self.name = name
        self.template = _environment().from_string(template)
        self.variables = variables
        self.end_tokens = tuple(filter(None, (tokenizer.id_to_token(i) for i in eos_ids)))
        special = [t.content for t in tokenizer.get_added_tokens_decoder().values() if t.special]
        longest_first = sorted(special, key=len, reverse=True)
        self.special = re.compile("|".join(map(re.escape, longest_first))) if special else None
        self._check_tokenizer()

    def _check_tokenizer(self) -> None:
        """Pieces can be encoded one by one only if the tokenizer adds nothing at the start of a text."""
        ids = [*self._ids("a:"), *self._ids("b")]
        if self.decode(ids) != "a:b":
            raise UserError(
                f"the tokenizer of {self.name} adds text at the start of every input, which the loss mask cannot "
                "follow; use a target with a byte-level tokenizer"
            )

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, control tokens shown."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=False)

    def text(self, messages: Sequence[Message], generate: bool = False) -> str:
        """The template's text of `messages`; `generate` adds the generation prompt. Raises `BadRow` if it refuses."""
        try:
            return self.template.render(
                messages=[m._asdict() for m in messages], add_generation_prompt=generate, **self.variables
            )
        except TemplateError as error:
            raise BadRow(f"the chat template refuses the conversation: {error}") from error

    def pieces(self, messages: Sequence[Message], policy: Policy = "all") -> list[Piece]:
        """The rendered text of a conversation cut into unsupervised and supervised pieces.

        Raises `BadRow` when the template refuses the conversation, `UserError` when it breaks the prefix rule.
        """
        messages = [self._shielded(m) for m in messages]
        answers = [i for i, m in enumerate(messages) if m.role == "assistant"]
        full = self.text(messages)
        pieces: list[Piece] = []
        at = 0
        for index in answers[-1:] if policy == "last" else answers:
            start, end = self._emitted(full, messages, index)
            pieces += [Piece(full[at:start], False), Piece(full[start:end], True)]
            at = end
        pieces.append(Piece(full[at:], False))
        return [piece for piece in pieces if piece.text]

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of `messages` and the generation prompt: what a server puts before the model's next turn."""
        text = self.text([self._shielded(m) for m in messages], generate=True)
        return self.encode([[Piece(text, False)]])[0].input_ids

    def _shielded(self, message: Message) -> Message:
        if _BREAK in message.content:
            raise BadRow("a turn holds the noncharacter U+FDD0")
        if self.special is None or not self.special.search(message.content):
            return message
        broken = self.special.sub(lambda m: m[0][:1] + _BREAK + m[0][1:], message.content)
        return message._replace(content=broken)

    def _emitted(self, full: str, messages: Sequence[Message], index: int) -> tuple[int, int]:
        """Where, in `full`, the text lies that the model emitted as message `index`."""
        prompt = self.text(messages[:index], generate=True)
        if not full.startswith(prompt):
            self._refuse(index, "what a server sends before the turn is not how the whole conversation starts")
        content = messages[index].content
        start = len(prompt)
        upto = len(full)
        if not full.startswith(content, start):
            content, start, upto = self._locate(full, messages, index, start)
        end = start + len(content)
        found = [(full.find(token, end, upto), len(token)) for token in self.end_tokens]
        ends = [(place, length) for place, length in found if place >= 0 and not full[end:place].strip()]
        return start, sum(min(ends)) if ends else end

    def _locate(self, full: str, messages: Sequence[Message], index: int, start: int) -> tuple[str, int, int]:
        """The content, its start and the end of the turn, where the template puts text before it or trims it."""
        until = self.text(messages[: index + 1])
        if not full.startswith(until):
            self._refuse(index, "the turn is rendered differently once another one follows it")
        for content in (messages[index].content, messages[index].content.strip()):
            place = full.find(content, start, len(until))
            if content and place >= 0:
                return content, place, len(until)
        self._refuse(index, "the turn's text is not found after the generation prompt")

    def _refuse(self, index: int, why: str) -> NoReturn:
        raise UserError(
            f"the chat template of {self.name} cannot be supervised at turn {index + 1}: {why}; "
            "set data.supervise=last or use another template"
        )

    def encode(self, batch: Sequence[Sequence[Piece]]) -> list[Rendered]:
        """Token ids and mask runs of each conversation of a batch (all pieces in one call to the fast tokenizer)."""
        texts = [part for pieces in batch for piece in pieces for part in piece.text.split(_BREAK)]
        encoded = iter(self.tokenizer.encode_batch_fast(texts, add_special_tokens=False))
        rendered = []
        for pieces in batch:
            ids: list[int] = []
            lengths = []
            for piece in pieces:
                before = len(ids)
                for _ in range(piece.text.count(_BREAK) + 1):
                    ids += next(encoded).ids
                lengths.append((len(ids) - before, piece.supervised))
            rendered.append(Rendered(ids, runs.merge(lengths)))
        return rendered


def load_tokenizer(folder: Path) -> Tokenizer:
    """The fast tokenizer of a target folder, without truncation or padding."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise UserError(f"{folder} has no tokenizer.json: use a target that ships a fast tokenizer")
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


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
        return Renderer(tokenizer, template, str(folder), eos_token_ids(folder, tokenizer), variables)
    except TemplateError as error:
        raise UserError(f"the chat template in {folder} is not valid: {error}") from error
