"""What a recipe asks that cannot work, found before anything runs: sizes that contradict each other or the target.

The schema checks each field alone; here are the rules between fields, and between fields and the target's sizes, as
far as those are known before the target is made. Stages check what they meet again; this only saves the hours before.
"""

from __future__ import annotations

import os
from pathlib import Path

from torchspec_core.config.schema import DrafterSection, Recipe, StoreSection
from torchspec_core.drafters.rope_config import check_mla_rope
from torchspec_core.errors import UserError
from torchspec_core.kinds import KINDS
from torchspec_core.targets.facts import TargetFacts, aux_layers


def _refuse(wrong: bool, sentence: str) -> None:
    if wrong:
        raise UserError(sentence)


def check_fields(recipe: Recipe) -> None:
    """Rules between the recipe's own fields; raises `UserError` for the first that is broken."""
    data, training, blocks = recipe.data, recipe.training, KINDS[recipe.drafter.kind].blocks
    rows = sum(source.rows for source in data.prompts)
    _refuse(
        data.heldout >= rows,
        f"data.heldout is {data.heldout}, but the sources of data.prompts give {rows} rows in all and training needs "
        "some of them: lower data.heldout or raise the rows of a source",
    )
    _refuse(
        data.min_supervised > data.max_length,
        f"data.min_supervised is {data.min_supervised}, more than the {data.max_length} tokens of data.max_length: "
        "lower it",
    )
    _refuse(
        not data.conversations and data.min_supervised > recipe.answers.max_new_tokens,
        f"data.min_supervised is {data.min_supervised}, more than answers.max_new_tokens="
        f"{recipe.answers.max_new_tokens}, so that every answer would be left out: lower the first or raise the second",
    )
    for name, budget in (
        ("training.tokens_per_step", training.tokens_per_step),
        ("capture.token_budget", recipe.capture.token_budget),
    ):
        _refuse(
            budget < data.max_length,
            f"{name} is {budget}, less than a sample may have (data.max_length={data.max_length}): raise it or lower "
            "data.max_length",
        )
    _refuse(
        not all(0.0 <= beta < 1.0 for beta in training.betas),
        f"training.betas must be two numbers from 0 to below 1, not {list(training.betas)}: the default is [0.9, 0.95]",
    )
    _refuse(
        training.schedule == "wsd" and training.warmup + training.decay > 1.0,
        f"training.warmup={training.warmup:g} and training.decay={training.decay:g} are more than all steps together: "
        "lower one of them",
    )
    for name, wanted in (("patience", training.patience is not None), ("keep", training.keep == "best")):
        _refuse(
            wanted and training.validate_steps == 0,
            f"training.{name}={getattr(training, name)} needs validations while it trains: set training.validate_steps "
            "to the steps between them",
        )
    strided = (training.anchor_sampling or ("uniform" if blocks else "strided")) == "strided"
    _refuse(
        training.anchor_max_gap is not None and not (strided and (blocks or training.anchors is not None)),
        "training.anchor_max_gap is for strided anchors: set training.anchors and training.anchor_sampling=strided, or "
        "leave it out",
    )
    _check_capture(recipe)
    _check_store(recipe.store)
    _check_objective(recipe)
    _check_forms(recipe.drafter)
    sets = recipe.evaluation.sets
    _refuse(
        len(set(sets)) < len(sets),
        f"evaluation.sets names a set twice ({', '.join(sets)}): name each one once",
    )
    _refuse(
        recipe.serving.vllm and "heldout" not in sets,
        "serving.vllm measures on the held-out prompts, which evaluation.sets leaves out: add heldout to it or set "
        "serving.vllm=false",
    )

    _check_block(recipe)


def _check_capture(recipe: Recipe) -> None:
    """Fields of `capture` that only some engines read."""
    capture = recipe.capture
    _refuse(
        capture.engine == "offline" and capture.data_path is None,
        "capture.engine=offline needs capture.data_path: the folder that `python -m torchspec_core.offline.generate` "
        "filled",
    )
    _refuse(
        capture.engine != "offline" and capture.data_path is not None,
        f"capture.data_path is for capture.engine=offline, not for {capture.engine}: set the engine or leave it out",
    )
    for name in ("pipeline_parallel", "tensor_parallel"):
        _refuse(
            capture.engine != "vllm" and getattr(capture, name) > 1,
            f"capture.{name} is for capture.engine=vllm, not for {capture.engine}: set the engine or leave it out",
        )


