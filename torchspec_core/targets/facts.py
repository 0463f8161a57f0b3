"""What the rest of the house needs to know about a target model, and the one place where layer ids are converted.

The facts come from the `config.json` and `generation_config.json` of a folder in Hub layout, so no model is loaded and
neither torch nor transformers is imported. Layer ids are canonical everywhere in this project: `j` is the residual
stream after the 0-based decoder layer `j`, before any norm. Engines count differently; they are spoken to only through
`vllm_layer_id` and `hf_hidden_index`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torchspec_core.drafters.rope_config import RopeConfig, hub_rope
from torchspec_core.errors import UserError

FACTS_FILE = "facts.json"
SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


@dataclass(frozen=True)
class TargetFacts:
    """Sizes and constants of a decoder-only target; the JSON form is `facts.json` of the target stage."""

    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    tied: bool
    rope: RopeConfig = field(default_factory=RopeConfig)

    def to_json(self) -> dict[str, Any]:
        """JSON types only; the rotary scaling is there if the target has one."""
        values = {**asdict(self), "eos_token_ids": list(self.eos_token_ids)}
        del values["rope"]
        scaling = self.rope.hub_scaling()
        return values if scaling is None else {**values, "rope_scaling": scaling}

    @property
    def final_layer(self) -> int:
        """Canonical id of the final state: the residual stream before the target's final norm."""
        return self.num_layers - 1


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; a missing or broken file is a `UserError` that names it."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} is missing: {path.parent} is not a model folder in Hub layout.") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"{path} cannot be read as JSON ({error}): fetch the model again.") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} holds no JSON object: fetch the model again.")
    return value


def facts_from_config(
    config: dict[str, Any], eos_token_ids: Iterable[int] = (), where: str = "config.json"
) -> TargetFacts:
    """Facts of a Hub `config.json`. Raises `UserError` for an unsupported architecture or rope type, or a missing
    size."""
    architectures = config.get("architectures") or ["(none)"]
    architecture = str(architectures[0])
    if architecture not in SUPPORTED_ARCHITECTURES:
        known = ", ".join(SUPPORTED_ARCHITECTURES)
        raise UserError(
            f"{where}: the architecture {architecture} is not supported as a target; supported are {known}."
        )
    needed = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
    missing = [name for name in needed if not isinstance(config.get(name), int)]
    if missing:
        raise UserError(f"{where}: the size {missing[0]} is missing: it is no complete {architecture} configuration.")
    heads = config["num_attention_heads"]
    rope = hub_rope(config, where=where)
    eos = config.get("eos_token_id")
    ids = list(eos_token_ids) or ([] if eos is None else [eos] if isinstance(eos, int) else list(eos))
    if not ids:
        raise UserError(
            f"{where}: no eos_token_id here or in generation_config.json: the target could not end an answer."
        )
    return TargetFacts(
        architecture=architecture,
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        intermediate_size=config["intermediate_size"],
        vocab_size=config["vocab_size"],
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope_theta=rope.theta,
        max_position_embeddings=int(config.get("max_position_embeddings", 2048)),
        eos_token_ids=tuple(dict.fromkeys(int(i) for i in ids)),
        tied=bool(config.get("tie_word_embeddings", False)),
        rope=rope,
    )


def read_facts(folder: Path) -> TargetFacts:
    """Facts of a model folder in Hub layout (its own `facts.json` is not trusted, only the files the model came
    with).
    """
    if not folder.is_dir():
        raise UserError(f"The target folder {folder} does not exist: give the path of a model folder in Hub layout.")
    config = read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    eos = read_json(generation).get("eos_token_id") if generation.exists() else None
    ids = () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
    return facts_from_config(config, ids, where=str(folder / "config.json"))


def write_facts(folder: Path) -> TargetFacts:
    """Writes `facts.json` into a model folder and returns what it says."""
    facts = read_facts(folder)
    (folder / FACTS_FILE).write_text(json.dumps(facts.to_json(), indent=1) + "\n", encoding="utf-8")
    return facts


def aux_layers(facts: TargetFacts, layers: Sequence[int] | None = None) -> tuple[int, ...]:
    """Canonical ids of the auxiliary layers: the given ones, checked, or EAGLE-3's `(1, L//2 - 1, L - 4)`.

    They are strictly ascending and distinct: vLLM sorts and de-duplicates its ids, so anything else would feed the
    drafter another order or width than the one it was trained with. Raises `UserError` naming the bad id.
    """
    count = facts.num_layers
    if layers is None:
        chosen: tuple[int, ...] = (1, count // 2 - 1, count - 4)
        if list(chosen) != sorted(set(chosen)):
            raise UserError(
                f"capture.layers: the default layers {chosen} of a target with {count} layers are not "
                "three different ones; "
                f"name the layers to capture, ascending, in 0..{count - 1}."
            )
        return chosen
    chosen = tuple(layers)
    if not chosen:
        raise UserError("capture.layers: the list is empty; name at least one layer, or leave it out for the default.")
    for layer in chosen:
        if not 0 <= layer < count:
            raise UserError(f"capture.layers: layer {layer} does not exist; the target has layers 0..{count - 1}.")
    if len(set(chosen)) != len(chosen):
        double = next(layer for layer in chosen if chosen.count(layer) > 1)
        raise UserError(
            f"capture.layers: layer {double} is named twice; the engines keep it once, so name different layers."
        )
    if list(chosen) != sorted(chosen):
        raise UserError(
            f"capture.layers: {list(chosen)} is not ascending; the engines sort the layers, so write {sorted(chosen)}."
        )
    return chosen


def captured_layers(facts: TargetFacts, layers: Sequence[int] | None = None) -> tuple[int, ...]:
    """The auxiliary layers, then the final one; where the final layer is also auxiliary it is kept once, at its
    place.
    """
    aux = aux_layers(facts, layers)
    return aux if facts.final_layer in aux else (*aux, facts.final_layer)


def vllm_layer_id(layer: int) -> int:
    """vLLM's id of canonical layer `layer`: it counts the decoder layers that have run (0 = the embedding output)."""
    return layer + 1


def hf_hidden_index(layer: int) -> int:
    """Index into transformers' `output_hidden_states`. Not for the last layer: there transformers returns the normed
    state.
    """
    return layer + 1
