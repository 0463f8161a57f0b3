"""One peer's forward pass on the tiny drafters, in a process of its own: `python tests/peers/run.py PEER CASE OUT`.

PEER is `speculators`, `specforge` or `nemo_automodel`, importable; CASE `eagle3`, `dflash` or `dspark`; OUT is written
with torch.save. Only the projects' own modules compute; this file builds them, loads the weights and calls them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import tiny
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, Qwen3Config

DATA = tiny.inputs()


def llama(**more: Any) -> LlamaConfig:
    """An EAGLE-3 layer's configuration."""
    return LlamaConfig(
        hidden_size=tiny.SIZE, intermediate_size=tiny.MLP, num_hidden_layers=1, num_attention_heads=tiny.HEADS,
        num_key_value_heads=tiny.KV_HEADS, head_dim=tiny.HEAD_DIM, vocab_size=tiny.VOCAB, rms_norm_eps=tiny.EPS,
        rope_theta=tiny.THETA, max_position_embeddings=256, attention_bias=False, tie_word_embeddings=False,
        draft_vocab_size=tiny.VOCAB, pad_token_id=0, **more,
    )  # fmt: skip


def qwen(attention: str, **more: Any) -> Qwen3Config:
    """A block drafter's configuration."""
    config = Qwen3Config(
        hidden_size=tiny.SIZE, intermediate_size=tiny.MLP, num_hidden_layers=tiny.LAYERS,
        num_attention_heads=tiny.HEADS, num_key_value_heads=tiny.KV_HEADS, head_dim=tiny.HEAD_DIM,
        vocab_size=tiny.VOCAB, rms_norm_eps=tiny.EPS, rope_theta=tiny.THETA, max_position_embeddings=256,
        attention_bias=False, tie_word_embeddings=False, num_target_layers=8, block_size=tiny.BLOCK, **more,
    )  # fmt: skip
    config._attn_implementation = attention
    return config


def load(model: nn.Module, weights: dict[str, Tensor], may_miss: tuple[str, ...] = ()) -> nn.Module:
    """In fp32, some make their norms in bf16; strict but for names that the project fills from elsewhere."""
    missing, unexpected = model.float().load_state_dict(weights, strict=False)
    left = [name for name in missing if not name.startswith(may_miss or ("-",))]
    if left or unexpected:
        raise SystemExit(f"weights do not fit: missing {left}, unexpected {unexpected}")
    return model.eval()


def shifted(depth: int) -> Tensor:
    """[1, T] ids, 1 + depth to the left, zeros behind."""
    return torch.cat((DATA.ids[1 + depth :], torch.zeros(1 + depth, dtype=torch.int64))).unsqueeze(0)


def noise() -> tuple[Tensor, Tensor]:
    """Block inputs: embeddings [1, M * B, H] and positions [1, T + M * B]."""
    ids = torch.full((len(tiny.ANCHORS), tiny.BLOCK), tiny.MASK_TOKEN)
    ids[:, 0] = DATA.ids[list(tiny.ANCHORS)]
    slots = torch.tensor(tiny.ANCHORS).unsqueeze(1) + torch.arange(tiny.BLOCK)
    return DATA.embedding[ids.flatten()].unsqueeze(0), torch.cat((torch.arange(tiny.LENGTH), slots.flatten()))[None]


def additive() -> Tensor:
    """[1, 1, Q, K]: what may be seen, as eager attention adds it."""
    seen = tiny.visible()
    return torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]


def dspark_heads(model: Any, hidden: Tensor) -> dict[str, Tensor]:
    """Scores and confidence of every slot from the project's own heads; hidden [1, M * B, H]."""
    slots = torch.tensor(tiny.ANCHORS).unsqueeze(1) + torch.arange(tiny.BLOCK)
    before, states = DATA.ids[slots], hidden.view(len(tiny.ANCHORS), tiny.BLOCK, -1)
    markov = model.markov_head
    scores = markov.apply_block_logits(states @ DATA.head.T, token_ids=before, hidden_states=states)
    seen = torch.cat((states, markov.get_prev_embeddings(before)), dim=-1)
    return {"scores": scores.flatten(0, 1), "confidence": model.confidence_head(seen).flatten()}


