"""Tuned constants, one file per architecture; `TUNING[device]` is a device's table."""

from __future__ import annotations

import torch

from liger_chunked.kernels.tuning.generic import GENERIC, Tuning
from liger_chunked.kernels.tuning.hopper import HOPPER


class _ByDevice(dict[torch.device, Tuning]):
    """Tables, picked at first launch: the query initializes CUDA."""

    def __missing__(self, device: torch.device) -> Tuning:
        is_nvidia = device.type == "cuda" and torch.version.cuda is not None
        is_hopper = is_nvidia and torch.cuda.get_device_capability(device)[0] == 9
        table = self[device] = HOPPER if is_hopper else GENERIC
        return table


TUNING = _ByDevice()
