"""The trend of the nightly numbers: one panel a gate, one line a subject, its band behind it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torchspec_core.plots.style import COLORS, drawing, new_figure, svg

GATES = ("loss", "accuracy.slot_1", "acceptance", "throughput")
NIGHTS = 60


@drawing
def trend(nights: Iterable[Sequence[Mapping[str, Any]]]) -> str:
    """The newest `NIGHTS` nights, oldest left, each number divided by the middle of its band (or by its lower end).

    So every healthy line runs near 1; a cross marks a value outside its band. nights: verdicts of each, as JSON.
    """
    rows = list(nights)[-NIGHTS:]
    figure, panels = new_figure(11.0, 2.8, columns=len(GATES))
    subjects = list(dict.fromkeys(v["subject"] for night in rows for v in night))
    for gate, ax in zip(GATES, panels, strict=True):
        for number, subject in enumerate(subjects):
            color = COLORS[number % len(COLORS)]
            points = [
                (place, v["value"] / _middle(v), v["ok"])
                for place, night in enumerate(rows)
                for v in night
                if v["subject"] == subject and v["gate"] == gate and v["value"] is not None and _middle(v)
            ]
            ax.plot([p[0] for p in points], [p[1] for p in points], color=color, label=subject, marker=".")
            bad = [p for p in points if not p[2]]
            ax.plot([p[0] for p in bad], [p[1] for p in bad], color=color, linestyle="", marker="x", markersize=9)
        ax.set_title(gate)
        ax.set_xlabel("night")
        ax.axhline(1.0, color=COLORS[-1], linewidth=0.8)
    panels[0].legend(fontsize=7)
    return svg(figure)


def _middle(verdict: Mapping[str, Any]) -> float:
    ends = [end for end in (verdict["low"], verdict["high"]) if end is not None]
    return sum(ends) / len(ends) if ends else 0.0
