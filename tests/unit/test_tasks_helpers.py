"""What the tasks, flows and local services compute without a server: tables, images, bands, names, addresses."""

from __future__ import annotations

import base64
import socket
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID

import pytest

from flows.naming import describe
from infra import services
from tasks.common import open_run, summary_rows
from tasks.evaluation import acceptance_rows
from tasks.report import MARKDOWN_LIMIT, inline_images
from torchspec_core.errors import StageError, UserError
from torchspec_core.stages import StageRef

ROOT = Path(__file__).resolve().parents[2]


def test_flows_load_neither_torch_nor_vllm_nor_dask() -> None:
    code = ("import sys, flows.train_drafter, flows.nightly\n"
            "print(sorted({'torch', 'vllm', 'transformers', 'dask', 'distributed', 'matplotlib'} & set(sys.modules)))")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.stdout.strip() == "[]", done.stderr


def test_acceptance_rows_group_flat_keys() -> None:
    flat = {"heldout.greedy.acceptance_length": 1.5, "heldout.greedy.slot_1": 0.4,
            "baseline.bigram.acceptance_length": 1.1, "heldout.greedy.vllm_text_equal": 1.0, "prompts": 40}
    assert acceptance_rows(flat) == [
        {"measured": "heldout.greedy", "acceptance_length": 1.5, "slot_1": 0.4, "vllm_text_equal": 1.0},
        {"measured": "baseline.bigram", "acceptance_length": 1.1},
    ]


def test_images_are_inlined_and_large_or_missing_ones_named(tmp_path: Path) -> None:
    (tmp_path / "small.svg").write_text("<svg/>")
    (tmp_path / "large.svg").write_text("x" * MARKDOWN_LIMIT)
    shown = inline_images("![b](large.svg) ![a](small.svg) ![c](none.svg) ![d](https://x/y.svg)", tmp_path)
    inlined = base64.b64encode(b"<svg/>").decode()
    assert shown == (f"b: `{tmp_path}/large.svg` ![a](data:image/svg+xml;base64,{inlined}) c: `{tmp_path}/none.svg` "
                     "![d](https://x/y.svg)")


def test_summary_names_the_same_facts_for_every_stage() -> None:
    ref = StageRef("tokens", "ab" * 16, Path("/s/tokens/a-abab"), 3, 400, 1.234, True, "same key", {"padding": 0.1})
    assert {row["fact"]: row["value"] for row in summary_rows(ref)} == {
        "key": "ab" * 16, "state": "cached", "reason": "same key", "folder": "/s/tokens/a-abab", "rows": 3,
        "bytes": 400, "seconds": 1.23, "padding": 0.1,
    }


def test_run_name_says_recipe_model_drafter_changes_and_time(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("target: {source: 'hub:org/Model-1B@main'}\n")
    now = datetime(2026, 11, 29, 22, 30)
    named = describe({"recipe": str(recipe), "overrides": ["training.lr=0.1"]}, now)
    assert named == "mine: Model-1B, eagle3, training.lr=0.1, Nov 29 22:30"
    assert describe({"recipe": "configs/none.yaml", "overrides": None}, now) == "none: Nov 29 22:30"


def test_unknown_stage_to_refresh_is_refused() -> None:
    with pytest.raises(UserError, match="tokenz.*target, prompts, answers"):
        open_run("configs/quickstart.yaml", [], ["tokenz"])


def test_local_server_keeps_its_port_and_a_named_one_is_taken_as_it_is(tmp_path: Path) -> None:
    first = services.locate({}, tmp_path)
    assert services.locate({}, tmp_path) == first
    assert not first.named and first.ui == first.api.removesuffix("/api")
    named = services.locate({"PREFECT_API_URL": "https://prefect.example/api/"}, tmp_path)
    assert named.named and named.api == "https://prefect.example/api"


def test_something_that_is_no_prefect_server_is_not_healthy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        assert not services.healthy(f"http://127.0.0.1:{mute.getsockname()[1]}/api", seconds=0.2)


def test_telemetry_is_off_and_the_home_is_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_WORKER_QUERY_SECONDS", "7")
    settings = services.environment(services.locate({}, tmp_path))
    assert settings["PREFECT_SERVER_ANALYTICS_ENABLED"] == "false" and settings["DO_NOT_TRACK"] == "1"
    assert settings["PREFECT_HOME"] == str(tmp_path / "prefect")
    assert settings["PREFECT_WORKER_QUERY_SECONDS"] == "7"


def test_following_ends_when_the_worker_died_before_the_run_started(monkeypatch: pytest.MonkeyPatch) -> None:
    from infra import client

    class Server:
        """One run that nobody starts."""

        def read_flow_run(self, run_id: UUID) -> SimpleNamespace:
            return SimpleNamespace(state=None, start_time=None)

        def read_logs(self, *args: object, **options: object) -> list[str]:
            return []

        def read_artifacts(self, **options: object) -> list[str]:
            return []

    monkeypatch.setattr(client, "GONE_SECONDS", 0.05)
    with pytest.raises(StageError, match="the worker ended before the run started; type the same command again"):
        list(client.follow(cast(Any, Server()), UUID(int=1), interval=0.01, served=lambda: False))


def test_counts_of_a_tokens_stage_become_a_table() -> None:
    from tasks.tokens import count_rows

    counts = {
        "rows_in": 9, "rows": 7, "tokens": 70, "supervised": 30, "truncated": 1, "rejected": {"turn 1 is empty": 1},
        "filtered": {"duplicate sample": 1}, "by_source": {"chat/x": {"rows": 7, "tokens": 70, "supervised": 30}},
    }  # fmt: skip
    table = {row["what"]: (row["count"], row["tokens"], row["supervised"]) for row in count_rows(counts)}
    assert table["rows in"] == (9, "", "")
    assert table["rejected: turn 1 is empty"] == table["filtered: duplicate sample"] == (1, "", "")
    assert table["chat/x"] == (7, 70, 30)
