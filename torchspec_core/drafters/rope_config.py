"""Settings of the rotary position embedding, as model configurations spell them; read and written without torch.

The names are those of `rope_parameters` in a Hub `config.json`. Each kind takes only the settings of its own; a
setting that would change the angles and is not known is refused by name, because a drafter with other angles than the
engine's would still run, only badly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from torchspec_core.errors import UserError

SETTINGS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ("max_trained_positions",)),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate"),
    ),
}
"""Kind -> (settings that it needs, settings that it may have)."""
_IGNORED = ("rope_theta", "rope_type", "type", "finetuned")


@dataclass(frozen=True)
class RopeConfig:
    """How positions turn into angles: `kind` names the frequency rule, `theta` its base.

    Attributes:
        factor: how much longer contexts became.
        original_max_position_embeddings: context before that (`llama3`, `yarn`).
        max_position_embeddings, max_trained_positions: context after and before (`dynamic`). Engines fix the base at
            the longest context, so without `max_trained_positions` it is `theta`.
        low_freq_factor, high_freq_factor: `llama3`.
        beta_fast, beta_slow, truncate, mscale, mscale_all_dim, attention_factor: `yarn`.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    max_position_embeddings: int = 0
    max_trained_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in SETTINGS:
            raise UserError(f"rope kind {self.kind!r} is not known; use one of {sorted(SETTINGS)}")
        if not self.theta > 0:
            raise UserError(f"rope theta must be above 0, not {self.theta}")
        if self.factor < 1:
            raise UserError(f"rope factor must be 1 or more, not {self.factor}")
        for name in ("original_max_position_embeddings", "low_freq_factor"):
            if name in SETTINGS[self.kind][0] and not getattr(self, name) > 0:
                raise UserError(f"rope kind {self.kind!r} needs {name}, above 0")
        if self.kind == "llama3" and not self.high_freq_factor > self.low_freq_factor:
            raise UserError(f"rope high_freq_factor {self.high_freq_factor} must be above {self.low_freq_factor}")

    def to_json(self) -> dict[str, Any]:
        """The configuration as JSON types: theta, kind and whatever is not at its default."""
        plain = RopeConfig()
        return {
            name: value
            for name, value in asdict(self).items()
            if name in ("theta", "kind") or value != getattr(plain, name)
        }

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> RopeConfig:
        """The inverse of `to_json`."""
        return RopeConfig(**values)

    def hub_scaling(self) -> dict[str, Any] | None:
        """`rope_scaling` of a Hub configuration; None for the default kind."""
        if self.kind == "default":
            return None
        needed, possible = SETTINGS[self.kind]
        plain = RopeConfig()
        given = {name: getattr(self, name) for name in possible if getattr(self, name) != getattr(plain, name)}
        return {"rope_type": self.kind, **{name: getattr(self, name) for name in needed}, **given}

    def hub_parameters(self) -> dict[str, Any]:
        """`rope_parameters` of a Hub configuration: kind and base for every kind, then its settings."""
        return {"rope_type": self.kind, "rope_theta": self.theta, **(self.hub_scaling() or {})}


def hub_rope(config: Mapping[str, Any], default_theta: float = 10000.0, where: str = "config.json") -> RopeConfig:
    """The rotary settings of a Hub `config.json`, in its new (`rope_parameters`) or old (`rope_scaling`) spelling.

    Raises:
        UserError: a kind or a setting that is not known, or a setting that is missing.
    """
    values = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(values.get("rope_theta") or config.get("rope_theta") or default_theta)
    kind = str(values.get("rope_type") or values.get("type") or "default")
    if kind not in SETTINGS:
        raise UserError(f"{where}: the rope type {kind!r} is not known; known are {', '.join(SETTINGS)}.")
    needed, possible = SETTINGS[kind]
    given = {name: value for name, value in values.items() if name not in _IGNORED and value is not None}
    if given.get("partial_rotary_factor") == 1.0:
        del given["partial_rotary_factor"]
    if kind == "default":
        given = {name: value for name, value in given.items() if name not in _every_setting()}
    unknown = sorted(set(given) - set(needed) - set(possible))
    if unknown:
        raise UserError(f"{where}: the rope setting {unknown[0]!r} is not known for rope type {kind!r}.")
    missing = [name for name in needed if name not in given]
    if missing:
        raise UserError(f"{where}: rope type {kind!r} needs {missing[0]}.")
    types: dict[str, type] = {f.name: type(f.default) for f in fields(RopeConfig)}
    chosen: dict[str, Any] = {
        name: float(value) if types[name] in (float, type(None)) else value for name, value in given.items()
    }
    if kind == "dynamic":
        chosen["max_position_embeddings"] = int(config.get("max_position_embeddings", 2048))
    return RopeConfig(theta, kind, **chosen)


def check_mla_rope(rope: RopeConfig) -> None:
    """Refuse rotary settings that engines compute otherwise in multi-latent attention (they take any scaling for
    DeepSeek's YaRN)."""
    if rope.kind not in ("default", "yarn"):
        raise UserError(
            f"drafter.attention: engines know multi-latent attention with rope type default or yarn only, and the "
            f"target's is {rope.kind}: use drafter.attention: gqa"
        )
    if rope.attention_factor is not None or not rope.truncate or bool(rope.mscale) != bool(rope.mscale_all_dim):
        raise UserError(
            "drafter.attention: with multi-latent attention engines ignore attention_factor and truncate of yarn, and "
            "read mscale and mscale_all_dim as a pair: the target's rope settings would be computed differently"
        )


def _every_setting() -> set[str]:
    """Settings that have no effect on the default kind, where some configurations leave them."""
    return {name for needed, possible in SETTINGS.values() for name in (*needed, *possible)}
