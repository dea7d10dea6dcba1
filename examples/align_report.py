"""The results of a run of `align.py`, as a table and a figure."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn
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
    """Inside the `with` block, finds the largest tensor that any PyTorch operation allocates, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.size = TensorSize(0, ())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(t not in (Tensor, nn.Parameter) for t in types):
            return NotImplemented  # deferred logits hold no memory; the operations that they run come here
        result = func(*args, **(kwargs or {}))
        # A view, such as the transposed weight, is no new memory.
        inputs = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and not x.is_meta and x.untyped_storage().data_ptr() not in inputs:
                # An expanded tensor has more elements than its storage.
                size = min(x.nbytes, x.untyped_storage().nbytes())
                if size > self.size.bytes:
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
    """The curves of a run, one value per step, and its results on the held-out pairs.

    A run for comparison stops after some `steps` of each phase, and has no results on the held-out pairs.
    """

    name: str
    beta: float
    steps: int | None = None  # of each phase; None: all
    sft_loss: list[float] = field(default_factory=list)
    dpo_loss: list[float] = field(default_factory=list)
    margin: list[float] = field(default_factory=list)
    largest: dict[str, TensorSize] = field(default_factory=dict)  # of the first SFT and the first DPO step
    peak: dict[str, int] = field(default_factory=dict)  # bytes allocated on the GPU at once, by the same names
    evaluations: dict[str, Evaluation] = field(default_factory=dict)  # "before" and "after" DPO
    right: dict[str, Tensor] = field(default_factory=dict)  # (n,), which answers were right "before", "after SFT", ...
    seconds: float = 0.0

    def reward_margin(self, when: str) -> Tensor:
        """Return the rewards of the held-out chosen completions minus those of the rejected ones, (n,).

        The reference is the model before DPO, so all margins start at zero.
        """
        rewards = self.beta * (self.evaluations[when].logps - self.evaluations["before"].logps)
        return rewards[0] - rewards[1]


class Share(NamedTuple):
    """A share of `n` items, with its 95% interval after Wilson (1927), which is right for shares near 0 and 1 too.

    With z = 1.96, the interval is `(p + z²/2n ± z sqrt(p (1 - p)/n + z²/4n²)) / (1 + z²/n)`.
    """

    value: float
    n: int

    @classmethod
    def of(cls, right: Tensor) -> Share:
        return cls(right.double().mean().item(), right.numel())

    @property
    def interval(self) -> tuple[float, float]:
        z, p, n = 1.96, self.value, self.n
        middle, half = p + z**2 / (2 * n), z * math.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
        low, high = ((middle + sign * half) / (1 + z**2 / n) for sign in (-1, 1))
        return max(0.0, min(low, p)), min(1.0, max(high, p))  # rounding, at shares of 0 and 1

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.value:.3f} [{low:.3f}, {high:.3f}]"


def accuracy(margins: Tensor) -> Share:
    """Return the share of positive margins; a tie counts half."""
    return Share.of((margins > 0).double() + 0.5 * (margins == 0).double())


def curve_differences(fused: Run, eager: Run) -> dict[str, float]:
    """Return the largest difference at any step of both runs, for each curve."""
    return {name: float(_gaps(fused, eager, name).max()) for name in _CURVES}


def _gaps(fused: Run, eager: Run, curve: str) -> Tensor:
    a, b = (torch.tensor(getattr(run, curve), dtype=torch.float64) for run in (fused, eager))
    n = min(len(a), len(b))
    return (a[:n] - b[:n]).abs()


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
    if any(run.steps for run in runs):
        rows.append(["steps of each phase", *(str(run.steps or "all") for run in runs)])
    for phase in runs[0].largest:
        rows.append([f"largest tensor, {phase} step", *(str(run.largest[phase]) for run in runs)])
    for phase in runs[0].peak:
        rows.append([f"peak of GPU memory, {phase}", *(f"{run.peak[phase] / _MIB:,.0f} MiB" for run in runs)])
    evaluated = [run for run in runs if run.steps is None]
    rows.append(["held-out preference accuracy", *(str(accuracy(run.reward_margin("after"))) for run in evaluated)])
    rows.append(["seconds", *(f"{run.seconds:.0f}" for run in runs)])
    return rows


def _held_out_rows(run: Run, kinds: Sequence[str]) -> list[list[str]]:
    rows = [["held-out pairs, before -> after DPO", "chosen likelier per token", "chosen rewarded more"]]
    likelihood = [run.evaluations[when].likelihood_margin() for when in ("before", "after")]
    reward = [run.reward_margin(when) for when in ("before", "after")]
    for name, chosen in _groups(kinds).items():
        columns = [[accuracy(margin[chosen]) for margin in margins] for margins in (likelihood, reward)]
        rows.append([f"{name}: {int(chosen.sum())} pairs", *(f"{old.value:.3f} -> {new}" for old, new in columns)])
    rows.append(["mean reward margin", "", f"{reward[0].mean():.3f} -> {reward[1].mean():.3f}"])
    return rows


