"""Tables of `benchmarks.long_context` in `docs/benchmarks.md`, from the committed results.

python -m benchmarks.long_tables        writes them into the page, between two marks

A cell of a longest sequence is the newest of its row and contender on a device; TRL's own trainers count with the
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

PAGE = RESULTS.parents[1] / "docs" / "benchmarks.md"
BEGIN, END = "<!-- long contexts: python -m benchmarks.long_tables -->\n", "<!-- end of long contexts -->\n"
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
            ("Tokens of each sequence, and the peak of the step", lengths, _length),
            ("Milliseconds of a step, and its peak", steps, _step),
        )
        for title, of_kind, cell in kinds:
            chosen = {task: rows for (d, task), rows in of_kind.items() if d == device}
            if not chosen:
                continue
            lines = [f"| {' | '.join(['step', *COLUMNS])} |", f"|{'---|' * (1 + len(COLUMNS))}"]
            for task in sorted(chosen, key=lambda task: (facts[task]["trainer"], facts[task]["sequences"])):
                rows = chosen[task]
                cells = [cell(rows[name]) if name in rows else "" for name in COLUMNS.values()]
                lines.append(f"| {_name(facts[task], task.endswith(LONGEST))} | {' | '.join(cells)} |")
                sources[device] |= {rows[name]["file"]: None for name in COLUMNS.values() if name in rows}
            parts.append(f"{title}, on one {device}:\n\n" + "\n".join(lines) + "\n")
        parts.append(f"Files: {', '.join(f'`{name}`' for name in sorted(sources[device]))}.\n")
    return "\n".join(parts)


def _name(fact: Row, is_search: bool) -> str:
    sequences = f"{fact['sequences']} sequences" if is_search else f"{fact['sequences']} × {fact['length']}"
    trainer = fact["trainer"].replace("-shared", " with a shared prompt")
    return f"{trainer}, {fact['model'].title()}, {sequences}"


def _length(row: Row) -> str:
    least = "" if row["too_long"] is not None else "≥ "
    return f"{least}{row['length']} · {row['mib'] / 1024:.1f} GiB"


def _step(row: Row) -> str:
    if row["failure"] is not None:
        return str(row["failure"])
    return f"{row['ms']:.0f} · {row['peak_mib'] / 1024:.1f} GiB"


def main() -> None:
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + "\n" + tables() + "\n" + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()
