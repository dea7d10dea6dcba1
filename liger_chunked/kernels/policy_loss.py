"""Losses of rollouts with a known gradient: a surrogate of importance ratios, and a KL to the reference.

With a token's log-probability `x`, advantage `A`, importance ratio `r` and `d = ref_logps - x`, the loss is

    sum over tokens of (weight * cost(r, A, x) + beta * kl(d, r)) / denominator

Two launches a chunk: a program a sequence evaluates its tokens in float64, writes the gradient of each, and sums loss
and metrics; one program then sums over sequences. PyTorch code differentiates the same formulas by autograd
(`losses/grpo.py`, `losses/policy.py`). Bytes: statistics and inputs of tokens read once (twice if a sequence has one
ratio and a loss has a gradient, which then needs the sum over the sequence first), gradients written once.

A token's derivatives come in two parts, because the tokens of a sequence may share a ratio:

    d loss / d x = by_logp + by_log_ratio                                     a ratio a token
    d loss / d x = by_logp + (sum over the sequence of by_log_ratio) / n      one of n tokens; n is 1 for a trajectory
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from liger_chunked.kernels.backend import jit, tl
from liger_chunked.kernels.launch import Kernel
from liger_chunked.kernels.pair_loss import sum_counts
from liger_chunked.kernels.tuning.generic import POLICY_LOSS
from liger_chunked.types import LARGEST, LARGEST_EXPONENT, LOWEST_LOGP, PolicyTerm

_LARGEST = LARGEST if tl is None else tl.constexpr(LARGEST)
_LARGEST_EXPONENT = LARGEST_EXPONENT if tl is None else tl.constexpr(LARGEST_EXPONENT)
_LOWEST_LOGP = LOWEST_LOGP if tl is None else tl.constexpr(LOWEST_LOGP)
_INFINITY = float("inf") if tl is None else tl.constexpr(float("inf"))


@jit
def _clamp(x, low, high):
    """Return `x` in bounds; NaN stays NaN."""
    return tl.where(x < low, low, tl.where(x > high, high, x))


@jit
def _expm1(x):
    u = tl.exp(x)
    # Near 0, exp() rounds to 1: the factor x / log(u) takes out the rounding of u.
    is_small = (tl.abs(x) < 0.5) & (u != 1.0)
    small = (u - 1.0) * (x / tl.log(tl.where(is_small, u, 2.0)))
    return tl.where(is_small, small, tl.where(u == 1.0, x, u - 1.0))


@jit
def _load_side(x_ptr, tokens, sequence, inside, OF_TOKENS: tl.constexpr):
    """Return float64 values of tokens, or the one of their sequence; 0 outside."""
    if OF_TOKENS:
        return tl.load(x_ptr + tokens, mask=inside, other=0.0).to(tl.float64)
    else:
        return tl.load(x_ptr + sequence + tl.zeros_like(tokens), mask=inside, other=0.0).to(tl.float64)


@jit
def _load_logps(x_ptr, tokens, inside):
    """Return given log-probabilities, float64, of which -inf counts as -1e18."""
    x = tl.load(x_ptr + tokens, mask=inside, other=0.0).to(tl.float64)
    lowest = tl.full([], _LOWEST_LOGP, tl.float64)  # as a literal it would be rounded to float32
    return tl.where(x < lowest, lowest, x)


@jit
def _clips(ratio, advantage, low, high, delta):
    """Return where a ratio is beyond a bound in the advantage's direction, as 0 and 1: below, and above."""
    bounded = tl.where(ratio > delta, delta, ratio)
    below = (bounded < low) & (advantage < 0.0)
    above = (bounded > high) & (advantage > 0.0)
    return below.to(tl.float64), above.to(tl.float64)


@jit
def _cost(CURVE: tl.constexpr, logps, ratio, moves, advantage, low, high, delta):
    """Return a `PolicyTerm`, and its derivatives by the log-ratio and by `logps`.

    `moves` is False where the ratio is constant, beyond e^80.
    """
    zero = tl.zeros_like(ratio)
    if CURVE == "clip":
        # min(r A, clamp(r) A) is clamp(r) A with one bound: the upper if A > 0, the lower if A < 0.
        bottom = tl.where(advantage < 0.0, low + zero, zero - _INFINITY)
        top = tl.where(advantage > 0.0, tl.minimum(delta + zero, high + zero), tl.maximum(delta + zero, high + zero))
        cost = -_clamp(ratio, bottom, top) * advantage
        by_log_ratio = tl.where((ratio >= bottom) & (ratio <= top) & moves, -ratio * advantage, 0.0)
        return cost, by_log_ratio, zero
    else:
        weight = -_clamp(ratio, low + zero, high + zero) * advantage
        return weight * logps, zero, weight


