"""Where the time and the bytes of a run went."""

from __future__ import annotations

from collections.abc import Sequence

from torchspec_core.plots.style import COLORS, drawing, new_figure, svg


@drawing
def stage_bars(names: Sequence[str], seconds: Sequence[float], megabytes: Sequence[float]) -> str:
    """Two panels with one bar a stage: seconds of making it, megabytes that it keeps."""
    figure, axes = new_figure(8.6, 0.7 + 0.25 * len(names), columns=2)
    for ax, values, label, color in zip(axes, (seconds, megabytes), ("seconds", "megabytes"), COLORS, strict=False):
        ax.barh(range(len(names)), values, color=color, height=0.62)
        for place, value in enumerate(values):
            text = f"{value:,.0f}" if value >= 10 else f"{value:.1f}"
            ax.annotate(text, (value, place), (4, 0), textcoords="offset points", va="center")
        ax.set_yticks(range(len(names)), names)
        ax.invert_yaxis()
        ax.margins(x=0.16)
        ax.set_xlim(left=0)
        ax.set_xlabel(label)
        ax.grid(False, axis="y")
        ax.grid(True, axis="x", color=COLORS[-1], alpha=0.25, linewidth=0.6)
    return svg(figure)
