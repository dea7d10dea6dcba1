"""The oldest release of each package that this library runs with, and an error that names the one found."""

from __future__ import annotations

import re
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

NEWEST_COMPARED = "5.23"  # of transformers, whose layers the tests compare with the kernels
OLDEST = {"torch": "2.9", "transformers": "5.5", "trl": "1.15"}  # pyproject.toml says the same to pip


def release(version: str) -> tuple[int, ...]:
    """Return the numbers of a version without its trailing zeros.

    A development build counts as the release that it leads to, although it is older: it has most of what the release
    has, and who installs one of the oldest release chose to. Pip reads 2.9.0.dev0 < 2.9.

    >>> release("2.9.0.dev20250901+cu128"), release("2.9")
    ((2, 9), (2, 9))
    """
    numbers = re.match(r"\d+(\.\d+)*", version)
    assert numbers is not None, f"{version!r} is no version"
    return tuple(map(int, re.sub(r"(\.0+)+$", "", numbers[0]).split(".")))


def installed(package: str) -> str | None:
    """Return the version of a package that can be imported, or None. Imports it only if it is no distribution."""
    if find_spec(package) is None:  # also where a test or a tool blocks the import
        return None
    try:
        return version(package)
    except PackageNotFoundError:  # a source tree on the path, or a folder that has a package's name
        found: str | None = getattr(import_module(package), "__version__", None)
        return found


def suffices(package: str) -> bool:
    """Whether a package is installed, and its release is not older than `OLDEST`."""
    found = installed(package)
    return found is not None and release(found) >= release(OLDEST[package])


def require(who: str, *packages: str) -> None:
    """Raise an ImportError for the first of `packages` that is missing or too old for the module `who`."""
    for package in packages:
        if not suffices(package):
            oldest = OLDEST[package]
            raise ImportError(
                f"{who} needs {package} >= {oldest}, found {installed(package) or 'none'}: "
                f"pip install '{package}>={oldest}'"
            )
