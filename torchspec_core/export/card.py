"""The model card of an exported drafter: what it is for, what it was trained from, how to serve it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchspec_core.kinds import KINDS, unserved
from torchspec_core.targets.facts import TargetFacts

_CARD = """---
library_name: vllm
tags: [speculative-decoding, eagle3]
---

# EAGLE-3 drafter for {architecture} ({layers} layers, width {width}, {vocabulary} tokens)

A draft model for speculative decoding. It guesses the next tokens of **one** target, which checks them: the target's
answers stay as they are and come sooner. For any other target it is useless.

| | |
|---|---|
| target | {architecture}, {layers} layers, hidden size {width}, vocabulary {vocabulary} |
| reads | the residual stream after 0-based decoder layers {aux} of the target (vLLM ids {vllm_ids}) |
| drafts | {draft_vocabulary} of the target's {vocabulary} tokens{coverage} |
| size | one layer, hidden size {hidden}, {attention}, MLP {mlp} |
| embeddings | the target's own, shared by the engine; not in this folder |
| weights | {dtype}, `model.safetensors`; `d2t[j]` is an offset: target id = j + d2t[j] |
{validation}
It was trained on the target's own hidden states, with the training-time test of EAGLE-3 (arXiv 2503.01840), to predict
the target's next-token distribution. How many tokens it gets accepted is in the report of the run that made it.

## Serving

```python
from vllm import LLM

drafter = {{"method": "eagle3", "model": THIS_FOLDER, "num_speculative_tokens": 3}}
llm = LLM(model=TARGET, speculative_config=drafter)
```
"""


def model_card(config: Mapping[str, Any], target: TargetFacts, validation: Mapping[str, Any]) -> str:
    """Markdown for `README.md`: `config` is the exported one, `validation` flat numbers of the training run (may be
    empty).
    """
    vllm_ids = config["eagle_aux_hidden_state_layer_ids"]
    coverage = validation.get("coverage")
    return _CARD.format(
        architecture=target.architecture,
        layers=target.num_layers,
        width=target.hidden_size,
        vocabulary=target.vocab_size,
        aux=", ".join(str(i - 1) for i in vllm_ids),
        vllm_ids=", ".join(map(str, vllm_ids)),
        draft_vocabulary=config["draft_vocab_size"],
        coverage="" if coverage is None else f" ({coverage:.1%} of the counted tokens)",
        hidden=config["hidden_size"],
        attention=_attention(config),
        mlp=config["intermediate_size"],
        dtype=config["torch_dtype"],
        validation=_numbers(validation),
    )


_BLOCK_CARD = """---
library_name: vllm
tags: [speculative-decoding, {kind}]
---

# {name} drafter for {architecture} ({layers} layers, width {width}, {vocabulary} tokens)

A draft model for speculative decoding: it guesses a block of next tokens of **one** target in a single pass, and the
target checks them: the target's answers stay as they are and come sooner. For any other target it is useless.

| | |
|---|---|
| target | {architecture}, {layers} layers, hidden size {width}, vocabulary {vocabulary} |
| reads | the residual stream after 0-based decoder layers {aux} of the target |
| drafts | {drafts} tokens a block of {block} slots, from the whole vocabulary; mask token {mask} |
| size | {own_layers} layers ({types}), {attention}, MLP {mlp} |
| embeddings, head | {shared} |
| weights | {dtype}, `model.safetensors` |
{validation}
How many tokens it gets accepted is in the report of the run that made it.

## Serving

{serving}"""
_SERVING = """```python
from vllm import LLM

drafter = {{"method": "{method}", "model": THIS_FOLDER, "num_speculative_tokens": {drafts}}}
llm = LLM(model=TARGET, speculative_config=drafter)
```
"""
_CUDA_ONLY = "\nvLLM 0.32 has this class for NVIDIA GPUs and multi-latent targets only; not tried here.\n"
NAMES = {"dflash": "DFlash", "dflash2": "DFlash 2", "dspark": "DSpark"}


def block_card(config: Mapping[str, Any], kind: str, target: TargetFacts, validation: Mapping[str, Any]) -> str:
    """Markdown for `README.md` of a block drafter; arguments as for `model_card`."""
    nested, reason = config.get("dflash_config") or config, unserved(config, latent_target=True)
    drafts = KINDS[kind].predictions(config["block_size"])
    embedded = "embedding as the target's, in this folder; head " * ("kv_lora_rank" in config)
    return _BLOCK_CARD.format(
        kind=kind,
        name=NAMES[kind],
        shared=f"{embedded}the target's own, shared by the engine; not in this folder",
        serving=(
            _SERVING.format(method=KINDS[kind].method, drafts=drafts) + _CUDA_ONLY * ("kv_lora_rank" in config)
            if reason is None
            else f"Not served by stock vLLM: {reason}. The decoder of the project that made it runs it.\n"
        ),
        architecture=target.architecture,
        layers=target.num_layers,
        width=target.hidden_size,
        vocabulary=target.vocab_size,
        aux=", ".join(map(str, nested["target_layer_ids"])),
        drafts=drafts,
        block=config["block_size"],
        mask=nested["mask_token_id"],
        own_layers=config["num_hidden_layers"],
        types=", ".join(sorted(set(config["layer_types"]))),
        attention=_attention(config),
        mlp=config["intermediate_size"],
        dtype=config["torch_dtype"],
        validation=_numbers(validation),
    )


def _numbers(validation: Mapping[str, Any]) -> str:
    return "".join(
        f"| validation, {name} | {value:.4g} |\n"
        for name, value in validation.items()
        if isinstance(value, (int, float)) and not name.startswith(_LEFT_OUT)
    )


_LEFT_OUT = ("coverage", "alpha_", "slot_tv_", "recall_")  # the first has its own line; the others are in the report


def _attention(config: Mapping[str, Any]) -> str:
    heads = config["num_attention_heads"]
    if "kv_lora_rank" in config:
        return (
            f"multi-latent attention of {heads} heads ({config['qk_nope_head_dim']} + {config['qk_rope_head_dim']} "
            f"numbers, values {config['v_head_dim']}; latent {config['kv_lora_rank']}; for multi-latent targets only)"
        )
    return f"{heads} query and {config['num_key_value_heads']} key-value heads of {config['head_dim']}"
