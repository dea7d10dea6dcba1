"""Check targets and a teacher's top-k on the device. Bytes: each read once, a mask of targets written."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from liger_chunked.device import current_stream, is_on_gpu
from liger_chunked.kernels.backend import block_size, jit, tl, use_triton
from liger_chunked.kernels.launch import Kernel
from liger_chunked.kernels.tuning import TUNING
from liger_chunked.kernels.tuning.generic import AGREES
from liger_chunked.private import assert_async


class Survey(NamedTuple):
    mask: Tensor  # (R, C) bool
    summary: Tensor  # (3, R, blocks) int64: valid tokens, lowest target, highest
    on_host: Tensor | None = None  # pinned, if on a GPU and to be read

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


def _survey_triton(target: Tensor, ignore_index: int, to_read: bool) -> Survey:
    n_rows, n_cols = target.shape
    mask = torch.empty_like(target, dtype=torch.bool)
    most, num_warps = TUNING[target.device].survey
    block = block_size(n_cols, most)
    shape = 3, n_rows, -(-n_cols // block)
    summary = torch.empty(shape, dtype=torch.int64, device=target.device)
    # The kernel writes to the host's memory: a copy would take half of the 80 µs between launch and answer
    # (docs/tuning.md).
    on_host = None
    if to_read and is_on_gpu(target):
        on_host = torch.empty(shape, dtype=torch.int64, device="cpu", pin_memory=True)
    launch = (n_rows, shape[2], 1), (target, mask, summary, on_host), (n_cols, ignore_index, block), num_warps
    # The first survey runs in torch, so that its kernel compiles in a thread, together with those of the step.
    if to_read and _survey_kernel.postpone(*launch):
        return _survey_torch(target, ignore_index)
    _survey_kernel(*launch)
    return Survey(mask, summary, on_host)


def _survey_torch(target: Tensor, ignore_index: int) -> Survey:
    mask = target != ignore_index
    low, high = torch.where(mask, target, 0).aminmax(dim=1)
    return Survey(mask, torch.stack([mask.sum(1), low, high])[..., None])


def survey(target: Tensor, ignore_index: int, to_read: bool = True) -> Survey:
    """Survey a target, (R, C) int64 contiguous; ignored tokens count as 0."""
    if not target.numel():
        return Survey(torch.empty_like(target, dtype=torch.bool), target.new_zeros(3, target.shape[0], 1))
    if use_triton(target):
        return _survey_triton(target, ignore_index, to_read)
    return _survey_torch(target, ignore_index)


@functools.partial(Kernel, asserts=True)
def _counts_match_kernel(
    summary_ptr, counts_ptr, match_ptr, n_rows, n_blocks, n_tokens, vocab_size,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    within = tl.full((ROWS, BLOCKS), 1, tl.int32)
    same = tl.full([ROWS], 1, tl.int32)
    counted = tl.zeros([ROWS], tl.int64)
    for first in range(0, n_rows, ROWS):
        rows = first + tl.arange(0, ROWS)
        counts = tl.zeros([ROWS], tl.int64)
        for start in range(0, n_blocks, BLOCKS):
            blocks = start + tl.arange(0, BLOCKS)
            inside = (rows < n_rows)[:, None] & (blocks < n_blocks)[None, :]
            places = summary_ptr + rows[:, None] * n_blocks + blocks[None, :]
            counts += tl.sum(tl.load(places, mask=inside, other=0), axis=1)
            lowest = tl.load(places + n_rows * n_blocks, mask=inside, other=0)
            highest = tl.load(places + 2 * n_rows * n_blocks, mask=inside, other=0)
            within &= ((lowest >= 0) & (highest < vocab_size)).to(tl.int32)
        if counts_ptr is not None:
            same &= (counts == tl.load(counts_ptr + rows, mask=rows < n_rows, other=0)).to(tl.int32)
        counted += counts
    if counts_ptr is None:
        same &= (tl.sum(counted, axis=0) == n_tokens).to(tl.int32)
    match = (tl.min(tl.min(within, axis=1), axis=0) & tl.min(same, axis=0)) != 0
    if match_ptr is not None:
        tl.store(match_ptr, match)
    else:
        tl.device_assert(
            match,
            "targets must be ignore_index or indices into the vocabulary, and n_valid must count those that are not "
            "ignore_index",
        )


def counts_match(summary: Tensor, counts: Tensor | int, vocab_size: int) -> Tensor:
    """Return, as a bool () on the device, whether targets are below `vocab_size`, and there are `counts` of them.

    `counts` are the valid tokens of each row, (R,) int64, or of all rows.
    """
    _, n_rows, n_blocks = summary.shape
    of_rows, total = (counts, 0) if isinstance(counts, Tensor) else (None, counts)
    if summary.numel() and use_triton(summary):
        found = torch.empty((), dtype=torch.bool, device=summary.device)
        sizes = n_rows, n_blocks, total, vocab_size
        _counts_match_kernel((1, 1, 1), (summary, of_rows, found), (*sizes, *AGREES), num_warps=4)
        return found
    within = (summary[1] >= 0) & (summary[2] < vocab_size)
    valid = summary[0].sum() if of_rows is None else summary[0].sum(1)
    same = valid == counts
    assert isinstance(same, Tensor)
    return within.all() & same.all()


def assert_counts(summary: Tensor, counts: Tensor | int, vocab_size: int, message: str) -> None:
    """Assert `counts_match` on its device without waiting. A failure ends the process's use of the device.

    On a GPU the kernel that compares asserts too, because a small step with `n_valid` waits for the host: torch's
    assertion would be another launch. The kernel prints a message of its own, without the target's name.
    """
    if not (summary.numel() and is_on_gpu(summary) and use_triton(summary)):
        assert_async(counts_match(summary, counts, vocab_size), message)
        return
    _, n_rows, n_blocks = summary.shape
    of_rows, total = (counts, 0) if isinstance(counts, Tensor) else (None, counts)
    sizes = n_rows, n_blocks, total, vocab_size
    _counts_match_kernel((1, 1, 1), (summary, of_rows, None), (*sizes, *AGREES), num_warps=4)


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
