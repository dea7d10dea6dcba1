"""The smallest logit that `top_p` keeps, row by row and without sorting.

    e_v      = exp(scale (z_v - max z)),  0 below a row's bound     scale > 0
    mass(t)  = sum of e_v with z_v <= t
    smallest = the smallest logit t with mass(t) > (1 - top_p) mass(max z)

These are the ids that sorting finds: in falling order, an id stays if those from it on have more than `1 - top_p`.
Equal logits stay or go together. Masses are sums of the small probabilities, because a sum from the largest reaches 1
too early.

A program bisects one row. All its sums add in one order, which no other row changes, so that the bits of the result
depend on the row alone. Sums of more terms that are not negative, in one order, are not smaller: bisection needs that.

Each step halves the values that are left, or the numbers of the dtype among these. Halving values alone takes long near
0, where numbers are dense, and halving numbers alone takes long across 0.

Bytes: the row read about a dozen times in 16 bits, and 30 times in float32.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from liger_chunked.kernels.backend import block_size, exp2, jit, reciprocal, tl
from liger_chunked.kernels.launch import Kernel
from liger_chunked.kernels.projection import LOG2_E
from liger_chunked.kernels.tuning import TUNING

# Bits of a float32 that are zero in each number of the dtype. Bisection skips them.
_SPARE_BITS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}


@jit
def _number_of(z, SPARE: tl.constexpr):
    """Return an int32 in the order of float32 numbers, without `SPARE` low bits."""
    bits = z.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SPARE


@jit
def _value_of(number, SPARE: tl.constexpr):
    """Return the float32 of `_number_of`."""
    bits = number << SPARE
    # The bits left out of a negative number are ones in this order.
    bits = tl.where(number < 0, bits | ((1 << SPARE) - 1), bits)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@jit
def _load(row_ptr, cols, n_cols, WHOLE: tl.constexpr):
    """Load a block in float32; unless WHOLE, -inf past the row, which has no mass."""
    if WHOLE:  # a mask would make loads narrow
        z = tl.load(row_ptr + cols)
    else:
        z = tl.load(row_ptr + cols, mask=cols < n_cols, other=-float("inf"))
    return z.to(tl.float32)


@jit
def _masses(z, lowest, highest, top, scale):
    return tl.where((z >= lowest) & (z <= highest), exp2((z - top) * scale), 0.0)


@jit
def _mass(row_ptr, n_cols, lowest, highest, top, scale, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    total = tl.zeros([BLOCK], tl.float32)
    lanes = tl.arange(0, BLOCK)
    whole_blocks = n_cols // BLOCK * BLOCK
    for start in tl.range(0, whole_blocks, BLOCK, num_stages=STAGES):
        total += _masses(_load(row_ptr, start + lanes, n_cols, True), lowest, highest, top, scale)
    if whole_blocks < n_cols:
        total += _masses(_load(row_ptr, whole_blocks + lanes, n_cols, False), lowest, highest, top, scale)
    return tl.sum(total, axis=0)


@jit
def _largest(row_ptr, n_cols, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    top = tl.full([BLOCK], -float("inf"), tl.float32)
    lanes = tl.arange(0, BLOCK)
    whole_blocks = n_cols // BLOCK * BLOCK
    for start in tl.range(0, whole_blocks, BLOCK, num_stages=STAGES):
        top = tl.maximum(top, _load(row_ptr, start + lanes, n_cols, True))
    if whole_blocks < n_cols:
        top = tl.maximum(top, _load(row_ptr, whole_blocks + lanes, n_cols, False))
    return tl.max(top, axis=0)


@Kernel
def _smallest_kernel(
    logits_ptr, bound_ptr, temperature_ptr, smallest_ptr, logits_stride, n_cols, scale, left, reach,
    SPARE: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * logits_stride
    scale = scale * LOG2_E
    if temperature_ptr is not None:
        scale *= reciprocal(tl.load(temperature_ptr + row))
    top = _largest(row_ptr, n_cols, BLOCK, STAGES)
    # Logits further below the maximum have too little mass, all together.
    floor = top - reach / scale
    lowest = -float("inf")
    if bound_ptr is not None:
        lowest = tl.load(bound_ptr + row).to(tl.float32)
        floor = tl.maximum(floor, lowest)
    limit = left * _mass(row_ptr, n_cols, lowest, top, top, scale, BLOCK, STAGES)
    below = _number_of(floor, SPARE) - 1  # has too little mass
    found = _number_of(top, SPARE)  # has enough, or the row is not finite
    step = 0
    while below < found - 1:
        middle = (below & found) + ((below ^ found) >> 1)  # the sum of both may overflow
        if step % 2 == 0:
            number = _number_of(0.5 * _value_of(below, SPARE) + 0.5 * _value_of(found, SPARE), SPARE)
            middle = tl.where((number > below) & (number < found), number, middle)
        has_enough = _mass(row_ptr, n_cols, lowest, _value_of(middle, SPARE), top, scale, BLOCK, STAGES) > limit
        found = tl.where(has_enough, middle, found)
        below = tl.where(has_enough, below, middle)
        step += 1
    tl.store(smallest_ptr + row, _value_of(found, SPARE).to(smallest_ptr.dtype.element_ty))


def smallest_of_top_p(
    logits: Tensor, top_p: float, scale: float, temperature: Tensor | None = None, bound: Tensor | None = None
) -> Tensor:
    """Return (N,), each row's smallest logit that `top_p` keeps, in the dtype of `logits`.

    Args:
        logits: (N, V) in bfloat16, float16 or float32, with contiguous rows.
        top_p: in (0, 1).
        scale: positive factor of the logits.
        temperature: (N,) float32, divisors of the rows. None: none.
        bound: (N,) like `logits`: smaller logits of a row have no probability. None: all have one.
    """
    n, n_cols = logits.shape
    smallest = logits.new_empty(n)
    if not n:
        return smallest
    tuned = TUNING[logits.device]
    most, num_warps = tuned.top_p
    left = 1.0 - top_p
    # `n_cols` exponentials of this distance have `left` together; with room for rounded sums.
    reach = 1.01 * math.log2(n_cols / left) + 1.0
    _smallest_kernel(
        (n, 1, 1),
        (logits, *(None if x is None else x.contiguous() for x in (bound, temperature)), smallest),
        (logits.stride(0), n_cols, float(scale), left, reach, _SPARE_BITS[logits.dtype], block_size(n_cols, most),
         tuned.loads_in_flight),
        num_warps,
    )  # fmt: skip
    return smallest
