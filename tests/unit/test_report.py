"""The report stage on hand-made stage folders: its numbers are the recorded ones, its pages show them."""

from __future__ import annotations

import html
import json
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import yaml
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel

from torchspec_core.config.schema import Recipe
from torchspec_core.errors import StageError
from torchspec_core.plots.curves import smoothed
from torchspec_core.report.build import build
from torchspec_core.report.document import changed, serve_command
from torchspec_core.report.pieces import drafted, drafted_pieces
from torchspec_core.report.render import markdown, page
from torchspec_core.stages.job import local_job
from torchspec_core.stages.manifest import write_manifest
from torchspec_core.stages.spec import StageSpec

WORDS = ("Yes: ", "```1 <", " 2```", " & so", " on")
STAGES = ("target", "prompts", "answers", "tokens", "vocabulary", "states", "drafter", "export", "evaluation")
SECONDS = dict(zip(STAGES, (3.5, 1.25, 200.0, 4.0, 2.25, 60.0, 300.0, 1.0, 90.0), strict=True))
EVALUATION = {
    "heldout.greedy.acceptance_length": 1.561,
    "heldout.greedy.acceptance_length_stderr": 0.021,
    "heldout.greedy.slot_1": 0.371,
    "heldout.greedy.slot_2": 0.142,
    "heldout.greedy.slot_3": 0.048,
    "heldout.greedy.drafts": 1480,
    "heldout.greedy.tokens": 2310,
    "heldout.t1.acceptance_length": 1.33,
    "heldout.t1.slot_1": 0.25,
    "heldout.t1.slot_2": 0.06,
    "heldout.t1.slot_3": 0.02,
    "heldout.t1.drafts": 1700,
    "heldout.t1.tokens": 2261,
    "mtbench.greedy.acceptance_length": 1.52,
    "mtbench.greedy.slot_1": 0.35,
    "mtbench.greedy.slot_2": 0.13,
    "mtbench.greedy.slot_3": 0.04,
    "mtbench.greedy.drafts": 1501,
    "mtbench.greedy.tokens": 2281,
    "meta.greedy.drafting": "greedy",
    "meta.t1.drafting": "probabilistic",
    "heldout.greedy.vllm_acceptance_length": 1.549,
    "heldout.greedy.vllm_drafts": 700,
    "heldout.greedy.vllm_slot_1": 0.366,
    "heldout.greedy.vllm_prompts": 38,
    "heldout.greedy.decoder_acceptance_length_as_vllm": 1.5512,
    "heldout.greedy.vllm_text_equal": 0.975,
    "baseline.unigram.acceptance_length": 1.04,
    "baseline.bigram.acceptance_length": 1.21,
    "baseline.repeat.acceptance_length": 1.02,
}


@pytest.fixture
def inputs(tmp_path: Path) -> dict[str, Path]:
    folders = {}
    recipe = Recipe().model_dump(mode="json")
    reads = {"target": "target", "prompts": "data", "answers": "answers", "drafter": "training"}
    for place, name in enumerate(STAGES):
        folder = folders[name] = tmp_path / "store" / name / f"x-{place}"
        folder.mkdir(parents=True)
        identity = {reads[name]: recipe[reads[name]]} if name in reads else {}
        spec = StageSpec(stage=name, version=1, identity=identity)
        metrics = {"steps": 12} if name == "drafter" else {}
        files = {"data.bin": {"bytes": 1000 * (place + 1)}}
        manifest = write_manifest(
            folder, spec, files, rows=10 + place, seconds=SECONDS[name], metrics=metrics, runtime={}
        )
        manifest["key"] = f"{place:032x}"
        manifest["host"] = {"name": "elsewhere", "machine": "riscv64", "cpus": 12, "memory_bytes": 3 << 30}
        manifest["libraries"] = {"torch": "9.9.9", "python": "3.99"}
        manifest["code"] = {"version": "0.0.7", "commit": "abcdef0123456789"}
        (folder / "manifest.json").write_text(json.dumps(manifest))
    (folders["target"] / "facts.json").write_text(json.dumps({"hidden_size": 576, "num_layers": 30}))
    (folders["drafter"] / "drafter.json").write_text(json.dumps({"hidden_size": 576, "draft_vocab_size": 8192}))
    rows = [
        {"step": i, "loss": 9.0 - 0.5 * i, "acc_0": 0.03 * i, "acc_1": 0.01 * i, "tokens": 100 * i, "seconds": 0.5 * i}
        for i in range(1, 13)
    ]
    (folders["drafter"] / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folders["drafter"] / "validation.json").write_text(json.dumps({"loss": 4.25, "acc_0": 0.31, "acc_1": 0.1}))
    (folders["evaluation"] / "evaluation.json").write_text(json.dumps(EVALUATION))
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="?"))
    tokenizer.decoder = Fuse()
    tokenizer.save(str(folders["target"] / "tokenizer.json"))
    sample = {
        "set": "heldout",
        "prompt": "Is 1 < 2?",
        "text": "".join(WORDS),
        "tokens": [0, 1, 2, 3, 4],
        "steps": [2, 0],
    }
    samples = [{**sample, "mode": "t1", "prompt": "not shown"}, *({**sample, "mode": "greedy"} for _ in range(3))]
    (folders["evaluation"] / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in samples))
    return folders


