"""The report as a list of blocks, the same for Markdown and HTML."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from torchspec_core.config.schema import Recipe
from torchspec_core.plots.acceptance import Bar, acceptance_bars, slot_lines
from torchspec_core.plots.curves import depth_keys, training_curves
from torchspec_core.plots.stages import stage_bars
from torchspec_core.report.facts import DEFINITION, RunFacts, data_line, hardware, versions

SETS = {"heldout": "held-out prompts", "mtbench": "MT-Bench", "gsm8k": "GSM8K"}
BASELINES = {"bigram": "bigram table", "unigram": "most frequent token", "repeat": "repeat the last token"}
SAMPLES = 6


@dataclass(frozen=True)
class Heading:
    """A section title; level 1 is the page's own."""

    text: str
    level: int = 2


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str


@dataclass(frozen=True)
class Table:
    """Rows of cells under a header; cells after the first are numbers or short words."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Picture:
    """A figure: the name of its file (no folder), what it shows, its SVG text."""

    file: str
    caption: str
    svg: str


@dataclass(frozen=True)
class Code:
    """Text to copy, as it is."""

    text: str


@dataclass(frozen=True)
class Sample:
    """A prompt, the answer, and a line about the drafts in it."""

    title: str
    prompt: str
    answer: str


Block = Heading | Text | Table | Picture | Code | Sample


def number(value: Any, digits: int = 2) -> str:
    """A measured number for a table; an em dash where nothing was measured."""
    return f"{value:.{digits}f}" if isinstance(value, int | float) else "—"


def with_error(value: Any, stderr: Any) -> str:
    """`1.55 ± 0.02`, or the value alone."""
    return f"{number(value)} ± {number(stderr)}" if isinstance(stderr, int | float) else number(value)


def modes(facts: RunFacts) -> dict[str, str]:
    """Name in the keys -> how the target's tokens were chosen."""
    sampled = f"T={facts.value('evaluation', 'temperature'):g}, top-p {facts.value('evaluation', 'top_p'):g}"
    return {"greedy": "greedy", "t1": sampled}


def measured(facts: RunFacts) -> list[tuple[str, str]]:
    """The (set, mode) pairs that were measured, in the order of the page."""
    return [(s, m) for s in SETS for m in modes(facts) if f"{s}.{m}.acceptance_length" in facts.evaluation]


def compose(facts: RunFacts) -> list[Block]:
    """The page, from top to bottom."""
    return [
        Heading(f"Drafter report: {facts.name}", 1),
        *_summary(facts),
        *_acceptance(facts),
        *_training(facts),
        *_cost(facts),
        *_samples(facts),
        *_use(facts),
        *_again(facts),
    ]


def _summary(facts: RunFacts) -> list[Block]:
    greedy = facts.evaluation.get("heldout.greedy.acceptance_length")
    bigram = facts.evaluation.get("baseline.bigram.acceptance_length")
    lead = f"On prompts it never saw, the drafter lets the target emit {number(greedy)} tokens per verification step"
    lead += f"; a bigram table reaches {number(bigram)}." if bigram is not None else "."
    drafter = facts.drafter
    rows = [
        ("target", str(facts.value("target", "source"))),
        (
            "drafter",
            f"{facts.value('drafter', 'kind')}, {facts.value('drafter', 'attention')}, "
            f"hidden {drafter['hidden_size']}, "
            f"{drafter['draft_vocab_size']:,} draft tokens",
        ),
        ("data", data_line(facts)),
        ("K", f"{facts.value('evaluation', 'k')} draft tokens a step, drafted greedily"),
        ("sampling", "; ".join(modes(facts).values())),
        ("machine", "{processor}, {cores} cores, {memory_gib} GiB".format(**hardware(facts))),
        ("versions", ", ".join(f"{name} {version}" for name, version in versions(facts).items())),
    ]
    return [Text(lead), Table(("run", ""), tuple(rows))]


