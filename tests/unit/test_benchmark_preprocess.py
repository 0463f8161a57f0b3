"""The preprocessing benchmark: every way finds the same tokens, and the script's ratios are those of its runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import preprocess
from benchmarks.preprocess import main, make_corpus, run_one
from tests.tiny_chat import write_target

ROWS = 40
SECONDS = {
    "ours": 2.0, "floor_threads": 3.0, "floor_processes": 1.8, "tensors_pool_after": 8.0, "tensors_pool": 7.0,
    "lists_pool": 6.0,
}  # fmt: skip


def test_every_way_finds_the_same_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_target(tmp_path / "target")
    make_corpus(tmp_path / "corpus.jsonl", ROWS)
    texts = (tmp_path / "corpus.jsonl").read_text("utf-8").splitlines()
    assert len(set(texts)) == ROWS
    found = {}
    for way, workers in (("ours", 0), ("floor_threads", 1), ("floor_processes", 1), ("lists_pool", 1)):
        monkeypatch.setattr(preprocess, "WORKERS", workers)
        found[way] = run_one(way, tmp_path / "corpus.jsonl", tmp_path / "target")
    assert {(run["rows"], run["tokens"]) for run in found.values()} == {(ROWS, found["ours"]["tokens"])}
    assert all(run["seconds"] > 0 and run["parent_mb"] > 0 for run in found.values())


def test_the_script_writes_the_ratios_of_its_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start_one(way: str, corpus: Path, target: Path, python: str) -> dict[str, float] | str:
        if way not in SECONDS:
            return "no module named datasets"
        return {
            "seconds": SECONDS[way], "rows": 100.0, "tokens": 1000.0, "collect_cpu": 0.1 if way == "ours" else 4.0,
            "cpu": 3.5, "worker_cpu": 3.2, "parent_mb": 150.0, "worker_mb": 100.0, "open_files": 9.0,
        }  # fmt: skip

    for name in ("make_target", "make_corpus"):
        monkeypatch.setattr(preprocess, name, lambda *arguments: None)
    monkeypatch.setattr(preprocess, "start_one", start_one)
    monkeypatch.setattr(sys, "argv", ["preprocess", "--quick", "--json", str(tmp_path / "out.json")])
    main()
    numbers = json.loads((tmp_path / "out.json").read_text())
    expected = {
        "speedup.vs_tensors_pool_after": 4.0, "speedup.vs_lists_pool": 3.0, "speedup.collection": 40.0,
        "fraction.of_encode_floor": 0.9, "rss.parent_mb": 150.0,
        "speedup.model_64_workers": 4.0 / (0.1 + 3.2 / 64),
    }  # fmt: skip
    assert {name: numbers[name] for name in expected} == pytest.approx(expected)
    assert numbers["meta.skipped.datasets_map"] == "no module named datasets"
    assert not any(isinstance(value, (dict, list)) for value in numbers.values())
