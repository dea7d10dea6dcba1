"""The head's product with a fixed order of sums, for logits whose bits do not depend on the batch.

    logits[n, v] = x[n] . W[v] + b[v]      summed in float32, rounded once

A matrix library picks the tiles of a product, and how it splits its sums, by the number of rows. Here tiles have one
size for each H, a tile adds along H in one order, and no other sum is taken. So a row's logits depend on the row alone.

FLOPs: 2 N V H. Bytes: logits, x, W.
"""

from __future__ import annotations

import torch
from torch import Tensor

from liger_chunked.device import processors
from liger_chunked.kernels.backend import TensorDescriptor, tl
from liger_chunked.kernels.launch import Kernel, is_collecting
from liger_chunked.kernels.projection import _halves, _place, _product
from liger_chunked.kernels.tuning.hopper import Tiling


@Kernel
def _project_logits_kernel(
    x_ptr, bias_ptr, x_desc, w_desc, logits_desc, n_tokens, n_cols, hidden,
    ROWS: tl.constexpr, COLS: tl.constexpr, INNER: tl.constexpr, GROUP: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    # A launch takes its device from `x_ptr`. Descriptors read and write.
    row_blocks = tl.cdiv(n_tokens, ROWS)
    col_blocks = tl.cdiv(n_cols, COLS)
    group_size = GROUP * col_blocks
    half: tl.constexpr = COLS // 2
    for block in tl.range(tl.program_id(0), row_blocks * col_blocks, PROGRAMS, flatten=True):
        row_block, col_block = _place(block, row_blocks, group_size, GROUP)
        acc = _product(x_desc, w_desc, row_block, col_block, hidden, ROWS, COLS, INNER)
        first_row = row_block * ROWS
        first_col = col_block * COLS
        left, right = _halves(acc, ROWS, COLS)
        if bias_ptr is not None:
            cols = first_col + tl.arange(0, half)
            left += tl.load(bias_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)[None, :]
            cols += half
            right += tl.load(bias_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)[None, :]
        logits_desc.store([first_row, first_col], left.to(logits_desc.dtype))
        logits_desc.store([first_row, first_col + half], right.to(logits_desc.dtype))


def tiling_of_logits(hidden: int, dtype: torch.dtype) -> Tiling:
    """Return the tiles of a product of `hidden` terms that writes logits in `dtype`."""
    tiling = Tiling.of(hidden)
    # Fewer stages of loads, because a float32 half tile takes twice the shared memory of a 16-bit one: 64 KiB.
    return tiling._replace(stages=min(tiling.stages, 3)) if dtype == torch.float32 else tiling


def project_logits(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    """Write logits to `out`, and return it.

    Args:
        x, weight: (N, H) and (V, H), both bfloat16 or both float16; contiguous, 16-byte aligned, H a multiple of 8.
        bias: (V,) or None.
        out: (N, V) in the dtype of `x` or float32, 16-byte aligned, with a row stride of a multiple of 16 bytes.
    """
    (n, hidden), n_cols = x.shape, weight.shape[0]
    if (x.is_meta and not is_collecting()) or not n or not n_cols:  # nothing to compute
        return out
    tiling = tiling_of_logits(hidden, out.dtype)
    blocks = -(-n // tiling.rows) * -(-n_cols // tiling.cols)
    programs = min(tiling.programs * processors(x.device), blocks)
    _project_logits_kernel(
        (programs, 1, 1),
        (x, None if bias is None else bias.contiguous()),
        (n, n_cols, hidden, tiling.rows, tiling.cols, tiling.inner, tiling.group, programs),
        tiling.num_warps,
        tiling.stages,
        (
            TensorDescriptor.from_tensor(x, [tiling.rows, tiling.inner]),
            TensorDescriptor.from_tensor(weight, [tiling.cols, tiling.inner]),
            TensorDescriptor.from_tensor(out, [tiling.rows, tiling.cols // 2]),
        ),
    )
    return out
