"""Draw the time over the floor of every task: one lane per task, one mark per contender."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from benchmarks.drawing.style import GRID, INK, LABEL, LOOKS, SECOND, TITLE, WIDTH, number
from benchmarks.harness import OURS
from benchmarks.report import FAMILIES, Run, name_and_shape

_LEFT, _RIGHT = 0.15, 0.4  # inches on each side of a panel
_MOST = 6.0  # times the floor; slower contenders get a dot at the edge, with their number
_LEVEL = 12.0  # points: height of a level of labels
_NAME = 15.0  # points above a lane's marks, for the name of its task


def levels(starts: Sequence[float], widths: Sequence[float], gap: float = 4) -> list[int]:
    """Return the level of each label above its dot, so that labels and their lines do not cross.

    A label starts at its dot and extends to the right. It is placed above the labels of all dots that it covers.

    Args:
        starts: positions of the dots, ascending.
        widths: widths of their labels.

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
    """One task: its rows, fastest first, and the level of each label; None if a lane above already has the label."""

    task: str
    rows: list[dict[str, Any]]
    levels: list[int | None]

    @property
    def height(self) -> float:
        named = [level for level in self.levels if level is not None]
        return 24.0 + _NAME + (0.0 if not named else _LEVEL * (1 + max(named)) - 4.0)


def _label(row: dict[str, Any]) -> str:
    beyond = f" {row['times_floor']:.1f}" if row["times_floor"] > _MOST else ""
    return LOOKS[row["name"]].label + beyond


def lanes(run: Run) -> list[Lane]:
    """Build the lanes. A contender is labelled where it first appears, and at every dot at the edge."""
    points = 72 * (WIDTH - _LEFT - _RIGHT) / math.log(_MOST / 0.97)  # points per e-fold
    named: set[str] = set()
    found = []
    for task in run.tasks:
        rows = [row for name, row in run.measured(task).items() if name in LOOKS]
        rows.sort(key=lambda row: row["times_floor"])
        to_name = [row for row in rows if row["name"] not in named or row["times_floor"] > _MOST]
        named.update(row["name"] for row in to_name)
        starts = [points * math.log(min(row["times_floor"], _MOST)) for row in to_name]
        widths = [0.0 if row["times_floor"] > _MOST else 0.66 * LABEL * len(_label(row)) for row in to_name]
        at = dict(zip((row["name"] for row in to_name), levels(starts, widths), strict=True))
        found.append(Lane(task, rows, [at.get(row["name"]) for row in rows]))
    return found


def draw_floor(runs: dict[str, Run]) -> Figure:
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
        axes.set_xticks([1, 1.2, 1.5, 2, 3, 4, 5])
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
    axes.set_xlabel("time / time of the matrix products alone (logarithmic)")
    figure.text(0.012, 1 - 10 / height, "Time over that of the matrix products", **TITLE)
    figure.text(0.012, 1 - 27 / height, next(iter(runs.values())).title, color=SECOND, va="top")
    return figure


def _draw_lane(axes: Axes, lane: Lane, base: float) -> None:
    axes.axhline(base, color="#d0d7de", linewidth=0.8, zorder=1)
    name, shape = name_and_shape(lane.task)
    shape, _, prompt = shape.partition(", prompt ")
    note = f"{shape}, {float(prompt):.0%} prompt" if prompt else shape
    place: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "va": "top"}
    axes.annotate(f"{name}  {note}", (0, base + lane.height - 12), (11, 0), fontsize=9, color=SECOND, **place)
    # Draw the slowest first, so that ours is on top.
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
        side: dict[str, Any] = {"fontsize": LABEL, "color": look.colour, "weight": weight}
        if x == _MOST:
            axes.annotate(_label(row) + " →", (x, base + 6), ha="right", annotation_clip=False, **side)
        else:
            axes.plot([x, x], [base, y + 5], color=look.colour, linewidth=0.6, zorder=2)
            right_aligned: dict[str, Any] = {"ha": "right"} if x > 0.75 * _MOST else {}
            axes.annotate(_label(row), (x, y), (2, 0), textcoords="offset points", **side, **right_aligned)
