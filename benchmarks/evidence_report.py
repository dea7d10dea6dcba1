"""Write the tables and the figure of docs/evidence.md from the kept runs of `benchmarks.evidence`.

python -m benchmarks.evidence_report --docs docs/evidence.md

Intervals of means over seeds are Student's, 95%. A difference is paired by seed, because contenders see the same data
in the same order. It is *resolved* if its mean is beyond the spread of the seeds, the largest minus the smallest.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Sequence
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
BEGIN, END = "<!-- evidence: begin -->", "<!-- evidence: end -->"
FIGURE = "evidence.svg"


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
    def in_float32(self) -> Evidence | None:
        """Return the runs without bfloat16; None if there are none."""
        rows = self.content.get("trained_float32")
        return Evidence(self.method, {**self.content, "trained": rows}, self.path) if rows else None

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


def learned(evidence: Evidence, metric: Metric) -> list[str]:
    """Return the table of a held-out number."""
    key, name, digits = metric
    rows = []
    untrained = (evidence.content["untrained"] or {}).get(key)
    if untrained and evidence.method not in AGAINST_UNTRAINED:
        rows.append(["untrained", f"{untrained['value']:.{digits}f}", "", "", ""])
    for contender in evidence.contenders:
        scores = evidence.scores(contender, key)
        row = [contender, Mean.of(scores).shown(digits), f"{evidence.spread(contender, key):.{digits}f}", "", ""]
        if contender != STOCK:
            differences = evidence.differences(contender, key)
            row[3] = Mean.of(differences).shown(digits, sign=True)
            row[4] = {True: "yes", False: "no", None: "too few seeds"}[evidence.is_resolved(contender, key)]
        rows.append(row)
    return _table(["", name, "spread of seeds", "minus stock", "beyond the spread"], rows)


def updates(every: Sequence[Evidence]) -> list[str]:
    """Return the table of times and memory of updates, of all methods."""
    rows = []
    for evidence in every:
        stock = evidence.timed(STOCK)
        for contender in dict.fromkeys(row["contender"] for row in evidence.content["timed"]):
            row = evidence.timed(contender)
            if row is None:
                continue
            ms = statistics.median(row["ms"])
            cells = [TITLES[evidence.method], contender, f"{ms:.0f} ({min(row['ms']):.0f}–{max(row['ms']):.0f})"]
            cells.append(f"{statistics.median(stock['ms']) / ms:.2f}" if stock else "")
            if row["mib"]:
                mib = max(row["mib"])
                cells += [f"{mib / 1024:.2f}", f"{mib / max(stock['mib']):.2f}" if stock else ""]
            else:
                cells += ["", ""]
            rows.append(cells)
    header = ["update", "", "ms, median (smallest–largest)", "speed over stock", "peak GiB", "memory over stock"]
    return _table(header, rows)


def markdown(every: Sequence[Evidence]) -> str:
    """Return what the page has between its markers."""
    lines = [f"![Training curves of every method, mean and range over seeds]({FIGURE})", ""]
    for evidence in every:
        lines += [f"### {TITLES[evidence.method]}", ""]
        for metric in METRICS[evidence.method]:
            lines += [*learned(evidence, metric), ""]
        exact = evidence.in_float32
        if exact is not None:
            lines += ["In float32, without autocast:", ""]
            for metric in METRICS[evidence.method]:
                lines += [*learned(exact, metric), ""]
        n = next(iter(evidence.of(STOCK).values()))["scores"][METRICS[evidence.method][0].key]["n"]
        seeds, steps = len(evidence.seeds), evidence.content["settings"]["steps"]
        lines += [f"{seeds} seeds, {steps} updates, {n:,} held-out values. `{evidence.path.name}`", ""]
    lines += ["### Time and memory of an update", "", *updates(every), ""]
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


def write_page(page: Path, every: Sequence[Evidence]) -> None:
    """Write tables and figure.

    Raises:
        ValueError: the page has no markers.
    """
    head, begin, rest = page.read_text().partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page}: expected the markers {BEGIN} and {END}")
    page.write_text(f"{head}{BEGIN}\n{markdown(every)}\n{END}{tail}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--docs", type=Path, required=True, help="the page")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the kept runs")
    args = parser.parse_args(arguments)
    every = list(kept(args.results).values())
    if not every:
        parser.error(f"no evidence_*.json in {args.results}")
    write_page(args.docs, every)

    import matplotlib

    from benchmarks.drawing.evidence import draw_evidence
    from benchmarks.drawing.style import STYLE

    with matplotlib.rc_context(STYLE):
        draw_evidence(every).savefig(args.docs.parent / FIGURE, metadata={"Date": None})


if __name__ == "__main__":
    main()
