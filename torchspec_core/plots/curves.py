"""Training curves: the loss and the accuracy of each depth, over the tokens seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from torchspec_core.plots.style import COLORS, drawing, new_figure, svg

POINTS = 300


def smoothed(values: Sequence[float], window: int) -> np.ndarray:
    """fp64 [N]: mean of the last `window` values at each place (of fewer at the start)."""
    array = np.asarray(values, dtype=np.float64)
    total = np.cumsum(array)
    counts = np.minimum(np.arange(1, len(array) + 1), window)
    before = np.concatenate([np.zeros(min(window, len(array))), total[:-window] if len(array) > window else []])
    return (total - before) / counts


def depth_keys(row: Mapping[str, Any]) -> list[str]:
    """The accuracy fields of a metrics row, by depth: `acc_0`, `acc_1`, ..."""
    return sorted((key for key in row if key.startswith("acc_")), key=lambda key: int(key.rsplit("_", 1)[1]))


@drawing
def training_curves(rows: Sequence[Mapping[str, Any]], validation: Mapping[str, Any]) -> str:
    """Loss on the left, accuracy by depth on the right (thick: running mean; dashed: held-out at the end, where
    measured).
    """
    figure, (loss_ax, acc_ax) = new_figure(8.6, 3.0, columns=2)
    tokens = np.cumsum([float(row.get("tokens", 1)) for row in rows]) / 1e3
    window = max(1, len(rows) // 40)
    keep = np.unique(np.linspace(0, len(rows) - 1, min(POINTS, len(rows))).astype(int))
    loss = [float(row["loss"]) for row in rows]
    loss_ax.plot(tokens[keep], np.asarray(loss)[keep], color=COLORS[0], alpha=0.3, linewidth=0.8)
    loss_ax.plot(tokens[keep], smoothed(loss, window)[keep], color=COLORS[0])
    loss_ax.set_title("loss")
    for depth, key in enumerate(depth_keys(rows[-1])):
        color = COLORS[depth % len(COLORS)]
        acc_ax.plot(
            tokens[keep],
            smoothed([float(row[key]) for row in rows], window)[keep],
            color=color,
            label=f"depth {depth + 1}",
        )
        if isinstance(validation.get(key), int | float):
            acc_ax.axhline(float(validation[key]), color=color, linestyle="--", linewidth=0.9)
    acc_ax.set_title(
        "accuracy (dashed: held-out, at the end)" if any(k in validation for k in depth_keys(rows[-1])) else "accuracy"
    )
    acc_ax.set_ylim(bottom=0.0)
    acc_ax.legend()
    for ax in (loss_ax, acc_ax):
        ax.set_xlabel("thousand tokens seen")
    return svg(figure)
