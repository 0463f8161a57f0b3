"""The nightly gates' arithmetic, the bands file, the history and its suspects, without a pipeline."""

from __future__ import annotations

import json
import math
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tasks.convergence import night_message, verdict_rows
from torchspec_core.cli import main
from torchspec_core.config.load import load_recipe
from torchspec_core.errors import UserError
from torchspec_core.nightly import bands, history, measure
from torchspec_core.nightly.bands import Bands
from torchspec_core.nightly.gates import EXACT, Band, Verdict, judge
from torchspec_core.nightly.night import new_night, verdicts_of
from torchspec_core.nightly.rerun import distance
from torchspec_core.nightly.variants import SUBJECTS, VARIANTS
from torchspec_core.plots.nightly import trend
from torchspec_core.recipe_checks import check_fields

GOOD = {"mask": 1.0, "layers": 0.001, "resume": 0.0, "resume.continued": 1.0, "acceptance.floor": 0.2}


@pytest.mark.parametrize(("value", "inside"), [
    (1.0, True), (2.0, True), (0.99, False), (2.01, False), (math.nan, False), (math.inf, False),
])
def test_a_band_holds_both_ends_and_only_finite_numbers(value: float, inside: bool) -> None:
    assert Band(1.0, 2.0).holds(value) is inside


def test_every_gate_is_judged_and_none_can_vanish() -> None:
    limits = {"loss": Band(1.0, 2.0), "acceptance": Band(1.1, 1.3)}
    found = {v.gate: v for v in judge("eagle3", {**GOOD, "loss": 2.5, "new": 1.0}, limits)}
    assert found.keys() == {*EXACT, "loss", "acceptance", "new"}
    assert {gate for gate, v in found.items() if not v.ok} == {"loss", "acceptance", "new"}
    assert str(found["loss"]) == "eagle3: loss = 2.5, band 1 to 2"
    assert "not measured" in found["acceptance"].note and "calibrate" in found["new"].note


@pytest.mark.parametrize(("gate", "value"), [
    ("mask", 0.99), ("layers", 0.2), ("resume", 1e-7), ("resume.continued", 0.0), ("acceptance.floor", -0.01),
])
def test_exact_gates_refuse_what_is_almost_right(gate: str, value: float) -> None:
    assert [v.gate for v in judge("x", {**GOOD, gate: value}, {}) if not v.ok] == [gate]


def test_a_band_is_mean_and_k_deviations_and_never_too_narrow() -> None:
    entry = bands.derive("loss", [1.0, 2.0, 3.0])  # mean 2, sample sd 1
    assert (entry["mean"], entry["sd"], entry["n"], entry["low"], entry["high"]) == (2.0, 1.0, 3, -2.0, 6.0)
    still = bands.derive("loss", [2.0, 2.0, 2.0])
    assert still["low"] == pytest.approx(1.94) and still["high"] == pytest.approx(2.06)


def test_the_band_of_throughput_is_open_above_and_refuses_half_the_speed() -> None:
    noisy = bands.derive("throughput", [1.0, 2.0, 3.0])
    assert noisy["high"] is None and noisy["low"] == pytest.approx(1.3)  # not 2 - 4 sd
    quiet = bands.derive("throughput", [1.0, 1.0, 1.0])
    assert not Band(quiet["low"], quiet["high"]).holds(0.5) and Band(quiet["low"], quiet["high"]).holds(9.0)


def test_the_bands_file_keeps_other_variants_and_subjects(tmp_path: Path) -> None:
    path, runs = tmp_path / "bands.json", [{"eagle3": {"loss": x, "mask": 1.0}} for x in (1.0, 2.0, 3.0)]
    bands.write(path, "tiny", {"machine": "m"}, bands.derive_all(runs))
    bands.write(path, "tiny", {"machine": "m"}, bands.derive_all([{"dspark": run["eagle3"]} for run in runs]))
    read = bands.read(path, "tiny")
    assert read.subjects == {s: {"loss": Band(-2.0, 6.0)} for s in ("eagle3", "dspark")}
    with pytest.raises(UserError, match="torchspec nightly calibrate --variant quick"):
        bands.read(path, "quick")


def test_throughput_is_judged_on_its_own_machine_only() -> None:
    limits = {"throughput": Band(10.0, None)}
    numbers = {**GOOD, "throughput": 1.0}
    here = verdicts_of("x", numbers, Bands({"machine": history.machine()}, {"x": limits}))
    there = verdicts_of("x", numbers, Bands({"machine": "another"}, {"x": limits}))
    assert [v.gate for v in here if not v.ok] == ["throughput"] and all(v.ok for v in there)
    assert "another" in next(v.note for v in there if v.gate == "throughput")


def test_measured_numbers_come_from_the_stages_files(tmp_path: Path) -> None:
    rows = [{"step": i + 1, "loss": 10.0 - i} for i in range(8)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "validation.json").write_text(json.dumps({"acc_0": 0.5, "acc_1": 0.25, "acc_best": 1.0, "rows": 3}))
    assert measure.trained(tmp_path) == {"loss": 3.5, "accuracy.slot_1": 0.5, "accuracy.slot_2": 0.25}
    flat = {"heldout.greedy.acceptance_length": 1.5, "heldout.t1.acceptance_length": 1.4,
            "baseline.unigram.acceptance_length": 1.125}  # fmt: skip
    (tmp_path / "evaluation.json").write_text(json.dumps(flat))
    assert measure.accepted(tmp_path) == {"acceptance": 1.5, "acceptance.t1": 1.4, "acceptance.floor": 0.375}


