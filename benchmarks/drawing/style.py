"""Shared style of all figures: sizes, colours, markers and number formats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

LABEL = 7.5  # points
WIDTH = 8.6  # inches, at 100 pixels each slightly wider than a README's column
INK, SECOND, FAINT, GRID = "#24292f", "#57606a", "#8b949e", "#e6e8eb"
TITLE: dict[str, Any] = {"fontsize": 11, "fontweight": "bold", "va": "top"}
STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "sans-serif"],  # similar widths
    "font.size": 8.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.titlesize": 9,
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
    "liger_chunked, share_prefix=auto": Look("shared prompts", "#3B94C7", "X"),
    "stock": Look("stock", "#555555", "s"),
    "liger-kernel layers": Look("stock, Liger's layers", "#D55E00", "^"),
    "liger_chunked, 1792-token chunks": Look("1792-token chunks", "#0072B2", "o", filled=False),
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
