"""Attention of anchored against dense training-time test, forward and backward, for a multi-latent drafter, on CPU.

    python -m benchmarks.anchored_eagle --json out.json [--quick]

One sample of S tokens, four heads of 128 + 64 numbers and values of 128, four depths, fp32. Dense: every row drafts.
Anchored: 512 rows draft, in the form that training uses. The dense side is the best dense form we know: torch's flash
kernel over the causal part, no mask and no score matrix, and the few own-row keys merged into its softmax by their
log-sum-exp, forward and backward (`merged_attention`). Both get the projected queries, keys and values; the runs
alternate. Anchors are a stretch of the sample that starts at random in each epoch, and a late one costs more than an
early one: each dense run stands beside the mean of four anchored ones, epochs 0 to 3. Memory is the process's resident
peak above what it held before, without the gradients of earlier runs.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchspec_core.drafters.ttt import GroupedTTT
from torchspec_core.objectives.anchors import Anchors
from torchspec_core.objectives.ttt import ttt_index

HEADS, KEY_WIDTH, VALUE_WIDTH, DEPTHS = 4, 192, 128, 4
FULL, FULL_ANCHORS = (4096, 16384, 32768), 512
QUICK, QUICK_ANCHORS = (512, 1024, 2048), 64
SECONDS, MOST_ROUNDS, EPOCHS = 60.0, 7, 4
SCALE = KEY_WIDTH**-0.5


@dataclass(frozen=True)
class Inputs:
    """k, v [S, heads, width]: depth-0 keys and values of all rows. q: one [R, heads, width] a depth; own: (k, v) of the
    drafting rows for depths 1, 2, ... All leaves that take gradients."""

    k: Tensor
    v: Tensor
    q: tuple[Tensor, ...]
    own: tuple[tuple[Tensor, Tensor], ...]

    @property
    def leaves(self) -> list[Tensor]:
        """Every tensor that takes a gradient."""
        return [self.k, self.v, *self.q, *(part for pair in self.own for part in pair)]

    def pick(self, rows: np.ndarray) -> Inputs:
        """The same for these drafting rows only."""
        index = torch.from_numpy(rows)

        def leaf(x: Tensor) -> Tensor:
            return x.detach().index_select(0, index).requires_grad_()

        own = tuple((leaf(k), leaf(v)) for k, v in self.own)
        k, v = (x.detach().clone().requires_grad_() for x in (self.k, self.v))
        return Inputs(k, v, tuple(leaf(q) for q in self.q), own)


def make_inputs(length: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Inputs:
    """Random inputs of a sample in which every row drafts."""
    generator = torch.Generator().manual_seed(seed)

    def leaf(width: int) -> Tensor:
        return torch.randn(length, HEADS, width, generator=generator, dtype=dtype).requires_grad_()

    own = tuple((leaf(KEY_WIDTH), leaf(VALUE_WIDTH)) for _ in range(DEPTHS - 1))
    return Inputs(leaf(KEY_WIDTH), leaf(VALUE_WIDTH), tuple(leaf(KEY_WIDTH) for _ in range(DEPTHS)), own)


class _Merged(torch.autograd.Function):
    """Causal flash attention and own-row columns under one softmax.

    With L the log-sum-exp over both parts and O the merged output, the flash kernel's own backward pass, given L and O
    in place of its own, yields the gradients of the causal part; an own column's are p (dO . v - dO . O) and so on.
    """

    @staticmethod
    def forward(ctx: Any, scale: float, q: Tensor, k: Tensor, v: Tensor, *own: Tensor) -> Tensor:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True, scale=scale)
        lse = lse.to(q.dtype)
        scores = [(q * key).sum(dim=-1) * scale for key in own[::2]]
        total = torch.stack((lse, *scores)).logsumexp(dim=0)
        out = out * (lse - total).exp().unsqueeze(-1)
        for score, value in zip(scores, own[1::2], strict=True):
            out.addcmul_((score - total).exp().unsqueeze(-1), value)
        ctx.scale = scale
        ctx.save_for_backward(q, k, v, out, total, *own)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, total, *own = ctx.saved_tensors
        grad_q, grad_k, grad_v = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, total, 0.0, True, scale=ctx.scale
        )
        inner = (grad * out).sum(dim=-1)
        grad_own: list[Tensor] = []
        for key, value in zip(own[::2], own[1::2], strict=True):
            share = ((q * key).sum(dim=-1) * ctx.scale - total).exp()
            slope = (share * ((grad * value).sum(dim=-1) - inner) * ctx.scale).unsqueeze(-1)
            grad_q = grad_q + slope * key
            grad_own += [slope * q, share.unsqueeze(-1) * grad]
        return None, grad_q, grad_k, grad_v, *grad_own


def merged_attention(inputs: Inputs) -> list[Tensor]:
    """Dense training-time test of one sample: [S, heads, value width] for each depth. Linear memory."""

    def lay(x: Tensor) -> Tensor:
        """[S, heads, width] to [1, heads, S, key width]; the kernel wants one width for keys and values."""
        return torch.nn.functional.pad(x, (0, KEY_WIDTH - x.shape[-1])).transpose(0, 1).unsqueeze(0).contiguous()

    k, v = lay(inputs.k), lay(inputs.v)
    own = [lay(part) for pair in inputs.own for part in pair]
    outs = [_Merged.apply(SCALE, lay(q), k, v, *own[: 2 * depth]) for depth, q in enumerate(inputs.q)]
    return [out.squeeze(0).transpose(0, 1)[..., :VALUE_WIDTH] for out in outs]


def anchored_attention(inputs: Inputs, rows: np.ndarray) -> list[Tensor]:
    """The form that training uses, for these rows of one sample: [R, heads, value width] for each depth."""
    length = len(inputs.k)
    form = GroupedTTT(ttt_index([length], np.ones(length, dtype=bool), DEPTHS, rows=rows).layout)
    context = form.context(inputs.k, inputs.v)
    return [form.attend(q, context, inputs.own[:depth], SCALE) for depth, q in enumerate(inputs.q)]


def forward_and_backward(attend: Callable[[Inputs], list[Tensor]], inputs: Inputs) -> float:
    """Seconds of one forward and backward pass; the loss is the sum of the outputs' squares."""
    for leaf in inputs.leaves:
        leaf.grad = None
    started = time.perf_counter()
    loss = torch.stack([out.square().sum() for out in attend(inputs)]).sum()
    loss.backward()
    return time.perf_counter() - started


