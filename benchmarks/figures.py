"""The figures of docs/, and the table, from the kept runs.

python -m benchmarks.figures                                draws docs/*.svg
python -m benchmarks.figures --table docs/benchmarks.md     and writes what is between that page's markers;
                             --convergence docs/convergence.md   the same for the loss curves
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from benchmarks import curves
from benchmarks.curves import BFLOAT16, BOUND, FLOAT32, FUSED, NUDGED, STOCK, Convergence
from benchmarks.harness import OURS, RESULTS
from benchmarks.report import (
    FAMILIES,
    STEPS,
    Run,
    contenders,
    kernels_markdown,
    longest_markdown,
    markdown,
    name_and_shape,
    newest,
    newest_file,
    peak_gib,
    steps_markdown,
)

DOCS = Path(__file__).parent.parent / "docs"
FLOOR, SCALING, CONVERGENCE = "benchmarks-floor.svg", "benchmarks-scaling.svg", "convergence.svg"
STEP_FIGURES = {family: f"benchmarks-{family}.svg" for family in STEPS}
ALTERNATIVES = {
    FLOOR: "Time of every task over the time of its matrix products",
    SCALING: "Time and memory of the cross entropy against tokens and vocabulary",
    **{STEP_FIGURES[family]: f"{title}: tokens a second, and memory" for family, title in STEPS.items()},
    CONVERGENCE: "Loss of fused and of stock training, step by step, and their difference, for four families",
}
BEGIN, END = "<!-- benchmarks: begin -->", "<!-- benchmarks: end -->"
WIDTH = 8.6  # inches, at 100 pixels each a little more than a README's column
INK, SECOND, FAINT, GRID = "#24292f", "#57606a", "#8b949e", "#e6e8eb"
TITLE: dict[str, Any] = {"fontsize": 11, "fontweight": "bold", "va": "top"}
STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "sans-serif"],  # of one width
    "font.size": 8.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.edgecolor": FAINT,
    "xtick.color": INK,
    "ytick.color": INK,
    "svg.fonttype": "none",
    "svg.hashsalt": "liger_chunked",  # the same data make the same file
}


@dataclass(frozen=True)
class Look:
    """How a contender is shown: Okabe and Ito's colours for the colour-blind, darkened for text, and a shape."""

    label: str
    colour: str
    marker: str
    filled: bool = True


LOOKS = {
    "liger_chunked": Look("liger_chunked", "#0072B2", "o"),
    "stock": Look("stock", "#555555", "s"),
    "liger-kernel layers": Look("stock, Liger's layers", "#D55E00", "^"),
    "liger_chunked, 2048-token chunks": Look("2048-token chunks", "#0072B2", "o", filled=False),
    "liger_chunked.linear_token_stats, 256 MiB": Look("token stats", "#0072B2", "o", filled=False),
    "eager": Look("eager", "#555555", "s"),
    "torch.compile": Look("compile", "#B87D00", "D"),
    "liger-kernel": Look("Liger", "#D55E00", "^"),
    "liger-kernel, C=16, fp32 accumulation": Look("Liger, 16 chunks", "#D55E00", "^", filled=False),
    "liger-kernel, Triton": Look("Liger, Triton", "#D55E00", "^", filled=False),
    "trl": Look("TRL", "#009E73", "v"),
    "cut-cross-entropy, exact": Look("CCE", "#AA4488", "P"),
    "quack": Look("QuACK", "#3B94C7", "X"),
}


def number(value: float, _: object = None) -> str:
    return f"{value:g}"


def kibi(value: float, _: object = None) -> str:
    """
    >>> kibi(65536), kibi(512)
    ('64k', '512')
    """
    return f"{value / 1024:.0f}k" if value >= 1024 else f"{value:.0f}"


def kilo(value: float, _: object = None) -> str:
    """
    >>> kilo(151936)
    '152k'
    """
    return f"{value / 1000:.0f}k"


# ---- time over the floor, every task

