"""Rows for experts, gathered from tokens, and each token's sum of its experts' rows (Shazeer et al. 2017, equation 1).

    out[n] = sum over k of weight[n, k] y[place[n, k]]
    dy[place[n, k]] = weight[n, k] dout[n],  dweight[n, k] = dout[n] . y[place[n, k]]

Sums are in float32, rounded once. Bytes: forward `y` and `out`, backward twice `y`, and `dout` for
every eight experts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_chunked.kernels.backend import (
    contiguous_like,
    first_derivative,
    graph_is_retained,
    is_intermediate,
    power_of_two,
    tl,
    use_triton,
)
from liger_chunked.kernels.launch import Kernel
from liger_chunked.kernels.tuning import TUNING
from liger_chunked.kernels.tuning.generic import MOST_SPREAD, MOST_SUMMED
from liger_chunked.private import is_view
from liger_chunked.types import accumulation_dtype


class Routing(NamedTuple):
    """Rows of N tokens for K experts each, sorted by expert; those of no expert come last, and are not set."""

    expert: Tensor  # (N K,) of each row
    place: Tensor  # (N, K) rows of each token
    ends: Tensor  # (E,) int32, the row after an expert's last


def route(index: Tensor, n_experts: int) -> Routing:
    """Sort the tokens' experts (N, K); an index of at least `n_experts` is no expert (expert parallelism)."""
    expert, order = index.reshape(-1).sort(stable=True)
    rows = torch.arange(order.numel(), device=order.device)
    place = torch.empty_like(order).scatter_(0, order, rows)
    experts = torch.arange(n_experts, device=expert.device, dtype=expert.dtype)
    ends = torch.searchsorted(expert, experts, right=True, out_int32=True)
    return Routing(expert, place.view(index.shape), ends)