def peak_bytes(run: Callable[[], object]) -> int:
    """Resident peak of `run` above what the process holds before it; what glibc keeps of freed memory is given back
    first, or it would not be counted."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    run()
    return max(_status("VmHWM") - before, 1)


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def measure(length: int, anchors: int, budget_s: float) -> dict[str, float]:
    """Flat numbers of one length; at least two rounds, more while the budget lasts."""
    every = make_inputs(length)
    chooser = Anchors(anchors, DEPTHS, "strided", 0)
    epochs = [chooser.choose(np.arange(length - DEPTHS), "benchmark", epoch) for epoch in range(EPOCHS)]

    def dense() -> float:
        return forward_and_backward(merged_attention, every)

    def anchored(rows: np.ndarray) -> float:
        return forward_and_backward(lambda inputs: anchored_attention(inputs, rows), every.pick(rows))

    seconds: dict[str, list[float]] = {"dense": [], "anchored": []}
    numbers: dict[str, float] = {}
    furthest = max(epochs, key=lambda rows: int(rows[-1]))
    for name, run in (("dense", dense), ("anchored", lambda: anchored(furthest))):
        numbers[f"bytes.{name}.{length}"] = peak_bytes(run)  # also the warm-up
        for leaf in every.leaves:
            leaf.grad = None
    started = time.perf_counter()
    while len(seconds["dense"]) < 2 or (
        time.perf_counter() - started < budget_s and len(seconds["dense"]) < MOST_ROUNDS
    ):
        seconds["dense"].append(dense())
        seconds["anchored"].append(statistics.mean(anchored(rows) for rows in epochs))
    for name, values in seconds.items():
        numbers |= {
            f"seconds.{name}.{length}": statistics.median(values),
            f"seconds_spread.{name}.{length}": max(values) - min(values),
        }
    numbers[f"rounds.{length}"] = len(seconds["dense"])
    numbers[f"speedup.{length}"] = numbers[f"seconds.dense.{length}"] / numbers[f"seconds.anchored.{length}"]
    numbers[f"memory_ratio.{length}"] = numbers[f"bytes.dense.{length}"] / numbers[f"bytes.anchored.{length}"]
    return numbers


def main(arguments: Sequence[str]) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="anchored against dense training-time test: attention only")
    parser.add_argument("--json", type=Path, required=True, help="file for the flat numbers")
    parser.add_argument("--quick", action="store_true", help="small sizes: shows that it runs, proves nothing")
    options = parser.parse_args(arguments)
    lengths, anchors = (QUICK, QUICK_ANCHORS) if options.quick else (FULL, FULL_ANCHORS)
    numbers: dict[str, Any] = {
        "device": "cpu", "dtype": "float32", "threads": torch.get_num_threads(), "anchors": anchors, "heads": HEADS,
        "key_width": KEY_WIDTH, "value_width": VALUE_WIDTH, "depths": DEPTHS, "quick": options.quick,
    }  # fmt: skip
    print(f"{'tokens':>8} {'dense s':>10} {'anchored s':>11} {'speedup':>8} {'dense MB':>9} {'anchored MB':>12}")
    for length in lengths:
        numbers |= measure(length, anchors, 2.0 if options.quick else SECONDS)
        print(
            f"{length:>8} {numbers[f'seconds.dense.{length}']:>10.3f} {numbers[f'seconds.anchored.{length}']:>11.3f} "
            f"{numbers[f'speedup.{length}']:>7.1f}x {numbers[f'bytes.dense.{length}'] / 1e6:>9.0f} "
            f"{numbers[f'bytes.anchored.{length}'] / 1e6:>12.0f}",
            flush=True,
        )
    options.json.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
