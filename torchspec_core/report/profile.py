"""The page that says where a training step's time goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torchspec_core.plots.speed import step_breakdown
from torchspec_core.report.document import Block, Heading, Picture, Table, Text
from torchspec_core.report.render import page

_OPERATIONS = 15


def profile_page(
    numbers: Mapping[str, float],
    phases: Mapping[str, float],
    operations: Sequence[tuple[str, float, float]],
    trace: str,
) -> str:
    """HTML, figure included.

    Args:
        numbers: `ms_per_step`, `supervised_per_second`, `padding`, `steps`, `threads`.
        phases: milliseconds of a step by phase.
        operations: (name, calls in a step, own milliseconds of a step), the longest first.
        trace: name of the trace's file.
    """
    ms, total = numbers["ms_per_step"], sum(own for _, _, own in operations)
    shown = tuple(
        (name, f"{calls:,.1f}", f"{own:,.2f}", f"{100 * own / total:.1f} %")
        for name, calls, own in operations[:_OPERATIONS]
    )
    blocks: list[Block] = [
        Heading("Where a training step's time goes", 1),
        Text(
            f"{ms:,.1f} ms a step over {numbers['steps']:.0f} steps, {numbers['supervised_per_second']:,.0f} "
            f"supervised tokens per second, {100 * numbers['padding']:.1f} % padding, {numbers['threads']:.0f} threads."
        ),
        Picture("breakdown.svg", "Time of the host by phase, without the profiler", step_breakdown({"": phases})),
        Table(
            ("phase", "ms", "share"),
            tuple((name, f"{value:,.1f}", f"{100 * value / ms:.1f} %") for name, value in phases.items()),
        ),
        Heading("Operations"),
        Text(
            f"On the host and under the profiler, which adds time of its own. The timeline: open {trace} in Perfetto."
        ),
        Table(("operation", "calls a step", "own ms a step", "share"), shown),
    ]
    return page(blocks)
