"""Conversations to tokens and masks: our stage against the usual ways, and against the encoder alone.

Every way makes the same ids and masks of the same JSON lines with two worker processes, each in a process of its own,
and the ways take turns. The floor is the fast tokenizer (Rust) alone on text that is rendered already, by two of its
own threads (`floor_threads`) and in two processes (`floor_processes`); ratios are to the faster one. The rivals use the
same template and mask rule and the fast tokenizer; they hold every result in memory, as they do in practice, so they
run on at most 100,000 rows. With more rows, ours and the floor run on all of them as well.

    python -m benchmarks.preprocess --json FILE [--quick] [--rows N] [--rounds N] [--ways NAME,...]

`datasets` is not a dependency: `--datasets-python PYTHON` names an interpreter that has it (and this project's).
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

WORKERS = 2
BATCH = 512
RIVAL_ROWS = 100_000
MODEL_WORKERS = 64
COLUMNS = {
    "rows_per_s": ">10,.0f", "tokens_per_s": ">12,.0f", "spread": ">8.0%", "parent_mb": ">11,.0f",
    "worker_mb": ">11,.0f", "open_files": ">7.0f", "cpu_us_per_row": ">12.1f", "collect_us_per_row": ">16.1f",
}  # fmt: skip
FLOORS = ("floor_threads", "floor_processes")
RIVALS = ("tensors_pool_after", "tensors_pool", "lists_pool", "datasets_map")
# Real conversations are long; these bounds give the 200 to 300 tokens of the instruction sets that people train on.
TURNS, TURN_CHARS = 4, 320


def make_corpus(path: Path, rows: int) -> None:
    """`rows` different conversations: each a window of a real one, which moves on when all have been used."""
    from torchspec_core.data.sources import Conversation, read_conversations

    usable = (c for c in read_conversations("sharegpt") if isinstance(c, Conversation) and len(c.messages) >= 2)
    real = [c.messages for c in itertools.islice(usable, rows)]
    with path.open("w", encoding="utf-8") as out:
        for number in range(rows):
            turns = real[number % len(real)]
            lap, start = divmod(number // len(real), len(turns) // 2)
            window = turns[2 * start : 2 * start + TURNS]
            cut = [turn.content[lap * TURN_CHARS : (lap + 1) * TURN_CHARS].strip() for turn in window]
            contents = [text or turn.content[:TURN_CHARS] for text, turn in zip(cut, window, strict=True)]
            messages = [{"role": t.role, "content": text} for t, text in zip(window, contents, strict=True)]
            messages[0]["content"] = f"{number}. {messages[0]['content']}"
            even = messages[: len(messages) - len(messages) % 2]
            out.write(json.dumps({"messages": even}, ensure_ascii=False) + "\n")


def make_target(folder: Path) -> None:
    """The real tokenizer and template of SmolLM2, without its weights."""
    import gguf

    from torchspec_core.targets.gguf import write_tokenizer
    from torchspec_core.targets.source import gguf_path

    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(gguf.GGUFReader(gguf_path()), folder, 8192)
    (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
    (folder / "config.json").write_text('{"vocab_size": 49152}')


class _Descriptors:
    """The most files this process had open at once, looked at ten times a second."""

    def __enter__(self) -> _Descriptors:
        self.most, self.stop = 0, threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()
        return self

    def _watch(self) -> None:
        while not self.stop.wait(0.1):
            self.most = max(self.most, len(os.listdir("/proc/self/fd")))

    def __exit__(self, *error: object) -> None:
        self.stop.set()
        self.thread.join()


Encoded = tuple[list[int], list[int]]
_target: Path


def _start(target: Path) -> None:
    global _target
    _target = target
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _encode(lines: list[str]) -> list[Encoded]:
    """Ids and mask (a value a token) of rows, by the rule of our stage and the fast tokenizer."""
    from torchspec_core.data import runs
    from torchspec_core.data.messages import parse_chat
    from torchspec_core.data.render import load_renderer

    renderer = load_renderer(_target)
    renderer.words = None
    pieces = [renderer.pieces(parse_chat(json.loads(line)).messages) for line in lines]
    return [(r.input_ids, runs.decode(r.runs).astype(int).tolist()) for r in renderer.encode(pieces)]


def _lines(corpus: Path) -> list[str]:
    return corpus.read_text("utf-8").rstrip("\n").split("\n")


def _row_as_lists(line: str) -> Encoded:
    return _encode([line])[0]


def _row_as_tensors(line: str) -> tuple[Any, Any]:
    import torch

    ids, mask = _encode([line])[0]
    return torch.tensor(ids), torch.tensor(mask)


def _collect(results: Iterator[Any]) -> dict[str, float]:
    """Hold every result; the parent's processor time for that is what collecting costs."""
    started = time.process_time()
    # A tensor that came in shared memory is one mapping, and Linux allows a process 65,530: copied out, it is freed.
    kept = [tuple(part.clone() if hasattr(part, "clone") else part for part in row) for row in results]
    spent = time.process_time() - started
    return {"rows": len(kept), "tokens": sum(len(ids) for ids, _ in kept), "collect_cpu": spent}


