"""What cannot work is refused before anything runs, in one sentence that names the key."""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from torchspec_core.cli import main
from torchspec_core.config.load import load_recipe
from torchspec_core.data.checks import check_readable, check_scheduler
from torchspec_core.drafters.rope_config import RopeConfig
from torchspec_core.errors import UserError
from torchspec_core.pipeline import open_store, plan
from torchspec_core.recipe_checks import check_fields, check_place, check_target
from torchspec_core.stages import Workspace
from torchspec_core.targets.made import PACKAGE, RANDOM, known_facts

SMOKE = Path(__file__).resolve().parents[2] / "configs/smoke.yaml"
FLASH = ["drafter.kind=dflash", "drafter.mask_token_id=16"]
SPARK_MLA = ["drafter.kind=dspark", "drafter.mask_token_id=16", "drafter.attention=mla", "drafter.q_lora_rank=8"]


def check(*overrides: str) -> None:
    """The checks of the smoke recipe with changes, for its own target: 8 layers, 4 and 2 heads, 2048 tokens."""
    recipe = load_recipe(SMOKE, overrides).recipe
    check_fields(recipe)
    facts = known_facts(recipe.target.source, None)
    assert facts is not None
    check_target(recipe, facts)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["training.patience=3"], "training.patience=3 needs validations .* training.validate_steps"),
        (["training.keep=best"], "training.keep=best needs validations .* training.validate_steps"),
        (["data.heldout=24"], "data.heldout is 24, but .* 24 rows"),
        (["data.min_supervised=161"], "data.min_supervised is 161, more than the 160"),
        (["data.min_supervised=17"], "more than answers.max_new_tokens=16"),
        (["training.tokens_per_step=159"], "training.tokens_per_step is 159, less than .*160"),
        (["capture.token_budget=8"], "capture.token_budget is 8"),
        (["training.betas=[0.9, 1.0]"], r"training.betas .* not \[0.9, 1.0\]"),
        (["training.warmup=0.7", "training.decay=0.4"], "training.warmup=0.7 and training.decay=0.4"),
        (["evaluation.sets=[heldout, heldout]"], "names a set twice"),
        (["evaluation.sets=[mtbench]"], "add heldout to it or set serving.vllm=false"),
        (["data.max_length=2049", "training.tokens_per_step=4096", "capture.token_budget=4096"], "takes 2048 tokens"),
        (["answers.max_new_tokens=1921"], "answers.max_new_tokens leaves no room"),
        (["evaluation.max_new_tokens=1918"], "evaluation.max_new_tokens leaves no room"),
        (["serving.max_new_tokens=1918"], "serving.max_new_tokens leaves no room"),
        (["capture.layers=[1, 1, 2]"], "layer 1 is named twice"),
        (["capture.layers=[1, 2, 8]"], "layer 8 does not exist"),
        (["capture.layers=[-1, 2]"], "layer -1 does not exist"),
        (["capture.layers=[]"], "the list is empty"),
        (["capture.layers=[1, 2, 7]"], "layer 7 is the target's last one"),
        (["drafter.draft_vocab_size=49153"], "the target has 49152 tokens"),
        (["drafter.num_heads=3"], r"num_heads \(3\) must be a multiple of drafter.num_kv_heads \(2\)"),
        (["drafter.head_dim=7"], "head_dim is 7"),
        (["drafter.kind=dflash"], "dflash needs drafter.mask_token_id"),
        (["drafter.kind=dflash", "drafter.mask_token_id=49152"], "mask_token_id is 49152.* end at 49151"),
        (["drafter.kind=dspark", "drafter.mask_token_id=16", "evaluation.k=5"], "block_size=4 drafts 4"),
        (["drafter.kind=dflash", "drafter.mask_token_id=16", "evaluation.k=4"], "block_size=4 drafts 3"),
        (
            ["drafter.kind=dflash", "drafter.mask_token_id=16", "drafter.layer_types=[full_attention]"],
            "layer_types names 1 layers, but drafter.num_layers is 2",
        ),
        (
            [
                "drafter.kind=dflash",
                "drafter.mask_token_id=16",
                "drafter.num_layers=1",
                "drafter.layer_types=[sliding_attention]",
            ],
            "set drafter.sliding_window",
        ),
        (["drafter.kind=dflash2", "drafter.mask_token_id=16", "drafter.conv_group_size=24"], "conv_group_size is 24"),
        ([*FLASH, "drafter.block_size=1"], "block_size is 1, .* use 2 to 32"),
        ([*FLASH, "drafter.kind=dflash2", "drafter.selector_top_k=49153"], "top_k is 49153, .* 49152 tokens"),
        ([*FLASH, "drafter.norm_output=true"], "norm_output is for .* eagle3"),
        ([*FLASH, "drafter.head=target"], "drafter.head is for .* eagle3"),
        (["drafter.head=low_rank"], "head_rank is for drafter.head=low_rank"),
        (["drafter.head=low_rank", "drafter.head_rank=128"], "head_rank is 128, .* 128 wide"),
        ([*SPARK_MLA, "drafter.q_lora_rank=null"], "K3DSparkModel.*set drafter.q_lora_rank"),
        ([*SPARK_MLA, "drafter.is_causal=true"], "K3DSparkModel.*drafter.is_causal"),
        ([*SPARK_MLA, "drafter.fc_norm=true"], "K3DSparkModel.*drafter.fc_norm=false"),
        (
            [
                *SPARK_MLA,
                "drafter.num_layers=1",
                "drafter.layer_types=[sliding_attention]",
                "drafter.sliding_window=8",
            ],
            "K3DSparkModel.*full_attention",
        ),
        (["drafter.attention=mla", "drafter.head_dim=8"], "head_dim has no meaning with drafter.attention=mla"),
        (["drafter.attention=mla", "drafter.num_kv_heads=2"], "num_kv_heads has no meaning"),
        (["drafter.attention=mla", "drafter.qk_rope_head_dim=7"], "qk_rope_head_dim is 7"),
        (["drafter.attention=mla", "drafter.norm_before_fc=true"], "norm_before_fc .* use drafter.fc_norm"),
        (["training.anchor_max_gap=2"], "training.anchor_max_gap is for strided anchors"),
        (["training.dpace_alpha=0.3"], "training.dpace_alpha is for drafter.kind dflash or dflash2, not for eagle3"),
        (["drafter.kind=dspark", "training.loss=l1"], "training.loss is for drafter.kind eagle3, not for dspark"),
    ],
)
def test_what_cannot_work_is_refused_and_the_key_named(overrides: list[str], says: str) -> None:
    with pytest.raises(UserError, match=says) as caught:
        check(*overrides)
    assert "\n" not in str(caught.value)