_LEFT, _RIGHT = 2.7, 0.45  # inches beside a panel
_MOST = 6.0  # times the floor; beyond it a dot stands at the edge, with its number
_LABEL, _LEVEL = 7.5, 10.0  # points: size of a label, height of a level of them


def levels(starts: Sequence[float], widths: Sequence[float], gap: float = 4) -> list[int]:
    """How high each label stands above its dot, so that neither labels nor the lines up to them cross.

    A label begins at its dot and reaches to the right: it goes above those of all dots that it covers.

    Args:
        starts: where the dots are, ascending.
        widths: of their labels.

    >>> levels([0, 5, 30], [20, 10, 10])
    [1, 0, 0]
    """
    heights: list[int] = []
    for i in reversed(range(len(starts))):
        covered = [h for start, h in zip(starts[i + 1 :], heights, strict=True) if start < starts[i] + widths[i] + gap]
        heights.insert(0, 1 + max(covered, default=-1))
    return heights


@dataclass(frozen=True)
class Lane:
    """One task: its rows, fastest first, and at which level each is named; None: a lane above has named it."""

    task: str
    rows: list[dict[str, Any]]
    levels: list[int | None]

    @property
    def height(self) -> float:
        """In points."""
        named = [level for level in self.levels if level is not None]
        return 28.0 if not named else 24.0 + _LEVEL * (1 + max(named))


def _label(row: dict[str, Any]) -> str:
    beyond = f" {row['times_floor']:.1f}" if row["times_floor"] > _MOST else ""
    return LOOKS[row["name"]].label + beyond


def lanes(run: Run) -> list[Lane]:
    """A contender is named where it first appears, and wherever it stands at the edge."""
    points = 72 * (WIDTH - _LEFT - _RIGHT) / math.log(_MOST / 0.97)  # of an e-fold
    named: set[str] = set()
    found = []
    for task in run.tasks:
        rows = [row for name, row in run.measured(task).items() if name in LOOKS]
        rows.sort(key=lambda row: row["times_floor"])
        to_name = [row for row in rows if row["name"] not in named or row["times_floor"] > _MOST]
        named.update(row["name"] for row in to_name)
        starts = [points * math.log(min(row["times_floor"], _MOST)) for row in to_name]
        widths = [0.0 if row["times_floor"] > _MOST else 0.66 * _LABEL * len(_label(row)) for row in to_name]
        at = dict(zip((row["name"] for row in to_name), levels(starts, widths), strict=True))
        found.append(Lane(task, rows, [at.get(row["name"]) for row in rows]))
    return found


def draw_floor(runs: dict[str, Run]) -> Figure:
    """A panel a family, a lane a task, a dot a contender, at its time over that of the matrix products."""
    panels = {family: lanes(run) for family, run in runs.items()}
    totals = [sum(lane.height for lane in panel) for panel in panels.values()]
    between, top, bottom = 36.0, 66.0, 36.0  # points
    height = sum(totals) + between * (len(totals) - 1) + top + bottom
    figure = Figure(figsize=(WIDTH, height / 72))
    at = height - top
    for (family, panel), total in zip(panels.items(), totals, strict=True):
        share = 1 - (_LEFT + _RIGHT) / WIDTH
        axes = figure.add_axes((_LEFT / WIDTH, (at - total) / height, share, total / height))
        figure.text(0.012, (at + 6) / height, FAMILIES[family], fontsize=10, fontweight="bold")
        at -= total + between
        axes.set(xscale="log", xlim=(0.97, _MOST), ylim=(0, total), yticks=[])
        axes.set_xticks([1, 1.1, 1.2, 1.5, 2, 3, 4, 5])
        axes.xaxis.set_major_formatter(FuncFormatter(number))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.grid(axis="x", color=GRID, linewidth=0.7)
        axes.set_axisbelow(True)
        axes.axvline(1, color=INK, linewidth=1)
        axes.spines[["top", "right", "left"]].set_visible(False)
        y = total
        for lane in panel:
            y -= lane.height
            _draw_lane(axes, lane, y + 10)
    axes.set_xlabel("time / time of the matrix products alone (1 is the floor; logarithmic)")
    figure.text(0.012, 1 - 10 / height, "Forward and backward, over the matrix products", **TITLE)
    figure.text(0.012, 1 - 27 / height, next(iter(runs.values())).title, color=SECOND, va="top")
    return figure


