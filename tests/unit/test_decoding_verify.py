"""The output law of lossless verification: full enumeration, chi-square, and the identities of greedy and perfect
drafts.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from torchspec_core.decoding import verify
from torchspec_core.decoding.verify import distribution, draw, verify_block, verify_greedy, verify_sampled

GRID = 12  # least common multiple of 1..4: every threshold made of quarters lies between two midpoints
MIDPOINTS = (np.arange(GRID) + 0.5) / GRID
# Rows: the last token; entries in quarters, so that ratios P/Q and normalised residuals are multiples of 1/12.
P3 = np.array([[1, 2, 1], [3, 0, 1], [0, 1, 3]]) / 4
Q3 = np.array([[2, 1, 1], [1, 1, 2], [1, 3, 0]]) / 4


def _enumerate(one_hot: bool) -> tuple[np.ndarray, float]:
    """Law of the first three output tokens for V=3, K=2, root 0, over every combination of the random numbers.

    Output shorter than three tokens is continued by P, as the next steps would (they are exact by the same argument).
    """
    grids = [MIDPOINTS] * (3 if one_hot else 5)
    u = np.array(list(itertools.product(*grids)))
    rows = len(u)
    drafts = np.zeros((rows, 2), dtype=np.int64)
    q = np.zeros((rows, 2, 3))
    previous = np.zeros(rows, dtype=np.int64)
    for slot in range(2):
        law = Q3[previous]
        drafts[:, slot] = law.argmax(1) if one_hot else (np.cumsum(law, 1) <= u[:, 3 + slot, None]).sum(1)
        q[:, slot] = law
        previous = drafts[:, slot]
    chain = np.concatenate([np.zeros((rows, 1), dtype=np.int64), drafts], 1)
    logits = torch.from_numpy(np.log(np.maximum(P3[chain], 1e-300))).float()
    verdict = verify_sampled(
        logits,
        torch.from_numpy(drafts),
        None if one_hot else torch.from_numpy(q).float(),
        torch.from_numpy(u[:, :3]),
        temperature=1.0,
    )
    law = np.zeros((3, 3, 3))
    accepted, following = verdict.accepted.numpy(), verdict.following.numpy()
    for count in range(3):
        chosen = accepted == count
        counts = np.zeros((3,) * (count + 1))
        np.add.at(counts, (*drafts[chosen, :count].T, following[chosen]), 1)
        for _ in range(2 - count):
            counts = counts[..., None] * P3
        law += counts
    return law / rows, float(verdict.accepted.double().mean())


@pytest.mark.parametrize("one_hot", [False, True])
def test_the_output_law_is_the_targets_by_full_enumeration(one_hot: bool) -> None:
    law, accepted = _enumerate(one_hot)
    expected = np.einsum("a,ab,bc->abc", P3[0], P3, P3)
    np.testing.assert_allclose(law, expected, atol=1e-12)
    # Acceptance by hand: slot k given its prefix is sum min(P, Q).
    if one_hot:
        first = P3[0][Q3[0].argmax()]
        second = first * P3[Q3[0].argmax()][Q3[Q3[0].argmax()].argmax()]
    else:
        both = np.minimum(P3, Q3)
        first, second = both[0].sum(), (both[0] * both.sum(1)).sum()
    assert accepted == pytest.approx(first + second, abs=1e-12)


def test_enumeration_notices_a_wrong_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "residual", lambda p, q: (q - p).clamp(min=0))
    law, _ = _enumerate(one_hot=False)
    assert np.abs(law - np.einsum("a,ab,bc->abc", P3[0], P3, P3)).max() > 0.01


V6, K6, TOP_P = 6, 3, 0.95


def _markov() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Target logits [V, V] by last token, its law after top_p (made here by sorting), and the top-3 draft law."""
    logits = torch.from_numpy(np.random.default_rng(3).normal(size=(V6, V6)) * 1.5).float()
    p = torch.softmax(logits.double(), -1).numpy()
    nucleus = np.zeros_like(p)
    for row in range(V6):
        order = np.argsort(-p[row])
        size = int((np.cumsum(p[row][order]) < TOP_P).sum()) + 1
        nucleus[row, order[:size]] = p[row, order[:size]]
    nucleus /= nucleus.sum(1, keepdims=True)
    noisy = torch.softmax(logits + torch.from_numpy(np.random.default_rng(4).normal(size=(V6, V6))).float(), -1)
    values, ids = noisy.topk(3, dim=-1)
    q = torch.zeros(V6, V6).scatter_(1, ids, values)
    return logits, torch.from_numpy(nucleus), q / q.sum(1, keepdim=True)


