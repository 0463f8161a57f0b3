"""Checks of a target folder: it runs, it is what it was converted from, and its tokenizer loses nothing.

Each returns what it measured, or raises `UserError` in one sentence. The dequantisation check computes Q4_1 anew from
the file's bytes (by the format's definition), so that it does not rest on the library that did the conversion.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from torchspec_core.data.render import load_renderer
from torchspec_core.data.sources import Message
from torchspec_core.errors import UserError
from torchspec_core.targets.engine import load_model, read_weight
from torchspec_core.targets.facts import read_facts
from torchspec_core.targets.gguf import hub_name, open_gguf, undo_rope_interleave

_Q4_1_BLOCK = 20  # bytes: scale fp16, minimum fp16, 32 values of 4 bits
_SPOTS = ("blk.0.ffn_down.weight", "blk.7.attn_v.weight", "blk.13.attn_q.weight", "blk.29.attn_k.weight")
_TEXTS = (
    "def f(x):\n    return x ** 2 + 1234567.89\n",
    "The year 2026, 3.14159 and 007.",
    "  leading, trailing and   inner spaces  \n\n\ttabs",
    "Grüße, naïve café, 你好，世界, Привет, 🙂👩‍👩‍👧",
    "https://example.org/a_b?c=d&e=%20 <b>&amp;</b>",
)


def prompt_ids(folder: Path, text: str) -> list[int]:
    """Token ids of one user turn with the generation prompt, as a server sends it."""
    return load_renderer(folder).prompt([Message("user", text)])


def _generate(folder: Path, text: str, tokens: int, dtype: str, threads: int) -> tuple[list[int], Any]:
    model = load_model(folder, dtype, threads)
    prompt = torch.tensor([prompt_ids(folder, text)])
    with torch.inference_mode():
        logits = model(input_ids=prompt, use_cache=False).logits
        out = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=tokens, do_sample=False)
    return out[0, prompt.shape[1] :].tolist(), logits


def check_runs(folder: Path, threads: int = 0) -> dict[str, int]:
    """One forward pass and two greedy tokens in transformers; the logits are finite and as wide as the vocabulary."""
    facts = read_facts(folder)
    answer, logits = _generate(folder, "Hello", 2, "bfloat16", threads)
    if logits.shape[-1] != facts.vocab_size or not logits.isfinite().all() or not answer:
        raise UserError(
            f"{folder}: the target's logits are not finite or not {facts.vocab_size} wide; its weights are damaged."
        )
    tokens = load_renderer(folder).tokenizer.get_vocab_size()
    if tokens > facts.vocab_size:
        raise UserError(
            f"{folder}: the tokenizer has {tokens} tokens, the model {facts.vocab_size}; they do not belong together."
        )
    return {"layers": facts.num_layers, "hidden_size": facts.hidden_size, "vocab_size": facts.vocab_size}


def dequantise_q4_1(blocks: np.ndarray) -> np.ndarray:
    """Q4_1 rows `uint8[rows, blocks * 20]` -> float32 `[rows, blocks * 32]`: value = scale * nibble + minimum, low
    nibbles first.
    """
    rows = blocks.shape[0]
    block = blocks.reshape(-1, _Q4_1_BLOCK)
    scale = np.ascontiguousarray(block[:, 0:2]).view(np.float16).astype(np.float32)
    minimum = np.ascontiguousarray(block[:, 2:4]).view(np.float16).astype(np.float32)
    nibbles = np.concatenate([block[:, 4:] & 15, block[:, 4:] >> 4], axis=1).astype(np.float32)
    return (scale * nibbles + minimum).reshape(rows, -1)


def check_dequantised(gguf_file: Path, folder: Path) -> None:
    """A few converted tensors equal the file's own bytes, bit for bit, after the cast to the folder's type."""
    facts = read_facts(folder)
    heads = {"attn_q": facts.num_heads, "attn_k": facts.num_kv_heads}
    found = {tensor.name: tensor for tensor in open_gguf(gguf_file).tensors}
    for name in _SPOTS:
        tensor = found[name]
        if tensor.tensor_type != gguf.GGMLQuantizationType.Q4_1:
            raise UserError(
                f"{gguf_file}: {name} is {tensor.tensor_type.name}, not Q4_1; install the pinned "
                "version of its package."
            )
        values = dequantise_q4_1(np.asarray(tensor.data))
        part = name.split(".")[2]
        expected = undo_rope_interleave(values, heads[part]) if part in heads else values
        stored = read_weight(folder, hub_name(name))
        if not torch.equal(torch.from_numpy(expected).to(stored.dtype), stored):
            raise UserError(
                f"{folder}: {hub_name(name)} differs from {name} in {gguf_file}; delete the folder and convert again."
            )


def check_round_trip(folder: Path) -> None:
    """Encoding and decoding a text gives the text back: code, digits, white space, other scripts."""
    tokenizer = load_renderer(folder).tokenizer
    for text in _TEXTS:
        back = tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids, skip_special_tokens=False)
        if back != text:
            raise UserError(
                f"{folder}: the tokenizer turns {text!r} into {back!r}; delete the folder and convert again."
            )


def check_capital(folder: Path, threads: int = 0) -> str:
    """The greedy answer to "What is the capital of France?", which names Paris."""
    answer, _ = _generate(folder, "What is the capital of France?", 16, "float32", threads)
    text = load_renderer(folder).decode(answer)
    if "Paris" not in text:
        raise UserError(
            f"{folder}: asked for the capital of France the target says {text!r}; the conversion is broken."
        )
    return text