def _draw_lane(axes: Axes, lane: Lane, base: float) -> None:
    """A line, the dots on it, their labels above, name and shape at the left."""
    axes.axhline(base, color="#d0d7de", linewidth=0.8, zorder=1)
    name, shape = name_and_shape(lane.task)
    shape, _, prompt = shape.partition(", prompt ")
    note = f"{shape}, {float(prompt):.0%} prompt" if prompt else shape
    for text, down, size, colour in ((name, 3, 8.5, INK), (note, -7, 7, SECOND)):
        place: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
        axes.annotate(text, (0, base), (-8, down), ha="right", fontsize=size, color=colour, **place)
    # The slowest first, so that ours is on top.
    for row, level in reversed(list(zip(lane.rows, lane.levels, strict=True))):
        look, ours = LOOKS[row["name"]], row["name"] == OURS
        x = min(row["times_floor"], _MOST)
        face = look.colour if look.filled else "white"
        mark = "|" if x == _MOST else look.marker
        order = 5 if ours else 4
        axes.plot(x, base, mark, color=look.colour, mfc=face, ms=6, zorder=order, clip_on=False)
        if level is None:
            continue
        y = base + 7 + level * _LEVEL
        weight = "bold" if ours else "normal"
        side: dict[str, Any] = {"fontsize": _LABEL, "color": look.colour, "weight": weight}
        if x == _MOST:
            axes.annotate(_label(row) + " →", (x, base + 6), ha="right", annotation_clip=False, **side)
        else:
            axes.plot([x, x], [base, y + 5], color=look.colour, linewidth=0.6, zorder=2)
            axes.annotate(_label(row), (x, y), (2, 0), textcoords="offset points", **side)


# ---- time and memory, against tokens and vocabulary


def draw_scaling(run: Run) -> Figure:
    """Time per thousand tokens, and memory, of the cross entropy in four panels."""
    figure = Figure(figsize=(WIDTH, 6.4))
    grid = figure.add_gridspec(2, 2, left=0.065, right=0.875, top=0.84, bottom=0.08, hspace=0.34, wspace=0.5)
    for column, sweep in enumerate(("tokens", "vocabulary")):
        tasks = sorted((shape[sweep], task) for task, shape in run.tasks.items() if shape["sweep"] == sweep)
        time, memory = (figure.add_subplot(grid[row, column]) for row in range(2))
        per_thousand = [(value, _per_thousand(run, task, run.tasks[task]["floor_ms"])) for value, task in tasks]
        time.plot(*zip(*per_thousand, strict=True), color=FAINT, linewidth=1, linestyle=(0, (4, 2)))
        ends = [(*per_thousand[-1], "matrix products", FAINT)]
        ends += _draw_lines(time, [(v, n, _per_thousand(run, t, row["ms"])) for v, t, n, row in _rows(run, tasks)])
        time.set(ylim=(0, None), title="Time per thousand tokens, ms")
        measured = [(v, n, row["mib"] / 1024) for v, _, n, row in _rows(run, tasks) if row["mib"] is not None]
        peaks = _draw_lines(memory, measured)
        memory.set_title("Peak above the inputs, GiB")
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
        other = "vocabulary" if sweep == "tokens" else "tokens"
        shape = run.tasks[tasks[0][1]]
        fixed = f"hidden {shape['hidden']}, {other} {shape[other]}"
        time.annotate(fixed, (0, 1), (0, 22), color=SECOND, xycoords="axes fraction", textcoords="offset points")
    figure.text(0.012, 0.985, "Cross entropy, forward and backward, against tokens and vocabulary", **TITLE)
    figure.text(0.012, 0.95, run.title, color=SECOND, va="top")
    return figure


