"""A linear layer that `parallelize_module` splits, on this rank's plain tensors.

torch runs such a layer on DTensors, and Python works out the placement of each operation's result: on the host, a
layer takes several times what its kernels take on the device, and the host is what steps of middle size wait for. The
placements of `ColwiseParallel` and `RowwiseParallel` are known beforehand: one product on local tensors, and one
all-reduce, of the input's gradient or of the output.

Megatron-LM (Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053) calls them f and g.
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

        columns: y = x @ W_r.T + b_r                          dx = sum over ranks of dy_r @ W_r
        rows:    y = (sum over ranks of x_r @ W_r.T) + b      dx_r = dy @ W_r

    The sum of `dx` runs while `dW_r = dy.T @ x` is computed. Second derivatives raise a RuntimeError.

    Args:
        x: (..., H), the same on all ranks; or (..., H_r), this rank's part of the columns.
        weight: a DTensor (O, H) on a mesh of one dimension, sharded on dim 0 (columns) or on dim 1 (rows).
        bias: a DTensor (O,), sharded like the weight's rows, or replicated; or None.

    Returns:
        (..., O_r), this rank's part; or (..., O), the same on all ranks. A plain tensor.
    """
    return _ParallelLinear.apply(x, weight, bias)


class _ParallelLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any, bias: Any) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        own_bias = None if bias is None else bias.to_local()
        if _splits_columns(weight):
            return F.linear(x, weight.to_local(), own_bias)
        y = F.linear(x, weight.to_local())
        dist.all_reduce(y, group=weight.device_mesh.get_group())
        return y if own_bias is None else y.add_(own_bias)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, weight, bias = ctx.saved_tensors
        needs_dx, needs_dw, needs_db = ctx.needs_input_grad
        dx = dw = db = sum_of_ranks = None
        if needs_dx:
            dx = dy @ weight.to_local()
            if _splits_columns(weight):
                sum_of_ranks = dist.all_reduce(dx, group=weight.device_mesh.get_group(), async_op=True)
        rows = dy.reshape(-1, dy.shape[-1])
        if needs_dw:
            dw = _placed_like(weight, rows.T @ x.reshape(-1, x.shape[-1]))
        if needs_db:
            db = _placed_like(bias, rows.sum(0))
        if sum_of_ranks is not None:
            sum_of_ranks.wait()
        return dx, dw, db


def _splits_columns(weight: Any) -> bool:
    """Whether ranks have parts of the output's columns, rather than of the input's."""
    return bool(weight.placements[0].dim == 0)


def _placed_like(parameter: Any, local: Tensor) -> Any:
    """Return this rank's part of a gradient as a DTensor."""
    from torch.distributed.tensor import DTensor

    mesh, placements = parameter.device_mesh, parameter.placements
    shape, stride = parameter.shape, parameter.stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
