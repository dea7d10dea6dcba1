"""Losses of pairs of sequences with a known gradient: sums of `PairTerm`, from the tokens' log-probabilities.

With the log-ratios `c` and `r` of a pair's chosen and rejected sequence, the loss of `n` pairs is

    1/n sum_pairs sum_terms weight curve(scale x + offset) + nll_weight NLL,    x one of c - r, c, r, ...

Two launches a chunk: a program a pair sums its tokens in float64, evaluates the terms, and writes the gradient of each
token; one program then sums over pairs. PyTorch code differentiates the same terms by autograd (`losses/formulas.py`).
Bytes: log-probabilities and mean logits read once, gradients written once.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from liger_chunked.kernels.backend import jit, log1p, tl
from liger_chunked.kernels.launch import Kernel
from liger_chunked.kernels.tuning.generic import PAIR_LOSS, PAIRS_SUMMED
from liger_chunked.types import PairTerm

MOST_TERMS = 4  # of the kernel


@jit
def sum_counts(counts_ptr, start, stop, BLOCK: tl.constexpr):
    """Return the tokens of the sequences from `start` to `stop`."""
    total = tl.zeros([BLOCK], tl.int64)
    for first in range(start, stop, BLOCK):
        places = first + tl.arange(0, BLOCK)
        total += tl.load(counts_ptr + places, mask=places < stop, other=0)
    return tl.sum(total, axis=0)


@jit
def sum_tokens(x_ptr, n, BLOCK: tl.constexpr):
    """Return the sum of `n` numbers, in float64 because a difference of large sums loses digits."""
    total = tl.zeros([BLOCK], tl.float64)
    for first in range(0, n, BLOCK):
        places = first + tl.arange(0, BLOCK)
        total += tl.load(x_ptr + places, mask=places < n, other=0.0).to(tl.float64)
    return tl.sum(total, axis=0)


@jit
def fill(x_ptr, n, value, BLOCK: tl.constexpr):
    for first in range(0, n, BLOCK):
        places = first + tl.arange(0, BLOCK)
        tl.store(x_ptr + places, tl.full([BLOCK], 0.0, tl.float32) + value.to(tl.float32), mask=places < n)


@jit
def curve_at(CURVE: tl.constexpr, z):
    """Return a curve of `PairTerm` and its slope."""
    small = tl.exp(-tl.abs(z))
    if CURVE == "softplus":
        value = tl.where(z > 0.0, z, 0.0) + log1p(small)
        slope = tl.where(z < 0.0, small, 1.0) / (1.0 + small)
    elif CURVE == "sigmoid":
        value = tl.where(z < 0.0, small, 1.0) / (1.0 + small)
        slope = small / ((1.0 + small) * (1.0 + small))
    elif CURVE == "square":
        value = z * z
        slope = 2.0 * z
    else:
        value = tl.where(z <= 0.0, 0.0, z)  # NaN stays NaN
        slope = tl.where(z <= 0.0, 0.0, 1.0)
    return value, slope


@jit
def _log_odds(logp):
    """Return `log(p / (1 - p))` of `log p`, and its slope, with the bound of `losses/formulas.py`."""
    most = tl.full([], -1e-12, tl.float64)  # as a literal it would be rounded to float32
    x = tl.where(logp > most, most, logp)  # NaN stays NaN
    p = tl.exp(x)
    # Near 0, exp() rounds to 1: -expm1(x), whose factor x / log(p) takes out the rounding of p. p is below 1 here.
    rest = tl.where(x > -0.6931471805599453, (1.0 - p) * (x / tl.log(p)), 1.0 - p)
    return x - tl.log(rest), tl.where(logp > most, 0.0, 1.0 / rest)


@jit
def _add_term(
    CURVE: tl.constexpr, OF: tl.constexpr, scale, offset, weight,
    chosen, rejected, n_chosen, n_rejected, loss, by_chosen, by_rejected,
):  # fmt: skip
    """Add a `PairTerm`, or nothing if CURVE is None, to a loss and its derivatives by both log-ratios."""
    if CURVE is not None:
        if OF == "margin":
            x = chosen - rejected
        elif OF == "log_odds_margin":
            of_chosen, slope_of_chosen = _log_odds(chosen)
            of_rejected, slope_of_rejected = _log_odds(rejected)
            x = of_chosen - of_rejected
        elif OF == "mean_margin":
            x = chosen / n_chosen - rejected / n_rejected
        elif OF == "chosen":
            x = chosen
        else:
            x = rejected
        value, slope = curve_at(CURVE, scale * x + offset)
        loss += weight * value
        slope *= weight * scale
        if OF == "margin":
            by_chosen += slope
            by_rejected -= slope
        elif OF == "log_odds_margin":
            by_chosen += slope * slope_of_chosen
            by_rejected -= slope * slope_of_rejected
        elif OF == "mean_margin":
            by_chosen += slope / n_chosen
            by_rejected -= slope / n_rejected
        elif OF == "chosen":
            by_chosen += slope
        else:
            by_rejected += slope
    return loss, by_chosen, by_rejected


@Kernel
def _pairs_kernel(
    logps_ptr, mean_logits_ptr, counts_ptr, ref_ptr, ref_tokens_ptr, grad_ptr, sums_ptr, of_pairs_ptr,
    n_pairs, first_pair, beta: tl.float64, nll_weight: tl.float64,
    scale_0: tl.float64, offset_0: tl.float64, weight_0: tl.float64,
    scale_1: tl.float64, offset_1: tl.float64, weight_1: tl.float64,
    scale_2: tl.float64, offset_2: tl.float64, weight_2: tl.float64,
    scale_3: tl.float64, offset_3: tl.float64, weight_3: tl.float64,
    CURVE_0: tl.constexpr, OF_0: tl.constexpr, CURVE_1: tl.constexpr, OF_1: tl.constexpr,
    CURVE_2: tl.constexpr, OF_2: tl.constexpr, CURVE_3: tl.constexpr, OF_3: tl.constexpr,
    STACKED: tl.constexpr, AVERAGE: tl.constexpr, NLL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pair = first_pair + tl.program_id(0)
    n_chosen = tl.load(counts_ptr + pair)
    n_rejected = tl.load(counts_ptr + n_pairs + pair)
    # Where the pair's tokens start in the target, which has all chosen sequences before all rejected ones.
    ref_chosen = sum_counts(counts_ptr, 0, pair, BLOCK)
    ref_rejected = ref_chosen + sum_counts(counts_ptr, pair, n_pairs + pair, BLOCK)
    if STACKED:
        chosen_start, rejected_start = ref_chosen, ref_rejected
    else:  # the chunk has its tokens pair by pair, from its first pair on
        chosen_start = sum_counts(counts_ptr, first_pair, pair, BLOCK)
        chosen_start += sum_counts(counts_ptr, n_pairs + first_pair, n_pairs + pair, BLOCK)
        rejected_start = chosen_start + n_chosen

    of_chosen = sum_tokens(logps_ptr + chosen_start, n_chosen, BLOCK)
    of_rejected = sum_tokens(logps_ptr + rejected_start, n_rejected, BLOCK)
    tl.store(sums_ptr + n_pairs + pair, of_chosen)
    tl.store(sums_ptr + 2 * n_pairs + pair, sum_tokens(mean_logits_ptr + chosen_start, n_chosen, BLOCK))
    tl.store(sums_ptr + 3 * n_pairs + pair, sum_tokens(mean_logits_ptr + rejected_start, n_rejected, BLOCK))
    chosen_length = tl.maximum(n_chosen, 1).to(tl.float64)
    rejected_length = tl.maximum(n_rejected, 1).to(tl.float64)
    if AVERAGE:
        of_chosen /= chosen_length
        of_rejected /= rejected_length
    chosen, rejected = of_chosen, of_rejected
    if ref_ptr is not None:
        chosen -= tl.load(ref_ptr + pair).to(tl.float64)
        rejected -= tl.load(ref_ptr + n_pairs + pair).to(tl.float64)
    if ref_tokens_ptr is not None:
        ref_of_chosen = sum_tokens(ref_tokens_ptr + ref_chosen, n_chosen, BLOCK)
        ref_of_rejected = sum_tokens(ref_tokens_ptr + ref_rejected, n_rejected, BLOCK)
        if AVERAGE:
            ref_of_chosen /= chosen_length
            ref_of_rejected /= rejected_length
        chosen -= ref_of_chosen
        rejected -= ref_of_rejected
    tl.store(of_pairs_ptr + pair, of_chosen.to(tl.float32))
    tl.store(of_pairs_ptr + n_pairs + pair, of_rejected.to(tl.float32))
    tl.store(of_pairs_ptr + 2 * n_pairs + pair, (beta * chosen).to(tl.float32))
    tl.store(of_pairs_ptr + 3 * n_pairs + pair, (beta * rejected).to(tl.float32))

    loss = tl.full([], 0.0, tl.float64)
    by_chosen = tl.full([], 0.0, tl.float64)
    by_rejected = tl.full([], 0.0, tl.float64)
    # Not a loop over tuples, whose compile-time names Triton 3.6 does not take.
    loss, by_chosen, by_rejected = _add_term(
        CURVE_0, OF_0, scale_0, offset_0, weight_0,
        chosen, rejected, chosen_length, rejected_length, loss, by_chosen, by_rejected,
    )  # fmt: skip
    loss, by_chosen, by_rejected = _add_term(
        CURVE_1, OF_1, scale_1, offset_1, weight_1,
        chosen, rejected, chosen_length, rejected_length, loss, by_chosen, by_rejected,
    )  # fmt: skip
    loss, by_chosen, by_rejected = _add_term(
        CURVE_2, OF_2, scale_2, offset_2, weight_2,
        chosen, rejected, chosen_length, rejected_length, loss, by_chosen, by_rejected,
    )  # fmt: skip
    loss, by_chosen, by_rejected = _add_term(
        CURVE_3, OF_3, scale_3, offset_3, weight_3,
        chosen, rejected, chosen_length, rejected_length, loss, by_chosen, by_rejected,
    )  # fmt: skip
    tl.store(sums_ptr + pair, tl.where(n_chosen + n_rejected == 0, 0.0, loss))
    if grad_ptr is not None:
        by_chosen /= n_pairs
        by_rejected /= n_pairs
        if AVERAGE:
            by_chosen /= chosen_length
            by_rejected /= rejected_length
        if NLL:
            by_chosen -= nll_weight / tl.maximum(sum_counts(counts_ptr, 0, n_pairs, BLOCK), 1)
        fill(grad_ptr + chosen_start, n_chosen, by_chosen, BLOCK)
        fill(grad_ptr + rejected_start, n_rejected, by_rejected, BLOCK)


@Kernel
def _batch_kernel(
    sums_ptr, counts_ptr, loss_ptr, rounded_ptr, means_ptr,
    n_pairs, first_pair, stop_pair, nll_weight: tl.float64, NLL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n_chosen = tl.maximum(sum_counts(counts_ptr, 0, n_pairs, BLOCK), 1)
    n_rejected = tl.maximum(sum_counts(counts_ptr, n_pairs, 2 * n_pairs, BLOCK), 1)
    loss = sum_tokens(sums_ptr + first_pair, stop_pair - first_pair, BLOCK) / n_pairs
    nll = tl.full([], 0.0, tl.float64)
    if NLL:
        of_chunk = sum_tokens(sums_ptr + n_pairs + first_pair, stop_pair - first_pair, BLOCK)
        loss -= nll_weight * (of_chunk / n_chosen)
        nll = -sum_tokens(sums_ptr + n_pairs, stop_pair, BLOCK) / n_chosen
    tl.store(loss_ptr, loss)
    tl.store(rounded_ptr, loss.to(tl.float32))
    # Each chunk writes the means of all pairs up to its own last one, so the last chunk writes those of the batch.
    tl.store(means_ptr, (sum_tokens(sums_ptr + 2 * n_pairs, stop_pair, BLOCK) / n_chosen).to(tl.float32))
    tl.store(means_ptr + 1, (sum_tokens(sums_ptr + 3 * n_pairs, stop_pair, BLOCK) / n_rejected).to(tl.float32))
    tl.store(means_ptr + 2, nll.to(tl.float32))


class PairLoss(NamedTuple):
    """What a loss of pairs is, apart from tensors.

    Attributes:
        terms: at most `MOST_TERMS`.
        beta: factor of log-ratios in the rewards.
        nll_weight: factor of the mean NLL of the batch's chosen tokens; None: no such term.
        average: whether log-probabilities of sequences are means over tokens instead of sums.
    """

    terms: tuple[PairTerm, ...]
    beta: float
    nll_weight: float | None
    average: bool


@functools.lru_cache
def _numbers(terms: tuple[PairTerm, ...]) -> tuple[tuple[float, ...], tuple[str | None, ...]]:
    """Return the kernel's numbers of terms, and its compile-time constants."""
    absent = MOST_TERMS - len(terms)
    numbers = [float(x) for term in terms for x in (term.scale, term.offset, term.weight)]
    names = [name for term in terms for name in (term.curve, term.of)]
    return (*numbers, *[0.0] * 3 * absent), (*names, *[None] * 2 * absent)