def _pool(function: Callable[[str], Any], after: bool) -> Callable[[Path, Path], dict[str, float]]:
    def run(corpus: Path, target: Path) -> dict[str, float]:
        import multiprocessing

        if function is _row_as_tensors:
            import torch

            # With the default strategy the run ends in `received 0 items of ancdata`: one descriptor a tensor.
            torch.multiprocessing.set_sharing_strategy("file_system")
            torch.set_num_threads(1)
            context: Any = torch.multiprocessing.get_context("fork")
        else:
            context = multiprocessing.get_context("fork")
        lines: list[str] = []
        with contextlib.ExitStack() as stack:
            if after:
                lines = _lines(corpus)
            pool = stack.enter_context(context.Pool(WORKERS, _start, (target,)))
            if not after:
                lines = _lines(corpus)
            found = _collect(pool.imap(function, lines, chunksize=16))
            pool.close()
            pool.join()
        return found

    return run


def run_ours(corpus: Path, target: Path) -> dict[str, float]:
    """The tokens stage as the pipeline runs it: with decontamination, de-duplication, sealed shards and the index."""
    import distributed  # noqa: F401 - no way is charged for its imports

    from torchspec_core.data import tokens
    from torchspec_core.stages.job import local_job

    with tempfile.TemporaryDirectory(dir=corpus.parent) as out:
        prompts, answers = Path(out, "prompts"), Path(out, "answers")
        prompts.mkdir()
        answers.mkdir()
        for name in ("heldout", "mtbench", "gsm8k"):
            (prompts / f"{name}.jsonl").touch()
        source = {"name": "file", "path": str(corpus), "rows": 1 << 40}
        data = {"conversations": [source], "max_length": 1 << 20, "min_supervised": 1, "supervise": "all",
                "shard_rows": 4 * BATCH}  # fmt: skip
        runtime = {"max_rejected": 0.0, "workers": WORKERS, "scheduler": None}
        inputs = {"target": target, "prompts": prompts, "answers": answers}
        job = local_job(Path(out, "tokens"), inputs, {"data": data}, {"data": runtime})
        started = time.process_time()
        tokens.build(job)
        spent = time.process_time() - started
        counts = json.loads((job.workspace.path / "counts.json").read_text())
    return {"rows": counts["rows"], "tokens": counts["tokens"], "collect_cpu": spent}