def test_distance_of_weights(tmp_path: Path) -> None:
    a = {"w": np.array([1.0, 2.0], np.float32)}
    save_file(a, tmp_path / "a")
    save_file({"w": np.array([1.0, 2.5], np.float32)}, tmp_path / "b")
    save_file({"v": a["w"]}, tmp_path / "c")
    assert distance(tmp_path / "a", tmp_path / "a") == 0.0
    assert distance(tmp_path / "a", tmp_path / "b") == 0.5
    assert distance(tmp_path / "a", tmp_path / "c") == math.inf


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("subject", SUBJECTS)
def test_every_recipe_of_every_variant_is_one_that_can_run(variant: str, subject: str) -> None:
    path, overrides = new_night(variant, [subject]).recipe(subject)
    recipe = load_recipe(Path(__file__).resolve().parents[2] / path, overrides).recipe
    check_fields(recipe)
    assert recipe.run.seed == 0 and "heldout" in recipe.evaluation.sets


@pytest.mark.parametrize(("words", "said"), [
    (["run", "--variant", "huge"], "huge"),
    (["run", "--subject", "eagle4"], "eagle4"),
    (["calibrate", "--seeds", "0,1"], "three different seeds"),
    (["calibrate", "--seeds", "a"], "whole numbers"),
    (["history", "--root", "nowhere"], "torchspec nightly run"),
    (["run", "--bands", "nowhere.json"], "calibrate --variant quick"),
])
def test_mistakes_are_one_sentence(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nightly", *words]) == 2
    printed = capsys.readouterr().err.strip()
    assert said in printed and len(printed.splitlines()) == 1


FROM = {"lock": "1", "patches": "2", "data": "3", "machine": "m"}


def night(commit: str, ok: bool, name: str = "n", **made_from: str) -> history.Night:
    verdict = Verdict("eagle3", "loss", 3.0, 1.0, 2.0, ok).to_json()
    return history.Night(name, "quick", "t", commit, False, {**FROM, **made_from}, (verdict,), 1.0)


def git(root: Path, *words: str) -> str:
    own = ("-c", "user.name=a", "-c", "user.email=a@b")
    done = subprocess.run(["git", *own, *words], cwd=root, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def commits(tmp_path: Path) -> list[str]:
    """Four commits of a repository in `tmp_path`, oldest first."""
    git(tmp_path, "init", "-q")
    for number in range(4):
        git(tmp_path, "commit", "-q", "--allow-empty", "-m", f"change {number}")
    return git(tmp_path, "rev-list", "--reverse", "HEAD").splitlines()


def test_the_first_bad_commit_is_named(tmp_path: Path, commits: list[str]) -> None:
    nights = [night(commits[0], True), night(commits[1], False, "first"), night(commits[3], False)]
    named = history.suspects(nights, tmp_path)
    assert named == [f"code: first bad commit {commits[1][:7]} change 1 (red since the night first)"]
    several = history.suspects([night(commits[0], True), night(commits[3], False)], tmp_path)
    assert "one of 3: " in several[0] and all(f"change {n}" in several[0] for n in (1, 2, 3))
    assert history.suspects([night(commits[0], False), night(commits[0], True)], tmp_path) == []


def test_lock_patches_and_data_are_suspects(tmp_path: Path, commits: list[str]) -> None:
    nights = [night(commits[0], True), night(commits[0], False, lock="x", data="y", machine="q")]
    assert history.suspects(nights, tmp_path) == [
        "lock: changed since the last green night", "data: changed since the last green night",
        "machine: m then, q now since the last green night",
    ]  # fmt: skip
    assert "near its band's edge" in history.suspects([nights[0], night(commits[0], False)], tmp_path)[0]
    assert "no green night" in history.suspects([night(commits[0], False)], tmp_path)[0]


def test_history_survives_a_cut_line_and_keeps_variants_apart(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    history.append(path, night("a", True))
    with open(path, "a") as file:
        file.write('{"night": "cut')
    assert [n.commit for n in history.read(path, "quick")] == ["a"] and history.read(path, "nightly") == []
    history.append(path, night("b", False))
    assert [n.green for n in history.read(path, "quick")] == [True, False]


def test_what_a_night_is_made_from_changes_with_the_lock(tmp_path: Path) -> None:
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements/cpu.txt").write_text("torch==1\n")
    before = history.made_from(tmp_path, {"target": {"a": "1"}})
    (tmp_path / "requirements/cpu.txt").write_text("torch==2\n")
    after = history.made_from(tmp_path, {"target": {"a": "2"}})
    assert {name for name in before if before[name] != after[name]} == {"lock", "data"}


def test_the_message_names_gate_value_band_and_suspects() -> None:
    verdicts = [Verdict("eagle3", "loss", 9.0, 1.0, 2.0, False), Verdict("eagle3", "mask", 1.0, 1.0, 1.0, True)]
    said = night_message(verdicts, ["code: first bad commit abc"])
    assert said == ("1 of 2 gates failed: eagle3: loss = 9, band 1 to 2. Suspects: code: first bad commit abc")
    assert [row["gate"] for row in verdict_rows(list(reversed(verdicts)))] == ["loss", "mask"]
    assert night_message(verdicts[1:], []) == "1 gates hold"


def test_the_trend_shows_a_line_for_each_subject() -> None:
    def rows(value: float, ok: bool) -> list[dict[str, Any]]:
        return [replace(Verdict(s, "loss", value, 1.0, 3.0, ok)).to_json() for s in ("eagle3", "dspark")]

    picture = trend([rows(2.0, True), rows(9.0, False)])
    assert picture.startswith("<svg") and all(word in picture for word in ("eagle3", "dspark", "throughput"))
