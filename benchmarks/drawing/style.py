"""Shared style of all figures: sizes, colours, markers and number formats."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

LABEL = 9  # points
WIDTH = 5.4  # inches: on a screen of 400 pixels, a letter of 10 points is 9 pixels high
INK, SECOND, FAINT, GRID = "#24292f", "#57606a", "#8b949e", "#e6e8eb"
TITLE: dict[str, Any] = {"fontsize": 11, "fontweight": "bold", "va": "top"}
STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "sans-serif"],  # similar widths
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.edgecolor": FAINT,
    "xtick.color": INK,
    "ytick.color": INK,
    "svg.fonttype": "none",
    "svg.hashsalt": "liger_chunked",  # deterministic ids: the same data give the same file
}


@dataclass(frozen=True)
class Look:
    """Colour and marker of a contender: Okabe and Ito's colour-blind palette, darkened for text."""

    label: str
    colour: str
    marker: str
    filled: bool = True


LOOKS = {
    "liger_chunked": Look("liger_chunked", "#0072B2", "o"),
    "liger_chunked, share_prefix=auto": Look("shared prompts", "#009E73", "X"),
    "stock": Look("stock", "#555555", "s"),
    "liger-kernel layers": Look("stock, Liger's layers", "#D55E00", "^"),
    "liger_chunked, 1792-token chunks": Look("1792-token chunks", "#5B5BD6", "o", filled=False),
    "liger_chunked.linear_token_stats, 256 MiB": Look("token stats", "#00808A", "o", filled=False),
    "eager": Look("eager", "#555555", "s"),
    "torch.compile": Look("compile", "#B87D00", "D"),
    "liger-kernel": Look("Liger", "#D55E00", "^"),
    "liger-kernel, C=16, fp32 accumulation": Look("Liger, 16 chunks", "#8C3D10", "^", filled=False),
    "liger-kernel, Triton": Look("Liger, Triton", "#C2185B", "^", filled=False),
    "trl": Look("TRL", "#009E73", "v"),
    "cut-cross-entropy, exact": Look("CCE", "#AA4488", "P"),
    "quack": Look("QuACK", "#7A4FB5", "X"),
}

# Lighter versions of all colours above, for a dark page: at least 4.5 to 1 in contrast to the last one, the background.
_DARK = {
    INK: "#e6edf3",
    SECOND: "#b1bac4",
    FAINT: "#848d97",
    GRID: "#30363d",
    "#d0d7de": "#3d444d",
    "#000000": "#e6edf3",
    "#0072b2": "#58b0f0",
    "#5b5bd6": "#a3a3ff",
    "#00808a": "#4fd0da",
    "#8c3d10": "#d99a6c",
    "#c2185b": "#ff7fb0",
    "#7a4fb5": "#c3a3f0",
    "#555555": "#a9b1ba",
    "#d55e00": "#ff8f4a",
    "#b87d00": "#e0aa3e",
    "#e69f00": "#f0b848",
    "#009e73": "#3fcf9f",
    "#aa4488": "#e58bc8",
    "#1f77b4": "#58b0f0",  # matplotlib's own first colours
    "#ff7f0e": "#ff9f4a",
    "#2ca02c": "#5fd05f",
    "#808080": "#9aa4ae",
    "#b0b0b0": "#4a525b",
    "#cccccc": "#4a525b",
    "#ffffff": "#161b22",
}


def dark(svg: str) -> str:
    """Return a figure of matplotlib in the colours for a dark page.

    Raises:
        ValueError: a colour has no dark version.

    >>> dark('<svg><style type="text/css"></style><path style="fill: #ffffff; stroke: #0072b2"/></svg>')
    '<svg><style type="text/css">text {fill: #e6edf3}</style><path style="fill: #161b22; stroke: #58b0f0"/></svg>'
    """
    if unknown := {colour.lower() for colour in _COLOUR.findall(svg)} - _DARK.keys():
        raise ValueError(f"no dark version of {sorted(unknown)}: add it to {__name__}")
    svg = _COLOUR.sub(lambda found: _DARK[found[0].lower()], svg)
    # matplotlib leaves the colour of black text out.
    return svg.replace("</style>", f"text {{fill: {_DARK[INK]}}}</style>", 1)


_COLOUR = re.compile(r"(?<=[ \"])#[0-9a-fA-F]{6}\b")


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
