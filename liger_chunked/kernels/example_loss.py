"""Losses of single sequences with a known gradient: a curve of the log-ratio, with other numbers for either label.

With the log-ratio `x` of a sequence and the batch's reference point `z`, the loss of `n` sequences is

    1/n sum weight curve(scale x + point z),    (scale, point, weight) by the sequence's label

Two launches a chunk: a program a sequence sums its tokens in float64, evaluates the curve, and writes the gradient of
each token; one program then sums over sequences, in all and by label. PyTorch code differentiates the same formulas by
autograd. Bytes: log-probabilities and mean logits read once, gradients written once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from liger_chunked.kernels.backend import jit, tl
from liger_chunked.kernels.launch import Kernel
from liger_chunked.kernels.pair_loss import curve_at, fill, sum_counts, sum_tokens
from liger_chunked.kernels.tuning.generic import PAIR_LOSS, PAIRS_SUMMED
from liger_chunked.types import ExampleTerm


@Kernel
def _examples_kernel(
    logps_ptr, mean_logits_ptr, counts_ptr, desirable_ptr, point_ptr, ref_ptr, ref_tokens_ptr, grad_ptr, sums_ptr,
    n_examples, first_example, beta: tl.float64,
    scale_0: tl.float64, factor_0: tl.float64, weight_0: tl.float64,
    scale_1: tl.float64, factor_1: tl.float64, weight_1: tl.float64,
    CURVE: tl.constexpr, AVERAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    example = first_example + tl.program_id(0)
    n_tokens = tl.load(counts_ptr + example)
    desirable = tl.load(desirable_ptr + example) != 0
    zero = tl.full([], 0.0, tl.float64)  # Triton's interpreter takes a number that meets no float64 for float32
    scale = tl.where(desirable, scale_0 + zero, scale_1 + zero)
    factor = tl.where(desirable, factor_0 + zero, factor_1 + zero)
    weight = tl.where(desirable, weight_0 + zero, weight_1 + zero)
    start = sum_counts(counts_ptr, first_example, example, BLOCK)  # of the sequence's tokens in the chunk

    logps = sum_tokens(logps_ptr + start, n_tokens, BLOCK)
    length = tl.maximum(n_tokens, 1).to(tl.float64)
    if AVERAGE:
        logps /= length
    ratio = logps
    if ref_ptr is not None:
        ratio -= tl.load(ref_ptr + example).to(tl.float64)
    if ref_tokens_ptr is not None:
        ref_start = sum_counts(counts_ptr, 0, example, BLOCK)
        ref_logps = sum_tokens(ref_tokens_ptr + ref_start, n_tokens, BLOCK)
        if AVERAGE:
            ref_logps /= length
        ratio -= ref_logps

    value, slope = curve_at(CURVE, scale * ratio + factor * tl.load(point_ptr))
    tl.store(sums_ptr + example, tl.where(n_tokens == 0, 0.0, weight * value))
    tl.store(sums_ptr + n_examples + example, logps)
    tl.store(sums_ptr + 2 * n_examples + example, beta * ratio)
    tl.store(sums_ptr + 3 * n_examples + example, sum_tokens(mean_logits_ptr + start, n_tokens, BLOCK))
    if grad_ptr is not None:
        by_token = slope * (weight * scale) / n_examples
        if AVERAGE:
            by_token /= length
        fill(grad_ptr + start, n_tokens, by_token, BLOCK)


@jit
def _sum_of_side(x_ptr, desirable_ptr, n, SIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Return the sum of x, one number a sequence, over those whose label is SIDE."""
    total = tl.zeros([BLOCK], tl.float64)
    for first in range(0, n, BLOCK):
        places = first + tl.arange(0, BLOCK)
        inside = places < n
        belongs = (tl.load(desirable_ptr + places, mask=inside, other=0) != 0) == SIDE
        total += tl.load(x_ptr + places, mask=inside & belongs, other=0.0).to(tl.float64)
    return tl.sum(total, axis=0)


