"""What a user gains, by what they run: the tables and the figure of README and home page.

The first table has a row for each kind of step that was measured, good or bad; the second one has losses and a layer
alone, each beside the fastest and the leanest other library of its run. A number is read from the kept runs and never
written by hand: `benchmarks.figures` fills the pages.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness import OURS, OURS_SHARED, STOCK
from benchmarks.report import Run, name_and_shape, newest, peak_gib, spaced

LAYERS = "liger-kernel layers"
LIGER = "liger-kernel"


@dataclass(frozen=True)
class Gain:
    """A kind of step: where its row is, and what the page says about it.

    Attributes:
        family, task: see `benchmarks.report.newest`.
        you_run: the first cell.
        note: the last cell: why, and what a reader could overlook; with fields for milliseconds, `ours` and `stock`.
        ours, liger: the contenders beside stock.
    """

    family: str
    task: str
    you_run: str
    note: str = ""
    ours: str = OURS
    liger: str = LAYERS


@dataclass(frozen=True)
class Step:
    """A measured step: milliseconds and peak GiB of stock, Liger-Kernel and this library. None was not measured."""

    you_run: str
    note: str
    ms: tuple[float | None, float | None, float]
    gib: tuple[float | None, float | None, float]
    source: str

    def over(self, other: int) -> str:
        theirs = self.ms[other]
        return "–" if theirs is None else f"{theirs / self.ms[2]:.2f}"

    def noted(self) -> str:
        note = self.note.format(stock=self.ms[0], ours=self.ms[2])
        is_slower = self.ms[0] is not None and self.ms[2] > self.ms[0]
        return f"slower: {note}" if is_slower else note


_BUILDS_LOGITS = "TRL's trainer builds all logits"
_SAME = "TRL has its own fused head"
GAINS = (
    Gain("sft", "llama-3-8b 4x4096", "SFT, Llama-3-8B, 4 × 4096 tokens", liger=LIGER),
    Gain("sft", "llama-3.2-1b 16x4096", "SFT, Llama-3.2-1B, 16 × 4096", "stock builds all logits", liger=LIGER),
    Gain("sft", "qwen2.5-0.5b 16x4096", "SFT, Qwen2.5-0.5B, 16 × 4096", "stock builds all logits", liger=LIGER),
    Gain("trainers", "SFT llama-3.2-1b 8x2048", "TRL SFT, Llama-3.2-1B, 8 × 2048", _SAME),
    Gain("trainers", "SFT qwen2.5-0.5b 8x2048", "TRL SFT, Qwen2.5-0.5B, 8 × 2048", _SAME),
    Gain("trainers", "DPO llama-3.2-1b 8x2048", "TRL DPO, Llama-3.2-1B, 8 × 2048", _SAME),
    Gain("trainers", "KTO llama-3.2-1b 8x2048", "TRL KTO, Llama-3.2-1B, 8 × 2048", _SAME),
    Gain("trainers", "ORPO llama-3.2-1b 8x2048", "TRL ORPO, Llama-3.2-1B, 8 × 2048", _BUILDS_LOGITS),
    Gain("trainers", "SimPO llama-3.2-1b 8x2048", "TRL SimPO, Llama-3.2-1B, 8 × 2048", _BUILDS_LOGITS),
    Gain("trainers", "GRPO llama-3.2-1b 8x2048", "TRL GRPO, Llama-3.2-1B, 8 × 2048", _SAME),
    Gain("trainers", "GKD llama-3.2-1b 3x2048", "TRL GKD, Llama-3.2-1B, 3 × 2048", _BUILDS_LOGITS),
    Gain("trainers", "Distillation llama-3.2-1b 8x2048", "TRL distillation, Llama-3.2-1B, 8 × 2048", _SAME),
    Gain(
        "trainers_shared",
        "DPO llama-3.2-1b prompt 1024 2 a prompt 16x1536",
        "TRL DPO, pairs with one prompt, 16 × (1024 + 512)",
        "each prompt is computed once, for two answers",
        ours=OURS_SHARED,
    ),
    Gain(
        "trainers_shared",
        "GRPO llama-3.2-1b prompt 2048 8 a prompt 8x2560",
        "TRL GRPO, eight answers to a prompt, 8 × (2048 + 512)",
        "{ours:.0f} ms instead of {stock:.0f} ms: the prompt is computed once, so 6,144 tokens in place of 20,480",
        ours=OURS_SHARED,
    ),
)
SMALL = "SFT, SmolLM2-135M, 64 short sequences"
_SMALL_RUNS = "evidence_sft"


@dataclass(frozen=True)
class Alone:
    """A loss or layer by itself: where its row is, and what the page says about it."""

    family: str
    task: str
    note: str = ""


ALONE = (
    Alone("cross_entropy", "cross entropy 8192x4096x128256"),
    Alone("cross_entropy", "cross entropy 65536x2048x151936"),
    Alone("cross_entropy", "cross entropy 4096x1024x32000", "the host takes most of the time"),
    Alone(
        "preference",
        "DPO 4x2x2048x4096x128256, prompt 0.5",
        "TRL and this library skip the prompt half",
    ),
    Alone("preference", "DPO 1x2x16384x2048x151936", "a pair over the budget projects its logits twice"),
    Alone("preference", "DPO 2x2x512x1024x32000", "the host takes most of the time"),
    Alone("distillation", "JSD 8192x(1536, 4096)x151936"),
    Alone("policy", "GRPO 8x2048x2048x151936"),
    Alone("base_kernels", "RMSNorm 4096x2048, launches included", "the host takes most of the time"),
)
_NAMES = {
    "eager": "eager",
    "torch.compile": "torch.compile",
    "torch.compile(eager)": "torch.compile",
    "F.rms_norm": "torch's own",
    LIGER: "Liger-Kernel",
    "liger-kernel, C=16, fp32 accumulation": "Liger-Kernel, 16 chunks",
    "liger-kernel, Triton": "Liger-Kernel, Triton",
    "trl": "TRL",
    "cut-cross-entropy, exact": "CCE, exact",
    "quack": "QuACK",
}


def whole_run(folder: Path, family: str) -> Run:
    """Return the newest whole run of a family.

    Raises:
        ValueError: there is none.
    """
    run = newest(folder, family)
    if run is None:
        raise ValueError(f"{folder} has no whole run of {family}")
    return run


def _where(run: Run, task: str) -> str:
    of = run.again.get(task, run)
    return f"{of.environment['device']}, {of.environment['date']}, `{of.path.name}`"


def has_runs(folder: Path) -> bool:
    """Return whether a folder has a run of every family of the steps."""
    families = {gain.family for gain in GAINS}
    return all(newest(folder, family) for family in families) and any(folder.glob(f"{_SMALL_RUNS}-*.json"))


def steps(folder: Path) -> list[Step]:
    """Return a step for each of `GAINS`, and the one of a small model.

    Raises:
        ValueError: a run is absent.
    """
    made = []
    for gain in GAINS:
        run = whole_run(folder, gain.family)
        rows = run.measured(gain.task)
        of = [rows.get(name) for name in (STOCK, gain.liger, gain.ours)]
        ms, gib = ([None if row is None else value(row) for row in of] for value in (_ms, peak_gib))
        made.append(Step(gain.you_run, gain.note, tuple(ms), tuple(gib), _where(run, gain.task)))  # type: ignore[arg-type]
    return [*made, _small(folder)]


def _ms(row: dict[str, Any]) -> float:
    return float(row["ms"])


def _small(folder: Path) -> Step:
    """Return the SFT update of a small model, which waits for the host, from the runs of `benchmarks.evidence`."""
    path = max(
        folder.glob(f"{_SMALL_RUNS}-*.json"), key=lambda path: json.loads(path.read_text())["environment"]["saved"]
    )
    content = json.loads(path.read_text())
    timed = {run["contender"]: run for run in content["timed"]}
    of = [timed[name] for name in (STOCK, LAYERS, OURS)]
    about = content["environment"]
    commit = of[-1].get("commit", about["commit"])
    return Step(
        SMALL,
        f"a step this small waits for the host ({about['date']}, commit {commit[:7]}, "
        f"{about['device']}, float32 weights, autocast)",
        tuple(median(run["ms"]) for run in of),  # type: ignore[arg-type]
        tuple(max(run["mib"]) / 1024 for run in of),  # type: ignore[arg-type]
        f"{about['device']}, {about['date']}, `{path.name}`",
    )


def steps_table(shown: list[Step]) -> str:
    lines = [
        "| you run | × stock | × Liger-Kernel's layers | peak GiB, stock | on Liger-Kernel's layers | here | |",
        "|---|---|---|---|---|---|---|",
    ]
    for step in shown:
        gib = ["–" if value is None else f"{value:.1f}" for value in step.gib]
        cells = [step.you_run, f"**{step.over(0)}**", step.over(1), *gib, step.noted()]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _others(rows: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: row for name, row in rows.items() if not name.startswith(OURS)}


def _best(rows: dict[str, dict[str, Any]], value: Callable[[dict[str, Any]], float], digits: int) -> str:
    name = min(rows, key=lambda name: value(rows[name]))
    return f"{value(rows[name]):.{digits}f} {_NAMES[name]}"


def _times_floor(row: dict[str, Any]) -> float:
    return float(row["times_floor"])


def _mib(row: dict[str, Any]) -> float:
    return float(row["mib"])


def alone_table(folder: Path) -> str:
    """Return losses and a layer alone, each with the fastest and the leanest other contender of its run."""
    lines = [
        "| loss or layer alone | time here | the fastest other | MiB here | the least other | |",
        "|---|---|---|---|---|---|",
    ]
    for alone in ALONE:
        rows = whole_run(folder, alone.family).measured(alone.task)
        others = _others(rows)
        ours = f"**{_times_floor(rows[OURS]):.2f}** | {_best(others, _times_floor, 2)}"
        memory = f"**{_mib(rows[OURS]):.0f}** | {_best(others, _mib, 0)}"
        label = spaced(alone.task) if alone.family == "base_kernels" else ", ".join(name_and_shape(alone.task))
        lines.append(f"| {label} | {ours} | {memory} | {alone.note} |")
    where = _gathered([_where(whole_run(folder, alone.family), alone.task) for alone in ALONE])
    return "\n".join([*lines, "", f"{where}."])


def _gathered(sources: list[str]) -> str:
    """Name a card and a date once.

    >>> _gathered(["H100, 2026-11-27, `a.json`", "H100, 2026-11-27, `b.json`"])
    'H100, 2026-11-27, `a.json`, `b.json`'
    """
    files: dict[str, list[str]] = {}
    for source in dict.fromkeys(sources):
        where, _, name = source.rpartition(", ")
        files.setdefault(where, []).append(name)
    return "; ".join(", ".join([where, *names]) for where, names in files.items())


def sources(folder: Path, shown: list[Step]) -> str:
    """Return cards, dates and files of the steps, and the versions of the peers."""
    versions = whole_run(folder, "trainers").environment["versions"]
    named = {"torch": "torch", "triton": "triton", "liger-kernel": "Liger-Kernel", "trl": "TRL"}
    peers = ", ".join(f"{label} {versions[name]}" for name, label in named.items() if name in versions)
    where = _gathered([step.source for step in shown])
    return f"*One GPU, bfloat16, forward, backward and AdamW; {peers}. {where}.*"


def markdown(folder: Path) -> str:
    """Return the table of steps, and its sources."""
    shown = steps(folder)
    return "\n\n".join([steps_table(shown), sources(folder, shown)])
