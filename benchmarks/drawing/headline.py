"""Draw the headlines: one panel each, one bar per contender. It is narrow and its text large, to be read on a phone."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.drawing.style import FAINT, INK, LOOKS, SECOND
from benchmarks.harness import OURS
from benchmarks.headline import Headline
from benchmarks.report import Run

_WIDTH = 5.4  # inches: at 400 pixels, a letter of 11 points is 11 pixels high
_LANE, _TITLE, _GAP = 0.29, 0.30, 0.16  # inches: of a bar, of a title, below a panel
_LABELS = 2.25  # inches left of the bars


def draw_headlines(shown: list[tuple[Headline, Run]]) -> Figure:
    heights = [_LANE * len(headline.names) for headline, _ in shown]
    total = sum(heights) + (_TITLE + _GAP) * len(shown)
    figure = Figure(figsize=(_WIDTH, total))
    at = total
    for (headline, run), height in zip(shown, heights, strict=True):
        at -= _TITLE + height
        box = (_LABELS / _WIDTH, at / total, 1 - (_LABELS + 0.1) / _WIDTH, height / total)
        title = {"fontsize": 11, "fontweight": "bold", "color": INK}
        figure.text(0.02 / _WIDTH, (at + height + 0.09) / total, headline.title, **title)
        _draw_bars(figure.add_axes(box), headline, run)
        at -= _GAP
    return figure


def _draw_bars(axes: Axes, headline: Headline, run: Run) -> None:
    values = headline.values(run)
    longest = max(values.values())
    for lane, (name, (label, value)) in enumerate(zip(headline.names, values.items(), strict=True)):
        ours = name.startswith(OURS)
        weight = "bold" if ours else "normal"
        axes.barh(lane, value, height=0.72, color=LOOKS[OURS].colour if ours else FAINT)
        text = {"va": "center", "fontsize": 10.5, "weight": weight, "color": INK if ours else SECOND}
        axes.annotate(label, (0, lane), (-6, 0), textcoords="offset points", ha="right", **text)
        axes.annotate(headline.unit.format(value), (value, lane), (4, 0), textcoords="offset points", **text)
    axes.set(xlim=(0, longest * 1.27), ylim=(len(values) - 0.5, -0.5))
    axes.set_axis_off()
