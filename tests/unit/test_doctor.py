"""`torchspec doctor`: in a bare environment, with servers that answer or do not, and as a condition of a script."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import threading
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchspec_core import doctor
from torchspec_core.cli import main

ROOT = Path(__file__).resolve().parents[2]
CLOSED = "http://127.0.0.1:9"


@pytest.fixture
def refusing() -> Iterator[str]:
    """A server that says 403 to everything, as S3 does to a stranger."""

    class Refuse(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(403)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = http.server.HTTPServer(("127.0.0.1", 0), Refuse)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def rows(**environ: str) -> dict[str, doctor.Row]:
    return {row.name: row for row in doctor.check(environ, quick=True)}


def test_a_bare_environment_names_everything_that_is_missing_and_the_command(tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", with_pip=False)
    python = tmp_path / "bare/bin/python"
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
    done = subprocess.run([python, "-m", "torchspec_core.doctor"], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and not done.stderr
    lines = done.stdout.splitlines()
    for name in doctor.LIBRARIES:
        place = next(i for i, line in enumerate(lines) if line.split()[:2] == ["MISSING", name])
        assert "make setup" in lines[place + 1]
    text = done.stdout
    assert "no vLLM here" in text and "differ: " in text and "mooncake-transfer-engine-non-cuda" in text
    kinds = {"ok", "MISSING", "absent"}
    assert all(row.split()[0] in kinds or row.startswith(" " * 11) for row in lines)


def test_what_is_not_ok_says_what_to_do() -> None:
    found = doctor.check({"AWS_ENDPOINT_URL": CLOSED, "PREFECT_API_URL": f"{CLOSED}/api"}, quick=True)
    assert all(row.remedy for row in found if not row.ok)
    assert {"python", "cores", "memory", "disk", "GPUs", "lock", "engine", "pipeline parallel", "Mooncake libraries",
            "S3", "Prefect server"} <= {row.name for row in found}  # fmt: skip


def test_servers_that_are_named_must_answer(refusing: str) -> None:
    up = rows(AWS_ENDPOINT_URL=refusing, PREFECT_API_URL=f"{refusing}/api")
    assert up["S3"].ok and up["Prefect server"].ok
    down = rows(AWS_ENDPOINT_URL=CLOSED, PREFECT_API_URL=f"{CLOSED}/api")
    for name in ("S3", "Prefect server"):
        assert not down[name].ok and down[name].needed and CLOSED in down[name].detail
    assert "unset PREFECT_API_URL" in down["Prefect server"].remedy
    none = rows()
    assert not none["S3"].needed and none["Prefect server"].ok


def test_a_script_can_require_a_row(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = [doctor.Row("S3", False, "none", "set it", needed=False), doctor.Row("python", True, "3.11")]
    monkeypatch.setattr(doctor, "check", lambda quick: found)
    assert main(["doctor"]) == 0
    assert main(["doctor", "--require", "s3"]) == 1
    assert main(["doctor", "--require", "gold"]) == 2
    assert "there is no row 'gold'; the rows are S3, python" in capsys.readouterr().err
    assert main(["doctor", "--json", "--require", "S3"]) == 1
    assert [(row["name"], row["needed"]) for row in json.loads(capsys.readouterr().out)] == [
        ("S3", True), ("python", True)]  # fmt: skip


def test_the_lock_is_compared_by_version(tmp_path: Path) -> None:
    import yaml

    lock = tmp_path / "lock.txt"
    lock.write_text(f"# a comment\nPyYAML=={yaml.__version__}\npytest==0.0.1\nno-such-package==1.0\n")
    wrong = doctor.lock_differences(lock)
    assert wrong == [f"pytest {pytest.__version__} (locked 0.0.1)", "no-such-package absent (locked 1.0)"]


def test_an_engine_that_cannot_be_imported_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vllm.py").write_text("raise ImportError('libcuda.so.1 is missing')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    row = doctor._engine(quick=False)
    assert not row.ok and row.detail == "import fails: ImportError: libcuda.so.1 is missing"