def _encode_floor(corpus: Path, target: Path, worker: int, workers: int) -> dict[str, float]:
    """Encode every `workers`-th batch of rendered text; only the encoding is timed."""
    from torchspec_core.data.messages import parse_chat
    from torchspec_core.data.render import load_renderer

    renderer = load_renderer(target)
    seconds, cpu, rows, tokens = 0.0, 0.0, 0, 0
    with corpus.open(encoding="utf-8") as file:
        for number in itertools.count():
            lines = list(itertools.islice(file, 4 * BATCH))
            if not lines:
                break
            if number % workers != worker:
                continue
            texts = [renderer.text(parse_chat(json.loads(line)).messages) for line in lines]
            started, cpu_started = time.perf_counter(), time.process_time()
            encoded = renderer.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
            seconds += time.perf_counter() - started
            cpu += time.process_time() - cpu_started
            rows += len(texts)
            tokens += sum(len(e) for e in encoded)
    return {"rows": rows, "tokens": tokens, "seconds": seconds, "cpu": cpu}


def run_floor_threads(corpus: Path, target: Path) -> dict[str, float]:
    """The tokenizer's own threads."""
    return {**_encode_floor(corpus, target, 0, 1), "collect_cpu": 0.0}


def run_floor_processes(corpus: Path, target: Path) -> dict[str, float]:
    """A process a core, each with a part of the text; both are busy all the time, so their mean is the time."""
    import multiprocessing

    with multiprocessing.get_context("fork").Pool(WORKERS) as pool:
        parts = pool.starmap(_encode_floor, [(corpus, target, worker, WORKERS) for worker in range(WORKERS)])
        pool.close()
        pool.join()
    total = {key: sum(part[key] for part in parts) for key in ("rows", "tokens", "seconds", "cpu")}
    return {**total, "seconds": total["seconds"] / WORKERS, "collect_cpu": 0.0}


def run_datasets(corpus: Path, target: Path) -> dict[str, float]:
    """`datasets.map` in two processes and in batches."""
    import datasets  # type: ignore[import-not-found]

    datasets.disable_caching()
    _start(target)

    def encode(batch: dict[str, list[Any]]) -> dict[str, list[list[int]]]:
        _start(target)
        pairs = _encode([json.dumps({"messages": messages}) for messages in batch["messages"]])
        return {"input_ids": [ids for ids, _ in pairs], "loss_mask": [mask for _, mask in pairs]}

    with tempfile.TemporaryDirectory(dir=corpus.parent) as cache:
        rows = datasets.load_dataset("json", data_files=str(corpus), split="train", cache_dir=cache)
        started = time.process_time()
        done = rows.map(encode, batched=True, batch_size=BATCH, num_proc=WORKERS, remove_columns=["messages"])
        spent = time.process_time() - started
        total = sum(len(ids) for batch in done.iter(BATCH) for ids in batch["input_ids"])
        return {"rows": len(done), "tokens": total, "collect_cpu": spent}


WAYS: dict[str, Callable[[Path, Path], dict[str, float]]] = {
    "ours": run_ours,
    "floor_threads": run_floor_threads,
    "floor_processes": run_floor_processes,
    "tensors_pool_after": _pool(_row_as_tensors, after=True),
    "tensors_pool": _pool(_row_as_tensors, after=False),
    "lists_pool": _pool(_row_as_lists, after=False),
    "datasets_map": run_datasets,
}


def _peak_mb() -> float:
    # Not ru_maxrss: that one starts from the peak of the process which started this one.
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) * 1024 / 1e6


def run_one(way: str, corpus: Path, target: Path) -> dict[str, float]:
    """Run one way here; seconds, processor seconds (all, and the workers'), peak memory (MB), open files."""
    with _Descriptors() as descriptors:
        started = time.perf_counter()
        found = WAYS[way](corpus, target)
        seconds = time.perf_counter() - started
    own, others = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "seconds": seconds, "cpu": own.ru_utime + own.ru_stime + others.ru_utime + others.ru_stime, **found,
        "worker_cpu": others.ru_utime + others.ru_stime, "parent_mb": _peak_mb(),
        "worker_mb": others.ru_maxrss / 1000, "open_files": descriptors.most,
    }  # fmt: skip


