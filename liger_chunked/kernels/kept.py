"""Logits of the ids that a sampler kept, a few of each token, and their gradients: no other rows of the head are read.

    z[m] = x[token[m]] . weight[ids[m]] + bias[ids[m]]        an entry m for each kept id, those of a token in one slice
    dx[n] = sum of dz[m] weight[ids[m]] over the token's slice

`add_rows.py` adds the rows of dweight. All sums are float32, in a fixed order: results are the same from run to run,
and an entry's do not depend on the batch. In float64 torch sums, on a GPU in any order unless
`torch.use_deterministic_algorithms` is on.

Bytes for M entries of H values: each of the two sweeps reads 2 M H, but for the caches.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from liger_chunked.kernels.add_rows import owned, parts
from liger_chunked.kernels.backend import block_size, exp, grid_of_rows, grid_row, jit, reciprocal, tl, use_triton
from liger_chunked.kernels.launch import Kernel
from liger_chunked.kernels.logits_grad import LogitsCotangents
from liger_chunked.kernels.transform import (
    transform,
    transform_and_slope,
    transform_and_tanh,
    transform_arguments,
    transform_block,
    transform_gradient,
)
from liger_chunked.kernels.tuning import TUNING
from liger_chunked.types import LogitOptions, accumulation_dtype


class Entries(NamedTuple):
    """The kept ids of N tokens.

    Attributes:
        ids: (M,) int64 rows of this rank's weight; negative, or beyond the last: another rank's, or an ignored token's.
        offsets: (N + 1,) int64; the entries of token n are `offsets[n] : offsets[n + 1]`.
        tokens: (M,) int64, each entry's token.
        target: (N,) int64, the place of the token's target among the M entries. Negative: the token does not count, and
            has statistics of 0 and no gradient. Read where the slice is not empty.
    """

    ids: Tensor
    offsets: Tensor
    tokens: Tensor
    target: Tensor


class KeptStats(NamedTuple):
    """Statistics of the softmax over a token's slice, (N,).

    Where the slice is empty, `max`, `sum_exp` and `argmax` are arbitrary, and so are the others if the token counts.
    """

    max: Tensor
    sum_exp: Tensor
    logps: Tensor
    lse: Tensor
    entropy: Tensor
    argmax: Tensor  # the first entry with the largest logit, int64


# Places


@Kernel
def _places_kernel(
    target_ptr, ids_ptr, offsets_ptr, read_ptr, place_ptr, counts_ptr, n_tokens, ignore_index, BLOCK: tl.constexpr
):  # fmt: skip
    # `n_tokens` counts entries, which wrong offsets must not leave: the host reports them later.
    token = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + token)
    first = tl.maximum(tl.load(offsets_ptr + token), 0)
    end = tl.minimum(tl.load(offsets_ptr + token + 1), n_tokens)
    counts = target != ignore_index
    lanes = tl.arange(0, BLOCK)
    places = tl.full([BLOCK], -1, tl.int64)
    for start in range(first, end, BLOCK):
        entry = start + lanes
        inside = entry < end
        ids = tl.load(ids_ptr + entry, mask=inside, other=-1)
        tl.store(read_ptr + entry, tl.where(counts, ids, -1), mask=inside)
        places = tl.maximum(places, tl.where(inside & (ids == target), entry, -1))
    place = tl.where(counts, tl.max(places, axis=0), -1)
    tl.store(place_ptr + token, place)
    has_entries = first < end
    # Sums of integers need no order.
    tl.atomic_add(counts_ptr, 1, mask=counts)
    tl.atomic_add(counts_ptr + 1, 1, mask=counts & (has_entries == 0))
    tl.atomic_add(counts_ptr + 2, 1, mask=counts & has_entries & (place < 0))


def kept_places(
    ids: Tensor, offsets: Tensor, tokens: Tensor, target: Tensor, ignore_index: int, counts: Tensor
) -> tuple[Tensor, Tensor]:
    """Find each target among the ids of its token.

    Args:
        ids, offsets, tokens: as in `Entries`; any `offsets`, also wrong ones.
        target: (N,) int64, or `ignore_index`.
        counts: (3,) int64, or longer: the numbers of tokens with a target, of those without entries, and of those
            whose entries miss it, are added.

    Returns:
        (M,) int64: the ids, but -1 of ignored tokens, which no rank has. (N,) int64: the place of the target among the
        M entries, -1 if it is ignored, missing, or without entries.
    """
    n = target.shape[0]
    if use_triton(ids) and n and ids.numel():
        read, place = torch.empty_like(ids), torch.empty_like(target)
        block, num_warps = TUNING[ids.device].kept_stats
        numbers = ids.shape[0], ignore_index, block
        _places_kernel((n, 1, 1), (target, ids, offsets, read, place, counts), numbers, num_warps)
        return read, place
    is_valid = target != ignore_index
    of_entries = torch.where(is_valid, target, -1)[tokens]
    places = torch.where(ids == of_entries, torch.arange(ids.shape[0], device=ids.device), -1)
    place = torch.full_like(target, -1).scatter_reduce_(0, tokens, places, "amax")
    has_entries = offsets.diff() > 0
    counts[:3] += torch.stack([is_valid, is_valid & ~has_entries, is_valid & has_entries & (place < 0)]).sum(1)
    return torch.where(of_entries >= 0, ids, -1), place


# Logits


@Kernel
def _logits_kernel(
    x_ptr, x_stride, w_ptr, w_stride, bias_ptr, ids_ptr, tokens_ptr, out_ptr, n_tokens, hidden, n_rows,
    ENTRIES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # `n_tokens` counts entries: the name keeps their number from compiling a variant.
    entry = tl.program_id(0).to(tl.int64) * ENTRIES + tl.arange(0, ENTRIES)
    inside = entry < n_tokens
    row = tl.load(ids_ptr + entry, mask=inside, other=-1)
    token = tl.load(tokens_ptr + entry, mask=inside, other=0)
    own = (row >= 0) & (row < n_rows)
    row = tl.where(own, row, 0)
    total = tl.zeros([ENTRIES, BLOCK], tl.float32)
    for start in range(0, hidden, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        there = own[:, None] & (cols < hidden)[None, :]
        x = tl.load(x_ptr + token[:, None] * x_stride + cols[None, :], mask=there, other=0.0)
        w = tl.load(w_ptr + row[:, None] * w_stride + cols[None, :], mask=there, other=0.0)
        total += x.to(tl.float32) * w.to(tl.float32)
    z = tl.sum(total, axis=1)
    if bias_ptr is not None:
        z += tl.load(bias_ptr + row, mask=own, other=0.0).to(tl.float32)
    tl.store(out_ptr + entry, z, mask=inside)


def kept_logits(x: Tensor, weight: Tensor, bias: Tensor | None, entries: Entries) -> Tensor:
    """Return the untransformed logits (M,) of entries, 0 for those of another rank.

    Args:
        x: (N, H) hidden states.
        weight: (V, H), and bias (V,), in the dtype of `x`.
    """
    n_entries, hidden = entries.ids.shape[0], x.shape[1]
    if use_triton(x) and n_entries and weight.shape[0]:
        out = torch.empty(n_entries, dtype=torch.float32, device=x.device)
        n_together, most, num_warps = TUNING[x.device].kept_logits
        _logits_kernel[(-(-n_entries // n_together),)](
            x_ptr=x,
            x_stride=x.stride(0),
            w_ptr=weight,
            w_stride=weight.stride(0),
            bias_ptr=None if bias is None else bias.contiguous(),
            ids_ptr=entries.ids,
            tokens_ptr=entries.tokens,
            out_ptr=out,
            n_tokens=n_entries,
            hidden=hidden,
            n_rows=weight.shape[0],
            ENTRIES=n_together,
            BLOCK=block_size(hidden, most),
            num_warps=num_warps,
        )
        return out
    dtype = accumulation_dtype(x.dtype)
    z = x.new_zeros(n_entries, dtype=dtype)
    if not weight.shape[0]:
        return z
    for part in parts(n_entries, hidden):
        own, rows = owned(entries.ids[part], weight)
        dots = (x[entries.tokens[part]].to(dtype) * weight[rows].to(dtype)).sum(1)
        z[part] = torch.where(own, dots if bias is None else dots + bias[rows].to(dtype), 0.0)
    return z


# Statistics


@Kernel
def _stats_kernel(
    z_ptr, offsets_ptr, target_ptr, temperature_ptr, max_ptr, sum_exp_ptr, logps_ptr, lse_ptr, entropy_ptr, argmax_ptr,
    scale, softcap, inv_temperature, BLOCK: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    first = tl.load(offsets_ptr + token)
    end = tl.load(offsets_ptr + token + 1)
    if temperature_ptr is not None:
        inv_temperature = reciprocal(tl.load(temperature_ptr + token))
    lanes = tl.arange(0, BLOCK)
    largest = -float("inf")
    argmax = first
    for start in range(first, end, BLOCK):
        inside = start + lanes < end
        z = _entries(z_ptr + start, lanes, inside, scale, softcap, inv_temperature)
        here = tl.max(z, axis=0)
        place = tl.min(tl.where(z == here, start + lanes, end), axis=0)
        argmax = tl.where(here > largest, place, argmax)
        largest = tl.maximum(largest, here)
    centre = tl.where(largest == -float("inf"), 0.0, largest)
    sum_exp = tl.zeros([BLOCK], tl.float32)
    moment = tl.zeros([BLOCK], tl.float32)
    for start in range(first, end, BLOCK):
        inside = start + lanes < end
        z = _entries(z_ptr + start, lanes, inside, scale, softcap, inv_temperature) - centre
        e = exp(z, PRECISE)
        sum_exp += e
        moment += tl.where(e == 0.0, 0.0, e * z)
    normaliser = tl.sum(sum_exp, axis=0)
    log_sum = tl.log(normaliser)
    place = tl.load(target_ptr + token)
    counts = place >= 0
    of_target = tl.load(z_ptr + place, mask=counts & (first < end), other=0.0)
    of_target = transform_block(of_target, scale, softcap, inv_temperature)
    tl.store(max_ptr + token, largest)
    tl.store(sum_exp_ptr + token, normaliser)
    tl.store(logps_ptr + token, tl.where(counts, (of_target - centre) - log_sum, 0.0))
    tl.store(lse_ptr + token, tl.where(counts, centre + log_sum, 0.0))
    tl.store(entropy_ptr + token, tl.where(counts, log_sum - tl.sum(moment, axis=0) / normaliser, 0.0))
    tl.store(argmax_ptr + token, argmax)


@jit
def _entries(z_ptr, lanes, inside, scale, softcap, inv_temperature):
    z = tl.load(z_ptr + lanes, mask=inside, other=0.0)
    return tl.where(inside, transform_block(z, scale, softcap, inv_temperature), -float("inf"))


def kept_stats(z: Tensor, entries: Entries, options: LogitOptions, temperature: Tensor | None = None) -> KeptStats:
    """Return statistics of tokens from the untransformed logits (M,) of their entries.

    Args:
        temperature: (N,) float32, instead of that of `options`, which is then 1.
    """
    n = entries.offsets.shape[0] - 1
    dtypes = [z.dtype] * 5 + [torch.int64]
    found = KeptStats._make(torch.empty(n, dtype=dtype, device=z.device) for dtype in dtypes)
    if not n:
        return found
    if use_triton(z) and z.numel():
        block, num_warps = TUNING[z.device].kept_stats
        _stats_kernel(
            (n, 1, 1),
            (z, entries.offsets, entries.target, temperature, *found),
            (*transform_arguments(options), block, True),
            num_warps,
        )
        return found
    return _stats_torch(z, entries, options, temperature)


def _stats_torch(z: Tensor, entries: Entries, options: LogitOptions, temperature: Tensor | None) -> KeptStats:
    n, tokens = entries.offsets.shape[0] - 1, entries.tokens
    z = transform(z, options.logit_scale, options.softcap, _of_entries(options, temperature, tokens, z.dtype))
    largest = z.new_full((n,), -torch.inf).scatter_reduce_(0, tokens, z, "amax")
    centre = torch.where(largest == -torch.inf, 0.0, largest)
    centred = z - centre[tokens]
    e = centred.exp()
    sum_exp = z.new_zeros(n).index_add_(0, tokens, e)
    moment = z.new_zeros(n).index_add_(0, tokens, torch.where(e == 0, 0.0, e * centred))
    log_sum = sum_exp.log()
    places = torch.arange(z.shape[0], device=z.device)
    is_largest = torch.where(z == largest[tokens], places, z.shape[0])
    argmax = entries.offsets[:-1].clone().fill_(z.shape[0]).scatter_reduce_(0, tokens, is_largest, "amin")
    counts = entries.target >= 0
    has_target = counts & (entries.offsets[1:] > entries.offsets[:-1])
    of_target = torch.cat([z, z.new_zeros(1)])[torch.where(has_target, entries.target, z.shape[0])]
    return KeptStats(
        max=largest,
        sum_exp=sum_exp,
        logps=torch.where(counts, (of_target - centre) - log_sum, 0.0),
        lse=torch.where(counts, centre + log_sum, 0.0),
        entropy=torch.where(counts, log_sum - moment / sum_exp, 0.0),
        argmax=argmax,
    )


def _of_entries(
    options: LogitOptions, temperature: Tensor | None, tokens: Tensor, dtype: torch.dtype
) -> float | Tensor:
    return options.temperature if temperature is None else temperature[tokens].to(dtype)


# Gradients


@Kernel
def _grad_kernel(
    z_ptr, tokens_ptr, target_ptr, grad_ptr, max_ptr, sum_exp_ptr, logps_ptr, lse_ptr, entropy_ptr, entropy_value_ptr,
    temperature_ptr, n_tokens, scale, softcap, inv_temperature, BLOCK: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < n_tokens
    token = tl.load(tokens_ptr + entry, mask=inside, other=0)
    if temperature_ptr is not None:
        inv_temperature = reciprocal(tl.load(temperature_ptr + token))
    z = tl.load(z_ptr + entry, mask=inside, other=0.0)
    z, tanh_z = transform_and_tanh(z, scale, softcap, inv_temperature)
    centred = z - tl.load(max_ptr + token)
    sum_exp = tl.load(sum_exp_ptr + token)
    p = exp(centred, PRECISE) * reciprocal(sum_exp)
    grad = tl.zeros_like(p)
    if lse_ptr is not None:
        grad += tl.load(lse_ptr + token) * p
    place = tl.load(target_ptr + token)
    if logps_ptr is not None:
        is_target = entry == place
        grad += tl.load(logps_ptr + token) * tl.where(is_target, 1.0 - p, -p)
    if entropy_ptr is not None:
        log_p = centred - tl.log(sum_exp)
        g = tl.load(entropy_ptr + token)
        grad -= tl.where(p == 0.0, 0.0, g * p * (log_p + tl.load(entropy_value_ptr + token)))
    grad = transform_gradient(grad, tanh_z, scale, softcap, inv_temperature)
    tl.store(grad_ptr + entry, tl.where(place < 0, 0.0, grad), mask=inside)


def kept_logits_grad(z: Tensor, entries: Entries, cotangents: LogitsCotangents, options: LogitOptions) -> Tensor:
    """Return the gradient (M,) by untransformed logits. `cotangents` are those of `logits_grad_`."""
    c = cotangents
    if use_triton(z) and z.numel():
        block, num_warps = TUNING[z.device].kept_grad
        grad = torch.empty_like(z)
        _grad_kernel(
            (-(-z.shape[0] // block), 1, 1),
            (z, entries.tokens, entries.target, grad, c.max, c.sum_exp, c.logps, c.lse, c.entropy, c.entropy_value,
             c.temperature),
            (z.shape[0], *transform_arguments(options), block, True),
            num_warps,
        )  # fmt: skip
        return grad
    tokens = entries.tokens
    temperature = _of_entries(options, c.temperature, tokens, z.dtype)
    transformed, slope = transform_and_slope(z, options.logit_scale, options.softcap, temperature)
    centred = transformed - c.max[tokens]
    p = centred.exp() / c.sum_exp[tokens]
    grad = torch.zeros_like(p)
    if c.lse is not None:
        grad += c.lse[tokens] * p
    if c.logps is not None:
        is_target = torch.arange(z.shape[0], device=z.device) == entries.target[tokens]
        grad += c.logps[tokens] * torch.where(is_target, 1.0 - p, -p)
    if c.entropy is not None:
        assert c.entropy_value is not None
        log_p = centred - c.sum_exp[tokens].log()
        grad -= torch.where(p == 0, 0.0, c.entropy[tokens] * p * (log_p + c.entropy_value[tokens]))
    grad *= options.logit_scale / temperature
    grad = grad if slope is None else grad * slope
    return grad.masked_fill_(entries.target[tokens] < 0, 0.0)


@Kernel
def _input_kernel(
    dz_ptr, w_ptr, w_stride, ids_ptr, offsets_ptr, out_ptr, out_stride, n_tokens, hidden, n_rows,
    RUN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = grid_row()
    if token >= n_tokens:
        return
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < hidden
    first = tl.load(offsets_ptr + token)
    end = tl.load(offsets_ptr + token + 1)
    total = tl.zeros([RUN, BLOCK], tl.float32)
    for start in range(first, end, RUN):
        entry = start + tl.arange(0, RUN)
        row = tl.load(ids_ptr + entry, mask=entry < end, other=-1)
        own = (row >= 0) & (row < n_rows)
        dz = tl.load(dz_ptr + entry, mask=own, other=0.0)
        w = tl.load(
            w_ptr + tl.where(own, row, 0)[:, None] * w_stride + cols[None, :],
            mask=own[:, None] & inside[None, :], other=0.0,
        )  # fmt: skip
        total += dz[:, None] * w.to(tl.float32)
    dx = tl.sum(total, axis=0)
    tl.store(out_ptr + token * out_stride + cols, dx.to(out_ptr.dtype.element_ty), mask=inside)


def kept_input_grad(dz: Tensor, weight: Tensor, entries: Entries, out: Tensor) -> None:
    """Write dx to `out` (N, H), also 0 for empty slices."""
    n, hidden = out.shape
    if use_triton(out) and dz.numel() and n and weight.shape[0]:
        run, most, num_warps = TUNING[out.device].kept_input_grad
        block = block_size(hidden, most)
        _input_kernel[grid_of_rows(n, -(-hidden // block))](
            dz_ptr=dz,
            w_ptr=weight,
            w_stride=weight.stride(0),
            ids_ptr=entries.ids,
            offsets_ptr=entries.offsets,
            out_ptr=out,
            out_stride=out.stride(0),
            n_tokens=n,
            hidden=hidden,
            n_rows=weight.shape[0],
            RUN=run,
            BLOCK=block,
            num_warps=num_warps,
        )
        return
    total = torch.zeros(n, hidden, dtype=accumulation_dtype(out.dtype), device=out.device)
    if weight.shape[0]:
        for part in parts(dz.shape[0], hidden):
            own, rows = owned(entries.ids[part], weight)
            terms = torch.where(own[:, None], dz[part, None] * weight[rows].to(total.dtype), 0.0)
            total.index_add_(0, entries.tokens[part], terms)
    out.copy_(total)
