"""Token ids word by word: the same ids as the fast tokenizer's, for a quarter of its time.

A byte-level BPE cuts a text into words by regular expressions and encodes each word by itself, so the ids of a text are
those of its words in a row, and a word that was seen before need not be encoded again. The cutting is done here by
`re`, with the expressions that the tokenizer itself declares; the encoding of a new word is the tokenizer's model.

Where this might differ from the tokenizer it is not used: `word_encoder` returns None for a tokenizer of another kind
(and one that disagrees on a probe), `WordEncoder.encode` for a text that is not in the normal form, or that holds a
character whose Unicode class is not the same in every version of Unicode, since `re` and the tokenizer may know
different ones.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
import sys
import unicodedata
from collections.abc import Iterable
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import BPE

MOST_WORDS = 1 << 18
LONGEST_WORD = 64
# The expression of `ByteLevel(use_regex=True)`, GPT-2's.
BYTE_LEVEL = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SPACES = "\t\n\r \xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
# Spaces for some engines only, and letters that equal an ASCII letter when case is ignored.
_DISPUTED = frozenset("\x0b\x0c\x1c\x1d\x1e\x1f\x85\u0130\u0131\u017f\u180e\u212a")
_GROUPS = ("(?:", "(?i:", "(?!", "(?=", "(?>")
_PROBE = (
    "Hello  world, it's 2024: don't\n\n  stop!\tx = y+1;\r\n50% of 1234567, a1b2 <b>(c)</b>\n\n\n",
    " I'LL we've   \n \u4f60\u597d\uff0c\u4e16\u754c\u3002 \u041f\u0440\u0438\u0432\u0435\u0442 \u00c9t\u00e9",
    "def f(x):\n    return x**2  # \u201cok\u201d\u2026 \u2014\n\u00a0\u3000end ...!?\n",
)


def _is_stable(char: str) -> bool:
    kind = unicodedata.category(char)
    return kind not in ("Cn", "Co", "Cs") and kind == unicodedata.ucd_3_2_0.category(char) and char not in _DISPUTED


def _as_set(chars: Iterable[str]) -> str:
    """The inside of a character class for `re`."""
    spans: list[list[int]] = []
    for code in map(ord, chars):
        if spans and spans[-1][1] == code - 1:
            spans[-1][1] = code
        else:
            spans.append([code, code])
    return "".join(f"\\u{a:04x}-\\u{b:04x}" for a, b in spans)


@functools.cache
def _stable() -> tuple[str, ...]:
    """The characters, up to U+FFFF, of which every version of Unicode since 3.2 says the same."""
    return tuple(char for char in map(chr, range(0x10000)) if _is_stable(char))


@functools.cache
def _category(name: str) -> str:
    return _as_set(char for char in _stable() if unicodedata.category(char).startswith(name))


def translate(pattern: str) -> str | None:
    """A tokenizer's expression in the syntax of `re`, over stable characters; None when it has something unknown."""
    out: list[str] = []
    inside = False  # a character class
    at = 0
    while at < len(pattern):
        char, pair = pattern[at], pattern[at : at + 2]
        found = re.compile(r"\\p\{([A-Z][a-z]?)\}").match(pattern, at)
        if found or pair == r"\s":
            chars = _category(found[1]) if found else _SPACES
            out.append(chars if inside else f"[{chars}]")
            at = found.end() if found else at + 2
            continue
        if pair == r"\S" and not inside:
            out.append(f"[^{_SPACES}]")
            at += 2
            continue
        if char == "\\" and len(pair) == 2 and (pair[1] in "rnt" or not pair[1].isalnum()):
            out.append(pair)
            at += 2
            continue
        group = char == "(" and not inside
        if group and not pattern.startswith(_GROUPS, at):
            return None
        if char == "\\" or pair in ("&&", "[]", "}+") or (char == "[" and inside) or (char in "^$." and not inside):
            return None
        if char == "[" and pair == "[^":
            out.append("[^")
            inside, at = True, at + 2
            continue
        inside = char == "[" or (inside and char != "]")
        out.append(char)
        at += 1
    return "".join(out)


def _split(step: dict[str, Any]) -> list[str] | None:
    """The expressions by which one step of a pre-tokenizer isolates words; None for a step that does something else."""
    kind = step["type"]
    if kind == "Digits":
        return [r"\p{N}" if step["individual_digits"] else r"\p{N}+"]
    if kind == "ByteLevel" and not step["add_prefix_space"]:
        return [BYTE_LEVEL] if step["use_regex"] else []
    if kind == "Split" and step["behavior"] == "Isolated" and not step["invert"] and "Regex" in step["pattern"]:
        return [step["pattern"]["Regex"]]
    return None


def _steps(tokenizer: Tokenizer) -> list[re.Pattern[str]] | None:
    """The tokenizer's expressions in the order in which they apply; None when it is no byte-level one."""
    if tokenizer.pre_tokenizer is None:
        return None
    state = json.loads(tokenizer.pre_tokenizer.__getstate__())
    declared = state["pretokenizers"] if state["type"] == "Sequence" else [state]
    if [step["type"] for step in declared].count("ByteLevel") != 1 or declared[-1]["type"] != "ByteLevel":
        return None
    patterns: list[re.Pattern[str]] = []
    for step in declared:
        found = _split(step)
        translated = None if found is None else [translate(pattern) for pattern in found]
        if translated is None or None in translated:
            return None
        patterns += [re.compile(pattern) for pattern in translated if pattern is not None]
    return None if any(pattern.match("") for pattern in patterns) else patterns


