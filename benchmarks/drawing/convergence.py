"""Draw the loss curves of fused and stock training."""

from __future__ import annotations

import itertools
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks import curves
from benchmarks.curves import BFLOAT16, BOUND, FLOAT32, FUSED, NUDGED, STOCK, Convergence
from benchmarks.drawing.style import FAINT, GRID, INK, LABEL, LOOKS, SECOND, TITLE, WIDTH
from benchmarks.harness import OURS

_STOCK, _BFLOAT16, _NUDGED_BFLOAT16 = "#E69F00", "#AA4488", "#009E73"
_SMALLEST = 1e-7  # nats: the float32 rounding of a loss; smaller differences, including 0, are drawn here


def draw_convergence(run: Convergence) -> Figure:
    """Draw two panels for each family, one below the other: both curves in float32, and their differences."""
    columns = min(2, len(run.families))
    rows = 2 * -(-len(run.families) // columns)
    figure = Figure(figsize=(WIDTH, 0.6 + 2 * rows))
    grid: dict[str, Any] = {"left": 0.18, "right": 0.985, "top": 0.915, "bottom": 0.055, "hspace": 0.3, "wspace": 0.1}
    panels = figure.subplots(rows, columns, sharex=True, sharey="row", squeeze=False, gridspec_kw=grid)
    pairs = [pair for row in range(0, rows, 2) for pair in zip(panels[row], panels[row + 1], strict=True)]
    for (above, below), family in zip(pairs, run.families, strict=False):
        _draw_curves(above, run, family)
        _draw_differences(below, run, family)
        above.set_title(curves.NAMES[family], fontweight="bold")
        below.set_xlabel("step")
        for axes in (above, below):
            axes.grid(color=GRID, linewidth=0.7)
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
    for row in range(0, rows, 2):
        panels[row, 0].set_ylabel("loss in float32, nats")
        panels[row + 1, 0].set_ylabel("largest difference\nso far, nats")
    _name_lines(panels[0, 0], panels[1, 0])
    figure.text(0.012, 0.995, "Trained with the kernels, and without", **TITLE)
    figure.text(0.012, 0.969, run.title, color=SECOND, va="top")
    return figure


def _draw_curves(axes: Axes, run: Convergence, family: str) -> None:
    seed = run.seeds(family, FLOAT32)[0]
    stock, fused = (run.curve(family, FLOAT32, variant, seed).losses for variant in (STOCK, FUSED))
    axes.plot(stock, color=_STOCK, linewidth=3.6, solid_capstyle="round")
    axes.plot(fused, color=LOOKS[OURS].colour, linewidth=0.9)


def _draw_differences(axes: Axes, run: Convergence, family: str) -> None:
    seed = run.seeds(family, FLOAT32)[0]
    axes.set(yscale="log", ylim=(_SMALLEST, 1))
    axes.axhline(BOUND, color=INK, linewidth=0.8, linestyle=(0, (4, 2)))
    for dtype, variant, colour, width in (
        (BFLOAT16, NUDGED, _NUDGED_BFLOAT16, 2.2),
        (BFLOAT16, FUSED, _BFLOAT16, 1.3),
        (FLOAT32, NUDGED, FAINT, 2.2),
        (FLOAT32, FUSED, LOOKS[OURS].colour, 1.3),
    ):
        so_far = itertools.accumulate(run.differences(family, dtype, variant, seed), max)
        axes.plot([max(value, _SMALLEST) for value in so_far], color=colour, linewidth=width)


def _name_lines(above: Axes, below: Axes) -> None:
    for axes, text, y, colour in (
        (above, "stock", 0.93, _STOCK),
        (above, "fused, on it", 0.83, LOOKS[OURS].colour),
        (below, "fused, bfloat16", 0.96, _BFLOAT16),
        (below, "nudged, bfloat16", 0.86, _NUDGED_BFLOAT16),
        (below, "bound, float32", 0.58, INK),
        (below, "fused, float32", 0.36, LOOKS[OURS].colour),
        (below, "nudged, float32", 0.25, SECOND),
    ):
        axes.text(0.98, y, text, transform=axes.transAxes, ha="right", color=colour, fontsize=LABEL)
