"""Rows of an answered conversation: when turns share a row, and what is in it."""

from __future__ import annotations

from torchspec_core.data.messages import content_id
from torchspec_core.targets.answers import Dialogue, Prompt, Turn, dialogue_rows


def dialogue(*turns: Turn) -> Dialogue:
    prompt = Prompt("id", tuple(f"question {i}" for i in range(len(turns))), "s", turns[0].prompt_ids)
    return Dialogue(0, 0, prompt, list(turns))


def test_turns_whose_prompt_begins_with_the_tokens_so_far_are_one_row() -> None:
    (row,) = dialogue_rows(dialogue(Turn([1, 5], [6, 2], "a", "stop"), Turn([1, 5, 6, 2, 7, 8], [9], "b", "length")))
    assert row == {
        "sample_id": "id", "prompt_ids": [1, 5], "answer_ids": [6, 2], "finish": "length", "source": "s",
        "later": [{"prompt_ids": [7, 8], "answer_ids": [9]}],
        "messages": [
            {"role": "user", "content": "question 0"}, {"role": "assistant", "content": "a"},
            {"role": "user", "content": "question 1"}, {"role": "assistant", "content": "b"},
        ],
    }  # fmt: skip


def test_a_turn_whose_prompt_differs_begins_a_row_that_later_turns_join() -> None:
    first = Turn([1, 5], [6, 2], "a", "stop")
    retold = Turn([1, 5, 60, 61, 2, 7], [8, 2], "b", "stop")  # the same text in other tokens
    rows = dialogue_rows(dialogue(first, retold, Turn([1, 5, 60, 61, 2, 7, 8, 2, 9], [3, 2], "c", "stop")))
    assert [(r["prompt_ids"], r["answer_ids"], r.get("later")) for r in rows] == [
        ([1, 5], [6, 2], None),
        ([1, 5, 60, 61, 2, 7], [8, 2], [{"prompt_ids": [9], "answer_ids": [3, 2]}]),
    ]
    said = (("user", "question 0"), ("assistant", "a"), ("user", "question 1"))
    assert [r["sample_id"] for r in rows] == ["id", content_id(said)]
    assert [len(r["messages"]) for r in rows] == [2, 6]
