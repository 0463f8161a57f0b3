"""A Prefect server and worker of their own for a test module, seen from outside: commands, HTTP, the process table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

ROOT = Path(__file__).resolve().parents[1]
ENDS = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}


def until(what: Callable[[], Any], seconds: float, why: str) -> Any:
    """The first true value of `what()`, asked for `seconds` at most."""
    deadline = time.monotonic() + seconds
    while not (value := what()):
        assert time.monotonic() < deadline, f"waited {seconds} s for {why}"
        time.sleep(0.1)
    return value


@dataclass(frozen=True)
class PrefectHome:
    """A running local server and worker under `home`, and a recipe whose results are kept under it too."""

    home: Path

    @property
    def store(self) -> Path:
        """Folder of the stages' output."""
        return self.home / "store"

    @property
    def env(self) -> dict[str, str]:
        """Environment of the commands."""
        own = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
        return {**own, "TORCHSPEC_HOME": str(self.home), "DO_NOT_TRACK": "1", "OMP_WAIT_POLICY": "PASSIVE"}

    @property
    def api(self) -> str:
        """Address of the server's API."""
        port = json.loads((self.home / "server.json").read_text())["port"]
        return f"http://127.0.0.1:{port}/api"

    def recipe(self) -> Path:
        """A recipe that differs from the defaults only in where results go."""
        path = self.home / "tiny.yaml"
        path.write_text(f"run: {{name: tiny, store: {self.store}}}\n")
        self.store.mkdir(exist_ok=True)
        return path

    def command(self, *words: str, seconds: float = 120, **env: str) -> subprocess.CompletedProcess[str]:
        """Run `python -m WORDS` in the repository."""
        return subprocess.run([sys.executable, "-m", *words], cwd=ROOT, env={**self.env, **env}, text=True,
                              capture_output=True, stdin=subprocess.DEVNULL, timeout=seconds)

    def call(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """GET, or POST `body` to, a path of the API; asks again while the database is busy, as Prefect does."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.api + path, data=data, headers={"content-type": "application/json"})

        def answered() -> Any:
            try:
                with urllib.request.urlopen(request, timeout=10) as answer:
                    return (json.loads(answer.read()),)
            except urllib.error.HTTPError as error:
                if error.code != 503:
                    raise
                return None

        return until(answered, 30, f"an answer to {path}")[0]

    def start_run(self, *overrides: str, deployment: str = "train-drafter/tiny", **parameters: Any) -> str:
        """Start a deployment; returns the run's id."""
        found = self.call(f"/deployments/name/{deployment}")
        values = {"recipe": str(self.recipe()), "overrides": list(overrides), **parameters}
        return str(self.call(f"/deployments/{found['id']}/create_flow_run", {"parameters": values})["id"])

    def run(self, run_id: str) -> dict[str, Any]:
        """The flow run."""
        found: dict[str, Any] = self.call(f"/flow_runs/{run_id}")
        return found

    def finished(self, run_id: str, seconds: float = 60) -> dict[str, Any]:
        """The flow run once it has ended."""

        def ended() -> Any:
            found = self.run(run_id)
            return found if found["state_type"] in ENDS else None

        return until(ended, seconds, f"run {run_id} to end")

    def tasks(self, run_id: str) -> dict[str, str]:
        """Stage -> state name of an ended run's tasks (the server records them a moment after the run's own state)."""

        def ended() -> Any:
            rows = self.call("/task_runs/filter", {"flow_runs": {"id": {"any_": [run_id]}}})
            return rows if all(row["state_type"] in ENDS for row in rows) else None

        return {row["name"].split("[")[0]: row["state_name"] for row in until(ended, 20, "the tasks to end")}

    def shards(self, stage: str) -> list[int]:
        """Shards of `stage` made so far, in order, repeats included."""
        path = self.store / "ran.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [row["shard"] for row in rows if row["stage"] == stage]

    def pid(self, service: str) -> int:
        """Pid of a service."""
        return int(json.loads((self.home / "pids" / f"{service}.json").read_text())["pid"])

    def processes(self, word: str) -> list[psutil.Process]:
        """Processes of this home whose command line has `word`."""
        found = []
        for process in psutil.process_iter():
            try:
                if word in " ".join(process.cmdline()) and process.environ().get("TORCHSPEC_HOME") == str(self.home):
                    found.append(process)
            except psutil.Error:
                continue
        return found


@contextmanager
def prefect_home(home: Path) -> Iterator[PrefectHome]:
    """Server, worker and the `train-drafter/tiny` deployment under `home`; all ended on exit."""
    place = PrefectHome(home)
    try:
        up = place.command("infra.local", "up")
        assert up.returncode == 0, up.stderr
        words = ("prefect", "--no-prompt", "deploy", "--all", "--prefect-file", "tests/real/tiny_prefect.yaml")
        done = place.command(*words, PREFECT_API_URL=place.api, PREFECT_HOME=str(home / "prefect"))
        assert done.returncode == 0, done.stdout + done.stderr
        yield place
    finally:
        stopped = place.command("infra.local", "stop")
        assert stopped.returncode == 0, stopped.stderr
