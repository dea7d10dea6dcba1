"""A seeded half of a list of names runs without `--exhaustive`. SWEEP_SEED chooses it, by default the version."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable
from typing import Any

import pytest

import liger_chunked

SEED = os.environ.get("SWEEP_SEED", liger_chunked.__version__)


def sampled(names: Iterable[str], parts: int = 2) -> list[Any]:
    """Return one parameter for each name; all but one of `parts` parts are marked `exhaustive`."""
    drawn = {name: zlib.crc32(f"{SEED} {name}".encode()) % parts == 0 for name in names}
    return [pytest.param(name, marks=() if chosen else pytest.mark.exhaustive) for name, chosen in drawn.items()]