def _two_tokens(
    rows: int, reuse_noise: bool = False, rule: Any = verify_sampled, limited: bool = False
) -> tuple[np.ndarray, float]:
    """Counts [V, V] of the first two output tokens after root 0, and the acceptance rate of slot 1."""
    logits, _, q = _markov()
    numbers = np.random.default_rng(11)
    out = torch.full((rows, 2), -1)
    written = torch.zeros(rows, dtype=torch.int64)
    last = torch.zeros(rows, dtype=torch.int64)
    first_rate = None
    while int(written.min()) < 2:
        u = torch.from_numpy(numbers.random((rows, 2 * K6 + 1)))
        chain = [last]
        for slot in range(K6):
            chain.append(draw(q[chain[-1]], u[:, slot]))
        context = torch.stack(chain, 1)
        accept = torch.cat([u[:, :K6], u[:, -1:]], 1) if reuse_noise else u[:, K6:]
        limits = torch.from_numpy(numbers.integers(0, K6 + 1, size=rows)) if limited else None
        verdict = rule(logits[context], context[:, 1:], q[context[:, :-1]], accept, 1.0, TOP_P, limits)
        first_rate = float((verdict.accepted > 0).double().mean()) if first_rate is None else first_rate
        tokens = torch.cat([context[:, 1:], last.unsqueeze(1)], 1)
        tokens.scatter_(1, verdict.accepted.unsqueeze(1), verdict.following.unsqueeze(1))
        for j in range(K6 + 1):
            free = (written < 2) & (j <= verdict.accepted)
            out[free, written[free]] = tokens[free, j]
            written[free] += 1
        last = verdict.following
    counts = np.zeros((V6, V6))
    np.add.at(counts, (out[:, 0].numpy(), out[:, 1].numpy()), 1)
    return counts, float(first_rate or 0.0)


def _chi_square(counts: np.ndarray) -> tuple[float, int, float]:
    """Statistic, degrees of freedom, and the count outside the support."""
    _, p, _ = _markov()
    expected = (p[0].unsqueeze(1) * p).numpy() * counts.sum()
    inside = expected > 0
    return (
        float(((counts - expected)[inside] ** 2 / expected[inside]).sum()),
        int(inside.sum()) - 1,
        float(counts[~inside].sum()),
    )


def test_chi_square_of_the_first_two_tokens() -> None:
    rows = 30_000
    counts, first_rate = _two_tokens(rows)
    statistic, freedom, outside = _chi_square(counts)
    assert outside == 0
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5
    _, p, q = _markov()
    overlap = float(torch.minimum(p[0], q[0].double()).sum())
    assert first_rate == pytest.approx(overlap, abs=4 * (overlap * (1 - overlap) / rows) ** 0.5)


def test_chi_square_notices_wrong_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    statistic, freedom, _ = _chi_square(_two_tokens(30_000, reuse_noise=True)[0])
    assert statistic > freedom + 10 * (2 * freedom) ** 0.5
    monkeypatch.setattr(verify, "residual", lambda p, q: (q - p).clamp(min=0))
    statistic, freedom, _ = _chi_square(_two_tokens(30_000)[0])
    assert statistic > freedom + 10 * (2 * freedom) ** 0.5


