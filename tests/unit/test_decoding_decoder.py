"""The loop on a tiny random Llama: greedy equality, ragged batches, accounting, sampling, captured states."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from torchspec_core.decoding.decoder import Decoded, Sampling, decode, row_uniforms, surviving_rows
from torchspec_core.decoding.draft import Committed, Proposal, TableDrafts, baseline_tables
from torchspec_core.decoding.schedule import Dynamic, measure_step_cost
from torchspec_core.decoding.target import CachedTarget, _by_length
from torchspec_core.errors import UserError
from torchspec_core.targets.facts import TargetFacts, facts_from_config

V, K = 48, 3
PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [9], [11, 12, 13], [20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31], [40, 41]]
KEYS = [f"row{i}" for i in range(len(PROMPTS))]


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).float().eval()


@pytest.fixture
def target(model: LlamaForCausalLM) -> CachedTarget:
    return CachedTarget(model, facts_of(model))


def facts_of(model: LlamaForCausalLM) -> TargetFacts:
    return facts_from_config({**model.config.to_dict(), "architectures": ["LlamaForCausalLM"]})


def plain_greedy(model: LlamaForCausalLM, prompt: list[int], count: int, eos: tuple[int, ...] = ()) -> list[int]:
    """The definition: argmax of a full forward pass without any cache, one token at a time."""
    ids = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] in eos:
            break
    return ids[len(prompt) :]


class Scripted:
    """Drafts made by `choose(context)` for each row; checks that contexts are handed over without gaps."""

    layers: tuple[int, ...] = ()
    judging = False

    def __init__(self, prompts: list[list[int]], choose: Callable[[list[int], int], list[int]]) -> None:
        self.contexts = [list(prompt[:1]) for prompt in prompts]
        self.choose = choose

    def start(self, rows: int, capacity: int) -> None:
        assert rows == len(self.contexts)

    def propose(self, committed: Committed, k: int, temperature: float, u: torch.Tensor | None) -> Proposal:
        out = []
        for row, context in enumerate(self.contexts):
            assert int(committed.start[row]) == len(context) - 1
            context.extend(committed.tokens[row, : int(committed.counts[row])].tolist())
            out.append(self.choose(context, k))
        return Proposal(torch.tensor(out), confidence=torch.ones(len(out), k) if self.judging else None)

    def keep(self, rows: torch.Tensor) -> None:
        self.contexts = [self.contexts[row] for row in rows.tolist()]


def run(target: CachedTarget, drafts: object, prompts: list[list[int]] = PROMPTS, **changes: object) -> list[Decoded]:
    options: dict = {"keys": KEYS[: len(prompts)], "k": K, "max_new_tokens": 24} | changes
    return decode(target, drafts, prompts, **options)  # type: ignore[arg-type]


def test_greedy_text_is_the_targets_whatever_is_drafted(model: LlamaForCausalLM, target: CachedTarget) -> None:
    expected = [plain_greedy(model, prompt, 24) for prompt in PROMPTS]
    numbers = np.random.default_rng(0)

    def truth(context: list[int], k: int) -> list[int]:
        return plain_greedy(model, context, k)

    def sometimes(context: list[int], k: int) -> list[int]:
        return [token if numbers.random() < 0.7 else int(numbers.integers(V)) for token in truth(context, k)]

    def adversarial(context: list[int], k: int) -> list[int]:
        return [*truth(context, k)[: k - 1], (truth(context, k)[-1] + 1) % V]

    drafters = {
        "none": None,
        "random": Scripted(PROMPTS, lambda context, k: numbers.integers(V, size=k).tolist()),
        "sometimes": Scripted(PROMPTS, sometimes),
        "adversarial": Scripted(PROMPTS, adversarial),
        "oracle": Scripted(PROMPTS, truth),
    }
    results = {name: run(target, drafts) for name, drafts in drafters.items()}
    for rows in results.values():
        assert [list(row.tokens) for row in rows] == expected
    # Oracle drafter: all K accepted in every step, so AL = K + 1 and 23 further tokens take ceil(23 / 4) steps.
    assert all(row.steps == (K,) * 6 for row in results["oracle"])
    # One wrong last token: exactly K - 1 accepted in every step.
    assert all(set(row.steps) == {K - 1} for row in results["adversarial"])
    assert any(len(set(row.steps)) == K + 1 for row in results["sometimes"])


def test_dynamic_verification_changes_the_steps_and_not_the_text(
    model: LlamaForCausalLM, target: CachedTarget
) -> None:
    numbers = np.random.default_rng(5)

    def some(confidence: torch.Tensor) -> torch.Tensor:
        assert confidence.shape[1] == K
        return torch.from_numpy(numbers.integers(0, K + 1, size=len(confidence)))

    drafts = Scripted(PROMPTS, lambda context, k: plain_greedy(model, context, k))
    rows = run(target, drafts, dynamic=Dynamic(some))
    assert [list(row.tokens) for row in rows] == [plain_greedy(model, prompt, 24) for prompt in PROMPTS]
    # An oracle's drafts are all right: what was verified was accepted.
    assert all(row.steps == row.verified for row in rows)
    assert {n for row in rows for n in row.verified} == set(range(K + 1))


def test_every_step_emits_its_accepted_tokens_and_one_more(model: LlamaForCausalLM, target: CachedTarget) -> None:
    numbers = np.random.default_rng(1)
    mixed = Scripted(
        PROMPTS,
        lambda context, k: [token if numbers.random() < 0.6 else 0 for token in plain_greedy(model, context, k)],
    )
    for row in run(target, mixed):
        made = 1 + len(row.steps) + sum(row.steps)  # the limit hides at most K of them
        assert 0 <= made - len(row.tokens) <= K


def test_a_ragged_batch_equals_one_by_one_greedy_and_sampled(model: LlamaForCausalLM, target: CachedTarget) -> None:
    table = TableDrafts(torch.tensor([plain_greedy(model, [i], 1)[0] for i in range(V)]))
    for sampling in (Sampling(), Sampling(0.9, 0.9)):
        together = run(target, table, sampling=sampling, seed=5)
        for i, prompt in enumerate(PROMPTS):
            alone = run(target, table, [prompt], keys=[KEYS[i]], sampling=sampling, seed=5)
            assert alone == [together[i]]
        backwards = run(target, table, PROMPTS[::-1], keys=KEYS[::-1], sampling=sampling, seed=5)
        assert backwards[::-1] == together
    assert run(target, table, sampling=Sampling(0.9, 0.9), seed=6) != together


def test_rows_that_stop_leave_and_tokens_after_the_end_do_not_count(
    model: LlamaForCausalLM, target: CachedTarget
) -> None:
    plain = [plain_greedy(model, prompt, 24) for prompt in PROMPTS]
    eos = plain[0][9]
    expected = [plain_greedy(model, prompt, 24, (eos,)) for prompt in PROMPTS]
    assert len({len(tokens) for tokens in expected}) > 1  # rows stop at different times
    results = run(target, Scripted(PROMPTS, lambda context, k: plain_greedy(model, context, k)), eos=[eos])
    assert [list(row.tokens) for row in results] == expected
    for row in results:
        assert row.finish == ("stop" if row.tokens[-1] == eos else "length")
        assert row.steps[:-1] == (K,) * (len(row.steps) - 1)
        assert row.steps[-1] + row.after_end == K
        if row.finish == "length":
            assert row.after_end == 0
        else:  # of the last step's tokens, those up to the end were emitted; its bonus is no draft
            assert row.steps[-1] == min(K, len(row.tokens) - 1 - (K + 1) * (len(row.steps) - 1))
    assert any(row.after_end for row in results)


def test_end_of_sequence_as_first_token_takes_no_step(model: LlamaForCausalLM, target: CachedTarget) -> None:
    first = plain_greedy(model, PROMPTS[0], 1)[0]
    row = run(target, TableDrafts(torch.arange(V)), PROMPTS[:1], eos=[first])[0]
    assert (row.tokens, row.finish, row.steps) == ((first,), "stop", ())


def test_sampled_text_follows_the_targets_law(model: LlamaForCausalLM, target: CachedTarget) -> None:
    rows, temperature = 1500, 0.8
    prompt = PROMPTS[2]
    table = TableDrafts(torch.tensor([plain_greedy(model, [*prompt, i], 1)[0] for i in range(V)]))
    out = decode(
        target,
        table,
        [prompt] * rows,
        keys=[str(i) for i in range(rows)],
        k=2,
        max_new_tokens=2,
        sampling=Sampling(temperature),
    )
    assert 0 < sum(row.steps[0] > 0 for row in out) < rows
    with torch.no_grad():
        first = torch.softmax(model(torch.tensor([prompt])).logits[0, -1].double() / temperature, -1)
        both = model(torch.tensor([[*prompt, i] for i in range(V)])).logits[:, -1].double()
    marginal = first @ torch.softmax(both / temperature, -1)
    counts = np.bincount([row.tokens[1] for row in out], minlength=V)
    expected = marginal.numpy() * rows
    big = expected >= 5
    cells = np.append(counts[big], counts[~big].sum()), np.append(expected[big], expected[~big].sum())
    statistic, freedom = float(((cells[0] - cells[1]) ** 2 / cells[1]).sum()), int(big.sum())
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5


def test_captured_states_are_the_residual_streams_of_the_committed_tokens(model: LlamaForCausalLM) -> None:
    seen: list[Committed] = []

    class Watch(TableDrafts):
        layers = (2, 0)

        def propose(self, committed: Committed, k: int, temperature: float, u: torch.Tensor | None) -> Proposal:
            seen.append(committed)
            return super().propose(committed, k, temperature, u)

    target = CachedTarget(model, facts_of(model), (2, 0))
    prompts = PROMPTS[:2]
    table = torch.tensor([plain_greedy(model, [i], 1)[0] for i in range(V)])
    out = run(target, Watch(table), prompts, max_new_tokens=12)
    target.close()
    for row, prompt in enumerate(prompts):
        text = [*prompt, *out[row].tokens]
        with torch.no_grad():
            hidden = model(torch.tensor([text]), output_hidden_states=True).hidden_states
        expected = torch.cat([hidden[3][0], hidden[1][0]], -1)
        position = 0
        for committed in seen[:2]:  # before any row leaves
            assert int(committed.start[row]) == position
            count = int(committed.counts[row])
            torch.testing.assert_close(
                committed.states[row, :count], expected[position : position + count], atol=1e-4, rtol=1e-4
            )
            assert committed.tokens[row, :count].tolist() == text[position + 1 : position + count + 1]
            position += count


def test_prefill_in_groups_changes_nothing(
    model: LlamaForCausalLM, target: CachedTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(target, None)
    monkeypatch.setattr("torchspec_core.decoding.target.PREFILL_TOKENS", 8)
    assert run(target, None) == whole
    assert _by_length([3, 9, 4, 1], 8) == [[1], [2, 0], [3]]


def test_surviving_rows_fill_the_holes_from_the_end() -> None:
    assert surviving_rows([True, False, True, False, True]) == [0, 4, 2]
    assert surviving_rows([False, False]) == []
    assert surviving_rows([True, True]) == [0, 1]


def test_row_numbers_depend_on_seed_and_key_only() -> None:
    assert np.array_equal(row_uniforms(1, "a", 4, 3), row_uniforms(1, "a", 4, 3))
    assert not np.array_equal(row_uniforms(1, "a", 4, 3), row_uniforms(2, "a", 4, 3))
    assert not np.array_equal(row_uniforms(1, "a", 4, 3), row_uniforms(1, "b", 4, 3))


def test_a_target_without_the_drafters_layers_is_refused(model: LlamaForCausalLM) -> None:
    with pytest.raises(UserError, match=r"layers 0\.\.3.*reads layer 7"):
        CachedTarget(model, facts_of(model), (1, 7))


def test_a_target_that_would_be_run_wrongly_is_refused() -> None:
    sizes = {"vocab_size": V, "hidden_size": 32, "intermediate_size": 48}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4}
    windowed = MistralForCausalLM(MistralConfig(**sizes, num_key_value_heads=2, sliding_window=8, eos_token_id=1))
    facts = facts_from_config({**windowed.config.to_dict(), "architectures": ["MistralForCausalLM"]})
    with pytest.raises(UserError, match="full attention only, but MistralForCausalLM"):
        CachedTarget(windowed, facts)


def test_baseline_tables_by_hand() -> None:
    # Supervised: 5, 6, 5 | 7, 5, 5. Pairs with a supervised second token: 4>5 5>6 6>5 | 9>7 7>5 5>5.
    samples = [
        (np.array([3, 4, 5, 6, 5]), np.array([0, 0, 1, 1, 1], bool)),
        (np.array([9, 7, 5, 5]), np.array([0, 1, 1, 1], bool)),
    ]
    tables = baseline_tables(samples, 10)
    assert tables["unigram"].tolist() == [5] * 10
    assert tables["bigram"].tolist() == [5, 5, 5, 5, 5, 5, 5, 5, 5, 7]  # 5>6 and 5>5 tie: the smaller id
    assert tables["repeat"].tolist() == list(range(10))


def test_step_costs_are_measured_for_every_width(target: CachedTarget) -> None:
    cost = measure_step_cost(target, rows=3, k=2, context=8, repeats=1)
    assert cost.tokens == (3, 6, 9)
    assert min(cost.seconds) > 0