def _aligned(rows: Sequence[Sequence[str]], left: bool = False) -> str:
    widths = [max(len(row[i]) for row in rows if i < len(row)) for i in range(max(map(len, rows)))]
    justify = str.ljust if left else str.rjust
    lines = ["  ".join([row[0].ljust(widths[0]), *map(justify, row[1:], widths[1:])]).rstrip() for row in rows]
    lines.insert(1, "-" * (sum(widths) + 2 * len(widths) - 2))
    return "\n".join(lines)


def _groups(kinds: Sequence[str]) -> dict[str, Tensor]:
    """Return which of the held-out pairs are of each kind, and of any."""
    names = [*dict.fromkeys(kinds), "all"] if len(set(kinds)) > 1 else ["all"]
    return {name: torch.tensor([name in (kind, "all") for kind in kinds]) for name in names}


def _answer_rows(run: Run, kinds: Sequence[str]) -> list[list[str]]:
    rows = [["right answers to held-out questions", *run.right]]
    for name, chosen in _groups(kinds).items():
        shares = [Share.of(right[chosen]) for right in run.right.values()]
        rows.append([f"{name}: {shares[0].n} questions", *map(str, shares)])
    return rows


def table(runs: Sequence[Run], kinds: Sequence[str]) -> str:
    """Return the tables that the demo prints; `kinds` has the kind of each held-out pair.

    Intervals are Wilson's, 95%.
    """
    parts = [_run_rows(runs), _held_out_rows(runs[0], kinds)]
    if runs[0].right:
        parts.append(_answer_rows(runs[0], kinds))
    return "\n\n".join(map(_aligned, parts)) + "\n[ , ]: 95% intervals (Wilson)"


def side_by_side(
    prompts: Sequence[str], texts: Mapping[str, Sequence[str]], right: Sequence[str], n: int = 8, width: int = 52
) -> str:
    """Return what a model writes for the first `n` prompts at each time, and the right answers."""

    def short(text: str) -> str:
        line = " ".join(text.split())
        return line if len(line) <= width else f"{line[: width - 3]}..."

    rows = [["prompt", *texts, "chosen"]]
    for i in range(min(n, len(prompts))):
        # The end of a prompt, without the marks of a chat template.
        said = [line for line in re.sub(r"<\|[^|]*\|>", "\n", prompts[i]).splitlines() if len(line.split()) > 1]
        rows.append([short(said[-1] if said else prompts[i]), *(short(found[i]) for found in texts.values()), right[i]])
    return _aligned(rows, left=True)


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


def _draw_answers(axes: Axes, run: Run, kinds: Sequence[str]) -> None:
    groups = _groups(kinds)
    colours = ("#b0b0b0", "#8e6bbf", "#4c9f70")
    for i, ((when, right), colour) in enumerate(zip(run.right.items(), colours, strict=True)):
        shares = [Share.of(right[chosen]) for chosen in groups.values()]
        at = [place + (i - 1) * 0.28 for place in range(len(shares))]
        errors = [
            [share.value - share.interval[0] for share in shares],
            [share.interval[1] - share.value for share in shares],
        ]
        axes.bar(at, [share.value for share in shares], 0.26, yerr=errors, color=colour, capsize=2, label=when)
    axes.set_xticks(range(len(groups)), list(groups))
    n = len(kinds)
    axes.set(title=f"Right answers to {n} held-out questions", ylabel="share, with Wilson's 95% interval", ylim=(0, 1))
    axes.legend(frameon=False, loc="upper left")


def _draw_largest(axes: Axes, runs: Sequence[Run]) -> None:
    phases = list(runs[0].largest)
    for i, run in enumerate(runs):
        at = [phase + (i - (len(runs) - 1) / 2) * 0.38 for phase in range(len(phases))]
        bars = axes.bar(at, [run.largest[p].bytes / _MIB for p in phases], 0.36, color=_COLOURS[run.name])
        axes.bar_label(bars, [f"{run.name}\n{run.largest[p].bytes / _MIB:,.1f}" for p in phases], padding=2)
    axes.set_xticks(range(len(phases)), [f"{phase} step" for phase in phases])
    axes.set(title="Largest tensor", ylabel="MiB")
    axes.margins(y=0.2)


def draw(runs: Sequence[Run], kinds: Sequence[str], path: Path) -> None:
    """Write the curves, the held-out results and the tensor sizes to a PNG."""
    figure = Figure(figsize=(15, 8), layout="constrained")
    panels = figure.subplots(2, 3).flatten().tolist()
    _draw_curve(panels[0], runs, "sft_loss", "SFT", "loss, nats per token")
    _draw_curve(panels[1], runs, "dpo_loss", "DPO", "loss, nats per pair")
    _draw_curve(panels[2], runs, "margin", "DPO: chosen over rejected in training", "reward margin")
    if runs[0].right:
        _draw_answers(panels[3], runs[0], kinds)
    else:
        _draw_held_out(panels[3], runs[0])
    _draw_largest(panels[4], runs)
    if len(runs) == 2:
        _draw_differences(panels[5], runs)
    else:
        panels[5].set_axis_off()
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
