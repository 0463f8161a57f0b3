"""One look for every figure.

A figure leaves here as SVG text with real text in it. Ink (text, axes) is drawn in one marker colour, so that the same
figure becomes a page's own text colour when it is inlined (`inline`) and black on white as a file (`standalone`).
"""

from __future__ import annotations

import functools
import io
import re
from collections.abc import Callable
from typing import ParamSpec

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

INK = "#010203"
"""Stands for the page's text colour."""

COLORS = ("#3b82c4", "#d9822b", "#3f9d6b", "#9a6fc4", "#c4566b", "#7d8791")
"""Told apart by most colour-blind readers; readable on white and on black. The last one is for what is not the subject.
"""

_SETTINGS = {
    "svg.fonttype": "none",
    "svg.hashsalt": "torchspec",
    "font.family": "sans-serif",
    "font.size": 9.5,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.7,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
}


Arguments = ParamSpec("Arguments")


def drawing(function: Callable[Arguments, str]) -> Callable[Arguments, str]:
    """Decorates a function that draws: the look holds inside it and nowhere else."""

    @functools.wraps(function)
    def styled(*args: Arguments.args, **kwargs: Arguments.kwargs) -> str:
        with matplotlib.rc_context(_SETTINGS):
            return function(*args, **kwargs)

    return styled


def new_figure(width: float, height: float, columns: int = 1) -> tuple[Figure, list[Axes]]:
    """An empty figure of width x height inches and its axes from left to right; no window system, no global state."""
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = list(figure.subplots(1, columns, squeeze=False)[0])
    for ax in axes:
        ax.grid(True, axis="y", color=COLORS[-1], alpha=0.25, linewidth=0.6)
        ax.set_axisbelow(True)
    return figure, axes


def svg(figure: Figure) -> str:
    """The figure as SVG text; the same figure gives the same text."""
    buffer = io.StringIO()
    FigureCanvasSVG(figure).print_svg(buffer, metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :].strip() + "\n"


def inline(text: str, label: str) -> str:
    """SVG for inside an HTML page: the ink is the page's text colour, the height follows the width, `label` is read
    aloud.
    """
    head, rest = text.split(">", 1)
    head = re.sub(r' height="[^"]*"', "", head)
    return f'{head} role="img" aria-label="{label}">{rest}'.replace(INK, "currentColor")


def standalone(text: str) -> str:
    """SVG as a file of its own: black on white, so that it can be read wherever it is shown."""
    head, rest = text.split(">", 1)
    return f'{head}><rect width="100%" height="100%" fill="#ffffff"/>{rest}'.replace(INK, "#1a1a1a")
