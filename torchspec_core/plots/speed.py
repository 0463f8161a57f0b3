"""Training speed: by improvement, and where the time of a step goes."""

from __future__ import annotations

from collections.abc import Mapping

from torchspec_core.plots.style import COLORS, drawing, new_figure, svg


@drawing
def speed_bars(rates: Mapping[str, float], spreads: Mapping[str, float], unit: str) -> str:
    """A bar for each name, from top to bottom, with its multiple of the first one; whiskers: half the spread."""
    figure, (axes,) = new_figure(8.2, 0.42 * len(rates) + 0.9)
    names, first = list(rates), next(iter(rates.values()))
    colors = [COLORS[-1], *[COLORS[0]] * (len(names) - 1)]
    errors = [spreads[name] / 2 for name in names]
    axes.barh(
        names, [rates[name] for name in names], xerr=errors, color=colors, height=0.66, error_kw={"elinewidth": 0.8}
    )
    for row, name in enumerate(names):
        text = f"{rates[name]:,.0f}" + (f"   {rates[name] / first:.2f}x" if row else "")
        axes.annotate(text, (rates[name] + errors[row], row), (5, 0), textcoords="offset points", va="center")
    axes.invert_yaxis()
    axes.grid(False)
    axes.margins(x=0.18)
    axes.set_xlim(left=0)
    axes.set_xlabel(unit)
    return svg(figure)


@drawing
def step_breakdown(steps: Mapping[str, Mapping[str, float]]) -> str:
    """Milliseconds of a step by phase, a stacked bar for each name, from top to bottom; all have the same phases."""
    phases = list(next(iter(steps.values())))
    figure, (axes,) = new_figure(8.2, 0.46 * len(steps) + 1.2)
    for color, phase in zip(COLORS, phases, strict=False):
        before = [sum(step[p] for p in phases[: phases.index(phase)]) for step in steps.values()]
        widths = [step[phase] for step in steps.values()]
        axes.barh(list(steps), widths, left=before, color=color, height=0.6, label=phase)
    for row, step in enumerate(steps.values()):
        total = sum(step[phase] for phase in phases)
        axes.annotate(f"{total:,.0f} ms", (total, row), (5, 0), textcoords="offset points", va="center")
    axes.invert_yaxis()
    axes.grid(False)
    axes.margins(x=0.12)
    axes.set_xlim(left=0)
    axes.set_xlabel("ms a step")
    figure.legend(loc="outside upper left", ncols=len(phases))
    return svg(figure)


@drawing
def outstanding_curve(rates: Mapping[int, float], plain: float | None) -> str:
    """Prefill throughput against the requests that the engine may hold at once; `plain`: that of the engine alone."""
    figure, (axes,) = new_figure(6.4, 3.4)
    counts = sorted(rates)
    axes.plot(counts, [rates[count] for count in counts], color=COLORS[0], marker="o", label="with capture")
    if plain is not None:
        axes.axhline(plain, color=COLORS[-1], linestyle="--", label="vLLM alone, 32 requests")
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("outstanding requests")
    axes.set_ylabel("tokens/s")
    figure.legend(loc="outside upper left", ncols=2)
    return svg(figure)
