"""A linear layer that tensor parallelism splits, on this rank's plain tensors.

torch runs such a layer on DTensors, and Python works out the placement of each operation's result: on the host, a
layer takes several times what its kernels take on the device, and the host is what steps of middle size wait for. The
placements of a layer that is split by columns or by rows are known beforehand: a product of local tensors, and a sum
over the ranks, of the input's gradient or of the output.

Megatron-LM (Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053) calls these sums f and g. They are the collectives
of torch's own layers, in the same order and number, so that ranks may differ in which of the two they run.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from liger_chunked.kernels.backend import first_derivative


def parallel_linear(x: Tensor, weight: Any, bias: Any) -> Tensor:
    """Return what `nn.Linear` returns between the hooks of `ColwiseParallel` or `RowwiseParallel`.

        columns: y = x @ W_r.T + b_r                    dx = sum over ranks of dy_r @ W_r
        rows:    y = sum over ranks of x_r @ W_r.T      dx_r = dy @ W_r

    The sum of `dx` runs while `dW_r = dy.T @ x` is computed. Second derivatives raise a RuntimeError.

    Args:
        x: (..., H), the same on all ranks; or (..., H_r), this rank's part of the columns.
        weight: a DTensor (O, H) on a mesh of one dimension, sharded on dim 0 (columns) or on dim 1 (rows).
        bias: a DTensor (O,), sharded like the weight's rows, or None. None for a weight that is split by rows.

    Returns:
        (..., O_r), this rank's part; or (..., O), the same on all ranks. A plain tensor.
    """
    y: Tensor = _Product.apply(x, weight, bias)
    if weight.placements[0].dim == 0:
        return y
    # On its own, so that a checkpoint that computes the product again does not compute the sum again.
    summed: Tensor = _Sum.apply(y, weight.device_mesh.get_group())
    return summed


class _Product(torch.autograd.Function):
    """The product on local tensors; for columns, its backward sums the input's gradient over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any, bias: Any) -> Tensor:
        needs_dx, needs_dw, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if needs_dw else None, weight if needs_dx else None)
        ctx.group = weight.device_mesh.get_group() if weight.placements[0].dim == 0 else None
        ctx.like = [None if p is None else (p.device_mesh, p.placements, p.shape, p.stride()) for p in (weight, bias)]
        return F.linear(x, weight.to_local(), None if bias is None else bias.to_local())

    @staticmethod
    @first_derivative
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        dx = dw = db = sum_of_ranks = None
        if weight is not None:
            dx = dy @ weight.to_local()
            if ctx.group is not None:
                sum_of_ranks = dist.all_reduce(dx, group=ctx.group, async_op=True)
        rows = _rows(dy)
        if x is not None:
            dw = _placed(rows.T @ _rows(x), *ctx.like[0])
        if ctx.needs_input_grad[2]:
            db = _placed(rows.sum(0), *ctx.like[1])
        if sum_of_ranks is not None:
            sum_of_ranks.wait()
        return dx, dw, db


class _Sum(torch.autograd.Function):
    """The sum over ranks of a product, in its memory. All ranks have the same gradient."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, group: Any) -> Tensor:
        ctx.mark_dirty(y)
        dist.all_reduce(y, group=group)
        return y

    @staticmethod
    @first_derivative
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy, None


def _rows(x: Tensor) -> Tensor:
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])


def _placed(local: Tensor, mesh: Any, placements: Any, shape: Any, stride: Any) -> Any:
    """Return this rank's part of a gradient as a DTensor."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
