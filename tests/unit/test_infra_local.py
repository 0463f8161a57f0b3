"""`python -m infra.local demo` refuses a recipe that cannot run before it starts a server."""

from __future__ import annotations

import pytest

from infra import local


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
