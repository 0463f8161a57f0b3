"""Block drafters through the stages' real bodies on a tiny target; an interrupted run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.unit.test_evaluation_stage import write_target
from tests.unit.test_training_loop import SETTINGS, SIZE, VOCABULARY, Samples, teacher
from torchspec_core.capture import states
from torchspec_core.config.schema import Recipe
from torchspec_core.data import tokens, vocabulary
from torchspec_core.drafters.dflash import BlockConfig, BlockDrafter, init_blocks
from torchspec_core.drafters.slots import Tables
from torchspec_core.errors import UserError
from torchspec_core.evaluation import acceptance
from torchspec_core.export import checkpoint
from torchspec_core.export.checkpoint import load_drafter
from torchspec_core.export.dflash import load_blocks
from torchspec_core.objectives.anchors import Anchors
from torchspec_core.objectives.dflash import BlockTeacher, block_loss
from torchspec_core.objectives.result import LossResult
from torchspec_core.report.profile import profile_page
from torchspec_core.stages.job import local_job
from torchspec_core.targets.engine import load_embedding, load_head
from torchspec_core.targets.facts import read_facts
from torchspec_core.training import stage
from torchspec_core.training.batch import PackedBatch
from torchspec_core.training.dflash import block_builder
from torchspec_core.training.loop import train
from torchspec_core.training.plan import plan_steps
from torchspec_core.training.profile import profile_training

KINDS = {"dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel", "dspark": "Qwen3DSparkModel"}
K = 3


def recipe(kind: str, size: int) -> dict[str, Any]:
    values = Recipe().model_dump(mode="json")
    values["data"] |= {"max_length": 64, "min_supervised": 2, "shard_rows": 8, "max_rejected": 1.0, "workers": 0}
    values["capture"] |= {"layers": [1, 3, 5], "token_budget": 256}
    values["drafter"] |= {
        "kind": kind, "draft_vocab_size": size, "num_layers": 1, "block_size": K if kind == "dspark" else K + 1,
        "mask_token_id": 256, "conv_group_size": 8, "selector_rank": 8, "selector_top_k": 4, "markov_rank": 8,
    }  # fmt: skip
    values["training"] |= {"tokens_per_step": 128, "epochs": 2.0, "log_steps": 2, "anchors": 6, "dtype": "float32"}
    values["evaluation"] |= {
        "prompts": 2, "sets": ["heldout"], "max_new_tokens": 8, "k": K, "sampled_dtype": "float32", "batch_size": 2,
    }  # fmt: skip
    values["serving"] |= {"vllm": False}
    return values


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("run")
    folders = {name: root / name for name in ("target", "prompts", "answers", "tokens", "vocabulary", "states")}
    for name in ("prompts", "answers", "vocabulary"):
        folders[name].mkdir()
    size = write_target(folders["target"])
    rows = [{"sample_id": f"heldout{i}", "turns": [f"say {i}"], "source": "x"} for i in range(2)]
    (folders["prompts"] / "heldout.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    answers = []
    for i in range(12):
        chat = [{"role": "user", "content": f"hello {i}"}, {"role": "assistant", "content": "abcde"}]
        answers.append({
            "sample_id": f"a{i:02d}", "messages": chat, "prompt_ids": [256, 10, 11 + i],
            "answer_ids": [5 + i, 6, 7, 8, 9] * 4 + [size - 1], "finish": "stop", "source": "sharegpt",
        })  # fmt: skip
    (folders["answers"] / "answers-00000.jsonl").write_text("".join(json.dumps(row) + "\n" for row in answers))
    values = recipe("dflash", size)
    need = {name: folders[name] for name in ("target", "answers", "prompts")}
    tokens.build(local_job(folders["tokens"], need, values, values))
    need = {name: folders[name] for name in ("target", "tokens")}
    states.build(local_job(folders["states"], need, values, values))
    np.save(folders["vocabulary"] / "t2d.npy", np.ones(size, dtype=bool))
    return folders


@pytest.mark.parametrize("kind", KINDS)
def test_the_walk_from_states_to_acceptance(kind: str, inputs: dict[str, Path], tmp_path: Path) -> None:
    facts = read_facts(inputs["target"])
    values = recipe(kind, facts.vocab_size)
    folders = {**inputs, **{name: tmp_path / name for name in ("drafter", "export", "evaluation")}}

    def run(body: Any, name: str, needs: tuple[str, ...]) -> None:
        body.build(local_job(folders[name], {need: folders[need] for need in needs}, values, values))

    run(stage, "drafter", ("target", "tokens", "vocabulary", "states"))
    run(checkpoint, "export", ("target", "vocabulary", "drafter"))
    run(acceptance, "evaluation", ("target", "prompts", "tokens", "export"))

    steps = [json.loads(line) for line in (folders["drafter"] / "metrics.jsonl").open()]
    extras = {"dflash": set(), "dflash2": {"selector_loss", "recall_4"}, "dspark": {"l1", "alpha_0", "slot_tv_2"}}[kind]
    assert {"loss", "loss_0", "acc_2", *extras} <= steps[-1].keys() and "loss_3" not in steps[-1]
    assert steps[-1]["loss"] < steps[0]["loss"]
    validation = json.loads((folders["drafter"] / "validation.json").read_text())
    slots = [validation[f"slot_{n}"] for n in range(K)]
    names = {f"{name}_{n}" for name in ("acc", "alpha", "slot_tv", "recall_1") for n in range(K)}
    assert names < validation.keys()
    assert validation["rows"] > 0 and validation["estimated_acceptance_length"] == pytest.approx(1 + sum(slots))

    config = json.loads((folders["export"] / "config.json").read_text())
    nested = config if kind == "dspark" else config["dflash_config"]
    assert config["architectures"] == [KINDS[kind]] and config["model_type"] == "qwen3"
    assert (nested["target_layer_ids"], nested["mask_token_id"], nested["block_size"]) == (
        [1, 3, 5], 256, values["drafter"]["block_size"],
    )  # fmt: skip
    assert config["num_target_layers"] == facts.num_layers
    written = load_file(folders["export"] / "model.safetensors")
    width, size = facts.hidden_size, facts.vocab_size
    shapes = {
        "dflash": {},
        "dflash2": {
            "layers.0.attention_conv.base_kernel": [2, 2, width],
            "layers.0.mlp_conv.kernel_projection.weight": [2 * 2 * width // 8, width],
            "candidate_selector.predecessor_codebook": [size, 8],
            "candidate_selector.successor_codebook": [size, 8],
            "candidate_selector.hidden_projection.weight": [8, width],
        },
        "dspark": {
            "markov_head.markov_w1.weight": [size, 8],
            "markov_head.markov_w2.weight": [size, 8],
            "confidence_head.proj.weight": [1, width + 8],
            "confidence_head.proj.bias": [1],
        },
    }[kind]
    shapes |= {"fc.weight": [width, 3 * width], "hidden_norm.weight": [width], "layers.0.self_attn.k_norm.weight": [16]}
    assert {name: list(written[name].shape) for name in shapes} == shapes
    assert not {name for name in written if "embed" in name or "lm_head" in name or "projection.weight" in name} - {
        *shapes, "layers.0.attention_conv.kernel_projection.weight"
    }  # fmt: skip

    trained = BlockDrafter(BlockConfig.from_json(json.loads((folders["drafter"] / "drafter.json").read_text())))
    trained.load_state_dict(load_file(folders["drafter"] / "drafter.safetensors"))
    loaded = load_blocks(folders["export"], "float32", facts)
    embedding = load_embedding(inputs["target"], torch.float32)
    frozen = Tables(embedding, load_head(inputs["target"], torch.float32).head_weight)
    states_, previous = torch.randn(4, width, generator=torch.Generator().manual_seed(0)), torch.arange(4)
    for ours, theirs in zip(
        trained.scores(states_, previous, frozen), loaded.scores(states_, previous, frozen), strict=True
    ):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-4) if ours is not None else None

    temperatures = {"dspark": K}.get(kind, 0)
    assert len(trained.config.confidence_temperatures or ()) == temperatures
    assert loaded.config.confidence_temperatures == trained.config.confidence_temperatures
    assert ("confidence_error" in validation) == bool(temperatures)
    assert validation.get("confidence_error", 0) <= validation.get("confidence_error_uncalibrated", 0)

    numbers = json.loads((folders["evaluation"] / "evaluation.json").read_text())
    for mode in ("greedy", "t1"):
        by_slot = [numbers[f"heldout.{mode}.slot_{slot}"] for slot in range(1, K + 1)]
        assert numbers[f"heldout.{mode}.acceptance_length"] == pytest.approx(1 + sum(by_slot))

    config["torchspec"]["target_num_hidden_layers"] = 9
    (folders["export"] / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="layer count 9"):
        load_blocks(folders["export"], "float32", facts)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("eagle3", {"loss": "lk_lambda", "normalisation": "per_sequence", "anchor_sampling": "uniform"}),
        ("dflash", {"block_weighting": "dpace", "dflash_l1_weight": 0.5, "anchor_sampling": "strided"}),
    ],
)
def test_losses_and_sampling_of_the_recipe_reach_the_drafter(
    kind: str, changes: dict[str, Any], inputs: dict[str, Path], tmp_path: Path
) -> None:
    values = recipe(kind, read_facts(inputs["target"]).vocab_size)
    weights = []
    for name, more in (("plain", {}), ("changed", changes)):
        training = {**values["training"], **more}
        need = {part: inputs[part] for part in ("target", "tokens", "vocabulary", "states")}
        chosen = {**values, "training": training}
        stage.build(local_job(tmp_path / name, need, chosen, chosen))
        weights.append(load_file(tmp_path / name / "drafter.safetensors"))
    assert not torch.equal(weights[0]["fc.weight"], weights[1]["fc.weight"])
    lines = [json.loads(line) for line in (tmp_path / "changed" / "metrics.jsonl").open()]
    assert lines[-1]["loss"] < lines[0]["loss"]
    slots = [lines[-1][f"slot_tv_{n}"] for n in range(K)]
    assert lines[-1]["estimated_acceptance_length_tv"] == pytest.approx(1 + sum(slots))
    validation = json.loads((tmp_path / "changed" / "validation.json").read_text())
    assert 1.0 < validation["estimated_acceptance_length_tv"] <= 1 + K
    assert validation.get("kept_mass", 1.0) == pytest.approx(1.0, abs=1e-5)  # the whole vocabulary is kept


def train_from(start: Path | None, kind: str, inputs: dict[str, Path], folder: Path, **drafter: Any) -> Path:
    """A drafter stage; from `start` with steps too small to change a weight. Returns its folder."""
    values = recipe(kind, read_facts(inputs["target"]).vocab_size)
    training = {**values["training"], "start": None if start is None else str(start)}
    training |= {"lr": 1e-30, "weight_decay": 0.0} if start else {"epochs": 0.5}
    chosen = {**values, "training": training, "drafter": {**values["drafter"], "selector_codebook": "free", **drafter}}
    need = {part: inputs[part] for part in ("target", "tokens", "vocabulary", "states")}
    stage.build(local_job(folder, need, chosen, chosen))
    return folder


@pytest.mark.parametrize("kind", ["eagle3", *KINDS])
def test_training_goes_on_from_an_exported_drafter(kind: str, inputs: dict[str, Path], tmp_path: Path) -> None:
    first = train_from(None, kind, inputs, tmp_path / "first")
    need = {"target": inputs["target"], "vocabulary": inputs["vocabulary"], "drafter": first}
    checkpoint.build(local_job(tmp_path / "export", need))
    again = train_from(tmp_path / "export", kind, inputs, tmp_path / "again")
    before, after = (load_file(folder / "drafter.safetensors") for folder in (first, again))
    assert before.keys() == after.keys()
    for name, weight in after.items():
        torch.testing.assert_close(weight, before[name], rtol=2**-8, atol=0)  # the export is in the target's bf16
    kinds = {"eagle3": "dflash", "dflash": "dspark", "dflash2": "dflash", "dspark": "dflash2"}
    with pytest.raises(UserError, match=f"kind {kind}, drafter.kind is {kinds[kind]}"):
        train_from(tmp_path / "export", kinds[kind], inputs, tmp_path / "other")
    with pytest.raises(UserError, match=r"intermediate_size \d+ there and 24 here"):
        train_from(tmp_path / "export", kind, inputs, tmp_path / "wide", intermediate_size=24)


def test_a_warm_start_keeps_the_draft_vocabulary(inputs: dict[str, Path], tmp_path: Path) -> None:
    size = read_facts(inputs["target"]).vocab_size
    kept = np.arange(0, size, 3)
    (tmp_path / "export").mkdir()
    offsets = torch.from_numpy(kept - np.arange(len(kept)))
    save_file({"d2t": offsets}, tmp_path / "export" / "model.safetensors")

    def build(name: str, draft_size: int) -> Path:
        params = {
            "drafter": {"draft_vocab_size": draft_size}, "data": {"vocabulary_rows": 100},
            "training": {"start": str(tmp_path / "export")},
        }  # fmt: skip
        vocabulary.build(local_job(tmp_path / name, inputs, params))
        return tmp_path / name

    out = build("same", len(kept))
    assert np.flatnonzero(np.load(out / "t2d.npy")).tolist() == kept.tolist()
    with pytest.raises(UserError, match=f"drafts {len(kept)} tokens, drafter.draft_vocab_size is 64"):
        build("other", 64)
    (tmp_path / "export" / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(UserError, match=r"training.start: .*model.safetensors cannot be read"):
        build("broken", len(kept))


@pytest.mark.parametrize("kind", ["dflash2", "dspark"])
def test_multi_latent_blocks_walk_the_stages(kind: str, inputs: dict[str, Path], tmp_path: Path) -> None:
    facts = read_facts(inputs["target"])
    values = recipe(kind, facts.vocab_size)
    values["drafter"] |= {
        "attention": "mla", "q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4,
        "v_head_dim": 5,
    }  # fmt: skip
    folders = {**inputs, **{name: tmp_path / name for name in ("drafter", "export", "evaluation")}}
    for body, name, needs in (
        (stage, "drafter", ("target", "tokens", "vocabulary", "states")),
        (checkpoint, "export", ("target", "vocabulary", "drafter")),
        (acceptance, "evaluation", ("target", "prompts", "tokens", "export")),
    ):
        body.build(local_job(folders[name], {need: folders[need] for need in needs}, values, values))
    steps = [json.loads(line) for line in (folders["drafter"] / "metrics.jsonl").open()]
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert load_blocks(folders["export"], "float32", facts).config.mla is not None
    numbers = json.loads((folders["evaluation"] / "evaluation.json").read_text())
    slots = [numbers[f"heldout.greedy.slot_{slot}"] for slot in range(1, K + 1)]
    assert numbers["heldout.greedy.acceptance_length"] == pytest.approx(1 + sum(slots))


@pytest.mark.parametrize(("head", "rank"), [("target", None), ("low_rank", 12)])
def test_eagle3_heads_are_trained_as_asked_and_exported_whole(
    head: str, rank: int | None, inputs: dict[str, Path], tmp_path: Path
) -> None:
    facts = read_facts(inputs["target"])
    values = recipe("eagle3", facts.vocab_size)
    values["drafter"] |= {"head": head, "head_rank": rank, "init": "target"}
    folders = {**inputs, **{name: tmp_path / name for name in ("drafter", "export")}}
    for body, name, needs in (
        (stage, "drafter", ("target", "tokens", "vocabulary", "states")),
        (checkpoint, "export", ("target", "vocabulary", "drafter")),
    ):
        body.build(local_job(folders[name], {need: folders[need] for need in needs}, values, values))
    steps = [json.loads(line) for line in (folders["drafter"] / "metrics.jsonl").open()]
    assert steps[-1]["loss"] < steps[0]["loss"]
    trained = load_file(folders["drafter"] / "drafter.safetensors")
    drafter, _, _ = load_drafter(folders["export"], "float32", facts)
    rows = load_head(inputs["target"], torch.float32).head_weight
    if head == "target":
        assert not any("lm_head" in name for name in trained)
        expected = rows
    else:
        expected = trained["lm_head.up.weight"] @ trained["lm_head.down.weight"]
        # It started from the best approximation of that rank (Eckart-Young) and moved on from there.
        assert torch.linalg.matrix_rank(drafter.head) == rank
        assert (drafter.head - rows).norm() < rows.norm()
    torch.testing.assert_close(drafter.head, expected.to(drafter.head.dtype), atol=1e-5, rtol=1e-5)


def test_an_interrupted_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    """Anchors are drawn anew in each epoch, from the epoch's number: a resumed run draws what the first one would."""
    config = BlockConfig(
        kind="dspark", hidden_size=SIZE, num_heads=2, num_kv_heads=1, head_dim=8, intermediate_size=24,
        vocab_size=VOCABULARY, aux_layers=(0, 1), block_size=K, mask_token_id=VOCABULARY - 1, markov_rank=4,
    )  # fmt: skip
    frozen = teacher()
    target = BlockTeacher(Tables(frozen.embedding, frozen.head), frozen.norm, frozen.eps)
    builder = block_builder(config, Anchors(4, 4, "uniform", 0), 4.0)

    def objective(model: BlockDrafter, batch: PackedBatch) -> LossResult:
        return block_loss(model, target, batch.ids, batch.aux, batch.last, batch.index)

    def run(folder: Path, source: Samples) -> list[torch.Tensor]:
        folder.mkdir(exist_ok=True)
        drafter = BlockDrafter(config)
        init_blocks(drafter, 0)
        settings = replace(SETTINGS, checkpoint_seconds=1e-9)
        plan = plan_steps(source.lengths, 0, 2, 96)
        return train(drafter, objective, builder, source, plan, settings, folder, lambda _: None).weights

    whole = run(tmp_path / "whole", Samples())
    with pytest.raises(InterruptedError):
        run(tmp_path / "cut", Samples(limit=31))
    again = run(tmp_path / "cut", Samples())
    assert all(torch.equal(a, b) for a, b in zip(whole, again, strict=True))
    epochs = [builder([40], np.ones(40, dtype=bool), ["a"], epoch, 1).anchor.tolist() for epoch in (0, 0, 1)]
    assert epochs[0] == epochs[1] != epochs[2]


def test_profile_of_a_few_steps(inputs: dict[str, Path], tmp_path: Path) -> None:
    values = recipe("dflash", read_facts(inputs["target"]).vocab_size)
    values["training"] |= {"dtype": "bfloat16", "epochs": 8.0}
    found = profile_training(inputs, values, values, tmp_path, 3)
    assert {"data", "forward", "backward", "optimizer", "metrics", "other"} == found.phases.keys()
    assert sum(found.phases.values()) == pytest.approx(found.numbers["ms_per_step"], rel=1e-6)
    spans = [event["name"] for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]]
    assert all(spans.count(f"step/{name}") == 3 for name in ("data", "forward", "backward", "optimizer"))
    products = next(operation for operation in found.operations if operation.name == "aten::mm")
    assert products.calls * 3 == spans.count("aten::mm")
    page = profile_page(found.numbers, found.phases, [(o.name, o.calls, o.ms) for o in found.operations], "trace.json")
    assert "<svg" in page and "aten::mm" in page
    with pytest.raises(UserError, match=r"steps, fewer than .* and 500 to look at; give a smaller --steps"):
        profile_training(inputs, values, values, tmp_path, 500)
