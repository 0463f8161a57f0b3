"""A GGUF file of a Llama model -> a folder in Hub layout (safetensors, tokenizer, chat template).

Why not the loaders that exist: transformers keeps the file quantised by default and its GGUF tokenizer drops the
single-digit pre-tokenizer (it splits numbers differently from the model's own tokenizer); vLLM reads GGUF only
through a plugin. Converted once, every engine reads plain safetensors. Sources: the GGUF specification, llama.cpp's
conversion script (for the order of the rows of q and k).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from torchspec_core.errors import UserError
from torchspec_core.targets.facts import TargetFacts, write_facts

_SPECIAL_TOKEN_TYPE = 3
_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def hub_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; `KeyError` for a tensor a Llama does not
    have.
    """
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    _, block, part, suffix = name.split(".")
    return f"model.layers.{block}.{_BLOCK_NAMES[part]}.{suffix}"


def undo_rope_interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k `[heads * head_dim, H]` from llama.cpp's RoPE order (pairs interleaved) to the Hub's (two
    halves).
    """
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _metadata(reader: gguf.GGUFReader, key: str) -> Any:
    field = reader.fields.get(key)
    if field is None:
        raise UserError(f"{key} is missing in the GGUF file: it is not a complete Llama model with a BPE tokenizer.")
    return field.contents()


def _config(reader: gguf.GGUFReader, dtype: str, tied: bool) -> dict[str, Any]:
    if _metadata(reader, "general.architecture") != "llama":
        raise UserError(
            f"The GGUF architecture {_metadata(reader, 'general.architecture')} is not supported; only llama is."
        )
    heads = _metadata(reader, "llama.attention.head_count")
    hidden = _metadata(reader, "llama.embedding_length")
    # Stored as fp32 in the file: 9.99999975e-06 means 1e-05.
    epsilon = float(f"{_metadata(reader, 'llama.attention.layer_norm_rms_epsilon'):.6g}")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": _metadata(reader, "llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _metadata(reader, "llama.attention.head_count_kv"),
        "head_dim": hidden // heads,
        "intermediate_size": _metadata(reader, "llama.feed_forward_length"),
        "vocab_size": _metadata(reader, "llama.vocab_size"),
        "max_position_embeddings": _metadata(reader, "llama.context_length"),
        "rms_norm_eps": epsilon,
        "rope_theta": float(_metadata(reader, "llama.rope.freq_base")),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "bos_token_id": _metadata(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _metadata(reader, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": _metadata(reader, "tokenizer.ggml.padding_token_id"),
        "dtype": dtype,
    }


def dequantised(reader: gguf.GGUFReader) -> Iterator[tuple[str, np.ndarray]]:
    """Hub name and float32 values of every tensor, in the file's order, rows of q and k put back in the Hub's order."""
    heads = {
        "attn_q": _metadata(reader, "llama.attention.head_count"),
        "attn_k": _metadata(reader, "llama.attention.head_count_kv"),
    }
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        part = tensor.name.split(".")[2] if tensor.name.startswith("blk.") else ""
        yield hub_name(tensor.name), undo_rope_interleave(values, heads[part]) if part in heads else values


def build_tokenizer(reader: gguf.GGUFReader) -> Tokenizer:
    """The byte-level BPE tokenizer inside the file: single digits split first, then ByteLevel with its own pattern."""
    kind = (_metadata(reader, "tokenizer.ggml.model"), _metadata(reader, "tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise UserError(f"The GGUF tokenizer {'/'.join(kind)} is not supported; only gpt2/smollm is.")
    tokens: list[str] = _metadata(reader, "tokenizer.ggml.tokens")
    types = _metadata(reader, "tokenizer.ggml.token_type")
    pairs = [merge.split(" ") for merge in _metadata(reader, "tokenizer.ggml.merges")]
    merges = [(left, right) for left, right in pairs]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == _SPECIAL_TOKEN_TYPE]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def _tokenizer_config(reader: gguf.GGUFReader, max_length: int) -> dict[str, Any]:
    tokens = _metadata(reader, "tokenizer.ggml.tokens")
    named = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
        **{name: tokens[_metadata(reader, f"tokenizer.ggml.{kind}_token_id")] for name, kind in named.items()},
        "chat_template": _metadata(reader, "tokenizer.chat_template"),
    }


def write_tokenizer(reader: gguf.GGUFReader, folder: Path, max_length: int) -> None:
    """`tokenizer.json` and `tokenizer_config.json` (with the chat template) of the file."""
    build_tokenizer(reader).save(str(folder / "tokenizer.json"))
    config = _tokenizer_config(reader, max_length)
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )


def write_configs(folder: Path, config: dict[str, Any]) -> None:
    """`config.json` and the `generation_config.json` that follows from it."""
    generation = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=1) + "\n", encoding="utf-8")


def open_gguf(path: Path) -> gguf.GGUFReader:
    """A memory-mapped reader; `UserError` where the file is missing or is no GGUF."""
    try:
        return gguf.GGUFReader(path)
    except FileNotFoundError:
        raise UserError(f"The GGUF file {path} does not exist: install its package again.") from None
    except (ValueError, OSError) as error:
        raise UserError(f"{path} is not a whole GGUF file ({error}): install its package again.") from None


def convert_gguf(path: Path, folder: Path, dtype: str = "bfloat16") -> TargetFacts:
    """Writes the Hub-layout folder of a GGUF Llama: weights in `dtype`, tokenizer, template, configs, `facts.json`."""
    reader = open_gguf(path)
    folder.mkdir(parents=True, exist_ok=True)
    torch_dtype = getattr(torch, dtype)
    weights = {name: torch.tensor(values).to(torch_dtype) for name, values in dequantised(reader)}
    config = _config(reader, dtype, tied="lm_head.weight" not in weights)
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    write_tokenizer(reader, folder, config["max_position_embeddings"])
    write_configs(folder, config)
    return write_facts(folder)
