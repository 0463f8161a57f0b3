"""Losses against plain autograd on whole matrices, closed forms, limits and loops; memory by the sizes of tensors."""

from __future__ import annotations

import math
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.unit import test_dflash as blocks
from tests.unit.test_dflash import TEACHER
from tests.unit.test_ttt import DEPTHS, DRAFT, SIZE, VOCABULARY, batch, drafter, teacher
from torchspec_core.drafters.eagle3 import Eagle3Drafter
from torchspec_core.drafters.slots import Tables
from torchspec_core.objectives.blocks import block_index
from torchspec_core.objectives.dflash import BlockTeacher, BlockWeights, block_loss
from torchspec_core.objectives.distillation import distillation_loss
from torchspec_core.objectives.eagle3 import Eagle3Loss, Teacher, eagle3_loss, embed_rows
from torchspec_core.objectives.metrics import acceptance, estimates, means_of
from torchspec_core.objectives.reduction import shares
from torchspec_core.objectives.soft_cross_entropy import soft_cross_entropy
from torchspec_core.objectives.terms import DistillationLoss, dpace_weights, l1_distance, log_overlap
from torchspec_core.objectives.ttt import TTTIndex, ttt_index

LOSSES: tuple[DistillationLoss, ...] = get_args(DistillationLoss)
LENGTHS = [17, 9, 6]
KEPT = torch.tensor(sorted(set(range(VOCABULARY)) - {0, 3, 5, 9, 12, 17, 20, 23}))


pytestmark = pytest.mark.usefixtures("one_thread")


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def target() -> Teacher:
    made = teacher()
    return Teacher(made.embedding, made.norm, made.eps, made.head, KEPT)


def rows_of(depth: int, loss_mask: np.ndarray, loss: str, ids: Tensor) -> list[list[int]]:
    """By document: packed rows that are taught at `depth`, from the definition."""
    found, start = [], 0
    for length in LENGTHS:
        taught = [i for i in range(start, start + length - 2 - depth) if loss_mask[i + 2 + depth]]
        found.append([i for i in taught if loss != "hard_ce" or int(ids[i + 2 + depth]) in KEPT.tolist()])
        start += length
    return found


def plain_loss(model: Eagle3Drafter, loss: str, normalisation: str, loss_mask: np.ndarray, *states: Tensor) -> Tensor:
    """Whole distributions, sums of absolute values and logarithms of sums, for autograd to differentiate."""
    (ids, aux, last), made = states, target()
    index = ttt_index(LENGTHS, loss_mask, DEPTHS, rows=np.arange(len(ids)))
    outs = model.rollout(aux, [embed_rows(made.embedding, ids, n) for n in index.next_token], index.layout)
    normed = last / (last.square().mean(-1, keepdim=True) + made.eps).sqrt() * made.norm
    total = torch.zeros((), dtype=torch.float64)
    for depth, out in enumerate(outs):
        documents = []
        for rows in rows_of(depth, loss_mask, loss, ids):
            if not rows:
                continue
            p = (normed[[i + 1 + depth for i in rows]] @ made.head.T).softmax(-1)
            q = model.logits(out[rows]).softmax(-1)
            gold = [KEPT.tolist().index(t) if t in KEPT else 0 for t in ids[[i + 2 + depth for i in rows]].tolist()]
            accepted = 1 - 0.5 * (p - q).abs().sum(-1)
            kl = (p * (p / q).log()).sum(-1)
            documents.append(
                {
                    "soft_ce": -(p * q.log()).sum(-1),
                    "hard_ce": -q[range(len(rows)), gold].log(),
                    "l1": (p - q).abs().sum(-1),
                    "lk_alpha": -accepted.log(),
                    "lk_lambda": torch.stack((kl, 1 - accepted)),
                }[loss]
            )
        joined = torch.cat(documents, dim=-1)
        share = torch.full((joined.shape[-1],), 1 / joined.shape[-1], dtype=torch.float64)
        if normalisation == "per_sequence":
            parts = [torch.ones(d.shape[-1], dtype=torch.float64) / d.shape[-1] for d in documents]
            share = torch.cat(parts) / len(documents)
        if loss == "lk_lambda":
            blend = torch.exp(-3.0 * (share * (1 - joined[1])).sum()).detach()
            joined = blend * joined[0] + (1 - blend) * joined[1]
        total = total + 0.8**depth * (share * joined).sum()
    return total


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("normalisation", ["supervised", "per_sequence"])
def test_eagle_losses_and_gradients_are_those_of_plain_autograd(loss: DistillationLoss, normalisation: Any) -> None:
    model, (ids, aux, last, loss_mask) = drafter(), batch(LENGTHS)
    made = ttt_index(LENGTHS, loss_mask, DEPTHS, row_multiple=8, width_multiple=8)
    how = Eagle3Loss(loss, 0.8, 3.0, normalisation)
    result = eagle3_loss(model, target(), ids, aux, last, made, how, chunk=5)
    result.loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    expected = plain_loss(model, loss, normalisation, loss_mask, ids, aux, last)
    expected.backward()
    torch.testing.assert_close(result.loss, expected, atol=1e-12, rtol=1e-12)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, atol=1e-12, rtol=1e-9, msg=name)


