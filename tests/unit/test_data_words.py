"""Ids word by word are the fast tokenizer's own, for the pre-tokenizers of real families and whatever the text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from torchspec_core.data.words import translate, word_encoder

QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def split(pattern: str) -> Any:
    return pre_tokenizers.Split(Regex(pattern), "isolated")


BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
WORDS = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
FAMILIES: dict[str, Any] = {
    "gpt2": WORDS,
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), WORDS]),
    "qwen": pre_tokenizers.Sequence([split(QWEN), BYTES]),
    "deepseek": pre_tokenizers.Sequence([split(r"\p{N}{1,3}"), split(r"[一-龥぀-ゟ゠-ヿ]+"), split(DEEPSEEK), BYTES]),
}
# Pieces on which the families disagree, and characters that only the tokenizer itself is trusted with.
PIECES = (
    *"abZé你ß9٣² \t\n\r.,!?'\"-_<>|()[]\\^~$“”…，。\u00a0\u3000", "  ", "\n\n", " the", "'s", "'LL", "123456",
    "<|end|>", "<tool>", "<|en", "e\u0301", "\u017f", "\x0b", "\x1c", "\x85", "\u200d", "😀", "\U0001f1e9",
)  # fmt: skip


def tokenizer_of(family: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = FAMILIES[family]
    if family == "qwen":
        tokenizer.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=700, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(Path(__file__).read_text("utf-8").splitlines(keepends=True), trainer)
    tokenizer.add_special_tokens([AddedToken("<|end|>", normalized=False), AddedToken("<|end|><", normalized=False)])
    tokenizer.add_tokens([AddedToken("<tool>", normalized=True)])
    return tokenizer


TOKENIZERS = {family: tokenizer_of(family) for family in FAMILIES}
ENCODERS = {family: word_encoder(tokenizer) for family, tokenizer in TOKENIZERS.items()}


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=300, deadline=None)
@given(pieces=st.lists(st.sampled_from(PIECES) | st.characters(exclude_categories=["Cs"]), max_size=24))
def test_the_ids_are_the_tokenizers_own(family: str, pieces: list[str]) -> None:
    encoder = ENCODERS[family]
    assert encoder is not None
    text = "".join(pieces)
    ids = encoder.encode(text)
    assert ids is None or ids == TOKENIZERS[family].encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("family", FAMILIES)
def test_ordinary_text_goes_word_by_word_and_words_are_remembered(family: str) -> None:
    encoder = ENCODERS[family]
    assert encoder is not None
    text = "Über “naïve” 你好，世界。 It's 2024:\n\tx = [1, 22, 333]<|end|>\n"
    expected = TOKENIZERS[family].encode(text, add_special_tokens=False).ids
    assert encoder.encode(text) == expected
    known = len(encoder.words)
    assert encoder.encode(text) == expected
    assert len(encoder.words) == known


@pytest.mark.parametrize("text", ["a\u017f", "\u0130", "a\x1cb", "\x85", "😀", "\ufdd0", "\ue000"])
def test_text_of_which_unicode_versions_disagree_is_left_to_the_tokenizer(text: str) -> None:
    encoder = ENCODERS["gpt2"]
    assert encoder is not None and encoder.encode(text) is None


def test_text_that_is_not_in_the_normal_form_is_left_to_the_tokenizer() -> None:
    encoder = ENCODERS["qwen"]
    assert encoder is not None
    assert encoder.encode("e\u0301") is None
    assert encoder.encode("\u00e9") is not None


def test_other_kinds_of_tokenizers_have_no_word_encoder() -> None:
    def variant(**parts: Any) -> Tokenizer:
        tokenizer = tokenizer_of("gpt2")
        for name, part in parts.items():
            setattr(tokenizer, name, part)
        return tokenizer

    assert word_encoder(Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))) is None
    assert word_encoder(variant(normalizer=normalizers.Lowercase())) is None
    assert word_encoder(variant(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True))) is None
    assert word_encoder(variant(pre_tokenizer=pre_tokenizers.Metaspace())) is None
    assert word_encoder(variant(pre_tokenizer=pre_tokenizers.Sequence([split(r"(?<=a)b"), BYTES]))) is None
    assert word_encoder(variant(model=models.BPE(dropout=0.1))) is None
    stripping = tokenizer_of("gpt2")
    stripping.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    assert word_encoder(stripping) is None


@pytest.mark.parametrize(
    "pattern", [r"\w+", r"^a", r"a$", r"(a)", r"[a&&b]", r"[[a]]", r"[\S]", r"(?<!a)b", r"a{1,2}+"]
)
def test_expressions_with_another_meaning_in_python_are_not_translated(pattern: str) -> None:
    assert translate(pattern) is None
