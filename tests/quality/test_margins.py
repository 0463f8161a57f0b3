"""Every kind of drafter, trained on the real target's own answers, against the trivial drafters on held-out prompts.

`make quality`: the quickstart's pipeline with twice its prompts, shared by all recipes; about ten minutes a recipe on
two cores after the first one, resumed where it was interrupted. The margin is printed with its standard error.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STORE = ROOT / ".torchspec" / "quality"
CHANGES = (
    f"run.store={STORE}",
    "data.prompts=[{name: sharegpt, rows: 2400}]",
    "training.epochs=1.6",
    "evaluation.sets=[heldout]",
    "serving.vllm=false",
)

pytestmark = [pytest.mark.real, pytest.mark.timeout(7200)]


RECIPES = ("quickstart", "eagle3_mla", "dflash", "dflash2", "dspark", "dflash2_mla", "dspark_mla")


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_trained_drafter_beats_the_trivial_ones(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    name = f"run.name={recipe}-margin"
    command = [str(Path(sys.executable).with_name("torchspec")), "run", f"configs/{recipe}.yaml", name, *CHANGES]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    report = Path(done.stdout.strip().splitlines()[-1])
    manifest = json.loads((report.parent / "manifest.json").read_text())
    (evaluation,) = (STORE / "evaluation").glob(f"*-{manifest['inputs']['evaluation'][:12]}")
    numbers = json.loads((evaluation / "evaluation.json").read_text())
    length, error = (numbers[f"heldout.greedy.acceptance_length{end}"] for end in ("", "_stderr"))
    with capsys.disabled():
        print(f"\n{recipe}: acceptance length {length:.3f} ± {error:.3f}")
    for baseline in ("unigram", "bigram", "repeat"):
        other, spread = (numbers[f"baseline.{baseline}.acceptance_length{end}"] for end in ("", "_stderr"))
        with capsys.disabled():
            print(f"  above {baseline} {other:.3f}: {length - other:+.3f} ± {(error**2 + spread**2) ** 0.5:.3f}")
        assert length > other
