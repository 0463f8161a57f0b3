"""Stage `report`: reads what the other stages recorded, writes `report.json`, `report.md`, `report.html` and the
figures.
"""

from __future__ import annotations

import json

from torchspec_core.plots.style import standalone
from torchspec_core.report.document import Picture, compose
from torchspec_core.report.facts import flat, gather
from torchspec_core.report.render import markdown, page
from torchspec_core.stages.job import Job


def build(job: Job) -> None:
    """Write the report folder; `report.json` is flat: `heldout.greedy.acceptance_length`, `seconds.total`, `meta.*`,
    ...
    """
    facts = gather(job)
    numbers, blocks = flat(facts), compose(facts)
    files = {block.file: standalone(block.svg) for block in blocks if isinstance(block, Picture)}
    files["report.json"] = json.dumps(numbers, indent=1, sort_keys=True) + "\n"
    files["report.md"] = markdown(blocks)
    files["report.html"] = page(blocks)
    for name, text in files.items():
        with job.workspace.shard(name) as path:
            path.write_text(text, encoding="utf-8")
    job.workspace.record(rows=len(numbers), figures=sum(isinstance(block, Picture) for block in blocks))
