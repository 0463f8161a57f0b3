"""How long the training samples are."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torchspec_core.plots.style import COLORS, drawing, new_figure, svg


@drawing
def length_histogram(edges: Sequence[int], counts: Sequence[int]) -> str:
    """Samples by length in tokens; `edges` [n + 1] of the bins, `counts` [n]."""
    figure, (axes,) = new_figure(6.4, 2.6)
    widths = [after - before for before, after in itertools.pairwise(edges)]
    axes.bar(edges[:-1], counts, width=widths, align="edge", color=COLORS[0], edgecolor="none")
    axes.set_title("samples by length")
    axes.set_xlabel("tokens")
    return svg(figure)
