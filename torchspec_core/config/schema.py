"""The recipe's sections and fields.

Every field is declared `Identity` (it changes the bytes a stage writes, so it is part of the stage's key) or `Runtime`
(where and how fast it runs; recorded in the manifest only). `tests/unit/test_config_schema.py` lists each field
and its side.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

IDENTITY = "identity"
RUNTIME = "runtime"


class Section(BaseModel):
    """Base of every recipe section: unknown keys refused, values frozen, types strict."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, validate_default=True)


def Identity(default: object = ..., *, neutral: bool = False, **limits: object) -> Any:  # noqa: N802 - reads as a declaration
    """A field that is part of the stage key.

    neutral: the default gives the bytes that the stage wrote before there was this field; at its default the field is
    left out of the key, so an upgrade makes nothing anew.
    """
    side: dict[str, Any] = {"side": IDENTITY, "neutral": neutral}
    return Field(default, json_schema_extra=side, **limits)  # type: ignore[call-overload]


def Runtime(default: object = ..., **limits: object) -> Any:  # noqa: N802 - reads as a declaration
    """A field that is recorded but never part of the stage key."""
    return Field(default, json_schema_extra={"side": RUNTIME}, **limits)  # type: ignore[call-overload]


Probability = Annotated[float, Field(gt=0.0, le=1.0)]


class RunSection(Section):
    """Who runs what, and where its results are kept."""

    name: str = Runtime(
        "run", min_length=1, pattern=r"^[A-Za-z0-9._-]+$", description="Shown in the UI and in the report."
    )
    store: str = Runtime(".torchspec/store", min_length=1, description="Folder that holds every stage's output.")
    seed: int = Identity(0, ge=0)
    threads: int = Runtime(0, ge=0, description="Threads of each torch process; 0 = all cores.")


class TargetSection(Section):
    """The model whose answers are to come faster."""

    source: str = Identity(
        "package:smollm2-135m-instruct",
        min_length=1,
        description=(
            "`package:smollm2-135m-instruct`, `random:tiny-llama`, a folder in Hub layout, or `hub:ORG/NAME[@REV]`."
        ),
    )
    dtype: Literal["bfloat16", "float32"] = Identity("bfloat16", description="Type of the stored weights.")


class PromptSource(Section):
    """One source of first user turns."""

    name: Literal[
        "sharegpt", "chitchat", "chatterbot", "alpaca_en", "alpaca_zh", "glaive_en", "glaive_zh", "tool_reasoning",
        "jsonl", "file", "hub",
    ] = Identity(description="A package, or your own: see docs/data.md.")  # fmt: skip
    rows: int = Identity(gt=0, description="Prompts to take at most, after all filters.")
    turns: int = Identity(
        1, neutral=True, gt=0,
        description="User turns to take of each conversation; the target answers one after the other.",
    )  # fmt: skip
    path: str | None = Identity(None, description="The file or folder, or `ORG/NAME[@REVISION]` for `hub`.")


class ConversationSource(Section):
    """Whole conversations to train on as they are (not answered again by the target)."""

    name: Literal[
        "sharegpt", "chitchat", "alpaca_en", "alpaca_zh", "glaive_en", "glaive_zh", "tool_reasoning",
        "jsonl", "file", "hub",
    ] = Identity(description="A package, or your own: see docs/data.md.")  # fmt: skip
    rows: int = Identity(gt=0, description="Rows to read at most; those that cannot be used count too.")
    path: str | None = Identity(None, description="The file or folder, or `ORG/NAME[@REVISION]` for `hub`.")


