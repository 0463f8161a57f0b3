"""Anchored training-time test: sampling by its promises, loss and gradients against the dense form."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.unit import test_dflash as blocks
from tests.unit.test_ttt import BOTH_ATTENTIONS, DEPTHS, SIZE, Make, assert_same, batch, gradients, teacher
from torchspec_core.objectives.anchors import Anchors, AnchorSampling
from torchspec_core.objectives.eagle3 import eagle3_loss, embed_rows
from torchspec_core.objectives.ttt import candidate_rows, ttt_index
from torchspec_core.training.batch import Sample, pack
from torchspec_core.training.dflash import block_builder
from torchspec_core.training.eagle3 import ttt_builder

CANDIDATES = np.array([2, 3, 4, 7, 8, 9, 10, 11, 12, 15, 16, 17, 18, 19, 20, 21, 22])


@pytest.mark.parametrize("sampling", ["strided", "uniform"])
@pytest.mark.parametrize("max_gap", [0, 2, 50])
def test_every_candidate_is_as_likely(sampling: AnchorSampling, max_gap: int) -> None:
    anchors, draws = Anchors(5, max_gap, sampling, 0), 4000
    counts = dict.fromkeys(CANDIDATES.tolist(), 0)
    for epoch in range(draws):
        chosen = anchors.choose(CANDIDATES, "sample", epoch)
        assert len(chosen) == 5 and (np.diff(chosen) > 0).all()
        for row in chosen.tolist():
            counts[row] += 1
    p = 5 / len(CANDIDATES)
    assert all(abs(n - draws * p) < 4 * (draws * p * (1 - p)) ** 0.5 for n in counts.values())


@pytest.mark.parametrize("max_gap", [0, 1, 2, 9])
def test_strides_are_even_and_bounded(max_gap: int) -> None:
    for epoch in range(50):
        places = np.searchsorted(CANDIDATES, Anchors(5, max_gap, "strided", 1).choose(CANDIDATES, "s", epoch))
        steps = sorted([*np.diff(places).tolist(), int(places[0]) + len(CANDIDATES) - int(places[-1])])
        stride = min(17 // 5, max_gap + 1)
        assert steps[:4] == [stride] * 4  # on the circle: all steps but the one that closes it
    if max_gap == 0:
        assert steps[-1] == 17 - 4


def test_the_choice_depends_on_seed_epoch_and_sample_only() -> None:
    anchors = Anchors(6, 3, "uniform", 0)
    first = anchors.choose(CANDIDATES, "a", 0)
    assert first.tolist() == anchors.choose(CANDIDATES, "a", 0).tolist()
    others = [anchors.choose(CANDIDATES, "b", 0), anchors.choose(CANDIDATES, "a", 1)]
    others.append(Anchors(6, 3, "uniform", 1).choose(CANDIDATES, "a", 0))
    assert all(first.tolist() != other.tolist() for other in others)
    assert anchors.choose(CANDIDATES[:6], "a", 0).tolist() == CANDIDATES[:6].tolist()


@BOTH_ATTENTIONS
def test_all_candidates_as_anchors_are_the_dense_form(make: Make) -> None:
    model, lengths = make(), [17, 9, 6]
    ids, aux, last, loss_mask = batch(lengths)
    rows = np.concatenate(candidate_rows(lengths, loss_mask, DEPTHS))
    dense = ttt_index(lengths, loss_mask, DEPTHS, row_multiple=8, width_multiple=8)
    anchored = ttt_index(lengths, loss_mask, DEPTHS, row_multiple=8, width_multiple=8, rows=rows)
    assert_same(gradients(model, ids, aux, last, dense), gradients(model, ids, aux, last, anchored), tolerance=1e-12)


@BOTH_ATTENTIONS
def test_anchored_loss_is_the_mean_over_the_anchors_of_the_dense_losses(make: Make) -> None:
    """Rows that only fill up the shapes teach nothing, though the dense form would teach them."""
    model, lengths = make(), [17, 12]
    ids, aux, last, loss_mask = batch(lengths)
    every = np.concatenate(candidate_rows(lengths, loss_mask, DEPTHS))
    some = every[1::4]
    result = eagle3_loss(
        model, teacher(), ids, aux, last,
        ttt_index(lengths, loss_mask, DEPTHS, row_multiple=16, width_multiple=8, rows=some),
    )  # fmt: skip
    numerator, count = torch.zeros(DEPTHS, dtype=torch.float64), torch.zeros(DEPTHS, dtype=torch.float64)
    for row in some:
        alone = eagle3_loss(
            model, teacher(), ids, aux, last, ttt_index(lengths, loss_mask, DEPTHS, rows=np.array([row]))
        )
        numerator, count = numerator + alone.numerator, count + alone.count
    torch.testing.assert_close(result.numerator, numerator, atol=1e-12, rtol=1e-12)
    assert result.count.tolist() == count.tolist()


@BOTH_ATTENTIONS
def test_an_anchor_reaches_the_rows_before_it_and_none_after(make: Make) -> None:
    model, (ids, aux, last, _) = make(), batch([12])
    aux.requires_grad_(True)
    index = ttt_index([12], np.ones(12, dtype=bool), DEPTHS, row_multiple=8, rows=np.array([5]))
    eagle3_loss(model, teacher(), ids, aux, last, index).loss.backward()
    assert aux.grad is not None
    reached = aux.grad.abs().sum(dim=1) > 0
    assert reached.tolist() == [row <= 5 for row in range(12)]


@BOTH_ATTENTIONS
def test_other_anchors_are_invisible(make: Make) -> None:
    model, (ids, aux, _, loss_mask) = make(), batch([14])

    def outs(*rows: int) -> list[Tensor]:
        index = ttt_index([14], loss_mask, DEPTHS, rows=np.array(rows))
        embeds = [embed_rows(teacher().embedding, ids, n) for n in index.next_token]
        return model.rollout(aux, embeds, index.layout)

    for both, first, second in zip(outs(4, 9), outs(4), outs(9), strict=True):
        torch.testing.assert_close(both, torch.cat((first, second)), atol=1e-12, rtol=0)


def test_packing_chooses_by_sample_and_epoch() -> None:
    generator = torch.Generator().manual_seed(0)

    def sample(name: str, length: int) -> Sample:
        states = [torch.randn(length, SIZE, generator=generator) for _ in range(3)]
        return Sample(np.arange(length) % 5, np.arange(length) >= 3, tuple(states[:2]), states[2], name)

    samples, anchors = [sample("a", 30), sample("b", 20), sample("c", 9)], Anchors(4, 2, "strided", 3)

    def taught(places: list[int], epoch: int) -> list[list[int]]:
        """Rows with a loss, by sample, from its first row."""
        chosen = [samples[i] for i in places]
        packed = pack(chosen, ttt_builder(2, "predicted", 8, anchors), torch.float32, epoch, 16)
        index = packed.index
        assert len(index.layout.rows) % 16 == 0
        rows = index.layout.rows[index.student[index.weight > 0].unique()]
        starts = np.cumsum([0, *(len(s.ids) for s in chosen)])
        return [[int(r) - a for r in rows if a <= r < b] for a, b in pairwise(starts)]

    first = taught([0, 1, 2], 0)
    assert [len(rows) for rows in first] == [4, 4, 4]
    assert taught([2, 1, 0], 0) == first[::-1]  # whoever is in the batch
    assert taught([0, 1, 2], 1) != first
    assert [len(rows) for rows in taught([0], 7)] == [4]


@BOTH_ATTENTIONS
def test_a_batch_without_supervision_has_a_connected_loss_of_zero(make: Make) -> None:
    model, (ids, aux, last, _) = make(), batch([9])
    nothing = np.zeros(9, dtype=bool)
    index = ttt_index([9], nothing, DEPTHS, row_multiple=4, rows=np.concatenate(candidate_rows([9], nothing, DEPTHS)))
    loss, grads = gradients(model, ids, aux, last, index)
    assert loss.item() == 0.0
    assert grads.keys() == dict(model.named_parameters()).keys()
    assert all((gradient == 0).all() for gradient in grads.values())


@pytest.mark.parametrize("sampling", ["strided", "uniform"])
def test_blocks_stand_on_sampled_anchors_and_shapes_stay(sampling: AnchorSampling) -> None:
    shape = blocks.config()
    build = block_builder(shape, Anchors(6, 2, sampling, 0), 4.0)
    mask = np.zeros(96, dtype=bool)
    mask[10:50] = mask[64:91] = True
    shapes, seen = set(), np.zeros(96)
    for epoch in range(60):
        made = build([60, 36], mask, ["a", "b"], epoch, 16)
        first = made.layout.anchor[made.layout.block_document == 0][:6].numpy()
        assert set(first.tolist()) <= set(range(10, 49)) and (np.diff(first) > 0).all()
        if sampling == "strided":
            steps = sorted(np.diff(first).tolist())
            assert steps[:4] == [3] * 4  # at most two candidates between two anchors, but for where the walk wraps
        shapes.add((len(made.anchor), made.layout.width, made.layout.drafted))
        assert len(made.slot) % 16 == 0  # slots past the last supervised token have no row
        seen[first] += 1
    assert len(shapes) == 1
    assert (seen[10:49] > 0).all()