@dataclass(eq=False)
class PairSums:
    """Sums and metrics of a batch of n pairs, which its chunks fill.

    Attributes:
        sums: (4, n) float64: loss, chosen log-probability, sums of mean logits of the chosen and rejected tokens.
        of_pairs: (4, n) float32: chosen and rejected log-probabilities, chosen and rejected rewards.
        means: (3,) float32: means of the logits of chosen and rejected tokens, and the NLL, of the chunks so far.
    """

    sums: Tensor
    of_pairs: Tensor
    means: Tensor

    @classmethod
    def of(cls, n_pairs: int, device: torch.device) -> PairSums:
        sums = torch.empty(4, n_pairs, dtype=torch.float64, device=device)
        of_pairs = torch.empty(4, n_pairs, dtype=torch.float32, device=device)
        return cls(sums, of_pairs, torch.empty(3, dtype=torch.float32, device=device))


def pair_loss(
    loss: PairLoss,
    into: PairSums,
    logps: Tensor,
    mean_logits: Tensor,
    *,
    token_counts: Tensor,
    pairs: slice,
    stacked: bool,
    reference: Tensor | None,
    with_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return a chunk's share of the loss (), in float64 and in float32, and its gradient by `logps`, float32 or None.

    Args:
        into: takes what metrics need.
        logps, mean_logits: (len,) float32, of the chunk's tokens.
        token_counts: (2 n,) int64, tokens of all chosen sequences, then of all rejected ones.
        pairs: the chunk's, of the batch.
        stacked: whether tokens come in this order, and not pair by pair.
        reference: log-probabilities under the reference: (2, n) of sequences, or float32 (N,) of all the batch's tokens
            in the order of `token_counts`. None: without a reference.
    """
    n_pairs, device = into.sums.shape[1], logps.device
    grad = torch.empty_like(logps) if with_gradient else None
    share = torch.empty((), dtype=torch.float64, device=device)
    rounded = torch.empty((), dtype=torch.float32, device=device)
    numbers, names = _numbers(loss.terms)
    has_nll, nll_weight = loss.nll_weight is not None, loss.nll_weight or 0.0
    of_sequences, of_tokens = (reference, None) if reference is None or reference.ndim == 2 else (None, reference)
    block, num_warps = PAIR_LOSS
    _pairs_kernel(
        (pairs.stop - pairs.start, 1, 1),
        (logps, mean_logits, token_counts, of_sequences, of_tokens, grad, into.sums, into.of_pairs),
        (
            *(n_pairs, pairs.start, float(loss.beta), float(nll_weight)),
            *numbers,
            *names,
            *(stacked, loss.average, has_nll, block),
        ),
        num_warps,
    )
    _batch_kernel(
        (1, 1, 1),
        (into.sums, token_counts, share, rounded, into.means),
        (n_pairs, pairs.start, pairs.stop, float(nll_weight), has_nll, PAIRS_SUMMED),
        num_warps,
    )
    return share, rounded, grad