@Kernel
def _sum_kernel(
    y_ptr, weight_ptr, place_ptr, ends_ptr, out_ptr, n_cols, n_experts, top_k,
    K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    k = tl.arange(0, K)
    place = tl.load(place_ptr + token * top_k + k, mask=k < top_k, other=0)
    there = (k < top_k) & (place < tl.load(ends_ptr + n_experts - 1))
    inside = there[:, None] & (cols < n_cols)[None, :]
    y = tl.load(y_ptr + place[:, None] * n_cols + cols[None, :], mask=inside, other=0.0).to(tl.float32)
    if weight_ptr is not None:
        y *= tl.load(weight_ptr + token * top_k + k, mask=there, other=0.0).to(tl.float32)[:, None]
    out = tl.sum(y, axis=0)
    tl.store(out_ptr + token * n_cols + cols, out.to(out_ptr.dtype.element_ty), mask=cols < n_cols)


@Kernel
def _spread_kernel(
    dout_ptr, y_ptr, weight_ptr, place_ptr, ends_ptr, dy_ptr, dweight_ptr, n_cols, n_experts, top_k,
    K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * K + tl.arange(0, K)
    place = tl.load(place_ptr + token * top_k + k, mask=k < top_k, other=0)
    there = (k < top_k) & (place < tl.load(ends_ptr + n_experts - 1))
    weight = tl.full([K], 1.0, tl.float32)
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + token * top_k + k, mask=there, other=0.0).to(tl.float32)
    products = tl.zeros([K, BLOCK], tl.float32)
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        dout = tl.load(dout_ptr + token * n_cols + cols, mask=cols < n_cols, other=0.0).to(tl.float32)[None, :]
        inside = there[:, None] & (cols < n_cols)[None, :]
        at = place[:, None] * n_cols + cols[None, :]
        if dweight_ptr is not None:
            products += tl.load(y_ptr + at, mask=inside, other=0.0).to(tl.float32) * dout
            tl.debug_barrier()  # dy may be y, and other threads may store what this one loads
        if dy_ptr is not None:
            tl.store(dy_ptr + at, (weight[:, None] * dout).to(dy_ptr.dtype.element_ty), mask=inside)
    if dweight_ptr is not None:
        dweight = tl.sum(products, axis=1).to(dweight_ptr.dtype.element_ty)
        tl.store(dweight_ptr + token * top_k + k, dweight, mask=k < top_k)


@Kernel
def _bias_kernel(y_ptr, bias_ptr, expert_ptr, y_stride, n_cols, n_experts, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(expert_ptr + row)
    inside = cols < tl.where(expert < n_experts, n_cols, 0)
    y = tl.load(y_ptr + row * y_stride + cols, mask=inside, other=0.0).to(tl.float32)
    y += tl.load(bias_ptr + expert * n_cols + cols, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * y_stride + cols, y.to(y_ptr.dtype.element_ty), mask=inside)


@Kernel
def _bias_grad_kernel(dy_ptr, ends_ptr, dbias_ptr, n_cols, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    expert = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first, end = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0), tl.load(ends_ptr + expert)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(first, end, ROWS):
        rows = start + tl.arange(0, ROWS)
        inside = (rows < end)[:, None] & (cols < n_cols)[None, :]
        at = rows.to(tl.int64)[:, None] * n_cols + cols[None, :]
        total += tl.load(dy_ptr + at, mask=inside, other=0.0).to(tl.float32)
    dbias = tl.sum(total, axis=0).to(dbias_ptr.dtype.element_ty)
    tl.store(dbias_ptr + expert * n_cols + cols, dbias, mask=cols < n_cols)


def _there(routing: Routing) -> Tensor:
    return routing.place < routing.ends[-1]


def _sum(y: Tensor, routing: Routing, dtype: torch.dtype, weight: Tensor | None = None) -> Tensor:
    """Return (N, H)."""
    place, ends = routing.place, routing.ends
    (n, top_k), n_cols = place.shape, y.shape[1]
    if not use_triton(y):
        terms = y[place].to(torch.promote_types(accumulation_dtype(y.dtype), dtype))
        terms = terms if weight is None else terms * weight.to(terms.dtype)[..., None]
        return terms.masked_fill(~_there(routing)[..., None], 0.0).sum(1).to(dtype)
    out = y.new_empty(n, n_cols, dtype=dtype)
    if out.numel():
        columns, num_warps = TUNING[y.device].experts
        padded = power_of_two(top_k)
        block = max(32, min(columns, MOST_SUMMED * columns // (padded * y.element_size())))
        num_warps = max(1, num_warps * block // columns)
        tensors = y.contiguous(), None if weight is None else weight.contiguous(), place, ends, out
        _sum_kernel((n, -(-n_cols // block), 1), tensors, (n_cols, ends.numel(), top_k, padded, block), num_warps)
    return out


def _spread(
    dout: Tensor, dy: Tensor | None, routing: Routing, weight: Tensor | None = None, y: Tensor | None = None
) -> Tensor | None:
    """Write `dy`, which may be `y`, except rows of no expert; with `y`, return dweight."""
    place, ends = routing.place, routing.ends
    (n, top_k), n_cols = place.shape, dout.shape[1]
    dweight = None if y is None or weight is None else contiguous_like(weight)
    if not use_triton(dout):
        there = _there(routing)
        dout = dout.to(accumulation_dtype(dout.dtype))[:, None]
        if y is not None and dweight is not None:
            dweight.copy_((y[place].to(dout.dtype) * dout).masked_fill_(~there[..., None], 0.0).sum(-1))
        if dy is not None:
            rows = dout.expand(n, top_k, n_cols) if weight is None else weight.to(dout.dtype)[..., None] * dout
            dy[place[there]] = rows[there].to(dy.dtype)
    elif n:
        block, num_warps = TUNING[dout.device].experts
        at_once = min(MOST_SPREAD, power_of_two(top_k))
        tensors = dout.contiguous(), y, None if weight is None else weight.contiguous(), place, ends, dy, dweight
        _spread_kernel((n, -(-top_k // at_once), 1), tensors, (n_cols, ends.numel(), top_k, at_once, block), num_warps)
    return dweight


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, routing: Routing) -> Tensor:
        ctx.routing = routing
        rows = x.new_empty(routing.expert.numel(), x.shape[1])
        _spread(x, rows, routing)
        return rows

    @staticmethod
    @first_derivative
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return _sum(dy, ctx.routing, dy.dtype), None


class _AddBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, bias: Tensor, routing: Routing) -> Tensor:
        ctx.routing, ctx.like = routing, bias
        ctx.mark_dirty(y)
        n_rows, n_cols = y.shape
        if not use_triton(y):
            there = routing.expert < bias.shape[0]
            return y.add_(bias[routing.expert.where(there, 0)] * there[:, None])
        if y.numel():
            block, num_warps = TUNING[y.device].experts
            numbers = y.stride(0), n_cols, bias.shape[0], block
            _bias_kernel((n_rows, -(-n_cols // block), 1), (y, bias.contiguous(), routing.expert), numbers, num_warps)
        return y

    @staticmethod
    @first_derivative
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, None]:
        return dy, _bias_grad(dy, ctx.like, ctx.routing) if ctx.needs_input_grad[1] else None, None


def _bias_grad(dy: Tensor, like: Tensor, routing: Routing) -> Tensor:
    dbias, n_cols = contiguous_like(like), dy.shape[1]
    if not use_triton(dy):
        there = routing.expert < like.shape[0]
        sums = dy.new_zeros(like.shape, dtype=accumulation_dtype(dy.dtype))
        return dbias.copy_(sums.index_add_(0, routing.expert[there], dy[there].to(sums.dtype)))
    if dbias.numel():
        rows, block, num_warps = TUNING[dy.device].experts_bias
        grid = like.shape[0], -(-n_cols // block), 1
        _bias_grad_kernel(grid, (dy.contiguous(), routing.ends, dbias), (n_cols, rows, block), num_warps)
    return dbias


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, weight: Tensor, routing: Routing, dtype: torch.dtype, inplace: bool) -> Tensor:
        ctx.routing, ctx.like = routing, (y.shape, y.dtype)
        ctx.inplace = inplace and is_intermediate(y) and not is_view(y)
        ctx.save_for_backward(y if weight.requires_grad else None, weight)
        return _sum(y, routing, dtype, weight)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        y, weight = ctx.saved_tensors
        y, dy = None if y is None else y.contiguous(), None
        if ctx.needs_input_grad[0]:
            if y is not None and ctx.inplace and not graph_is_retained():
                torch.autograd.graph.increment_version(y)  # makes operations that saved it raise
                y = dy = y.detach()
            else:
                shape, dtype = ctx.like
                dy = dout.new_empty(shape, dtype=dtype)
        dweight = _spread(dout, dy, ctx.routing, weight, y)
        return dy, dweight, None, None, None


def gather_tokens(x: Tensor, routing: Routing) -> Tensor:
    """Return the tokens' hidden states (N, H) as rows for experts, (N K, H)."""
    return _Gather.apply(x, routing)


def add_bias_(y: Tensor, bias: Tensor, routing: Routing) -> Tensor:
    """Add each row's bias, of (E, C), to `y`, (N K, C) contiguous."""
    return _AddBias.apply(y, bias, routing)


def combine_rows(
    y: Tensor, weight: Tensor, routing: Routing, dtype: torch.dtype | None = None, inplace: bool = False
) -> Tensor:
    """Return each token's weighted sum (N, H) of its rows in `y`, (N K, H); `weight` is (N, K).

    With `inplace`, a backward that does not retain its graph overwrites `y`, unless it is a leaf or a view.
    """
    return _Combine.apply(y, weight, routing, dtype or y.dtype, inplace)
