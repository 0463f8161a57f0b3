"""Golden masks of template families: what the model emitted stands between « and », reviewed by eye."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.chat_templates import CONTROL, ENDS, FAMILIES, MISTRAL
from tests.tiny_chat import byte_tokenizer
from torchspec_core.data.messages import BadRow, Message
from torchspec_core.data.render import BrokenPrefix, Policy, Renderer, supervised_turns

VARIABLES = {"bos_token": "<s>", "eos_token": "</s>"}
CALL = (("add", '{"a": 1}', ""),)
TOOLS = ({"type": "function", "function": {"name": "add"}},)


def renderer(template: str, end: str = "<|im_end|>", *ends: str) -> Renderer:
    tokenizer = byte_tokenizer(CONTROL)
    ids = [tokenizer.token_to_id(token) for token in (end, *ends)]
    return Renderer(tokenizer, template, "a test", ids, VARIABLES)


RENDERERS = {
    name: renderer(template, ENDS[name], *(("<|call|>",) if name == "harmony" else ()))
    for name, template in FAMILIES.items()
}


def user(text: str) -> Message:
    return Message("user", text)


def reply(text: str, thought: str = "", calls: tuple[tuple[str, str, str], ...] = ()) -> Message:
    return Message("assistant", text, thought, calls)


def shown(name: str, messages: list[Message], policy: Policy = "all", tools: tuple[object, ...] = ()) -> str:
    pieces = RENDERERS[name].pieces(messages, policy, tools)  # type: ignore[arg-type]
    return "".join(f"«{piece.text}»" if piece.supervised else piece.text for piece in pieces)


CHAT = [user("hi"), reply("yo "), user("so?"), reply("ok")]
THINKING = [*CHAT[:3], reply("ok", "hm")]
TOOL = [user("1+0?"), reply("", "", CALL), Message("tool", "1"), reply("One.")]
THINKING_TOOL = [user("1+0?"), reply("", "hm", CALL), Message("tool", "1"), reply("One.", "so")]

GOLDEN = [
    ("llama3", CHAT, "all", (),
     "<s><|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>"
     "<|start_header_id|>assistant<|end_header_id|>\n\n«yo<|eot_id|>»"
     "<|start_header_id|>user<|end_header_id|>\n\nso?<|eot_id|>"
     "<|start_header_id|>assistant<|end_header_id|>\n\n«ok<|eot_id|>»"),
    ("mistral", CHAT, "all", (), "<s>[INST] hi [/INST]« yo </s>»[INST] so? [/INST]« ok</s>»"),
    ("mistral", CHAT, "last", (), "<s>[INST] hi [/INST] yo </s>[INST] so? [/INST]« ok</s>»"),
    # no reasoning: the empty think block is the template's, and only the last turn has one
    ("qwen3", CHAT, "all", (),
     "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n«yo <|im_end|>»\n"
     "<|im_start|>user\nso?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n«ok<|im_end|>»\n"),
    # reasoning: the model wrote the think block
    ("qwen3", THINKING, "last-if-thinking", (),
     "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyo <|im_end|>\n"
     "<|im_start|>user\nso?<|im_end|>\n<|im_start|>assistant\n«<think>\nhm\n</think>\n\nok<|im_end|>»\n"),
    ("qwen3", [user("q"), reply("<think>\nhm\n</think>\n\nok")], "all", (),
     "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n«<think>\nhm\n</think>\n\nok<|im_end|>»\n"),
    ("qwen3", THINKING_TOOL, "last", TOOLS,
     '<|im_start|>system\nTools:\n{"type": "function", "function": {"name": "add"}}<|im_end|>\n'
     "<|im_start|>user\n1+0?<|im_end|>\n"
     '<|im_start|>assistant\n«<think>\nhm\n</think>\n\n<tool_call>add{"a": 1}</tool_call><|im_end|>»\n'
     "<|im_start|>tool\n1<|im_end|>\n<|im_start|>assistant\n«<think>\nso\n</think>\n\nOne.<|im_end|>»\n"),
    ("qwen3", TOOL[:2], "all", (),
     "<|im_start|>user\n1+0?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
     '«<tool_call>add{"a": 1}</tool_call><|im_end|>»\n'),
    ("deepseek", TOOL, "all", (), '<s><User>1+0?<Assistant>«<call>add {"a": 1}</call>»<out>1</out>«One.</s>»'),
    ("deepseek", CHAT, "all", (), "<s><User>hi<Assistant>«yo </s>»<User>so?<Assistant>«ok</s>»"),
    # harmony: history ends with <|end|>, which the model never wrote; it did write the channels
    ("harmony", CHAT, "all", (),
     "<|start|>user<|message|>hi<|end|><|start|>assistant«<|channel|>final<|message|>yo »<|end|>"
     "<|start|>user<|message|>so?<|end|><|start|>assistant«<|channel|>final<|message|>ok<|return|>»"),
    ("harmony", THINKING, "last", (),
     "<|start|>user<|message|>hi<|end|><|start|>assistant<|channel|>final<|message|>yo <|end|>"
     "<|start|>user<|message|>so?<|end|><|start|>assistant«<|channel|>analysis<|message|>hm<|end|>"
     "<|start|>assistant<|channel|>final<|message|>ok<|return|>»"),
    ("harmony", THINKING_TOOL[:2], "all", (),
     "<|start|>user<|message|>1+0?<|end|><|start|>assistant«<|channel|>analysis<|message|>hm<|end|>"
     '<|start|>assistant to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>»'),
    ("harmony", TOOL, "all", (),
     "<|start|>user<|message|>1+0?<|end|><|start|>assistant« to=functions.add<|channel|>commentary json<|message|>"
     '{"a": 1}<|call|>»<|start|>tool<|message|>1<|end|><|start|>assistant«<|channel|>final<|message|>One.<|return|>»'),
]  # fmt: skip


@pytest.mark.parametrize("name, messages, policy, tools, golden", GOLDEN)
def test_golden_masks(
    name: str, messages: list[Message], policy: Policy, tools: tuple[object, ...], golden: str
) -> None:
    assert shown(name, messages, policy, tools) == golden


def test_templates_that_rewrite_history_are_refused_by_turn_and_with_the_way_out() -> None:
    thinking_twice = [user("q"), reply("a", "hm"), user("q"), reply("a", "hm")]
    with pytest.raises(BrokenPrefix, match="at turn 2: the template leaves out its reasoning; .*last-if-thinking"):
        shown("qwen3", thinking_twice)
    assert "«<think>\nhm\n</think>\n\na<|im_end|>»" in shown("qwen3", thinking_twice, "last-if-thinking")
    with pytest.raises(BrokenPrefix, match=r"leaves out its reasoning; .*data\.reasoning=drop"):
        shown("llama3", THINKING, "last-if-thinking")
    # Mistral moves the system message to the last user turn
    moved = [Message("system", "Be brief."), *CHAT]
    with pytest.raises(BrokenPrefix, match="at turn 3: what a server sends before the turn is not how"):
        shown("mistral", moved)
    assert shown("mistral", moved, "last") == (
        "<s>[INST] hi [/INST] yo </s>[INST] Be brief.\n\nso? [/INST]« ok</s>»"
    )


def test_a_template_that_leaves_out_tool_calls_is_a_bad_row() -> None:
    with pytest.raises(BadRow, match="leaves out the tool calls of turn 2"):
        shown("chatml", TOOL)


def test_reasoning_can_be_dropped() -> None:
    r = RENDERERS["qwen3"]
    with_thoughts = [user("q"), reply("a", "hm"), user("q"), reply("<think>\nhm\n</think>\n\nb")]
    plain = [user("q"), reply("a"), user("q"), reply("b")]
    assert r.pieces(with_thoughts, keep_reasoning=False) == r.pieces(plain)


def test_control_text_becomes_the_token_only_when_asked() -> None:
    r = RENDERERS["llama3"]
    messages = [user("a<|eot_id|>b"), reply("ok")]
    token = r.tokenizer.token_to_id("<|eot_id|>")
    kept, made = (r.encode([r.pieces(messages, control_text=asked)])[0].input_ids for asked in (False, True))
    assert (kept.count(token), made.count(token)) == (2, 3)
    assert r.decode(kept) == r.decode(made)


def test_nobody_but_the_assistant_may_write_a_token_of_the_template() -> None:
    tokenizer = byte_tokenizer(CONTROL)
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("<b>", special=False)])
    r = Renderer(tokenizer, FAMILIES["qwen3"], "a test", [2], VARIABLES)
    think, bold = tokenizer.token_to_id("<think>"), tokenizer.token_to_id("<b>")
    (sample,) = r.encode([r.pieces([user("<think> <b>"), reply("ok", "hm")])])
    assert (sample.input_ids.count(think), sample.input_ids.count(bold)) == (1, 1)


def test_last_covers_the_calls_that_led_to_the_answer() -> None:
    assert supervised_turns([*CHAT, *TOOL], "last") == [5, 7]
    assert supervised_turns([*CHAT, *TOOL], "all") == [1, 3, 5, 7]
    assert supervised_turns(CHAT, "last-if-thinking") == [1, 3]
    assert supervised_turns(THINKING, "last-if-thinking") == [3]


def metaspace_tokenizer() -> Tokenizer:
    """Like SentencePiece: a space at the start of every text."""
    letters = [chr(c) for c in range(33, 127)]
    vocabulary = {token: i for i, token in enumerate(("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "▁", *letters))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    control = ("<s>", "</s>", "[INST]", "[/INST]")
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return tokenizer


def test_a_tokenizer_that_adds_a_space_is_masked_by_offsets() -> None:
    r = Renderer(metaspace_tokenizer(), MISTRAL, "a test", [2], VARIABLES)
    assert not r.by_piece
    (sample,) = r.encode([r.pieces(CHAT)])
    tokens = [r.tokenizer.id_to_token(i) for i in sample.input_ids]
    assert tokens == [
        *["<s>", "[INST]", "▁", "h", "i", "▁", "[/INST]", "▁", "y", "o", "▁", "</s>"],
        *["[INST]", "▁", "s", "o", "?", "▁", "[/INST]", "▁", "o", "k", "</s>"],
    ]
    assert sample.runs == [7, 5, 7, 4]
    with pytest.raises(BadRow, match="cannot keep as text"):
        r.pieces([user("</s>"), reply("ok")])


text = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=12).filter(
    lambda t: t.strip() and "\ufdd0" not in t and "\ufdd1" not in t
)
SPICES = ("a<|im_end|>b", "<|eot_id|>", "</s> [INST] x", " x ", "\n\ny\n", "k", "think", "<", "final", "<|return|>")
words = st.one_of(text, st.sampled_from(SPICES))


def expected(name: str, answers: list[str], last: bool) -> list[str]:
    if name == "llama3":
        answers = [answer.strip() for answer in answers]
    if name == "qwen3":
        answers = [answer.lstrip("\n") for answer in answers]
    ends = [ENDS[name]] * len(answers)
    if name == "harmony":
        answers = [f"<|channel|>final<|message|>{answer}" for answer in answers]
        ends = [*[""] * (len(answers) - 1), ends[-1]]
    if name == "mistral":
        answers = [f" {answer}" for answer in answers]
    whole = [answer + end for answer, end in zip(answers, ends, strict=True)]
    return whole[-1:] if last else whole


@settings(deadline=None, max_examples=100, database=None)
@given(exchanges=st.lists(st.tuples(words, words), min_size=1, max_size=3), name=st.sampled_from(sorted(FAMILIES)),
       last=st.booleans())  # fmt: skip
def test_text_and_supervised_text_are_exact(exchanges: list[tuple[str, str]], name: str, last: bool) -> None:
    r = RENDERERS[name]
    messages = [Message(role, t) for pair in exchanges for role, t in zip(("user", "assistant"), pair, strict=True)]
    pieces = r.pieces(messages, "last" if last else "all")
    (sample,) = r.encode([pieces])
    assert r.decode(sample.input_ids) == r.text(messages)
    assert sum(sample.runs) == len(sample.input_ids)
    emitted, at = [], 0
    for number, length in enumerate(sample.runs):
        if number % 2:
            emitted.append(r.decode(sample.input_ids[at : at + length]))
        at += length
    assert emitted == expected(name, [answer for _, answer in exchanges], last)
    assert r.encode([pieces, pieces]) == [sample, sample]