@pytest.mark.parametrize("loss", LOSSES)
def test_an_unsupervised_batch_has_a_connected_loss_of_zero(loss: DistillationLoss) -> None:
    model, (ids, aux, last, _) = drafter(), batch(LENGTHS)
    made = ttt_index(LENGTHS, np.zeros(len(ids), dtype=bool), DEPTHS, row_multiple=4)
    result = eagle3_loss(model, target(), ids, aux, last, made, Eagle3Loss(loss, normalisation="per_sequence"))
    result.loss.backward()
    assert result.loss.item() == 0.0 and not result.count.any()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
    assert all(math.isfinite(value) for value in means_of(result.extras).values())


@pytest.mark.parametrize("kind", blocks.KINDS)
def test_an_unsupervised_batch_of_blocks_has_a_connected_loss_of_zero(kind: str) -> None:
    model = blocks.drafter(blocks.config(kind))
    nothing = np.zeros_like(blocks.MASK)
    made = block_index(blocks.LENGTHS, nothing, [], blocks.B, model.config.predictions, 4.0, 8, 8, 8)
    weights = BlockWeights(distance=0.5, dpace_alpha=0.5, normalisation="per_sequence")
    result = block_loss(model, blocks.TEACHER, blocks.IDS, blocks.AUX, blocks.LAST, made, weights)
    result.loss.backward()
    assert result.loss.item() == 0.0
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
    assert all(math.isfinite(value) for value in means_of(result.extras).values())


def of_rows(
    hidden: Tensor, head: Tensor, states: Tensor, target_head: Tensor, loss: DistillationLoss, eta: float = 3.0
):
    share = torch.full((1, len(states)), 1 / len(states), dtype=torch.float64)
    gold = torch.zeros(len(states), dtype=torch.int64)
    return distillation_loss(hidden.unsqueeze(0), head, states, target_head, gold, share, loss, eta, chunk=4)


@pytest.mark.parametrize("loss", ["soft_ce", "l1", "lk_alpha", "lk_lambda"])
def test_a_drafter_equal_to_its_target_is_at_the_minimum(loss: DistillationLoss) -> None:
    states, head = random(9, 6), random(16, 6, seed=1)
    hidden = states.clone().requires_grad_()
    result = of_rows(hidden, head, states, head, loss)
    p = (states @ head.T).softmax(-1)
    entropy = -(p * p.log()).sum(-1).mean()
    assert result.loss.item() == pytest.approx(entropy.item() if loss == "soft_ce" else 0.0, abs=1e-12)
    torch.testing.assert_close(result.overlap, torch.ones_like(result.overlap), atol=1e-12, rtol=0)
    if loss == "soft_ce":  # the others have a kink or a tie there
        result.loss.backward()
        assert hidden.grad is not None and hidden.grad.abs().max() < 1e-12