class DataSection(Section):
    """Prompts, conversations, rendering, masks."""

    prompts: tuple[PromptSource, ...] = Identity(
        (PromptSource(name="sharegpt", rows=1000),), min_length=1, strict=False
    )
    max_prompt_tokens: int = Identity(128, gt=0, description="Longer first turns are left out.")
    heldout: int = Identity(60, gt=0, description="Prompts set aside for validation and evaluation; never trained on.")
    conversations: tuple[ConversationSource, ...] = Identity((), strict=False)
    max_length: int = Identity(512, gt=1, description="Tokens of one training sample.")
    min_supervised: int = Identity(8, gt=0, description="Samples with fewer supervised tokens are left out.")
    supervise: Literal["all", "last", "last-if-thinking"] = Identity(
        "all", description="Which assistant turns; `last-if-thinking`: the last where a turn has reasoning, else all."
    )
    reasoning: Literal["keep", "drop"] = Identity(
        "keep", description="Reasoning: rendered where the template would, or left out of every turn."
    )
    special_text: Literal["text", "token"] = Identity(
        "text", description="What the text of a control token inside a message becomes."
    )
    vocabulary_rows: int = Identity(
        4000, ge=0, description="Raw conversations counted, besides the training tokens, for the draft vocabulary."
    )
    max_rejected: float = Runtime(0.01, ge=0.0, le=1.0, description="Share of bad rows above which the run stops.")
    shard_rows: int = Identity(512, gt=0, description="Conversations in one token shard.")
    workers: int = Runtime(2, ge=0, description="Dask workers; 0 = in this process.")
    scheduler: str | None = Runtime(None, description="Address of a running Dask scheduler; none = a local cluster.")


class AnswersSection(Section):
    """The target answers the prompts: a drafter learns the target's own words."""

    temperature: float = Identity(0.8, ge=0.0, le=2.0)
    top_p: Probability = Identity(1.0)
    max_new_tokens: int = Identity(128, gt=0)
    dtype: Literal["bfloat16", "float32"] = Identity("bfloat16")
    shard_prompts: int = Identity(128, gt=0, description="Prompts in one shard: what a killed run loses at most.")
    max_num_seqs: int = Runtime(128, gt=0, description="Requests decoded at once.")
    kv_cache_gib: int = Runtime(2, gt=0)


class CaptureSection(Section):
    """Hidden states out of the target."""

    engine: Literal["transformers", "vllm", "offline"] = Runtime(
        "transformers",
        description=(
            "Runs the target; states of one engine differ from another's in their last bits. `offline`: nothing runs, "
            "the states are in `data_path`."
        ),
    )
    data_path: str | None = Runtime(
        None, description="Folder that `python -m torchspec_core.offline.generate` filled, for `offline`."
    )
    layers: tuple[int, ...] | None = Identity(
        None,
        strict=False,
        description=("Canonical layer ids (residual stream after 0-based decoder layer j); none = 1, L//2-1, L-4."),
    )
    dtype: Literal["bfloat16", "float32"] = Identity("bfloat16")
    token_budget: int = Runtime(2048, gt=0, description="Tokens in one forward pass, padding included.")
    shard_mib: int = Identity(64, gt=0)
    pipeline_parallel: int = Runtime(1, gt=0, description="Stages of `vllm`; each writes the states of its own layers.")
    tensor_parallel: int = Runtime(1, gt=0, description="Ranks of a stage of `vllm`; the first one writes.")
    outstanding: int = Runtime(32, gt=0, description="Requests in `vllm` at once.")
    buffer_mib: int = Runtime(
        512, gt=0, description="States of `vllm` that are not written yet, over all stages; two shards at least."
    )
    kv_cache_gib: int = Runtime(1, gt=0, description="Of each rank of `vllm`.")


class StoreSection(Section):
    """How hidden states are kept and read."""

    url: str | None = Runtime(None, description="Where states go, `s3://BUCKET/PREFIX`; None = the stage's folder.")
    cache_mib: int = Runtime(1024, gt=0, description="States from `url` that the trainer keeps in memory.")
    verify: Literal["always", "sample", "never"] = Runtime("sample", description="Checksums on read.")