@pytest.fixture
def report(inputs: dict[str, Path], tmp_path: Path) -> Path:
    recipe = Recipe().model_dump(mode="json")
    params = {name: recipe[name] for name in ("evaluation", "serving", "answers", "training", "drafter")}
    job = local_job(tmp_path / "report", inputs=inputs, params=params, runtime={"run": {"name": "by-hand"}})
    build(job)
    return tmp_path / "report"


class _Cells(HTMLParser):
    """The table rows of a page, as text, and the tags that would load something from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.inside = False
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loads += [
            f"{tag} {name}" for name, value in attrs if name in ("src", "href") and not str(value).startswith("#")
        ]
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.inside = True
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th"):
            self.inside = False

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.rows[-1][-1] += data


def test_flat_numbers_are_the_recorded_ones(report: Path) -> None:
    numbers = json.loads((report / "report.json").read_text())
    assert {key: numbers[key] for key in EVALUATION} == EVALUATION
    assert numbers["seconds.answers"] == 200.0 and numbers["bytes.target"] == 1000 and numbers["rows.prompts"] == 11
    assert numbers["seconds.total"] == pytest.approx(662.0) and numbers["bytes.total"] == 45_000
    assert numbers["training.steps"] == 12 and numbers["validation.acc_0"] == 0.31
    assert numbers["meta.k"] == 3 and numbers["meta.top_p"] == 0.95 and numbers["meta.temperature"] == 1.0
    assert numbers["meta.model"] == "package:smollm2-135m-instruct" and numbers["meta.run"] == "by-hand"
    assert numbers["meta.key.drafter"].endswith("6") and numbers["meta.version.torch"] == "9.9.9"
    assert [numbers[f"meta.hardware.{part}"] for part in ("processor", "cores", "memory_gib")] == ["riscv64", 12, 3.0]
    assert all(isinstance(value, int | float | str) for value in numbers.values())


def test_html_shows_the_numbers_and_loads_nothing(report: Path) -> None:
    text = (report / "report.html").read_text()
    cells = _Cells()
    cells.feed(text)
    heldout = next(row for row in cells.rows if row[:2] == ["held-out prompts", "greedy"])
    assert heldout == ["held-out prompts", "greedy", "1.56 ± 0.02", "0.371", "0.142", "0.048", "1,480", "2,310"]
    assert next(row for row in cells.rows if "bigram" in row[1])[2] == "1.21"
    assert next(row for row in cells.rows if "vLLM" in row[1])[2:7] == ["1.55", "0.366", "—", "—", "700"]
    assert next(row for row in cells.rows if row[0] == "total")[2] == "662.0"
    assert next(row for row in cells.rows if row[0] == "accuracy, depth 1")[1:] == ["0.030", "0.360", "0.310"]
    assert not cells.loads, cells.loads
    assert ["versions", "torchspec 0.0.7, commit abcdef012345, torch 9.9.9, python 3.99"] in cells.rows
    assert "1 + accepted draft tokens per verification step" in text
    assert text.count("Yes: <mark>```1 &lt; 2```</mark> &amp; so on") == 2 and "not shown" not in text
    assert "held-out prompts: 2.00 tokens a step" in text
    assert "13 samples: 12 answers of the target (temperature 0.8) to prompts of sharegpt" in text
    assert "greedy (drafts greedy); T=1, top-p 0.95 (drafts probabilistic)" in text
    assert "counting as vLLM does, has 1.551; vLLM's counters say 1.549" in html.unescape(text)
    assert text.count("<svg") == 4 and "prefers-color-scheme: dark" in text and "98 % of 38 held-out" in text


def test_figures_are_svg_with_readable_text(report: Path) -> None:
    for file in ("acceptance.svg", "slots.svg", "training.svg", "stages.svg"):
        root = ET.parse(report / file).getroot()
        words = " ".join(t for t in root.itertext())
        assert root.tag.endswith("svg") and (report / file).stat().st_size < 60_000
        assert {
            "acceptance.svg": "bigram table",
            "slots.svg": "MT-Bench",
            "training.svg": "depth 2",
            "stages.svg": "drafter",
        }[file] in words
        assert "#010203" not in (report / file).read_text()


def test_markdown_names_files_beside_it(report: Path) -> None:
    text = (report / "report.md").read_text()
    for file in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text):
        assert (report / file).is_file()
    assert "| held-out prompts | greedy | 1.56 ± 0.02 | 0.371 | 0.142 | 0.048 | 1,480 | 2,310 |" in text
    assert "````\nYes: ```1 < 2``` & so on\n````" in text


def test_the_recipe_in_the_report_is_the_recipe(report: Path) -> None:
    block = re.findall(r"```\n(.*?)\n```", (report / "report.md").read_text(), flags=re.S)[-1]
    assert yaml.safe_load(block) == {"run": {"name": "by-hand"}}
    default = Recipe().model_dump(mode="json")
    other = Recipe.model_validate({"training": {"lr": 0.5}}).model_dump(mode="json")
    assert changed(other, default) == {"training": {"lr": 0.5}}


def test_serving_command_quotes_paths() -> None:
    command = serve_command("/a b/target", "/x/export", 3, "bfloat16", "eagle3")
    assert "'/a b/target'" in command
    config = re.search(r"--speculative-config '(.*)'", command)
    assert config and json.loads(config[1]) == {"method": "eagle3", "model": "/x/export", "num_speculative_tokens": 3}


def test_what_no_vllm_serves_gets_a_reason_instead_of_a_command(inputs: dict[str, Path], tmp_path: Path) -> None:
    config = {"architectures": ["DFlash2DraftModel"], "dflash_config": {"attention_mode": "mla"}, "kv_lora_rank": 8}
    (inputs["export"] / "config.json").write_text(json.dumps(config))
    job = local_job(
        tmp_path / "r",
        inputs=inputs,
        params={"evaluation": {"k": 3, "temperature": 1.0, "top_p": 0.95}},
        runtime={"run": {"name": "latent"}},
    )
    build(job)
    text = (tmp_path / "r" / "report.md").read_text()
    assert "Stock vLLM cannot: vLLM 0.32 has no DFlash with multi-latent attention" in text
    assert "--speculative-config" not in text


def test_without_vllm_and_samples(inputs: dict[str, Path], tmp_path: Path) -> None:
    few = {k: v for k, v in EVALUATION.items() if "vllm" not in k and "baseline" not in k}
    (inputs["evaluation"] / "evaluation.json").write_text(json.dumps(few))
    (inputs["evaluation"] / "samples.jsonl").unlink()
    job = local_job(
        tmp_path / "r",
        inputs=inputs,
        params={"evaluation": {"k": 3, "temperature": 1.0, "top_p": 0.95}},
        runtime={"run": {"name": "few"}},
    )
    build(job)
    text = (tmp_path / "r" / "report.md").read_text()
    assert "in vLLM" not in text and "bigram" not in text and "Sample answers" not in text


def test_a_missing_file_is_named(inputs: dict[str, Path], tmp_path: Path) -> None:
    (inputs["drafter"] / "validation.json").unlink()
    job = local_job(tmp_path / "r", inputs=inputs, params={}, runtime={"run": {"name": "x"}})
    with pytest.raises(StageError, match=r"validation\.json"):
        build(job)


def test_a_character_of_several_tokens_goes_to_the_token_that_completes_it() -> None:
    parts = [b"a", "é".encode()[:1], "é".encode()[1:], b"z"]
    pieces = drafted_pieces([0, 1, 2, 3], [1, 0], lambda ids: b"".join(parts[i] for i in ids).decode(errors="replace"))
    assert pieces == (("aéz", False),)
    assert drafted(4, [2, 3]) == [False, True, True, False] and drafted(3, []) == [False] * 3


def test_smoothing_is_a_trailing_mean() -> None:
    values = np.random.default_rng(0).normal(size=23)
    for window in (1, 4, 40):
        expected = [values[max(0, i - window + 1) : i + 1].mean() for i in range(23)]
        np.testing.assert_allclose(smoothed(values.tolist(), window), expected, rtol=1e-12)


def test_rendering_nothing() -> None:
    assert markdown([]) == "\n" and "<title>report</title>" in page([])
