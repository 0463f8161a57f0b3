"""The target inside this process: the transformers model, and the frozen parts that others borrow from it.

`load_model` gives the whole model to capture and decoding. `load_head` and `load_embedding` read only the tensors
they need from the weights, so the trainer never builds the target. Logits are never stored anywhere: they are
`TargetHead.logits` of the final state *before* the target's final norm.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from torchspec_core.errors import UserError
from torchspec_core.targets.facts import TargetFacts, read_facts, read_json

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_EMBEDDING, _NORM, _HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


def set_threads(threads: int) -> None:
    """Threads of torch in this process; 0 leaves all cores."""
    if threads:
        torch.set_num_threads(threads)


def load_model(folder: Path, dtype: str, threads: int = 0) -> Any:
    """The causal LM of a folder in Hub layout, on the CPU, in `dtype`, evaluation mode, without gradients."""
    from transformers import AutoModelForCausalLM

    set_threads(threads)
    read_facts(folder)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=DTYPES[dtype], attn_implementation="sdpa", local_files_only=True
        )
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:400]
        raise UserError(f"The target folder {folder} does not load in transformers: {reason}") from error
    return model.eval().requires_grad_(False)


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a folder in Hub layout, with its chat template."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)


def decoder_layers(model: Any, facts: TargetFacts) -> nn.ModuleList:
    """The decoder layers in order: the one list of `facts.num_layers` modules in the model."""
    found = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == facts.num_layers]
    if len(found) != 1:
        raise UserError(
            f"{facts.architecture}: {len(found)} module lists of {facts.num_layers} layers found, "
            "expected one; it cannot be captured."
        )
    return found[0]


@contextmanager
def residual_taps(model: Any, facts: TargetFacts, layers: tuple[int, ...]) -> Iterator[dict[int, Tensor]]:
    """While open, each forward pass leaves the residual stream after each named canonical layer in the yielded dict:
    `[B, T, H]`.
    """
    taken: dict[int, Tensor] = {}

    def keep(layer: int) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            taken[layer] = output[0] if isinstance(output, tuple) else output

        return hook

    modules = decoder_layers(model, facts)
    handles = [modules[layer].register_forward_hook(keep(layer)) for layer in layers]
    try:
        yield taken
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True)
class TargetHead:
    """Final RMSNorm and LM head of the target, applied to pre-norm states."""

    norm_weight: Tensor  # [H]
    eps: float
    head_weight: Tensor  # [V, H]

    def normed(self, hidden: Tensor) -> Tensor:
        """RMSNorm of `hidden[..., H]`, computed in float32 and returned in its dtype, as transformers and vLLM do."""
        wide = hidden.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.norm_weight * wide.to(hidden.dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits `[..., V]` of pre-norm final states `hidden[..., H]`."""
        return nn.functional.linear(self.normed(hidden), self.head_weight)


def _weight_file(folder: Path, name: str) -> Path | None:
    """The safetensors file of the folder that holds tensor `name`; None where no file has it."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        file = read_json(index)["weight_map"].get(name)
        return None if file is None else folder / file
    single = folder / "model.safetensors"
    if not single.exists():
        raise UserError(f"{folder} holds no model.safetensors: it is not a target folder of this project.")
    with safe_open(single, framework="pt") as weights:
        return single if name in weights.keys() else None


def read_weight(folder: Path, name: str, dtype: torch.dtype | None = None) -> Tensor:
    """One tensor of the target's weights, by its Hub name; in its own type where `dtype` is None."""
    file = _weight_file(folder, name)
    if file is None:
        raise UserError(f"{folder} has no tensor {name}: its weights do not belong to its config.json.")
    with safe_open(file, framework="pt") as weights:
        tensor: Tensor = weights.get_tensor(name)
    return tensor if dtype is None else tensor.to(dtype)


def load_embedding(folder: Path, dtype: torch.dtype) -> Tensor:
    """The target's input embedding `[V, H]`."""
    return read_weight(folder, _EMBEDDING, dtype)


def load_head(folder: Path, dtype: torch.dtype) -> TargetHead:
    """The target's final norm and head; a tied target's head is its embedding."""
    facts = read_facts(folder)
    head = read_weight(folder, _EMBEDDING if facts.tied else _HEAD, dtype)
    return TargetHead(read_weight(folder, _NORM, dtype), facts.rms_norm_eps, head)
