"""Read the kept runs for the figures and the tables."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness import BASELINE, OURS, OURS_SHARED, STOCK

FAMILIES = {
    "cross_entropy": "Cross entropy",
    "preference": "Preference",
    "distillation": "Distillation",
    "policy": "Policy",
}
STEPS = {"sft": "SFT steps of Hugging Face models", "trainers": "Steps of TRL's trainers"}
SHARED_STEPS = {"trainers_shared": "Steps of TRL's trainers with shared prompts"}


@dataclass(frozen=True)
class Run:
    """One result file: `cells` has the rows by task and contender, `again` the later run of each repeated task."""

    path: Path
    environment: dict[str, Any]
    tasks: dict[str, dict[str, Any]]
    cells: dict[str, dict[str, dict[str, Any]]]
    again: dict[str, Run] = field(default_factory=dict)

    @property
    def title(self) -> str:
        env = self.environment
        versions = ", ".join(
            f"{name} {env['versions'][name]}" for name in ("torch", "triton") if name in env["versions"]
        )
        return f"{env['device']}, {env['dtype']}, {versions}, {env['date']}"

    @property
    def source(self) -> str:
        """Return the title and the commit, and those of later runs that repeated a task."""
        later: dict[str, list[str]] = {}
        for task, run in self.again.items():
            later.setdefault(f"{run.environment['date']}, commit {run.commit}", []).append(spaced(task))
        return "; ".join(
            [f"{self.title}, commit {self.commit}", *(f"{', '.join(tasks)}: {when}" for when, tasks in later.items())]
        )

    @property
    def files(self) -> set[Path]:
        """Return the run's file, and those of later runs that repeated a task."""
        return {self.path, *(run.path for run in self.again.values())}

    @property
    def commit(self) -> str:
        """Return the first digits of the commit, and whether the tree was clean."""
        digits, *dirty = self.environment["commit"].split("-")
        return "-".join([digits[:12] or "unknown", *dirty])

    def measured(self, task: str) -> dict[str, dict[str, Any]]:
        return {name: row for name, row in self.cells[task].items() if row["failure"] is None}


def load(path: Path) -> Run:
    content = json.loads(path.read_text())
    cells: dict[str, dict[str, dict[str, Any]]] = {task: {} for task in content["tasks"]}
    for row in content["rows"]:
        cells[row["task"]][row["name"]] = row
    return Run(path, content["environment"], content["tasks"], cells)


def by_age(folder: Path, family: str) -> list[Path]:
    """Return a family's files by age, GPU runs last."""

    def age(path: Path) -> tuple[bool, str]:
        about = json.loads(path.read_text())["environment"]
        return about["device_type"] == "cuda", about["saved"]

    return sorted(folder.glob(f"{family}-*.json"), key=age)


def newest_file(folder: Path, family: str) -> Path | None:
    """Return the file of a family's last whole run, on a GPU if there is one."""
    whole = [path for path in by_age(folder, family) if json.loads(path.read_text())["whole"]]
    return whole[-1] if whole else None


def newest(folder: Path, family: str) -> Run | None:
    """Return the run in `newest_file`, with the tasks that later runs on such a device repeated with all contenders.

    A task that no contender could run is left out.
    """
    path = newest_file(folder, family)
    if path is None:
        return None
    run, files = load(path), by_age(folder, family)
    for later in map(load, files[files.index(path) + 1 :]):
        if later.environment["device"] != run.environment["device"]:
            continue
        for task, rows in later.cells.items():
            if task in run.cells and later.measured(task).keys() >= run.measured(task).keys():
                run.tasks[task], run.cells[task], run.again[task] = later.tasks[task], rows, later
    for task in [task for task in run.cells if not run.measured(task)]:
        del run.tasks[task], run.cells[task]
    return run


def over_eager(row: dict[str, Any], rows: dict[str, dict[str, Any]]) -> float | None:
    """Return the worse gradient's error over eager code's, or over compiled eager code's if eager does not fit."""
    eager = next(
        (rows[name]["errors"] for name in (BASELINE, "torch.compile") if rows.get(name, {}).get("errors")), None
    )
    if not eager or not row["errors"]:
        return None
    return max(value / eager[name] for name, value in row["errors"].items())


def name_and_shape(task: str) -> tuple[str, str]:
    """
    >>> name_and_shape("JSD 64x(32, 48)x1024")
    ('JSD', '64 × (32, 48) × 1024')
    """
    name, shape = re.split(r" (?=\d+x)", task, maxsplit=1)
    return name, spaced(shape)


def spaced(task: str) -> str:
    """Return a task with spaces around its signs.

    >>> spaced("DPO llama-3.2-1b 8x2048")
    'DPO llama-3.2-1b 8 × 2048'
    """
    return re.sub(r"(?<=[\d)])x(?=[\d(])", " × ", task)


