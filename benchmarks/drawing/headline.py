"""Draw what a user gains: a bar for each kind of step, the speed over stock. Narrow, with large text, for a phone."""

from __future__ import annotations

from matplotlib.figure import Figure

from benchmarks.drawing.style import FAINT, INK, LOOKS, SECOND
from benchmarks.harness import OURS
from benchmarks.headline import LAYERS, Step

_WIDTH = 5.4  # inches: at 400 pixels, a letter of 11 points is 11 pixels high
_LANE, _HEAD, _FOOT = 0.29, 0.62, 0.05  # inches: of a bar, above the bars, below them
_LABELS, _MEMORY = 1.75, 1.05  # inches left and right of the bars


def draw_headlines(shown: list[Step]) -> Figure:
    height = _HEAD + _LANE * len(shown) + _FOOT
    figure = Figure(figsize=(_WIDTH, height))
    box = (_LABELS / _WIDTH, _FOOT / height, 1 - (_LABELS + _MEMORY) / _WIDTH, _LANE * len(shown) / height)
    axes = figure.add_axes(box)
    fastest = max(ratio(step, 0) for step in shown)
    for lane, step in enumerate(shown):
        speed = ratio(step, 0)
        axes.barh(lane, speed, height=0.66, color=LOOKS[OURS].colour if speed >= 1 else FAINT)
        look = LOOKS[LAYERS]
        axes.plot(speed / ratio(step, 1), lane, look.marker, color=look.colour, markersize=6, markeredgecolor="#ffffff")
        text = {"va": "center", "fontsize": 10, "color": INK}
        axes.annotate(label(step), (0, lane), (-5, 0), textcoords="offset points", ha="right", **text)
        axes.annotate(
            f"{speed:.2f}",
            (max(speed, speed / ratio(step, 1)), lane),
            (6, 0),
            textcoords="offset points",
            fontweight="bold",
            **text,
        )
        memory = f"{step.gib[0]:.1f} → {step.gib[2]:.1f}"
        figure.text(1 - 0.06 / _WIDTH, (_FOOT + (len(shown) - lane - 0.5) * _LANE) / height, memory, ha="right", **text)
    axes.axvline(1, color=SECOND, linewidth=1)
    axes.set(xlim=(0, fastest * 1.22), ylim=(len(shown) - 0.5, -0.5))
    axes.set_axis_off()
    top = {"va": "top", "fontsize": 10}
    at = [1 - inches / height for inches in (0.05, 0.27)]
    figure.text(_LABELS / _WIDTH, at[0], "speed over stock", fontweight="bold", color=INK, **top)
    figure.text(_LABELS / _WIDTH, at[1], "| stock", color=SECOND, **top)
    figure.text((_LABELS + 0.6) / _WIDTH, at[1], "▲ on Liger-Kernel's layers", color=LOOKS[LAYERS].colour, **top)
    figure.text(1 - 0.06 / _WIDTH, at[0], "peak GiB", ha="right", fontweight="bold", color=INK, **top)
    figure.text(1 - 0.06 / _WIDTH, at[1], "stock → here", ha="right", color=INK, **top)
    return figure


def ratio(step: Step, other: int) -> float:
    """Return the speed over stock (0) or over Liger-Kernel (1)."""
    theirs = step.ms[other]
    assert theirs is not None, step.you_run
    return theirs / step.ms[2]


def label(step: Step) -> str:
    """Return a short name: "SFT, Llama-3-8B", or the trainer and what its batch shares."""
    kind, what, *_ = step.you_run.split(", ")
    if kind.endswith("SFT"):
        return f"{kind}, {what}"
    kind = kind.removeprefix("TRL ")
    return kind if what.startswith("Llama") else f"{kind}, shared prompts"
