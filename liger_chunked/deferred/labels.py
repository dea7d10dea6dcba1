"""Labels that are counted when a forward starts, so that its fused loss does not leave the device without work.

A loss needs the number of tokens that have a target. Only the device knows the target, and when it gets there, it has
finished all that was enqueued before: it idles until the host has read the number and launched the loss. The labels are
there from the start. With their number the loss is launched at once, and checked afterwards (`engine.likely_rows`):

    with counted(model, labels, shifts=True, ignore_index=-100):
        forward                     in it F.cross_entropy(deferred, target) takes `likely_count(target)`

Nothing is assumed about what the forward does with its labels. If the target has another number of tokens, the loss is
computed again, and the labels of such models are no longer counted.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_chunked.device import is_capturing, is_on_gpu
from liger_chunked.engine import LikelyCount
from liger_chunked.kernels import Survey, survey
from liger_chunked.kernels.operands import all_plain

_CURRENT = threading.local()

# Whether counting pays, by class of models. A first forward shows whether its loss is one that takes the number.
_PAYS: WeakKeyDictionary[type, bool] = WeakKeyDictionary()


@dataclass(eq=False)
class _Counted:
    """The labels of a forward, for its first loss. Later losses have their own targets.

    Attributes:
        n_labels: the number of labels, including ignored ones.
        surveyed: their survey. None in the first forward of a class.
        asked: whether a loss with a target of this size asked for the count.
        likely: the count that it got.
    """

    n_labels: int
    surveyed: Survey | None
    asked: bool = False
    likely: LikelyCount | None = None

    def read(self) -> int:
        """Wait for the device to reach the start of the forward."""
        assert self.surveyed is not None
        counts, *_ = self.surveyed.read()
        return sum(map(sum, counts))


@contextlib.contextmanager
def counted(model: Any, labels: Any, *, shifts: bool, ignore_index: Any = -100) -> Iterator[None]:
    """Count labels on their way to the host while the block runs. Does nothing where the host need not wait for them.

    Args:
        model: of whose class is remembered whether counting pays.
        labels: (..., T) int64.
        shifts: whether the model predicts `labels[..., 1:]`.
        ignore_index: of the loss.
    """
    before = getattr(_CURRENT, "counted", None)
    _CURRENT.counted = now = _start(type(model), labels, shifts, ignore_index)
    try:
        yield
        if now is not None and now.surveyed is not None:
            _PAYS[type(model)] = now.likely is not None and not now.likely.was_wrong
        elif now is not None and now.asked:
            _PAYS[type(model)] = True
    finally:
        _CURRENT.counted = before
        if now is not None and now.surveyed is not None and now.likely is None:
            now.read()  # the device still writes to memory of the host, which must not be freed before


@torch.no_grad()
def _start(cls: type, labels: Any, shifts: bool, ignore_index: Any) -> _Counted | None:
    pays = _PAYS.get(cls)
    if pays is False or not isinstance(labels, Tensor) or not is_on_gpu(labels) or is_capturing():
        return None
    if type(ignore_index) is not int or labels.dtype != torch.int64 or not labels.ndim or not all_plain([labels]):
        return None
    if pays is None:
        # A count here would also compile its kernel now, and not in parallel with the other kernels of a first step.
        return _Counted(labels.numel(), None)
    # Padded as transformers does it, because the kernel is compiled for the length of the loss's target.
    target = F.pad(labels[..., 1:], (0, 1), value=ignore_index) if shifts else labels.contiguous()
    return _Counted(labels.numel(), survey(target.view(1, -1), ignore_index).marked())


def likely_count(target: Tensor) -> LikelyCount | None:
    """Return how many tokens of a target probably count. None if its labels were not counted, or a loss took that."""
    found = getattr(_CURRENT, "counted", None)
    if found is None or found.asked or target.numel() != found.n_labels:
        return None
    found.asked = True
    if found.surveyed is not None:
        found.likely = LikelyCount(found.read())
    return found.likely