@jit
def _count_side(counts_ptr, desirable_ptr, n, SIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Return the sequences whose label is SIDE, and their tokens."""
    sequences = tl.zeros([BLOCK], tl.int64)
    tokens = tl.zeros([BLOCK], tl.int64)
    for first in range(0, n, BLOCK):
        places = first + tl.arange(0, BLOCK)
        inside = places < n
        belongs = inside & ((tl.load(desirable_ptr + places, mask=inside, other=0) != 0) == SIDE)
        sequences += belongs.to(tl.int64)
        tokens += tl.load(counts_ptr + places, mask=belongs, other=0)
    return tl.sum(sequences, axis=0), tl.sum(tokens, axis=0)


@jit
def _store_side(
    sums_ptr, counts_ptr, desirable_ptr, means_ptr, totals_ptr, n_examples, stop,
    SIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    sequences, tokens = _count_side(counts_ptr, desirable_ptr, stop, SIDE, BLOCK)
    logps = _sum_of_side(sums_ptr + n_examples, desirable_ptr, stop, SIDE, BLOCK) / tl.maximum(sequences, 1)
    rewards = _sum_of_side(sums_ptr + 2 * n_examples, desirable_ptr, stop, SIDE, BLOCK) / tl.maximum(sequences, 1)
    logits = _sum_of_side(sums_ptr + 3 * n_examples, desirable_ptr, stop, SIDE, BLOCK) / tl.maximum(tokens, 1)
    tl.store(means_ptr, logps.to(tl.float32))
    tl.store(means_ptr + 2, logits.to(tl.float32))
    tl.store(means_ptr + 4, rewards.to(tl.float32))
    tl.store(totals_ptr, sequences)
    tl.store(totals_ptr + 2, tokens)


@Kernel
def _batch_kernel(
    sums_ptr, counts_ptr, desirable_ptr, point_ptr, loss_ptr, rounded_ptr, means_ptr, totals_ptr,
    n_examples, first_example, stop_example, BLOCK: tl.constexpr,
):  # fmt: skip
    loss = sum_tokens(sums_ptr + first_example, stop_example - first_example, BLOCK) / n_examples
    tl.store(loss_ptr, loss)
    tl.store(rounded_ptr, loss.to(tl.float32))
    # Each chunk writes metrics of all sequences up to its own last one, so the last chunk writes those of the batch.
    _store_side(
        sums_ptr, counts_ptr, desirable_ptr, means_ptr, totals_ptr, n_examples, stop_example, True, BLOCK
    )  # fmt: skip
    _store_side(
        sums_ptr, counts_ptr, desirable_ptr, means_ptr + 1, totals_ptr + 1, n_examples, stop_example, False, BLOCK
    )  # fmt: skip
    tl.store(means_ptr + 6, tl.load(point_ptr).to(tl.float32))


class ExampleLoss(NamedTuple):
    """What a loss of sequences is, apart from tensors.

    Attributes:
        desirable, undesirable: of sequences of either label, with the same curve.
        beta: factor of log-ratios in the rewards.
        average: whether log-probabilities of sequences are means over tokens instead of sums.
    """

    desirable: ExampleTerm
    undesirable: ExampleTerm
    beta: float
    average: bool


@dataclass(eq=False)
class ExampleSums:
    """Sums and metrics of a batch of n sequences, which its chunks fill.

    Attributes:
        sums: (4, n) float64: loss, log-probability, reward, sum of mean logits over tokens.
        means: (7,) float32: of desirable and undesirable sequences, of the chunks so far: log-probability, mean
            logits, reward; then the reference point.
        totals: (4,) int64: desirable and undesirable sequences, and their tokens.
    """

    sums: Tensor
    means: Tensor
    totals: Tensor

    @classmethod
    def of(cls, n: int, device: torch.device) -> ExampleSums:
        return cls(
            torch.empty(4, n, dtype=torch.float64, device=device),
            torch.empty(7, dtype=torch.float32, device=device),
            torch.empty(4, dtype=torch.int64, device=device),
        )


def example_loss(
    loss: ExampleLoss,
    into: ExampleSums,
    logps: Tensor,
    mean_logits: Tensor,
    *,
    token_counts: Tensor,
    desirable: Tensor,
    point: Tensor,
    examples: slice,
    reference: Tensor | None,
    with_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return a chunk's share of the loss (), in float64 and in float32, and its gradient by `logps`, float32 or None.

    Args:
        into: takes what metrics need.
        logps, mean_logits: (len,) float32, of the chunk's tokens.
        token_counts: (n,) int64, tokens of each sequence.
        desirable: (n,) bool, the labels.
        point: () float64, the reference point.
        examples: the chunk's sequences, of the batch.
        reference: log-probabilities under the reference: (n, 1) of sequences, or float32 (N,) of all the batch's
            tokens. None: without a reference.
    """
    n, device = into.sums.shape[1], logps.device
    grad = torch.empty_like(logps) if with_gradient else None
    share = torch.empty((), dtype=torch.float64, device=device)
    rounded = torch.empty((), dtype=torch.float32, device=device)
    of_sequences, of_tokens = (reference, None) if reference is None or reference.ndim == 2 else (None, reference)
    numbers = [float(x) for term in (loss.desirable, loss.undesirable) for x in (term.scale, term.point, term.weight)]
    block, num_warps = PAIR_LOSS
    _examples_kernel(
        (examples.stop - examples.start, 1, 1),
        (logps, mean_logits, token_counts, desirable, point, of_sequences, of_tokens, grad, into.sums),
        (n, examples.start, float(loss.beta), *numbers, loss.desirable.curve, loss.average, block),
        num_warps,
    )
    _batch_kernel(
        (1, 1, 1),
        (into.sums, token_counts, desirable, point, share, rounded, into.means, into.totals),
        (n, examples.start, examples.stop, PAIRS_SUMMED),
        num_warps,
    )
    return share, rounded, grad
