"""Parameters in the compute type with fp32 masters, and one optimiser step over them.

Clipping and the skip of a non-finite update ride along inside fused AdamW (`grad_scale`, `found_inf`), so they cost
no pass over memory and no host synchronisation. Under `muon` the matrices of the layers and of `fc` use
`torch.optim.Muon`; heads, tables over the vocabulary and norms stay
with AdamW. Library Muon has no on-device skip, so there the host looks at the norm once a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

_HEADS = ("lm_head", "candidate_selector", "markov_head", "confidence_head")


@dataclass
class Masters:
    """`working` are the module's parameters (compute type), `master` their fp32 originals; the same tensors if types
    agree."""

    names: list[str]
    working: list[nn.Parameter]
    master: list[nn.Parameter]

    @property
    def shared(self) -> bool:
        """The masters are the working parameters."""
        return self.working[0] is self.master[0]

    @torch.no_grad()
    def take_gradients(self) -> list[Tensor]:
        """Move the working gradients to the masters; returns them. A parameter without a gradient gets zeros."""
        for parameter in self.working:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [p.grad for p in self.working if p.grad is not None]
        if not self.shared:
            targets = [torch.empty_like(m) if m.grad is None else m.grad for m in self.master]
            torch._foreach_copy_(targets, gradients)
            for master, target in zip(self.master, targets, strict=True):
                master.grad = target
            gradients = targets
        return gradients

    @torch.no_grad()
    def publish(self) -> None:
        """Copy masters to the working parameters."""
        if not self.shared:
            torch._foreach_copy_(list(self.working), [m.detach() for m in self.master])

    @contextmanager
    def showing(self, weights: Sequence[Tensor]) -> Iterator[None]:
        """Inside, the module computes with `weights` (fp32, in parameter order); none = with its own."""
        own = list[Tensor](self.working)
        if not weights:
            yield
            return
        with torch.no_grad():
            kept = [tensor.detach().clone() for tensor in own]
            torch._foreach_copy_(own, list(weights))
            try:
                yield
            finally:
                torch._foreach_copy_(own, kept)


def make_masters(drafter: nn.Module, dtype: torch.dtype) -> Masters:
    """Turn an fp32 module into `dtype` in place, keeping fp32 masters."""
    names = [name for name, _ in drafter.named_parameters()]
    for module in drafter.modules():
        if isinstance(module, nn.Linear) and module.out_features > 4 * module.in_features:
            module.weight.data = (
                module.weight.data.T.contiguous().T
            )  # a wide head's gradient comes column-major; copies would cost more
    if dtype == torch.float32:
        working = list(drafter.parameters())
        return Masters(names, working, working)
    master = [nn.Parameter(p.detach().clone()) for p in drafter.parameters()]
    drafter.to(dtype)
    return Masters(names, list(drafter.parameters()), master)


@dataclass(frozen=True)
class OptimizerSettings:
    """Rates and decays; `lr` is AdamW's, `muon_lr` that of the matrices under `muon`."""

    kind: Literal["adamw", "muon"]
    lr: float
    muon_lr: float
    weight_decay: float
    betas: tuple[float, float]
    clip: float


@dataclass
class Optimizer:
    """The optimisers of one run; `skipped` counts non-finite updates on the device."""

    settings: OptimizerSettings
    masters: Masters
    adamw: torch.optim.AdamW
    muon: torch.optim.Muon | None
    skipped: Tensor

    @torch.no_grad()
    def step(self, factor: float) -> Tensor:
        """Clip, update, publish; `factor` scales the learning rates. Returns the gradient norm (0-d, before
        clipping)."""
        gradients = self.masters.take_gradients()
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        scale = (norm / self.settings.clip).clamp(min=1.0)
        unusable = (~torch.isfinite(norm)).float()
        self.skipped += unusable
        for group in self.adamw.param_groups:
            group["lr"] = self.settings.lr * factor
        self.adamw.grad_scale = scale  # type: ignore[attr-defined]
        self.adamw.found_inf = unusable  # type: ignore[attr-defined]
        self.adamw.step()
        if self.muon is not None and not unusable:
            for group in self.muon.param_groups:
                group["lr"] = self.settings.muon_lr * factor
            self.muon.step()  # orthogonalised updates do not depend on the gradient's size: nothing to clip
        self.masters.publish()
        for parameter in self.masters.working:
            parameter.grad = None
        return norm

    def state(self) -> dict[str, Any]:
        """All that a resumed run needs, masters included."""
        return {
            "masters": [m.detach() for m in self.masters.master],
            "adamw": self.adamw.state_dict(),
            "muon": None if self.muon is None else self.muon.state_dict(),
            "skipped": self.skipped,
        }

    @torch.no_grad()
    def load(self, state: dict[str, Any]) -> None:
        """The inverse of `state`."""
        torch._foreach_copy_([m.detach() for m in self.masters.master], state["masters"])
        self.adamw.load_state_dict(state["adamw"])
        if self.muon is not None:
            self.muon.load_state_dict(state["muon"])
        self.skipped.copy_(state["skipped"])
        self.masters.publish()


def make_optimizer(masters: Masters, settings: OptimizerSettings) -> Optimizer:
    """Weight decay applies to matrices only, never to norm weights."""

    def pick(condition: Iterable[bool]) -> list[nn.Parameter]:
        return [m for m, chosen in zip(masters.master, condition, strict=True) if chosen]

    pairs = list(zip(masters.names, masters.master, strict=True))
    orthogonal = [settings.kind == "muon" and m.ndim == 2 and not name.startswith(_HEADS) for name, m in pairs]
    matrices = [m.ndim == 2 and not o for (_, m), o in zip(pairs, orthogonal, strict=True)]
    vectors = [m.ndim != 2 for _, m in pairs]
    groups = [
        {"params": pick(matrices), "weight_decay": settings.weight_decay},
        {"params": pick(vectors), "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW([g for g in groups if g["params"]], lr=settings.lr, betas=settings.betas, fused=True)
    muon = (
        torch.optim.Muon(pick(orthogonal), lr=settings.muon_lr, weight_decay=settings.weight_decay)
        if settings.kind == "muon"
        else None
    )
    return Optimizer(settings, masters, adamw, muon, torch.zeros(()))