def specforge(case: str) -> dict[str, Any]:
    """SpecForge."""
    if case == "eagle3":
        from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3, prepare_decoder_attention_mask

        model: Any = load(
            LlamaForCausalLMEagle3(llama(target_hidden_size=tiny.SIZE)),
            {**tiny.eagle_weights(), "embed_tokens.weight": DATA.embedding},
            ("t2d", "d2t", "midlayer.self_attn.rotary"),
        )
        hidden = model.project_hidden_states(DATA.aux.unsqueeze(0))
        mask = prepare_decoder_attention_mask(torch.ones(1, tiny.LENGTH, dtype=torch.bool), (1, tiny.LENGTH), hidden, 0)
        cache: list[list[Tensor]] = [[], []]
        logits = []
        for depth in range(tiny.DEPTHS):
            hidden = model.backbone(
                model.embed_input_ids(shifted(depth)), hidden, cache, mask, torch.arange(tiny.LENGTH)[None], None
            )
            logits.append(model.compute_logits(hidden)[0])
        return {"logits": torch.stack(logits)}
    heads = {"projector_type": "dspark", "markov_rank": tiny.RANK, "enable_confidence_head": True,
             "confidence_head_with_markov": True} if case == "dspark" else {}  # fmt: skip
    config = qwen("eager", dflash_config={"target_layer_ids": [1, 3, 5], "mask_token_id": tiny.MASK_TOKEN, **heads})
    if case == "dspark":
        from specforge.modeling.draft.dspark import DSparkDraftModel as Model
    else:
        from specforge.modeling.draft.dflash import DFlashDraftModel as Model
    model = load(Model(config), tiny.block_weights(case == "dspark"))
    embeds, positions = noise()
    hidden = model(positions, additive(), embeds, DATA.aux.unsqueeze(0))
    return {"hidden": hidden[0], **(dspark_heads(model, hidden) if case == "dspark" else {})}


def automodel(case: str) -> dict[str, Any]:
    """NeMo Automodel."""
    if case == "eagle3":
        from nemo_automodel.components.speculative.eagle.draft_llama import LlamaEagle3DraftModel

        weights = {
            name if name.startswith("lm_head") else f"model.{name.replace('midlayer', 'layers.0')}": weight
            for name, weight in {**tiny.eagle_weights(), "embed_tokens.weight": DATA.embedding}.items()
        }
        model: Any = load(LlamaEagle3DraftModel(llama(target_hidden_size=tiny.SIZE)), weights)
        hidden = model.project_hidden_states(DATA.aux.unsqueeze(0))
        cache: list[list[Tensor]] = [[], []]
        logits = []
        for depth in range(tiny.DEPTHS):
            hidden = model(shifted(depth), hidden, torch.ones(1, tiny.LENGTH), cache_hidden=cache)
            logits.append(model.compute_logits(hidden)[0])
        return {"logits": torch.stack(logits)}
    settings = {"target_layer_ids": [1, 3, 5], "mask_token_id": tiny.MASK_TOKEN, "block_size": tiny.BLOCK}
    embeds, positions = noise()
    if case == "dflash":
        from nemo_automodel.components.speculative.dflash.draft_qwen3 import Qwen3DFlashDraftModel

        model = load(Qwen3DFlashDraftModel(qwen("eager", dflash_config=settings)), tiny.block_weights(False))
        return {"hidden": model(positions, additive(), embeds, DATA.aux.unsqueeze(0))[0]}
    import nemo_automodel.components.speculative.dspark.draft_qwen3 as theirs

    # Anchors are drawn inside the forward pass; these are the ones to compare on.
    theirs.sample_anchor_positions = lambda **_: (
        torch.tensor([tiny.ANCHORS]),
        torch.ones(1, len(tiny.ANCHORS), dtype=torch.bool),
    )
    config = qwen("sdpa", **{name: settings[name] for name in ("target_layer_ids", "mask_token_id")},
                  num_anchors=len(tiny.ANCHORS), enable_confidence_head=True, confidence_head_with_markov=True,
                  markov_rank=tiny.RANK, markov_head_type="vanilla")  # fmt: skip
    shared = {"embed_tokens.weight": DATA.embedding, "lm_head.weight": DATA.head}
    model = load(theirs.Qwen3DSparkModel(config), {**tiny.block_weights(True), **shared})
    kept: list[Tensor] = []
    model.norm.register_forward_hook(lambda _module, _inputs, out: kept.append(out))
    mask = torch.ones(1, tiny.LENGTH, dtype=torch.bool)
    model(DATA.ids.unsqueeze(0), DATA.aux.unsqueeze(0), mask, DATA.last.unsqueeze(0))
    return {"hidden": kept[0].reshape(-1, tiny.SIZE), **dspark_heads(model, kept[0].reshape(1, -1, tiny.SIZE))}


