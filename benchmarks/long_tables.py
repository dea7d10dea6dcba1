"""Tables of `benchmarks.long_context` in `docs/benchmarks.md`, from the committed results.

A number of a longest sequence is the newest of its row and contender on a device; TRL's own trainers count with the
newest TRL that ran the row. The times of a row of steps are compared with each other, so all cells of it are of the
newest file that has this row.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.harness import OURS, RESULTS
from benchmarks.report import by_age

COLUMNS = {
    "stock": "stock",
    "Liger-Kernel": "Liger-Kernel",
    "whole": f"{OURS} whole",
    "tiled": f"{OURS} tiled",
    "host": f"{OURS} host",
}
LONGEST = ", longest"  # ends the names of tasks that search a length

Row = dict[str, Any]


def tables(folder: Path = RESULTS) -> str:
    lengths: dict[tuple[str, str], dict[str, Row]] = defaultdict(dict)  # by device and task, then contender
    steps: dict[tuple[str, str], dict[str, Row]] = {}
    facts: dict[str, Row] = {}
    trl: dict[tuple[str, str], str] = {}
    sources: dict[str, dict[str, None]] = defaultdict(dict)  # of each device, as an ordered set
    for path in by_age(folder, "long_context"):
        content = json.loads(path.read_text())
        about = content["environment"]
        if about["device_type"] != "cuda":
            continue
        facts |= content["tasks"]
        of_file: dict[str, dict[str, Row]] = defaultdict(dict)
        for row in content["rows"]:
            of_file[row["task"]][row["name"]] = {**row, "file": path.name}
        for task, rows in of_file.items():
            key = (about["device"], task)
            if task.endswith(LONGEST):
                if facts[task]["trainer"] != "SFT" and trl.get(key) != about["versions"]["trl"]:
                    lengths[key] = {name: row for name, row in lengths[key].items() if name.startswith(OURS)}
                trl[key] = about["versions"]["trl"]
                lengths[key] |= {name: row for name, row in rows.items() if row["failure"] is None and row["length"]}
            else:
                steps[key] = rows
    parts = []
    for device in sorted({device for device, _ in (*lengths, *steps)}):
        kinds = (
            ("Longest sequences", "tokens of each sequence", lengths, _length),
            ("Steps", "milliseconds", steps, _step),
        )
        for title, what, of_kind, cell in kinds:
            chosen = {task: rows for (d, task), rows in of_kind.items() if d == device}
            if not chosen:
                continue
            lines = [f"| step | contender | {what} | peak GiB |", "|---|---|---|---|"]
            for task in sorted(chosen, key=lambda task: (facts[task]["trainer"], facts[task]["sequences"])):
                label = _name(facts[task], task.endswith(LONGEST))
                for column, name in COLUMNS.items():
                    if row := chosen[task].get(name):
                        lines.append(f"| {label} | {column} | {' | '.join(cell(row))} |")
                        sources[device][row["file"]] = None
                        label = ""
            parts.append(f"{title} on one {device}:\n\n" + "\n".join(lines) + "\n")
        parts.append(f"Files: {', '.join(f'`{name}`' for name in sorted(sources[device]))}.\n")
    return "\n".join(parts).strip()


def _name(fact: Row, is_search: bool) -> str:
    sequences = f"{fact['sequences']} sequences" if is_search else f"{fact['sequences']} × {fact['length']}"
    trainer = fact["trainer"].replace("-shared", " with a shared prompt")
    return f"{trainer}, {fact['model'].title()}, {sequences}"


def _length(row: Row) -> tuple[str, str]:
    least = "" if row["too_long"] is not None else "≥ "
    return f"{least}{row['length']}", f"{row['mib'] / 1024:.1f}"


def _step(row: Row) -> tuple[str, str]:
    if row["failure"] is not None:
        return str(row["failure"]), ""
    return f"{row['ms']:.0f}", f"{row['peak_mib'] / 1024:.1f}"
