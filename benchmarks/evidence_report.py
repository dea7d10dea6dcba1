"""Tables and figure of the kept runs of `benchmarks.evidence`, for docs/benchmarks.md.

python -m benchmarks.evidence_report      draws docs/evidence.svg; `make figures` writes the tables

Intervals of means over seeds are Student's, 95%. A difference is paired by seed, because contenders see the same data
in the same order. It is *resolved* if its mean is beyond the spread of the seeds, the largest minus the smallest.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness import OURS, RESULTS, STOCK

LAYERS, ALL_ON = "liger-kernel layers", f"{OURS}, all on"
# Two algorithms: stock ignores that the sampler kept a part of the vocabulary.
OTHER_ALGORITHM = ("grpo_top_p",)
# Their numbers compare a model with the untrained one.
AGAINST_UNTRAINED = ("dpo", "kto")
TITLES = {
    "sft": "SFT",
    "dpo": "DPO",
    "kto": "KTO",
    "grpo": "GRPO",
    "grpo_top_p": "GRPO, sampled with top-p 0.9",
    "distillation": "Distillation",
}


class Metric(NamedTuple):
    """A held-out number of a method: its key in the scores, its name and its digits."""

    key: str
    name: str
    digits: int


_PREFERENCES = (
    Metric("accuracy", "held-out preference accuracy", 3),
    Metric("margin", "held-out margin of log-probabilities, nats", 2),
)
_ANSWERS = (Metric("accuracy", "right answers to held-out questions", 3),)
METRICS = {
    "sft": (Metric("nll", "held-out loss, nats a token", 4),),
    "dpo": _PREFERENCES,
    "kto": _PREFERENCES,
    "grpo": _ANSWERS,
    "grpo_top_p": _ANSWERS,
    "distillation": (Metric("kl", "held-out KL to the teacher, nats a token", 4),),
}
# 97.5% quantiles of Student's distribution, by degrees of freedom.
_STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365}
DOCS, FIGURE = RESULTS.parents[1] / "docs", "evidence.svg"


class Mean(NamedTuple):
    """A mean over seeds, and the half width of its 95% interval; infinite for a single seed."""

    value: float
    half: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Mean:
        if len(values) < 2:
            return cls(values[0], math.inf)
        half = _STUDENT[len(values) - 1] * statistics.stdev(values) / math.sqrt(len(values))
        return cls(statistics.fmean(values), half)

    def shown(self, digits: int, *, sign: bool = False) -> str:
        value = f"{self.value:+.{digits}f}" if sign else f"{self.value:.{digits}f}"
        half = "?" if math.isinf(self.half) else f"{self.half:.{digits}f}"
        return f"{value.replace('-', '−')} ± {half}"


@dataclass(frozen=True)
class Evidence:
    """The runs of a method."""

    method: str
    content: dict[str, Any]
    path: Path

    @property
    def contenders(self) -> list[str]:
        """Return the contenders with a training."""
        return list(dict.fromkeys(row["contender"] for row in self.content["trained"] if "scores" in row))

    def of(self, contender: str) -> dict[int, dict[str, Any]]:
        """Return the trainings of a contender by seed."""
        return {
            row["seed"]: row for row in self.content["trained"] if row["contender"] == contender and "scores" in row
        }

    @property
    def seeds(self) -> list[int]:
        """Return the seeds that all contenders have."""
        return sorted(set.intersection(*(set(self.of(contender)) for contender in self.contenders)))

    def scores(self, contender: str, key: str) -> list[float]:
        rows = self.of(contender)
        return [rows[seed]["scores"][key]["value"] for seed in self.seeds]

    def spread(self, contender: str, key: str) -> float:
        scores = self.scores(contender, key)
        return max(scores) - min(scores)

    def differences(self, contender: str, key: str) -> list[float]:
        """Return a contender's held-out number minus stock's, at each seed."""
        return [a - b for a, b in zip(self.scores(contender, key), self.scores(STOCK, key), strict=True)]

    def is_resolved(self, contender: str, key: str) -> bool | None:
        """Whether a contender's mean difference to stock is beyond the spread of the seeds of either.

        None with fewer than three seeds, which do not tell a spread.
        """
        if len(self.seeds) < 3:
            return None
        mean = abs(statistics.fmean(self.differences(contender, key)))
        return mean > max(self.spread(STOCK, key), self.spread(contender, key))

    def timed(self, contender: str) -> dict[str, Any] | None:
        rows = [row for row in self.content["timed"] if row["contender"] == contender and "ms" in row]
        return rows[0] if rows else None

    def curve(self, contender: str, name: str) -> list[list[float]]:
        """Return a curve of the training log, one list a seed."""
        rows = self.of(contender)
        return [rows[seed]["curves"][name] for seed in self.seeds if rows[seed]["curves"].get(name)]


def load(path: Path) -> Evidence:
    content = json.loads(path.read_text())
    return Evidence(content["method"], content, path)


def kept(folder: Path = RESULTS) -> dict[str, Evidence]:
    """Return the newest kept runs of each method."""
    found: dict[str, Evidence] = {}
    for path in sorted(folder.glob("evidence_*.json")):
        evidence = load(path)
        known = found.get(evidence.method)
        if known is None or known.content["environment"]["date"] <= evidence.content["environment"]["date"]:
            found[evidence.method] = evidence
    return {method: found[method] for method in TITLES if method in found}


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows)]


COLUMNS = {STOCK: "stock", LAYERS: "Liger-Kernel's layers", OURS: "here", ALL_ON: "here, all on"}


def learned(every: Sequence[Evidence]) -> list[str]:
    """Return the table of held-out numbers: a row for each number of a method, a column for each contender."""
    rows = []
    for evidence in every:
        for key, name, digits in METRICS[evidence.method]:
            before = (evidence.content["untrained"] or {}).get(key)
            compared = before and evidence.method not in AGAINST_UNTRAINED
            others = [contender for contender in evidence.contenders if contender != STOCK]
            apart = max((Mean.of(evidence.differences(x, key)) for x in others), key=lambda mean: abs(mean.value))
            spread = max(evidence.spread(x, key) for x in evidence.contenders)
            resolved = {evidence.is_resolved(x, key) for x in others}
            rows.append(
                [
                    f"{TITLES[evidence.method]}: {name}",
                    f"{before['value']:.{digits}f}" if compared else "",
                    *(
                        Mean.of(evidence.scores(x, key)).shown(digits) if x in evidence.contenders else ""
                        for x in COLUMNS
                    ),
                    apart.shown(digits, sign=True),
                    f"{spread:.{digits}f}",
                    "yes" if True in resolved else "too few seeds" if None in resolved else "no",
                ]
            )
    header = [
        "method and number",
        "untrained",
        *COLUMNS.values(),
        "largest difference",
        "spread of seeds",
        "beyond the spread",
    ]
    return _table(header, rows)


def updates(every: Sequence[Evidence]) -> list[str]:
    """Return the tables of times and of memory of updates: a row for each method."""

    def rows(cell: Callable[[dict[str, Any]], str]) -> list[list[str]]:
        of_method = ([evidence.timed(contender) for contender in COLUMNS] for evidence in every)
        return [
            [TITLES[evidence.method], *(cell(row) if row else "" for row in found)]
            for evidence, found in zip(every, of_method, strict=True)
            if any(found)
        ]

    def ms(row: dict[str, Any]) -> str:
        return f"{statistics.median(row['ms']):.0f} ({min(row['ms']):.0f}–{max(row['ms']):.0f})"

    def gib(row: dict[str, Any]) -> str:
        return f"{max(row['mib']) / 1024:.2f}" if row["mib"] else ""

    times = _table(["ms of an update, median (smallest–largest)", *COLUMNS.values()], rows(ms))
    return [*times, "", *_table(["peak GiB", *COLUMNS.values()], rows(gib))]


def markdown(every: Sequence[Evidence]) -> str:
    """Return what the page has between its markers."""
    lines = [f"![Training curves of every method, mean and range over seeds]({FIGURE})", "", *learned(every), ""]
    lines += [*updates(every), ""]
    steps = ", ".join(f"{TITLES[x.method]} {x.content['settings']['steps']}" for x in every)
    seeds = sorted({len(x.seeds) for x in every})
    files = ", ".join(f"`{x.path.name}`" for x in every)
    lines += [f"{' to '.join(map(str, seeds))} seeds. Updates: {steps}. Files: {files}.", ""]
    where = every[0].content["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items())
    lines.append(f"{where['device']}, {versions}, {where['date']}, commit {where['commit'][:12]}{_elsewhere(every)}")
    return "\n".join(lines)


def _elsewhere(every: Sequence[Evidence]) -> str:
    """Return which runs another card or another commit did."""
    parts: dict[tuple[str, str, str], set[int]] = {}
    for evidence in every:
        for kind in ("timed", "trained", "trained_float32"):
            for row in evidence.content[kind]:
                if row.keys() & {"device", "commit"}:
                    where = evidence.content["environment"] | row
                    parts.setdefault((kind, where["device"], where["commit"][:12]), set()).add(row["seed"])
    told = {
        "timed": "times and memory of updates",
        "trained": "some methods' seeds {}",
        "trained_float32": "some methods' seeds {} in float32",
    }
    return "".join(
        f"; {told[kind].format(', '.join(map(str, sorted(seeds))))}: {device}, commit {commit}"
        for (kind, device, commit), seeds in sorted(parts.items())
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the kept runs")
    args = parser.parse_args(arguments)
    every = list(kept(args.results).values())
    if not every:
        parser.error(f"no evidence_*.json in {args.results}")

    import matplotlib

    from benchmarks.drawing.evidence import draw_evidence
    from benchmarks.drawing.style import STYLE

    with matplotlib.rc_context(STYLE):
        draw_evidence(every).savefig(DOCS / FIGURE, metadata={"Date": None})


if __name__ == "__main__":
    main()