def _per_thousand(run: Run, task: str, ms: float) -> float:
    return ms / run.tasks[task]["tokens"] * 1000


def _rows(run: Run, tasks: Sequence[tuple[int, str]]) -> list[tuple[int, str, str, dict[str, Any]]]:
    """Value, task, contender and row of all that was measured."""
    return [(value, task, name, row) for value, task in tasks for name, row in run.measured(task).items()]


def _draw_lines(axes: Axes, points: Sequence[tuple[int, str, float]]) -> list[tuple[float, float, str, str]]:
    """A line a contender through (x, contender, y), ours on top; returns where each ends, its label and colour."""
    ends = []
    for name in dict.fromkeys(name for _, name, _ in points):
        x, y = zip(*((x, y) for x, of, y in points if of == name), strict=True)
        look, ours = LOOKS[name], name == OURS
        axes.plot(x, y, color=look.colour, marker=look.marker, ms=4, lw=2.2 if ours else 1.3, zorder=4 if ours else 3)
        ends.append((x[-1], y[-1], look.label, look.colour))
    return ends


def _label_ends(figure: Figure, axes: Axes, ends: Sequence[tuple[float, float, str, str]]) -> None:
    """Name each line right of the panel, at the height of its end, labels pushed apart to 10 points."""
    points = [axes.transData.transform((x, y)) * 72 / figure.dpi for x, y, *_ in ends]
    edge = axes.transAxes.transform((1, 0))[0] * 72 / figure.dpi
    y = float("-inf")
    for (_, at), (x, value, label, colour) in sorted(zip(points, ends, strict=True), key=lambda pair: pair[0][1]):
        y = max(at, y + 10)
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


# ---- whole training steps

_BAR = 0.8  # of the lane of a task, shared by its contenders


def draw_steps(run: Run, title: str) -> Figure:
    """A lane a task, a bar a contender: speed over that of the task's fastest, and the peak."""
    names, tasks = contenders(run), list(run.tasks)
    height = 1.1 + 0.2 * len(tasks) * (len(names) + 1)
    figure = Figure(figsize=(WIDTH, height))
    edges = {"left": 0.27, "right": 0.95, "top": 1 - 0.75 / height, "bottom": 0.15 / height, "wspace": 0.28}
    speed, memory = figure.subplots(1, 2, sharey=True, gridspec_kw=edges)
    thick = _BAR / len(names)
    for lane, task in enumerate(tasks):
        measured = run.measured(task)
        fastest = max((row["tokens_per_s"] for row in measured.values()), default=None)
        for i, name in enumerate(names):
            y, look = lane - _BAR / 2 + (i + 0.5) * thick, LOOKS[name]
            row = measured.get(name)
            if row is None:
                failure = run.cells[task][name]["failure"] if name in run.cells[task] else ""
                speed.annotate(failure.partition(":")[0], (0, y), (3, 0), **_IN_POINTS, color=look.colour)
                continue
            bar: dict[str, Any] = {"height": 0.9 * thick, "color": look.colour}
            share = row["tokens_per_s"] / fastest
            speed.barh(y, share, **bar)
            speed.annotate(f"{row['tokens_per_s']:.0f}", (share, y), (3, 0), **_IN_POINTS)
            if row["mib"] is not None:
                resident, peak = row["resident_mib"] / 1024, peak_gib(row)
                memory.barh(y, resident, alpha=0.35, **bar)
                memory.barh(y, peak - resident, left=resident, **bar)
                memory.annotate(f"{peak:.1f}", (peak, y), (3, 0), **_IN_POINTS)
    speed.set_yticks(range(len(tasks)), [task.rpartition(" ")[0] + "\n" + task.rpartition(" ")[2] for task in tasks])
    speed.invert_yaxis()
    speed.set_title("tokens a second; bars: of the fastest")
    memory.set_title("peak memory, GiB; pale: between steps")
    for axes in (speed, memory):
        axes.set_xticks([])
        axes.margins(x=0.16, y=0.01)
        axes.tick_params(length=0)
        axes.spines[["top", "right", "bottom"]].set_visible(False)
    figure.text(0.012, 1 - 0.1 / height, title, **TITLE)
    figure.text(0.012, 1 - 0.34 / height, run.title, color=SECOND, va="top")
    for i, name in enumerate(reversed(names)):
        place = (0.95 - 0.19 * i, 1 - 0.34 / height)
        figure.text(*place, LOOKS[name].label, color=LOOKS[name].colour, ha="right", va="top", weight="bold")
    return figure


