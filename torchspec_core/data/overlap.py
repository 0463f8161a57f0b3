"""When two prompts say the same thing: exact equality after normalisation, and shared word shingles.

Used to keep evaluation honest: nothing that is trained on may repeat, or nearly repeat, a prompt that is evaluated
on. Two texts overlap when they share a run of 13 words (the rule of the GPT-3 paper, appendix C), or when at least
half of the 5-word shingles of the shorter one occur in the other. Texts of fewer than 7 words overlap only when they
are equal: one common phrase ("write a blog post about") would be half of such a text.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

LONG_RUN = 13
SHINGLE = 5
MIN_SHINGLES = 3
CONTAINMENT = 0.5
# Chinese, Japanese and Korean are written without spaces, so each character counts as a word.
_CJK = r"\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af"
_WORD = re.compile(rf"[{_CJK}]|[^\W_{_CJK}]+")


def words(text: str) -> list[str]:
    """The words of `text` in lower case, compatibility forms folded, punctuation dropped."""
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def normalised(text: str) -> str:
    """The form in which texts are compared for equality; a text without any word is compared as it is."""
    return " ".join(words(text)) or text.strip()


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def fingerprint(text: str) -> bytes:
    """16 bytes that are equal for texts that are equal after normalisation."""
    return _digest(normalised(text))


def _shingles(tokens: Sequence[str], size: int) -> set[tuple[str, ...]]:
    return set(zip(*(tokens[i:] for i in range(size)), strict=False))


class OverlapIndex:
    """The texts of one set, ready to be asked whether another text repeats one of them."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.exact: set[bytes] = set()
        self.runs: set[tuple[str, ...]] = set()
        self.sizes: list[int] = []
        self.items: dict[tuple[str, ...], list[int]] = defaultdict(list)
        for number, text in enumerate(texts):
            tokens = words(text)
            self.exact.add(fingerprint(text))
            self.runs |= _shingles(tokens, LONG_RUN)
            shingles = _shingles(tokens, SHINGLE)
            self.sizes.append(len(shingles))
            for shingle in shingles:
                self.items[shingle].append(number)

    def match(self, text: str) -> str | None:
        """`exact`, `near`, or None."""
        tokens = words(text)
        if _digest(" ".join(tokens) or text.strip()) in self.exact:
            return "exact"
        shingles = _shingles(tokens, SHINGLE)
        if self.items.keys().isdisjoint(shingles):  # which also rules a common run out: the usual case, and cheap
            return None
        common = Counter(number for shingle in shingles for number in self.items.get(shingle, ()))
        for number, count in common.items():
            smaller = min(len(shingles), self.sizes[number])
            if smaller >= MIN_SHINGLES and count >= CONTAINMENT * smaller:
                return "near"
        if not self.runs.isdisjoint(_shingles(tokens, LONG_RUN)):
            return "near"
        return None
