"""Training-time test: masks by brute force, fast form against dense form, loss and gradients against the naive form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.unit.test_eagle3_mla import drafter as latent_drafter
from torchspec_core.drafters import ttt
from torchspec_core.drafters.eagle3 import Eagle3Config, Eagle3Drafter, init_weights
from torchspec_core.drafters.rope import RopeConfig
from torchspec_core.drafters.ttt import DenseTTT, dense_ttt_mask
from torchspec_core.objectives.eagle3 import Eagle3Loss, Teacher, eagle3_loss, embed_rows
from torchspec_core.objectives.soft_cross_entropy import soft_cross_entropy
from torchspec_core.objectives.ttt import TTTIndex, ttt_index

VOCABULARY, DRAFT, SIZE, DEPTHS = 24, 16, 12, 3
Make = Callable[[], Eagle3Drafter]


FORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def drafter(seed: int = 0, **forms: Any) -> Eagle3Drafter:
    config = Eagle3Config(
        hidden_size=SIZE,
        target_hidden_size=SIZE,
        num_heads=6,
        num_kv_heads=2,
        head_dim=4,
        intermediate_size=20,
        vocab_size=VOCABULARY,
        draft_vocab_size=DRAFT,
        aux_layers=(0, 1),
        rope=RopeConfig(theta=50.0),
        **forms,
    )
    model = Eagle3Drafter(config).double()
    init_weights(model, seed)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(seed + 1)
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64), alpha=0.3)
    return model


BOTH_ATTENTIONS = pytest.mark.parametrize("make", [drafter, latent_drafter], ids=["gqa", "mla"])


def teacher(seed: int = 5) -> Teacher:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return Teacher(random(VOCABULARY, SIZE), 1 + 0.2 * random(SIZE), 1e-5, random(DRAFT, SIZE))


def batch(lengths: list[int], seed: int = 7) -> tuple[Tensor, Tensor, Tensor, np.ndarray]:
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    ids = torch.randint(0, VOCABULARY, (total,), generator=generator)
    aux = torch.randn(total, 2 * SIZE, generator=generator, dtype=torch.float64)
    last = torch.randn(total, SIZE, generator=generator, dtype=torch.float64)
    return ids, aux, last, np.random.default_rng(seed).random(total) < 0.6


def gradients(model: Eagle3Drafter, *args: object, **options: object) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    result = eagle3_loss(model, teacher(), *args, **options)  # type: ignore[arg-type]
    result.loss.backward()
    return result.loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(
    a: tuple[Tensor, dict[str, Tensor]], b: tuple[Tensor, dict[str, Tensor]], tolerance: float = 1e-12
) -> None:
    torch.testing.assert_close(a[0], b[0], atol=tolerance, rtol=tolerance)
    assert a[1].keys() == b[1].keys()
    for name, gradient in a[1].items():
        torch.testing.assert_close(gradient, b[1][name], atol=tolerance, rtol=tolerance, msg=name)


def test_dense_mask_is_the_loop_over_its_definition() -> None:
    lengths, loss_mask = [5, 7], np.ones(12, dtype=bool)
    index = ttt_index(lengths, loss_mask, DEPTHS)
    rows = index.layout.rows.tolist()
    place = [(document, position) for document, length in enumerate(lengths) for position in range(length)]
    for depth in range(DEPTHS):
        keys = [(0, n) for n in range(12)] + [(e, r) for e in range(1, depth + 1) for r in rows]
        expected = [
            [(place[n][0] == place[r][0] and place[n][1] <= place[r][1]) if e == 0 else n == r for e, n in keys]
            for r in rows
        ]
        assert dense_ttt_mask(index.layout, depth).tolist() == expected


def naive_loss(
    model: Eagle3Drafter,
    target: Teacher,
    ids: Tensor,
    aux: Tensor,
    last: Tensor,
    loss_mask: np.ndarray,
    term: str = "soft_ce",
) -> Tensor:
    """One document, all rows, whole logits, straight from the definition."""
    total = len(ids)
    index = ttt_index([total], loss_mask, DEPTHS, rows=np.arange(total))
    outs = model.rollout(aux, [embed_rows(target.embedding, ids, n) for n in index.next_token], index.layout, DenseTTT)
    normed = last / (last.square().mean(-1, keepdim=True) + target.eps).sqrt() * target.norm
    p = (normed @ target.head.T).softmax(-1)
    loss = torch.zeros((), dtype=torch.float64)
    for depth, out in enumerate(outs):
        rows = [i for i in range(total) if i + 2 + depth < total and loss_mask[i + 2 + depth]]
        log_q = model.logits(out[rows]).log_softmax(-1)
        taught = p[[i + 1 + depth for i in rows]]
        of_row = -(taught * log_q).sum(-1) if term == "soft_ce" else (log_q.exp() - taught).abs().sum(-1)
        loss = loss + 0.8**depth * of_row.mean()
    return loss


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("chunk", [3, 1000])
def test_loss_and_gradients_are_those_of_the_naive_form(form: str, chunk: int) -> None:
    model, (ids, aux, last, loss_mask) = drafter(**{form: chunk == 3}), batch([17])
    fast = gradients(
        model, ids, aux, last, ttt_index([17], loss_mask, DEPTHS, row_multiple=8, width_multiple=16), chunk=chunk
    )
    model.zero_grad()
    loss = naive_loss(model, teacher(), ids, aux, last, loss_mask)
    loss.backward()
    assert_same(fast, (loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}))


@pytest.mark.parametrize("loss", ["soft_ce", "l1"])
@pytest.mark.parametrize("forms", [{"head": "low_rank", "head_rank": 5}, {"head": "target"}], ids=lambda f: f["head"])
def test_heads_give_the_gradients_of_the_naive_form(forms: dict[str, Any], loss: str) -> None:
    model, (ids, aux, last, loss_mask) = drafter(**forms), batch([17])
    if forms["head"] == "target":
        model.lm_head.weight.copy_(teacher().head)
        assert not any("lm_head" in name for name, _ in model.named_parameters())
    assert not any("lm_head.weight" in name for name in model.state_dict())
    index = ttt_index([17], loss_mask, DEPTHS, row_multiple=8, width_multiple=16)
    fast = gradients(model, ids, aux, last, index, chunk=3, loss=Eagle3Loss(loss))
    model.zero_grad()
    naive = naive_loss(model, teacher(), ids, aux, last, loss_mask, loss)
    naive.backward()
    assert_same(fast, (naive.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}))


@BOTH_ATTENTIONS
def test_batched_documents_equal_documents_alone(make: Make) -> None:
    model, lengths = make(), [9, 1, 14, 4]
    ids, aux, last, loss_mask = batch(lengths)
    result = eagle3_loss(
        model, teacher(), ids, aux, last, ttt_index(lengths, loss_mask, DEPTHS, row_multiple=8, width_multiple=8)
    )
    numerator, count, start = torch.zeros(DEPTHS, dtype=torch.float64), torch.zeros(DEPTHS, dtype=torch.float64), 0
    for length in lengths:
        part = slice(start, start + length)
        alone = eagle3_loss(
            model, teacher(), ids[part], aux[part], last[part], ttt_index([length], loss_mask[part], DEPTHS)
        )
        numerator, count, start = numerator + alone.numerator, count + alone.count, start + length
    torch.testing.assert_close(result.numerator, numerator, atol=1e-12, rtol=1e-12)
    assert result.count.tolist() == count.tolist()


@BOTH_ATTENTIONS
@pytest.mark.parametrize("lengths", [[29], [21, 2, 17]])
def test_tiles_of_long_documents_equal_the_dense_form(
    lengths: list[int], make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ttt, "_TILE_WIDTH", 8)
    monkeypatch.setattr(ttt, "_TILE_ROWS", 4)
    monkeypatch.setattr(ttt, "_TILE_STEP", 3)
    model, (ids, aux, last, loss_mask) = make(), batch(lengths)
    index = ttt_index(lengths, loss_mask, DEPTHS, row_multiple=4, width_multiple=2)
    widths = [width for _, _, width in index.layout.tiles]
    assert len(widths) > 2
    assert widths == sorted(widths)
    assert widths[0] < widths[-1]
    dense = gradients(model, ids, aux, last, index, mask=DenseTTT)
    assert_same(gradients(model, ids, aux, last, index), dense)


@BOTH_ATTENTIONS
def test_padding_changes_nothing(make: Make) -> None:
    model, (ids, aux, last, loss_mask) = make(), batch([11])
    plain = gradients(model, ids, aux, last, ttt_index([11], loss_mask, DEPTHS))
    padded = gradients(
        model,
        torch.cat((ids, torch.zeros(5, dtype=torch.int64))),
        torch.cat((aux, torch.full((5, 2 * SIZE), 9.0, dtype=torch.float64))),
        torch.cat((last, torch.ones(5, SIZE, dtype=torch.float64))),
        ttt_index(
            [11, 5], np.concatenate((loss_mask, np.zeros(5, dtype=bool))), DEPTHS, row_multiple=16, width_multiple=16
        ),
    )
    assert_same(plain, padded)


@BOTH_ATTENTIONS
def test_fewer_drafted_rows_leave_the_others_alone(make: Make) -> None:
    """Anchors: drafting from a subset of rows gives those rows the outputs they have among all."""
    model, (ids, aux, _, loss_mask) = make(), batch([13])
    target = teacher()
    some = np.array([2, 3, 7, 11])
    outs = []
    for rows in (np.arange(13), some):
        index = ttt_index([13], loss_mask, DEPTHS, rows=rows)
        outs.append(model.rollout(aux, [embed_rows(target.embedding, ids, n) for n in index.next_token], index.layout))
    for every, few in zip(*outs, strict=True):
        torch.testing.assert_close(every[some], few, atol=1e-12, rtol=1e-12)


@BOTH_ATTENTIONS
def test_future_does_not_reach_a_row(make: Make) -> None:
    model, (ids, aux, _, loss_mask) = make(), batch([12])
    target, index = teacher(), ttt_index([12], loss_mask, DEPTHS, rows=np.arange(12))

    def outs(ids: Tensor, aux: Tensor) -> list[Tensor]:
        return model.rollout(aux, [embed_rows(target.embedding, ids, n) for n in index.next_token], index.layout)

    later = aux.clone()
    later[6:] += 1.0
    for depth, (before, after) in enumerate(zip(outs(ids, aux), outs(ids, later), strict=True)):
        torch.testing.assert_close(before[:6], after[:6], atol=0, rtol=0)
        assert not torch.equal(before[6], after[6])
        swapped = ids.clone()
        swapped[5 + 2 + depth] = (swapped[5 + 2 + depth] + 1) % VOCABULARY
        torch.testing.assert_close(outs(swapped, aux)[depth][:6], before[:6], atol=0, rtol=0)


@BOTH_ATTENTIONS
def test_shifting_all_positions_changes_nothing(make: Make) -> None:
    model, (ids, aux, _, loss_mask) = make(), batch([12])
    target, index = teacher(), ttt_index([12], loss_mask, DEPTHS)
    attention = model.midlayer.self_attn
    embeds = [embed_rows(target.embedding, ids, n) for n in index.next_token]
    plain = model.rollout(aux, embeds, index.layout)
    angles = attention.angles
    attention.angles = lambda positions, dtype: angles(positions + 1000, dtype)  # type: ignore[method-assign]
    for a, b in zip(plain, model.rollout(aux, embeds, index.layout), strict=True):
        torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-9)


def plain_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def test_norms_before_fc_are_those_of_the_engine() -> None:
    """One norm over all aux states, or one for each, in front of `fc` (vLLM: `combine_hidden_states`)."""
    _, aux, _, _ = batch([6])
    model = drafter(norm_before_fc=True)
    expected = plain_norm(aux, model.input_norm.weight) @ model.fc.weight.T
    torch.testing.assert_close(model.combine(aux), expected, atol=1e-12, rtol=0)
    model = drafter(fc_norm=True)
    parts = [plain_norm(aux[:, SIZE * i : SIZE * (i + 1)], model.fc_norm[i].weight) for i in range(2)]
    torch.testing.assert_close(model.combine(aux), torch.cat(parts, -1) @ model.fc.weight.T, atol=1e-12, rtol=0)


def test_a_normed_output_is_what_the_next_depth_reads() -> None:
    """Depth 1 of a normed drafter = depth 0 of the same drafter that is given the normed output as its g, at i + 1."""
    model, (ids, aux, _, _) = drafter(norm_output=True), batch([8])
    table = teacher().embedding
    index = ttt_index([8], np.ones(8, dtype=bool), 2, rows=np.arange(8))
    first, second = model.rollout(aux, [embed_rows(table, ids, n) for n in index.next_token], index.layout)
    assert not torch.allclose(second, drafter().rollout(
        aux, [embed_rows(table, ids, n) for n in index.next_token], index.layout)[1])  # fmt: skip
    with torch.no_grad():
        cache = model.new_cache(1, 8)
        model.step(model.combine(aux)[None, :4], table[ids[1:5]][None], torch.arange(4)[None], cache)
        hidden = plain_norm(first[3], model.norm.weight)
        out = model.step(hidden[None, None], table[ids[5]][None, None], torch.tensor([[4]]), cache)
        torch.testing.assert_close(out[0, 0], second[3], atol=1e-12, rtol=0)


@BOTH_ATTENTIONS
def test_training_logits_are_those_of_cached_decoding(make: Make) -> None:
    """Row i of depth d: prefill rows 0..i with the target's states, then d steps that feed the drafter its own
    outputs."""
    model, (ids, aux, _, loss_mask) = make(), batch([10])
    target, index = teacher(), ttt_index([10], loss_mask, DEPTHS, rows=np.arange(10))
    outs = model.rollout(aux, [embed_rows(target.embedding, ids, n) for n in index.next_token], index.layout)
    g = model.combine(aux)
    with torch.no_grad():
        for row in range(7):
            cache = model.new_cache(2, 16)
            padding = torch.full((row + 1,), -1)
            padding[-1] = 0
            positions = torch.stack((torch.arange(row + 1), padding))  # beside it a sequence that is mostly padding
            embeds, cut = target.embedding[ids[1 : row + 2]], (row + 1) // 3  # the context comes in two parts
            for part in (slice(0, cut), slice(cut, row + 1)):
                if part.stop > part.start:
                    rows = [x[part].expand(2, -1, -1) for x in (g, embeds)]
                    out = model.step(*rows, positions[:, part], cache)[:, -1:]
            for depth in range(DEPTHS):
                torch.testing.assert_close(
                    model.logits(out[0, 0]), model.logits(outs[depth][row]), atol=1e-10, rtol=1e-10
                )
                embed = (
                    target.embedding[ids[row + 2 + depth]].expand(2, 1, -1)
                    if row + 2 + depth < 10
                    else target.embedding[:1].expand(2, 1, -1)
                )
                out = model.step(out, embed, torch.tensor([[row + 1 + depth], [1 + depth]]), cache)


@BOTH_ATTENTIONS
def test_stale_cache_slots_are_never_seen(make: Make) -> None:
    model, (_, aux, _, _) = make(), batch([8])
    g, embeds = model.combine(aux).unsqueeze(0), torch.randn(1, 8, SIZE, dtype=torch.float64)
    fresh, used = model.new_cache(1, 12), model.new_cache(1, 12)
    model.step(g + 3, embeds, torch.arange(8).unsqueeze(0), used)
    positions = torch.arange(4).unsqueeze(0)
    torch.testing.assert_close(
        model.step(g[:, :4], embeds[:, :4], positions, used),
        model.step(g[:, :4], embeds[:, :4], positions, fresh),
        atol=1e-12,
        rtol=1e-12,
    )


def test_equal_distributions_give_the_entropy_and_no_gradient() -> None:
    generator = torch.Generator().manual_seed(0)
    states, head = (torch.randn(n, 6, generator=generator, dtype=torch.float64) for n in (9, 16))
    hidden, weights = states.clone().requires_grad_(), head.clone().requires_grad_()
    result = soft_cross_entropy(
        hidden.unsqueeze(0),
        weights,
        states,
        head,
        torch.ones(1, 9, dtype=torch.float64),
        chunk=4,
    )
    p = (states @ head.T).softmax(-1)
    assert result.loss.item() == pytest.approx(-(p * p.log()).sum().item(), abs=1e-10)
    assert result.hit.sum().item() == 9
    torch.testing.assert_close(result.overlap, torch.ones_like(result.overlap), atol=1e-12, rtol=0)
    result.loss.backward()
    assert hidden.grad is not None and weights.grad is not None
    assert hidden.grad.abs().max() < 1e-12 and weights.grad.abs().max() < 1e-12


@BOTH_ATTENTIONS
def test_no_supervised_row_gives_zero_everywhere(make: Make) -> None:
    model, (ids, aux, last, _) = make(), batch([6, 3])
    loss, grads = gradients(model, ids, aux, last, ttt_index([6, 3], np.zeros(9, dtype=bool), DEPTHS, row_multiple=4))
    assert loss.item() == 0.0
    assert set(grads) == {name for name, _ in model.named_parameters()}
    assert all((gradient == 0).all() for gradient in grads.values())


def test_uncovered_positions_do_not_count() -> None:
    model, (ids, aux, last, loss_mask) = drafter(), batch([12])
    covered = torch.arange(12) % 3 != 0
    masked = loss_mask.copy()
    masked[1:] &= covered.numpy()[:-1]
    expected = eagle3_loss(model, teacher(), ids, aux, last, ttt_index([12], masked, DEPTHS))
    result = eagle3_loss(model, teacher(), ids, aux, last, ttt_index([12], loss_mask, DEPTHS), covered=covered)
    assert result.loss.item() == pytest.approx(expected.loss.item(), abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_stays_near_the_exact_loss(dtype: torch.dtype) -> None:
    model, lengths = drafter(), [20, 25]
    ids, aux, last, loss_mask = batch(lengths)
    index = ttt_index(lengths, loss_mask, DEPTHS)
    exact = gradients(model, ids, aux, last, index)
    target = teacher()
    low = Teacher(*(t.to(dtype) for t in (target.embedding, target.norm)), target.eps, target.head.to(dtype))
    model = drafter().to(dtype)
    result = eagle3_loss(model, low, ids, aux.to(dtype), last.to(dtype), index)
    result.loss.backward()
    limit = 1e-4 if dtype == torch.float32 else 0.05
    assert result.loss.item() == pytest.approx(exact[0].item(), rel=limit)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert (
            torch.nn.functional.cosine_similarity(parameter.grad.double().flatten(), exact[1][name].flatten(), 0)
            > 1 - limit
        )


def test_index_counts_every_taught_row_once() -> None:
    lengths = [6, 9]
    loss_mask = np.zeros(15, dtype=bool)
    loss_mask[[3, 4, 5, 6, 9, 14]] = True
    index: TTTIndex = ttt_index(lengths, loss_mask, DEPTHS, row_multiple=4)
    taught = {
        (depth, int(index.layout.rows[index.student[depth, p]]), int(index.teacher[p]))
        for depth in range(DEPTHS)
        for p in range(len(index.teacher))
        if index.weight[depth, p]
    }
    expected = {
        (depth, start + i, start + i + 1 + depth)
        for start, length in ((0, 6), (6, 9))
        for depth in range(DEPTHS)
        for i in range(length)
        if i + 2 + depth < length and loss_mask[start + i + 2 + depth]
    }
    assert taught == expected
    assert len(index.layout.rows) % 4 == 0 and len(index.teacher) % 4 == 0
