"""The house rules that a machine can check: who may import whom, what loads quickly, what the pages promise."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torchspec_core", "tasks", "flows", "infra")
HEAVY = ("torch", "vllm", "transformers", "prefect", "dask", "distributed", "pyarrow", "numpy", "matplotlib")

GROUND = {"errors", "config", "stages", "processes", "data", "targets", "store", "drafters"}
ROOMS = {
    "capture": GROUND,
    "objectives": {"drafters"},
    "training": GROUND | {"objectives"},
    "decoding": {"errors", "drafters", "targets"},
    "export": {"errors", "stages", "drafters", "targets"},
    "evaluation": GROUND | {"decoding", "export", "plots"},
    "plots": set(),
    "offline": GROUND,
    "report": GROUND | {"plots"},
    "nightly": GROUND | {"plots"},
}
"""Room of the core -> the rooms it may import; the ground floor may import the ground floor."""


def imported(path: Path) -> set[str]:
    """Every module that a file names in an import, also inside functions."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{name.name}" for name in node.names}
    return found


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def roots(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imported(path)}


def room_edges() -> dict[str, dict[str, list[str]]]:
    """Room -> room it imports -> the files that do."""
    edges: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for path in sources("torchspec_core"):
        parts = path.relative_to(ROOT / "torchspec_core").parts
        if len(parts) < 2:
            continue
        for name in imported(path):
            other = name.split(".")[1] if name.startswith("torchspec_core.") else parts[0]
            if other != parts[0] and ((ROOT / "torchspec_core" / other).exists() or other == "errors"):
                edges[parts[0]][other].append(str(path.relative_to(ROOT)))
    return edges


@pytest.mark.parametrize(
    ("package", "never"),
    [
        ("torchspec_core", {"prefect", "prefect_dask", "tasks", "flows", "infra"}),
        ("tasks", {"flows", "infra", "torch", "vllm", "numpy"}),
        ("flows", {"infra", "torch", "vllm", "numpy", "pyarrow", "dask"}),
    ],
)
def test_arrows_between_packages(package: str, never: set[str]) -> None:
    wrong = {str(path): roots(path) & never for path in sources(package) if roots(path) & never}
    assert not wrong


def test_arrows_between_rooms() -> None:
    wrong = []
    for room, others in room_edges().items():
        allowed = GROUND if room in GROUND else ROOMS[room]
        wrong += [f"{room} -> {other}: {files}" for other, files in others.items() if other not in allowed]
    assert not wrong


def test_no_circles_between_rooms() -> None:
    edges = {room: set(others) for room, others in room_edges().items()}
    while True:  # take away what imports none of the rest, or is imported by none of it; a circle stays
        wanted = set().union(*edges.values())
        ends = [room for room, others in edges.items() if not others & edges.keys() or room not in wanted]
        if not ends:
            break
        for room in ends:
            del edges[room]
    assert not edges


@pytest.mark.parametrize("room", ["drafters", "objectives"])
def test_the_maths_does_no_input_or_output(room: str) -> None:
    for path in sources(f"torchspec_core/{room}"):
        assert not roots(path) & {"os", "pathlib", "io", "shutil", "subprocess", "safetensors", "pyarrow"}, path
        calls = {
            node.func.id
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        assert not calls & {"open", "print"}, path


def test_dask_is_imported_only_inside_functions_of_data() -> None:
    for path in sources("torchspec_core"):
        tree = ast.parse(path.read_text())
        top = {name.name.split(".")[0] for node in tree.body if isinstance(node, ast.Import) for name in node.names}
        top |= {node.module.split(".")[0] for node in tree.body if isinstance(node, ast.ImportFrom) and node.module}
        assert not top & {"dask", "distributed"}, path
        if roots(path) & {"dask", "distributed"}:
            assert path.relative_to(ROOT / "torchspec_core").parts[0] == "data", path


def loaded_after(statement: str) -> set[str]:
    """Top-level modules that a fresh interpreter has loaded after `statement`."""
    code = f"{statement}\nimport sys\nprint(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize("module", ["config.load", "stages.run", "processes", "pipeline", "cli"])
def test_light_modules_load_no_heavy_library(module: str) -> None:
    assert not loaded_after(f"import torchspec_core.{module}") & set(HEAVY)


def test_every_module_of_the_core_loads_without_prefect_and_dask() -> None:
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in sources("torchspec_core")
        if path.name not in ("__main__.py", "vllm_worker.py")  # the latter is vLLM's worker, which vLLM loads
    ]
    assert not loaded_after("\n".join(f"import {name}" for name in modules)) & {
        "prefect",
        "dask",
        "distributed",
        "vllm",
    }


def texts() -> Iterator[tuple[str, str]]:
    """Path and text of every file that belongs to the repository."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\n")
    for name in filter(None, listed):
        path = ROOT / name
        if path.suffix not in (".png", ".safetensors", ".arrow") and path.is_file():
            yield name, path.read_text(encoding="utf-8")


def test_no_loose_ends_and_no_private_paths() -> None:
    loose = re.compile(r"\b(TO" r"DO|FIX" r"ME|XX" r"X|HA" r"CK)\b|/opt" r"/ts|/work" r"/shared")
    assert [(name, found.group()) for name, text in texts() if (found := loose.search(text))] == []


def test_modules_are_short_and_say_what_they_are_for() -> None:
    for package in PACKAGES:
        for path in sources(package):
            text = path.read_text(encoding="utf-8")
            assert text.count("\n") < 400, path
            assert not text.strip() or ast.get_docstring(ast.parse(text)), path


def test_recipes_load() -> None:
    from torchspec_core.config.load import load_recipe

    recipes = sorted((ROOT / "configs").glob("*.yaml"))
    assert {path.stem for path in recipes} >= {"quickstart", "smoke", "eagle3_1h", "dflash", "dflash2", "dspark"}
    for path in recipes:
        recipe = load_recipe(path, []).recipe
        assert recipe.run.name != "run", f"{path} has no run.name"
    assert load_recipe(ROOT / "configs/smoke.yaml", []).recipe.target.source == "random:tiny-llama"


def test_make_targets_that_the_pages_name_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.M))
    named: set[str] = set()
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / ".ci/run"]:
        named |= set(re.findall(r"(?:^|`|exec .*)make ([a-z]+)", page.read_text(), flags=re.M))
    assert {"demo", "test", "unit", "stop"} <= named <= targets


def test_links_in_the_pages_lead_somewhere() -> None:
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} names {target}"


def test_commands_that_the_pages_name_exist() -> None:
    from torchspec_core.cli import _parser

    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        for line in re.findall(r"^torchspec (.+?)(?: +#.*)?$", page.read_text(), flags=re.M):
            words = ["target" if word == "STAGE" else word for word in line.split()]
            assert _parser().parse_args(words), line


def test_recipe_page_is_up_to_date() -> None:
    from scripts.recipe_docs import PAGE, page

    text = PAGE.read_text(encoding="utf-8")
    assert page(text) == text, "run `python -m scripts.recipe_docs`"


def test_pins_are_exact_and_material_has_hashes() -> None:
    for name in ("cpu", "dev", "materials"):
        lines = [
            line for line in (ROOT / f"requirements/{name}.txt").read_text().splitlines() if line and line[0] != "#"
        ]
        assert len({line.split("==")[0].lower() for line in lines}) == len(lines) > 5
        for line in lines:
            assert re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+]+( --hash=sha256:[0-9a-f]{64})?", line), line
            assert ("--hash" in line) == (name == "materials"), line
