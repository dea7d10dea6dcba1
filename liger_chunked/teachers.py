"""A teacher's most likely tokens, and their log-probabilities."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from liger_chunked.types import check_number, described, shown

_TAILS = ("bin", "renormalize")


@dataclass(frozen=True, eq=False)
class TopK:
    """A teacher's k most likely tokens at each position, for the `teacher=` of a distillation loss.

    `teacher_top_k` computes one from a model, and the collator of a `TokenCache` reads one from disk.

    Args:
        ids: (B, T, k) or (N, k), integer ids, distinct within a position.
        logps: in the shape of `ids`, floating point, their log-probabilities in nats under the softmax over the whole
            vocabulary at `temperature`; -inf if missing. Positions without a target are not read.
        temperature: by which the teacher's logits were divided, positive. A loss at another temperature refuses them:
            without the other logits, no formula changes it.
        tail: "bin": the divergence has k + 1 bins, and the last one is all other tokens, with what the k leave of
            probability 1. "renormalize": teacher and student are softmaxes over the k alone, and other tokens get no
            gradient.

    Raises:
        TypeError, ValueError: a tensor has the wrong dtype, shape or device, or a setting a wrong value.

    >>> logps = torch.tensor([[0.5, 0.3], [0.6, 0.1]]).log()
    >>> TopK(torch.tensor([[4, 7], [1, 0]]), logps, temperature=2.0)
    TopK((2, 2) int64 on cpu, temperature=2.0, tail='bin')
    """

    ids: Tensor
    logps: Tensor
    temperature: float = 1.0
    tail: Literal["bin", "renormalize"] = "bin"

    def __post_init__(self) -> None:
        check_number("TopK.temperature", self.temperature)
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"TopK.temperature must be positive and finite, got {self.temperature}")
        if self.tail not in _TAILS:
            raise ValueError(f"TopK.tail must be one of {_TAILS}, got {shown(self.tail)}")
        for name, x in (("ids", self.ids), ("logps", self.logps)):
            if not isinstance(x, Tensor) or x.is_floating_point() != (name == "logps"):
                kind = "floating-point numbers" if name == "logps" else "integers"
                raise TypeError(f"TopK.{name} must be a tensor of {kind}, got {described(x)}")
        if self.ids.shape != self.logps.shape or self.ids.ndim < 2 or self.ids.device != self.logps.device:
            raise ValueError(
                f"TopK.ids and logps must be (B, T, k) or (N, k) on one device, got {described(self.ids)} and "
                f"{described(self.logps)}"
            )

    def to(self, device: torch.device | str) -> TopK:
        """Return the tokens on a device."""
        return replace(self, ids=self.ids.to(device), logps=self.logps.to(device))

    def __repr__(self) -> str:
        return f"TopK({described(self.ids)}, temperature={self.temperature}, tail={self.tail!r})"


def warn_without_tail(logps: Tensor, vocab_size: int) -> None:
    """Warn if log-probabilities (n, k) leave nothing for the tail of k < V tokens in any row.

    A teacher is so sure at some positions, but not at all of them: the k were renormalized, and every divergence with a
    tail bin would push the student's other tokens to probability 0. Waits for the device.
    """
    n_rows, k = logps.shape
    if not n_rows or k >= vocab_size:
        return
    # Above the rounding of a sum of k probabilities, in float32 and in 16 bits.
    rounding = 1e-5 if logps.dtype in (torch.float32, torch.float64) else 4e-3
    if bool((logps.double().exp().sum(1) > 1 - rounding).all()):
        warnings.warn(
            f"the teacher's log-probabilities sum to 1 over k={k} of {vocab_size} tokens at each position, which "
            "leaves nothing for the tail bin: they were probably renormalized. Pass log-probabilities under the "
            "softmax over the whole vocabulary, or teacher=TopK(ids, logps, tail='renormalize')",
            stacklevel=2,
        )
