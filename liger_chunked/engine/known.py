"""What the host may know of values on the device: it waits once a step, and never in the capture of a CUDA graph."""

from __future__ import annotations

from torch import Tensor

from liger_chunked.device import is_capturing, is_on_gpu
from liger_chunked.kernels.survey import Survey


def host_may_sync(x: Tensor) -> bool:
    """Whether the host may wait for values of `x`: not in the capture of a CUDA graph, and not on the meta device."""
    return not x.is_meta and not (is_on_gpu(x) and is_capturing())


def refuse_capture(x: Tensor, what: str) -> None:
    """Raise ValueError in the capture of a CUDA graph of the device of `x`: `what` makes the host wait for it."""
    if not x.is_meta and not host_may_sync(x):
        raise ValueError(
            f"{what} cannot be captured in a CUDA graph, because the host waits for the device: leave it out, or run "
            "the step eagerly"
        )


def check_ids(name: str, low: int, high: int, vocab_size: int, ignore_index: int | None = None) -> None:
    """Raise ValueError if an id is no index into the vocabulary. `ignore_index` marks tokens to skip, if ids may."""
    if 0 <= low and high < vocab_size:
        return
    ignored = hint = ""
    if ignore_index is not None:
        ignored = f"ignore_index ({ignore_index}) or "
        if high < vocab_size:  # the usual mistake: padding with another mark
            hint = f". If {low} marks tokens to skip, set ignore_index={low}"
    raise ValueError(
        f"{name} holds {low if low < 0 else high}, expected {ignored}an index into the vocabulary of weight, "
        f"0 to {vocab_size - 1}{hint}"
    )


def read_counts(surveyed: Survey, ignore_index: int, vocab_size: int, name: str) -> list[int]:
    """Wait for the counts of a target's tokens, one for each row of the survey, and check its ids.

    Args:
        name: of the target, for messages.

    Raises:
        ValueError: an id is outside the vocabulary.
    """
    counts, lows, highs = surveyed.read()
    low, high = min(map(min, lows), default=0), max(map(max, highs), default=0)
    if low < 0 or high >= vocab_size:
        check_ids(name, low, high, vocab_size, ignore_index)
    return list(map(sum, counts))  # of a row's blocks