def test_the_limits_themselves_are_allowed() -> None:
    check("data.heldout=23", "training.tokens_per_step=160", "answers.max_new_tokens=1920", "capture.layers=[0, 6]")
    check("evaluation.max_new_tokens=1917", "drafter.draft_vocab_size=49152", "data.min_supervised=16")
    check("drafter.kind=dspark", "drafter.mask_token_id=49151", "drafter.block_size=3")


def test_every_recipe_of_the_repository_passes() -> None:
    for path in sorted(SMOKE.parent.glob("*.yaml")):
        recipe = load_recipe(path, []).recipe
        check_fields(recipe)
        facts = known_facts(recipe.target.source, None)
        if facts is not None:
            check_target(recipe, facts)


def test_a_multi_latent_drafter_is_refused_for_rotary_positions_that_engines_compute_otherwise() -> None:
    recipe = load_recipe(SMOKE, ["drafter.attention=mla", "drafter.num_heads=3"]).recipe
    facts = known_facts(RANDOM, None)
    assert facts is not None
    check_target(recipe, facts)
    with pytest.raises(UserError, match=r"drafter\.attention: .* linear"):
        check_target(recipe, replace(facts, rope=RopeConfig(1e4, "linear", factor=2.0)))


def test_multi_latent_forms_that_nothing_forbids_are_allowed() -> None:
    window = ("drafter.layer_types=[sliding_attention, full_attention]", "drafter.sliding_window=8")
    check(*SPARK_MLA)
    check("drafter.kind=dflash2", "drafter.mask_token_id=16", "drafter.attention=mla", "drafter.fc_norm=true", *window)


def test_facts_of_a_hub_target_are_unknown_until_it_is_there() -> None:
    assert known_facts("hub:org/name", None) is None
    small, real = known_facts(RANDOM, None), known_facts(PACKAGE, None)
    assert small is not None and real is not None and (small.num_layers, real.num_layers) == (8, 30)


def test_a_store_on_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    check_place(tmp_path / "new/store")
    for place in (tmp_path / "file", tmp_path / "file/store"):
        with pytest.raises(UserError, match="is a file: set run.store"):
            check_place(place)


def test_a_data_file_without_a_usable_row_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "my.jsonl"
    path.write_text("")
    with pytest.raises(UserError, match="holds no rows"):
        check_readable("jsonl", str(path))
    path.write_text('{broken\n{"text": 1}\n')
    with pytest.raises(UserError, match=r"none of the first 2 rows .* \(row 1: "):
        check_readable("jsonl", str(path))
    path.write_text("{broken\n" + json.dumps({"messages": [{"role": "user", "content": "hi"}]}) + "\n")
    check_readable("jsonl", str(path))


def test_a_scheduler_that_does_not_answer_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        check_scheduler(address)
    with pytest.raises(UserError, match=f"no Dask scheduler answers at data.scheduler={address}"):
        check_scheduler(address)


@pytest.mark.parametrize("extra", [[], ["--dry-run"]])
def test_the_command_says_one_sentence_and_exits_with_two(
    extra: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "store"
    assert main(["run", str(SMOKE), f"run.store={store}", "data.prompts.0.rows=2000000000000", *extra]) == 2
    said = capsys.readouterr().err
    assert said.startswith("torchspec: the run needs about") and said.count("\n") == 1
    assert not store.exists()


def test_a_stage_that_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["run", str(SMOKE), "--until", "x"], ["cache", "explain", str(SMOKE), "--stage", "x"]):
        assert main(words) == 2
        assert "there is no stage 'x'; the stages are target, prompts" in capsys.readouterr().err
    assert main(["cache", "ls", "--store", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path} holds no stage\n"


def test_a_dry_run_tells_sizes_and_times_of_the_newest_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def build(workspace: Workspace) -> None:
        with workspace.shard("x") as path:
            path.write_bytes(b"abc")

    recipe = load_recipe(SMOKE, [f"run.store={tmp_path}"]).recipe
    store = open_store(recipe)
    store.materialize(plan(recipe, store)[1].spec, build)
    for changes, says in (([], "same key, 3 B"), (["data.heldout=9"], "not made yet, about 3 B, 0.")):
        assert main(["run", str(SMOKE), f"run.store={tmp_path}", "--dry-run", *changes]) == 0
        assert says in capsys.readouterr().out.splitlines()[1]
