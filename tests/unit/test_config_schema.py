"""Every recipe field and its side, entered by hand.

A wrong split is a wrong answer: an identity field that is called runtime gives stale results, a runtime field that is
called identity makes everything anew.
"""

from __future__ import annotations

import pytest
from pydantic import Field, ValidationError

from torchspec_core.config.fields import identity_of, keyed_of, runtime_of, schema_sides, side_of
from torchspec_core.config.schema import DataSection, PromptSource, RunSection, TrainingSection

SIDES = {
    "run.name": "runtime",
    "run.store": "runtime",
    "run.seed": "identity",
    "run.threads": "runtime",
    "target.source": "identity",
    "target.dtype": "identity",
    "data.prompts": "identity",
    "data.prompts[].name": "identity",
    "data.prompts[].rows": "identity",
    "data.prompts[].turns": "identity",
    "data.prompts[].path": "identity",
    "data.max_prompt_tokens": "identity",
    "data.heldout": "identity",
    "data.conversations": "identity",
    "data.conversations[].name": "identity",
    "data.conversations[].rows": "identity",
    "data.conversations[].path": "identity",
    "data.max_length": "identity",
    "data.min_supervised": "identity",
    "data.supervise": "identity",
    "data.reasoning": "identity",
    "data.special_text": "identity",
    "data.vocabulary_rows": "identity",
    "data.max_rejected": "runtime",
    "data.shard_rows": "identity",
    "data.workers": "runtime",
    "data.scheduler": "runtime",
    "answers.temperature": "identity",
    "answers.top_p": "identity",
    "answers.max_new_tokens": "identity",
    "answers.dtype": "identity",
    "answers.shard_prompts": "identity",
    "answers.max_num_seqs": "runtime",
    "answers.kv_cache_gib": "runtime",
    "capture.engine": "runtime",
    "capture.data_path": "runtime",
    "capture.layers": "identity",
    "capture.dtype": "identity",
    "capture.token_budget": "runtime",
    "capture.shard_mib": "identity",
    "capture.pipeline_parallel": "runtime",
    "capture.tensor_parallel": "runtime",
    "capture.outstanding": "runtime",
    "capture.buffer_mib": "runtime",
    "capture.kv_cache_gib": "runtime",
    "store.url": "runtime",
    "store.cache_mib": "runtime",
    "store.verify": "runtime",
    "drafter.kind": "identity",
    "drafter.attention": "identity",
    "drafter.num_heads": "identity",
    "drafter.num_kv_heads": "identity",
    "drafter.head_dim": "identity",
    "drafter.q_lora_rank": "identity",
    "drafter.kv_lora_rank": "identity",
    "drafter.qk_nope_head_dim": "identity",
    "drafter.qk_rope_head_dim": "identity",
    "drafter.v_head_dim": "identity",
    "drafter.intermediate_size": "identity",
    "drafter.draft_vocab_size": "identity",
    "drafter.norm_before_residual": "identity",
    "drafter.norm_before_fc": "identity",
    "drafter.fc_norm": "identity",
    "drafter.norm_output": "identity",
    "drafter.head": "identity",
    "drafter.head_rank": "identity",
    "drafter.init": "identity",
    "drafter.num_layers": "identity",
    "drafter.block_size": "identity",
    "drafter.mask_token_id": "identity",
    "drafter.layer_types": "identity",
    "drafter.sliding_window": "identity",
    "drafter.is_causal": "identity",
    "drafter.conv_kernel_size": "identity",
    "drafter.conv_group_size": "identity",
    "drafter.selector_rank": "identity",
    "drafter.selector_top_k": "identity",
    "drafter.selector_codebook": "identity",
    "drafter.markov_rank": "identity",
    "training.start": "identity",
    "training.ttt_length": "identity",
    "training.depth_decay": "identity",
    "training.anchors": "identity",
    "training.anchor_max_gap": "identity",
    "training.anchor_sampling": "identity",
    "training.mask_alignment": "identity",
    "training.loss": "identity",
    "training.lk_eta": "identity",
    "training.normalisation": "identity",
    "training.block_gamma": "identity",
    "training.block_weighting": "identity",
    "training.dpace_alpha": "identity",
    "training.dflash_l1_weight": "identity",
    "training.selector_weight": "identity",
    "training.selector_stop_gradient": "identity",
    "training.cross_entropy_weight": "identity",
    "training.l1_weight": "identity",
    "training.confidence_weight": "identity",
    "training.confidence_stop_gradient": "identity",
    "training.optimizer": "identity",
    "training.lr": "identity",
    "training.muon_lr": "identity",
    "training.weight_decay": "identity",
    "training.betas": "identity",
    "training.clip": "identity",
    "training.schedule": "identity",
    "training.warmup": "identity",
    "training.decay": "identity",
    "training.epochs": "identity",
    "training.tokens_per_step": "identity",
    "training.batching": "identity",
    "training.dtype": "identity",
    "training.ema": "identity",
    "training.checkpoint_seconds": "runtime",
    "training.validate_steps": "identity",
    "training.patience": "identity",
    "training.keep": "identity",
    "training.log_steps": "runtime",
    "evaluation.prompts": "identity",
    "evaluation.sets": "identity",
    "evaluation.max_new_tokens": "identity",
    "evaluation.k": "identity",
    "evaluation.temperature": "identity",
    "evaluation.top_p": "identity",
    "evaluation.verification": "identity",
    "evaluation.dynamic": "identity",
    "evaluation.confidence_threshold": "identity",
    "evaluation.dtype": "identity",
    "evaluation.sampled_dtype": "identity",
    "evaluation.batch_size": "runtime",
    "benchmarks.names": "identity",
    "benchmarks.prompts": "identity",
    "benchmarks.files": "runtime",
    "serving.vllm": "identity",
    "serving.sampled": "identity",
    "serving.prompts": "identity",
    "serving.max_new_tokens": "identity",
    "serving.dtype": "identity",
}


def test_each_field_is_on_its_side() -> None:
    assert schema_sides() == SIDES


def test_a_field_without_a_side_is_refused() -> None:
    with pytest.raises(TypeError, match="neither"):
        side_of(Field(3))


def test_identity_and_runtime_parts_are_json_and_cover_the_section() -> None:
    section = DataSection(prompts=(PromptSource(name="jsonl", rows=3, path="a.jsonl"),))
    identity, runtime = identity_of(section), runtime_of(section)
    assert identity["prompts"] == [{"name": "jsonl", "rows": 3, "turns": 1, "path": "a.jsonl"}]
    assert runtime == {"max_rejected": 0.01, "workers": 2, "scheduler": None}
    assert {*identity, *runtime} == set(DataSection.model_fields)
    assert identity_of(RunSection()) == {"seed": 0}
    assert identity_of(TrainingSection())["betas"] == [0.9, 0.95]


def test_a_neutral_field_is_in_the_key_only_away_from_its_default() -> None:
    def keyed(turns: int) -> object:
        section = DataSection(prompts=(PromptSource(name="jsonl", rows=3, path="a.jsonl", turns=turns),))
        return keyed_of(section)["prompts"]

    assert keyed(1) == [{"name": "jsonl", "rows": 3, "path": "a.jsonl"}]
    assert keyed(2) == [{"name": "jsonl", "rows": 3, "turns": 2, "path": "a.jsonl"}]


def test_sections_are_frozen_and_strict() -> None:
    with pytest.raises(ValidationError):
        RunSection(seed="3")
    with pytest.raises(ValidationError):
        RunSection().seed = 3  # type: ignore[misc]
