"""What the rows of batches hold: tokens, or padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.collections import PatchCollection
from matplotlib.patches import Rectangle

from torchspec_core.plots.style import COLORS, INK, drawing, new_figure, svg

_PADDING = "#f2c230"


def _draw(axes: Axes, bars: Sequence[tuple[float, float, float]], color: str) -> None:
    """Bars as (left, row, width), with a hair between neighbours."""
    patches = [Rectangle((left, row - 0.42), width, 0.84) for left, row, width in bars]
    axes.add_collection(PatchCollection(patches, facecolor=color, edgecolor="white", linewidth=0.35))


def _side_by_side(axes: Axes, batches: Sequence[Sequence[int]]) -> None:
    """A document a row, padded to the longest of its batch."""
    row = 0
    for number, batch in enumerate(batches):
        width = max(batch)
        _draw(axes, [(0, row + i, length) for i, length in enumerate(batch)], COLORS[0])
        _draw(axes, [(length, row + i, width - length) for i, length in enumerate(batch)], _PADDING)
        row += len(batch)
        if number < len(batches) - 1:
            axes.axhline(row - 0.5, color=INK, linewidth=0.4, alpha=0.5)
    axes.set_ylim(row - 0.5, -0.5)
    axes.set_ylabel("documents; a line between batches")


def _end_to_end(axes: Axes, batches: Sequence[Sequence[int]], budget: int) -> None:
    """A batch a row, its documents one after the other."""
    for row, batch in enumerate(batches):
        left = 0
        for length in batch:
            _draw(axes, [(left, row, length)], COLORS[0])
            left += length
        _draw(axes, [(left, row, budget - left)], _PADDING)
    axes.set_ylim(len(batches) - 0.5, -0.5)
    axes.set_ylabel("batches")


@drawing
def padding_figure(panels: Mapping[str, Sequence[Sequence[int]]], budget: int) -> str:
    """Some batches of each way to make them, as they are computed.

    Args:
        panels: by title, lengths of the documents of each batch; those of the last one lie end to end.
        budget: tokens of a packed batch.
    """
    figure, axes = new_figure(9.6, 3.9, columns=len(panels))
    packed = list(panels)[-1]
    for ax, (title, batches) in zip(axes, panels.items(), strict=True):
        ax.grid(False)
        if title == packed:
            _end_to_end(ax, batches, budget)
        else:
            _side_by_side(ax, batches)
        ax.set_title(title)
        ax.autoscale(enable=True, axis="x", tight=True)
        ax.set_yticks([])
        ax.set_xlabel("tokens (yellow: padding)")
    return svg(figure)
