"""Draw speed and memory of whole training steps as bars."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from benchmarks.drawing.style import LOOKS, SECOND, TITLE, WIDTH
from benchmarks.report import Run, contenders, peak_gib

_BAR = 0.8  # share of a task's lane, divided between its contenders


def draw_steps(run: Run, title: str) -> Figure:
    names, tasks = contenders(run), list(run.tasks)
    height = 1.25 + 0.2 * len(tasks) * (len(names) + 1)
    figure = Figure(figsize=(WIDTH, height))
    edges = {"left": 0.31, "right": 0.985, "top": 1 - 0.98 / height, "bottom": 0.1 / height, "wspace": 0.1}
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
    speed.set_yticks(range(len(tasks)), [_in_lines(task) for task in tasks], fontsize=8.5)
    speed.invert_yaxis()
    speed.set_title("tokens a second")
    memory.set_title("peak GiB (pale: resident)")
    for axes in (speed, memory):
        axes.set_xticks([])
        axes.margins(x=0.4, y=0.01)
        axes.tick_params(length=0)
        axes.spines[["top", "right", "bottom"]].set_visible(False)
    figure.text(0.012, 1 - 0.1 / height, title, **TITLE)
    figure.text(0.012, 1 - 0.34 / height, run.title, color=SECOND, va="top")
    left = 0.012
    for look in (LOOKS[name] for name in names):
        figure.text(left, 1 - 0.54 / height, look.label, color=look.colour, va="top", weight="bold", fontsize=9)
        left += 0.03 + 0.0152 * len(look.label)  # width of a bold letter
    return figure


def _in_lines(task: str) -> str:
    """
    >>> _in_lines("DPO llama-3.2-1b prompt 1024 2 a prompt 16x1536")
    'DPO llama-3.2-1b\\nprompt 1024 2 a prompt\\n16x1536'
    """
    *words, shape = task.split(" ")
    return "\n".join(filter(None, [" ".join(words[:2]), " ".join(words[2:]), shape]))


_IN_POINTS: dict[str, Any] = {"textcoords": "offset points", "va": "center", "fontsize": 8.5}
