from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from liger_chunked.engine.checks import refuse_capture
from liger_chunked.engine.sequence import SequenceSplit
from liger_chunked.types import LossHead, ProcessGroup, described


@dataclass(frozen=True)
class Packing:
    """Maps rows (N,) without padding to padded sequences (S, T), T the longest."""

    ends: Tensor  # (S + 1,) 0, and the row after each sequence
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, cu_seqlens: Any, n_rows: int, device: torch.device) -> Packing:
        """Check `cu_seqlens`, and copy it to the host."""
        if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):
            got = cu_seqlens.dtype if isinstance(cu_seqlens, Tensor) else type(cu_seqlens).__name__
            raise TypeError(f"cu_seqlens must be an int32 or int64 tensor, got {got}")
        ends = cu_seqlens.tolist() if cu_seqlens.ndim == 1 else []
        lengths = tuple(stop - start for start, stop in itertools.pairwise(ends))
        if not ends or ends[0] != 0 or ends[-1] != n_rows or min(lengths, default=0) < 0:
            raise ValueError(
                f"cu_seqlens must be (sequences + 1,), rising from 0 to the {n_rows} rows of input, got "
                f"{described(cu_seqlens)} {str(ends)[:80]}"
            )
        if len(lengths) == n_rows and 0 in lengths:
            raise ValueError(
                f"cu_seqlens has as many sequences as input has rows, {n_rows}, and some are empty: values a token and "
                "values a sequence would have one shape. Drop the empty ones"
            )
        return cls(cu_seqlens.to(device, torch.int64), lengths)

    @functools.cached_property
    def rows(self) -> Tensor:
        """(S, T): the row at each place, -1 at padding."""
        starts, stops = self.ends[:-1, None], self.ends[1:, None]
        rows = starts + torch.arange(max(self.lengths, default=0), device=starts.device)
        return torch.where(rows < stops, rows, -1)

    def whole(self, x: Tensor, fill: float = 0) -> Tensor:
        if not x.numel():
            return x.new_full(self.rows.shape, fill)
        return torch.where(self.rows < 0, fill, x[self.rows.clamp(min=0)])


Sequences = SequenceSplit | Packing | None


def sequences_of(
    head: LossHead,
    input: Tensor,
    cu_seqlens: Tensor | None,
    sequence_group: ProcessGroup | None,
    padded: str,
) -> Sequences:
    """Check how hidden states hold sequences; return None for padded ones."""
    if cu_seqlens is None:
        if input.ndim != 3:
            raise ValueError(f"input must be {padded}, got {tuple(input.shape)}")
        return None if sequence_group is None else SequenceSplit.of(sequence_group, head, input, "input")
    if input.ndim != 2:
        raise ValueError(f"input must be (N, H), the rows of all sequences, with cu_seqlens, got {tuple(input.shape)}")
    if sequence_group is not None:
        raise ValueError("cu_seqlens and sequence_group are given: ranks can split padded sequences only")
    refuse_capture(input, "cu_seqlens")
    return Packing.of(cu_seqlens, head.token_shape(input)[-1], input.device)


def whole(x: Tensor, sequences: Sequences, fill: float = 0) -> Tensor:
    """Return (B, T), values of whole padded sequences, from what the call gave: without gradient if ranks split them.

    Args:
        x: (B, T), or this rank's positions of it, or (N,) of packed sequences.
        fill: at the padding that packed sequences get.
    """
    if sequences is None:
        return x
    return sequences.whole(x) if isinstance(sequences, SequenceSplit) else sequences.whole(x, fill)


def count(input: Tensor, sequences: Sequences) -> int:
    return len(sequences.lengths) if isinstance(sequences, Packing) else input.shape[0]
