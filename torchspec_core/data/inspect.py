"""`torchspec data inspect`: conversations as the trainer will see them, supervised tokens coloured.

A wrong mask is silent in every number and obvious to the eye. Works on raw files (rendered here, on the target's
template) and on a finished tokens stage. Every boundary between two tokens is shown, control tokens by their names.
"""

from __future__ import annotations

import html
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from torchspec_core.data import runs
from torchspec_core.data.files import data_files, layout_of, read_file
from torchspec_core.data.jsonstream import Broken
from torchspec_core.data.messages import BadRow, Pretokenised, parse_row
from torchspec_core.data.render import BrokenPrefix, Policy, Rendered, Renderer, load_renderer, load_tokenizer
from torchspec_core.data.tokenset import INDEX_FILE, TokenSet
from torchspec_core.errors import UserError

_REPLACEMENT = "\ufffd"
# Two shades, so that neighbouring tokens can be told apart: supervised green, the rest grey.
_ANSI = {(True, 0): "\x1b[30;102m", (True, 1): "\x1b[30;42m", (False, 0): "\x1b[90m", (False, 1): "\x1b[37m"}
_ANSI_END = "\x1b[0m"
_STYLE = (
    "body{font:14px/1.6 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em;color:#111;background:#fff}"
    "pre{white-space:pre-wrap;overflow-wrap:anywhere;font:13px/1.7 ui-monospace,monospace;background:#f6f6f6;"
    "padding:.8em;border-radius:6px}.s{background:#b7e4c7}.s.o{background:#95d5b2}.u{color:#555}.u.o{color:#888}"
    ".bad{color:#b00020}"
)


@dataclass(frozen=True)
class Shown:
    """One conversation: its title, and its tokens as (text, supervised); `problem` when it is left out instead."""

    title: str
    tokens: tuple[tuple[str, bool], ...] = ()
    problem: str = ""


def token_texts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """The text of each token; bytes of one character that is spread over several tokens stand with the last of them."""
    texts: list[str] = []
    shown = ""
    start = 0
    for end in range(1, len(ids) + 1):
        # Decoding from the last whole character on: a token alone would lose its leading space in some tokenizers.
        text = tokenizer.decode(list(ids[start:end]), skip_special_tokens=False)
        if text.endswith(_REPLACEMENT) and end - start < 8:
            texts.append("")
            continue
        texts.append(text[len(shown) :] if text.startswith(shown) else text)
        start, shown = end - 1, tokenizer.decode([ids[end - 1]], skip_special_tokens=False)
    return texts


def _tokens(tokenizer: Tokenizer, sample: Rendered) -> tuple[tuple[str, bool], ...]:
    mask = runs.decode(sample.runs).tolist()
    return tuple(zip(token_texts(tokenizer, sample.input_ids), mask, strict=True))


def _title(name: str, sample: Rendered) -> str:
    return f"{name}: {len(sample.input_ids)} tokens, {runs.supervised(sample.runs)} supervised"


def _from_row(value: object, renderer: Renderer, policy: Policy, keep_reasoning: bool) -> Rendered:
    parsed = parse_row(value)
    if isinstance(parsed, Pretokenised):
        return Rendered(parsed.input_ids, runs.merge((1, bool(m)) for m in parsed.loss_mask))
    (sample,) = renderer.encode([renderer.pieces(parsed.messages, policy, parsed.tools, keep_reasoning)])
    return sample


def raw_samples(path: Path, target: Path, policy: Policy = "all", keep_reasoning: bool = True) -> Iterator[Shown]:
    """The rows of a file or folder of conversations, rendered and tokenized for the target in the folder `target`."""
    renderer = load_renderer(target)
    for file in data_files(path):
        for record in read_file(file, layout_of(file)):
            name = f"{file.name} row {record.row}"
            try:
                if isinstance(record, Broken):
                    raise BadRow(record.reason)
                sample = _from_row(record.value, renderer, policy, keep_reasoning)
            except (BadRow, BrokenPrefix) as error:
                yield Shown(name, problem=str(error))
                continue
            yield Shown(_title(name, sample), _tokens(renderer.tokenizer, sample))


