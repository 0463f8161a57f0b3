"""Block drafters: masks against loops, isolation, training = cached drafting, losses against plain autograd, sizes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from torchspec_core.decoding.blocks import BlockDrafts
from torchspec_core.decoding.draft import Committed
from torchspec_core.drafters.blocks import BlockRule, DenseBlocks, GatheredBlocks
from torchspec_core.drafters.convolution import GroupedDynamicConvolution
from torchspec_core.drafters.dflash import (
    FULL,
    SLIDING,
    BlockConfig,
    BlockDrafter,
    ConvolutionConfig,
    SelectorConfig,
    init_blocks,
)
from torchspec_core.drafters.mla import MLAConfig
from torchspec_core.drafters.rope import RopeConfig
from torchspec_core.drafters.slots import Tables
from torchspec_core.errors import UserError
from torchspec_core.objectives.blocks import BlockIndex, block_index, candidate_anchors
from torchspec_core.objectives.dflash import BlockTeacher, BlockWeights, block_embeds, block_loss

H, V, B, LENGTHS = 16, 24, 4, [12, 9, 3]
KINDS = ("dflash", "dflash2", "dspark")
YARN = RopeConfig(100.0, "yarn", factor=32.0, original_max_position_embeddings=64, mscale=1.0, mscale_all_dim=1.0)
ATTENTION: dict[str, dict[str, Any]] = {
    "gqa": {},
    "mla": {"mla": MLAConfig(10, 7, 6, 4, 5), "rope": YARN, "fc_norm": True},
    "mla_full_q": {"mla": MLAConfig(None, 7, 6, 4, 5)},
}
ALL_KINDS = pytest.mark.parametrize("kind", KINDS)
ALL_ATTENTION = pytest.mark.parametrize("attention", ATTENTION)


def config(kind: str = "dflash", attention: str = "gqa", **changes: Any) -> BlockConfig:
    parts: dict[str, Any] = {
        "dflash2": {"convolution": ConvolutionConfig(2, 4), "selector": SelectorConfig(6, 5, "projected")},
        "dspark": {"markov_rank": 6},
    }.get(kind, {})
    sizes = {
        "kind": kind, "hidden_size": H, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "intermediate_size": 24,
        "vocab_size": V, "aux_layers": (0, 2), "block_size": B, "mask_token_id": V - 1,
    }  # fmt: skip
    return BlockConfig(**{**sizes, **parts, **ATTENTION[attention], **changes})


def drafter(shape: BlockConfig, seed: int = 0) -> BlockDrafter:
    """Random everywhere, convolutions and norms included: nothing is neutral."""
    model = BlockDrafter(shape).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(1 + 0.2 * noise if "norm" in name else 0.3 * noise)
    return model


def random(*shape: int, seed: int = 5) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


TABLES = Tables(random(V, H, seed=1), random(V, H, seed=2))
TEACHER = BlockTeacher(TABLES, 1 + 0.1 * random(H, seed=3), 1e-5)
IDS = torch.randint(0, V - 1, (sum(LENGTHS),), generator=torch.Generator().manual_seed(4))
AUX, LAST = random(sum(LENGTHS), 2 * H, seed=6), random(sum(LENGTHS), H, seed=7)
MASK = np.ones(sum(LENGTHS), dtype=bool)
MASK[[0, 1, 6, 12, 13]] = False
ANCHORS = [np.array([3, 4, 9]), np.array([2, 6])]


def index(predictions: int = B - 1, anchors: list[np.ndarray] | None = None, **multiples: int) -> BlockIndex:
    return block_index(LENGTHS, MASK, ANCHORS if anchors is None else anchors, B, predictions, 4.0, **multiples)


def hidden(model: BlockDrafter, made: BlockIndex, aux: Tensor = AUX, form: Any = GatheredBlocks) -> Tensor:
    embeds = block_embeds(TABLES.embedding, IDS, made.anchor, B, V - 1)
    return model(aux, embeds, made.layout, form)


@pytest.mark.parametrize("rule", [BlockRule(), BlockRule(True), BlockRule(False, 3), BlockRule(True, 2)])
def test_the_mask_is_what_a_loop_over_all_pairs_says(rule: BlockRule) -> None:
    layout = index().layout
    found = DenseBlocks(layout).visible(rule)
    for m, (document, anchor) in enumerate(zip(layout.block_document.tolist(), layout.anchor.tolist(), strict=True)):
        for slot in range(B):
            expected = []
            for other, position in zip(layout.document.tolist(), layout.position.tolist(), strict=True):
                distance = anchor + slot - position
                near = (not rule.causal or distance >= 0) and (rule.window is None or abs(distance) < rule.window)
                expected.append(other == document and position < anchor and near)
            for other in range(len(layout.anchor)):
                for key in range(B):
                    near = (not rule.causal or key <= slot) and (rule.window is None or abs(slot - key) < rule.window)
                    expected.append(other == m and near)
            assert found[m, slot].tolist() == expected


@ALL_KINDS
@ALL_ATTENTION
@pytest.mark.parametrize("causal", [None, True, False])
def test_the_fast_form_is_the_dense_one_gradients_included(kind: str, attention: str, causal: bool | None) -> None:
    model = drafter(config(kind, attention, layer_types=(FULL, SLIDING), sliding_window=3, is_causal=causal))
    made = index(model.config.predictions, block_multiple=8, width_multiple=16, row_multiple=8)
    gradients = []
    for form in (DenseBlocks, GatheredBlocks):
        model.zero_grad()
        loss = block_loss(model, TEACHER, IDS, AUX, LAST, made, chunk=7, form=form).loss
        loss.backward()
        gradients.append([loss.detach(), *(p.grad for p in model.parameters())])
    for (name, _), dense, fast in zip([("loss", 0), *model.named_parameters()], *gradients, strict=True):
        torch.testing.assert_close(fast, dense, atol=1e-12, rtol=1e-9, msg=name)


@ALL_KINDS
@ALL_ATTENTION
def test_blocks_see_the_context_before_them_and_nothing_else(kind: str, attention: str) -> None:
    model = drafter(config(kind, attention))
    made = index(model.config.predictions)
    before = hidden(model, made)
    for document, start, anchors in ((0, 0, [3, 4, 9]), (1, 12, [2, 6])):
        for position in range(LENGTHS[document]):
            changed = AUX.clone()
            changed[start + position] += 1
            after = hidden(model, made, changed)
            for block, (owner, anchor) in enumerate([(0, 3), (0, 4), (0, 9), (1, 2), (1, 6)]):
                same = owner != document or position >= anchor
                assert torch.equal(before[block], after[block]) == same, (position, anchor)
        for anchor in anchors:
            one = [np.array([anchor] * (document == n), dtype=np.int64) for n in range(2)]
            alone = hidden(model, index(model.config.predictions, anchors=one))
            place = [(0, 3), (0, 4), (0, 9), (1, 2), (1, 6)].index((document, anchor))
            torch.testing.assert_close(alone[0], before[place], atol=1e-12, rtol=0)
    padded = hidden(model, index(model.config.predictions, block_multiple=16, width_multiple=32))
    torch.testing.assert_close(padded[:5], before, atol=1e-12, rtol=0)
    assert torch.isfinite(padded).all()


@ALL_ATTENTION
def test_tokens_behind_the_anchor_do_not_reach_a_block(attention: str) -> None:
    model, made = drafter(config(attention=attention)), index()
    other = IDS.clone()
    other[[i for i in range(len(IDS)) if i not in made.anchor.tolist()]] = 0
    inputs = [block_embeds(TABLES.embedding, ids, made.anchor, B, V - 1) for ids in (IDS, other)]
    assert torch.equal(*(model(AUX, embeds, made.layout) for embeds in inputs))


@ALL_ATTENTION
def test_a_block_is_read_both_ways_unless_it_is_causal(attention: str) -> None:
    made = index()
    embeds = block_embeds(TABLES.embedding, IDS, made.anchor, B, V - 1)
    other = embeds.clone()
    other[:, -1] += 1
    for causal in (None, True):
        model = drafter(config(attention=attention, is_causal=causal))
        same = torch.equal(model(AUX, embeds, made.layout)[:, 0], model(AUX, other, made.layout)[:, 0])
        assert same == bool(causal)


@ALL_ATTENTION
def test_a_window_wider_than_everything_is_full_attention(attention: str) -> None:
    wide = {"layer_types": (SLIDING, SLIDING), "sliding_window": max(LENGTHS) + B}
    for causal in (True, False):
        full, sliding = (drafter(config(attention=attention, is_causal=causal, **kind)) for kind in ({}, wide))
        torch.testing.assert_close(hidden(full, index()), hidden(sliding, index()), atol=1e-12, rtol=0)
    assert config(**wide).rules == (BlockRule(True, wide["sliding_window"]),) * 2  # vLLM: sliding layers are causal


def test_a_causal_window_shows_as_many_keys_as_it_says() -> None:
    layout = index().layout
    for window in (1, 2, 5, 40):
        shown = DenseBlocks(layout).visible(BlockRule(True, window)).sum(-1)
        at = layout.anchor.unsqueeze(1) + torch.arange(B)
        assert torch.equal(shown, (at + 1).clamp(max=window))


@ALL_KINDS
@ALL_ATTENTION
@pytest.mark.parametrize("causal", [None, True])
def test_training_is_cached_drafting_however_the_context_came(kind: str, attention: str, causal: bool | None) -> None:
    """For multi-latent attention: the naive form is the absorbed one, which caches latent rows and shared keys only."""
    model = drafter(config(kind, attention, layer_types=(FULL, SLIDING), sliding_window=5, is_causal=causal))
    made = index(model.config.predictions)
    trained = hidden(model, made)
    for split in ((9,), (1, 3, 5), (4, 5), (1,) * 9):
        caches, at = model.new_cache(2, 16), 0
        if attention != "gqa":
            assert [(c.k.shape, c.v.shape) for c in caches] == [((2, 1, 17, 4), (2, 1, 17, 7))] * 2
        for count in split:  # the two documents side by side; the second one's anchor is earlier
            positions = torch.arange(at, at + count).expand(2, -1).clone()
            positions[1, positions[1] >= 6] = -1
            aux = torch.stack((AUX[at : at + count], AUX[12:24][at : at + count]))
            model.extend(aux, positions, caches)
            at += count
        anchors = torch.tensor([9, 6])
        embeds = block_embeds(TABLES.embedding, IDS, torch.tensor([9, 18]), B, V - 1)
        found = model.draft(embeds, anchors, caches)
        torch.testing.assert_close(found, trained[[2, 4]], atol=1e-12, rtol=0)


@ALL_ATTENTION
def test_shifting_all_positions_changes_nothing(attention: str) -> None:
    model, made = drafter(config(attention=attention, layer_types=(FULL, SLIDING), sliding_window=5)), index()
    plain = hidden(model, made)
    inner = model.stack[0].self_attn
    angles = inner.angles
    inner.angles = lambda positions, dtype: angles(positions + 1000, dtype)  # type: ignore[method-assign]
    torch.testing.assert_close(hidden(model, made), plain, atol=1e-9, rtol=0)


def plain_loss(model: BlockDrafter, made: BlockIndex) -> Tensor:
    """The three losses written down for all slots at once, for autograd to differentiate."""
    shape = model.config
    h = hidden(model, made).flatten(0, 1)[made.slot]
    gold, previous = IDS[made.label], IDS[made.previous]
    weight, chain = made.weight / made.weight.sum(), made.chain / made.chain.sum()
    logits = h @ TABLES.head.T
    if shape.markov_rank is not None:
        features = model.markov_head.markov_w1(previous)
        q = (logits + features @ model.markov_head.markov_w2.weight.T).softmax(-1)
        normed = LAST / (LAST.square().mean(-1, keepdim=True) + TEACHER.eps).sqrt() * TEACHER.norm
        p = (normed[made.previous] @ TABLES.head.T).softmax(-1)
        distance = (q - p).abs().sum(-1)
        c = torch.sigmoid(
            torch.cat((h, features), -1) @ model.confidence_head.proj.weight[0] + model.confidence_head.proj.bias
        )
        wanted = torch.minimum(p, q).sum(-1).detach()
        judged = -(wanted * c.log() + (1 - wanted) * (1 - c).log())
        return (chain * (-0.1 * q[range(len(q)), gold].log() + 0.9 * distance + judged)).sum()
    loss = -(weight * logits.log_softmax(-1)[range(len(gold)), gold]).sum()
    if shape.selector is None:
        return loss
    selector = model.candidate_selector
    a = TABLES.embedding @ selector.predecessor_projection.weight.T
    b = TABLES.head @ selector.successor_projection.weight.T
    for r in range(len(gold)):
        best = logits[r].topk(shape.selector.top_k).indices.tolist()
        best = best if int(gold[r]) in best else [*best[:-1], int(gold[r])]
        edge = b[best] @ (a[previous[r]] * (selector.hidden_projection.weight @ h[r]))
        loss = loss - chain[r] * (logits[r, best] + edge).log_softmax(-1)[best.index(int(gold[r]))]
    return loss


@ALL_KINDS
@ALL_ATTENTION
def test_losses_and_gradients_are_those_of_plain_autograd(kind: str, attention: str) -> None:
    model = drafter(config(kind, attention))
    made = index(model.config.predictions)
    result = block_loss(model, TEACHER, IDS, AUX, LAST, made, chunk=3)
    result.loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters()}  # type: ignore[union-attr]
    model.zero_grad()
    expected = plain_loss(model, made)
    expected.backward()
    torch.testing.assert_close(result.loss, expected, atol=1e-12, rtol=1e-10)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, atol=1e-11, rtol=1e-8, msg=name)


def test_gradients_stop_where_they_are_told_to() -> None:
    for kind, weights in (
        ("dflash2", BlockWeights(selector_stop_gradient=True)),
        ("dspark", BlockWeights(cross_entropy=0.0, l1=0.0, confidence_stop_gradient=True)),
    ):
        model = drafter(config(kind))
        made = index(model.config.predictions)
        block_loss(model, TEACHER, IDS, AUX, LAST, made, weights).loss.backward()
        moved = model.fc.weight.grad.clone()  # type: ignore[union-attr]
        model.zero_grad()
        off = replace(weights, selector=0.0, confidence=0.0)
        block_loss(model, TEACHER, IDS, AUX, LAST, made, off).loss.backward()
        assert torch.equal(moved, model.fc.weight.grad)


@ALL_KINDS
@ALL_ATTENTION
def test_a_batch_without_supervision_gives_zero_for_every_parameter(kind: str, attention: str) -> None:
    model = drafter(config(kind, attention))
    made = block_index(LENGTHS, np.zeros_like(MASK), [], B, model.config.predictions, 4.0, 8, 8, 8)
    result = block_loss(model, TEACHER, IDS, AUX, LAST, made)
    result.loss.backward()
    assert result.loss.item() == 0.0 and result.count.sum() == 0
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


@ALL_ATTENTION
def test_neutral_parts_leave_dflash(attention: str) -> None:
    plain, extended, spark = (drafter(config(kind, attention)) for kind in KINDS)
    shared = plain.state_dict()
    for model in (extended, spark):
        model.load_state_dict(shared, strict=False)
    for module in extended.modules():
        if isinstance(module, GroupedDynamicConvolution):
            module.reset()
    with torch.no_grad():
        extended.candidate_selector.hidden_projection.weight.zero_()
        spark.markov_head.markov_w2.weight.zero_()
    made = index()
    torch.testing.assert_close(hidden(extended, made), hidden(plain, made), atol=1e-12, rtol=0)
    torch.testing.assert_close(hidden(spark, made)[:, 1:], hidden(plain, made), atol=1e-12, rtol=0)
    h, previous = random(5, H), torch.arange(5)
    unary = h @ TABLES.head.T
    scores, ids = extended.scores(h, previous, TABLES)
    assert ids is not None and torch.equal(ids[range(5), scores.argmax(-1)], unary.argmax(-1))
    torch.testing.assert_close(spark.scores(h, previous, TABLES)[0], unary)


def test_a_selector_over_the_whole_vocabulary_is_full_cross_entropy_and_needs_no_injection() -> None:
    model = drafter(config("dflash2", selector=SelectorConfig(6, V, "projected")))
    made = index()
    result = block_loss(model, TEACHER, IDS, AUX, LAST, made)
    h = hidden(model, made).flatten(0, 1)[made.slot]
    everything = torch.arange(V).expand(len(h), -1)
    with torch.no_grad():
        scores = h @ TABLES.head.T + model.candidate_selector(h, IDS[made.previous], everything, TABLES)
        expected = (made.chain * -scores.log_softmax(-1)[range(len(h)), IDS[made.label]]).sum() / made.chain.sum()
    top, bottom = result.extras["selector_loss"]
    assert float(top / bottom) == pytest.approx(float(expected), abs=1e-10)
    assert float(result.extras[f"recall_{V}"][0]) == pytest.approx(float(made.chain.sum()))


def test_a_gold_token_that_is_the_best_candidate_is_not_injected() -> None:
    model = drafter(config("dflash2"))
    made = index(anchors=[np.array([7])])
    h = hidden(model, made).flatten(0, 1)[made.slot]
    ids = IDS.clone()
    best = (h @ TABLES.head.T).topk(5, dim=-1)
    ids[made.label] = best.indices[:, 0]  # the labels are no anchors: the block does not read them
    result = block_loss(model, TEACHER, ids, AUX, LAST, made)
    with torch.no_grad():
        scores = best.values + model.candidate_selector(h, ids[made.previous], best.indices, TABLES)
        expected = (made.chain * -scores.log_softmax(-1)[:, 0]).sum()
    assert float(result.extras["selector_loss"][0]) == pytest.approx(float(expected), abs=1e-12)
    for name in ("acc_0", "acc_1", "acc_2", "recall_5"):
        top, bottom = result.extras[name].tolist()
        assert top == pytest.approx(bottom) and bottom > 0


def test_convolution_by_hand_and_no_leak_across_blocks() -> None:
    convolution = GroupedDynamicConvolution(2, 2, 2)
    with torch.no_grad():
        convolution.base_kernel[:, 1] = 0.5
    y = torch.tensor([[[1.0, 1.0], [2.0, 2.0], [4.0, 4.0]], [[8.0, 8.0], [0.0, 0.0], [0.0, 0.0]]])
    out = convolution.side(0, y, convolution.coefficients(y))
    assert out[0].tolist() == [[1.0, 1.0], [2.5, 2.5], [5.0, 5.0]]
    assert out[1, 0].tolist() == [8.0, 8.0]


def test_slot_weights() -> None:
    made = block_index([40], np.ones(40, dtype=bool), [np.array([2])], 8, 7, 7.0)
    assert made.weight.tolist() == pytest.approx([1, 0.8669, 0.7515, 0.6514, 0.5647, 0.4895, 0.4244], abs=5e-5)
    made = block_index([40], np.ones(40, dtype=bool), [np.array([2])], 7, 7, 4.0)
    assert made.weight.tolist() == pytest.approx([1, 0.7788, 0.6065, 0.4724, 0.3679, 0.2865, 0.2231], abs=5e-5)


def test_anchors_stand_on_supervised_tokens_whose_next_one_is_too() -> None:
    mask = np.zeros(40, dtype=bool)
    mask[5:17] = mask[20:31] = True
    assert candidate_anchors(mask).tolist() == [*range(5, 16), *range(20, 30)]


@ALL_KINDS
@pytest.mark.parametrize("attention", ["gqa", "mla"])
def test_the_walk_draws_from_the_law_it_reports(kind: str, attention: str) -> None:
    model = BlockDrafter(config(kind, attention))
    init_blocks(model, 0)
    drafts = BlockDrafts(model, Tables(*(table.float() for table in TABLES)))
    k = model.config.predictions
    rows = 400
    drafts.start(rows, 8)
    states = random(1, 3, 2 * H).float().expand(rows, -1, -1)
    counts = torch.full((rows,), 3)
    committed = Committed(states, torch.tensor([[1, 2, 3]]).expand(rows, -1), torch.zeros_like(counts), counts)
    u = torch.rand(rows, k, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    proposal = drafts.propose(committed, k, 1.0, u)
    assert proposal.q is not None and proposal.tokens.shape == (rows, k)
    torch.testing.assert_close(proposal.q.sum(-1), torch.ones(rows, k))
    assert (proposal.q.gather(2, proposal.tokens.unsqueeze(2)) > 0).all()
    if kind == "dflash2":
        assert ((proposal.q > 0).sum(-1) == 5).all()
    seen = torch.bincount(proposal.tokens[:, 0], minlength=V) / rows
    assert (seen - proposal.q[0, 0]).abs().max() < 4 * math.sqrt(0.25 / rows)
    with pytest.raises(UserError, match="evaluation.k"):
        drafts.propose(committed, k + 1, 1.0, None)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"mask_token_id": V}, "mask_token_id"),
        ({"num_kv_heads": 3}, "num_kv_heads"),
        ({"head_dim": 7}, "head_dim"),
        ({"block_size": 1}, "block_size"),
        ({"layer_types": (FULL, SLIDING)}, "sliding_window"),
        ({"aux_layers": (1, 1)}, "capture.layers"),
        ({"convolution": ConvolutionConfig(2, 5)}, "conv_group_size"),
        ({"selector": SelectorConfig(4, V + 1)}, "selector_top_k"),
    ],
)
def test_shapes_that_do_not_fit_are_refused_by_key(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(UserError, match=key):
        config(**changes)


@pytest.mark.parametrize(("query_heads", "expected"), [(64, 2_249_289_601), (96, 4_744_900_481)])
def test_parameter_counts_of_released_dspark(query_heads: int, expected: int) -> None:
    """RadixArk/Kimi-K3-DSpark; RedHatAI/Kimi-K3-speculator.dspark, whose file holds embedding and head as well."""
    shape = BlockConfig(
        kind="dspark", hidden_size=7168, num_heads=query_heads, num_kv_heads=16, head_dim=64, intermediate_size=14336,
        vocab_size=163840, aux_layers=(7, 31, 47, 63, 87), block_size=7, mask_token_id=163837, layer_types=(FULL,) * 5,
        markov_rank=256,
    )  # fmt: skip
    with torch.device("meta"):
        count = sum(p.numel() for p in BlockDrafter(shape).parameters())
    shared = 2 * 163840 * 7168 if query_heads == 96 else 0
    assert count + shared == expected


def test_convolutions_of_qwen3_4b_have_the_published_size() -> None:
    with torch.device("meta"):
        layers = [GroupedDynamicConvolution(2560, 2, 16) for _ in range(10)]
    assert sum(p.numel() for layer in layers for p in layer.parameters()) == 16_486_400
