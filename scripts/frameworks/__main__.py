"""Train a tiny model in a framework on a CPU, with its own head and with ours, and compare the losses.

    python scripts/frameworks verl            # in a new environment, which is deleted afterwards
    python scripts/frameworks verl --keep DIR # in the environment DIR, made if it does not exist

Needs uv, and Python 3.11 or newer. `train_NAME.py` trains in the framework NAME. A file NAME.py would hide the
framework's package, because Python looks for modules in the folder of the script first. Each starts with a header
of inline metadata (PEP 723) that lists its environment: `requires-python`, `dependencies`, and under
`[tool.frameworks]` the packages of `no-deps`, installed without their dependencies because these need a GPU or much
disk.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import tomllib

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]


def metadata(script: Path) -> dict[str, Any]:
    """Return the inline metadata of a script."""
    header = re.search(r"(?m)^# /// script\n((?:#.*\n)+?)# ///$", script.read_text())
    if header is None:
        raise ValueError(f"{script} must have a header '# /// script', see PEP 723")
    return tomllib.loads(re.sub(r"(?m)^# ?", "", header[1]))


def make(environment: Path, wanted: dict[str, Any]) -> None:
    """Make a virtual environment. `liger_chunked` is not installed: it is on the path of the run."""
    subprocess.run(["uv", "venv", "-q", "--python", wanted["requires-python"], environment], check=True)
    install = ["uv", "pip", "install", "-q", "--python", environment / "bin/python"]
    subprocess.run([*install, *wanted["dependencies"]], check=True)
    without = wanted.get("tool", {}).get("frameworks", {}).get("no-deps", [])
    if without:
        subprocess.run([*install, "--no-deps", *without], check=True)


def run(script: Path, environment: Path) -> int:
    """Return the exit code of a script."""
    if not (environment / "bin/python").exists():
        make(environment, metadata(script))
    variables = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run([environment / "bin/python", script], env=variables).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    scripts = {f.stem.removeprefix("train_"): f for f in sorted(FOLDER.glob("train_*.py"))}
    parser.add_argument("framework", choices=scripts)
    parser.add_argument("--keep", type=Path, metavar="DIR")
    given = parser.parse_args()
    script = scripts[given.framework]
    if given.keep is not None:
        return run(script, given.keep)
    with tempfile.TemporaryDirectory() as folder:
        return run(script, Path(folder) / "environment")


if __name__ == "__main__":
    sys.exit(main())