def stage_samples(folder: Path, target: Path) -> Iterator[Shown]:
    """The samples of a finished tokens stage."""
    tokens, tokenizer = TokenSet(folder), load_tokenizer(target)
    for i in range(len(tokens)):
        row = tokens.get(i)
        sample = Rendered(row.input_ids.tolist(), runs.encode(row.loss_mask))
        yield Shown(_title(f"sample {i} ({row.sample_id[:12]})", sample), _tokens(tokenizer, sample))


def target_of(folder: Path) -> Path:
    """The target folder that a sealed tokens stage was made with, by its `spec.json`; raises `UserError`."""
    spec = folder / "spec.json"
    try:
        key = json.loads(spec.read_text())["spec"]["inputs"]["target"]
    except (OSError, ValueError, KeyError, TypeError):
        key = ""
    found = sorted(folder.resolve().parent.parent.glob(f"target/*-{key[:12]}")) if key else []
    if not found:
        raise UserError(f"the target of {folder} is not beside it: name its folder with --target")
    return found[0]


def samples(
    path: Path, target: Path | None, count: int, policy: Policy = "all", keep_reasoning: bool = True
) -> list[Shown]:
    """The first `count` conversations of a tokens stage, or of raw files (which need a `target`)."""
    if (path / INDEX_FILE).is_file():
        return list(itertools.islice(stage_samples(path, target or target_of(path)), count))
    if target is None:
        raise UserError(f"{path} holds raw conversations: name the target's folder (tokenizer, template) with --target")
    return list(itertools.islice(raw_samples(path, target, policy, keep_reasoning), count))


def to_terminal(shown: Sequence[Shown]) -> str:
    """Text with ANSI colours: supervised tokens on green, the others grey."""
    out = []
    for item in shown:
        out.append(f"\x1b[1m{_printable(item.title)}{_ANSI_END}")
        if item.problem:
            out.append(f"\x1b[31mleft out: {_printable(item.problem)}{_ANSI_END}")
        body = [_ANSI[on, i % 2] + _printable(text) + _ANSI_END for i, (text, on) in enumerate(item.tokens) if text]
        out.append("".join(body) + "\n")
    return "\n".join(out)


def _printable(text: str) -> str:
    """Control characters by name (a conversation must not drive the terminal); a line feed is shown and kept."""
    kept = "".join(c if c.isprintable() or c in "\n\t" else f"\\x{ord(c):02x}" for c in text)
    return kept.replace("\n", "↵\n")


def to_html(shown: Sequence[Shown]) -> str:
    """A page of its own with the same colours; every token is an element, so hovering tells them apart."""
    parts = [f"<!doctype html><meta charset=utf-8><title>Conversations</title><style>{_STYLE}</style>"]
    parts.append("<p><span class=s>On green</span>: what the model emitted, which is supervised.</p>")
    for item in shown:
        parts.append(f"<h3>{html.escape(item.title)}</h3>")
        if item.problem:
            parts.append(f"<p class=bad>left out: {html.escape(item.problem)}</p>")
            continue
        spans = []
        for i, (text, on) in enumerate(item.tokens):
            if text:
                kind = f"{'s' if on else 'u'}{' o' if i % 2 else ''}"
                spans.append(f'<span class="{kind}">{html.escape(_printable(text))}</span>')
        parts.append(f"<pre>{''.join(spans)}</pre>")
    return "\n".join(parts) + "\n"


def to_markdown(shown: Sequence[Shown]) -> str:
    """For the Prefect UI, which shows no colours: supervised stretches between « and »."""
    parts = ["What the model emitted, which is supervised, stands between « and »."]
    for item in shown:
        stretches = []
        for on, group in itertools.groupby(item.tokens, key=lambda token: token[1]):
            text = "".join(t for t, _ in group)
            stretches.append(f"«{text}»" if on else text)
        body = "".join(stretches) or f"left out: {item.problem}"
        safe = _printable(body).replace("↵", "").replace("~~~~", "~ ~ ~ ~")
        parts.append(f"**{item.title}**\n\n~~~~text\n{safe}\n~~~~")
    return "\n\n".join(parts)