def start_one(way: str, corpus: Path, target: Path, python: str) -> dict[str, float] | str:
    """Run one way in a process of its own; the reason as text when it cannot run."""
    threaded = way == "floor_threads"
    environment = {
        **os.environ, "TOKENIZERS_PARALLELISM": "true" if threaded else "false",
        "RAYON_NUM_THREADS": str(WORKERS) if threaded else "1", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE",
    }  # fmt: skip
    command = [python, "-m", "benchmarks.preprocess", "--way", way, "--corpus", str(corpus), "--target", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["it ended without a word"])[-1][:300]
    return json.loads(done.stdout.splitlines()[-1])


def summarise(runs: dict[str, list[dict[str, float]]]) -> dict[str, float]:
    """Flat numbers out of the runs of each way: medians, and the ratios of ours to the others."""

    def middle(way: str, key: str) -> float:
        return statistics.median(run[key] for run in runs[way])

    def a_row(way: str, key: str) -> float:
        return statistics.median(run[key] / run["rows"] for run in runs[way])

    out: dict[str, float] = {}
    for way, found in runs.items():
        out[f"rows_per_s.{way}"] = 1 / a_row(way, "seconds")
        out[f"tokens_per_s.{way}"] = statistics.median(run["tokens"] / run["seconds"] for run in found)
        rates = [run["rows"] / run["seconds"] for run in found]
        out[f"spread.{way}"] = (max(rates) - min(rates)) / statistics.median(rates)
        for key in ("parent_mb", "worker_mb", "open_files"):
            out[f"{key}.{way}"] = middle(way, key)
        out[f"cpu_us_per_row.{way}"] = 1e6 * a_row(way, "cpu")
        out[f"collect_us_per_row.{way}"] = 1e6 * a_row(way, "collect_cpu")
    ours = a_row("ours", "seconds")
    for way in RIVALS:
        if way in runs:
            out[f"speedup.vs_{way}"] = a_row(way, "seconds") / ours
    for way in ("tensors_pool_after", "tensors_pool"):  # both collect alike; the one that is started early is preferred
        if way in runs:
            out["speedup.collection"] = out[f"collect_us_per_row.{way}"] / out["collect_us_per_row.ours"]
    floors = [a_row(way, "seconds") for way in FLOORS if way in runs]
    if floors:
        out["fraction.of_encode_floor"] = min(floors) / ours
    if "tensors_pool_after" in runs:
        # Our parent works before and after the workers; a pool's parent collects while they work, whoever is slower.
        mine = a_row("ours", "collect_cpu") + a_row("ours", "worker_cpu") / MODEL_WORKERS
        theirs = max(
            a_row("tensors_pool_after", "collect_cpu"), a_row("tensors_pool_after", "worker_cpu") / MODEL_WORKERS
        )
        out[f"speedup.model_{MODEL_WORKERS}_workers"] = theirs / mine
    out["rss.parent_mb"] = max(run["parent_mb"] for run in runs["ours"])
    return out


def table(numbers: dict[str, float], skipped: dict[str, str]) -> str:
    """What a person reads: one line a way, then the ratios."""
    lines = [f"{'way':<20}{'rows/s':>10}{'tokens/s':>12}{'spread':>8}{'parent MB':>11}{'worker MB':>11}{'files':>7}"
             f"{'cpu us/row':>12}{'collect us/row':>16}"]  # fmt: skip
    for way in (name.removeprefix("rows_per_s.") for name in numbers if name.startswith("rows_per_s.")):
        cells = "".join(format(numbers[f"{key}.{way}"], form) for key, form in COLUMNS.items())
        lines.append(f"{way:<20}{cells}")
    lines += [f"{name:<36}{value:>10.3g}" for name, value in numbers.items()
              if name.split(".")[0] in ("speedup", "fraction", "rss")]  # fmt: skip
    return "\n".join(lines + [f"skipped {way}: {reason}" for way, reason in skipped.items()])


