"""Importing this spares the tests work of other packages that no test reads.

- accelerate asks for PEFT's metadata several times in each training run, and parsing them takes 10 ms.
- Without a GPU, torch keeps the text of the stack of each `torch.manual_seed`, for the errors of devices that a program
  may start later: a millisecond for each seed.
"""

from __future__ import annotations

import functools
import importlib.metadata

import torch

importlib.metadata.metadata = functools.cache(importlib.metadata.metadata)


def no_device_to_seed(seed: int) -> None:
    pass


if not torch.cuda.is_available() and not torch.xpu.is_available():
    torch.cuda.manual_seed_all = torch.xpu.manual_seed_all = no_device_to_seed