class DrafterSection(Section):
    """The small model."""

    kind: Literal["eagle3", "dflash", "dflash2", "dspark"] = Identity("eagle3")
    attention: Literal["gqa", "mla"] = Identity(
        "gqa",
        description="`gqa`: grouped-query. `mla`: multi-latent; what serves it: docs/drafters.md.",
    )
    num_heads: int | None = Identity(None, gt=0, description="None = as the target.")
    num_kv_heads: int | None = Identity(None, gt=0, description="For `gqa`.")
    head_dim: int | None = Identity(None, gt=0, description="For `gqa`.")
    q_lora_rank: int | None = Identity(
        None, gt=0, description="For `mla`: rank of the query projection; None = a full matrix, which vLLM cannot load."
    )
    kv_lora_rank: int = Identity(512, gt=0, description="For `mla`: numbers of the latent row that is cached.")
    qk_nope_head_dim: int = Identity(128, gt=0, description="For `mla`: a head's query and key without positions.")
    qk_rope_head_dim: int = Identity(64, gt=0, description="For `mla`: the same with rotary positions, even.")
    v_head_dim: int = Identity(128, gt=0, description="For `mla`: a head's value.")
    intermediate_size: int | None = Identity(None, gt=0)
    draft_vocab_size: int = Identity(
        8192, gt=0, description="Tokens an `eagle3` can propose; the target's size = all. Others propose all."
    )
    norm_before_residual: bool = Identity(False, description="The residual branch starts from the normed hidden state.")
    norm_before_fc: bool = Identity(False, description="One norm over all captured states, before `fc`; `gqa` only.")
    fc_norm: bool = Identity(
        False, description="A norm for each captured layer's state, before `fc`; vLLM knows it for `eagle3` only."
    )
    norm_output: bool = Identity(False, description="The next depth reads the drafter's normed output.")
    head: Literal["own", "target", "low_rank"] = Identity(
        "own", description="`eagle3`'s: trained, the target's own rows frozen, or a trained product of `head_rank`."
    )
    head_rank: int | None = Identity(None, gt=0, description="For `head: low_rank`.")
    init: Literal["random", "target"] = Identity(
        "random", description="`target`: head and final norm start as the target's."
    )
    num_layers: int = Identity(2, gt=0, description="Of the block drafters `dflash`, `dflash2`, `dspark`.")
    block_size: int = Identity(
        4,
        gt=0,
        le=32,
        description="Slots of a block; `dspark` drafts as many tokens, the other block drafters one less.",
    )
    mask_token_id: int | None = Identity(
        None, ge=0, description="Token whose embedding marks the slots to fill: an id that texts never use."
    )
    layer_types: tuple[Literal["full_attention", "sliding_attention"], ...] | None = Identity(
        None, strict=False, description="One for each layer of a block drafter; none = all full."
    )
    sliding_window: int | None = Identity(None, gt=0, description="Tokens that a sliding layer sees, itself included.")
    is_causal: bool | None = Identity(
        None, description="Of all layers of a block drafter; none = sliding layers are causal, full ones are not."
    )
    conv_kernel_size: int = Identity(2, gt=0, description="Taps of `dflash2`'s convolution.")
    conv_group_size: int = Identity(16, gt=0, description="Channels that share a dynamic coefficient.")
    selector_rank: int = Identity(256, gt=0, description="Of `dflash2`'s candidate selector.")
    selector_top_k: int = Identity(16, gt=0, description="Candidates of each slot.")
    selector_codebook: Literal["projected", "free"] = Identity(
        "projected", description="Projections of the target's embedding and head, or tables of their own."
    )
    markov_rank: int = Identity(256, gt=0, description="Of `dspark`'s Markov head.")


