"""Drafters against a reference that knows no tensors of rows: one number, head and key after the other, in fp64.

It shares no code with the drafters: which key-value head a query head reads, which of a row's keys a window shows, what
a convolution reaches and where the rotation stands are written down once more, as the definitions say them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.unit.test_dflash import ANCHORS, AUX, IDS, KINDS, LENGTHS, TABLES, B, V, config, drafter, index
from tests.unit.test_eagle3_mla import drafter as latent_eagle3
from tests.unit.test_ttt import batch, teacher
from tests.unit.test_ttt import drafter as grouped_eagle3
from torchspec_core.drafters.dflash import FULL, SLIDING, BlockDrafter
from torchspec_core.drafters.eagle3 import Eagle3Drafter
from torchspec_core.drafters.rope import RopeConfig
from torchspec_core.objectives.dflash import block_embeds
from torchspec_core.objectives.eagle3 import embed_rows
from torchspec_core.objectives.ttt import ttt_index

Key = tuple[Tensor, Tensor]
"""(key, value) of one row, [kv_heads, d] and [kv_heads, dv]."""


def norm(x: Tensor, module: nn.Module, eps: float) -> Tensor:
    return x / math.sqrt(sum(float(v) ** 2 for v in x) / len(x) + eps) * module.weight


def turn(x: Tensor, position: int, theta: float, neighbours: bool) -> Tensor:
    out, half = x.clone(), len(x) // 2
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if neighbours else (i, i + half)
        angle = position * theta ** (-2 * i / len(x))
        out[a] = x[a] * math.cos(angle) - x[b] * math.sin(angle)
        out[b] = x[b] * math.cos(angle) + x[a] * math.sin(angle)
    return out


def query(attention: Any, u: Tensor, position: int, theta: float, eps: float, mla: Any) -> list[Tensor]:
    if mla is None:
        heads = (attention.q_proj.weight @ u).split(attention.head_dim)
        normed = [norm(q, attention.q_norm, eps) if attention.head_norms else q for q in heads]
        return [turn(q, position, theta, False) for q in normed]
    if mla.q_lora_rank is None:
        wide = attention.q_proj.weight @ u
    else:
        wide = attention.q_b_proj.weight @ norm(attention.q_a_proj.weight @ u, attention.q_a_layernorm, eps)
    cut = mla.qk_nope_head_dim
    return [torch.cat((q[:cut], turn(q[cut:], position, theta, True))) for q in wide.split(mla.qk_head_dim)]


def key(attention: Any, u: Tensor, position: int, theta: float, eps: float, mla: Any) -> Key:
    if mla is None:
        keys = (attention.k_proj.weight @ u).split(attention.head_dim)
        normed = [norm(k, attention.k_norm, eps) if attention.head_norms else k for k in keys]
        values = (attention.v_proj.weight @ u).split(attention.head_dim)
        return torch.stack([turn(k, position, theta, False) for k in normed]), torch.stack(values)
    row = attention.kv_a_proj_with_mqa.weight @ u
    shared = turn(row[mla.kv_lora_rank :], position, theta, True)
    latent = attention.kv_b_proj.weight @ norm(row[: mla.kv_lora_rank], attention.kv_a_layernorm, eps)
    heads = latent.split(mla.qk_nope_head_dim + mla.v_head_dim)
    cut = mla.qk_nope_head_dim
    return torch.stack([torch.cat((h[:cut], shared)) for h in heads]), torch.stack([h[cut:] for h in heads])


def attend(attention: Any, queries: Sequence[Tensor], seen: Sequence[Key]) -> Tensor:
    """Query head h reads key-value head h // (heads / kv_heads)."""
    group, out = len(queries) // len(seen[0][0]), []
    for head, q in enumerate(queries):
        scores = [float(q @ k[head // group]) / math.sqrt(len(q)) for k, _ in seen]
        most = max(scores)
        weights = [math.exp(score - most) for score in scores]
        out.append(sum(w / sum(weights) * v[head // group] for w, (_, v) in zip(weights, seen, strict=True)))
    return attention.o_proj.weight @ torch.cat(out)


def mlp(module: Any, z: Tensor) -> Tensor:
    gate = module.gate_proj.weight @ z
    return module.down_proj.weight @ (gate / (1 + (-gate).exp()) * (module.up_proj.weight @ z))


def around(conv: Any, rows: list[Tensor], sublayer: Callable[[list[Tensor]], list[Tensor]]) -> list[Tensor]:
    if conv is None:
        return sublayer(rows)
    deltas = [conv.kernel_projection.weight @ row for row in rows]

    def side(which: int, y: list[Tensor]) -> list[Tensor]:
        out = [torch.zeros_like(row) for row in y]
        groups = len(y[0]) // conv.group_size
        for slot in range(len(y)):
            for channel in range(len(y[0])):
                for tap in range(min(conv.taps, slot + 1)):
                    place = (which * conv.taps + tap) * groups + channel // conv.group_size
                    factor = conv.base_kernel[which, tap, channel] + deltas[slot][place]
                    out[slot][channel] += factor * y[slot - tap][channel]
        return out

    return side(1, sublayer(side(0, rows)))


def block(model: BlockDrafter, aux: Tensor, embeds: Tensor, anchor: int) -> Tensor:
    """[P, H] of one block, from the states [positions, A * H] of its document."""
    shape, eps, theta = model.config, model.config.rms_norm_eps, model.config.rope.theta
    width = shape.hidden_size
    parts = [[row[width * i : width * (i + 1)] for i in range(len(shape.aux_layers))] for row in aux[:anchor]]
    if shape.fc_norm:
        parts = [[norm(p, model.fc_norm[i], eps) for i, p in enumerate(row)] for row in parts]
    context = [norm(model.fc.weight @ torch.cat(row), model.hidden_norm, eps) for row in parts]
    x = list(embeds)
    for layer, name in zip(model.stack, shape.layer_types, strict=True):
        causal = name == SLIDING if shape.is_causal is None else shape.is_causal
        window = shape.sliding_window if name == SLIDING else None
        inner: Any = layer.self_attn

        def attention(
            z: list[Tensor], inner: Any = inner, causal: bool = causal, window: int | None = window
        ) -> list[Tensor]:
            rows = [(p, key(inner, c, p, theta, eps, shape.mla)) for p, c in enumerate(context)]
            rows += [(anchor + s, key(inner, u, anchor + s, theta, eps, shape.mla)) for s, u in enumerate(z)]
            out = []
            for slot, u in enumerate(z):
                at = anchor + slot
                seen = [k for p, k in rows if (not causal or p <= at) and (window is None or abs(at - p) < window)]
                out.append(attend(inner, query(inner, u, at, theta, eps, shape.mla), seen))
            return out

        added = around(layer.attention_conv, [norm(v, layer.input_layernorm, eps) for v in x], attention)
        x = [v + a for v, a in zip(x, added, strict=True)]
        normed = [norm(v, layer.post_attention_layernorm, eps) for v in x]
        added = around(layer.mlp_conv, normed, lambda z, m=layer.mlp: [mlp(m, v) for v in z])  # type: ignore[misc]
        x = [v + a for v, a in zip(x, added, strict=True)]
    return torch.stack([norm(v, model.norm, eps) for v in x[shape.block_size - shape.predictions :]])


@pytest.mark.parametrize("attention", ["gqa", "mla", "mla_full_q"])
@pytest.mark.parametrize(
    ("kind", "causal", "window"),
    [(kind, None, 3) for kind in KINDS] + [("dflash", True, None), ("dflash", False, 2), ("dspark", None, None)],
)
def test_blocks(kind: str, attention: str, causal: bool | None, window: int | None) -> None:
    types = (FULL, FULL) if window is None else (SLIDING, FULL)
    rope = RopeConfig(100.0)
    model = drafter(
        config(kind, attention, **{"layer_types": types, "sliding_window": window, "is_causal": causal, "rope": rope})
    )
    made = index(model.config.predictions)
    embeds = block_embeds(TABLES.embedding, IDS, made.anchor, B, V - 1)
    with torch.no_grad():
        found, place = model(AUX, embeds, made.layout), 0
        for document, anchors in enumerate(ANCHORS):
            start = sum(LENGTHS[:document])
            for anchor in anchors.tolist():
                if anchor != 4:  # its neighbours say the same
                    expected = block(model, AUX[start : start + LENGTHS[document]], embeds[place], anchor)
                    torch.testing.assert_close(found[place], expected, atol=1e-11, rtol=0)
                place += 1


def chain(model: Eagle3Drafter, aux: Tensor, embeds: Sequence[Tensor], row: int) -> list[Tensor]:
    """The layer's outputs [H] of one row, depth after depth; embeds: of all rows at depth 0, then of this row."""
    shape, eps, theta, layer = model.config, model.config.rms_norm_eps, model.config.rope.theta, model.midlayer
    attention: Any = layer.self_attn

    def enter(hidden: Tensor, embed: Tensor) -> Tensor:
        return torch.cat((norm(embed, layer.input_layernorm, eps), norm(hidden, layer.hidden_norm, eps)))

    g = [model.fc.weight @ state for state in aux[: row + 1]]
    inputs = [enter(hidden, embed) for hidden, embed in zip(g, embeds[0], strict=False)]
    seen = [key(attention, u, i, theta, eps, shape.mla) for i, u in enumerate(inputs)]
    hidden, u, outs = g[row], inputs[row], []
    for depth in range(len(embeds)):
        if depth:
            hidden = outs[-1]
            u = enter(hidden, embeds[depth][row])
            seen.append(key(attention, u, row + depth, theta, eps, shape.mla))
        y = hidden + attend(attention, query(attention, u, row + depth, theta, eps, shape.mla), seen)
        outs.append(y + mlp(layer.mlp, norm(y, layer.post_attention_layernorm, eps)))
    return outs


@pytest.mark.parametrize("make", [grouped_eagle3, lambda: latent_eagle3(RopeConfig(100.0))], ids=["gqa", "mla"])
def test_eagle3(make: Callable[[], Eagle3Drafter]) -> None:
    model, (ids, aux, _, _) = make(), batch([9])
    made = ttt_index([9], np.ones(9, dtype=bool), 3, rows=np.arange(9))
    embeds = [embed_rows(teacher().embedding, ids, following) for following in made.next_token]
    with torch.no_grad():
        found = model.rollout(aux, embeds, made.layout)
        for row in (0, 3, 6):
            for depth, expected in enumerate(chain(model, aux, embeds, row)):
                torch.testing.assert_close(found[depth][row], expected, atol=1e-11, rtol=0)