_COLUMNS = {
    OURS: "liger_chunked",
    "eager": "eager",
    "torch.compile": "torch.compile",
    "liger-kernel": "Liger-Kernel",
    "liger-kernel, C=16, fp32 accumulation": "Liger-Kernel, 16 chunks",
    "liger-kernel, CuTe": "Liger-Kernel, CuTe",
    "torch F.linear_cross_entropy": "torch's own",
    "trl": "TRL",
    "cut-cross-entropy, exact": "CCE, exact",
    "quack": "QuACK",
}


def markdown(runs: dict[str, Run]) -> str:
    """Return tables of times and of memory, with a column per contender, and one of further settings of ours."""
    measured = {name for run in runs.values() for task in run.cells for name in run.measured(task)}
    columns = {name: title for name, title in _COLUMNS.items() if name in measured}
    times = _losses(runs, columns, "time over the floor", lambda row: f"{row['times_floor']:.2f}", errors=True)
    memory = _losses(runs, columns, "peak MiB", _mib)
    families: dict[str, list[str]] = {}
    for family, run in runs.items():
        families.setdefault(run.source, []).append(FAMILIES[family])
    where = [f"- {', '.join(names)}: {source}" for source, names in families.items()]
    return "\n".join([*times, "", *memory, "", *_settings(runs), *where, *_absent(runs)])


def _losses(
    runs: dict[str, Run],
    columns: dict[str, str],
    what: str,
    write: Callable[[dict[str, Any]], str],
    errors: bool = False,
) -> list[str]:
    lines = [f"| {what} | {' | '.join([*columns.values(), *(['error'] if errors else [])])} |"]
    lines.append("|---|" + "---|" * (len(columns) + errors))
    for run in runs.values():
        for task, rows in run.cells.items():
            cells = [_cell(rows.get(column), write) for column in columns]
            cells += [_error(rows.get(OURS), rows)] if errors else []
            lines.append(f"| {', '.join(name_and_shape(task))} | {' | '.join(cells)} |")
    return lines


def _mib(row: dict[str, Any]) -> str:
    return "" if row["mib"] is None else f"{row['mib']:.0f}"


def _settings(runs: dict[str, Run]) -> list[str]:
    """Return a table of ours with further settings: a row per task that has any, time and memory in one cell."""
    tasks = {task: rows for run in runs.values() for task, rows in run.cells.items()}
    settings = dict.fromkeys(n for rows in tasks.values() for n in rows if n.startswith(OURS) and n != OURS)
    if not settings:
        return []
    titles = [name.removeprefix(OURS).lstrip("., ") for name in settings]
    lines = [f"| {OURS}: time over the floor (peak MiB) | {' | '.join(titles)} | largest error |"]
    lines.append("|---|" + "---|" * (len(titles) + 1))
    for task, rows in tasks.items():
        measured = [rows[name] for name in settings if name in rows]
        if not measured:
            continue
        cells = [_cell(rows.get(name), lambda row: f"{row['times_floor']:.2f} ({_mib(row)})") for name in settings]
        errors = [ratio for row in measured if (ratio := over_eager(row, rows)) is not None]
        largest = f"{max(errors):.2f}" if errors else ""
        lines.append(f"| {', '.join(name_and_shape(task))} | {' | '.join(cells)} | {largest} |")
    return [*lines, ""]


def _absent(runs: dict[str, Run]) -> list[str]:
    """Return who was not measured where, and why."""
    tasks: dict[tuple[str, str], list[str]] = {}
    for run in runs.values():
        for task, rows in run.cells.items():
            for name, row in rows.items():
                if row["failure"]:
                    tasks.setdefault((name, row["failure"]), []).append(task)
    everywhere = {name: sum(name in rows for run in runs.values() for rows in run.cells.values()) for name, _ in tasks}
    notes = []
    for (name, failure), where in tasks.items():
        some = "" if len(where) == everywhere[name] else f" ({'; '.join(', '.join(name_and_shape(t)) for t in where)})"
        reason, _, _ = failure.partition(". ")  # more sentences say what to install
        notes.append(f"- {name} {reason}{some}")
    return ["", "Not measured:", "", *notes] if notes else []


def _cell(row: dict[str, Any] | None, write: Callable[[dict[str, Any]], str]) -> str:
    if row is None:
        return ""
    return "–" if row["failure"] else write(row)


def _error(row: dict[str, Any] | None, rows: dict[str, dict[str, Any]]) -> str:
    ratio = None if row is None or row["failure"] else over_eager(row, rows)
    return "" if ratio is None else f"{ratio:.2f}"


