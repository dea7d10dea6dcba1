"""The numbers that README and home page lead with: which task of which run, and the sentence about each.

A number is read from the kept runs and never written by hand: `benchmarks.figures` fills the pages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.harness import OURS, OURS_SHARED, STOCK
from benchmarks.report import Run, peak_gib

LAYERS = "liger-kernel layers"


@dataclass(frozen=True)
class Headline:
    """One panel of the figure and one line of the list.

    Attributes:
        family, task: where the rows are, see `benchmarks.report.newest`; `task` is how its name begins.
        title: of the panel.
        names: contender and its label, slowest or largest first; the last is this library.
        value: the number of a row.
        unit: how the number is written.
        more_is_better: whether the longest bar wins.
        sentence: takes `ours`, `theirs` (the first contender's), and `times`, how much better ours is.
    """

    family: str
    task: str
    title: str
    names: Mapping[str, str]
    value: Callable[[dict[str, Any]], float]
    unit: str
    sentence: str
    more_is_better: bool = False

    def task_of(self, run: Run) -> str:
        """Return the task's name.

        Raises:
            ValueError: not one task begins like this.
        """
        found = [task for task in run.cells if task.startswith(self.task)]
        if len(found) != 1:
            raise ValueError(f"{self.family}: one task must begin with {self.task!r}, found {found}")
        return found[0]

    def values(self, run: Run) -> dict[str, float]:
        """Return the number of each contender, by label.

        Raises:
            ValueError: ours is not the best of them, which a headline claims.
        """
        rows = run.measured(self.task_of(run))
        found = {label: self.value(rows[name]) for name, label in self.names.items()}
        *others, ours = found.values()
        if any(other >= ours if self.more_is_better else other <= ours for other in others):
            raise ValueError(f"{self.task}: a headline must show a number that is the best of its row, got {found}")
        return found

    def text(self, run: Run) -> str:
        theirs, *_, ours = self.values(run).values()
        times = ours / theirs if self.more_is_better else theirs / ours
        return self.sentence.format(ours=self.unit.format(ours), theirs=self.unit.format(theirs), times=times)


def _speed(row: dict[str, Any]) -> float:
    return float(row["tokens_per_s"])


def _times_floor(row: dict[str, Any]) -> float:
    return float(row["times_floor"])


_STEPS = {STOCK: "TRL", LAYERS: "TRL on Liger-Kernel's layers"}
HEADLINES = (
    Headline(
        "trainers",
        "ORPO llama-3.2-1b 8x2048",
        "ORPO step, Llama-3.2-1B: peak memory, GiB",
        _STEPS | {OURS: OURS},
        peak_gib,
        "{:.1f}",
        "**ORPO** of Llama-3.2-1B, a whole training step: {ours} GiB at the peak, where TRL's trainer takes {theirs} "
        "({times:.1f} times as much).",
    ),
    Headline(
        "trainers",
        "GKD llama-3.2-1b 3x2048",
        "GKD step, Llama-3.2-1B: peak memory, GiB",
        _STEPS | {OURS: OURS},
        peak_gib,
        "{:.1f}",
        "**Distillation (GKD)** of Llama-3.2-1B, a whole training step: {ours} GiB at the peak, where TRL's trainer "
        "takes {theirs} ({times:.1f} times as much).",
    ),
    Headline(
        "trainers_shared",
        "GRPO llama-3.2-1b prompt 2048 8 a prompt 8x2560",
        "GRPO step, 8 completions of a prompt: tokens a second",
        _STEPS | {OURS_SHARED: OURS},
        _speed,
        "{:,.0f}",
        "**GRPO** of Llama-3.2-1B, eight completions of 512 tokens for a prompt of 2048: {ours} tokens a second "
        "where TRL reaches {theirs} ({times:.1f} times). The prompt is computed once.",
        more_is_better=True,
    ),
    Headline(
        "preference",
        "DPO 4x2x2048x4096x128256, prompt 0.5",
        "DPO loss and gradients: time over the matrix products alone",
        {"liger-kernel": "Liger-Kernel", "trl": "TRL", OURS: OURS},
        _times_floor,
        "{:.2f}",
        "**The DPO loss** with its gradients, 4 pairs of 2048 tokens, 4096 × 128256 head: {times:.1f} times as fast as "
        "Liger-Kernel's. It takes {ours} of the time of its matrix products alone, which repeats within 4%, and "
        "Liger-Kernel's {theirs} times.",
    ),
)


def headlines(runs: Mapping[str, Run]) -> list[tuple[Headline, Run]]:
    """Return the headlines whose tasks the runs have, each with its run."""
    return [
        (headline, runs[headline.family])
        for headline in HEADLINES
        if headline.family in runs and any(task.startswith(headline.task) for task in runs[headline.family].cells)
    ]


def source(shown: list[tuple[Headline, Run]]) -> str:
    """Return hardware, versions, dates and commits of the runs that are shown."""
    of = [run.again.get(headline.task_of(run), run) for headline, run in shown]
    titles = {run.title.rpartition(", ")[0] for run in of}
    when = dict.fromkeys(f"{run.environment['date']} (commit {run.commit[:8]})" for run in of)
    peers = {
        f"{label} {run.environment['versions'][name]}"
        for name, label in (("trl", "TRL"), ("liger-kernel", "Liger-Kernel"))
        for run in of
        if name in run.environment["versions"]
    }
    where = f"One {'; '.join(sorted(titles))}; {', '.join(sorted(peers))}; measured {', '.join(when)}."
    return f"{where} TRL runs with its defaults, without its Liger option."


def markdown(shown: list[tuple[Headline, Run]], figure: str) -> str:
    """Return the list, the figure (Markdown or HTML), and where the numbers are from."""
    lines = [f"- {headline.text(run)}" for headline, run in shown]
    return "\n".join([*lines, "", figure, "", f"*{source(shown)}*"])