class TrainingSection(Section):
    """The optimiser, the batches, the schedule."""

    start: str | None = Identity(
        None,
        neutral=True,
        description=(
            "Go on from an exported drafter of the same kind and shape: its folder. The draft vocabulary is its own "
            "too; `drafter.init` does nothing then."
        ),
    )
    ttt_length: int = Identity(3, gt=0, le=16, description="Depths of the training-time test.")
    depth_decay: float = Identity(0.8, gt=0.0, le=1.0, description="Weight of depth d is depth_decay**d.")
    anchors: int | None = Identity(
        None,
        gt=0,
        description=(
            "Rows of a sample that draft in an epoch, at most; none = all that lead to a loss. For block drafters: "
            "blocks; none = 64."
        ),
    )
    anchor_max_gap: int | None = Identity(
        None,
        ge=0,
        description="Rows left out between two `strided` anchors at most; none = ttt_length, or drafter.block_size.",
    )
    anchor_sampling: Literal["strided", "uniform"] | None = Identity(
        None,
        description=(
            "`strided`: evenly spaced from a random start; `uniform`: drawn without replacement; none = strided for "
            "`eagle3`, uniform for block drafters."
        ),
    )
    mask_alignment: Literal["predicted", "reference"] = Identity("predicted")
    loss: Literal["soft_ce", "hard_ce", "l1", "lk_alpha", "lk_lambda"] = Identity(
        "soft_ce",
        description=(
            "Of `eagle3`: cross-entropy with the target's distribution, or with the text's token; L1 distance; "
            "-log of the acceptance probability; KL that gives way to total variation (arXiv 2602.23881)."
        ),
    )
    lk_eta: float = Identity(3.0, ge=0.0, description="`lk_lambda`: share of KL = exp(-lk_eta * mean acceptance).")
    normalisation: Literal["supervised", "per_sequence"] = Identity(
        "supervised", description="Every supervised token counts the same, or every conversation does."
    )
    block_gamma: float = Identity(4.0, gt=0.0, description="Prediction n of a block weighs exp(-n / block_gamma).")
    block_weighting: Literal["decay", "dpace"] = Identity(
        "decay",
        description=(
            "Of `dflash` and `dflash2`. `dpace`: what each slot adds to the accepted length that the drafter itself "
            "expects (arXiv 2605.18810), instead of block_gamma; one more pass over the head."
        ),
    )
    dpace_alpha: float = Identity(0.5, gt=0.0, le=1.0, description="`dpace`: confidences are (1 - alpha) q + alpha.")
    dflash_l1_weight: float = Identity(
        0.0, ge=0.0, description="Of `dflash`'s and `dflash2`'s distance to the target's distribution."
    )
    selector_weight: float = Identity(1.0, ge=0.0, description="Of `dflash2`'s selector loss.")
    selector_stop_gradient: bool = Identity(False, description="The selector's loss does not move the backbone.")
    cross_entropy_weight: float = Identity(0.1, ge=0.0, description="Of `dspark`'s cross-entropy.")
    l1_weight: float = Identity(0.9, ge=0.0, description="Of `dspark`'s distance to the target's distribution.")
    confidence_weight: float = Identity(1.0, ge=0.0, description="Of `dspark`'s confidence loss.")
    confidence_stop_gradient: bool = Identity(False, description="The confidence's loss moves its own head only.")
    optimizer: Literal["adamw", "muon"] = Identity("adamw")
    lr: float = Identity(1e-3, gt=0.0)
    muon_lr: float = Identity(0.02, gt=0.0, description="Learning rate of the matrices under `muon`.")
    weight_decay: float = Identity(0.01, ge=0.0)
    betas: tuple[float, float] = Identity((0.9, 0.95), strict=False)
    clip: float = Identity(1.0, gt=0.0)
    schedule: Literal["constant", "linear", "cosine", "wsd"] = Identity("wsd")
    warmup: float = Identity(0.02, ge=0.0, le=1.0, description="Share of the steps.")
    decay: float = Identity(0.4, ge=0.0, le=1.0, description="Share of the steps that decay, for `wsd`.")
    epochs: float = Identity(3.0, gt=0.0)
    tokens_per_step: int = Identity(1024, gt=0, description="Token budget of one optimiser step.")
    batching: Literal["packed", "grouped"] = Identity(
        "packed",
        description=(
            "`packed`: samples that fill the budget together; `grouped`: samples of like length, as many as fit when "
            "each is as long as the longest."
        ),
    )
    dtype: Literal["bfloat16", "float32"] = Identity(
        "bfloat16", description="Compute type; parameters keep fp32 masters."
    )
    ema: float = Identity(0.0, ge=0.0, lt=1.0, description="Decay of the averaged weights that are exported; 0 = off.")
    validate_steps: int = Identity(0, ge=0, description="Steps between validations; 0 = at the end only.")
    patience: int | None = Identity(
        None,
        gt=0,
        description="Stop after so many validations without a better estimated acceptance length; none = go on.",
    )
    keep: Literal["last", "best"] = Identity(
        "last", description="Weights that are exported: of the last step, or of the best validation."
    )
    checkpoint_seconds: float = Runtime(30.0, gt=0.0)
    log_steps: int = Runtime(10, gt=0)