_IN_POINTS: dict[str, Any] = {"textcoords": "offset points", "va": "center", "fontsize": 7}


# ---- loss curves, fused and stock

_STOCK, _BFLOAT16 = "#E69F00", "#AA4488"
_SMALLEST = 1e-7  # nats: rounding of a loss in float32; less, such as nothing at all, is drawn there


def draw_convergence(run: Convergence) -> Figure:
    """A column a family: the two curves in float32, and below them how far apart curves are."""
    figure = Figure(figsize=(WIDTH, 4.8))
    grid: dict[str, Any] = {"left": 0.1, "right": 0.985, "top": 0.82, "bottom": 0.095, "hspace": 0.14, "wspace": 0.12}
    panels = figure.subplots(2, len(run.families), sharex=True, sharey="row", squeeze=False, gridspec_kw=grid)
    for (above, below), family in zip(panels.T, run.families, strict=True):
        _draw_curves(above, run, family)
        _draw_differences(below, run, family)
        above.set_title(curves.NAMES[family], fontweight="bold")
        below.set_xlabel("step")
        for axes in (above, below):
            axes.grid(color=GRID, linewidth=0.7)
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
    panels[0, 0].set_ylabel("loss in float32, nats")
    panels[1, 0].set_ylabel("largest difference\nfrom stock so far, nats")
    _name_lines(panels[0, 0], panels[1, 0])
    figure.text(0.012, 0.985, "Trained with the kernels, and without", **TITLE)
    figure.text(0.012, 0.935, run.title, color=SECOND, va="top")
    return figure


def _draw_curves(axes: Axes, run: Convergence, family: str) -> None:
    """Stock as a broad line, fused as a thin one on it."""
    seed = run.seeds(family, FLOAT32)[0]
    stock, fused = (run.curve(family, FLOAT32, variant, seed).losses for variant in (STOCK, FUSED))
    axes.plot(stock, color=_STOCK, linewidth=3.6, solid_capstyle="round")
    axes.plot(fused, color=LOOKS[OURS].colour, linewidth=0.9)


def _draw_differences(axes: Axes, run: Convergence, family: str) -> None:
    """Fused and nudged stock, in both dtypes, and the bound of float32, on a logarithmic scale."""
    seed = run.seeds(family, FLOAT32)[0]
    axes.set(yscale="log", ylim=(_SMALLEST, 1))
    axes.axhline(BOUND, color=INK, linewidth=0.8, linestyle=(0, (4, 2)))
    for dtype, variant, colour, width in (
        (BFLOAT16, NUDGED, FAINT, 2.2),
        (BFLOAT16, FUSED, _BFLOAT16, 1.3),
        (FLOAT32, NUDGED, FAINT, 2.2),
        (FLOAT32, FUSED, LOOKS[OURS].colour, 1.3),
    ):
        so_far = itertools.accumulate(run.differences(family, dtype, variant, seed), max)
        axes.plot([max(value, _SMALLEST) for value in so_far], color=colour, linewidth=width)