@jit
def _kl(ESTIMATOR: tl.constexpr, CORRECTED: tl.constexpr, d, ratio, moves):
    """Return an estimate of `KL_ESTIMATORS` in `losses/policy.py`, and its derivatives as `_cost` does."""
    if ESTIMATOR == "k1":
        estimate = -d
        by_logp = tl.zeros_like(d) + 1.0
    elif ESTIMATOR == "k2":
        estimate = d * d / 2.0
        by_logp = -d
    else:
        bounded = tl.where(d > _LARGEST_EXPONENT, _LARGEST_EXPONENT, d)
        slope = _expm1(bounded)
        estimate = slope - bounded
        by_logp = tl.where(d <= _LARGEST_EXPONENT, -slope, 0.0)
    if CORRECTED:
        # Each factor may be near e^80.
        largest = tl.full([], _LARGEST, tl.float64)
        product = estimate * ratio
        is_outside = (product < -largest) | (product > largest)  # False of NaN, whose gradient is NaN
        by_log_ratio = tl.where(moves & (is_outside == 0), product, 0.0)
        return _clamp(product, -largest, largest), by_log_ratio, tl.where(is_outside, 0.0, by_logp * ratio)
    else:
        return estimate, tl.zeros_like(d), by_logp


@jit
def _evaluate(
    logps_ptr, index_ptr, advantages_ptr, old_ptr, ref_ptr, weights_ptr,
    tokens, first_token, sequence, inside, log_ratio_of_sequence, low, high, delta, beta,
    CURVE: tl.constexpr, LEVEL: tl.constexpr, ESTIMATOR: tl.constexpr, CORRECTED: tl.constexpr,
    ADVANTAGES_OF_TOKENS: tl.constexpr, WEIGHTS_OF_TOKENS: tl.constexpr, REF_IS_COMPACT: tl.constexpr,
):  # fmt: skip
    """Return of a block of tokens: cost with KL, derivatives by log-ratio and `logps`, ratio, KL, and `_clips`."""
    places = tokens
    if index_ptr is not None:
        places = tl.load(index_ptr + tokens, mask=inside, other=0)
    logps = tl.load(logps_ptr + (tokens - first_token), mask=inside, other=0.0).to(tl.float64)
    advantage = _load_side(advantages_ptr, places, sequence, inside, ADVANTAGES_OF_TOKENS)
    log_ratio = tl.zeros_like(logps)
    if old_ptr is None:
        log_ratio = tl.where(logps == logps, log_ratio, logps)  # else the loss of a NaN would be a number
    elif LEVEL == "token":
        log_ratio = logps - _load_logps(old_ptr, places, inside)
    else:
        log_ratio += log_ratio_of_sequence
    ratio = tl.exp(tl.where(log_ratio > _LARGEST_EXPONENT, _LARGEST_EXPONENT, log_ratio))
    moves = log_ratio <= _LARGEST_EXPONENT
    cost, by_log_ratio, by_logp = _cost(CURVE, logps, ratio, moves, advantage, low, high, delta)
    if weights_ptr is not None:
        weight = _load_side(weights_ptr, places, sequence, inside, WEIGHTS_OF_TOKENS)
        cost *= weight
        by_log_ratio *= weight
        by_logp *= weight
    kl = tl.zeros_like(logps)
    if ref_ptr is not None:
        d = _load_logps(ref_ptr, tokens if REF_IS_COMPACT else places, inside) - logps
        kl, kl_by_log_ratio, kl_by_logp = _kl(ESTIMATOR, CORRECTED, d, ratio, moves)
        # A reference without a weight is for the metrics: a KL of NaN would make the loss NaN.
        cost += tl.where(beta == 0.0, 0.0, beta * kl)
        by_log_ratio += tl.where(beta == 0.0, 0.0, beta * kl_by_log_ratio)
        by_logp += tl.where(beta == 0.0, 0.0, beta * kl_by_logp)
    below, above = _clips(ratio, advantage, low, high, delta)
    return cost, by_log_ratio, by_logp, ratio, kl, below, above


