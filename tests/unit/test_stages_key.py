"""Canonical JSON and stage keys against hashes of literal texts."""

from __future__ import annotations

import enum
import hashlib
import subprocess
import sys
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import pytest

from torchspec_core.stages.canonical import CanonicalError, canonical_json
from torchspec_core.stages.spec import StageSpec


class Colour(enum.Enum):
    RED = "red"


@dataclass(frozen=True)
class Frozen:
    b: int
    a: tuple[int, ...]


@dataclass
class Loose:
    a: int


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"b": 1, "a": [True, None]}, '{"a":[true,null],"b":1}'),
        (OrderedDict(z=1, a=2), '{"a":2,"z":1}'),
        (MappingProxyType({"a": 1}), '{"a":1}'),
        ((1, (2, 3)), "[1,[2,3]]"),
        (-0.0, "0.0"),
        (0.1, "0.1"),
        (1e-7, "1e-07"),
        (1.0, "1.0"),
        (1, "1"),
        (10**30, "1" + "0" * 30),
        ("é\n", '"é\\n"'),
        (Path("a/b"), '"a/b"'),
        (Colour.RED, '"red"'),
        (Frozen(1, (2,)), '{"a":[2],"b":1}'),
    ],
)
def test_canonical_text(value: object, text: str) -> None:
    assert canonical_json(value) == text.encode()


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ({"a": {"b": {1, 2}}}, "spec.a.b"),
        ({"a": [0, float("nan")]}, r"spec.a\[1\]"),
        ({"a": float("-inf")}, "spec.a"),
        ({"a": b"x"}, "spec.a"),
        ({"a": Loose(1)}, "spec.a"),
        ({"a": object()}, "spec.a"),
        ({"a": len}, "spec.a"),
        ({1: 2}, "spec"),
        ({"a": "\ud800"}, "spec.a"),
        ({"a": Frozen}, "spec.a"),
        ({"a": 1 + 2j}, "spec.a"),
    ],
)
def test_what_has_no_canonical_form_is_refused_by_its_path(value: object, where: str) -> None:
    with pytest.raises(CanonicalError, match=where):
        canonical_json(value)


def test_numpy_scalars_are_refused() -> None:
    numpy = pytest.importorskip("numpy")
    with pytest.raises(CanonicalError, match=r"spec\.a is a numpy"):
        canonical_json({"a": numpy.float64(1.0)})


TEXT = (
    '{"files":{"tokenizer.json":"00ff"},"identity":{"data":{"max_length":512}},"inputs":{"target":"ab"},'
    '"stage":"tokens","version":3}'
)


def spec() -> StageSpec:
    return StageSpec(
        "tokens", 3, {"data": {"max_length": 512}}, {"target": "ab"}, {"tokenizer.json": "00ff"}, "Smol LM/2"
    )


def test_key_is_blake2b_128_of_the_canonical_document() -> None:
    key = hashlib.blake2b(TEXT.encode(), digest_size=16).hexdigest()
    assert spec().key == key
    assert spec().folder_name == f"Smol-LM-2-{key[:12]}"
    assert StageSpec.from_document(spec().document()).key == key


def test_the_slug_is_not_part_of_the_key_and_everything_else_is() -> None:
    base = spec()
    assert StageSpec("tokens", 3, base.identity, base.inputs, base.files, "other").key == base.key
    others = [
        StageSpec("states", 3, base.identity, base.inputs, base.files),
        StageSpec("tokens", 4, base.identity, base.inputs, base.files),
        StageSpec("tokens", 3, {"data": {"max_length": 512.0}}, base.inputs, base.files),
        StageSpec("tokens", 3, base.identity, {"target": "ac"}, base.files),
        StageSpec("tokens", 3, base.identity, base.inputs, {"tokenizer.json": "00fe"}),
    ]
    assert len({base.key, *(other.key for other in others)}) == 6


@pytest.mark.parametrize("slug", ["", "///", "..", "-"])
def test_a_slug_that_says_nothing_is_replaced_by_the_stage(slug: str) -> None:
    made = StageSpec("tokens", 1, slug=slug)
    assert made.folder_name == f"tokens-{made.key[:12]}"


def test_stage_names_are_checked() -> None:
    with pytest.raises(ValueError, match="lower-case"):
        StageSpec("../x", 1)


def test_the_key_is_the_same_in_another_process() -> None:
    code = (
        "from torchspec_core.stages import StageSpec;"
        "print(StageSpec('tokens', 3, {'data': {'max_length': 512}}, {'target': 'ab'}, {'tokenizer.json': '00ff'}).key)"
    )
    for seed in ("1", "2"):
        out = subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        )
        assert out.stdout.strip() == spec().key


def test_the_spine_imports_without_anything_heavy() -> None:
    code = (
        "import sys, torchspec_core.config.load, torchspec_core.stages.child, torchspec_core.processes;"
        "heavy = ('torch', 'prefect', 'dask', 'pyarrow', 'numpy', 'vllm', 'transformers');"
        "print([name for name in heavy if name in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
