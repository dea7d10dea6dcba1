"""Train a tiny model in a framework on a CPU, with its own head and with ours, and compare the losses.

    python scripts/frameworks verl            # in a new environment, which is deleted afterwards
    python scripts/frameworks verl --keep DIR # in the environment DIR, made if it does not exist

Needs uv. Each script of this folder starts with a header of inline metadata (PEP 723) that lists its environment:
`requires-python`, `dependencies`, and under `[tool.frameworks]` the packages of `no-deps`, installed without their
dependencies because these need a GPU or much disk.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

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
    parser.add_argument(
        "framework", choices=sorted(f.stem for f in FOLDER.glob("*.py") if f.stem not in ("__main__", "common"))
    )
    parser.add_argument("--keep", type=Path, metavar="DIR")
    given = parser.parse_args()
    script = FOLDER / f"{given.framework}.py"
    if given.keep is not None:
        return run(script, given.keep)
    with tempfile.TemporaryDirectory() as folder:
        return run(script, Path(folder) / "environment")


if __name__ == "__main__":
    sys.exit(main())
