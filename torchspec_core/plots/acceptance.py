"""Acceptance: mean accepted length by benchmark, and the share of steps in which each slot was accepted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchspec_core.plots.style import COLORS, drawing, new_figure, svg


@dataclass(frozen=True)
class Bar:
    """One measured acceptance length; `stderr` None where the measurement gives none."""

    label: str
    value: float
    stderr: float | None
    group: str


@drawing
def acceptance_bars(bars: Sequence[Bar], limit: float) -> str:
    """Horizontal bars of acceptance length from 1 (nothing accepted); `limit` = 1 + K, what a perfect drafter would
    reach.
    """
    figure, (ax,) = new_figure(7.2, 0.9 + 0.28 * len(bars))
    groups = list(dict.fromkeys(bar.group for bar in bars))
    for place, bar in enumerate(bars):
        color = COLORS[-1] if bar.group == groups[-1] and len(groups) > 1 else COLORS[groups.index(bar.group)]
        ax.barh(
            place,
            bar.value - 1.0,
            left=1.0,
            color=color,
            height=0.62,
            xerr=bar.stderr,
            error_kw={"elinewidth": 1.0, "ecolor": "#5a6068", "capsize": 2.5},
        )
        ax.annotate(
            f"{bar.value:.2f}",
            (bar.value + (bar.stderr or 0.0), place),
            (5, 0),
            textcoords="offset points",
            va="center",
        )
    ax.set_yticks(range(len(bars)), [bar.label for bar in bars])
    ax.invert_yaxis()
    ax.set_xlim(1.0, min(limit, max(bar.value for bar in bars) + 0.25))
    ax.set_xlabel(f"tokens a verification step (1: nothing accepted, {limit:g}: everything)")
    ax.grid(False, axis="y")
    ax.grid(True, axis="x", color=COLORS[-1], alpha=0.25, linewidth=0.6)
    return svg(figure)


@drawing
def slot_lines(slots: Mapping[str, Sequence[float]]) -> str:
    """Per set: the share of steps in which drafts 1..k were all accepted, k = 1..K."""
    figure, (ax,) = new_figure(5.2, 2.6)
    depth = 1
    for color, (name, rates) in zip(COLORS * 4, slots.items(), strict=False):
        depth = max(depth, len(rates))
        ax.plot(range(1, len(rates) + 1), rates, marker="o", markersize=4, color=color, label=name)
    ax.set_xticks(range(1, depth + 1))
    ax.set_ylim(bottom=0.0)
    ax.set_xlabel("slot k")
    ax.set_ylabel("drafts 1..k all accepted")
    ax.legend()
    return svg(figure)