def _added_tokens(tokenizer: Tokenizer, normal: str | None) -> list[dict[str, int]] | None:
    """The tokens that are cut out of a text before anything else: first those that are looked for in the text as it is,
    then those in its normal form. None when that depends on what is around them.
    """
    added = tokenizer.get_added_tokens_decoder()
    flags = [token.lstrip or token.rstrip or token.single_word for token in added.values()]
    odd = [t for t in added.values() if t.normalized and normal and not unicodedata.is_normalized(normal, t.content)]  # type: ignore[arg-type]
    if any(flags) or odd or tokenizer.encode_special_tokens:
        return None
    groups = [{t.content: number for number, t in added.items() if t.normalized == flag} for flag in (False, True)]
    return [group for group in groups if group]


@functools.cache
def _byte_chars() -> dict[int, str]:
    """The character by which a byte-level vocabulary writes each byte (GPT-2's table)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = (byte for byte in range(256) if byte not in plain)
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + n) for n, byte in enumerate(rest)}


class _Words(dict[str, tuple[int, ...]]):
    """The ids of words: those seen before, and by the model those that were not."""

    def __init__(self, model: BPE, added: list[dict[str, int]]) -> None:
        super().__init__({text: (number,) for group in added for text, number in group.items()})
        self[""] = ()
        self.model = model

    def __missing__(self, word: str) -> tuple[int, ...]:
        chars = _byte_chars()
        ids = tuple(token.id for token in self.model.tokenize("".join([chars[byte] for byte in word.encode()])))
        if len(word) <= LONGEST_WORD and len(self) < MOST_WORDS:
            self[sys.intern(word)] = ids
        return ids


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    return re.compile(f"({'|'.join(map(re.escape, sorted(texts, key=len, reverse=True)))})")


class WordEncoder:
    """The ids of texts without special tokens, by the expressions and the model of one byte-level tokenizer.

    Keeps up to 2^18 words (about 60 MB).
    """

    def __init__(
        self, model: BPE, steps: list[re.Pattern[str]], added: list[dict[str, int]], normal: str | None
    ) -> None:
        """`normal`: the normal form that a text must have already."""
        self.words = _Words(model, added)
        self.ids_of = self.words.__getitem__
        self.steps = [re.compile(f"({step.pattern})") for step in steps]
        self.find_last = steps[-1].findall
        self.added = [_any_of(group) for group in added]
        self.unknown = re.compile(f"[^{_as_set(_stable())}]")
        self.normal = normal

    def _cut(self, text: str) -> list[str]:
        """The words of a text that holds no added token, in order; some may be empty."""
        parts = [text]
        for step in self.steps[:-1]:
            parts = [word for part in parts for word in step.split(part)]
        words: list[str] = []
        for part in parts:
            if len(part) > 1:
                words += self.find_last(part)
            elif part:  # one character is one word, whatever the expression says
                words.append(part)
        if sum(map(len, words)) != len(text):  # what the last expression does not match is a word too
            return [word for part in parts for word in self.steps[-1].split(part)]
        return words

    def _words_of(self, text: str, level: int = 0) -> list[str]:
        """As `_cut`, with the added tokens of `level` and later ones cut out first."""
        if level == len(self.added):
            return self._cut(text)
        parts = self.added[level].split(text)
        if len(parts) == 1:
            return self._words_of(text, level + 1)
        words: list[str] = []
        for number, part in enumerate(parts):
            if number % 2:
                words.append(part)
            elif part:
                words += self._words_of(part, level + 1)
        return words

    def encode(self, text: str) -> list[int] | None:
        """Token ids; None when only the tokenizer itself can be trusted with this text."""
        if self.unknown.search(text):
            return None
        if self.normal and not text.isascii() and not unicodedata.is_normalized(self.normal, text):  # type: ignore[arg-type]
            return None
        return list(itertools.chain.from_iterable(map(self.ids_of, self._words_of(text))))


def _normal_form(tokenizer: Tokenizer) -> tuple[bool, str | None]:
    """Whether the normaliser is nothing but a Unicode normal form, and which."""
    state = json.loads(tokenizer.normalizer.__getstate__()) if tokenizer.normalizer is not None else {}
    if not state or state.get("normalizers") == []:
        return True, None
    return state["type"] == "NFC", state["type"]


def word_encoder(tokenizer: Tokenizer) -> WordEncoder | None:
    """The encoder of a byte-level BPE tokenizer; None for any other, and for one that it does not agree with."""
    plain, normal = _normal_form(tokenizer)
    if not plain:
        return None
    steps, added, model = _steps(tokenizer), _added_tokens(tokenizer, normal), tokenizer.model
    if not steps or added is None or not isinstance(model, BPE) or model.dropout:
        return None
    encoder = WordEncoder(model, steps, added, normal)
    for text in _PROBE:
        ids = encoder.encode(text)
        if ids is not None and ids != tokenizer.encode(text, add_special_tokens=False).ids:
            return None
    return encoder
