"""The head's product with a fused epilogue that writes exponentials, never logits.

    z = scale x W^T                                       float32, in registers
    E[n, v] = exp(z[n, v] - c[n]),  E[n, y[n]] = 0        bfloat16
    rest[n] = sum_{v != y} exp(z[n, v] - c[n])            float32, from unrounded terms

`rest` excludes the target: `1 - p_y = rest/sum` does not cancel. The centre `c` is the target's logit, or the row's
maximum if that is 44 nats higher. Far from the maximum, entropies and their slopes have errors of up to 8e-6.
A rank of a split vocabulary without the target takes another row's logit (`merge_ranks.py`).

FLOPs: 2 N V H. Bytes: E, x, W, and partial sums: 4 N V / `Tiling.cols` per statistic.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from liger_chunked.device import processors
from liger_chunked.kernels.backend import TensorDescriptor, block_size, exp2, factor, jit, log1p, tl
from liger_chunked.kernels.launch import Kernel, is_collecting
from liger_chunked.kernels.operands import along
from liger_chunked.kernels.transform import load_block
from liger_chunked.kernels.tuning import TUNING
from liger_chunked.kernels.tuning.hopper import REDUCE_WARPS, REDUCED, Tiling
from liger_chunked.types import TokenStats

LOG2_E = 1.4426950408889634 if tl is None else tl.constexpr(1.4426950408889634)
LOG_2 = 0.6931471805599453 if tl is None else tl.constexpr(0.6931471805599453)
# Products of a sum with weights, and gradients over it, fit in float32.
LARGEST_SUM = 2.0**64 if tl is None else tl.constexpr(2.0**64)


class Exponentials(NamedTuple):
    """A chunk's softmax before normalisation; (N,) float32, except `values`."""

    values: Tensor | None  # E, (N, V) bfloat16
    centre: Tensor
    rest: Tensor
    target_exp: Tensor
    sum_exp: Tensor  # rest + target_exp
    values_scale: Tensor | None = None  # of a rank's `values`, see `merge_ranks.py`


@jit
def _product(x_desc, w_desc, row_block, col_block, hidden, ROWS: tl.constexpr, COLS: tl.constexpr, INNER: tl.constexpr):
    acc = tl.zeros((ROWS, COLS), tl.float32)
    for k in range(tl.cdiv(hidden, INNER)):
        x = x_desc.load([row_block * ROWS, k * INNER])
        w = w_desc.load([col_block * COLS, k * INNER])
        acc = tl.dot(factor(x), factor(w).T, acc)
    return acc


@jit
def _place(block, row_blocks, group_size, GROUP: tl.constexpr):
    """Return a block's row and column."""
    # GROUP blocks of rows take turns at a block of columns, so that they read its weights from the L2 cache.
    first = block // group_size * GROUP
    height = min(row_blocks - first, GROUP)
    return first + block % group_size % height, block % group_size // height


