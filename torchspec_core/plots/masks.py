"""Attention masks as pictures: one square for each key that a query sees, coloured by where the key comes from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.patches import Patch, Rectangle
from numpy.typing import NDArray

from torchspec_core.plots.style import COLORS, INK, drawing, new_figure, svg


@dataclass(frozen=True)
class Band:
    """Neighbouring queries or keys that belong together.

    name: written beside them. labels: one for each. kind: index of its colour and legend entry (keys only).
    """

    name: str
    labels: tuple[str, ...]
    kind: int = 0


@dataclass(frozen=True)
class MaskPicture:
    """visible: [queries, keys] boolean. queries, keys: bands in order, as many labels as rows and columns."""

    title: str
    visible: NDArray[np.bool_]
    queries: tuple[Band, ...]
    keys: tuple[Band, ...]


@drawing
def mask_figure(pictures: Sequence[MaskPicture], kinds: Sequence[str]) -> str:
    """The pictures from left to right, in squares of one size; `kinds` names the colours."""
    rows, columns = (sum(picture.visible.shape[axis] for picture in pictures) for axis in (0, 1))
    width = max(4.8, 1.4 * len(pictures) + 0.17 * columns)
    figure, axes = new_figure(width, 1.5 + 0.17 * rows / len(pictures), columns=len(pictures))
    for ax, picture in zip(axes, pictures, strict=True):
        rows, columns = picture.visible.shape
        ax.grid(False)
        ax.set_title(picture.title)
        kind = np.repeat([band.kind for band in picture.keys], [len(band.labels) for band in picture.keys])
        for row, column in np.argwhere(picture.visible).tolist():
            ax.add_patch(Rectangle((column, row), 1, 1, facecolor=COLORS[int(kind[column])], edgecolor="none"))
        ax.hlines(range(rows + 1), 0, columns, color=COLORS[-1], linewidth=0.25)
        ax.vlines(range(columns + 1), 0, rows, color=COLORS[-1], linewidth=0.25)
        ax.set_xlim(0, columns)
        ax.set_ylim(rows, 0)
        ax.set_aspect("equal")
        ax.set_xticks(np.arange(columns) + 0.5, [label for band in picture.keys for label in band.labels], fontsize=6)
        ax.set_yticks(np.arange(rows) + 0.5, [label for band in picture.queries for label in band.labels], fontsize=6)
        ax.tick_params(length=0)
        ax.xaxis.tick_top()
        ax.spines[["left", "bottom"]].set_visible(False)
        edge = 0
        for band in picture.keys:
            ax.text(edge + len(band.labels) / 2, rows + 0.5, band.name, ha="center", va="top", fontsize=7.5)
            edge += len(band.labels)
            ax.plot([edge, edge], [0, rows], color=INK, linewidth=0.9 if edge < columns else 0.0)
        edge = 0
        for band in picture.queries:
            ax.text(columns + 0.4, edge + len(band.labels) / 2, band.name, ha="left", va="center", fontsize=7.5)
            edge += len(band.labels)
            ax.plot([0, columns], [edge, edge], color=INK, linewidth=0.9 if edge < rows else 0.0)
    patches = [Patch(facecolor=COLORS[i], label=name) for i, name in enumerate(kinds)]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(kinds), fontsize=8)
    return svg(figure)