def test_the_blend_leads_from_kl_to_total_variation() -> None:
    hidden, states, head = random(9, 6), random(9, 6, seed=2), random(16, 6, seed=1)
    p, q = ((x @ head.T).softmax(-1) for x in (states, hidden))
    kl, variation = (p * (p / q).log()).sum(-1).mean(), 0.5 * (p - q).abs().sum(-1).mean()
    for eta, expected in ((0.0, kl), (1e4, variation)):
        assert of_rows(hidden, head, states, head, "lk_lambda", eta).loss.item() == pytest.approx(expected.item())
    accepted = torch.minimum(p, q).sum(-1)
    torch.testing.assert_close(of_rows(hidden, head, states, head, "l1").term[0], 2 * (1 - accepted))
    torch.testing.assert_close(of_rows(hidden, head, states, head, "lk_alpha").term[0], -accepted.log())


def test_at_a_sure_target_lk_alpha_is_cross_entropy_and_keeps_a_gradient_where_nothing_overlaps() -> None:
    log_p = torch.full((1, 5), -1e4)
    log_p[0, 2] = 0.0
    scores = torch.tensor([[400.0, 0.0, 0.0, 0.0, 0.0]], requires_grad=True)
    loss = -log_overlap(log_p, scores.log_softmax(-1))
    assert loss.item() == pytest.approx(400.0)
    loss.sum().backward()
    assert scores.grad is not None and scores.grad.tolist() == [[1.0, 0.0, -1.0, 0.0, 0.0]]


def test_acceptance_is_one_less_half_the_distance_and_the_confidence_is_best_there() -> None:
    p, q = random(50, 7, seed=3).softmax(-1), random(50, 7, seed=4).softmax(-1)
    accepted = log_overlap(p.log(), q.log()).exp()
    torch.testing.assert_close(accepted, torch.minimum(p, q).sum(-1))
    torch.testing.assert_close(accepted, 1 - 0.5 * l1_distance(p.log(), q.log()))
    torch.testing.assert_close(l1_distance(p.log(), q.log()), (p - q).abs().sum(-1))
    assert (accepted >= 0).all() and (accepted <= 1).all()
    grid = torch.linspace(0.001, 0.999, 999, dtype=torch.float64)
    bce = -(accepted[:, None] * grid.log() + (1 - accepted[:, None]) * (1 - grid).log())
    assert (grid[bce.argmin(1)] - accepted).abs().max() < 1e-3


def test_dpace_weights_are_those_of_a_loop() -> None:
    blocks_, places, alpha = 5, 4, 0.3
    generator = np.random.default_rng(0)
    q = generator.random((blocks_, places))
    taught = generator.random((blocks_, places)) < 0.7
    expected = np.zeros_like(q)
    for m in range(blocks_):
        for k in range(places):
            for end in range(k, places):
                chain = np.prod([(1 - alpha) * q[m, i] + alpha for i in range(end + 1) if taught[m, i]])
                expected[m, k] += taught[m, k] * taught[m, end] * chain
    slot = np.flatnonzero(taught)
    filler = np.zeros(3, dtype=np.int64)
    found = dpace_weights(
        torch.from_numpy(np.concatenate((q.flat[slot], filler + 0.5))),
        torch.from_numpy(np.concatenate((np.ones(len(slot)), filler))),
        torch.from_numpy(np.concatenate((slot, filler))),
        blocks_,
        places,
        alpha,
    )
    assert found[: len(slot)].tolist() == pytest.approx(expected.flat[slot].tolist(), abs=1e-14)
    assert not found[len(slot) :].any()


