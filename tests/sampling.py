"""What runs without `--exhaustive`: the rows of `PATHS`, or a seeded part of a list of names.

SWEEP_SEED chooses the part, by default the version.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable
from typing import Any

import pytest
import table
from table import PATHS, ROWS, Row

import liger_chunked
from liger_chunked.kernels.backend import INTERPRETED

SEED = os.environ.get("SWEEP_SEED", liger_chunked.__version__)


def sampled(names: Iterable[str], parts: int = 2) -> list[Any]:
    """Return one parameter for each name; all but one of `parts` parts are marked `exhaustive`."""
    drawn = {name: zlib.crc32(f"{SEED} {name}".encode()) % parts == 0 for name in names}
    return [pytest.param(name, marks=() if chosen else pytest.mark.exhaustive) for name, chosen in drawn.items()]


def on_paths(rows: Iterable[Row] = ROWS, *, interpreted: bool = False) -> list[Any]:
    """Return one parameter for each row; rows that are not in `PATHS` are marked `exhaustive`.

    With `interpreted=True` they are so only in Triton's interpreter.
    """
    return [exhaustive([row], row.id, row.id not in PATHS and (INTERPRETED or not interpreted)) for row in rows]


def rows_of_ranks(every: bool) -> list[Row]:
    """Return the rows that ranks run one after another: all, or those of `PATHS`."""
    return ROWS if every else table.rows(*PATHS)


# For a test that takes seconds in Triton's interpreter, beside others of the same kernels: with `--exhaustive` only.
slow_interpreted = pytest.mark.exhaustive if INTERPRETED else lambda test: test


def exhaustive(values: Iterable[Any], id: str, marked: bool = True) -> Any:
    """Return a parameter of these values; if `marked`, it runs with `--exhaustive` only."""
    return pytest.param(*values, id=id, marks=pytest.mark.exhaustive if marked else ())
