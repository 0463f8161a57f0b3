"""The tiny drafters that are compared: shapes, weights and inputs, all from one seed, fp32.

Every target argmax is the next token of the text, so that losses on hard labels mean the same whether a project takes
the label from the text or from the target; every token is supervised, so that no alignment of masks matters.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SIZE, HEADS, KV_HEADS, HEAD_DIM, MLP, VOCAB, LENGTH = 32, 4, 2, 8, 48, 50, 24
AUX, DEPTHS, LAYERS, BLOCK, MASK_TOKEN, RANK = 3, 3, 2, 4, 49, 6
ANCHORS = (3, 8, 9, 15)
EPS, THETA, GAMMA = 1e-6, 10000.0, 4.0


@dataclass(frozen=True)
class Inputs:
    """ids [T] int64; aux [T, A * H], last [T, H] states of the target; embedding, head [V, H]; target_norm [H]."""

    ids: Tensor
    aux: Tensor
    last: Tensor
    embedding: Tensor
    head: Tensor
    target_norm: Tensor


def numbers(seed: int, *shape: int, scale: float = 0.2) -> Tensor:
    """Normal numbers, the same wherever they are made."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def inputs() -> Inputs:
    """The text is what the target would say at each position."""
    head, norm, last = numbers(3, VOCAB - 1, SIZE, scale=1.0), 1 + numbers(4, SIZE, scale=0.1), numbers(2, LENGTH, SIZE)
    head = torch.cat((head, torch.zeros(1, SIZE)))  # the mask token is never said
    normed = last * torch.rsqrt(last.square().mean(dim=-1, keepdim=True) + EPS) * norm
    said = (normed @ head.T).argmax(dim=-1)
    ids = torch.cat((torch.tensor([5]), said[:-1]))
    return Inputs(ids, numbers(1, LENGTH, AUX * SIZE, scale=1.0), last, numbers(5, VOCAB, SIZE, scale=1.0), head, norm)


def layer(seed: int, width: int, norms: tuple[str, ...], head_norms: bool) -> dict[str, Tensor]:
    """Weights of a decoder layer whose attention reads `width` numbers."""
    shapes = {
        "self_attn.q_proj.weight": (HEADS * HEAD_DIM, width),
        "self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, width),
        "self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, width),
        "self_attn.o_proj.weight": (SIZE, HEADS * HEAD_DIM),
        "mlp.gate_proj.weight": (MLP, SIZE),
        "mlp.up_proj.weight": (MLP, SIZE),
        "mlp.down_proj.weight": (SIZE, MLP),
    }
    weights = {name: numbers(seed + i, *shape) for i, (name, shape) in enumerate(shapes.items())}
    weights |= {f"{name}.weight": 1 + numbers(seed + 20 + i, SIZE, scale=0.1) for i, name in enumerate(norms)}
    if head_norms:
        weights |= {
            f"self_attn.{name}_norm.weight": 1 + numbers(seed + 30 + i, HEAD_DIM, scale=0.1)
            for i, name in enumerate("qk")
        }
    return weights


def eagle_weights() -> dict[str, Tensor]:
    """Names as vLLM reads them."""
    middle = layer(100, 2 * SIZE, ("input_layernorm", "hidden_norm", "post_attention_layernorm"), head_norms=False)
    return {
        "fc.weight": numbers(10, SIZE, AUX * SIZE, scale=0.1),
        "norm.weight": 1 + numbers(11, SIZE, scale=0.1),
        "lm_head.weight": numbers(12, VOCAB, SIZE),
        **{f"midlayer.{name}": weight for name, weight in middle.items()},
    }


def block_weights(dspark: bool) -> dict[str, Tensor]:
    """Names as vLLM reads them."""
    weights = {
        "fc.weight": numbers(10, SIZE, AUX * SIZE, scale=0.1),
        "hidden_norm.weight": 1 + numbers(13, SIZE, scale=0.1),
        "norm.weight": 1 + numbers(11, SIZE, scale=0.1),
    }
    for i in range(LAYERS):
        part = layer(200 + 100 * i, SIZE, ("input_layernorm", "post_attention_layernorm"), head_norms=True)
        weights |= {f"layers.{i}.{name}": weight for name, weight in part.items()}
    if dspark:
        weights |= {
            "markov_head.markov_w1.weight": numbers(40, VOCAB, RANK, scale=1.0),
            "markov_head.markov_w2.weight": numbers(41, VOCAB, RANK),
            "confidence_head.proj.weight": numbers(42, 1, SIZE + RANK),
            "confidence_head.proj.bias": torch.tensor([0.1]),
        }
    return weights


def visible() -> Tensor:
    """[M * B, T + M * B] boolean of DFlash's blocks, by the rule, one pair at a time."""
    slots = [(block, anchor + k) for block, anchor in enumerate(ANCHORS) for k in range(BLOCK)]
    rows = [
        [key < ANCHORS[block] for key in range(LENGTH)] + [other == block for other, _ in slots] for block, _ in slots
    ]
    return torch.tensor(rows)