@jit
def _sum_of_log_ratios(logps_ptr, index_ptr, old_ptr, first, stop, first_token, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], tl.float64)
    for block in range(first, stop, BLOCK):
        tokens = block + tl.arange(0, BLOCK)
        inside = tokens < stop
        places = tokens
        if index_ptr is not None:
            places = tl.load(index_ptr + tokens, mask=inside, other=0)
        logps = tl.load(logps_ptr + (tokens - first_token), mask=inside, other=0.0).to(tl.float64)
        total += logps - _load_logps(old_ptr, places, inside)
    return tl.sum(total, axis=0)


@jit
def _add(sums_ptr, value, is_new):
    """Store a number, or add it to what earlier chunks stored."""
    tl.store(sums_ptr, value + tl.load(sums_ptr, mask=is_new == 0, other=0.0))


@Kernel
def _sequences_kernel(
    logps_ptr, entropy_ptr, counts_ptr, index_ptr, advantages_ptr, old_ptr, ref_ptr, weights_ptr, divisor_ptr,
    grad_ptr, sums_ptr, n_examples, first_token, stop_token,
    low: tl.float64, high: tl.float64, delta: tl.float64, beta: tl.float64, divisor: tl.float64,
    CURVE: tl.constexpr, LEVEL: tl.constexpr, ESTIMATOR: tl.constexpr, CORRECTED: tl.constexpr,
    BY_LENGTH: tl.constexpr, ADVANTAGES_OF_TOKENS: tl.constexpr, WEIGHTS_OF_TOKENS: tl.constexpr,
    REF_IS_COMPACT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    PER_SEQUENCE: tl.constexpr = (LEVEL == "sequence") or (LEVEL == "trajectory")
    sequence = tl.program_id(0)
    n_tokens = tl.load(counts_ptr + sequence)
    start = sum_counts(counts_ptr, 0, sequence, BLOCK)  # of the sequence, among the batch's tokens
    # Its tokens in this chunk. With a ratio a token, a chunk may end within a sequence.
    first, stop = tl.maximum(start, first_token), tl.minimum(start + n_tokens, stop_token)
    is_new = start >= first_token  # no earlier chunk has tokens of it
    zero = tl.full([], 0.0, tl.float64)  # Triton's interpreter takes a number that meets no float64 for float32
    length = tl.maximum(n_tokens, 1).to(tl.float64)
    denominator = divisor + zero
    if divisor_ptr is not None:
        denominator = tl.load(divisor_ptr).to(tl.float64)
    if BY_LENGTH:
        denominator *= length

    log_ratio = zero
    if LEVEL != "token" and old_ptr is not None:
        log_ratio = _sum_of_log_ratios(logps_ptr, index_ptr, old_ptr, first, stop, first_token, BLOCK)
        if LEVEL != "trajectory":
            log_ratio /= length

    loss = tl.zeros([BLOCK], tl.float64)
    shared = tl.zeros([BLOCK], tl.float64)
    entropy = tl.zeros([BLOCK], tl.float64)
    kl = tl.zeros([BLOCK], tl.float64)
    below = tl.zeros([BLOCK], tl.float64)
    above = tl.zeros([BLOCK], tl.float64)
    ratios = tl.zeros([BLOCK], tl.float64)
    least = tl.zeros([BLOCK], tl.float64) + _INFINITY
    most = tl.zeros([BLOCK], tl.float64) - _INFINITY
    for block in range(first, stop, BLOCK):
        tokens = block + tl.arange(0, BLOCK)
        inside = tokens < stop
        cost, by_log_ratio, by_logp, ratio, of_kl, is_below, is_above = _evaluate(
            logps_ptr, index_ptr, advantages_ptr, old_ptr, ref_ptr, weights_ptr,
            tokens, first_token, sequence, inside, log_ratio, low, high, delta, beta,
            CURVE, LEVEL, ESTIMATOR, CORRECTED, ADVANTAGES_OF_TOKENS, WEIGHTS_OF_TOKENS, REF_IS_COMPACT,
        )  # fmt: skip
        loss += tl.where(inside, cost, 0.0)
        shared += tl.where(inside, by_log_ratio, 0.0)
        entropy += tl.load(entropy_ptr + (tokens - first_token), mask=inside, other=0.0).to(tl.float64)
        kl += tl.where(inside, of_kl, 0.0)
        below += tl.where(inside, is_below, 0.0)
        above += tl.where(inside, is_above, 0.0)
        ratios += tl.where(inside, ratio, 0.0)
        least = tl.where(inside & (ratio < least), ratio, least)
        most = tl.where(inside & (ratio > most), ratio, most)
        if grad_ptr is not None and not PER_SEQUENCE:
            gradient = (by_logp + by_log_ratio) / denominator
            tl.store(grad_ptr + (tokens - first_token), gradient.to(tl.float32), mask=inside)
    if grad_ptr is not None and PER_SEQUENCE:
        of_each = tl.sum(shared, axis=0)
        if LEVEL == "sequence":
            of_each /= length
        for block in range(first, stop, BLOCK):
            tokens = block + tl.arange(0, BLOCK)
            inside = tokens < stop
            _, _, by_logp, _, _, _, _ = _evaluate(
                logps_ptr, index_ptr, advantages_ptr, old_ptr, ref_ptr, weights_ptr,
                tokens, first_token, sequence, inside, log_ratio, low, high, delta, beta,
                CURVE, LEVEL, ESTIMATOR, CORRECTED, ADVANTAGES_OF_TOKENS, WEIGHTS_OF_TOKENS, REF_IS_COMPACT,
            )  # fmt: skip
            gradient = (by_logp + of_each) / denominator
            tl.store(grad_ptr + (tokens - first_token), gradient.to(tl.float32), mask=inside)

    n_below, n_above = tl.sum(below, axis=0), tl.sum(above, axis=0)
    sum_of_ratios, least_ratio, most_ratio = tl.sum(ratios, axis=0), tl.min(least, axis=0), tl.max(most, axis=0)
    if PER_SEQUENCE:
        ratio = tl.exp(tl.where(log_ratio > _LARGEST_EXPONENT, _LARGEST_EXPONENT, log_ratio))
        sum_of_ratios = tl.where(first < stop, ratio, 0.0)
        if not ADVANTAGES_OF_TOKENS:
            # A sequence counts once, also an empty one, whose ratio is 1: a bound below 1 clips it, as in TRL.
            advantage = tl.load(advantages_ptr + sequence).to(tl.float64)
            n_below, n_above = _clips(ratio, advantage, low, high, delta)
            n_below, n_above = tl.where(is_new, n_below, 0.0), tl.where(is_new, n_above, 0.0)
    tl.store(sums_ptr + sequence, tl.sum(loss, axis=0) / denominator)  # of this chunk alone
    _add(sums_ptr + n_examples + sequence, tl.sum(entropy, axis=0), is_new)
    _add(sums_ptr + 2 * n_examples + sequence, tl.sum(kl, axis=0), is_new)
    _add(sums_ptr + 3 * n_examples + sequence, n_below, is_new)
    _add(sums_ptr + 4 * n_examples + sequence, n_above, is_new)
    _add(sums_ptr + 5 * n_examples + sequence, sum_of_ratios, is_new)
    earlier = tl.load(sums_ptr + 6 * n_examples + sequence, mask=is_new == 0, other=_INFINITY)
    tl.store(sums_ptr + 6 * n_examples + sequence, tl.minimum(least_ratio, earlier))
    earlier = tl.load(sums_ptr + 7 * n_examples + sequence, mask=is_new == 0, other=-_INFINITY)
    tl.store(sums_ptr + 7 * n_examples + sequence, tl.maximum(most_ratio, earlier))


@Kernel
def _batch_kernel(
    sums_ptr, counts_ptr, loss_ptr, rounded_ptr, means_ptr, n_examples,
    RATIOS_OF_SEQUENCES: tl.constexpr, CLIPS_OF_SEQUENCES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    loss = tl.zeros([BLOCK], tl.float64)
    entropy = tl.zeros([BLOCK], tl.float64)
    kl = tl.zeros([BLOCK], tl.float64)
    below = tl.zeros([BLOCK], tl.float64)
    above = tl.zeros([BLOCK], tl.float64)
    ratios = tl.zeros([BLOCK], tl.float64)
    least_below = tl.zeros([BLOCK], tl.float64) + _INFINITY
    most_above = tl.zeros([BLOCK], tl.float64) - _INFINITY
    least = tl.zeros([BLOCK], tl.float64) + _INFINITY
    most = tl.zeros([BLOCK], tl.float64) - _INFINITY
    tokens = tl.zeros([BLOCK], tl.int64)
    present = tl.zeros([BLOCK], tl.int64)
    for first in range(0, n_examples, BLOCK):
        places = first + tl.arange(0, BLOCK)
        inside = places < n_examples
        n_tokens = tl.load(counts_ptr + places, mask=inside, other=0)
        tokens += n_tokens
        present += (n_tokens > 0).to(tl.int64)
        loss += tl.load(sums_ptr + places, mask=inside, other=0.0)
        entropy += tl.load(sums_ptr + n_examples + places, mask=inside, other=0.0)
        kl += tl.load(sums_ptr + 2 * n_examples + places, mask=inside, other=0.0)
        n_below = tl.load(sums_ptr + 3 * n_examples + places, mask=inside, other=0.0)
        n_above = tl.load(sums_ptr + 4 * n_examples + places, mask=inside, other=0.0)
        below += n_below
        above += n_above
        counted = inside
        if not CLIPS_OF_SEQUENCES:  # shares of the tokens of each sequence that has any
            counted = inside & (n_tokens > 0)
            n_below /= tl.maximum(n_tokens, 1)
            n_above /= tl.maximum(n_tokens, 1)
        least_below = tl.where(counted & (n_below < least_below), n_below, least_below)
        most_above = tl.where(counted & (n_above > most_above), n_above, most_above)
        ratios += tl.load(sums_ptr + 5 * n_examples + places, mask=inside, other=0.0)
        least = tl.minimum(least, tl.load(sums_ptr + 6 * n_examples + places, mask=inside, other=_INFINITY))
        most = tl.maximum(most, tl.load(sums_ptr + 7 * n_examples + places, mask=inside, other=-_INFINITY))
    of_chunk = tl.sum(loss, axis=0)
    tl.store(loss_ptr, of_chunk)
    tl.store(rounded_ptr, of_chunk.to(tl.float32))
    # Each chunk writes metrics of all tokens so far, so the last chunk writes those of the batch.
    n_tokens = tl.maximum(tl.sum(tokens, axis=0), 1)
    n_clips = n_tokens
    if CLIPS_OF_SEQUENCES:
        n_clips = tl.maximum(n_examples, 1)
    n_ratios = n_tokens
    if RATIOS_OF_SEQUENCES:
        n_ratios = tl.maximum(tl.sum(present, axis=0), 1)
    n_below, n_above, sum_of_ratios = tl.sum(below, axis=0), tl.sum(above, axis=0), tl.sum(ratios, axis=0)
    lowest, highest = tl.min(least_below, axis=0), tl.max(most_above, axis=0)
    nan = _INFINITY - _INFINITY
    tl.store(means_ptr, (tl.sum(entropy, axis=0) / n_tokens).to(tl.float32))
    tl.store(means_ptr + 1, (tl.sum(kl, axis=0) / n_tokens).to(tl.float32))
    tl.store(means_ptr + 2, (n_below / n_clips).to(tl.float32))
    tl.store(means_ptr + 3, (n_above / n_clips).to(tl.float32))
    tl.store(means_ptr + 4, ((n_below + n_above) / n_clips).to(tl.float32))  # a token is not both
    tl.store(means_ptr + 5, tl.where(lowest == _INFINITY, nan, lowest).to(tl.float32))
    tl.store(means_ptr + 6, tl.where(highest == -_INFINITY, nan, highest).to(tl.float32))
    # A minimum loses NaN, and a sum keeps it.
    is_nan = sum_of_ratios != sum_of_ratios
    tl.store(means_ptr + 7, (sum_of_ratios / n_ratios).to(tl.float32))
    tl.store(means_ptr + 8, tl.where(is_nan, nan, tl.min(least, axis=0)).to(tl.float32))
    tl.store(means_ptr + 9, tl.where(is_nan, nan, tl.max(most, axis=0)).to(tl.float32))


class PolicyLoss(NamedTuple):
    """What a loss of rollouts is, apart from tensors of tokens.

    Attributes:
        term: the cost of a token.
        level: the importance level of the ratio, a name of `IMPORTANCE_LEVELS` in `losses/rollouts.py`.
        beta: weight of the KL to the reference; 0: the KL is a metric alone.
        kl_estimator: "k1", "k2" or "k3".
        corrects_kl: whether the estimate is multiplied by the ratio.
        divisor: of the sum over tokens, a number, or a tensor () on the device of the tokens.
        by_length: whether a sequence's tokens are also divided by their number.
    """

    term: PolicyTerm
    level: str
    beta: float
    kl_estimator: str
    corrects_kl: bool
    divisor: float | Tensor
    by_length: bool

    @property
    def per_sequence(self) -> bool:
        """Whether the tokens of a sequence share a ratio, and its gradient."""
        return self.level in ("sequence", "trajectory")


class PolicySides(NamedTuple):
    """Inputs of tokens, contiguous: (B, T) in the target's positions, or (B,) or (B, 1) where said.

    Attributes:
        advantages: also one a sequence.
        old_logps: log-probabilities under the sampling policy. None: the ratio is 1.
        ref_logps: under the reference, or (n_valid,) of the tokens that count. None: no KL.
        importance_weights: also one a sequence. None: 1.
        ref_is_compact: whether `ref_logps` are of the tokens that count.
    """

    advantages: Tensor
    old_logps: Tensor | None
    ref_logps: Tensor | None
    importance_weights: Tensor | None
    ref_is_compact: bool

    @property
    def advantages_of_tokens(self) -> bool:
        # A sequence of one position has one value either way.
        return self.advantages.shape[1:].numel() > 1

    @property
    def weights_of_tokens(self) -> bool:
        return self.importance_weights is not None and self.importance_weights.shape[1:].numel() > 1


@dataclass(eq=False)
class PolicySums:
    """Sums and metrics of a batch of B sequences, which its chunks fill.

    Attributes:
        sums: (8, B) float64: the chunk's loss, and of all chunks so far sums of entropies, KL, tokens or sequences
            clipped below and above, and ratios; the least and the largest ratio.
        means: (10,) float32, the fields of `PolicyMetrics` in order, of the chunks so far.
    """

    sums: Tensor
    means: Tensor

    @classmethod
    def of(cls, n_sequences: int, device: torch.device) -> PolicySums:
        return cls(
            torch.empty(8, n_sequences, dtype=torch.float64, device=device),
            torch.empty(10, dtype=torch.float32, device=device),
        )


def policy_loss(
    loss: PolicyLoss,
    into: PolicySums,
    logps: Tensor,
    entropy: Tensor,
    sides: PolicySides,
    *,
    token_counts: Tensor,
    index: Tensor | None,
    tokens: slice,
    with_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return a chunk's share of the loss (), in float64 and in float32, and its gradient by `logps`, float32 or None.

    Chunks come in the order of the tokens. With `loss.level` "token" one may end within a sequence.

    Args:
        into: takes what metrics need.
        logps, entropy: (len,) float32, of the chunk's tokens.
        token_counts: (B,) int64, tokens of each sequence that count.
        index: (n_valid,) int64, the place of each of these tokens in (B * T,). None: all count.
        tokens: the chunk's, among those that count.
    """
    n_sequences, device = into.sums.shape[1], logps.device
    grad = torch.empty_like(logps) if with_gradient else None
    share = torch.empty((), dtype=torch.float64, device=device)
    rounded = torch.empty((), dtype=torch.float32, device=device)
    of_tensor, number = (loss.divisor, 1.0) if isinstance(loss.divisor, Tensor) else (None, float(loss.divisor))
    term, per_sequence = loss.term, loss.per_sequence
    block, num_warps = POLICY_LOSS
    _sequences_kernel(
        (n_sequences, 1, 1),
        (
            *(logps, entropy, token_counts, index),
            *(sides.advantages, sides.old_logps, sides.ref_logps, sides.importance_weights),
            *(of_tensor, grad, into.sums),
        ),
        (
            *(n_sequences, tokens.start, tokens.stop),
            *(float(term.low), float(term.high), float(term.delta), float(loss.beta), number),
            *(term.curve, loss.level, loss.kl_estimator, loss.corrects_kl, loss.by_length),
            *(sides.advantages_of_tokens, sides.weights_of_tokens, sides.ref_is_compact, block),
        ),
        num_warps,
    )
    _batch_kernel(
        (1, 1, 1),
        (into.sums, token_counts, share, rounded, into.means),
        (n_sequences, per_sequence, per_sequence and not sides.advantages_of_tokens, block),
        num_warps,
    )
    return share, rounded, grad