@pytest.mark.parametrize("kind", ["dflash", "dflash2"])
def test_dflash_with_dpace_and_distance_is_plain_autograd(kind: str) -> None:
    model = blocks.drafter(blocks.config(kind))
    made = blocks.index(row_multiple=8, block_multiple=8)
    weights = BlockWeights(distance=0.7, dpace_alpha=0.5, selector=0.0)
    result = block_loss(model, blocks.TEACHER, blocks.IDS, blocks.AUX, blocks.LAST, made, weights, chunk=3)
    result.loss.backward()
    found = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    real = made.weight > 0
    slot, label, before = made.slot[real], made.label[real], made.previous[real]
    q = (blocks.hidden(model, made).flatten(0, 1)[slot] @ blocks.TABLES.head.T).softmax(-1)
    normed = blocks.LAST / (blocks.LAST.square().mean(-1, keepdim=True) + 1e-5).sqrt() * blocks.TEACHER.norm
    p = (normed[before] @ blocks.TABLES.head.T).softmax(-1)
    chosen = q[range(len(q)), blocks.IDS[label]]
    weight = dpace_weights(chosen.detach(), torch.ones(len(q)).double(), slot, len(made.anchor), blocks.B - 1, 0.5)
    expected = (weight * (-chosen.log() + 0.7 * (p - q).abs().sum(-1))).sum() / weight.sum()
    expected.backward()
    torch.testing.assert_close(result.loss, expected, atol=1e-12, rtol=1e-12)
    for name, parameter in model.named_parameters():
        if not name.startswith("candidate_selector"):
            torch.testing.assert_close(found[name], parameter.grad, atol=1e-11, rtol=1e-8, msg=name)
    assert float(result.extras["alpha_0"][1]) == float((made.place[real] == 0).sum())


def test_shares_are_means_over_tokens_or_over_documents() -> None:
    weight = torch.tensor([[1.0, 1.0, 2.0, 0.0, 4.0, 0.0], [0.0, 0.0, 0.0, 3.0, 0.0, 0.0], [0.0] * 6])
    document = torch.tensor([0, 0, 0, 1, 1, 2])
    assert shares(weight, document, 3).tolist() == [[0.125, 0.125, 0.25, 0, 0.5, 0], [0, 0, 0, 1, 0, 0], [0] * 6]
    expected = [[0.125, 0.125, 0.25, 0, 0.5, 0], [0, 0, 0, 1, 0, 0], [0] * 6]
    assert shares(weight, document, 3, "per_sequence").tolist() == expected
    uneven = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, 0.0])
    assert shares(uneven, document, 3).tolist() == [0.25] * 4 + [0.0] * 2
    assert shares(uneven, document, 3, "per_sequence").tolist() == pytest.approx([1 / 6] * 3 + [0.5, 0.0, 0.0])


def test_estimates_by_hand() -> None:
    hit = torch.tensor([[1.0, 1.0, 0.0, 1.0], [1.0, 0.0, 1.0, 1.0]])
    overlap = torch.tensor([[0.5, 0.8, 0.1, 0.9], [0.5, 0.25, 1.0, 0.7]])
    valid = torch.tensor([[1.0, 1.0, 1.0, 0.0], [1.0, 1.0, 0.0, 1.0]])
    means = means_of(acceptance(hit, overlap, valid))
    assert means["acc_0"] == pytest.approx(2 / 3) and means["acc_1"] == pytest.approx(2 / 3)
    assert means["alpha_1"] == pytest.approx((0.5 + 0.25 + 0.7) / 3)
    assert means["slot_1"] == pytest.approx(1 / 2)  # rows 0 and 1: the last one has no first place
    assert means["slot_tv_1"] == pytest.approx((0.5 * 0.5 + 0.8 * 0.25) / 2)
    assert estimates(means)["estimated_acceptance_length"] == pytest.approx(1 + 2 / 3 + 1 / 2)
    assert estimates(means)["estimated_acceptance_length_tv"] == pytest.approx(1 + 1.4 / 3 + 0.45 / 2)


