"""Stage `benchmarks`: acceptance on ten benchmarks in five categories and on a user's own files.

Made by `torchspec evaluate RECIPE`, from the recipe's trained drafter. Every benchmark is decoded greedily and at the
recipe's temperature, with lossless verification; each of the two is a shard. Rows that repeat, or nearly repeat, a
training prompt are left out and counted. All numbers are flat in `benchmarks.json`, `benchmarks.svg` shows them,
`samples.jsonl` holds every prompt with its text and its steps.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchspec_core.data.benchmarks import BENCHMARKS, read_file
from torchspec_core.data.messages import Message
from torchspec_core.data.overlap import OverlapIndex
from torchspec_core.data.render import Renderer, load_renderer
from torchspec_core.errors import UserError
from torchspec_core.evaluation.statistics import Acceptance, acceptance
from torchspec_core.evaluation.work import Work, modes, rejected_share, write_rows
from torchspec_core.export.checkpoint import CONFIG
from torchspec_core.kinds import kind_of_export
from torchspec_core.plots.benchmarks import Measured, benchmark_bars
from torchspec_core.plots.style import standalone
from torchspec_core.stages.job import Job
from torchspec_core.targets.answers import Prompt
from torchspec_core.targets.engine import set_threads
from torchspec_core.targets.facts import read_facts, read_json

_log = logging.getLogger("torchspec.evaluation")

RESULT, SAMPLES, FIGURE = "benchmarks.json", "samples.jsonl", "benchmarks.svg"
# Two-sided 95 % of a normal law: ten prompts or more stand behind each number.
Z95 = 1.96


def build(job: Job) -> None:
    """Inputs target, prompts, export; parameters `benchmarks`, `evaluation`, `run.seed`."""
    settings, asked = job.params["evaluation"], job.params["benchmarks"]
    set_threads(job.runtime["run"]["threads"])
    facts, renderer = read_facts(job.inputs["target"]), load_renderer(job.inputs["target"])
    room = facts.max_position_embeddings - settings["max_new_tokens"] - settings["k"]
    trained = OverlapIndex(turn for r in _lines(job.inputs["prompts"] / "train.jsonl") for turn in r["turns"])
    numbers: dict[str, Any] = _meta(job)
    sets: dict[str, list[Prompt]] = {}
    for name, rows in _sets(asked, job.runtime["benchmarks"]["files"]).items():
        clean = [r for r in rows if not any(trained.match(turn) for turn in r["turns"])]
        sets[name] = _fitting(clean, renderer, room, asked["prompts"])
        numbers[f"meta.category.{name}"] = BENCHMARKS[name].category if name in BENCHMARKS else "own"
        numbers[f"meta.overlap.{name}"] = len(rows) - len(clean)
        if not sets[name]:
            raise UserError(
                f"benchmark {name}: none of its {len(rows)} rows is both unlike the training prompts and at most "
                f"{room} tokens long with evaluation.max_new_tokens={settings['max_new_tokens']}; leave it out of "
                "benchmarks.names, or lower that"
            )
    work = Work(job, facts, renderer, 2 * sum(map(len, sets.values())) * settings["max_new_tokens"])
    job.workspace.expect(2 * len(sets) + 3)
    measured: list[Measured] = []
    samples: list[dict[str, Any]] = []
    for mode in modes(settings):
        lengths = []
        for name, prompts in sets.items():
            done = work.rows(name, mode, prompts)
            found = acceptance([r["steps"] for r in done], settings["k"])
            numbers |= _flat(f"{name}.{mode.name}", found, done)
            category = numbers[f"meta.category.{name}"]
            measured.append(Measured(name, category, mode.name, found.length, Z95 * found.stderr))
            lengths.append(found.length)
            samples += done
        numbers[f"mean.{mode.name}.acceptance_length"] = sum(lengths) / len(lengths)
    work.close()
    numbers |= work.costs()
    with job.workspace.shard(RESULT) as path:
        path.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    with job.workspace.shard(FIGURE) as path:
        path.write_text(standalone(benchmark_bars(measured, settings["k"] + 1.0, caption(numbers))), encoding="utf-8")
    with job.workspace.shard(SAMPLES) as path:
        write_rows(path, samples)
    job.workspace.record(
        rows=len(samples),
        **{m.name: round(numbers[f"mean.{m.name}.acceptance_length"], 4) for m in modes(settings)},
    )


def caption(numbers: Mapping[str, Any]) -> str:
    """What a reader must know of the numbers, in one line."""
    t1 = f"T={numbers['meta.temperature']:g}, top_p {numbers['meta.top_p']:g}, drafts {numbers['meta.t1.drafting']}"
    who = f"{numbers['meta.drafter']} on {numbers['meta.target']}, K={numbers['meta.k']}"
    return f"{who}; greedy and {t1}; 95 % intervals"


def _meta(job: Job) -> dict[str, Any]:
    settings, exported = job.params["evaluation"], job.inputs["export"] / CONFIG
    config = read_json(exported)
    return {
        "meta.drafter": kind_of_export(config, where=str(exported)).name,
        "meta.target": job.params["target"]["source"],
        "meta.k": settings["k"],
        "meta.temperature": settings["temperature"],
        "meta.top_p": settings["top_p"],
        "meta.greedy.drafting": "greedy",
        "meta.t1.drafting": "probabilistic",
        "meta.t1.verification": settings["verification"],
        "meta.greedy.dtype": settings["dtype"],
        "meta.t1.dtype": settings["sampled_dtype"],
        "meta.dynamic": settings["dynamic"],
        "meta.max_new_tokens": settings["max_new_tokens"],
        "meta.definition": "1 + accepted drafts per verification step, bonus token included; slots are unconditional",
        "meta.interval": "95 %, prompts as clusters",
    }


def _sets(asked: Mapping[str, Any], paths: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """The rows of every benchmark by name; own files are named by their stem."""
    sets = {name: BENCHMARKS[name].read() for name in asked["names"]}
    for path in map(Path, paths):
        if path.stem in sets:
            raise UserError(f"benchmarks.files: two sets would be called {path.stem!r}; rename {path}")
        sets[path.stem] = read_file(path)
    return sets


def _fitting(rows: Sequence[Mapping[str, Any]], renderer: Renderer, room: int, count: int) -> list[Prompt]:
    """`count` prompts of at most `room` tokens, taken evenly from the whole set, whose order is often by topic."""
    prompts: list[Prompt] = []
    # Short steps over the whole set first; what does not fit is made up for by the rows in between.
    stride = max(1, len(rows) // count)
    order = [i for start in range(stride) for i in range(start, len(rows), stride)]
    for i in order:
        ids = renderer.prompt([Message("user", rows[i]["turns"][0])])
        if len(ids) <= room:
            prompts.append(Prompt(rows[i]["sample_id"], tuple(rows[i]["turns"]), rows[i]["source"], ids))
        if len(prompts) == count:
            break
    return prompts


def _flat(prefix: str, found: Acceptance, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        **found.flat(prefix),
        f"{prefix}.ci95_low": found.length - Z95 * found.stderr,
        f"{prefix}.ci95_high": found.length + Z95 * found.stderr,
        f"{prefix}.prompts": len(rows),
        f"{prefix}.tokens": sum(len(r["tokens"]) for r in rows),
        f"{prefix}.rejected_share": rejected_share(dict(r) for r in rows),
    }


def _lines(path: Path) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]
