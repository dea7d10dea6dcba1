"""The head's product with a fused epilogue that writes the gradient of the statistics, never logits.

    dz[n, v] = E (others - slope log2 E) + every,  v != y[n]       in the dtype of x;  z and E as in projection.py
    dz[n, y[n]] = target

The factors of rows follow from `project_exp` and the upstream gradients; `logits_grad.py` has the formula.

FLOPs: 2 N C H. Bytes: dz, x, W.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from liger_chunked.device import processors
from liger_chunked.kernels.backend import TensorDescriptor, jit, tl
from liger_chunked.kernels.launch import Kernel, is_collecting
from liger_chunked.kernels.projection import LOG2_E, LOG_2, Exponentials, _halves, _place, _product
from liger_chunked.kernels.tuning.hopper import EXPONENTIALS, EXPONENTIALS_WARPS, GRADIENT_ROWS, Tiling


class RowFactors(NamedTuple):
    """Factors of rows, (N,) float32 each, or None."""

    centre: Tensor
    others: Tensor
    target: Tensor
    slope: Tensor | None  # of the entropy
    every: Tensor | None  # of the mean logit

    def at(self, rows: slice | Tensor) -> RowFactors:
        slope, every = (None if f is None else f[rows] for f in (self.slope, self.every))
        return RowFactors(self.centre[rows], self.others[rows], self.target[rows], slope, every)


@Kernel
def _row_factors_kernel(
    centre_ptr, rest_ptr, target_exp_ptr, sum_exp_ptr, logps_ptr, lse_ptr, entropy_ptr, mean_logits_ptr,
    entropy_value_ptr, others_ptr, target_ptr, slope_ptr, every_ptr, n_tokens, scale, scale_over_vocab,
    BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < n_tokens
    sum_exp = tl.load(sum_exp_ptr + rows, mask=inside, other=1.0)
    target_exp = tl.load(target_exp_ptr + rows, mask=inside, other=1.0)
    p = target_exp / sum_exp
    others = tl.zeros([BLOCK], tl.float32)
    target = tl.zeros([BLOCK], tl.float32)
    if logps_ptr is not None:
        g = tl.load(logps_ptr + rows, mask=inside, other=0.0) * scale
        others -= g
        target += g * (tl.load(rest_ptr + rows, mask=inside, other=0.0) / sum_exp)
    if lse_ptr is not None:
        g = tl.load(lse_ptr + rows, mask=inside, other=0.0) * scale
        others += g
        target += g * p
    if entropy_ptr is not None:
        # -g p (log p + entropy), with log p = log E - log sum
        g = tl.load(entropy_ptr + rows, mask=inside, other=0.0) * scale
        shift = tl.load(entropy_value_ptr + rows, mask=inside, other=0.0) - tl.log(sum_exp)
        others -= g * shift
        target -= tl.where(p == 0.0, 0.0, g * p * (tl.log(target_exp) + shift))
        tl.store(slope_ptr + rows, g * LOG_2 / sum_exp, mask=inside)
    if mean_logits_ptr is not None:
        g = tl.load(mean_logits_ptr + rows, mask=inside, other=0.0) * scale_over_vocab
        target += g
        tl.store(every_ptr + rows, g, mask=inside)
    tl.store(others_ptr + rows, others / sum_exp, mask=inside)
    tl.store(target_ptr + rows, target, mask=inside)


def row_factors(
    exponentials: Exponentials, entropy_value: Tensor | None, gradients: dict[str, Tensor], scale: float, vocab: int
) -> RowFactors:
    """Return the factors for upstream `gradients`."""
    centre = exponentials.centre
    n = centre.shape[0]

    def wanted(name: str) -> Tensor | None:
        return torch.empty_like(centre) if name in gradients else None

    others, target = torch.empty_like(centre), torch.empty_like(centre)
    factors = RowFactors(centre, others, target, wanted("entropy"), wanted("mean_logits"))
    upstream = tuple(map(gradients.get, ("logps", "lse", "entropy", "mean_logits")))
    _row_factors_kernel(
        (-(-n // GRADIENT_ROWS), 1, 1),
        (*exponentials[1:5], *upstream, entropy_value, *factors[1:]),
        (n, scale, scale / vocab, GRADIENT_ROWS),
        num_warps=4,
    )
    return factors


@jit
def _gradient(
    z, cols, local, has_target, centre, others, at_target, slope, every, scale,
    ENTROPY: tl.constexpr, MEAN: tl.constexpr,
):  # fmt: skip
    centred = tl.fma(z, scale, -centre[:, None])
    e = tl.exp2(centred)
    if ENTROPY:
        # 0 * -inf would be NaN.
        grad = e * (others[:, None] - slope[:, None] * tl.maximum(centred, -1e30))
    else:
        grad = e * others[:, None]
    if MEAN:
        grad += every[:, None]
    if has_target:
        grad = tl.where(cols[None, :] == local[:, None], at_target[:, None], grad)
    return grad


@Kernel
def _project_grad_kernel(
    x_desc, w_desc, grad_desc, target_ptr, centre_ptr, others_ptr, at_target_ptr, slope_ptr, every_ptr,
    n_tokens, n_cols, hidden, vocab_start, scale,
    ROWS: tl.constexpr, COLS: tl.constexpr, INNER: tl.constexpr, GROUP: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    row_blocks = tl.cdiv(n_tokens, ROWS)
    col_blocks = tl.cdiv(n_cols, COLS)
    group_size = GROUP * col_blocks
    for block in tl.range(tl.program_id(0), row_blocks * col_blocks, PROGRAMS, flatten=True):
        row_block, col_block = _place(block, row_blocks, group_size, GROUP)
        acc = _product(x_desc, w_desc, row_block, col_block, hidden, ROWS, COLS, INNER)
        first_row = row_block * ROWS
        first_col = col_block * COLS
        rows = first_row + tl.arange(0, ROWS)
        inside = rows < n_tokens
        local = (tl.load(target_ptr + rows, mask=inside, other=-1) - vocab_start).to(tl.int32)
        centre = tl.load(centre_ptr + rows, mask=inside, other=0.0) * LOG2_E
        others = tl.load(others_ptr + rows, mask=inside, other=0.0)
        at_target = tl.load(at_target_ptr + rows, mask=inside, other=0.0)
        slope = others
        every = others
        if slope_ptr is not None:
            slope = tl.load(slope_ptr + rows, mask=inside, other=0.0)
        if every_ptr is not None:
            every = tl.load(every_ptr + rows, mask=inside, other=0.0)
        has_target = tl.max(((local >= first_col) & (local < first_col + COLS)).to(tl.int32), axis=0) != 0
        half: tl.constexpr = COLS // 2
        left, right = _halves(acc, ROWS, COLS)
        cols = first_col + tl.arange(0, half)
        left = _gradient(
            left, cols, local, has_target, centre, others, at_target, slope, every, scale * LOG2_E,
            slope_ptr is not None, every_ptr is not None,
        )  # fmt: skip
        grad_desc.store([first_row, first_col], left.to(grad_desc.dtype))
        right = _gradient(
            right, cols + half, local, has_target, centre, others, at_target, slope, every, scale * LOG2_E,
            slope_ptr is not None, every_ptr is not None,
        )  # fmt: skip
        grad_desc.store([first_row, first_col + half], right.to(grad_desc.dtype))


def project_grad(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    factors: RowFactors,
    out: Tensor,
    scale: float,
    vocab_start: int = 0,
    tiling: Tiling | None = None,
) -> Tensor:
    """Write the gradient of a tile's logits to `out`.

    Args:
        x, weight, out, scale: as in `project_exp`, for a weight (C, H).
        target: (N,) int64, in the whole vocabulary, whose ids `vocab_start : vocab_start + C` are those of `weight`.
    """
    n, hidden = x.shape
    n_cols = weight.shape[0]
    if (x.is_meta and not is_collecting()) or not n_cols:  # nothing to compute
        return out
    tiling = tiling or Tiling.of(hidden)
    blocks = -(-n // tiling.rows) * -(-n_cols // tiling.cols)
    programs = min(tiling.programs * processors(x.device), blocks)
    _project_grad_kernel(
        (programs, 1, 1),
        (target, *factors),
        (n, n_cols, hidden, vocab_start, scale, tiling.rows, tiling.cols, tiling.inner, tiling.group, programs),
        tiling.num_warps,
        tiling.stages,
        (
            TensorDescriptor.from_tensor(x, [tiling.rows, tiling.inner]),
            TensorDescriptor.from_tensor(weight, [tiling.cols, tiling.inner]),
            TensorDescriptor.from_tensor(out, [tiling.rows, tiling.cols // 2]),
        ),
    )
    return out


@Kernel
def _from_exponentials_kernel(
    exp_ptr, exp_stride, rows_ptr, target_ptr, scale_ptr, others_ptr, at_target_ptr, every_ptr,
    n_tokens, n_cols, vocab_start, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    places = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    inside = places < n_tokens
    rows = places
    if rows_ptr is not None:
        rows = tl.load(rows_ptr + places, mask=inside, other=-1)
        inside = rows >= 0
        if tl.max(rows, axis=0) < 0:
            return
    local = (tl.load(target_ptr + rows, mask=inside, other=-1) - vocab_start).to(tl.int32)
    others = tl.load(others_ptr + rows, mask=inside, other=0.0)
    at_target = tl.load(at_target_ptr + rows, mask=inside, other=0.0)
    if scale_ptr is not None:
        others *= tl.load(scale_ptr + rows, mask=inside, other=0.0)
    mask = inside[:, None] & (cols < n_cols)[None, :]
    e = tl.load(exp_ptr + rows.to(tl.int64)[:, None] * exp_stride + cols[None, :], mask=mask, other=0.0)
    grad = e.to(tl.float32) * others[:, None]
    if every_ptr is not None:
        grad += tl.load(every_ptr + rows, mask=inside, other=0.0)[:, None]
    grad = tl.where(cols[None, :] == local[:, None], at_target[:, None], grad)
    out = exp_ptr + places.to(tl.int64)[:, None] * exp_stride + cols[None, :]
    tl.store(out, grad.to(tl.bfloat16), mask=mask)


def grad_from_exponentials_(
    exponentials: Tensor,
    target: Tensor,
    factors: RowFactors,
    values_scale: Tensor | None,
    vocab_start: int = 0,
    live: Tensor | None = None,
) -> Tensor:
    """Replace a tile's exponentials by its logits' gradient. `live` is as in `logits_grad_`.

    Without the entropy's: exponentials are rounded, and `log p + entropy` may cancel.
    """
    assert factors.slope is None
    n, n_cols = exponentials.shape
    rows, cols = EXPONENTIALS
    if n_cols:
        _from_exponentials_kernel(
            (-(-n // rows), -(-n_cols // cols), 1),
            (exponentials, live, target, values_scale, factors.others, factors.target, factors.every),
            (exponentials.stride(0), n, n_cols, vocab_start, rows, cols),
            num_warps=EXPONENTIALS_WARPS,
        )
    return exponentials
