"""A target folder with a tokenizer of 300 tokens and a ChatML template: enough to render, mask and tokenize in tests.

The tokenizer is byte-level BPE without merges, so every byte is one token and expected ids can be written down by hand.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
END_OF_TURN = 2
VOCAB_SIZE = 300


def byte_tokenizer(special: tuple[str, ...] = SPECIAL) -> Tokenizer:
    """First the control tokens (ids 0-2), then one id for each byte in the order of the byte-level alphabet."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate((*special, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def write_target(folder: Path, template: str | None = CHATML) -> Path:
    """A target folder: tokenizer, template, and the facts that the data stages read; no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": END_OF_TURN}))
    (folder / "config.json").write_text(json.dumps({"vocab_size": VOCAB_SIZE}))
    return folder


def write_jsonl(path: Path, rows: list[object]) -> Path:
    """One JSON value a line; text rows are written as they are."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def chat(*turns: str) -> dict[str, object]:
    """An OpenAI row: the user and the assistant in turn."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]}
