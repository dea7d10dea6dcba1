"""Run the test suite with several versions of torch, Triton, transformers and TRL, and write the table of the docs.

    python scripts/versions.py                       all rows, before a release: hours, and 40 GB of disk
    python scripts/versions.py newest --keep DIR     one row, in environments that stay in DIR
    python scripts/versions.py --here torch-2.11     one row, with the packages of this Python
    python scripts/versions.py --table               docs/contributing.md's table, from benchmarks/results/versions/

Needs uv, which shares packages among environments and brings Pythons along. A row's result is a file in
benchmarks/results/versions, with its command, commit, and what failed. `--parts` runs some parts of the suite; the
table then names these. Everything after `--` goes to pytest.

Torch of PyPI is a CUDA build on Linux. It runs on a CPU too, and that is what the tests use.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "versions"


@dataclass(frozen=True)
class Row:
    """An environment: versions of Python and of packages. Triton's is the one that torch brings, unless given."""

    name: str
    python: str
    torch: str
    transformers: str
    trl: str
    triton: str | None = None

    def packages(self) -> list[str]:
        wanted = {"torch": self.torch, "triton": self.triton, "transformers": self.transformers, "trl": self.trl}
        return [f"{name}=={version}" for name, version in wanted.items() if version is not None]


ROWS = (
    Row("oldest", "3.11", "2.9.1", "5.5.4", "1.15.0"),
    Row("torch-2.10", "3.11", "2.10.0", "5.8.1", "1.16.0"),
    Row("torch-2.11", "3.12", "2.11.0", "5.12.1", "1.16.0"),
    Row("torch-2.12", "3.12", "2.12.1", "5.17.0", "1.16.0"),
    Row("gate", "3.11", "2.13.0", "5.23.0", "1.16.0", triton="3.9.0"),
    Row("torch-2.14", "3.13", "2.14.1", "5.24.0", "1.16.0"),
    Row("newest", "3.14", "2.15.0", "5.24.0", "1.16.0"),
)
OTHERS = (
    *("accelerate", "peft", "datasets", "gguf", "typer", "rich"),
    *("pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "matplotlib", "tqdm", "pyyaml", "setuptools"),
    "numpy<2.4",  # Triton 3.6 and earlier: the interpreter reads arrays of one element as numbers
)
# What to run, by name: environment variables, and arguments of pytest.
PARTS: dict[str, tuple[dict[str, str], list[str]]] = {
    "suite": ({}, ["--slow", "-m", "not gpu"]),
    "interpreter": ({"TRITON_INTERPRET": "1"}, ["--slow", "-m", "triton and not gpu", "tests"]),
}
SHOWN = ("torch", "triton", "transformers", "trl", "peft", "accelerate")


def make(row: Row, environment: Path) -> None:
    """Make a virtual environment. The package is not installed: the tests find it in the working directory."""
    subprocess.run(["uv", "venv", "-q", "--python", row.python, environment], check=True)
    # Compiled once: where Python may not write bytecode, every process of the tests would compile torch and TRL again.
    install = ["uv", "pip", "install", "-q", "--compile-bytecode", "--python", environment / "bin/python"]
    subprocess.run([*install, *row.packages(), *OTHERS], check=True)


def versions(python: Path) -> dict[str, str]:
    code = f"import importlib.metadata as m, json; print(json.dumps({{n: m.version(n) for n in {SHOWN}}}))"
    out = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout
    version = subprocess.run([python, "-V"], check=True, capture_output=True, text=True).stdout
    return {"python": version.split()[1], **json.loads(out)}


def outcome(output: str) -> dict[str, object]:
    """Return the counts of pytest's last line, and the tests that failed."""
    counts = {kind: int(n) for n, kind in re.findall(r"(\d+) (passed|failed|skipped|xfailed|errors?)", output[-2000:])}
    return {"counts": counts, "failed": re.findall(r"^(?:FAILED|ERROR) (\S+)", output, re.M)}


def run(part: str, python: Path, more: list[str]) -> dict[str, object]:
    variables, arguments = PARTS[part]
    pytest = ["-m", "pytest", "-q", "-n", "auto", "--dist", "worksteal", "--tb=short", "-p", "no:cacheprovider"]
    command = [*pytest, *arguments, *more]
    started = time.monotonic()
    done = subprocess.run(
        [python, *command],
        cwd=ROOT,
        env=os.environ | variables | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    found = outcome(done.stdout)
    if done.returncode:  # also where tests failed, because a failure may not come again
        print(done.stdout[-20000:], done.stderr[-3000:], sep="\n", file=sys.stderr)
    return {
        "command": " ".join([*(f"{name}={value}" for name, value in variables.items()), "python", *command]),
        "seconds": round(time.monotonic() - started),
        "exit_status": done.returncode,
        **found,
    }


def commit() -> str:
    """Return the commit, and whether other files than results differ from it."""
    git = ["git", "-C", str(ROOT)]
    found = subprocess.run([*git, "rev-parse", "--short=7", "HEAD"], check=True, capture_output=True, text=True)
    changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", ".", ":!benchmarks/results"], check=False)
    return found.stdout.strip() + ("-dirty" if changed.returncode else "")


def measure(row: Row, parts: list[str], python: Path, more: list[str]) -> dict[str, object]:
    result = {
        "row": asdict(row),
        "versions": versions(python),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, no GPU",
        "date": date.today().isoformat(),
        "commit": commit(),
        "parts": {part: run(part, python, more) for part in parts},
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{row.name}.json").write_text(json.dumps(result, indent=1) + "\n")
    return result


def cell(part: dict[str, object] | None) -> str:
    if part is None:
        return "not run"
    counts = part["counts"]
    assert isinstance(counts, dict)
    return ", ".join(f"{n:,} {kind}" for kind, n in counts.items()) or f"exit status {part['exit_status']}"


def table() -> str:
    """Return a row for each result, oldest torch first."""
    lines = ["| Python | torch | Triton | transformers | TRL | suite | interpreter | commit |", "|---|" + "---|" * 7]
    for row in ROWS:
        path = RESULTS / f"{row.name}.json"
        if not path.exists():
            lines.append(f"| {row.python} | {row.torch} | | {row.transformers} | {row.trl} | not run | not run | |")
            continue
        found = json.loads(path.read_text())
        of = found["versions"]
        cells = [of[name] for name in ("python", "torch", "triton", "transformers", "trl")]
        cells += [cell(found["parts"].get(part)) for part in PARTS]
        lines.append("| " + " | ".join([*cells, f"{found['commit']}, {found['date']}"]) + " |")
    return "\n".join(lines)


def main() -> int:
    by_name = {row.name: row for row in ROWS}
    own, _, more = " ".join(sys.argv[1:]).partition(" -- ")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"among {', '.join(by_name)}; all by default")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS])
    parser.add_argument("--keep", type=Path, metavar="DIR", help="folder of the environments, which stay there")
    parser.add_argument("--here", action="store_true", help="run in the environment of this Python")
    parser.add_argument("--table", action="store_true", help="print the table and run nothing")
    given = parser.parse_args(own.split())
    if unknown := [name for name in given.rows if name not in by_name]:
        parser.error(f"unknown rows {', '.join(unknown)}: expected some of {', '.join(by_name)}")
    if given.table:
        print(table())
        return 0
    failed = False
    for row in [by_name[name] for name in given.rows] or ROWS:
        with tempfile.TemporaryDirectory() as folder:
            environment = (given.keep or Path(folder)).resolve() / row.name
            python = Path(sys.executable) if given.here else environment / "bin/python"
            if not python.exists():
                make(row, environment)
            result = measure(row, given.parts, python, more.split())
        parts = result["parts"]
        assert isinstance(parts, dict)
        failed |= any(part["exit_status"] != 0 for part in parts.values())
        print(row.name, {name: cell(part) for name, part in parts.items()}, flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