def _block_by_hand(chain: list[int], u: list[float] | None) -> list[tuple[float, int, np.ndarray]]:
    """Block verification of two drafts by the paper's formulas, in Python floats.

    (probability, accepted, law of the next token) of each outcome; with `u` only the outcome that these numbers choose.
    """
    weights, bounds, laws = [1.0], [1.0], []
    for i, token in enumerate(chain[1:]):
        weights.append(min(weights[i] * P3[chain[i], token] / Q3[chain[i], token], 1.0))
    for i in range(2):
        rest = np.maximum(weights[i] * P3[chain[i]] - Q3[chain[i]], 0.0)
        mass = rest.sum()
        if i:
            bounds.append(mass / (mass + 1.0 - weights[i]) if mass + 1.0 - weights[i] else 0.0)
        laws.append(rest / mass if mass else P3[chain[i]])
    bounds.append(weights[2])
    laws.append(P3[chain[2]])
    if u is not None:
        kept = max(i for i in range(3) if i == 0 or u[i - 1] < bounds[i])
        return [(1.0, kept, laws[kept])]
    shares = [bounds[2], (1 - bounds[2]) * bounds[1], (1 - bounds[2]) * (1 - bounds[1])]
    return [(share, kept, laws[kept]) for share, kept in zip(shares, (2, 1, 0), strict=True)]


def test_block_verification_is_lossless_and_accepts_more_by_full_enumeration() -> None:
    law, expected = np.zeros((3, 3, 3)), 0.0
    for chain in itertools.product([0], range(3), range(3)):
        drawn = Q3[chain[0], chain[1]] * Q3[chain[1], chain[2]]
        for share, kept, following in _block_by_hand(list(chain), None) if drawn else []:
            counts = np.zeros((3,) * (kept + 1))
            counts[tuple(chain[1 : kept + 1])] = following
            for _ in range(2 - kept):
                counts = counts[..., None] * P3
            law += drawn * share * counts
            expected += drawn * share * kept
    np.testing.assert_allclose(law, np.einsum("a,ab,bc->abc", P3[0], P3, P3), atol=1e-15)
    assert expected > _enumerate(one_hot=False)[1] + 0.05


def test_block_verification_decides_as_the_formulas_do() -> None:
    numbers = np.random.default_rng(7).random((4000, 3))
    chains = [c for c in itertools.product([0], range(3), range(3)) if Q3[c[0], c[1]] * Q3[c[1], c[2]] > 0]
    context = np.array([chains[i % len(chains)] for i in range(len(numbers))])
    verdict = verify_block(
        torch.from_numpy(np.log(np.maximum(P3[context], 1e-300))).float(),
        torch.from_numpy(context[:, 1:]),
        torch.from_numpy(Q3[context[:, :2]]).float(),
        torch.from_numpy(numbers),
        temperature=1.0,
    )
    for row, chain in enumerate(context.tolist()):
        ((_, kept, law),) = _block_by_hand(chain, numbers[row].tolist())
        assert int(verdict.accepted[row]) == kept
        assert int(verdict.following[row]) == int((np.cumsum(law) <= numbers[row, 2]).sum())


def test_chi_square_of_block_verification() -> None:
    counts, first_rate = _two_tokens(30_000, rule=verify_block)
    statistic, freedom, outside = _chi_square(counts)
    assert outside == 0
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5
    _, p, q = _markov()
    overlap = float(torch.minimum(p[0], q[0].double()).sum())
    assert first_rate > overlap - 4 * (overlap * (1 - overlap) / 30_000) ** 0.5


@pytest.mark.parametrize("rule", [verify_sampled, verify_block])
def test_chi_square_when_each_row_verifies_as_many_drafts_as_it_likes(rule: Any) -> None:
    statistic, freedom, outside = _chi_square(_two_tokens(30_000, rule=rule, limited=True)[0])
    assert outside == 0
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5