def _check_store(store: StoreSection) -> None:
    """An address that means nothing, or a store that ends with the process that opened it."""
    if store.url is not None:
        from torchspec_core.store.address import check_address  # it loads NumPy

        check_address(store.url)
        _refuse(
            store.url.startswith("memory:"),
            f"store.url={store.url}: memory ends with the stage that fills it; use a folder, s3:// or mooncake://",
        )


def check_states_place(store: StoreSection) -> None:
    """A store for states that refuses or does not answer, before any work."""
    if store.url is not None:
        from torchspec_core.store.address import open_store

        open_store(store.url).close()


def _check_objective(recipe: Recipe) -> None:
    """Fields of `training` that only some kinds read."""
    mine = KINDS[recipe.drafter.kind]
    for name, field in type(recipe.training).model_fields.items():
        kinds = [kind.name for kind in KINDS.values() if name in kind.objective]
        _refuse(
            bool(kinds) and name not in mine.objective and getattr(recipe.training, name) != field.default,
            f"training.{name} is for drafter.kind {' or '.join(kinds)}, not for {mine.name}: leave it out",
        )


def _check_block(recipe: Recipe) -> None:
    """The shape of a block drafter; other kinds have none."""
    drafter, k = recipe.drafter, recipe.evaluation.k
    if not KINDS[drafter.kind].blocks:
        return
    _refuse(
        drafter.mask_token_id is None,
        f"drafter.kind {drafter.kind} needs drafter.mask_token_id: set it to a token of the target that texts never "
        "use, such as a reserved one",
    )
    types = drafter.layer_types or ()
    _refuse(
        bool(types) and len(types) != drafter.num_layers,
        f"drafter.layer_types names {len(types)} layers, but drafter.num_layers is {drafter.num_layers}: make them "
        "agree",
    )
    _refuse(
        "sliding_attention" in types and drafter.sliding_window is None,
        "drafter.layer_types has sliding layers: set drafter.sliding_window to the tokens that they see",
    )
    drafted = KINDS[drafter.kind].predictions(drafter.block_size)
    _refuse(
        drafted < 1,
        f"drafter.block_size is {drafter.block_size}, which leaves a {drafter.kind} nothing to draft: use 2 to 32",
    )
    _refuse(
        k > drafted,
        f"evaluation.k is {k}, but a {drafter.kind} with drafter.block_size={drafter.block_size} drafts {drafted} "
        "tokens a step: lower the first or raise the second",
    )


def _check_forms(drafter: DrafterSection) -> None:
    """Rules between the drafter's attention, its sizes and its norms."""
    kind = KINDS[drafter.kind]
    forms = {name: getattr(drafter, name) for name in ("norm_before_residual", "norm_before_fc", "norm_output")}
    forms |= {"head": drafter.head != "own", "head_rank": drafter.head_rank is not None}
    named = [name for name, asked in forms.items() if asked]
    _refuse(
        bool(named) and kind.blocks,
        f"drafter.{(named or [''])[0]} is for drafter.kind eagle3, not for {drafter.kind}: leave it out",
    )
    _refuse(
        (drafter.head == "low_rank") != (drafter.head_rank is not None),
        "drafter.head_rank is for drafter.head=low_rank, which needs it: set both or none",
    )
    if drafter.attention != "mla":
        return
    for name, value in (("num_kv_heads", drafter.num_kv_heads), ("head_dim", drafter.head_dim)):
        _refuse(
            value is not None,
            f"drafter.{name} has no meaning with drafter.attention=mla: leave it out; the widths are kv_lora_rank, "
            "qk_nope_head_dim, qk_rope_head_dim and v_head_dim",
        )
    _refuse(
        drafter.qk_rope_head_dim % 2 != 0,
        f"drafter.qk_rope_head_dim is {drafter.qk_rope_head_dim}, but rotary positions need an even one: change it",
    )
    _refuse(
        drafter.norm_before_fc,
        "drafter.norm_before_fc is not known to engines with drafter.attention=mla: use drafter.fc_norm",
    )
    unread = kind.unread(
        full_q=drafter.q_lora_rank is None,
        sliding="sliding_attention" in (drafter.layer_types or ()),
        causal=bool(drafter.is_causal),
        fc_norm=drafter.fc_norm,
    )
    _refuse(unread is not None, unread or "")


