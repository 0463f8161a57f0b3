"""Acceptance statistics by hand, replay against real verification, and the evaluation stage on a tiny target."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from torchspec_core.decoding.decoder import decode
from torchspec_core.decoding.draft import TableDrafts
from torchspec_core.decoding.target import CachedTarget
from torchspec_core.evaluation.statistics import acceptance, engine_steps, replay
from torchspec_core.targets.facts import facts_from_config


def test_acceptance_by_hand() -> None:
    got = acceptance([[3, 0, 1], [], [2, 2]], k=3)
    # 8 accepted in 5 steps; slot k: steps with at least k accepted.
    assert got.length == pytest.approx(1 + 8 / 5)
    assert got.slots == pytest.approx((4 / 5, 3 / 5, 1 / 5))
    assert got.drafts == 5
    # Clusters (4 accepted, 3 steps) and (4, 2) around r = 1.6: residuals -0.8 and 0.8.
    assert got.stderr == pytest.approx((2 / 1 * (0.8**2 + 0.8**2)) ** 0.5 / 5)


def test_acceptance_length_is_one_plus_the_sum_of_the_slot_rates() -> None:
    numbers = np.random.default_rng(0)
    got = acceptance([numbers.integers(0, 5, size=n).tolist() for n in (4, 9, 1, 30)], k=4)
    assert got.length == pytest.approx(1 + sum(got.slots))
    assert acceptance([[], []], 2).length == 1.0


def test_the_clustered_error_covers_prompts_that_differ() -> None:
    numbers = np.random.default_rng(1)
    estimates, errors = [], []
    for _ in range(300):
        rates = numbers.beta(2, 2, size=40)
        got = acceptance([numbers.binomial(1, rate, size=25).tolist() for rate in rates], k=1)
        estimates.append(got.length)
        errors.append(got.stderr)
    assert np.mean(errors) == pytest.approx(np.std(estimates), rel=0.1)


def test_an_engine_counts_whole_steps_until_the_text_is_long_enough() -> None:
    # 1 token from prefill, then steps of accepted + 1 tokens: 1 -> 4 -> 5 -> 8.
    assert engine_steps(8, [2, 0, 2], 0, limit=8) == [2, 0, 2]
    assert engine_steps(8, [2, 0, 2], 0, limit=6) == [2, 0, 2]
    assert engine_steps(8, [2, 0, 2], 0, limit=5) == [2, 0]
    assert engine_steps(8, [2, 0, 2], 0, limit=1) == []
    # The last step ended the sequence with its second draft; a third was accepted after the end.
    assert engine_steps(7, [2, 0, 2], 1, limit=99) == [2, 0, 3]


def test_replay_by_hand() -> None:
    table = [1, 2, 3, 0, 9, 9, 9, 9, 9, 9]
    # roots: 0 -> drafts 1 2 3, text goes 1 2 4; then root 4 (after 0 1 2 4) -> 9 9 9 against 9 9 5.
    assert replay([0, 1, 2, 4, 9, 9, 5], ended=True, table=table, k=3) == [2, 2]
    # Without an end, a step whose window reaches past the text is unknown: root 4 needs 3 more tokens.
    assert replay([0, 1, 2, 4, 9, 9], ended=False, table=table, k=3) == [2]
    assert replay([0], ended=True, table=table, k=3) == []


@pytest.mark.parametrize("eos", [None, 9])
def test_replay_equals_real_verification(eos: int | None) -> None:
    torch.manual_seed(1)
    size = 24
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.3,
    )
    model = LlamaForCausalLM(config).float().eval()
    facts = facts_from_config({**config.to_dict(), "architectures": ["LlamaForCausalLM"]})
    with torch.no_grad():
        table = model(torch.arange(size).unsqueeze(1)).logits[:, 0].argmax(-1)
    prompts = [[i, (3 * i) % size, 5] for i in range(12)]
    rows = decode(
        CachedTarget(model, facts),
        TableDrafts(table),
        prompts,
        keys=[str(i) for i in range(12)],
        k=3,
        max_new_tokens=30,
        eos=[] if eos is None else [eos],
    )
    assert any(sum(row.steps) for row in rows)
    assert eos is None or any(row.finish == "stop" for row in rows)
    for row in rows:
        steps = replay(row.tokens, row.finish == "stop", table.tolist(), 3)
        assert steps == list(row.steps[: len(steps)])
        assert len(steps) == len(row.steps) if row.finish == "stop" else len(row.steps) - len(steps) <= 3
