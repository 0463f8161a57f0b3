"""An answer as pieces of text: which of them the drafter wrote, which the target had to add."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path

from tokenizers import Tokenizer

Decode = Callable[[Sequence[int]], str]


def load_decoder(path: Path) -> Decode:
    """Token ids to text, special tokens left out."""
    tokenizer = Tokenizer.from_file(str(path))
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=True))


def drafted(count: int, steps: Sequence[int]) -> list[bool]:
    """For each of `count` new tokens: was it an accepted draft?

    The first token comes from reading the prompt; then each step adds its accepted drafts and one token of the target.
    The last step may reach past the limit of the answer.
    """
    flags = [False]
    for accepted in steps:
        flags += [True] * accepted + [False]
    return (flags + [False] * count)[:count]


def drafted_pieces(tokens: Sequence[int], steps: Sequence[int], decode: Decode) -> tuple[tuple[str, bool], ...]:
    """The text of `tokens` in runs of accepted drafts (True) and of the target's own tokens (False).

    Texts of prefixes are compared, as one character may take several tokens: it belongs to the token that completes it.
    """
    texts, shown = [], ""
    for end, flag in enumerate(drafted(len(tokens), steps), start=1):
        prefix = decode(tokens[:end])
        if end < len(tokens) and prefix.endswith("\ufffd"):
            continue
        texts.append((prefix[len(shown) :], flag))
        shown = prefix
    return tuple(("".join(text for text, _ in run), flag) for flag, run in groupby(texts, key=lambda item: item[1]))
