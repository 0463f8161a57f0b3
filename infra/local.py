"""Services on this machine: `python -m infra.local up | deploy | demo [DEPLOYMENT] | follow RUN | s3 | mooncake |
status | stop`.

`demo` starts what is missing (server, worker), deploys what has changed, starts the deployment
(`train-drafter/quickstart` unless another is named), follows it here, and ends with the address of the run in the UI
and, as its last line, the path of the report. Ctrl-C stops only the following. Exit codes: 0 done, 1 the run failed,
2 a mistake to mend, 130 interrupted. `s3` and `mooncake` start a server for hidden states and print its address.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from infra import services, stores
from infra.services import Place
from torchspec_core.errors import StageError, UserError

if TYPE_CHECKING:
    from prefect.client.schemas.objects import FlowRun, Log

DEMO = "train-drafter/quickstart"
_STORES = {"s3": stores.start_s3, "mooncake": stores.start_mooncake}


def _say(text: str = "") -> None:
    print(text, flush=True)


def up(environ: dict[str, str] | None = None) -> Place:
    """Start what is missing; returns where it is."""
    started = time.monotonic()
    place, fresh = services.ensure_server(services.locate(environ or dict(os.environ)))
    os.environ.update(services.environment(place))
    state = f"started in {time.monotonic() - started:.1f} s" if fresh else "running"
    _say(f"Prefect server {state}: {place.ui}")
    if services.ensure_worker(place):
        from infra import automations, client

        automations.install()
        with client.connect() as server:
            client.ensure_pools(server)
            if not place.named and (lost := client.bury_lost_runs(server)):
                _say(f"{lost} unfinished run(s) had lost their worker and are marked Crashed")
        _say(f"Prefect worker started, log {place.log(services.WORKER)}")
    return place


def _deploy(place: Place) -> None:
    from infra import client

    with client.connect() as server:
        _say("deployments registered" if client.deploy(place, server) else "deployments unchanged")


def _follow(place: Place, run: FlowRun, ours: bool = False) -> int:
    """Show a run until it ends; returns the exit code. ours: it waits for the worker of this machine."""
    from infra import client

    live, page = sys.stdout.isatty(), f"{place.ui}/runs/flow-run/{run.id}"
    shown = ""

    def served() -> bool:
        return not ours or place.pid(services.WORKER) is not None

    try:
        with client.connect() as server:
            for kind, what in client.follow(server, run.id, served=served):
                if kind == "end":
                    run = what
                elif kind == "log" and _worth_showing(what):
                    line = what.message.splitlines()[0] if what.message else ""  # the traceback of a bug is in the UI
                    _say(("\r\x1b[2K" if live else "") + f"{client.local_time(what.timestamp)}  {line}")
                elif kind == "progress" and live and what != shown:
                    shown = what
                    print(f"\r\x1b[2K          {what[:120]}", end="", flush=True)
    except KeyboardInterrupt:
        _say(f"\nThe run goes on in the background: {page}\n"
             f"  see it again   python -m infra.local follow {run.id}\n"
             f"  cancel it      PREFECT_API_URL={place.api} prefect flow-run cancel {run.id}\n"
             "  stop it all    make stop   (run `make demo` later and it goes on where it stopped)")
        return 130
    state = run.state
    assert state is not None
    message = state.message or ""
    if not state.is_completed():
        _say(f"The run ended {state.name}: {page}")
        print(message, file=sys.stderr, flush=True)
        return 1
    _say(f"The run in the UI: {page}")
    _say(message.rpartition("report: ")[2] or message)
    return 0


def _worth_showing(line: Log) -> bool:
    """The stages' own lines, and what went wrong; the end itself is told from the run's state."""
    if line.name.startswith("torchspec"):
        return True
    own = line.name in ("prefect.flow_runs", "prefect.task_runs", "prefect.engine")
    return own and line.level >= logging.WARNING and not line.message.startswith("Finished in state")


def check_recipe(name: str, overrides: Sequence[str]) -> None:
    """Refuse at once what a run of deployment `name` would refuse; raises `UserError`."""
    import yaml

    from torchspec_core.config.load import load_recipe
    from torchspec_core.pipeline import check_run, open_store, plan

    listed = yaml.safe_load((services.ROOT / "prefect.yaml").read_text())["deployments"]
    for deployment in listed:
        if deployment["name"] == name.rpartition("/")[2]:
            recipe = load_recipe(services.ROOT / deployment["parameters"]["recipe"], overrides).recipe
            store = open_store(recipe)
            check_run(recipe, plan(recipe, store), store)


def demo(name: str, overrides: list[str]) -> int:
    """Start what is missing, run deployment `name`, follow it."""
    check_recipe(name, overrides)
    place = up()
    from infra import client

    _deploy(place)
    with client.connect() as server:
        run, new = client.start_run(server, name, overrides)
    how = "prefect deployment run" if new else "already in progress, following"
    _say(f"{how} {name}: {place.ui}/runs/flow-run/{run.id}")
    return _follow(place, run, ours=True)


def _follow_id(run_id: str) -> int:
    place = services.locate(os.environ)
    if not services.healthy(place.api):
        raise UserError(f"no Prefect server answers at {place.api}; start it with `python -m infra.local up`")
    os.environ.update(services.environment(place))
    from uuid import UUID

    from prefect.exceptions import ObjectNotFound

    from infra import client

    try:
        with client.connect() as server:
            run = server.read_flow_run(UUID(run_id))
    except (ValueError, ObjectNotFound) as error:
        raise UserError(f"the server at {place.api} has no run {run_id!r}; see {place.ui}/runs") from error
    return _follow(place, run)


def _home() -> Path:
    return Path(os.environ.get("TORCHSPEC_HOME") or services.ROOT / ".torchspec")


def _store(start: Callable[[Path], stores.Server]) -> int:
    """Start a server for hidden states and say how to use it."""
    server = start(_home())
    _say(f"process {server.pid}, log {server.log}")
    for name, value in server.environment.items():
        if name not in os.environ:
            _say(f"export {name}={value}")
    _say(f"store.url={server.url}")
    return 0


def _stop() -> int:
    ours = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}
    ended = services.stop(services.locate(ours)) + stores.stop(_home())
    _say(f"stopped: {', '.join(ended)}" if ended else "nothing was running")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m infra.local", description="Prefect on this machine.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("up", help="start the server and the worker if they do not run")
    commands.add_parser("deploy", help="up, then register the deployments of prefect.yaml")
    run = commands.add_parser("demo", help="up, deploy, run a deployment and follow it")
    run.add_argument("deployment", nargs="?", default=DEMO, help=f"default {DEMO}")
    run.add_argument("overrides", nargs="*", metavar="section.key=value", help="changes to the recipe")
    commands.add_parser("follow", help="follow a run in this terminal").add_argument("run")
    commands.add_parser("s3", help="start an S3 server for hidden states, print its address")
    commands.add_parser("mooncake", help="start a Mooncake master for hidden states, print its address")
    commands.add_parser("status", help="what runs, and where")
    commands.add_parser("stop", help="end what was started here")
    args = parser.parse_args(argv)
    try:
        if args.command == "up":
            up()
        elif args.command == "deploy":
            _deploy(up())
        elif args.command == "demo":
            return demo(args.deployment, args.overrides)
        elif args.command == "follow":
            return _follow_id(args.run)
        elif args.command in _STORES:
            return _store(_STORES[args.command])
        elif args.command == "stop":
            return _stop()
        else:
            for name, text in [*services.status(services.locate(os.environ)), *stores.status(_home())]:
                _say(f"{name:<15} {text}")
        return 0
    except UserError as error:
        print(f"torchspec: {error}", file=sys.stderr)
        return 2
    except StageError as error:
        print(f"torchspec: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        _say("\ninterrupted; `make demo` goes on where it stopped, `make stop` ends the services")
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
