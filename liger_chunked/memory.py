"""The memory of a loss, by a formula of sizes: nothing runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import nn

from liger_chunked.engine import choose, cutting, epilogue, linear_token_stats
from liger_chunked.engine.cutting import Budget, Tiles
from liger_chunked.engine.plan import Path
from liger_chunked.kernels.backend import has_wide_tiles, wide_tiles
from liger_chunked.kernels.tuning.hopper import PRODUCT, Tiling
from liger_chunked.losses import (
    LigerFusedLinearCrossEntropyLoss,
    LigerFusedLinearDistillationBase,
    LigerFusedLinearOnPolicyDistillationLoss,
    LigerFusedLinearPolicyBase,
    LigerFusedLinearPreferenceBase,
    LigerFusedLinearUnpairedPreferenceBase,
)
from liger_chunked.types import (
    LogitOptions,
    LossHead,
    MemoryEstimate,
    accumulation_dtype,
    check_number,
    shown,
)

Loss = nn.Module | Callable[..., Any]

_HOPPER = (9, 0)
_OF_SEQUENCES = (
    LigerFusedLinearPolicyBase,
    LigerFusedLinearUnpairedPreferenceBase,
    LigerFusedLinearOnPolicyDistillationLoss,
)
_LOSSES = (
    LigerFusedLinearCrossEntropyLoss,
    LigerFusedLinearPreferenceBase,
    *_OF_SEQUENCES,
    LigerFusedLinearDistillationBase,
)


def estimate_memory(
    loss: Loss,
    *,
    vocab_size: int,
    hidden_size: int,
    shape: Sequence[int],
    valid: int | Sequence[int] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    autocast: torch.dtype | None = None,
    trainable_head: bool = True,
    trainable_input: bool = True,
    logits_budget: int | float | str | None = None,
    teacher_hidden_size: int | None = None,
) -> MemoryEstimate:
    """Return the peak GPU memory of a forward and backward of `loss` above its inputs, gradients included.

    A formula: with V and H of the head, N tokens, n of the longest chunk of those that have a target, and s and d bytes
    of an element of the products and of a parameter, the peak is the larger sum of the moments "chunk" and "end".

    |               | chunk    | end      |                                                                         |
    |---------------|----------|----------|-------------------------------------------------------------------------|
    | logits        | n V s    |          | within `logits_budget`; with their wider dtype, or a tile of a teacher's |
    | dW            | V H s    | V H s    | 4 V H, and at the end + V H d, if several chunks are summed, in float16  |
    | dX            | N H d    | N H d    | 4 N H in float16, and at the end + N H d                                 |
    | dX of a chunk | n H s    |          | 0 if in its place in dX; 4 n H if a chunk has several tiles, + n H d cast |
    | hidden states | n H s    | n H s    | 0 unless tokens are left out, reordered or cast                          |
    | head          | V H s    | V H s    | 0 without autocast; in a chunk also a teacher's                          |

    Not counted: a few numbers per token, db, gradients of an adapter, cuBLAS's workspace. A reference's statistics come
    first and take less. A divergence without a kernel takes at most what it is counted with, and so does a forward
    alone of `linear_token_stats` or with a `logits_dtype`.

    Args:
        loss: `linear_token_stats`, or an instance of the cross entropy or of a loss of preferences, policies or
            distillation, also your own. Distillation counts with a teacher of hidden states.
        vocab_size, hidden_size: V and H.
        shape: of the target, (B, T) or (N,); (B, T) for losses of sequences, and with an even B for losses of pairs.
        valid: tokens with a target: an int, the number in the batch, spread evenly, or a sequence of B ints. None: all.
        dtype: of weight and hidden states.
        autocast: the dtype of an active autocast. None: it is off.
        trainable_head: whether the weight needs a gradient.
        trainable_input: whether the hidden states need one; if neither they nor the head do, only a forward runs.
        logits_budget: most bytes of logits in memory: a number, or a string such as "512MiB". None: the loss's own.
        teacher_hidden_size: H of the teacher of a distillation loss. None: as the student's.

    Returns:
        A `MemoryEstimate`, bytes by part at the peak, for this machine's GPU, or without one for Hopper, which may cut
        a step that others run in one chunk.

    Raises:
        TypeError, ValueError: an argument has the wrong type or value, or `shape` or `valid` does not fit the loss.

    >>> from liger_chunked import LigerFusedLinearDPOLoss
    >>> batch = {"vocab_size": 128256, "hidden_size": 4096, "shape": (8, 2048), "valid": 8192}
    >>> print(estimate_memory(LigerFusedLinearDPOLoss(), **batch))
    3262 MiB: logits 2004, weight_grad 1002, input_grad 192, hidden 64
    >>> print(estimate_memory(LigerFusedLinearDPOLoss(), **batch, trainable_head=False, logits_budget="256MiB"))
    443 MiB: logits 251, input_grad 176, hidden 16
    """
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype, got {shown(dtype)}")
    sizes = {"vocab_size": vocab_size, "hidden_size": hidden_size}
    sizes["teacher_hidden_size"] = hidden_size if teacher_hidden_size is None else teacher_hidden_size
    for name, of_head in sizes.items():
        check_number(name, of_head, whole=True)
        if of_head < 1:
            raise ValueError(f"{name} must be positive, got {of_head}")
    lengths = _lengths(loss, shape, valid)
    if teacher_hidden_size is not None and not isinstance(loss, LigerFusedLinearDistillationBase):
        raise ValueError(f"teacher_hidden_size={teacher_hidden_size} is of losses with a teacher, got {_named(loss)}")
    if autocast is not None and not (isinstance(autocast, torch.dtype) and autocast.is_floating_point):
        raise TypeError(f"autocast must be a floating-point torch.dtype or None, got {shown(autocast)}")
    of_loss: Any = loss
    options: LogitOptions = LogitOptions() if loss is linear_token_stats else of_loss.options
    if logits_budget is not None:
        options = dataclasses.replace(options, logits_budget=logits_budget)
    products = dtype if autocast is None or dtype == torch.float64 else autocast
    step = _Step(loss, vocab_size, hidden_size, lengths, dtype, trainable_head, trainable_input)
    cut = _cut(step, options, products)

    size, wide, of_parameter = products.itemsize, accumulation_dtype(products).itemsize, dtype.itemsize
    is_half, is_cast, n_rows = products == torch.float16, products != dtype, cut.n_rows
    of_input = wide if is_half else of_parameter  # of dX
    scatters_rows = cut.reorders or sum(lengths) < prod(shape)
    hidden, cast_head = (
        (is_cast or scatters_rows) * n_rows * hidden_size * size,
        is_cast * vocab_size * hidden_size * size,
    )
    of_teacher = is_cast * vocab_size * sizes["teacher_hidden_size"] * size if cut.teacher else 0
    if not (trainable_head or trainable_input):
        return MemoryEstimate(cut.logits + cut.teacher, hidden=hidden, other=cast_head + of_teacher + cut.product)
    is_summed = cut.n_sums > 1 or is_half or is_cast
    weight_grad = trainable_head * vocab_size * hidden_size * (wide if is_summed else size)
    row_sum = trainable_head * cut.sums_rows * (size < wide and not is_summed) * cut.n_columns * hidden_size * wide
    input_grad = trainable_input * prod(shape) * hidden_size * of_input
    of_row = wide if is_half or cut.n_columns < vocab_size else size
    cast_row = (
        of_input if of_row != of_input and scatters_rows else 0
    )  # rows are put in their places in the dtype of dX
    of_chunk = trainable_input * (scatters_rows or of_row != of_input) * n_rows * hidden_size * (of_row + cast_row)
    running = MemoryEstimate(
        cut.logits + cut.teacher,
        weight_grad + row_sum,
        input_grad + of_chunk,
        hidden,
        cast_head + of_teacher + cut.product,
    )
    moments = [running]
    if cut.teacher and cut.n_sums == 1:  # gradients are allocated once the teacher's logits are gone
        before = MemoryEstimate(logits=running.logits, hidden=hidden, other=running.other)
        moments = [before, dataclasses.replace(running, logits=cut.logits, other=cast_head)]
    # At the end what is wider than its parameter is rounded: a copy.
    rounded = weight_grad // wide * of_parameter if is_summed and wide > of_parameter else 0
    of_inputs = input_grad // wide * of_parameter if of_input > of_parameter else 0
    moments.append(MemoryEstimate(0, weight_grad + rounded, input_grad + of_inputs, hidden, cast_head))
    return max(moments, key=lambda moment: moment.peak)


class _Step(NamedTuple):
    """What decides how a step is cut. `lengths` has the tokens with a target of each sequence."""

    loss: Any
    vocab_size: int
    hidden_size: int
    lengths: list[int]
    dtype: torch.dtype
    trainable_head: bool
    trainable_input: bool


def _named(loss: Any) -> str:
    if loss is linear_token_stats:
        return "linear_token_stats"
    return f"the class {loss.__name__}" if isinstance(loss, type) else f"a {type(loss).__name__}"


def _lengths(loss: Loss, shape: Sequence[int], valid: int | Sequence[int] | None) -> list[int]:
    """Check the loss and the target's shape, and return the tokens with a target of each sequence."""
    if not isinstance(shape, Sequence) or not all(isinstance(n, int) for n in shape):
        raise TypeError(f"shape must be a tuple of ints, the target's, got {shown(shape)}")
    if loss is not linear_token_stats and not isinstance(loss, _LOSSES):
        expected = ", ".join(base.__name__ for base in _LOSSES)
        raise TypeError(f"loss must be linear_token_stats or an instance of {expected}, got {_named(loss)}")
    shape, of_pairs = tuple(shape), isinstance(loss, LigerFusedLinearPreferenceBase)
    by_token = not of_pairs and not isinstance(loss, _OF_SEQUENCES)
    if len(shape) not in (1, 2) or (not by_token and len(shape) != 2) or min(shape) < 1:
        expected = "(B, T) or (N,)" if by_token else "(B, T)"
        raise ValueError(f"shape must be {expected}, of positive sizes, for this loss, got {shape}")
    if of_pairs and shape[0] % 2:
        raise ValueError(f"shape must stack as many chosen as rejected sequences, got an odd {shape[0]} in {shape}")
    n_sequences, length = shape if len(shape) == 2 else (1, *shape)
    if valid is None:
        return [length] * n_sequences
    if isinstance(valid, int):
        lengths = [valid // n_sequences + (i < valid % n_sequences) for i in range(n_sequences)]
    else:
        lengths = list(valid)
    if len(lengths) != n_sequences or not all(0 <= n <= length for n in lengths):
        raise ValueError(
            f"valid must be a count up to {n_sequences * length}, or one up to {length} for each of {n_sequences} "
            f"sequences, got {shown(valid)}"
        )
    return lengths


class _Cut(NamedTuple):
    """How a step is cut.

    Attributes:
        n_sums: how often a chunk is added to dW.
        n_rows: of the longest chunk.
        n_columns: of its tiles.
        sums_rows: whether several of them have the same columns.
        reorders: whether the rows of a chunk are not consecutive in the batch.
        logits, teacher, product: bytes of its logits with their gradient, of a tile of the teacher's with what is
            computed of it, and of a float32 product of the fused epilogue, or in a forward alone its partial sums.
    """

    n_sums: int
    n_rows: int
    n_columns: int
    sums_rows: bool
    reorders: bool
    logits: int
    teacher: int = 0
    product: int = 0


def _cut(step: _Step, options: LogitOptions, products: torch.dtype) -> _Cut:
    """Cut a batch as `engine.choose` does for this loss."""
    loss = step.loss
    n_valid, vocab_size, size = sum(step.lengths), step.vocab_size, products.itemsize
    assert options.logits_budget is None or isinstance(options.logits_budget, int)
    budget = Budget(options.logits_budget, vocab_size, step.hidden_size, size)
    if isinstance(loss, LigerFusedLinearDistillationBase):
        bytes_per_logit = loss._route_of_logits().bytes_per_logit(products, products)
        most, most_of_tile = cutting.chunk_and_tile(budget, n_valid, bytes_per_logit, step.trainable_head)
        chunks = cutting.chunks_of_tokens(n_valid, most)
        n_rows = chunks[0].length
        of_tile = cutting.largest(cutting.whole_rows(n_rows, vocab_size, most_of_tile))
        of_teacher = of_tile * (bytes_per_logit - size)
        return _Cut(len(chunks), n_rows, vocab_size, False, False, n_rows * vocab_size * size, of_teacher)
    bytes_per_logit = choose.logit_bytes(options, products)
    if loss is linear_token_stats or getattr(loss, "reduction", None) == "none":
        tiles = cutting.tiles(n_valid, vocab_size, budget.logits(0, bytes_per_logit), square=True)
        columns, sums_rows = _columns(tiles, vocab_size), cutting.row_blocks(tiles) > 1
        return _Cut(1, n_valid, columns, sums_rows, False, cutting.largest(tiles) * bytes_per_logit)
    head = LossHead(torch.empty(0, step.hidden_size, dtype=step.dtype))  # the epilogue asks for its layout
    outputs, differentiates = (getattr(loss, name, ("logps",)) for name in ("_outputs", "_differentiates"))
    class_weight = getattr(loss, "ce_weight", None)
    group, lengths = getattr(loss, "_group", "token"), tuple(step.lengths)
    if group == "pair":
        n_pairs = len(lengths) // 2
        lengths = tuple(map(sum, zip(lengths[:n_pairs], lengths[n_pairs:], strict=True)))
    layout = choose.layout_of_loss(
        choose.Counts(n_valid) if group == "token" else choose.Counts(n_valid, lengths, lengths),
        budget,
        vocab_size,
        bytes_per_logit,
        options,
        outputs,
        differentiates,
        getattr(loss, "_whole_batch", False),
        ranks_cut_alike=False,
        may_use_epilogue=(
            epilogue.is_large(n_valid * vocab_size, step.hidden_size)
            and _has_wide_tiles()
            and epilogue.can_hold(products)
            and epilogue.computes(head, products, options, class_weight, outputs)
        ),
    )
    n_rows = max(chunk.length for chunk in layout.chunks)
    columns = _columns(max(layout.tiles, key=cutting.largest), vocab_size)
    reorders = group == "pair" and len(lengths) > 1
    logits, product = layout.largest_tile * bytes_per_logit, 0
    if layout.path is Path.EPILOGUE and (layout.n_contributions > 1 or not step.trainable_head):
        is_forward = not (step.trainable_head or step.trainable_input)
        logits = 0 if is_forward else n_rows * epilogue.padded(vocab_size) * size
        n_sums = -(-vocab_size // Tiling.of(step.hidden_size).cols) * (1 + ("entropy" in outputs))  # of a row
        product = 4 * (n_rows * n_sums if is_forward else min(n_rows * step.hidden_size, PRODUCT))
    return _Cut(layout.n_contributions, n_rows, columns, False, reorders, logits, product=product)


def _columns(tiles: Tiles, vocab_size: int) -> int:
    return tiles[0].vocab_slice.stop if tiles else vocab_size


def _has_wide_tiles() -> bool:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return wide_tiles(_HOPPER) if accelerator is None else has_wide_tiles(accelerator)
