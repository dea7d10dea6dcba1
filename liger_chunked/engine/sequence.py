"""Sequences split over ranks (context parallelism, https://arxiv.org/abs/2310.01889).

A rank projects the hidden states of its positions. Ranks gather other tensors before the step, and statistics in each
chunk, so that all evaluate the same objective. A rank gets its positions' dX, and its share of dW.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from liger_chunked.engine.checks import refuse_capture
from liger_chunked.engine.collectives import gather, gather_tensor
from liger_chunked.kernels.operands import Values, mapped
from liger_chunked.types import LossHead, described


def check_group(group: Any) -> None:
    if group is not None and not (dist.is_available() and isinstance(group, dist.ProcessGroup)):
        raise TypeError(
            f"sequence_group must be a torch.distributed process group, as dist.group.WORLD, got {described(group)}"
        )


@dataclass(frozen=True)
class SequenceSplit:
    group: Any
    batch: int  # sequences
    lengths: tuple[int, ...]  # positions of each rank

    @classmethod
    def of(cls, group: Any, head: LossHead, input: Tensor, name: str = "input") -> SequenceSplit | None:
        """Return how ranks split `input`, (B, T_r, H) or (T_r, H). A collective that waits for the device."""
        if group is None:
            return None
        check_group(group)
        refuse_capture(input, "sequence_group")
        *batch, length = head.token_shape(input)
        mine = torch.tensor([math.prod(batch), length], device=input.device)
        sizes, lengths = zip(*gather_tensor(mine, group).tolist(), strict=True)
        if len(set(sizes)) > 1:
            raise ValueError(
                f"{name} must hold the same sequences on all ranks of sequence_group, got batches of {list(sizes)}"
            )
        return cls(group, sizes[0], lengths)

    @property
    def length(self) -> int:
        return sum(self.lengths)

    @property
    def local_slice(self) -> slice:
        """The positions of each sequence that this rank holds."""
        rank = dist.get_rank(self.group)
        start = sum(self.lengths[:rank])
        return slice(start, start + self.lengths[rank])

    @property
    def local_length(self) -> int:
        return self.lengths[dist.get_rank(self.group)]

    def _pad(self, x: Tensor) -> Tensor:
        missing = max(self.lengths) - x.shape[-1]
        return F.pad(x, (0, missing)) if missing else x

    def _join(self, parts: Iterable[Tensor]) -> Tensor:
        return torch.cat([x[..., :n] for x, n in zip(parts, self.lengths, strict=True)], -1)

    def whole(self, x: Tensor) -> Tensor:
        """Gather the ranks' values (..., T_r) to (..., T)."""
        if x.dtype == torch.bool:
            return self.whole(x.to(torch.uint8)).bool()
        return self._join(gather_tensor(self._pad(x.detach()), self.group).unbind())

    def whole_values(self, values: Values) -> Values:
        parts = gather(mapped(self._pad, values), self.group)
        return values._make(None if f[0] is None else self._join(f) for f in zip(*parts, strict=True))

    def sum(self, x: Tensor) -> Tensor:
        """Sum in rank order: all ranks get the same bits."""
        return gather_tensor(x, self.group).sum(0)

    def local_positions(self, x: Tensor) -> Tensor:
        """Return this rank's part (B * T_r, ...) of a flattened (B * T, ...)."""
        return x.unflatten(0, (self.batch, self.length))[:, self.local_slice].flatten(0, 1)

    def batch_index(self, local: Tensor) -> Tensor:
        """Convert indices into (B, T_r) to indices into (B, T)."""
        length = max(1, self.local_length)
        return local.div(length, rounding_mode="floor") * self.length + self.local_slice.start + local % length
