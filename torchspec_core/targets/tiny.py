"""`random:tiny-llama`: a random Llama with a real tokenizer, small enough to walk the whole pipeline in a minute or
two.

Every engine loads it (head size 32 is one that vLLM's CPU attention has). The weights come from one seeded generator
and not from a library's initialiser, so their bytes do not change with library versions. Matrices are drawn wide
against the embedding: with tied weights a narrow draw would make a model that only repeats its last token.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from torchspec_core.targets.facts import TargetFacts, write_facts
from torchspec_core.targets.gguf import open_gguf, write_configs, write_tokenizer
from torchspec_core.targets.made import TINY_CONFIG

_SEED = 20240611
_EMBEDDING_STD, _MATRIX_STD = 0.05, 0.1


def random_llama_weights(config: dict[str, Any], dtype: torch.dtype, seed: int = _SEED) -> dict[str, Tensor]:
    """Weights of a tied Llama by Hub name, drawn in float32 from one seeded generator, then cast."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes = {
        "self_attn.q_proj": (queries, hidden), "self_attn.k_proj": (keys, hidden), "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }  # fmt: skip

    def draw(shape: tuple[int, int], std: float) -> Tensor:
        return (torch.randn(shape, generator=generator) * std).to(dtype)

    weights = {"model.embed_tokens.weight": draw((config["vocab_size"], hidden), _EMBEDDING_STD)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        weights |= {f"{prefix}{name}.weight": draw(shape, _MATRIX_STD) for name, shape in shapes.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}{norm}.weight"] = torch.ones(hidden, dtype=dtype)
    weights["model.norm.weight"] = torch.ones(hidden, dtype=dtype)
    return weights


def write_tiny_llama(gguf_file: Path, folder: Path, dtype: str = "bfloat16") -> TargetFacts:
    """Writes the random target with the tokenizer and chat template of the GGUF file."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**TINY_CONFIG, "dtype": dtype}
    save_file(
        random_llama_weights(config, getattr(torch, dtype)),
        str(folder / "model.safetensors"),
        metadata={"format": "pt"},
    )
    write_tokenizer(open_gguf(gguf_file), folder, config["max_position_embeddings"])
    write_configs(folder, config)
    return write_facts(folder)
