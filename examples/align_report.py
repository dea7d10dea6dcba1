"""The results of a run of `align.py`, as a table and a figure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_MIB = 2**20
_COLOURS = {"fused": "#1f6feb", "eager": "#f28e2b"}
_TOLERANCE = 1e-4  # allowed difference of the fused and the eager curves, in float32


class TensorSize(NamedTuple):
    """The size of a tensor, without its data."""

    bytes: int
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.bytes / _MIB:,.1f} MiB, {' x '.join(map(str, self.shape))}"


class LargestTensor(TorchDispatchMode):
    """Inside the `with` block, finds the largest result of any PyTorch operation, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.size = TensorSize(0, ())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            # An expanded tensor has more elements than its storage.
            if isinstance(x, Tensor) and (size := min(x.nbytes, x.untyped_storage().nbytes())) > self.size.bytes:
                self.size = TensorSize(size, tuple(x.shape))
        return result


class Evaluation(NamedTuple):
    """Results of one model on the held-out pairs; axis 0 is (chosen, rejected)."""

    logps: Tensor  # (2, n) of the completions, in nats
    lengths: Tensor  # (2, n) tokens of the completions

    def likelihood_margin(self) -> Tensor:
        """Return how much likelier the chosen completion is: (n,) nats per token."""
        chosen, rejected = self.logps / self.lengths
        return chosen - rejected


@dataclass
class Run:
    """The curves of a run, one value per step, and its results on the held-out pairs."""

    name: str
    beta: float
    sft_loss: list[float] = field(default_factory=list)
    dpo_loss: list[float] = field(default_factory=list)
    margin: list[float] = field(default_factory=list)
    largest: dict[str, TensorSize] = field(default_factory=dict)  # of the first SFT and the first DPO step
    peak: dict[str, int] = field(default_factory=dict)  # bytes allocated on the GPU at once, by the same names
    evaluations: dict[str, Evaluation] = field(default_factory=dict)  # "before" and "after" DPO
    seconds: float = 0.0

    def reward_margin(self, when: str) -> Tensor:
        """Return the rewards of the held-out chosen completions minus those of the rejected ones, (n,).

        The reference is the model before DPO, so all margins start at zero.
        """
        rewards = self.beta * (self.evaluations[when].logps - self.evaluations["before"].logps)
        return rewards[0] - rewards[1]


class Share(NamedTuple):
    """A share of `n` pairs, with its binomial standard error."""

    value: float
    n: int

    @property
    def error(self) -> float:
        return math.sqrt(self.value * (1 - self.value) / self.n)

    def __str__(self) -> str:
        return f"{self.value:.3f} ± {self.error:.3f}"


def accuracy(margins: Tensor) -> Share:
    """Return the share of positive margins; a tie counts half."""
    right = (margins > 0).double() + 0.5 * (margins == 0).double()
    return Share(right.mean().item(), margins.numel())


def curve_differences(fused: Run, eager: Run) -> dict[str, float]:
    """Return the largest difference at any step, for each curve."""
    return {name: float(_gaps(fused, eager, name).max()) for name in _CURVES}


def _gaps(fused: Run, eager: Run, curve: str) -> Tensor:
    a, b = (torch.tensor(getattr(run, curve), dtype=torch.float64) for run in (fused, eager))
    return (a - b).abs()


_CURVES = {"sft_loss": "SFT loss", "dpo_loss": "DPO loss", "margin": "reward margin"}


# ---- the table


def _from_to(curve: Sequence[float]) -> str:
    # Adding zero turns -0.0 into 0.0.
    first, last = (round(value, 3) + 0.0 for value in (curve[0], curve[-1]))
    return f"{first:.3f} -> {last:.3f}"


def _run_rows(runs: Sequence[Run]) -> list[list[str]]:
    rows = [
        ["first step -> last step", *(run.name for run in runs), *(["largest difference"] if len(runs) == 2 else [])]
    ]
    for curve, label in _CURVES.items():
        unit = {"sft_loss": ", nats per token", "dpo_loss": ", nats per pair"}.get(curve, " in training")
        gap = [f"{curve_differences(*runs)[curve]:.1e}"] if len(runs) == 2 else []
        rows.append([label + unit, *(_from_to(getattr(run, curve)) for run in runs), *gap])
    for phase in runs[0].largest:
        rows.append([f"largest tensor, {phase} step", *(str(run.largest[phase]) for run in runs)])
    for phase in runs[0].peak:
        rows.append([f"peak of GPU memory, {phase}", *(f"{run.peak[phase] / _MIB:,.0f} MiB" for run in runs)])
    rows.append(["held-out preference accuracy", *(str(accuracy(run.reward_margin("after"))) for run in runs)])
    rows.append(["seconds", *(f"{run.seconds:.0f}" for run in runs)])
    return rows