class Largest(TorchDispatchMode):
    """Rows of the largest tensor with `columns` last, over every operation, backward included."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.columns, self.rows = columns, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.ndim > 1 and leaf.shape[-1] == self.columns:
                self.rows = max(self.rows, leaf.numel() // self.columns)
        return out


@pytest.mark.parametrize("loss", LOSSES)
def test_no_tensor_over_the_vocabulary_has_more_rows_than_a_chunk(loss: DistillationLoss) -> None:
    columns, positions, depths, chunk = 101, 64, 3, 8
    hidden = random(depths, positions, 6).requires_grad_()
    head = random(columns, 6, seed=1).requires_grad_()
    states, frozen, gold = random(positions, 6, seed=2), random(columns, 6, seed=3), torch.arange(positions)
    share = torch.full((depths, positions), 1 / positions, dtype=torch.float64)
    with Largest(columns) as seen:
        if loss == "soft_ce":
            result = soft_cross_entropy(hidden, head, states, frozen, share, chunk)
        else:
            result = distillation_loss(hidden, head, states, frozen, gold, share, loss, 3.0, chunk)
        result.loss.backward()
    assert chunk < seen.rows <= (depths + 1) * chunk


@pytest.mark.parametrize("kind", blocks.KINDS)
def test_no_tensor_of_a_block_loss_has_more_rows_than_a_chunk(kind: str) -> None:
    columns = 101
    model = blocks.drafter(blocks.config(kind, vocab_size=columns))
    tables = Tables(random(columns, blocks.H), random(columns, blocks.H, seed=1))
    made = block_index(
        blocks.LENGTHS, np.ones_like(blocks.MASK), [np.arange(10), np.arange(7)], 4, model.config.predictions, 4.0
    )
    weights = BlockWeights(distance=0.5, dpace_alpha=0.5)
    with Largest(columns) as seen:
        result = block_loss(
            model,
            BlockTeacher(tables, TEACHER.norm, 1e-5),
            blocks.IDS,
            blocks.AUX,
            blocks.LAST,
            made,
            weights,
            chunk=20,
        )
        result.loss.backward()
    assert len(made.slot) > 40 and seen.rows == 20


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.02)]
)
def test_metrics_of_the_fast_loss_are_those_of_the_general_one(dtype: torch.dtype, tolerance: float) -> None:
    hidden, head = random(3, 20, 6), random(DRAFT, 6, seed=1)
    states, frozen, share = random(20, 6, seed=2), random(DRAFT, 6, seed=3), random(3, 20, seed=4).abs()
    low = [x.to(dtype) for x in (hidden, head, states, frozen)]
    fast = soft_cross_entropy(*low, share, 7)
    general = distillation_loss(*(x.double() for x in low), torch.arange(20) % DRAFT, share, "soft_ce", 3.0, 7)
    torch.testing.assert_close(fast.overlap.double(), general.overlap, atol=tolerance, rtol=tolerance)
    if dtype == torch.float64:
        for name in ("loss", "term", "hit"):
            torch.testing.assert_close(getattr(fast, name), getattr(general, name), atol=1e-12, rtol=1e-10)


def test_one_depth_is_plain_distillation() -> None:
    model, (ids, aux, last, loss_mask) = drafter(), batch([17])
    made: TTTIndex = ttt_index([17], loss_mask, 1)
    result = eagle3_loss(model, teacher(), ids, aux, last, made)
    outs = model.rollout(aux, [embed_rows(teacher().embedding, ids, made.next_token[0])], made.layout)
    normed = last / (last.square().mean(-1, keepdim=True) + 1e-5).sqrt() * teacher().norm
    p = (normed @ teacher().head.T).softmax(-1)
    place = {int(row): n for n, row in enumerate(made.layout.rows)}
    taught = [i for i in range(15) if loss_mask[i + 2]]
    log_q = model.logits(outs[0][[place[i] for i in taught]]).log_softmax(-1)
    expected = -(p[[i + 1 for i in taught]] * log_q).sum(-1).mean()
    assert result.loss.item() == pytest.approx(expected.item(), abs=1e-12)
    assert SIZE == last.shape[1]