@jit
def _halves(acc, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Split columns: half tiles leave shared memory for loads."""
    return tl.split(tl.permute(tl.reshape(acc, (ROWS, 2, COLS // 2)), (0, 2, 1)))


@jit
def _write_part(
    z, cols, exp_desc, first_row, first_col, target, centre, n_cols, scale, MASKED: tl.constexpr, MOMENT: tl.constexpr,
):  # fmt: skip
    """Write exponentials `e`; return the row sums of `e` and `e log2 e`."""
    centred = tl.fma(z, scale, -centre[:, None])
    e = exp2(centred)
    if MASKED:
        e = tl.where((cols[None, :] != target[:, None]) & (cols < n_cols)[None, :], e, 0.0)
    if exp_desc is not None:
        exp_desc.store([first_row, first_col], e.to(tl.bfloat16))  # float16 ends at exp(11)
    moment = centre
    if MOMENT:
        # 0 * -inf would be NaN.
        moment = tl.sum(e * tl.maximum(centred, -1e30), axis=1)
    return tl.sum(e, axis=1), moment


@jit
def _write_halves(
    acc, exp_desc, first_row, first_col, target, centre, n_cols, scale,
    ROWS: tl.constexpr, COLS: tl.constexpr, MASKED: tl.constexpr, MOMENT: tl.constexpr,
):  # fmt: skip
    half: tl.constexpr = COLS // 2
    left, right = _halves(acc, ROWS, COLS)
    cols = first_col + tl.arange(0, half)
    rest, moment = _write_part(
        left, cols, exp_desc, first_row, first_col, target, centre, n_cols, scale, MASKED, MOMENT
    )
    more_rest, more_moment = _write_part(
        right, cols + half, exp_desc, first_row, first_col + half, target, centre, n_cols, scale, MASKED, MOMENT
    )
    return rest + more_rest, moment + more_moment


@jit
def _write_block(
    acc, exp_desc, row_block, col_block, target_ptr, centre_ptr, rest_ptr, moment_ptr,
    n_tokens, part_stride, n_cols, scale, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    first_row = row_block * ROWS
    first_col = col_block * COLS
    rows = first_row + tl.arange(0, ROWS)
    inside = rows < n_tokens
    part = col_block * part_stride + rows  # fits 32 bits
    target = tl.load(target_ptr + rows, mask=inside, other=-1).to(tl.int32)
    centre = tl.load(centre_ptr + rows, mask=inside, other=0.0) * LOG2_E
    scale = scale * LOG2_E
    # Other tiles need no mask.
    targets = tl.max(((target >= first_col) & (target < first_col + COLS)).to(tl.int32), axis=0)
    if (targets != 0) | (first_col + COLS > n_cols):
        rest, moment = _write_halves(
            acc, exp_desc, first_row, first_col, target, centre, n_cols, scale,
            ROWS, COLS, True, moment_ptr is not None,
        )  # fmt: skip
    else:
        rest, moment = _write_halves(
            acc, exp_desc, first_row, first_col, target, centre, n_cols, scale,
            ROWS, COLS, False, moment_ptr is not None,
        )  # fmt: skip
    tl.store(rest_ptr + part, rest)
    if moment_ptr is not None:
        tl.store(moment_ptr + part, moment)


@Kernel
def _project_kernel(
    x_desc, w_desc, exp_desc, target_ptr, centre_ptr, rest_ptr, moment_ptr, n_tokens, part_stride, n_cols, hidden,
    scale, ROWS: tl.constexpr, COLS: tl.constexpr, INNER: tl.constexpr, GROUP: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    # One loop over tiles and H: a tile's epilogue overlaps the next loads.
    row_blocks = tl.cdiv(n_tokens, ROWS)
    col_blocks = tl.cdiv(n_cols, COLS)
    group_size = GROUP * col_blocks
    for block in tl.range(tl.program_id(0), row_blocks * col_blocks, PROGRAMS, flatten=True):
        row_block, col_block = _place(block, row_blocks, group_size, GROUP)
        acc = _product(x_desc, w_desc, row_block, col_block, hidden, ROWS, COLS, INNER)
        _write_block(
            acc, exp_desc, row_block, col_block, target_ptr, centre_ptr, rest_ptr, moment_ptr,
            n_tokens, part_stride, n_cols, scale, ROWS, COLS,
        )  # fmt: skip


@jit
def _out_of_reach(sum_exp_ptr, rows, n_tokens):
    """Return 1 for NaN or rows far above their centre."""
    sum_exp = tl.load(sum_exp_ptr + rows, mask=rows < n_tokens, other=1.0)
    return tl.where(sum_exp <= LARGEST_SUM, 0, 1)


@Kernel
def _rescue_kernel(
    x_desc, w_desc, exp_desc, target_ptr, centre_ptr, rest_ptr, moment_ptr, n_tokens, part_stride, n_cols, hidden,
    scale, sum_exp_ptr,
    ROWS: tl.constexpr, COLS: tl.constexpr, INNER: tl.constexpr, RAISE: tl.constexpr,
):  # fmt: skip
    # RAISE lost rows' centres, or write their blocks again.
    row_block = tl.program_id(0)
    rows = row_block * ROWS + tl.arange(0, ROWS)
    lost = _out_of_reach(sum_exp_ptr, rows, n_tokens)
    if tl.max(lost, axis=0) == 0:
        return
    for col_block in tl.range(tl.program_id(1), tl.cdiv(n_cols, COLS), tl.num_programs(1)):
        acc = _product(x_desc, w_desc, row_block, col_block, hidden, ROWS, COLS, INNER)
        if RAISE:
            cols = col_block * COLS + tl.arange(0, COLS)
            top = tl.max(tl.where((cols < n_cols)[None, :], acc * scale, -float("inf")), axis=1)
            # Maxima need no order.
            tl.atomic_max(centre_ptr + rows, top, mask=lost != 0)
        else:
            _write_block(
                acc, exp_desc, row_block, col_block, target_ptr, centre_ptr, rest_ptr, moment_ptr,
                n_tokens, part_stride, n_cols, scale, ROWS, COLS,
            )  # fmt: skip


@Kernel
def _centre_kernel(
    x_ptr, x_stride, w_ptr, w_stride, weight_sum_ptr, target_ptr, target_logit_ptr, centre_ptr, mean_ptr,
    n_cols, vocab_size, hidden, scale, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + row)
    is_here = target >= 0
    # Any logit of the row: its sum is then at least 1.
    target = tl.where(is_here, target, row % n_cols)
    dot = tl.zeros([BLOCK], tl.float32)
    sum_dot = tl.zeros([BLOCK], tl.float32)
    for start in range(0, hidden, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = load_block(x_ptr + row * x_stride, cols, hidden, False)
        w = load_block(w_ptr + target * w_stride, cols, hidden, False)
        dot += x * w
        if weight_sum_ptr is not None:
            sum_dot += x * load_block(weight_sum_ptr, cols, hidden, False)
    if mean_ptr is not None:
        tl.store(mean_ptr + row, tl.sum(sum_dot, axis=0) * scale / vocab_size)
    centre = tl.sum(dot, axis=0) * scale
    tl.store(target_logit_ptr + row, tl.where(is_here, centre, -float("inf")))
    tl.store(centre_ptr + row, centre)


@jit
def _sum_parts(part_ptr, rows, part_stride, n_parts, ROWS: tl.constexpr, PARTS: tl.constexpr):
    total = tl.zeros((PARTS, ROWS), tl.float32)
    for start in range(0, n_parts, PARTS):
        part = start + tl.arange(0, PARTS)
        total += tl.load(
            part_ptr + part[:, None] * part_stride + rows[None, :], mask=(part < n_parts)[:, None], other=0.0
        )
    return tl.sum(total, axis=0)


@jit
def _finish(rows, inside, centre, rest, e, below, sum_exp, moment, logps_ptr, lse_ptr, entropy_ptr):
    """Store statistics. `below` is the target's logit relative to the centre, `e` its exponential."""
    log_sum = tl.log(sum_exp)
    if logps_ptr is not None:
        # Exact for large logits and near certainty, unlike target_logit - lse.
        others = rest / tl.where(e == 0.0, 1.0, e)
        tl.store(logps_ptr + rows, tl.where(others < e, -log1p(others), below - log_sum), mask=inside)
    if lse_ptr is not None:
        tl.store(lse_ptr + rows, centre + log_sum, mask=inside)
    if entropy_ptr is not None:
        moment += tl.where(e == 0.0, 0.0, e * below)
        entropy = log_sum - moment / sum_exp
        tl.store(entropy_ptr + rows, tl.where(entropy < 0.0, 0.0, entropy), mask=inside)  # keeps NaN


@Kernel
def _reduce_kernel(
    rest_part_ptr, moment_part_ptr, centre_ptr, target_logit_ptr,
    rest_ptr, target_exp_ptr, sum_exp_ptr, logps_ptr, lse_ptr, entropy_ptr, n_tokens, part_stride, n_parts,
    ROWS: tl.constexpr, PARTS: tl.constexpr, AGAIN: tl.constexpr, FINISH: tl.constexpr,
):  # fmt: skip
    # `entropy_ptr` gets the moment of all columns but the target, unless FINISH.
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < n_tokens
    if AGAIN:
        if tl.max(_out_of_reach(sum_exp_ptr, rows, n_tokens), axis=0) == 0:
            return
    centre = tl.load(centre_ptr + rows, mask=inside, other=0.0)
    below = tl.load(target_logit_ptr + rows, mask=inside, other=0.0) - centre
    e = tl.exp2(below * LOG2_E)
    rest = _sum_parts(rest_part_ptr, rows, part_stride, n_parts, ROWS, PARTS)
    sum_exp = rest + e
    tl.store(rest_ptr + rows, rest, mask=inside)
    tl.store(target_exp_ptr + rows, e, mask=inside)
    tl.store(sum_exp_ptr + rows, sum_exp, mask=inside)
    moment = rest
    if entropy_ptr is not None:
        moment = _sum_parts(moment_part_ptr, rows, part_stride, n_parts, ROWS, PARTS) * LOG_2
    if FINISH:
        _finish(rows, inside, centre, rest, e, below, sum_exp, moment, logps_ptr, lse_ptr, entropy_ptr)
    elif entropy_ptr is not None:
        tl.store(entropy_ptr + rows, moment, mask=inside)


def project_exp(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    weight_sum: Tensor | None,
    out: Tensor | None,
    scale: float,
    outputs: tuple[str, ...],
    tiling: Tiling | None = None,
    out_start: tuple[int, int] = (0, 0),
) -> tuple[Exponentials, TokenStats]:
    """Return the exponentials and statistics `outputs` of a chunk.

    Args:
        x, weight: (N, H) and (V, H) bfloat16, or float16 without `out`; contiguous, 16-byte aligned, H a multiple of 8.
        weight_sum: (H,) float32 sum over V, for "mean_logits".
        out: (N, V) bfloat16 for E, its row stride a multiple of 8, or None.
        out_start: where `out` starts in E; both end together. Multiples of `tiling.rows` and `tiling.cols`.
        scale: not zero.
        outputs: any of "logps", "lse", "entropy", "mean_logits".
    """
    n = x.shape[0]
    stats = TokenStats(**{name: _buffer(x, n) for name in outputs})
    assert (stats.mean_logits is None) == (weight_sum is None)
    # One allocation: the GPU waits for the host.
    rows = _buffer(x, 5, _aligned(n))[:, :n].unbind()
    _project(x, weight, target, weight_sum, out, scale, weight.shape[0], rows, stats, True, tiling, out_start)
    return Exponentials(out, *rows[:4]), stats


class RowSums(NamedTuple):
    """Sums over a rank's part of the vocabulary, (N,) float32."""

    centre: Tensor
    rest: Tensor
    target_logit: Tensor  # -inf if another rank has it
    moment: Tensor | None  # sum_{v != y} exp(z - c) (z - c), for the entropy
    mean_logits: Tensor | None  # sum over the part, divided by the size of the vocabulary


def row_sums(packed: Tensor, n: int, outputs: tuple[str, ...]) -> RowSums:
    """Return views of (..., fields, at least N)."""
    fields = iter(packed[..., :n].unbind(-2))
    wanted = (True, True, True, "entropy" in outputs, "mean_logits" in outputs)
    return RowSums(*(next(fields) if one else None for one in wanted))  # type: ignore[arg-type]


def project_sums(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    weight_sum: Tensor | None,
    out: Tensor | None,
    scale: float,
    outputs: tuple[str, ...],
    vocab_size: int,
    tiling: Tiling | None = None,
    out_start: tuple[int, int] = (0, 0),
) -> Tensor:
    """Run `project_exp` on a rank's part of a vocabulary of `vocab_size`. Return its packed `RowSums`.

    The weight may have no rows.
    """
    n = x.shape[0]
    packed = _buffer(x, 3 + ("entropy" in outputs) + ("mean_logits" in outputs), _aligned(n))
    sums = row_sums(packed, n, outputs)
    if not weight.shape[0]:
        packed.zero_()
        packed[0:3:2] = -float("inf")
        return packed
    target_exp, sum_exp = _buffer(x, 2, _aligned(n))[:, :n].unbind()
    stats = TokenStats(entropy=sums.moment, mean_logits=sums.mean_logits)
    rows = sums.centre, sums.rest, target_exp, sum_exp, sums.target_logit
    _project(x, weight, target, weight_sum, out, scale, vocab_size, rows, stats, False, tiling, out_start)
    return packed


def _buffer(x: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=x.device)


def _aligned(n: int) -> int:
    return -(-n // 4) * 4


def _project(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    weight_sum: Tensor | None,
    out: Tensor | None,
    scale: float,
    vocab_size: int,
    rows: Sequence[Tensor],
    stats: TokenStats,
    finish: bool,
    tiling: Tiling | None = None,
    out_start: tuple[int, int] = (0, 0),
) -> None:
    """Write `rows`: centre, rest, target_exp, sum_exp and the target's logit. Fill `stats`."""
    n, hidden = x.shape
    n_cols = weight.shape[0]
    tiling = tiling or Tiling.of(hidden, heavy=out is not None and stats.entropy is not None)
    n_parts = -(-n_cols // tiling.cols)
    centre, rest, target_exp, sum_exp, target_logit = rows
    part_stride = -(-n // tiling.rows) * tiling.rows  # padded: no masks, and vector loads for every n
    parts = _buffer(x, n_parts * part_stride)
    moments = None if stats.entropy is None else _buffer(x, n_parts * part_stride)
    if x.is_meta and not is_collecting():  # nothing to compute
        return
    most, num_warps = TUNING[x.device].hidden
    _centre_kernel(
        (n, 1, 1),
        (x, weight, weight_sum, target, target_logit, centre, stats.mean_logits),
        (x.stride(0), weight.stride(0), n_cols, vocab_size, hidden, scale, block_size(hidden, most)),
        num_warps,
    )
    blocks = tiling.rows, tiling.cols, tiling.inner
    launch = tiling.num_warps, tiling.stages
    rescues = []
    for part, cols, of_out in _regions(n, n_cols, out, out_start):
        of_x, of_weight, of_target = along(x, part), along(weight, cols), along(target, part)
        if cols.start:
            of_target = of_target - cols.start
        first = cols.start // tiling.cols * part_stride + part.start
        sums = (None if p is None else along(p, slice(first, p.shape[0])) for p in (parts, moments))
        tensors = of_target, along(centre, part), *sums
        numbers = of_x.shape[0], part_stride, of_weight.shape[0], hidden, scale, *blocks
        descriptors = (
            TensorDescriptor.from_tensor(of_x, [tiling.rows, tiling.inner]),
            TensorDescriptor.from_tensor(of_weight, [tiling.cols, tiling.inner]),
            None if of_out is None else TensorDescriptor.from_tensor(of_out, [tiling.rows, tiling.cols // 2]),
        )
        row_blocks, col_blocks = -(-of_x.shape[0] // tiling.rows), -(-of_weight.shape[0] // tiling.cols)
        programs = min(tiling.programs * processors(x.device), row_blocks * col_blocks)
        _project_kernel((programs, 1, 1), tensors, (*numbers, tiling.group, programs), *launch, descriptors)
        rescuers = max(1, min(processors(x.device) // row_blocks, col_blocks))
        rescues.append(((row_blocks, rescuers, 1), (*tensors, along(sum_exp, part)), numbers, descriptors))

    def reduce(again: bool) -> None:
        _reduce_kernel(
            (-(-n // REDUCED[0]), 1, 1),
            (parts, moments, centre, target_logit, rest, target_exp, sum_exp, stats.logps, stats.lse, stats.entropy),
            (n, part_stride, n_parts, *REDUCED, again, finish),
            REDUCE_WARPS,
        )

    reduce(again=False)
    for raise_centres in (True, False):
        for grid, tensors, numbers, descriptors in rescues:
            _rescue_kernel(grid, tensors, (*numbers, raise_centres), *launch, descriptors)
    reduce(again=True)


def _regions(
    n: int, n_cols: int, out: Tensor | None, out_start: tuple[int, int]
) -> list[tuple[slice, slice, Tensor | None]]:
    """Cut off `out`: a kernel that writes exponentials is slower."""
    row, col = (n, 0) if out is None else out_start
    found = (
        (slice(0, n), slice(0, col), None),
        (slice(0, row), slice(col, n_cols), None),
        (slice(row, n), slice(col, n_cols), out),
    )
    return [region for region in found if all(part.start < part.stop for part in region[:2])]
