"""Importing this makes the modules of all folders of tests importable by their names."""

from __future__ import annotations

import sys
from importlib.machinery import SOURCE_SUFFIXES, FileFinder, ModuleSpec, SourceFileLoader
from pathlib import Path

TESTS = Path(__file__).resolve().parent


class Files(FileFinder):
    """Finds the modules of a folder, and no packages."""

    def find_spec(self, fullname: str, target: object = None) -> ModuleSpec | None:
        spec = super().find_spec(fullname, target)
        return spec if spec is not None and spec.loader is not None else None


# Python takes any folder for a package. Where TRL is not installed, `import trl` would find `tests/trl`.
sys.path_importer_cache[str(TESTS)] = Files(str(TESTS), (SourceFileLoader, SOURCE_SUFFIXES))
for folder in (TESTS, *sorted(TESTS.iterdir())):
    if any(folder.glob("test_*.py")) and str(folder) not in sys.path:
        sys.path.append(str(folder))