def _acceptance(facts: RunFacts) -> list[Block]:
    values, k, names = facts.evaluation, int(facts.value("evaluation", "k")), modes(facts)
    rows, bars = [], []
    for name, mode in measured(facts):
        key = f"{name}.{mode}"
        length, stderr = values[f"{key}.acceptance_length"], values.get(f"{key}.acceptance_length_stderr")
        rows.append(
            (
                SETS[name],
                names[mode],
                with_error(length, stderr),
                *(number(values.get(f"{key}.slot_{i}"), 3) for i in range(1, k + 1)),
                f"{values.get(f'{key}.drafts', 0):,.0f}",
                f"{values.get(f'{key}.tokens', 0):,.0f}",
            )
        )
        bars.append(Bar(f"{SETS[name]}, {names[mode]}", length, stderr, "drafter"))
    served = values.get("heldout.greedy.vllm_acceptance_length")
    if served is not None:
        rows.append((SETS["heldout"], "greedy, vLLM's counters", number(served), *("—" for _ in range(k + 2))))
    for name, label in BASELINES.items():
        length = values.get(f"baseline.{name}.acceptance_length")
        if length is not None:
            stderr = values.get(f"baseline.{name}.acceptance_length_stderr")
            rows.append(
                (
                    SETS["heldout"],
                    f"greedy, {label}",
                    with_error(length, stderr),
                    *(number(values.get(f"baseline.{name}.slot_{i}"), 3) for i in range(1, k + 1)),
                    "—",
                    "—",
                )
            )
            bars.append(Bar(label, length, stderr, "baseline"))
    blocks: list[Block] = [
        Heading("Acceptance"),
        Text(
            DEFINITION + f" K = {k}; drafts are the drafter's most likely tokens. "
            "Slot k: share of the steps in which drafts 1 to k were all accepted. ±: standard error over prompts."
        ),
        Picture(
            "acceptance.svg",
            "Acceptance length by benchmark, and trivial drafters on the held-out prompts (grey)",
            acceptance_bars(bars, 1.0 + k),
        ),
        Table(
            ("prompts", "decoding", "acceptance length", *(f"slot {i}" for i in range(1, k + 1)), "steps", "tokens"),
            tuple(rows),
        ),
    ]
    slots = {
        SETS[name]: [float(values[f"{name}.{mode}.slot_{i}"]) for i in range(1, k + 1)]
        for name, mode in measured(facts)
        if mode == "greedy" and f"{name}.{mode}.slot_{k}" in values
    }
    if slots:
        blocks.append(Picture("slots.svg", "Acceptance by slot, greedy", slot_lines(slots)))
    equal = values.get("heldout.greedy.vllm_text_equal")
    if equal is not None:
        blocks.append(
            Text(
                f"In vLLM ({facts.value('serving', 'dtype')}, greedy), the text with the drafter equals the text "
                f"without it on {100 * equal:.0f} % of {facts.value('serving', 'prompts')} held-out prompts."
            )
        )
    return blocks


def _training(facts: RunFacts) -> list[Block]:
    if not facts.curve:
        return []
    first, last = facts.curve[0], facts.curve[-1]
    depths = depth_keys(last)
    rows = [("loss", number(first["loss"]), number(last["loss"]), number(facts.validation.get("loss")))]
    rows += [
        (f"accuracy, depth {i}", number(first.get(key), 3), number(last[key], 3), number(facts.validation.get(key), 3))
        for i, key in enumerate(depths, start=1)
    ]
    text = (
        f"{last['step']:,} optimiser steps. Accuracy at depth d: the d-th draft is the target's most likely token, "
        "whatever the drafts before it; on held-out prompts a token that the draft vocabulary lacks is a miss."
    )
    return [
        Heading("Training"),
        Text(text),
        Picture(
            "training.svg", "Loss and accuracy on the training batches", training_curves(facts.curve, facts.validation)
        ),
        Table(("", "first logged", "last logged", "held-out"), tuple(rows)),
    ]