def measure(
    ways: Sequence[str], rows: int, rounds: int, datasets_python: str
) -> tuple[dict[str, float], dict[str, str]]:  # fmt: skip
    """All ways in turn, `rounds` times on at most 100,000 rows, then ours and the floor once more on all rows."""
    runs: dict[str, list[dict[str, float]]] = {}
    skipped: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="torchspec-preprocess-") as folder:
        target, corpus = Path(folder, "target"), Path(folder, "corpus.jsonl")
        make_target(target)
        make_corpus(corpus, min(rows, RIVAL_ROWS))
        for way in list(ways) * rounds:
            if way in skipped:
                continue
            found = start_one(way, corpus, target, datasets_python if way == "datasets_map" else sys.executable)
            if isinstance(found, str):
                skipped[way] = found
            else:
                runs.setdefault(way, []).append(found)
        if "ours" in skipped:
            raise SystemExit(f"our own stage failed: {skipped['ours']}")
        numbers = summarise(runs)
        if rows > RIVAL_ROWS:
            make_corpus(corpus, rows)
            floors = [way for way in FLOORS if way in runs]
            fastest = max(floors, key=lambda way: numbers[f"rows_per_s.{way}"], default=None)
            whole: dict[str, list[dict[str, float]]] = {}
            for way in filter(None, (fastest, "ours")):
                found = start_one(way, corpus, target, sys.executable)
                if isinstance(found, str):
                    raise SystemExit(f"{way} failed on {rows} rows: {found}")
                whole[way] = [found]
            numbers |= {f"all_rows.{name}": value for name, value in summarise(whole).items()}
            numbers["rss.parent_mb_at_100k"] = numbers["rss.parent_mb"]
            for name in ("rss.parent_mb", "fraction.of_encode_floor"):
                if f"all_rows.{name}" in numbers:
                    numbers[name] = numbers.pop(f"all_rows.{name}")
    return numbers, skipped


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", type=Path, help="write the numbers there")
    parser.add_argument("--quick", action="store_true", help="100,000 rows, once")
    parser.add_argument("--rows", type=int, help="rows of the corpus (default 1,000,000)")
    parser.add_argument("--rounds", type=int, help="how often every way runs on 100,000 rows (default 3)")
    parser.add_argument("--ways", default=",".join(WAYS), help="the ways to run (default: all)")
    parser.add_argument("--datasets-python", default=sys.executable, metavar="PYTHON")
    parser.add_argument("--way", choices=tuple(WAYS), help=argparse.SUPPRESS)
    parser.add_argument("--corpus", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--target", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way:
        print(json.dumps(run_one(args.way, args.corpus, args.target)))
        return
    rows = args.rows or (RIVAL_ROWS if args.quick else 1_000_000)
    ways = args.ways.split(",")
    if not {"ours"} <= set(ways) <= set(WAYS):
        parser.error(f"--ways takes ours and some of {', '.join(list(WAYS)[1:])}")
    rounds = args.rounds or (1 if args.quick else 3)
    numbers, skipped = measure(ways, rows, rounds, args.datasets_python)
    print(table(numbers, skipped))
    if args.json:
        meta = {
            "meta.rows": rows, "meta.rows_of_rivals": min(rows, RIVAL_ROWS), "meta.rounds": rounds,
            "meta.workers": WORKERS, "meta.cpus": os.cpu_count(), "meta.load_at_end": os.getloadavg()[0],
            "meta.python": platform.python_version(), "meta.machine": platform.processor() or platform.machine(),
            **{f"meta.skipped.{way}": reason for way, reason in skipped.items()},
        }  # fmt: skip
        args.json.write_text(json.dumps({**numbers, **meta}, indent=1) + "\n")


if __name__ == "__main__":
    main()