_KERNEL_COLUMNS = {
    OURS: "liger_chunked",
    "eager": "eager",
    "torch.compile(eager)": "torch.compile",
    "F.": "torch's own",
    "liger-kernel": "Liger-Kernel",
}


def kernels_markdown(run: Run) -> str:
    """Return a table with a row per task and a column per measured contender: time over that of a copy."""
    found = {
        task: {"F." if name.startswith("F.") else name: row for name, row in rows.items()}
        for task, rows in run.cells.items()
    }
    measured = {name for rows in found.values() for name, row in rows.items() if row["failure"] is None}
    columns = {name: title for name, title in _KERNEL_COLUMNS.items() if name in measured}
    lines = [f"| task | copy, µs | {' | '.join(columns.values())} |", "|---|" + "---|" * (len(columns) + 1)]
    for task, rows in found.items():
        copy = run.tasks[task]["floor_ms"] * 1e3
        cells = [_kernel_cell(rows.get(name)) for name in columns]
        lines.append(f"| {spaced(task)} | {copy:.0f} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", run.source])


_STEP_COLUMNS = {
    STOCK: "stock",
    OURS: "liger_chunked",
    OURS_SHARED: "liger_chunked, shared prompts",
    "liger-kernel": "Liger-Kernel",
    "liger-kernel layers": "stock, Liger-Kernel's layers",
}


def contenders(run: Run) -> list[str]:
    """Return the contenders of whole steps in a run, in the order of the columns."""
    return [name for name in _STEP_COLUMNS if any(name in rows for rows in run.cells.values())]


def steps_markdown(run: Run) -> str:
    """Return a table of speeds, one of peaks, and where they are from."""
    names = [name for name in contenders(run) if name != OURS_SHARED]
    shares = OURS_SHARED in contenders(run)
    others = [name for name in names if name != OURS or shares]
    over = [f"× {_STEP_COLUMNS[name]}" for name in others]
    speed = [[*(_STEP_COLUMNS[name] for name in names), *over, "loss, gradient apart"]]
    memory = [[_STEP_COLUMNS[name] for name in names]]
    labels = []
    for task, rows in run.cells.items():
        measured = run.measured(task)
        for ours in (name for name in rows if name.startswith(OURS)):
            setting = ours.removeprefix(OURS).lstrip(", ")
            labels.append(f"… `{setting}`" if setting else spaced(task))
            # The other contenders stand in the row above a setting of ours.
            of_row = names if not setting else [OURS]
            shown = [rows.get(ours if name == OURS else name) if name in of_row else None for name in names]
            ratios = ["" if name == ours else _over(measured.get(ours), measured.get(name)) for name in others]
            apart = _apart(measured.get(ours), measured.get(STOCK))
            speed.append([*(_step_cell(row, _tokens) for row in shown), *ratios, apart])
            memory.append([_step_cell(row, _peak) for row in shown])
    tables = []
    for what, (header, *body) in (("tokens a second", speed), ("peak GiB (a step adds)", memory)):
        tables += [f"| {what} | {' | '.join(header)} |", "|---|" + "---|" * len(header)]
        tables += [f"| {label} | {' | '.join(cells)} |" for label, cells in zip(labels, body, strict=True)]
        tables.append("")
    return "\n".join([*tables, run.source])


def _tokens(row: dict[str, Any]) -> str:
    return f"{row['tokens_per_s']:.0f}"


def _peak(row: dict[str, Any]) -> str:
    return "" if row["mib"] is None else f"{peak_gib(row):.1f} ({row['mib'] / 1024:.1f})"


def _absent_cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    return "out of memory" if row["failure"] == "out of memory" else "–"


def _kernel_cell(row: dict[str, Any] | None) -> str:
    return _absent_cell(row) if row is None or row["failure"] else f"{row['times_floor']:.2f}"


def _step_cell(row: dict[str, Any] | None, write: Callable[[dict[str, Any]], str]) -> str:
    return _absent_cell(row) if row is None or row["failure"] else write(row)


def peak_gib(row: dict[str, Any]) -> float:
    return (row["mib"] + row["resident_mib"]) / 1024


def _over(ours: dict[str, Any] | None, other: dict[str, Any] | None) -> str:
    return "" if ours is None or other is None else f"{ours['tokens_per_s'] / other['tokens_per_s']:.2f}"


def _apart(row: dict[str, Any] | None, stock: dict[str, Any] | None) -> str:
    """Return the relative differences of the first losses and of their gradient norms."""
    if row is None or stock is None:
        return ""
    return ", ".join(f"{abs(row[key] - stock[key]) / abs(stock[key]):.0e}" for key in ("loss", "grad_norm"))
