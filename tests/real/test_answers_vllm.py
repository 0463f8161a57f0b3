"""Answers by a real vLLM engine from the random tiny target: contract, independence of the sharding, resume."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from torchspec_core.data.render import load_renderer
from torchspec_core.data.sources import Message
from torchspec_core.stages.job import Job, local_job
from torchspec_core.targets import answers, source
from torchspec_core.targets.vllm_cpu import draft_counters, make_llm

pytestmark = pytest.mark.real
QUESTIONS = [f"Question number {i}: how {'very ' * (i % 5)}far is it?" for i in range(10)]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("work") / "target"
    settings = {"source": source.RANDOM, "dtype": "float32"}
    source.build(local_job(folder, params={"target": settings}, runtime={"run": {"threads": 0}}))
    (weights,) = folder.glob("*.safetensors")
    tensors = load_file(weights)
    rows = tensors["lm_head.weight" if "lm_head.weight" in tensors else "model.embed_tokens.weight"]
    rows[2] *= 40.0  # random weights end a turn once in 49,152 tokens; these do now and then
    save_file(tensors, weights, {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def engine(target: Path):
    return make_llm(target, "float32", 128, 4, kv_cache_gib=1)


@pytest.fixture(autouse=True)
def one_engine(engine, monkeypatch: pytest.MonkeyPatch) -> None:
    # One engine for the file: a start takes seconds, and the body only needs one that is idle.
    monkeypatch.setattr(answers, "make_llm", lambda *args, **kwargs: engine)


def job_for(
    tmp_path: Path, target: Path, name: str = "answers", shard: int = 4, active: int = 3, temperature: float = 0.8,
    new_tokens: int = 12,
) -> Job:  # fmt: skip
    prompts = tmp_path / "prompts"
    if not prompts.exists():
        prompts.mkdir()
        rows = [{"sample_id": f"{i:016x}", "turns": [text], "source": "test"} for i, text in enumerate(QUESTIONS)]
        (prompts / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "temperature": temperature,
        "top_p": 1.0,
        "max_new_tokens": new_tokens,
        "dtype": "float32",
        "shard_prompts": shard,
    }
    return local_job(
        tmp_path / name,
        inputs={"target": target, "prompts": prompts},
        params={"answers": settings, "run": {"seed": 3}},
        runtime={"answers": {"max_num_seqs": active, "kv_cache_gib": 1}, "run": {"threads": 0}},
    )


def rows_of(folder: Path) -> list[dict]:
    return [
        json.loads(line) for path in sorted(folder.glob("answers-*.jsonl")) for line in path.read_text().splitlines()
    ]


def test_rows_follow_the_contract(tmp_path: Path, target: Path) -> None:
    answers.build(job_for(tmp_path, target))
    rows = rows_of(tmp_path / "answers")
    renderer = load_renderer(target)
    assert [row["sample_id"] for row in rows] == [f"{i:016x}" for i in range(10)]
    for row, question in zip(rows, QUESTIONS, strict=True):
        assert renderer.decode(row["prompt_ids"]).endswith(f"user\n{question}<|im_end|>\n<|im_start|>assistant\n")
        assert row["finish"] in ("stop", "length")
        assert (row["answer_ids"][-1] == 2) == (row["finish"] == "stop")
        assert len(row["answer_ids"]) == 12 or row["finish"] == "stop"
        assert [m["role"] for m in row["messages"]] == ["user", "assistant"]
    assert len({tuple(row["answer_ids"]) for row in rows}) == 10
    assert [p.name for p in sorted((tmp_path / "answers").glob("*.jsonl"))][:3] == [
        f"answers-0000{i}.jsonl" for i in range(3)
    ]


def test_answers_do_not_depend_on_the_sharding(tmp_path: Path, target: Path) -> None:
    answers.build(job_for(tmp_path, target, "a"))
    answers.build(job_for(tmp_path, target, "b", shard=10, active=4))
    ids = [[row["answer_ids"] for row in rows_of(tmp_path / name)] for name in ("a", "b")]
    assert ids[0] == ids[1]


def test_only_a_lost_shard_is_answered_again(tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers.build(job_for(tmp_path, target))
    folder = tmp_path / "answers"
    before = {path.name: path.read_bytes() for path in folder.glob("answers-*.jsonl")}
    (folder / "answers-00001.jsonl").unlink()
    inodes = {path.name: path.stat().st_ino for path in folder.glob("answers-*.jsonl")}
    answers.build(job_for(tmp_path, target))
    assert {path.name: path.read_bytes() for path in folder.glob("answers-*.jsonl")} == before
    assert all((folder / name).stat().st_ino == inode for name, inode in inodes.items())
    monkeypatch.setattr(answers, "make_llm", None)
    answers.build(job_for(tmp_path, target))


def test_a_conversation_is_answered_turn_by_turn(tmp_path: Path, target: Path) -> None:
    job = job_for(tmp_path, target, new_tokens=24)
    talks = [[f"Question {i}?", "And then?", "Why?"] for i in range(60)]
    rows = [{"sample_id": f"{i:016x}", "turns": turns, "source": "test"} for i, turns in enumerate(talks)]
    (tmp_path / "prompts" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    answers.build(job)
    renderer = load_renderer(target)
    answered = 0
    for row in rows_of(tmp_path / "answers"):
        parts = [(turn["prompt_ids"], turn["answer_ids"]) for turn in (row, *row.get("later", ()))]
        messages = [Message(**message) for message in row["messages"]]
        asked = [place for place, message in enumerate(messages) if message.role == "user"][-len(parts) :]
        so_far: list[int] = []
        for place, (prompt_ids, answer_ids) in zip(asked, parts, strict=True):
            # What a server is sent: every message so far, by the template.
            assert so_far + prompt_ids == renderer.prompt(messages[: place + 1])
            assert len(answer_ids) <= 24
            text = renderer.decode(answer_ids[:-1] if answer_ids[-1] == 2 else answer_ids)
            assert messages[place + 1].content == text
            so_far += prompt_ids + answer_ids
        answered += len(parts)
        assert len(so_far) <= 128
        assert (row["finish"] == "stop") == (parts[-1][1][-1] == 2)
    assert answered > 60, f"no conversation went on: {[row['finish'] for row in rows_of(tmp_path / 'answers')]}"


def test_a_prompt_without_room_is_refused(tmp_path: Path, target: Path) -> None:
    job = job_for(tmp_path, target)
    rows = [json.dumps({"sample_id": "ff", "turns": ["word " * 3000], "source": "test"})]
    (tmp_path / "prompts" / "train.jsonl").write_text("\n".join(rows))
    with pytest.raises(answers.UserError, match="prompt ff has"):
        answers.build(job)


def test_an_engine_without_a_drafter_counts_no_drafts(engine) -> None:
    counters = draft_counters(engine)
    assert (counters.drafts, counters.acceptance_length) == (0, 1.0)
