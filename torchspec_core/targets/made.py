"""Sizes of a target before it is made: for a plan, its estimates and its checks. Loads nothing heavy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torchspec_core.targets.facts import TargetFacts, facts_from_config, read_facts

PACKAGE = "package:smollm2-135m-instruct"
RANDOM = "random:tiny-llama"
HUB = "hub:"
TINY_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 256,
    "vocab_size": 49152,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
"""The whole configuration of `random:tiny-llama`."""

PACKAGE_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}
"""What the package's file says, which takes seconds to open; a test holds the two together."""


def known_facts(source: str, made: Path | None) -> TargetFacts | None:
    """Facts of the target that a recipe names, from its folder in the store once it is `made`; None = not known yet."""
    if made is not None:
        return read_facts(made)
    if source in (PACKAGE, RANDOM):
        return facts_from_config(PACKAGE_CONFIG if source == PACKAGE else TINY_CONFIG)
    return None if source.startswith(HUB) else read_facts(Path(source).expanduser())