def _name_lines(above: Axes, below: Axes) -> None:
    """What the lines of a column are, in its upper panel's upper right corner and by the lines of its lower one."""
    for axes, text, y, colour in (
        (above, "stock", 0.93, _STOCK),
        (above, "fused, on it", 0.83, LOOKS[OURS].colour),
        (below, "fused, bfloat16", 0.86, _BFLOAT16),
        (below, "bound, float32", 0.595, INK),
        (below, "fused, float32", 0.36, LOOKS[OURS].colour),
        (below, "stock, weights nudged", 0.27, SECOND),
    ):
        axes.text(0.98, y, text, transform=axes.transAxes, ha="right", color=colour, fontsize=_LABEL)


# ---- the pages

STEP_NOTE = (
    "Forward, backward and AdamW. A cell is *tokens a second · peak GiB · GiB above what is there between steps*; "
    "*over* another is the ratio of speeds, more is better, and of the memory above, less is better."
)


KERNEL_NOTE = (
    "Forward and backward, as CUDA graphs but for the last rows, over the time of a copy that moves as many bytes as "
    "the operation must."
)


def write_between(path: Path, text: str) -> None:
    """Replace what is between the markers of a page.

    Raises:
        ValueError: the page has no markers.
    """
    page = path.read_text()
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{path}: expected the markers {BEGIN} and {END}")
    path.write_text(f"{head}{BEGIN}\n{text}\n{END}{tail}")


def drawn_as_markdown(paths: Sequence[Path], page_folder: Path) -> list[str]:
    return [f"![{ALTERNATIVES[path.name]}]({os.path.relpath(path, page_folder)})" for path in paths]


def main(arguments: Sequence[str] | None = None) -> list[Path]:
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON")
    parse.add_argument("--out", type=Path, default=DOCS, help="folder for the figures")
    parse.add_argument("--table", type=Path, help="page to write table and figures into, between its markers")
    parse.add_argument("--convergence", type=Path, help="the same for the loss curves")
    args = parse.parse_args(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    runs = {family: run for family in FAMILIES if (run := newest(args.results, family))}
    steps = {family: run for family in STEPS if (run := newest(args.results, family))}
    sweep = newest(args.results, "sweep")
    path = newest_file(args.results, "convergence")
    convergence = curves.load(path) if path else None
    figures = {}
    with matplotlib.rc_context(STYLE):
        if runs:
            figures[FLOOR] = draw_floor(runs)
        if sweep:
            figures[SCALING] = draw_scaling(sweep)
        for family, run in steps.items():
            figures[STEP_FIGURES[family]] = draw_steps(run, STEPS[family])
        if convergence:
            figures[CONVERGENCE] = draw_convergence(convergence)
        for name, figure in figures.items():
            figure.savefig(args.out / name, facecolor="white", metadata={"Date": None})
            print(f"drew {args.out / name}")
    drawn = {name: args.out / name for name in figures}
    if args.table:
        losses = [drawn[name] for name in (FLOOR, SCALING) if name in drawn]
        parts = [*drawn_as_markdown(losses, args.table.parent), markdown(runs)]
        if kernels := newest(args.results, "base_kernels"):
            parts += ["## Base kernels", KERNEL_NOTE, kernels_markdown(kernels)]
        for family, run in steps.items():
            figure = drawn_as_markdown([drawn[STEP_FIGURES[family]]], args.table.parent)
            parts += [f"## {STEPS[family]}", STEP_NOTE, *figure, steps_markdown(run)]
            if longest := newest(args.results, f"{family}_longest"):
                parts += ["The longest sequences that fit, in tokens:", longest_markdown(longest)]
        write_between(args.table, "\n\n".join(parts))
        print(f"wrote {args.table}")
    if args.convergence and convergence:
        shown = drawn_as_markdown([drawn[CONVERGENCE]], args.convergence.parent)
        write_between(args.convergence, "\n\n".join([*shown, curves.markdown(convergence)]))
        print(f"wrote {args.convergence}")
    return list(drawn.values())


if __name__ == "__main__":
    main()
