"""Check targets and a teacher's top-k on the device, and say where the tokens are that count.

Bytes: a survey reads each target once and writes a mask; `find_tokens` reads them again, and writes places and ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from liger_chunked.device import current_stream, is_on_gpu
from liger_chunked.kernels.backend import block_size, jit, tl, use_triton
from liger_chunked.kernels.launch import Kernel
from liger_chunked.kernels.tuning import TUNING
from liger_chunked.kernels.tuning.generic import COUNTED_BLOCKS
from liger_chunked.private import foreach_add_


class Survey(NamedTuple):
    mask: Tensor  # (R, C) bool
    summary: Tensor  # (3, R, blocks) int64: valid tokens, lowest target, highest
    on_host: Tensor | None = None  # the same, pinned, if on a GPU

    def read(self) -> list[list[list[int]]]:
        if self.on_host is None:
            return self.summary.tolist()
        current_stream(self.summary.device).synchronize()
        return self.on_host.tolist()


@jit
def _store_summary(summary_ptr, n_blocks, count, lowest, highest):
    tl.store(summary_ptr, count)
    tl.store(summary_ptr + n_blocks, lowest)
    tl.store(summary_ptr + 2 * n_blocks, highest)


@Kernel
def _survey_kernel(target_ptr, mask_ptr, summary_ptr, on_host_ptr, n_tokens, ignore_index, BLOCK: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cols = part * BLOCK + tl.arange(0, BLOCK)
    inside = cols < n_tokens
    target = tl.load(target_ptr + row * n_tokens + cols, mask=inside, other=ignore_index)
    valid = target != ignore_index
    tl.store(mask_ptr + row * n_tokens + cols, valid, mask=inside)
    target = tl.where(valid, target, 0)
    n_blocks = tl.num_programs(0).to(tl.int64) * tl.num_programs(1)
    block = row * tl.num_programs(1) + part
    count, lowest, highest = tl.sum(valid.to(tl.int64), axis=0), tl.min(target, axis=0), tl.max(target, axis=0)
    _store_summary(summary_ptr + block, n_blocks, count, lowest, highest)
    if on_host_ptr is not None:
        _store_summary(on_host_ptr + block, n_blocks, count, lowest, highest)


def _survey_triton(target: Tensor, ignore_index: int) -> Survey:
    n_rows, n_cols = target.shape
    mask = torch.empty_like(target, dtype=torch.bool)
    most, num_warps = TUNING[target.device].survey
    block = block_size(n_cols, most)
    shape = 3, n_rows, -(-n_cols // block)
    summary = torch.empty(shape, dtype=torch.int64, device=target.device)
    # The kernel writes to the host's memory: a copy would take half of the 80 µs between launch and answer.
    on_host = None
    if is_on_gpu(target):
        on_host = torch.empty(shape, dtype=torch.int64, device="cpu", pin_memory=True)
    _survey_kernel((n_rows, shape[2], 1), (target, mask, summary, on_host), (n_cols, ignore_index, block), num_warps)
    return Survey(mask, summary, on_host)


def _survey_torch(target: Tensor, ignore_index: int) -> Survey:
    mask = target != ignore_index
    low, high = torch.where(mask, target, 0).aminmax(dim=1)
    return Survey(mask, torch.stack([mask.sum(1), low, high])[..., None])


def survey(target: Tensor, ignore_index: int) -> Survey:
    """Survey a target, (R, C) int64 contiguous; ignored tokens count as 0."""
    if not target.numel():
        return Survey(torch.empty_like(target, dtype=torch.bool), target.new_zeros(3, target.shape[0], 1))
    if use_triton(target):
        return _survey_triton(target, ignore_index)
    return _survey_torch(target, ignore_index)


class Found(NamedTuple):
    """Where the tokens of a target are that count.

    Attributes:
        places: (n_valid,) int64, the place of each in the flattened target.
        ids: (n_valid,) int64, the target of each.
        token_at: (R * C,) int32, at each place the number of its token among them, or -1. None where no kernel reads
            it.
    """

    places: Tensor
    ids: Tensor
    token_at: Tensor | None


@jit
def _sum_counts(counts_ptr, start, stop, BLOCK: tl.constexpr):
    """Return the sum of counts from `start` to `stop`."""
    total = tl.zeros([BLOCK], tl.int64)
    for first in range(start, stop, BLOCK):
        places = first + tl.arange(0, BLOCK)
        total += tl.load(counts_ptr + places, mask=places < stop, other=0)
    return tl.sum(total, axis=0)


@Kernel
def _find_tokens_kernel(
    target_ptr, counts_ptr, places_ptr, ids_ptr, token_at_ptr, n_tokens, ignore_index,
    BLOCK: tl.constexpr, COUNTS: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    block = row * tl.num_programs(1) + part
    cols = part * BLOCK + tl.arange(0, BLOCK)
    inside = cols < n_tokens
    target_ptr += row * n_tokens
    target = tl.load(target_ptr + cols, mask=inside, other=ignore_index)
    valid = target != ignore_index
    first = _sum_counts(counts_ptr, 0, block, COUNTS)  # of the block's tokens
    of_block = tl.cumsum(valid.to(tl.int32), axis=0) - 1
    tl.store(places_ptr + first + of_block, row * n_tokens + cols, mask=valid)
    tl.store(ids_ptr + first + of_block, target, mask=valid)
    token_at_ptr += row * n_tokens
    tl.store(token_at_ptr + cols, tl.where(valid, first.to(tl.int32) + of_block, -1), mask=inside)


def find_tokens(target: Tensor, surveyed: Survey, ignore_index: int, n_valid: int) -> Found:
    """Return where the `n_valid` tokens of a surveyed target (R, C) are, in order, without a wait."""
    if not (target.numel() and use_triton(target)):
        # `nonzero` would wait for the device to count what the host knows.
        places = torch.nonzero_static(surveyed.mask.view(-1), size=n_valid).view(-1)
        return Found(places, target.view(-1)[places], None)
    (n_rows, n_cols), (most, num_warps) = target.shape, TUNING[target.device].survey
    block = block_size(n_cols, most)
    places, ids = (torch.empty(n_valid, dtype=torch.int64, device=target.device) for _ in range(2))
    token_at = torch.empty(target.numel(), dtype=torch.int32, device=target.device)
    tensors = target, surveyed.summary, places, ids, token_at
    numbers = n_cols, ignore_index, block, COUNTED_BLOCKS
    _find_tokens_kernel((n_rows, -(-n_cols // block), 1), tensors, numbers, num_warps)
    return Found(places, ids, token_at)


def on_device(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Return int64 numbers as a tensor, from a kernel's arguments: a copy would wait."""
    found = torch.zeros(len(numbers), dtype=torch.int64, device=device)
    if numbers:
        foreach_add_(found.unbind(), numbers)
    return found


