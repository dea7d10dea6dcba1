"""The bound of each row from which a sampler keeps logits: `top_k`, then `top_p`, then `min_p`, without sorting.

    top_k    the largest t with  #(z_v >= t) >= top_k                                   the k-th largest logit
    top_p    the smallest t with  mass(t) > (1 - top_p) mass(max z)
             mass(t) = sum of e_v with z_v <= t,   e_v = exp(scale (z_v - max z)), 0 below the bound of `top_k`
    min_p    the smallest t with  scale t >= scale max z + log(min_p)                   scale > 0

A filter takes the bound of the one before it if that is larger. These are the ids that sorting finds: in falling order,
an id stays under `top_p` if those from it on have more than `1 - top_p`. Equal logits stay or go together. Masses are
sums of the small probabilities, because a sum from the largest reaches 1 too early.

A program bisects one row. All its sums add in one order, which no other row changes, so that the bits of the result
depend on the row alone. Sums of more terms that are not negative, in one order, are not smaller: bisection needs that.

`top_k` starts from the first sweep, which keeps the largest logit of each lane: at least k logits are as large as the
k-th largest of these. That one is usually the bound, because few of the k largest logits share a lane, and one more
sweep shows it. Otherwise steps upwards double until one is too far.

`top_p` halves the values that are left, or the numbers of the dtype among these. Halving values alone takes long near
0, where numbers are dense, and halving numbers alone takes long across 0.

`min_p` reads no logit but the largest: a rounded product with `scale` is no smaller for a larger number.

Bytes: the row read twice for `top_k`, once for `min_p`, and for `top_p` about a dozen times in 16 bits and 30 times in
float32.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from liger_chunked.kernels.backend import block_size, exp2, jit, tl
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
def _smallest_number(SPARE: tl.constexpr):
    """Return `_number_of(-inf)`."""
    return tl.full([], -(0x7F800000 >> SPARE) - 1, tl.int32)


@jit
def _between(low, high):
    """Return the number halfway; the sum of both may overflow."""
    return (low & high) + ((low ^ high) >> 1)


@jit
def _load(row_ptr, cols, n_cols, WHOLE: tl.constexpr):
    """Load a block in float32; unless WHOLE, -inf past the row, which has no mass."""
    if WHOLE:  # a mask would make loads narrow
        z = tl.load(row_ptr + cols)
    else:
        z = tl.load(row_ptr + cols, mask=cols < n_cols, other=-float("inf"))
    return z.to(tl.float32)


@jit
def _largest_of_lanes(row_ptr, n_cols, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """Return [BLOCK], the largest logit of every BLOCK-th column, -inf without one."""
    largest = tl.full([BLOCK], -float("inf"), tl.float32)
    lanes = tl.arange(0, BLOCK)
    whole_blocks = n_cols // BLOCK * BLOCK
    for start in tl.range(0, whole_blocks, BLOCK, num_stages=STAGES):
        largest = tl.maximum(largest, _load(row_ptr, start + lanes, n_cols, True))
    if whole_blocks < n_cols:
        largest = tl.maximum(largest, _load(row_ptr, whole_blocks + lanes, n_cols, False))
    return largest


@jit
def _count(row_ptr, n_cols, lowest, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """Return how many logits are `lowest` or larger. `lowest` is above -inf, which lanes past the row have."""
    total = tl.zeros([BLOCK], tl.int32)
    lanes = tl.arange(0, BLOCK)
    whole_blocks = n_cols // BLOCK * BLOCK
    for start in tl.range(0, whole_blocks, BLOCK, num_stages=STAGES):
        total += (_load(row_ptr, start + lanes, n_cols, True) >= lowest).to(tl.int32)
    if whole_blocks < n_cols:
        total += (_load(row_ptr, whole_blocks + lanes, n_cols, False) >= lowest).to(tl.int32)
    return tl.sum(total, axis=0)


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
def _bound_of_top_k(
    row_ptr, n_cols, largest, top, k, SPARE: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    """Return the number of the k-th largest logit. `largest` is of lanes, `top` the number of the largest of all."""
    of_lanes = _number_of(largest, SPARE)
    is_few = k <= BLOCK
    gone = top + 1  # as large is no logit
    # Reads nothing: the k-th largest of the lanes. As large as the smallest are all, at least k.
    kept = tl.where(is_few, tl.min(of_lanes, axis=0), _smallest_number(SPARE))
    beyond = tl.where(is_few, gone, kept)
    while kept < beyond - 1:
        middle = _between(kept, beyond)
        is_kept = tl.sum((of_lanes >= middle).to(tl.int32), axis=0) >= k
        kept = tl.where(is_kept, middle, kept)
        beyond = tl.where(is_kept, beyond, middle)
    step = tl.where(is_few, 1, 1 << 30)  # many logits are halved at once
    while kept < gone - 1:
        middle = _between(kept, gone)
        middle = tl.where(middle - kept > step, kept + step, middle)
        is_kept = _count(row_ptr, n_cols, _value_of(middle, SPARE), BLOCK, STAGES) >= k
        kept = tl.where(is_kept, middle, kept)
        gone = tl.where(is_kept, gone, middle)
        step = tl.minimum(step, 1 << 29) * 2
    return kept


@jit
def _bound_of_top_p(
    row_ptr, n_cols, lowest, top, scale, left, reach, SPARE: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr
):
    """Return the number of the smallest logit that `top_p` keeps of those from `lowest` on."""
    # Logits further below the maximum have too little mass, all together.
    floor = tl.maximum(top - reach / scale, lowest)
    limit = left * _mass(row_ptr, n_cols, lowest, top, top, scale, BLOCK, STAGES)
    below = _number_of(floor, SPARE) - 1  # has too little mass
    found = _number_of(top, SPARE)  # has enough, or the row is not finite
    step = 0
    while below < found - 1:
        middle = _between(below, found)
        if step % 2 == 0:
            number = _number_of(0.5 * _value_of(below, SPARE) + 0.5 * _value_of(found, SPARE), SPARE)
            middle = tl.where((number > below) & (number < found), number, middle)
        has_enough = _mass(row_ptr, n_cols, lowest, _value_of(middle, SPARE), top, scale, BLOCK, STAGES) > limit
        found = tl.where(has_enough, middle, found)
        below = tl.where(has_enough, below, middle)
        step += 1
    return found


@jit
def _bound_of_min_p(bound, top, scale, log_min_p, SPARE: tl.constexpr, DTYPE: tl.constexpr):
    """Return the smallest number from `bound` on that is near enough to `top`, once it is rounded to the dtype."""
    # A fused multiply-add of the logarithm would round once, and torch's formula rounds twice.
    limit = tl.fma(top, scale, 0.0) + log_min_p
    below = bound - 1
    found = _number_of(top, SPARE)
    while below < found - 1:
        middle = _between(below, found)
        # float16 lacks some of the numbers: small ones and very large ones.
        is_near = _value_of(middle, SPARE).to(DTYPE).to(tl.float32) * scale >= limit
        found = tl.where(is_near, middle, found)
        below = tl.where(is_near, below, middle)
    return found


@Kernel
def _bound_kernel(
    logits_ptr, scale_ptr, bound_ptr, logits_stride, n_cols, scale, top_k, left, reach, log_min_p,
    HAS_TOP_K: tl.constexpr, HAS_TOP_P: tl.constexpr, HAS_MIN_P: tl.constexpr, SPARE: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * logits_stride
    if scale_ptr is not None:
        scale = tl.load(scale_ptr + row)
    largest = _largest_of_lanes(row_ptr, n_cols, BLOCK, STAGES)
    top = tl.max(largest, axis=0)
    lowest = -float("inf")
    if HAS_TOP_K:
        bound = _bound_of_top_k(row_ptr, n_cols, largest, _number_of(top, SPARE), top_k, SPARE, BLOCK, STAGES)
        lowest = _value_of(bound, SPARE)
    if HAS_TOP_P:
        bound = _bound_of_top_p(row_ptr, n_cols, lowest, top, scale * LOG2_E, left, reach, SPARE, BLOCK, STAGES)
    if HAS_MIN_P:
        if not (HAS_TOP_K or HAS_TOP_P):
            bound = _smallest_number(SPARE)
        bound = _bound_of_min_p(bound, top, scale, log_min_p, SPARE, bound_ptr.dtype.element_ty)
    tl.store(bound_ptr + row, _value_of(bound, SPARE).to(bound_ptr.dtype.element_ty))


def sampling_bound(
    logits: Tensor,
    scale: float | Tensor = 1.0,
    *,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
) -> Tensor:
    """Return (N,), bounds in the dtype of `logits`: a sampler keeps the logits of a row from its bound on.

    Args:
        logits: (N, V) in bfloat16, float16 or float32, with contiguous rows.
        scale: positive factor of the logits, or (N,) float32 factors of the rows.
        top_k: at least 1. None: keep all.
        top_p: in (0, 1). None: keep all.
        min_p: in (0, 1]. None: keep all.
    """
    n, n_cols = logits.shape
    bound = logits.new_empty(n)
    if not n:
        return bound
    if top_k is not None and top_k >= n_cols:
        top_k = None
    if top_k is None and top_p is None and min_p is None:
        return bound.fill_(-math.inf)
    tuned = TUNING[logits.device]
    most, num_warps = tuned.sampling_bound
    left = 1.0 if top_p is None else 1.0 - top_p
    # `n_cols` exponentials of this distance have `left` together; with room for rounded sums.
    reach = 1.01 * math.log2(n_cols / left) + 1.0
    by_row = isinstance(scale, Tensor)
    _bound_kernel(
        (n, 1, 1),
        (logits, scale.contiguous() if isinstance(scale, Tensor) else None, bound),
        (logits.stride(0), n_cols, 1.0 if by_row else float(scale), top_k or 1, left, reach, math.log(min_p or 1.0),
         top_k is not None, top_p is not None, min_p is not None, _SPARE_BITS[logits.dtype],
         block_size(n_cols, most), tuned.loads_in_flight),
        num_warps,
    )  # fmt: skip
    return bound