def check_target(recipe: Recipe, facts: TargetFacts) -> None:
    """Rules between the recipe and its target's sizes; raises `UserError` for the first that is broken."""
    prompt, context = recipe.data.max_prompt_tokens, facts.max_position_embeddings
    _refuse(
        recipe.data.max_length > context,
        f"data.max_length is {recipe.data.max_length}, but the target takes {context} tokens: lower it to that or less",
    )
    for name, asked in (
        ("answers.max_new_tokens", recipe.answers.max_new_tokens),
        ("evaluation.max_new_tokens", recipe.evaluation.max_new_tokens + recipe.evaluation.k),
        ("serving.max_new_tokens", recipe.serving.max_new_tokens + recipe.evaluation.k),
    ):
        _refuse(
            prompt + asked > context,
            f"{name} leaves no room for a prompt of data.max_prompt_tokens={prompt} in the target's {context} tokens: "
            "lower one of the two",
        )
    layers = aux_layers(facts, recipe.capture.layers)
    _refuse(
        facts.final_layer in layers,
        f"capture.layers: layer {facts.final_layer} is the target's last one, which is captured in any case as what "
        "the drafter learns from: name other layers",
    )
    drafter = recipe.drafter
    _refuse(
        drafter.draft_vocab_size > facts.vocab_size,
        f"drafter.draft_vocab_size is {drafter.draft_vocab_size}, but the target has {facts.vocab_size} tokens: lower "
        "it to that or less",
    )
    _refuse(
        drafter.mask_token_id is not None and drafter.mask_token_id >= facts.vocab_size,
        f"drafter.mask_token_id is {drafter.mask_token_id}, but the target's tokens end at {facts.vocab_size - 1}: "
        "use one of them that texts never use",
    )
    _refuse(
        drafter.kind == "dflash2" and facts.hidden_size % drafter.conv_group_size != 0,
        f"drafter.conv_group_size is {drafter.conv_group_size}, which does not divide the target's width of "
        f"{facts.hidden_size}: use one that does",
    )
    _refuse(
        drafter.kind == "dflash2" and drafter.selector_top_k > facts.vocab_size,
        f"drafter.selector_top_k is {drafter.selector_top_k}, but the target has {facts.vocab_size} tokens: lower it",
    )
    _refuse(
        drafter.head_rank is not None and drafter.head_rank >= facts.hidden_size,
        f"drafter.head_rank is {drafter.head_rank}, but the target's head is {facts.hidden_size} wide: lower it, or "
        "use drafter.head=own",
    )
    if drafter.attention == "mla":
        check_mla_rope(facts.rope)
        return
    heads, kv_heads = drafter.num_heads or facts.num_heads, drafter.num_kv_heads or facts.num_kv_heads
    _refuse(
        heads % kv_heads != 0,
        f"drafter.num_heads ({heads}) must be a multiple of drafter.num_kv_heads ({kv_heads}), which are the target's "
        "where the recipe names none: change one of them",
    )
    _refuse(
        (drafter.head_dim or facts.head_dim) % 2 != 0,
        f"drafter.head_dim is {drafter.head_dim or facts.head_dim}, but rotary positions need an even one: change it",
    )


def check_place(root: Path) -> None:
    """Refuse a store that cannot be written to; makes nothing."""
    place = root
    while not place.exists() and place != place.parent:
        place = place.parent
    _refuse(not place.is_dir(), f"the store {root} cannot be made, {place} is a file: set run.store to a folder")
    _refuse(
        not os.access(place, os.W_OK | os.X_OK),
        f"the store {root} cannot be written, {place} is not writable: change its permissions or set run.store to a "
        "folder of yours",
    )
