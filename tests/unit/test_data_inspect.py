"""`torchspec data inspect`: what is supervised is coloured, in the terminal, in the page and in the UI's artifact."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.tiny_chat import byte_tokenizer, chat, write_jsonl, write_target
from tests.unit.test_data_stage import make_job, source
from torchspec_core.cli import main
from torchspec_core.data import tokens
from torchspec_core.data.inspect import samples, to_html, to_markdown, to_terminal, token_texts

GREEN = re.compile(r"\x1b\[30;(?:102|42)m(.*?)\x1b\[0m", re.DOTALL)


def test_tokens_of_one_character_stand_together() -> None:
    text = "hé中🎉\n<|im_end|> x"
    ids = byte_tokenizer().encode(text, add_special_tokens=False).ids
    texts = token_texts(byte_tokenizer(), ids)
    assert "".join(texts) == text
    assert [t for t in texts if t] == ["h", "é", "中", "🎉", "\n", "<|im_end|>", " ", "x"]


def test_raw_rows_and_stage_show_the_same_mask(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [chat("hi\x1b[31m", "yo <b>"), chat("q", "")])
    job = make_job(tmp_path, [source(path)])
    tokens.build(job)
    raw = samples(path, tmp_path / "target", 5)
    stage = samples(job.workspace.path, tmp_path / "target", 5)
    assert raw[0].tokens == stage[0].tokens
    assert raw[1].problem == "turn 2 is empty"
    assert len(stage) == 1
    shown = to_terminal(raw)
    assert "".join(GREEN.findall(shown)) == "yo <b><|im_end|>"
    assert "hi\x1b[31m" not in shown  # a conversation does not drive the terminal
    assert "left out: turn 2 is empty" in shown
    page = to_html(raw)
    assert "".join(re.findall(r'<span class="s[^>]*>(.*?)</span>', page)) == "yo &lt;b&gt;&lt;|im_end|&gt;"
    assert "«yo <b><|im_end|>»" in to_markdown(stage)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [chat(f"q{i}", f"a{i}", "more", "end") for i in range(4)])
    target = str(write_target(tmp_path / "target"))
    page = tmp_path / "x.html"
    command = ["data", "inspect", str(path), "--n", "2", "--target", target]
    assert main([*command, "--html", str(page), "--supervise", "last"]) == 0
    shown = capsys.readouterr().out
    assert "".join(GREEN.findall(shown)) == "end<|im_end|>" * 2
    assert page.read_text().count("<h3>") == 2
    assert main(["data", "inspect", str(path)]) == 2
    assert "with --target" in capsys.readouterr().err