def test_block_verification_accepts_all_of_a_perfect_drafter() -> None:
    p = torch.softmax(torch.from_numpy(np.random.default_rng(0).normal(size=(V6,))).float(), -1)
    numbers = torch.from_numpy(np.random.default_rng(1).random((2000, 5)))
    drafts = torch.stack([draw(p.expand(2000, -1), numbers[:, k]) for k in range(2)], 1)
    verdict = verify_block(p.log().expand(2000, 3, V6), drafts, p.expand(2000, 2, V6), numbers[:, 2:], 1.0)
    assert int(verdict.accepted.min()) == 2


def test_a_perfect_drafter_is_always_accepted_when_it_samples_and_by_max_p_when_it_is_greedy() -> None:
    rows = 40_000
    logits = torch.from_numpy(np.random.default_rng(0).normal(size=(V6,)) * 2).float()
    p = torch.softmax(logits, -1)
    numbers = torch.from_numpy(np.random.default_rng(1).random((rows, 5)))
    many = logits.expand(rows, 3, V6)
    sampled = torch.stack([draw(p.expand(rows, -1), numbers[:, k]) for k in range(2)], 1)
    verdict = verify_sampled(many, sampled, p.expand(rows, 2, V6), numbers[:, 2:], 1.0)
    assert int(verdict.accepted.min()) == 2
    greedy = torch.full((rows, 2), int(p.argmax()))
    rate = float((verify_sampled(many, greedy, None, numbers[:, 2:], 1.0).accepted > 0).double().mean())
    best = float(p.max())
    assert rate == pytest.approx(best, abs=4 * (best * (1 - best) / rows) ** 0.5)


def test_greedy_verification_accepts_the_matching_prefix_only() -> None:
    best = torch.tensor([[3, 1, 4, 2], [3, 1, 4, 2], [3, 1, 4, 2], [3, 1, 4, 2]])
    logits = torch.nn.functional.one_hot(best, 5).float()
    drafts = torch.tensor([[3, 1, 4], [3, 1, 0], [0, 1, 4], [3, 0, 4]])
    verdict = verify_greedy(logits, drafts)
    assert verdict.accepted.tolist() == [3, 2, 0, 1]
    assert verdict.following.tolist() == [2, 4, 3, 1]


def test_greedy_verification_ends_at_a_rows_limit() -> None:
    logits = torch.nn.functional.one_hot(torch.tensor([[3, 1, 4, 2]] * 4), 5).float()
    verdict = verify_greedy(logits, torch.tensor([[3, 1, 4]] * 4), torch.tensor([0, 1, 2, 3]))
    assert verdict.accepted.tolist() == [0, 1, 2, 3]
    assert verdict.following.tolist() == [3, 1, 4, 2]


@pytest.mark.parametrize("width", [4, 512])
def test_top_p_is_the_smallest_set_that_reaches_the_mass(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "NUCLEUS_WIDTH", width)
    logits = torch.from_numpy(np.random.default_rng(5).normal(size=(20, 60)) * np.linspace(0.1, 6, 20)[:, None]).float()
    got = distribution(logits, 0.7, 0.9).numpy()
    plain = torch.softmax(logits.double() / 0.7, -1).numpy()
    for row in range(20):
        order = np.argsort(-plain[row])
        size = int((np.cumsum(plain[row][order]) < 0.9).sum()) + 1
        expected = np.zeros(60)
        expected[order[:size]] = plain[row][order[:size]] / plain[row][order[:size]].sum()
        np.testing.assert_allclose(got[row], expected, atol=1e-6)


def test_draw_inverts_and_never_draws_a_zero() -> None:
    weights = torch.tensor([[0.0, 2.0, 0.0, 6.0, 0.0]])
    for u, token in [(0.0, 1), (0.2499, 1), (0.2501, 3), (1 - 2**-53, 3)]:
        assert draw(weights, torch.tensor([u], dtype=torch.float64)).item() == token
