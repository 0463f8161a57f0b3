"""Capture against the model's own hidden states, batching that changes nothing, and the stage body with its resume."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from torchspec_core.capture import states as states_stage
from torchspec_core.capture.plan import shard_plan, token_batches
from torchspec_core.capture.transformers_engine import TransformersCapture
from torchspec_core.errors import StageError, UserError
from torchspec_core.stages.job import Job, local_job
from torchspec_core.stages.manifest import MANIFEST
from torchspec_core.store.files import StateSet, shard_name
from torchspec_core.store.remote import open_states
from torchspec_core.targets.engine import load_embedding, load_head

LAYERS = (0, 2, 3, 5)
LENGTHS = (9, 30, 17, 4, 21, 30, 12, 6)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=32, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48, max_position_embeddings=64, eos_token_id=2, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    torch.nn.init.normal_(model.model.norm.weight, 1.0, 0.3)
    model.save_pretrained(folder)
    return folder


def sample_ids() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(3, 97, n).astype(np.int32) for n in LENGTHS]


def test_layers_are_the_models_own_hidden_states(target: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(target)
    engine = TransformersCapture(target, LAYERS, "float32")
    sample = sample_ids()[0]
    with torch.no_grad():
        own = model(torch.from_numpy(sample).long()[None], output_hidden_states=True)
    taken = engine.states([sample])[0]
    assert taken.shape == (4, 9, 32)
    for place, layer in enumerate(LAYERS[:3]):
        torch.testing.assert_close(taken[place], own.hidden_states[layer + 1][0])
    # The last state is pre-norm: transformers' last hidden state is the norm of it, and the head gives the logits.
    torch.testing.assert_close(model.model.norm(taken[3]), own.hidden_states[-1][0])
    assert not torch.allclose(taken[3], own.hidden_states[-1][0])
    head = load_head(target, torch.float32)
    torch.testing.assert_close(head.logits(taken[3]), own.logits[0])
    assert torch.equal(load_embedding(target, torch.float32), model.model.embed_tokens.weight)


def test_batching_and_padding_change_nothing_in_float32(target: Path) -> None:
    engine = TransformersCapture(target, LAYERS, "float32")
    samples = sample_ids()
    for batched, sample in zip(engine.states(samples), samples, strict=True):
        torch.testing.assert_close(batched, engine.states([sample])[0], rtol=0, atol=1e-4)


def test_self_check_passes_here_and_catches_wrong_layers_and_a_wrong_norm(target: Path) -> None:
    engine = TransformersCapture(target, LAYERS, "bfloat16")
    engine.self_check(sample_ids()[:3])
    engine.head.norm_weight.neg_()
    with pytest.raises(StageError, match="final norm"):
        engine.self_check(sample_ids()[:3])
    engine.head.norm_weight.neg_()
    # What is captured is no longer what the model itself calls its hidden state 3.
    engine.model.model.layers[2].register_forward_hook(lambda module, inputs, output: output + 1)
    with pytest.raises(StageError, match="layer 2 .* hidden state 3"):
        engine.self_check(sample_ids()[:3])


def test_plan_holds_every_sample_once_within_its_bounds() -> None:
    lengths = np.random.default_rng(1).integers(1, 400, 300)
    plan = shard_plan(lengths, 8, 8000)
    assert sorted(np.concatenate(plan).tolist()) == list(range(300))
    assert all(lengths[rows].sum() * 8 <= 8000 or len(rows) == 1 for rows in plan)
    assert [lengths[i] for rows in plan for i in rows] == sorted(lengths, reverse=True)
    for rows in plan:
        batches = list(token_batches(rows, lengths, 1000))
        assert np.concatenate(batches).tolist() == rows.tolist()
        assert all(len(batch) * lengths[batch].max() <= 1000 for batch in batches)


def write_tokens(folder: Path, samples: list[np.ndarray]) -> None:
    folder.mkdir()
    table = pa.table({
        "input_ids": pa.array([s.tolist() for s in samples], pa.list_(pa.int32())),
        "loss_mask": pa.array([[0, len(s)] for s in samples], pa.list_(pa.int32())),
    })  # fmt: skip
    index = pa.table({
        "sample_id": [f"id{i}" for i in range(len(samples))],
        "shard": pa.array([0] * len(samples), pa.int32()),
        "row": pa.array(range(len(samples)), pa.int32()),
        "length": pa.array([len(s) for s in samples], pa.int32()),
        "supervised": pa.array([len(s) for s in samples], pa.int32()),
    })  # fmt: skip
    for name, rows in (("tokens-00000.arrow", table), ("index.arrow", index)):
        with pa.OSFile(str(folder / name), "wb") as sink, pa.ipc.new_file(sink, rows.schema) as writer:
            writer.write_table(rows)


def make_job(tmp_path: Path, target: Path, budget: int = 64, layers: tuple[int, ...] | None = (0, 2, 3)) -> Job:
    if not (tmp_path / "tokens").exists():
        write_tokens(tmp_path / "tokens", sample_ids())
    return local_job(
        tmp_path / "states",
        inputs={"target": target, "tokens": tmp_path / "tokens"},
        params={"capture": {"layers": layers and list(layers), "dtype": "float32", "shard_mib": 1}},
        runtime={"capture": {"token_budget": budget, "engine": "transformers"}, "run": {"threads": 0}},
    )


def test_stage_writes_every_sample_and_resumes_at_the_missing_shard(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bytes_per_token = 4 * 32 * 4
    monkeypatch.setattr(states_stage, "shard_plan", lambda n, size, _: shard_plan(n, size, 50 * bytes_per_token))
    states_stage.build(make_job(tmp_path, target))
    engine = TransformersCapture(target, LAYERS, "float32")
    states = StateSet(tmp_path / "states", verify="always")
    assert sorted(states.ids) == [f"id{i}" for i in range(8)]
    for i, sample in enumerate(sample_ids()):
        taken = torch.stack(list(states.get(f"id{i}").values()))
        torch.testing.assert_close(taken, engine.states([sample])[0], rtol=0, atol=1e-4)

    kept = {p.name: p.read_bytes() for p in (tmp_path / "states").glob("states-*")}
    assert len(kept) == 4  # 30 | 30 | 21 17 12 | 9 6 4 tokens, at most 50 a shard
    (tmp_path / "states" / shard_name(1)).unlink()
    inodes = {p.name: p.stat().st_ino for p in (tmp_path / "states").glob("states-*")}
    states_stage.build(make_job(tmp_path, target))
    after = {p.name: p for p in (tmp_path / "states").glob("states-*")}
    assert {name: p.read_bytes() for name, p in after.items()} == kept
    assert {name: after[name].stat().st_ino for name in inodes} == inodes


def test_a_shard_that_is_made_again_with_other_bits_has_its_own_checksums(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(states_stage, "shard_plan", lambda n, size, _: shard_plan(n, size, 50 * size))
    states_stage.build(make_job(tmp_path, target))
    (tmp_path / "states" / shard_name(1)).unlink()
    original = TransformersCapture.states

    def other_engine(self: TransformersCapture, samples: list[np.ndarray]) -> list[torch.Tensor]:
        return [state * (1 + 1e-6) for state in original(self, samples)]

    monkeypatch.setattr(TransformersCapture, "states", other_engine)
    states_stage.build(make_job(tmp_path, target))
    assert StateSet(tmp_path / "states").verify() == []


def test_parts_are_put_together_and_what_is_damaged_is_captured_again(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(states_stage, "shard_plan", lambda n, size, _: shard_plan(n, size, 50 * size))
    job = make_job(tmp_path, target)
    folders = []
    for part in range(2):
        folders.append(tmp_path / f"part{part}")
        params = {"capture": {**job.params["capture"], "part": [part, 2]}}
        own = local_job(folders[part], job.inputs, params, job.runtime)
        states_stage.build(own)
        (folders[part] / MANIFEST).write_text(json.dumps({"files": own.workspace.sealed_files()}))
    assert [sorted(path.name for path in folder.glob("states-*")) for folder in folders] == [
        [shard_name(0), shard_name(2)], [shard_name(1), shard_name(3)],
    ]  # fmt: skip
    damaged = folders[1] / shard_name(3)
    content = bytearray(damaged.read_bytes())
    content[-3] ^= 4
    damaged.write_bytes(content)

    lengths: list[int] = []
    original = TransformersCapture.states

    def counted(self: TransformersCapture, samples: list[np.ndarray]) -> list[torch.Tensor]:
        lengths.extend(map(len, samples))
        return original(self, samples)

    monkeypatch.setattr(TransformersCapture, "states", counted)
    parts = [str(folder) for folder in folders]
    runtime = {**job.runtime, "capture": {**job.runtime["capture"], "parts": parts}}
    states_stage.build(local_job(job.workspace.path, job.inputs, job.params, runtime))
    assert sorted(lengths) == [4, 6, 9] and f"{damaged} is not what was sealed" in caplog.text
    states = StateSet(job.workspace.path, verify="always")
    assert sorted(states.ids) == [f"id{i}" for i in range(8)] and states.verify() == []
    assert (job.workspace.path / shard_name(1)).samefile(folders[1] / shard_name(1))


def test_a_finished_stage_loads_no_model(tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states_stage.build(make_job(tmp_path, target))
    monkeypatch.setattr(states_stage, "TransformersCapture", None)
    states_stage.build(make_job(tmp_path, target))


def test_states_that_are_not_finite_name_the_sample(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = TransformersCapture.states

    def broken(self: TransformersCapture, samples: list[np.ndarray]) -> list[torch.Tensor]:
        states = original(self, samples)
        for sample, state in zip(samples, states, strict=True):
            if len(sample) == 12:
                state[1, 5, 7] = float("nan")
        return states

    monkeypatch.setattr(TransformersCapture, "states", broken)
    with pytest.raises(StageError, match="sample id6.*layer 2"):
        states_stage.build(make_job(tmp_path, target))


def test_bad_sizes_are_one_sentence(tmp_path: Path, target: Path) -> None:
    with pytest.raises(UserError, match="token_budget is 20.*30 tokens"):
        states_stage.build(make_job(tmp_path, target, budget=20))
    with pytest.raises(UserError, match="layer 9"):
        states_stage.build(make_job(tmp_path, target, layers=(1, 9)))


def test_a_set_goes_to_its_store_and_only_index_and_address_stay(tmp_path: Path, target: Path) -> None:
    job = make_job(tmp_path, target)
    states_stage.build(job)
    near = StateSet(tmp_path / "states")
    expected = {name: torch.stack([*near.get(name).values()]).clone() for name in near.ids}
    job.runtime["store"] = {"url": f"file://{tmp_path}/place"}
    states_stage.build(job)
    names = {path.name for path in (tmp_path / "states").iterdir() if path.is_file()}
    assert {"index.arrow", "location.json"} <= names and not [name for name in names if name.startswith("states-")]
    assert set(job.workspace.sealed_files()) == {"index.arrow", "location.json"}
    moved = open_states(tmp_path / "states", "always")
    assert sorted(path.name for path in (tmp_path / "place/states").iterdir())[0] == "index.arrow"
    assert all(torch.equal(torch.stack([*moved.get(name).values()]), whole) for name, whole in expected.items())
    states_stage.build(job)  # finished: nothing is captured or copied again
    assert set(job.workspace.sealed_files()) == {"index.arrow", "location.json"}
