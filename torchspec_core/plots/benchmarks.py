"""Figure 1: acceptance length by benchmark, benchmarks grouped by category, one bar a way of decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchspec_core.plots.style import COLORS, drawing, new_figure, svg


@dataclass(frozen=True)
class Measured:
    """One acceptance length; `half`: half of its 95 % interval. series: what distinguishes bars of one benchmark."""

    benchmark: str
    category: str
    series: str
    value: float
    half: float


@drawing
def benchmark_bars(measured: Sequence[Measured], limit: float, caption: str) -> str:
    """Bars from 1 (nothing accepted); `limit` = 1 + K, what a perfect drafter would reach."""
    places: dict[str, float] = {}
    edges: dict[str, list[float]] = {}
    at = 0.0
    for item in measured:
        if item.benchmark not in places:
            at += 1.0 if item.category in edges else 1.6
            places[item.benchmark] = at
            edges.setdefault(item.category, []).append(at)
    series = list(dict.fromkeys(item.series for item in measured))
    width = 0.8 / len(series)
    figure, (ax,) = new_figure(max(6.0, 0.85 * len(places) + 1.0), 3.4)
    for number, name in enumerate(series):
        own = [item for item in measured if item.series == name]
        ax.bar(
            [places[item.benchmark] + (number - (len(series) - 1) / 2) * width for item in own],
            [item.value - 1.0 for item in own],
            bottom=1.0,
            width=0.92 * width,
            color=COLORS[number % len(COLORS)],
            yerr=[item.half for item in own],
            error_kw={"elinewidth": 1.0, "ecolor": "#5a6068", "capsize": 2.0},
            label=name,
        )
    ax.set_xticks(list(places.values()), list(places), rotation=35, ha="right")
    highest = max(item.value + item.half for item in measured)
    top = min(limit, highest + 0.1) if limit > highest else highest + 0.1
    for category, xs in edges.items():
        ax.text((xs[0] + xs[-1]) / 2, top, category, ha="center", va="bottom", fontsize=8.5)
    ax.set_ylim(1.0, top)
    ax.set_ylabel("tokens a verification step")
    ax.set_xlabel(caption, fontsize=8)
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return svg(figure)
