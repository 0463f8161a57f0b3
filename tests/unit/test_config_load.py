"""Recipes from files, bases and overrides: precedence, sources, and one helpful sentence for each mistake."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from torchspec_core.config.load import load_recipe, render_recipe
from torchspec_core.errors import UserError


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(name: str, text: str) -> Path:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(text)
    return Path(name)


def mistake(text: str, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load_recipe(write("configs/x.yaml", text), overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_precedence_is_defaults_base_recipe_overrides() -> None:
    write("configs/base.yaml", "training:\n  lr: 4\n  clip: 4\n  ema: 0.5\n")
    path = write("configs/x.yaml", "base: base.yaml\ntraining:\n  clip: 5\n  ema: 0.25\n")
    loaded = load_recipe(path, ["training.ema=0.125"])
    training = loaded.recipe.training
    assert (training.weight_decay, training.lr, training.clip, training.ema) == (0.01, 4.0, 5.0, 0.125)
    assert loaded.sources["training.weight_decay"] == "default"
    assert loaded.sources["training.lr"] == "configs/base.yaml:2"
    assert loaded.sources["training.clip"] == "configs/x.yaml:3"
    assert loaded.sources["training.ema"] == "override"


def test_base_of_a_base_is_relative_to_the_file_that_names_it() -> None:
    write("configs/deep/a.yaml", "run:\n  seed: 7\n")
    write("configs/deep/b.yaml", "base: a.yaml\n")
    path = write("configs/x.yaml", "base: deep/b.yaml\n")
    assert load_recipe(path).recipe.run.seed == 7


@pytest.mark.parametrize(
    ("text", "value"), [("1e-3", 0.001), ("1.5E+2", 150.0), ("3", 3.0), ("0.25", 0.25), ("-1e2", None)]
)
def test_numbers_that_yaml_1_1_reads_as_texts_are_numbers(text: str, value: float | None) -> None:
    if value is None:
        assert "greater than" in mistake(f"training: {{lr: {text}}}")
        return
    lr = load_recipe(write("x.yaml", f"training: {{lr: {text}}}")).recipe.training.lr
    assert (lr, type(lr)) == (value, float)
    assert load_recipe(write("x.yaml", ""), [f"training.lr={text}"]).recipe.training.lr == value


def test_lists_become_tuples_and_mappings_in_lists_become_sections() -> None:
    path = write("x.yaml", "data:\n  prompts:\n    - {name: chitchat, rows: 5}\ntraining:\n  betas: [1, 0.5]\n")
    recipe = load_recipe(path).recipe
    assert [(source.name, source.rows) for source in recipe.data.prompts] == [("chitchat", 5)]
    assert recipe.training.betas == (1.0, 0.5)


def test_an_override_reaches_into_a_list_also_into_the_default_one() -> None:
    assert load_recipe(write("x.yaml", ""), ["data.prompts.0.rows=9"]).recipe.data.prompts[0].rows == 9
    text = "data:\n  prompts:\n    - {name: chitchat, rows: 5}\n    - {name: sharegpt, rows: 6}\n"
    loaded = load_recipe(write("x.yaml", text), ["data.prompts.1.rows=9"])
    assert [source.rows for source in loaded.recipe.data.prompts] == [5, 9]
    assert loaded.sources["data.prompts"] == "override"
    message = mistake(text, "data.prompts.2.rows=9")
    assert "items 0 to 1" in message


def test_text_fields_take_the_override_as_it_is_typed() -> None:
    recipe = load_recipe(write("x.yaml", ""), ["run.name=2026", "target.source=hub:a/b@c"]).recipe
    assert (recipe.run.name, recipe.target.source) == ("2026", "hub:a/b@c")


def test_an_emptied_section_keeps_its_defaults() -> None:
    assert load_recipe(write("x.yaml", "data:\ntraining: {}\n")).recipe.data.heldout == 60


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("training:\n  lrr: 3\n", ["configs/x.yaml:2", "`training.lrr`", "`training.lr`"]),
        ("run: {}\ntrainin:\n  lr: 3\n", ["configs/x.yaml:2", "section `trainin`", "`training`"]),
        ("training:\n  temperature: 1\n", ["`training.temperature`", "`answers.temperature`"]),
        (
            "data:\n  prompts:\n    - name: sharegpt\n      row: 3\n",
            ["configs/x.yaml:4", "`data.prompts.0.row`", "data.prompts.0.rows"],
        ),
        ("training:\n  lr: fast\n", ["configs/x.yaml:2", "`training.lr` must be a number", '"fast"']),
        ("training:\n  ttt_length: 1.5\n", ["`training.ttt_length` must be a whole number", "1.5"]),
        ("serving:\n  vllm: 1\n", ["`serving.vllm` must be true or false"]),
        ("training:\n  lr: -1\n", ["`training.lr` must be greater than 0", "-1"]),
        ("training:\n  lr: .nan\n", ["`training.lr` must be a number", "nan"]),
        ("training:\n  dtype: fp8\n", ["`training.dtype` must be bfloat16 or float32", '"fp8"']),
        ("training:\n  betas: [1]\n", ["`training.betas` must be a list of 2"]),
        ("training: 3\n", ["configs/x.yaml:1", "`training` must be a mapping"]),
        ("data:\n  prompts:\n    - name: jsonl\n", ["configs/x.yaml:3", "`data.prompts.0` needs `rows`"]),
        ("data:\n  prompts: []\n", ["`data.prompts`", "at least"]),
        ("run:\n  name: 2024-01-01\n", ["configs/x.yaml:2", "`run.name` must be a text"]),
        ("training:\n  lr: 3\n  lr: 4\n", ["configs/x.yaml:3", "`lr` is there twice", "line 2"]),
        ("training:\n  - a: [\n", ["configs/x.yaml:3", "not valid YAML"]),
        ("- 1\n", ["configs/x.yaml", "mapping of sections"]),
        ("run:\n  1: x\n", ["configs/x.yaml:2", "not a text"]),
        ("base: nope.yaml\n", ["configs/x.yaml:1", "configs/nope.yaml does not exist"]),
        ("run: {}\nbase: 3\n", ["configs/x.yaml:2", "base must be"]),
        ("base: x.yaml\n", ["circle", "configs/x.yaml -> configs/x.yaml"]),
    ],
)
def test_each_mistake_names_the_key_the_line_and_what_is_wanted(text: str, parts: list[str]) -> None:
    message = mistake(text)
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("training.lr=fast", ["override", "`training.lr` must be a number", '"fast"']),
        ("training.lrr=3", ["training.lrr=3", "`training.lr`"]),
        ("lr=3", ["lr=3", "section.key=value"]),
        ("training.lr", ["section.key=value"]),
        ("training.lr=[", ["training.lr=[", "not valid YAML"]),
        ("training.lr.x=3", ["`training.lr.x`"]),
    ],
)
def test_mistakes_in_overrides(override: str, parts: list[str]) -> None:
    message = mistake("", override)
    for part in parts:
        assert part in message


def test_bases_in_a_circle_are_listed() -> None:
    write("a.yaml", "base: b.yaml\n")
    write("b.yaml", "base: a.yaml\n")
    with pytest.raises(UserError, match="a.yaml -> b.yaml -> a.yaml"):
        load_recipe(Path("a.yaml"))


def test_missing_recipe_and_folder() -> None:
    with pytest.raises(UserError, match="nope.yaml does not exist"):
        load_recipe(Path("nope.yaml"))
    with pytest.raises(UserError, match="is a folder"):
        load_recipe(Path("."))


def test_the_rendered_recipe_reads_back_as_the_same_recipe_and_shows_sources() -> None:
    path = write("configs/x.yaml", "run:\n  name: x\ndata:\n  prompts:\n    - {name: chitchat, rows: 5}\n")
    loaded = load_recipe(path, ["training.lr=1e-4"])
    text = render_recipe(loaded)
    assert load_recipe(write("again.yaml", text)).recipe == loaded.recipe
    lines = [line.split() for line in text.splitlines()]
    assert ["name:", '"x"', "#", "configs/x.yaml:2"] in lines
    assert ["lr:", "0.0001", "#", "override"] in lines
    assert ["clip:", "1.0", "#", "default"] in lines
    assert set(yaml.safe_load(text)) == {
        "run", "target", "data", "answers", "capture", "store", "drafter", "training", "evaluation", "serving",
        "benchmarks",
    }  # fmt: skip