class EvaluationSection(Section):
    """How well the drafter does: real verification on prompts it never saw."""

    prompts: int = Identity(40, gt=0, description="Prompts of each set.")
    sets: tuple[Literal["heldout", "mtbench", "gsm8k"], ...] = Identity(
        ("heldout", "mtbench", "gsm8k"), min_length=1, strict=False
    )
    max_new_tokens: int = Identity(96, gt=0)
    k: int = Identity(3, gt=0, le=15, description="Draft tokens a step.")
    temperature: float = Identity(1.0, gt=0.0, description="Of the sampled runs; a greedy run is always made.")
    top_p: Probability = Identity(0.95)
    verification: Literal["standard", "block"] = Identity(
        "standard", description="Rule of the sampled runs; both are lossless, `block` accepts more on average."
    )
    dynamic: Literal["none", "threshold", "scheduler"] = Identity(
        "none",
        description="Verify every draft; those before the first whose confidence is below `confidence_threshold`; or "
        "as many as pay by the measured cost of a step. Confidence is DSpark's own, else estimated from the draft's "
        "probabilities.",
    )
    confidence_threshold: float = Identity(0.5, gt=0.0, lt=1.0)
    dtype: Literal["bfloat16", "float32"] = Identity("float32", description="Of the greedy runs.")
    sampled_dtype: Literal["bfloat16", "float32"] = Identity("bfloat16", description="Of the sampled runs.")
    batch_size: int = Runtime(40, gt=0)


BenchmarkName = Literal[
    "gsm8k", "math500", "aime", "humaneval", "fanoutqa", "truthfulqa", "mmath_zh", "chatterbot_zh", "mtbench",
    "chitchat",
]  # fmt: skip


class BenchmarksSection(Section):
    """What `torchspec evaluate` measures, with the settings of `evaluation`."""

    names: tuple[BenchmarkName, ...] = Identity(get_args(BenchmarkName), strict=False)
    prompts: int = Identity(20, gt=0, description="Of each, taken evenly from the whole set.")
    files: tuple[str, ...] = Runtime(
        (), strict=False, description="Your own JSONL files in SPEED-Bench's shape; `turns` alone is enough."
    )


class ServingSection(Section):
    """The exported drafter in a real vLLM."""

    vllm: bool = Identity(True, description="Measure acceptance with vLLM's own counters as well.")
    sampled: bool = Identity(
        True,
        description="Also at `evaluation.temperature` and `top_p`; refused if the text leaves the target's nucleus.",
    )
    prompts: int = Identity(40, gt=0, description="Held-out prompts.")
    max_new_tokens: int = Identity(64, gt=0)
    dtype: Literal["bfloat16", "float32"] = Identity("float32")


class Recipe(Section):
    """Everything one run needs to know."""

    run: RunSection = RunSection()
    target: TargetSection = TargetSection()
    data: DataSection = DataSection()
    answers: AnswersSection = AnswersSection()
    capture: CaptureSection = CaptureSection()
    store: StoreSection = StoreSection()
    drafter: DrafterSection = DrafterSection()
    training: TrainingSection = TrainingSection()
    evaluation: EvaluationSection = EvaluationSection()
    benchmarks: BenchmarksSection = BenchmarksSection()
    serving: ServingSection = ServingSection()