def _held_out_rows(run: Run, kinds: Sequence[str]) -> list[list[str]]:
    rows = [["held-out pairs, before -> after DPO", "chosen likelier per token", "chosen rewarded more"]]
    likelihood = [run.evaluations[when].likelihood_margin() for when in ("before", "after")]
    reward = [run.reward_margin(when) for when in ("before", "after")]
    groups = [*dict.fromkeys(kinds), "all"] if len(set(kinds)) > 1 else ["all"]
    for group in groups:
        chosen = torch.tensor([group in (kind, "all") for kind in kinds])
        columns = [[accuracy(margin[chosen]) for margin in margins] for margins in (likelihood, reward)]
        rows.append([f"{group}: {int(chosen.sum())} pairs", *(f"{old.value:.3f} -> {new}" for old, new in columns)])
    rows.append(["mean reward margin", "", f"{reward[0].mean():.3f} -> {reward[1].mean():.3f}"])
    return rows


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in rows if i < len(row)) for i in range(max(map(len, rows)))]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows]
    lines.insert(1, "-" * (sum(widths) + 2 * len(widths) - 2))
    return "\n".join(lines)


def table(runs: Sequence[Run], kinds: Sequence[str]) -> str:
    """Return the table that the demo prints last; `kinds` has the kind of each held-out pair."""
    return f"{_aligned(_run_rows(runs))}\n\n{_aligned(_held_out_rows(runs[0], kinds))}"


# ---- the figure


def _draw_curve(axes: Axes, runs: Sequence[Run], curve: str, title: str, unit: str) -> None:
    styles = {"fused": {"linewidth": 3.5, "alpha": 0.55}, "eager": {"linewidth": 1.1, "linestyle": "--"}}
    for run in runs:
        axes.plot(getattr(run, curve), color=_COLOURS[run.name], label=run.name, **styles[run.name])
    axes.set(title=title, xlabel="step", ylabel=unit)
    axes.legend(frameon=False)


def _draw_differences(axes: Axes, runs: Sequence[Run]) -> None:
    for (curve, label), colour in zip(_CURVES.items(), ("#4c9f70", "#8e6bbf", "#c0504d"), strict=True):
        # Dots, because a logarithmic axis cannot show a difference of zero.
        axes.semilogy(_gaps(*runs, curve), ".", color=colour, markersize=4, label=label)
    axes.axhline(_TOLERANCE, color="#888888", linestyle=":", label=f"{_TOLERANCE:.0e}")
    axes.set(title="|fused - eager|", xlabel="step", ylabel="difference of the curves", ylim=(1e-9, 1e-2))
    axes.legend(frameon=False, ncols=2)


def _draw_held_out(axes: Axes, run: Run) -> None:
    margins = run.reward_margin("after")
    low, high = min(margins.min().item(), 0.0), max(margins.max().item(), 0.0)
    width = max(high - low, 1e-6) / 30
    edges = [i * width for i in range(math.floor(low / width), math.ceil(high / width) + 1)]
    for sign, colour, label in ((margins > 0, "#4c9f70", "right"), (margins <= 0, "#c0504d", "wrong")):
        axes.hist(margins[sign].tolist(), bins=edges, color=colour, label=f"{label}: {int(sign.sum())}")
    axes.axvline(0, color="#444444", linewidth=1)
    axes.set(title=f"Held-out pairs after DPO: accuracy {accuracy(margins)}", xlabel="reward margin", ylabel="pairs")
    axes.legend(frameon=False)


def _draw_largest(axes: Axes, runs: Sequence[Run]) -> None:
    phases = list(runs[0].largest)
    for i, run in enumerate(runs):
        at = [phase + (i - (len(runs) - 1) / 2) * 0.38 for phase in range(len(phases))]
        bars = axes.bar(at, [run.largest[p].bytes / _MIB for p in phases], 0.36, color=_COLOURS[run.name])
        axes.bar_label(bars, [f"{run.name}\n{run.largest[p].bytes / _MIB:,.1f}" for p in phases], padding=2)
    axes.set_xticks(range(len(phases)), [f"{phase} step" for phase in phases])
    axes.set(title="Largest tensor", ylabel="MiB")
    axes.margins(y=0.2)


def draw(runs: Sequence[Run], path: Path) -> None:
    """Write the curves, the held-out margins and the tensor sizes to a PNG."""
    figure = Figure(figsize=(15, 8), layout="constrained")
    panels = figure.subplots(2, 3).flatten().tolist()
    _draw_curve(panels[0], runs, "sft_loss", "SFT", "loss, nats per token")
    _draw_curve(panels[1], runs, "dpo_loss", "DPO", "loss, nats per pair")
    _draw_curve(panels[2], runs, "margin", "DPO: chosen over rejected in training", "reward margin")
    _draw_held_out(panels[3], runs[0])
    _draw_largest(panels[4], runs)
    if len(runs) == 2:
        _draw_differences(panels[5], runs)
    else:
        panels[5].set_axis_off()
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