def _cost(facts: RunFacts) -> list[Block]:
    stages = facts.stages
    total = sum(stage.seconds for stage in stages)
    rows = [
        (stage.name, f"{stage.rows:,}", f"{stage.seconds:,.1f}", f"{stage.bytes / 1e6:,.1f}", stage.key[:12])
        for stage in stages
    ]
    rows.append(("total", "", f"{total:,.1f}", f"{sum(stage.bytes for stage in stages) / 1e6:,.1f}", ""))
    return [
        Heading("Time and space"),
        Text(
            "Seconds are those of making each stage's output, whenever that was; a stage that is in the store costs a "
            "later run nothing."
        ),
        Picture(
            "stages.svg",
            "Seconds and megabytes by stage",
            stage_bars([s.name for s in stages], [s.seconds for s in stages], [s.bytes / 1e6 for s in stages]),
        ),
        Table(("stage", "rows", "seconds", "MB", "key"), tuple(rows)),
    ]


def _samples(facts: RunFacts) -> list[Block]:
    chosen = facts.samples[:SAMPLES]
    blocks: list[Block] = [Heading("Sample answers")] if chosen else []
    for row in chosen:
        title = f"{SETS.get(row['set'], row['set'])}, {modes(facts).get(row['mode'], row['mode'])}"
        length = row.get("acceptance_length")
        if length is not None:
            title += f": {number(length)} tokens a step"
        blocks.append(Sample(title, row["prompt"], row["answer"]))
    return blocks


def serve_command(target: str, drafter: str, k: int, dtype: str) -> str:
    """The shell command that serves `target` with `drafter` in vLLM.

    The module and not `vllm serve`: the script of the CPU build looks for a distribution called `vllm` and finds none.
    """
    config = f'{{"method": "eagle3", "model": "{drafter}", "num_speculative_tokens": {k}}}'
    return (
        f"python -m vllm.entrypoints.openai.api_server --model {shlex.quote(target)} \\\n"
        f"  --dtype {dtype} --max-model-len 2048 --host 127.0.0.1 --port 8000 \\\n"
        f"  --speculative-config {shlex.quote(config)}"
    )


def _use(facts: RunFacts) -> list[Block]:
    target, drafter = str(facts.stage("target").path), str(facts.stage("export").path)
    k = int(facts.value("evaluation", "k"))
    return [
        Heading("Serve it"),
        Text("The export folder is all that an engine needs beside the target:"),
        Code(serve_command(target, drafter, k, str(facts.value("target", "dtype")))),
        Text(
            "On a CPU, put `VLLM_CPU_KVCACHE_SPACE=2` (GiB) and `OMP_WAIT_POLICY=PASSIVE` before it and add "
            "`--enforce-eager`. vLLM's log prints the mean acceptance length every ten seconds; the counters are at "
            "`/metrics` under `vllm:spec_decode_*`."
        ),
    ]


def changed(
    recipe: Mapping[str, Mapping[str, Any]], default: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """The fields of `recipe` that differ from the defaults, by section."""
    found: dict[str, dict[str, Any]] = {}
    for section, fields in recipe.items():
        for name, value in fields.items():
            if value != default.get(section, {}).get(name):
                found.setdefault(section, {})[name] = value
    return found


def _order(recipe: Mapping[str, Mapping[str, Any]], sections: Sequence[str]) -> dict[str, dict[str, Any]]:
    return {name: dict(recipe[name]) for name in sections if name in recipe}


def _again(facts: RunFacts) -> list[Block]:
    default = Recipe().model_dump(mode="json")
    recipe = _order(changed(facts.recipe, default), list(default))
    recipe.setdefault("run", {})["name"] = facts.name
    text = yaml.safe_dump(_order(recipe, list(default)), sort_keys=False, allow_unicode=True, width=110)
    return [
        Heading("Do it again"),
        Text(
            "Save this as `recipe.yaml` and type `torchspec run recipe.yaml`. Fields that are not named have their "
            "default; the stage keys above are the same for the same recipe, files and code."
        ),
        Code(text.rstrip()),
    ]
