"""The Dockerfile without Docker: what it copies exists, stages exist, images run as a user and tell their health.

`docker/install`, the step that fetches and builds, runs by hand in a clean folder; hadolint finds nothing in the file.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ("orchestrator", "trainer", "vllm")


def instructions() -> list[tuple[str, str]]:
    """(instruction, rest) of each line, continuation lines joined."""
    text = re.sub(r"\\\n", " ", (ROOT / "docker/Dockerfile").read_text())
    return [(w, rest) for w, _, rest in (line.partition(" ") for line in text.splitlines()) if w.isupper()]


def stages() -> dict[str, tuple[str, list[tuple[str, str]]]]:
    """Stage -> (what it is from, its instructions)."""
    found: dict[str, tuple[str, list[tuple[str, str]]]] = {}
    name = ""
    for word, rest in instructions():
        if word == "FROM":
            base, name = re.fullmatch(r"(\S+) AS (\S+)", rest).groups()  # type: ignore[union-attr]
            found[name] = (base, [])
        elif name:
            found[name][1].append((word, rest))
    return found


def ignored() -> set[str]:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    return {line for line in lines if line and not line.startswith("#")}


def test_every_stage_is_from_one_that_is_above_it() -> None:
    above: list[str] = ["${PYTHON_IMAGE}"]
    for name, (base, lines) in stages().items():
        assert base in above, name
        for word, rest in lines:
            if word == "COPY" and (source := re.match(r"--from=(\S+) ", rest)):
                assert source[1] in above, rest
        above.append(name)
    assert set(IMAGES) <= set(above)


def test_every_file_that_is_copied_belongs_to_the_repository() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    copied = [rest for word, rest in instructions() if word == "COPY" and not rest.startswith("--from")]
    assert copied
    for rest in copied:
        for source in rest.split()[:-1]:
            assert any(name == source or name.startswith(f"{source}/") for name in tracked), source
            assert source not in ignored(), f"{source} is copied, but .dockerignore leaves it out"


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_runs_as_a_user_and_tells_its_health(image: str) -> None:
    _, lines = stages()[image]
    words = dict(lines)
    assert words["USER"] == "10001" and "HEALTHCHECK" in words and words["CMD"].startswith("[")
    assert words["COPY"] == f"--from=build-{image} /opt/torchspec /opt/torchspec"
    assert ("RUN", f"docker/install {image} /opt/torchspec") in stages()[f"build-{image}"][1]


def test_no_secret_is_an_argument_or_a_variable() -> None:
    for word, rest in instructions():
        assert word not in ("ARG", "ENV") or not re.search("TOKEN|SECRET|PASSWORD|ACCESS_KEY", rest)


@pytest.mark.parametrize("words", [[], ["trainer"], ["trainers", "folder"]])
def test_the_install_script_refuses_what_it_does_not_know(words: list[str], tmp_path: Path) -> None:
    done = subprocess.run([ROOT / "docker/install", *words], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.startswith("usage: docker/install orchestrator|trainer|vllm")
    assert not list(tmp_path.iterdir())