def speculators(case: str) -> dict[str, Any]:
    """Speculators."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.losses import resolve_loss_config
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    def described(algorithm: str) -> Any:
        return SpeculatorsConfig(
            algorithm=algorithm,
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=tiny.DEPTHS)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        )

    shared = {"embed_tokens.weight": DATA.embedding, "verifier_norm.weight": DATA.target_norm,
              "verifier_lm_head.weight": DATA.head}  # fmt: skip
    kept: list[Tensor] = []

    def keep(_module: Any, _inputs: Any, out: Tensor) -> None:
        kept.append(out[0].detach())

    documents = torch.zeros(1, tiny.LENGTH, dtype=torch.int64)
    if case == "eagle3":
        from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

        layer = llama()
        layer._attn_implementation = "sdpa"
        model: Any = Eagle3DraftModel(
            Eagle3SpeculatorConfig(
                transformer_layer_config=layer, draft_vocab_size=tiny.VOCAB, norm_before_residual=False,
                eagle_aux_hidden_state_layer_ids=[1, 3, 5], speculators_config=described("eagle3"),
            )
        )  # fmt: skip
        weights = {name.replace("midlayer", "layers.0"): weight for name, weight in tiny.eagle_weights().items()}
        load(model, {**weights, **shared}, ("t2d", "d2t"))
        model.lm_head.register_forward_hook(keep)
        # Their rows are aligned by the loader: token i + 1 beside the states of i, positions from 0.
        positions = torch.arange(tiny.LENGTH)[None]
        model(DATA.aux.unsqueeze(0), shifted(0), documents, position_ids=positions, ttt_steps=tiny.DEPTHS)
        return {"logits": torch.stack(kept)}
    common = {"draft_vocab_size": tiny.VOCAB, "block_size": tiny.BLOCK, "aux_hidden_state_layer_ids": [1, 3, 5],
              "mask_token_id": tiny.MASK_TOKEN, "transformer_layer_config": qwen("eager"),
              "speculators_config": described(case)}  # fmt: skip
    import speculators.models.dflash.core as theirs

    theirs.select_anchors = lambda *_: (torch.tensor(tiny.ANCHORS), torch.ones(len(tiny.ANCHORS), dtype=torch.bool))
    if case == "dflash":
        from speculators.models.dflash import DFlashSpeculatorConfig

        model, options = theirs.DFlashDraftModel(DFlashSpeculatorConfig(**common)), {}
        losses = "ce"
    else:
        from speculators.models.dspark import DSparkSpeculatorConfig
        from speculators.models.dspark.core import DSparkDraftModel

        model = DSparkDraftModel(DSparkSpeculatorConfig(**common, markov_rank=tiny.RANK))
        losses = '{"ce": 0.1, "tv": 1.8}'  # their distance is half of ours
        options = {"tv_loss_fn": resolve_loss_config("tv", "eager")["tv"][0]}
    load(model, {**tiny.block_weights(case == "dspark"), **shared, "lm_head.weight": DATA.head}, ("t2d", "d2t"))
    model.norm.register_forward_hook(keep)
    _, loss, _ = model(
        DATA.aux.unsqueeze(0), DATA.ids.unsqueeze(0), torch.ones(1, tiny.LENGTH), DATA.last.unsqueeze(0), documents,
        loss_config=resolve_loss_config(losses, "eager"), gamma=tiny.GAMMA, max_anchors=len(tiny.ANCHORS), **options,
    )  # fmt: skip
    return {"hidden": kept[0], "loss": loss.detach()}


if __name__ == "__main__":
    peer, case, out = sys.argv[1:]
    run: Callable[[str], dict[str, Any]] = {
        "specforge": specforge,
        "nemo_automodel": automodel,
        "speculators": speculators,
    }[peer]
    with torch.no_grad():
        torch.save(run(case), out)
