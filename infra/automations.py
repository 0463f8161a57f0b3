"""Automations of the Prefect server: a run whose machine died ends as `Crashed`, not as `Running` for ever.

A flow sends a heartbeat every 30 s (`PREFECT_FLOWS_HEARTBEAT_FREQUENCY` in `prefect.yaml`). When a run that sent one
is silent for 90 s and has not ended, the server marks it. A killed flow process is found in seconds by its worker; this
rule is for the case where worker and flow died together, as in a power cut. It looks at runs with the tag `torchspec`
only. `python -m infra.automations [--silence SECONDS]` installs it on the server of `PREFECT_API_URL`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from datetime import timedelta

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification

ZOMBIES = "torchspec: mark silent runs as crashed"
TAG = "torchspec"
SILENCE_SECONDS = 90.0
"""Three heartbeats: one that is late must not end a healthy run."""

_ENDS = {f"prefect.flow-run.{state}" for state in ("Completed", "Failed", "Cancelled", "Crashed")}


def zombie_rule(silence_seconds: float) -> AutomationCore:
    """The rule; every terminal state, or another heartbeat, calls it off."""
    return AutomationCore(
        name=ZOMBIES,
        description=f"A run that has been silent for {silence_seconds:g} s has lost its machine.",
        trigger=EventTrigger(
            after={"prefect.flow-run.heartbeat"},
            expect={"prefect.flow-run.heartbeat"} | _ENDS,
            match=ResourceSpecification({"prefect.resource.id": ["prefect.flow-run.*"]}),
            match_related=ResourceSpecification({"prefect.resource.id": [f"prefect.tag.{TAG}"]}),
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=timedelta(seconds=silence_seconds),
        ),
        actions=[ChangeFlowRunState(
            state=StateType.CRASHED, name="Crashed",
            message=f"no heartbeat for {silence_seconds:g} s: the process or its machine died; run it again and it "
                    "goes on where it stopped",
        )],
    )


def install(silence_seconds: float = SILENCE_SECONDS) -> bool:
    """Create the rule, or replace one with another silence; returns whether there was anything to do."""
    rule = zombie_rule(silence_seconds)
    with get_client(sync_client=True) as client:
        known = client.read_automations_by_name(ZOMBIES)
        if [old.description for old in known] == [rule.description]:
            return False
        for old in known:
            client.delete_automation(old.id)
        client.create_automation(rule)
    return True


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m infra.automations", description="Install the rules on the server.")
    parser.add_argument("--silence", type=float, default=SILENCE_SECONDS, help="seconds (default %(default)g)")
    install(parser.parse_args(argv).silence)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
