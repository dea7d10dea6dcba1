"""Draw the training curves of a real model: every method, every contender, mean and range over seeds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.drawing.style import GRID, LABEL, LOOKS, SECOND, TITLE, WIDTH
from benchmarks.evidence_report import ALL_ON, LAYERS, TITLES, Evidence
from benchmarks.harness import OURS, STOCK

_CURVES = {
    "sft": ("loss", "loss, nats"),
    "dpo": ("loss", "loss, nats"),
    "kto": ("loss", "loss"),
    "grpo": ("reward", "reward"),
    "grpo_top_p": ("reward", "reward"),
    "distillation": ("loss", "KL, nats"),
}
_COLOURS = {
    STOCK: LOOKS[STOCK].colour,
    LAYERS: LOOKS[LAYERS].colour,
    OURS: LOOKS[OURS].colour,
    ALL_ON: "#009E73",
}
_WINDOW = 5  # updates of a moving mean: single batches differ more than contenders do


def smooth(values: Sequence[float]) -> list[float]:
    """Return the mean of each value and of up to `_WINDOW - 1` before it."""
    return [statistics.fmean(values[max(0, i + 1 - _WINDOW) : i + 1]) for i in range(len(values))]


def draw_evidence(every: Sequence[Evidence]) -> Figure:
    """Draw a panel for each method."""
    columns = 2
    rows = -(-len(every) // columns)
    figure = Figure(figsize=(WIDTH, 1.15 + 2.1 * rows))
    panels = figure.subplots(rows, columns, squeeze=False).flatten().tolist()
    for axes, evidence in zip(panels, every, strict=False):
        _draw(axes, evidence)
    for axes in panels[len(every) :]:
        axes.set_axis_off()
    height = figure.get_size_inches()[1]
    top, bottom = 1 - 1.25 / height, 0.45 / height
    figure.subplots_adjust(left=0.11, right=0.985, top=top, bottom=bottom, hspace=0.55, wspace=0.34)
    environment = every[0].content["environment"]
    figure.text(0.012, 1 - 0.08 / height, f"Training {environment['model']}, stock and ours", **TITLE)
    what = f"mean and range over seeds, moving mean of {_WINDOW} updates"
    figure.text(0.012, 1 - 0.3 / height, what, color=SECOND, va="top")
    handles, labels = panels[0].get_legend_handles_labels()
    place = {"loc": "upper left", "bbox_to_anchor": (0.0, 1 - 0.48 / height)}
    figure.legend(handles, labels, ncols=2, frameon=False, fontsize=LABEL, **place)
    return figure


def _draw(axes: Axes, evidence: Evidence) -> None:
    name, unit = _CURVES[evidence.method]
    for i, contender in enumerate(evidence.contenders):
        seeds = [smooth(curve) for curve in evidence.curve(contender, name)]
        if not seeds:
            continue
        steps = range(1, len(seeds[0]) + 1)
        means = [statistics.fmean(values) for values in zip(*seeds, strict=True)]
        low, high = ([f(values) for values in zip(*seeds, strict=True)] for f in (min, max))
        # Curves that agree lie upon each other: the first are the widest.
        axes.plot(steps, means, color=_COLOURS[contender], linewidth=(4.2, 2.8, 1.6, 0.7)[i], label=contender)
        axes.fill_between(steps, low, high, color=_COLOURS[contender], alpha=0.12, linewidth=0)
    axes.set_title(TITLES[evidence.method], fontweight="bold")
    axes.set_ylabel(unit)
    axes.set_xlabel("update", labelpad=1)
    axes.grid(color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
