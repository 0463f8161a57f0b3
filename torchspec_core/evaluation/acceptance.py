"""Stage `evaluation`: how many drafted tokens the target accepts on prompts that nobody trained on.

Every set is decoded twice by the reference decoder: greedily, and at the recipe's temperature and top_p with lossless
verification and drafts drawn from the drafter's own distribution (the sampling of drafts changes acceptance, so it is
recorded beside it). Each set and mode is a shard of its own, so an interrupted evaluation continues at the next one.
The trivial drafters are replayed along the greedy text, which is what verification would have made of any drafter.
vLLM then serves the exported drafter, and its counters stand beside ours.

All numbers are flat in `evaluation.json`; `samples.jsonl` has every prompt with its text and its steps.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

from torchspec_core.data.render import Renderer, load_renderer
from torchspec_core.data.tokenset import TokenSet
from torchspec_core.decoding.draft import baseline_tables
from torchspec_core.errors import UserError
from torchspec_core.evaluation.served import as_vllm, served
from torchspec_core.evaluation.statistics import acceptance, replay
from torchspec_core.evaluation.work import GREEDY, SAMPLED, Work, modes, rejected_share, write_rows
from torchspec_core.export.checkpoint import CONFIG
from torchspec_core.kinds import unserved
from torchspec_core.stages.job import Job
from torchspec_core.targets.answers import Prompt, read_prompts
from torchspec_core.targets.engine import set_threads
from torchspec_core.targets.facts import TargetFacts, read_facts, read_json

_log = logging.getLogger("torchspec.evaluation")

RESULT, SAMPLES = "evaluation.json", "samples.jsonl"
# The set whose greedy text the baselines replay and vLLM serves.
SERVED_SET = "heldout"


def build(job: Job) -> None:
    """Inputs target, prompts, tokens, export; parameters `evaluation`, `serving`, `run.seed`."""
    evaluation, serving = job.params["evaluation"], job.params["serving"]
    set_threads(job.runtime["run"]["threads"])
    facts = read_facts(job.inputs["target"])
    renderer = load_renderer(job.inputs["target"])
    sets = {name: _prompts(job, name, renderer, facts) for name in evaluation["sets"]}
    refused = unserved(read_json(job.inputs["export"] / CONFIG)) if serving["vllm"] else None
    serve = serving["vllm"] and SERVED_SET in sets and refused is None
    sampled = serve and serving["sampled"]
    served_prompts = sets[SERVED_SET][: serving["prompts"]] if sampled else []
    total = 2 * sum(map(len, sets.values())) * evaluation["max_new_tokens"]
    work = Work(job, facts, renderer, total + len(served_prompts) * serving["max_new_tokens"])
    job.workspace.expect(2 * len(sets) + bool(serve) + sampled + 2)
    rows = {
        (name, mode.name): work.rows(name, mode, prompts)
        for mode in modes(evaluation)
        for name, prompts in sets.items()
    }
    as_served = work.rows(SERVED_SET, as_vllm(job), served_prompts) if sampled else []
    work.close()

    numbers: dict[str, Any] = {
        "meta.k": evaluation["k"],
        "meta.temperature": evaluation["temperature"],
        "meta.top_p": evaluation["top_p"],
        f"meta.{GREEDY}.dtype": evaluation["dtype"],
        f"meta.{SAMPLED}.dtype": evaluation["sampled_dtype"],
        f"meta.{GREEDY}.drafting": "greedy",
        f"meta.{SAMPLED}.drafting": "probabilistic",
        f"meta.{SAMPLED}.verification": evaluation["verification"],
        "meta.max_new_tokens": evaluation["max_new_tokens"],
        "meta.dynamic": evaluation["dynamic"],
        "meta.definition": "1 + accepted drafts per verification step, bonus token included; slots are unconditional",
        **work.costs(),
    }
    for (name, mode), done in rows.items():
        numbers |= acceptance([row["steps"] for row in done], evaluation["k"]).flat(f"{name}.{mode}")
        numbers |= {
            f"{name}.{mode}.prompts": len(done),
            f"{name}.{mode}.tokens": sum(len(row["tokens"]) for row in done),
            f"{name}.{mode}.rejected_share": rejected_share(done),
        }
    greedy = rows.get((SERVED_SET, GREEDY), [])
    if greedy:
        numbers |= _baselines(job, facts, greedy)
        if serve:
            numbers |= served(job, SERVED_SET, greedy, as_served)
    if refused is not None:
        _log.warning("not served in vLLM: %s", refused)
        numbers["meta.vllm.skipped"] = f"{refused}, so only this project's decoder measured it"
    with job.workspace.shard(RESULT) as path:
        path.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    with job.workspace.shard(SAMPLES) as path:
        write_rows(path, (row for done in rows.values() for row in done))
    headline = {
        name: value
        for name, value in numbers.items()
        if name.endswith("acceptance_length") and not isinstance(value, str)
    }
    job.workspace.record(
        rows=sum(map(len, rows.values())), **{name.replace(".", "_"): round(v, 4) for name, v in headline.items()}
    )
    _log.info("acceptance lengths: %s", ", ".join(f"{name} {value:.3f}" for name, value in headline.items()))


def _prompts(job: Job, name: str, renderer: Renderer, facts: TargetFacts) -> list[Prompt]:
    """The first prompts of a set that fit the target's context together with their answer."""
    settings = job.params["evaluation"]
    room = facts.max_position_embeddings - settings["max_new_tokens"] - settings["k"]
    path = job.inputs["prompts"] / f"{name}.jsonl"
    fitting = [prompt for prompt in read_prompts(path, renderer) if len(prompt.token_ids) <= room]
    if not fitting:
        raise UserError(
            f"{path}: no prompt fits the target's context of {facts.max_position_embeddings} tokens with "
            f"evaluation.max_new_tokens={settings['max_new_tokens']}; lower that, or leave the set out."
        )
    return fitting[: settings["prompts"]]


def _baselines(job: Job, facts: TargetFacts, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Acceptance of the trivial drafters on the greedy texts, their tables from the supervised training tokens."""
    tokens = TokenSet(job.inputs["tokens"])
    samples = (tokens.get(i) for i in range(len(tokens)))
    tables = baseline_tables(((sample.input_ids, sample.loss_mask) for sample in samples), facts.vocab_size)
    k = job.params["evaluation"]["k"]
    numbers: dict[str, Any] = {}
    for name, table in tables.items():
        steps = [replay(row["tokens"], row["finish"] == "stop", table.tolist(), k) for row in rows]
        numbers |= acceptance(steps, k).flat(f"baseline.{name}")
    return numbers
