"""Merge the ranks' `project_sums` in rank order.

    c = max_r c_r,     rest = sum_r rest_r exp(c_r - c),     moment = sum_r exp(c_r - c) (moment_r + rest_r (c_r - c))

The exponentials of a rank stay relative to its own centre; `values_scale` is `exp(c_r - c)`, at most 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from liger_chunked.kernels.backend import exp, tl
from liger_chunked.kernels.launch import Kernel
from liger_chunked.kernels.projection import Exponentials, _finish
from liger_chunked.kernels.tuning.hopper import GRADIENT_ROWS
from liger_chunked.types import TokenStats


@Kernel
def _merge_ranks_kernel(
    sums_ptr, centre_ptr, rest_ptr, target_exp_ptr, sum_exp_ptr, scale_ptr, logps_ptr, lse_ptr, entropy_ptr, mean_ptr,
    n_tokens, length, fields, ranks, own, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < n_tokens
    centre = tl.full([BLOCK], -float("inf"), tl.float32)
    target_logit = tl.full([BLOCK], -float("inf"), tl.float32)
    for rank in range(ranks):
        place = sums_ptr + rank * fields * length + rows
        centre = tl.maximum(centre, tl.load(place, mask=inside, other=0.0))
        of_rank = tl.load(place + 2 * length, mask=inside, other=0.0)
        target_logit = tl.where(of_rank == -float("inf"), target_logit, of_rank)  # keeps NaN, unlike a maximum
    rest = tl.zeros([BLOCK], tl.float32)
    moment = tl.zeros([BLOCK], tl.float32)
    mean = tl.zeros([BLOCK], tl.float32)
    own_scale = tl.zeros([BLOCK], tl.float32)
    for rank in range(ranks):
        place = sums_ptr + rank * fields * length + rows
        distance = tl.load(place, mask=inside, other=0.0) - centre
        scale = exp(distance, True)
        of_rank = tl.load(place + length, mask=inside, other=0.0)
        rest += scale * of_rank
        place += 3 * length
        if entropy_ptr is not None:
            shift = tl.where(of_rank == 0.0, 0.0, of_rank * distance)
            moment += scale * (tl.load(place, mask=inside, other=0.0) + shift)
            place += length
        if mean_ptr is not None:
            mean += tl.load(place, mask=inside, other=0.0)
        own_scale = tl.where(rank == own, scale, own_scale)
    below = target_logit - centre
    e = exp(below, True)
    sum_exp = rest + e
    tl.store(centre_ptr + rows, centre, mask=inside)
    tl.store(rest_ptr + rows, rest, mask=inside)
    tl.store(target_exp_ptr + rows, e, mask=inside)
    tl.store(sum_exp_ptr + rows, sum_exp, mask=inside)
    tl.store(scale_ptr + rows, own_scale, mask=inside)
    if mean_ptr is not None:
        tl.store(mean_ptr + rows, mean, mask=inside)
    _finish(rows, inside, centre, rest, e, below, sum_exp, moment, logps_ptr, lse_ptr, entropy_ptr)


def merge_ranks(
    gathered: Tensor, n: int, rank: int, values: Tensor | None, outputs: tuple[str, ...]
) -> tuple[Exponentials, TokenStats]:
    """Return this rank's exponentials and the statistics of the whole vocabulary, as `project_exp` does.

    `gathered` is (ranks, fields, at least N), the ranks' packed `RowSums`.
    """
    ranks, fields, length = gathered.shape
    rows = torch.empty(5, length, dtype=torch.float32, device=gathered.device)[:, :n].unbind()
    stats = TokenStats(**{name: torch.empty(n, dtype=torch.float32, device=gathered.device) for name in outputs})
    _merge_ranks_kernel(
        (-(-n // GRADIENT_ROWS), 1, 1),
        (gathered, *rows, stats.logps, stats.lse, stats.entropy, stats.mean_logits),
        (n, length, fields, ranks, rank, GRADIENT_ROWS),
        num_warps=4,
    )
    return Exponentials(values, *rows), stats
