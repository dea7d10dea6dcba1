"""Tuned constants, one file per architecture; `TUNING[device]` is a device's table."""

from __future__ import annotations

import torch

from liger_chunked.device import architecture
from liger_chunked.kernels.tuning.generic import GENERIC, Tuning
from liger_chunked.kernels.tuning.hopper import HOPPER

# By what Triton compiles for, as `device.architecture` names it. The others take GENERIC, because its sizes fit
# everywhere (`scripts/compile_matrix.py`), and other sizes would be guesses without a measurement.
TABLES = {"sm_90": HOPPER}


def table_of(name: str | None) -> Tuning:
    """Return the constants of an architecture, "sm_90" or "gfx942"; None is a device that Triton does not name."""
    return GENERIC if name is None else TABLES.get(name, GENERIC)


class _ByDevice(dict[torch.device, Tuning]):
    """Tables, picked at first launch: the query initializes the device."""

    def __missing__(self, device: torch.device) -> Tuning:
        table = self[device] = table_of(architecture(device))
        return table


TUNING = _ByDevice()