@Kernel
def _top_k_kernel(logps_ptr, ids_ptr, summary_ptr, n_tokens, k, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logps_ptr += row * k
    ids_ptr += row * k
    lanes = tl.arange(0, BLOCK)
    lowest = tl.zeros([BLOCK], tl.int64)
    highest = tl.zeros([BLOCK], tl.int64)
    twice = tl.zeros([BLOCK], tl.int32)
    positive = tl.zeros([BLOCK], tl.int32)
    present = tl.zeros([BLOCK], tl.int32)
    for start in range(0, k, BLOCK):
        entry = start + lanes
        inside = entry < k
        logp = tl.load(logps_ptr + entry, mask=inside, other=-float("inf")).to(tl.float32)
        there = logp > -float("inf")
        token = tl.where(there, tl.load(ids_ptr + entry, mask=inside, other=0).to(tl.int64), 0)
        lowest = tl.minimum(lowest, token)
        highest = tl.maximum(highest, token)
        positive |= ((logp > 0) | (logp != logp)).to(tl.int32)
        present |= there.to(tl.int32)
        for earlier in range(0, start + 1, BLOCK):
            other = earlier + lanes
            other_logp = tl.load(logps_ptr + other, mask=other < k, other=-float("inf")).to(tl.float32)
            other_there = other_logp > -float("inf")
            others = tl.load(ids_ptr + other, mask=other < k, other=0).to(tl.int64)
            same = (token[:, None] == others[None, :]) & there[:, None] & other_there[None, :]
            twice |= tl.max((same & (other[None, :] < entry[:, None])).to(tl.int32), axis=1)
    summary_ptr += row
    tl.store(summary_ptr, ~tl.min(lowest, axis=0))
    tl.store(summary_ptr + n_tokens, tl.max(highest, axis=0))
    tl.store(summary_ptr + 2 * n_tokens, tl.max(twice, axis=0).to(tl.int64))
    tl.store(summary_ptr + 3 * n_tokens, tl.max(positive, axis=0).to(tl.int64))
    tl.store(summary_ptr + 4 * n_tokens, 1 - tl.max(present, axis=0).to(tl.int64))


def _survey_top_k_triton(logps: Tensor, ids: Tensor) -> Tensor:
    n, k = ids.shape
    summary = torch.empty(5, n, dtype=torch.int64, device=ids.device)
    _top_k_kernel[(n,)](
        logps_ptr=logps.contiguous(),
        ids_ptr=ids.contiguous(),
        summary_ptr=summary,
        n_tokens=n,
        k=k,
        BLOCK=block_size(k, TUNING[ids.device].survey_top_k_block),
    )
    return summary.amax(1)


def _survey_top_k_torch(logps: Tensor, ids: Tensor) -> Tensor:
    present = logps > -torch.inf
    ids = ids.long()
    # Absent entries get unique ids.
    distinct = torch.where(present, ids, -1 - torch.arange(ids.shape[1], device=ids.device)).sort(1).values
    lowest, highest = torch.where(present, ids, 0).aminmax()
    twice = (distinct[:, 1:] == distinct[:, :-1]).any()
    positive = (logps > 0).any() | logps.isnan().any()
    empty = (~present.any(1)).any()
    return torch.stack([~lowest.clamp(max=0), highest.clamp(min=0), twice.long(), positive.long(), empty.long()])


def survey_top_k(logps: Tensor, ids: Tensor) -> Tensor:
    """Check a top-k, (N, k) `logps` and integer `ids`, not empty; entries of -inf are absent.

    Return (5,) int64: `~min(0, ids)`, the highest id, and whether a row repeats an id, has a positive or NaN entry, or
    is empty.
    """
    by_kernel = use_triton(logps) and ids.shape[1] <= TUNING[logps.device].survey_top_k_most
    return (_survey_top_k_triton if by_kernel else _survey_top_k_torch)(logps, ids)
