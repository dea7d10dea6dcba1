"""Draw time and memory against tokens and vocabulary, one line per contender."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from benchmarks.drawing.style import FAINT, GRID, LOOKS, SECOND, TITLE, WIDTH, kibi, kilo, number
from benchmarks.harness import OURS
from benchmarks.report import Run

TIMES_FLOOR = (1, 1.2, 1.5, 2, 3, 5, 10, 20, 50, 100)


def draw_scaling(run: Run) -> Figure:
    figure = Figure(figsize=(WIDTH, 11.2))
    grid = figure.add_gridspec(4, 1, left=0.09, right=0.76, top=0.925, bottom=0.045, hspace=0.42)
    for column, sweep in enumerate(("tokens", "vocabulary")):
        tasks = sorted((shape[sweep], task) for task, shape in run.tasks.items() if shape["sweep"] == sweep)
        time, memory = (figure.add_subplot(grid[2 * column + row, 0]) for row in range(2))
        time.axhline(1, color=FAINT, linewidth=1, linestyle=(0, (4, 2)))
        floors = [(v, n, row["ms"] / run.tasks[task]["floor_ms"]) for v, task, n, row in _rows(run, tasks)]
        ends = [(tasks[-1][0], 1.0, "matrix products", FAINT), *_draw_lines(time, floors)]
        time.set(yscale="log", title=f"Time over the matrix products ({_fixed(run, tasks, sweep)})")
        time.set_yticks(TIMES_FLOOR, minor=False)
        time.yaxis.set_minor_locator(NullLocator())
        time.yaxis.set_major_formatter(FuncFormatter(number))
        time.set_ylim(0.95, max([2.0, *(ratio for *_, ratio in floors)]) * 1.05)
        measured = [(v, n, row["mib"] / 1024) for v, _, n, row in _rows(run, tasks) if row["mib"] is not None]
        peaks = _draw_lines(memory, measured)
        memory.set_title(f"Peak above the inputs, GiB ({_fixed(run, tasks, sweep)})")
        if peaks:
            memory.set_yscale("log", base=2)
        memory.yaxis.set_major_formatter(FuncFormatter(number))
        for axes, labels in ((time, ends), (memory, peaks)):
            axes.set(xscale="log" if sweep == "tokens" else "linear", xlabel=sweep)
            axes.set_xticks([value for value, _ in tasks])
            axes.xaxis.set_major_formatter(FuncFormatter(kibi if sweep == "tokens" else kilo))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(color=GRID, linewidth=0.7)
            axes.set_axisbelow(True)
            _label_ends(figure, axes, labels)
    figure.text(0.012, 0.995, "Cross entropy against tokens and vocabulary", **TITLE)
    figure.text(0.012, 0.975, run.title, color=SECOND, va="top")
    return figure


def _fixed(run: Run, tasks: Sequence[tuple[int, str]], sweep: str) -> str:
    """Return the sizes that a sweep keeps."""
    other = "vocabulary" if sweep == "tokens" else "tokens"
    shape = run.tasks[tasks[0][1]]
    return f"H {shape['hidden']}, {other} {shape[other]}"


def _rows(run: Run, tasks: Sequence[tuple[int, str]]) -> list[tuple[int, str, str, dict[str, Any]]]:
    """Return (value, task, contender, row) of everything that was measured."""
    return [(value, task, name, row) for value, task in tasks for name, row in run.measured(task).items()]


def _draw_lines(axes: Axes, points: Sequence[tuple[int, str, float]]) -> list[tuple[float, float, str, str]]:
    """Draw a line per contender through (x, contender, y), ours on top; return the ends with labels and colours."""
    ends = []
    for name in dict.fromkeys(name for _, name, _ in points):
        x, y = zip(*((x, y) for x, of, y in points if of == name), strict=True)
        look, ours = LOOKS[name], name == OURS
        axes.plot(x, y, color=look.colour, marker=look.marker, ms=4, lw=2.2 if ours else 1.3, zorder=4 if ours else 3)
        ends.append((x[-1], y[-1], look.label, look.colour))
    return ends


def _label_ends(figure: Figure, axes: Axes, ends: Sequence[tuple[float, float, str, str]]) -> None:
    points = [axes.transData.transform((x, y)) * 72 / figure.dpi for x, y, *_ in ends]
    edge = axes.transAxes.transform((1, 0))[0] * 72 / figure.dpi
    y = float("-inf")
    for (_, at), (x, value, label, colour) in sorted(zip(points, ends, strict=True), key=lambda pair: pair[0][1]):
        y = max(at, y + 12)
        x_point = axes.transData.transform((x, value))[0] * 72 / figure.dpi
        offset = (edge - x_point + 8, y - at)
        axes.annotate(
            label,
            (x, value),
            offset,
            textcoords="offset points",
            fontsize=7.5,
            color=colour,
            va="center",
            weight="bold" if label == "liger_chunked" else "normal",
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.5, "shrinkA": 0, "shrinkB": 2},
        )
