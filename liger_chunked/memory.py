"""Estimates of a loss's memory, before any of its tensors exist."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from liger_chunked.engine import Group, Layout, StatsLoss, TopK, linear_token_stats
from liger_chunked.engine.divergences import Route
from liger_chunked.engine.dry_run import Ledger, Projection, rehearse_distillation, rehearse_fused, rehearse_stats
from liger_chunked.engine.gradients import Needs
from liger_chunked.engine.step import Plan
from liger_chunked.kernels.backend import has_wide_tiles, wide_tiles
from liger_chunked.losses import (
    LigerFusedLinearCrossEntropyLoss,
    LigerFusedLinearDistillationBase,
    LigerFusedLinearPolicyBase,
    LigerFusedLinearPreferenceBase,
    LigerFusedLinearUnpairedPreferenceBase,
)
from liger_chunked.types import Head, LogitOptions, MemoryEstimate, check_number, shown

Loss = nn.Module | Callable[..., Any]

_PREFERENCE = (LigerFusedLinearPreferenceBase, LigerFusedLinearUnpairedPreferenceBase)
# Most pieces of a step; each takes milliseconds.
_MOST_PIECES = 1 << 16
# Assumed on a machine without a GPU.
_HOPPER = (9, 0)


def estimate_memory(
    loss: Loss,
    *,
    vocab_size: int,
    hidden_size: int,
    shape: Sequence[int],
    valid: int | Sequence[int] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    autocast: torch.dtype | None = None,
    bias: bool = False,
    trainable_head: bool = True,
    trainable_input: bool = True,
    ref_hidden_size: int | None = None,
    teacher_hidden_size: int | None = None,
    teacher_top_k: int | None = None,
    logits_budget: int | float | str | None = None,
    capability: tuple[int, int] | None = None,
) -> MemoryEstimate:
    """Estimate the peak GPU memory that one forward and backward of `loss` holds above its inputs, gradients included.

    The engine's steps run dry on meta tensors, without a GPU. Three things are not counted: permanent memory such as
    cuBLAS's workspace, tensors that the loss computes from its numbers per token, and completions for a KL
    (`kl_input`).

    Args:
        loss: a loss, also your own on one of the base classes, or `linear_token_stats`.
        vocab_size, hidden_size: the weight's.
        shape: of the target, (B, T) or (N,).
        valid: tokens that have a target, in the batch or in each of its B sequences. None: all.
        dtype: of weight, bias and hidden states.
        autocast: dtype of `torch.autocast`, if on.
        bias: whether the heads have one.
        trainable_head, trainable_input: whether they need a gradient; without any, only a forward runs.
        ref_hidden_size: H of a reference model given as hidden states. Its log-probabilities would take no memory.
        teacher_hidden_size: H of a teacher given as hidden states.
        teacher_top_k: entries per token of a teacher given as log-probabilities.
        logits_budget: instead of the loss's.
        capability: the target GPU's compute capability; None for this machine's, else Hopper's. Hopper, (9, 0), has the
            fused epilogue. So has data-centre Blackwell, (10, x), if the environment variable
            `LIGER_CHUNKED_WIDE_TILES` is "9,10".

    Raises:
        TypeError: a wrong type of loss, dtype, size or shape.
        ValueError: sizes that make no batch, a reference model or teacher that is missing or not taken, or a budget of
            too many pieces.

    >>> from liger_chunked import LigerFusedLinearDPOLoss
    >>> batch = {"vocab_size": 128256, "hidden_size": 4096, "shape": (8, 2048), "valid": 8192}
    >>> print(estimate_memory(LigerFusedLinearDPOLoss(), **batch, ref_hidden_size=4096))
    3262 MiB: logits 2004, weight_grad 1002, input_grad 192, hidden 64
    >>> print(estimate_memory(LigerFusedLinearDPOLoss(), **batch, trainable_head=False, logits_budget=256 << 20))
    443 MiB: logits 251, input_grad 176, hidden 16

    The same step on two GPUs:

    >>> from liger_chunked import LigerFusedLinearCrossEntropyLoss
    >>> batch = {"vocab_size": 151936, "hidden_size": 896, "shape": (32768,)}
    >>> print(estimate_memory(LigerFusedLinearCrossEntropyLoss(), **batch, capability=(8, 0)))
    1763 MiB: logits 1187, weight_grad 519, input_grad 56
    >>> print(estimate_memory(LigerFusedLinearCrossEntropyLoss(), **batch, capability=(9, 0)))
    1781 MiB: logits 1187, weight_grad 519, input_grad 56, other 19
    """
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype, got {shown(dtype)}")
    sizes = {"vocab_size": vocab_size, "hidden_size": hidden_size, "ref_hidden_size": ref_hidden_size,
             "teacher_hidden_size": teacher_hidden_size, "teacher_top_k": teacher_top_k}  # fmt: skip
    for argument, size in sizes.items():
        check_number(argument, size, whole=True, optional=True)
        if size is not None and size < 1:
            raise ValueError(f"{argument} must be positive, got {size}")
    if not isinstance(shape, Sequence) or not all(isinstance(n, int) for n in shape):
        raise TypeError(f"shape must be a tuple of ints, the target's, got {shown(shape)}")
    if capability is not None and not (isinstance(capability, tuple) and len(capability) == 2):
        raise TypeError(f"capability must be two ints, (9, 0) for Hopper, got {shown(capability)}")
    group, options = _read(loss, ref_hidden_size, teacher_hidden_size, teacher_top_k)
    if logits_budget is not None:
        options = dataclasses.replace(options, logits_budget=logits_budget)
    ledger = Ledger()
    with ledger:
        layout = _layout(group, tuple(shape), valid)
    _check_pieces(options, layout.n_valid, vocab_size, autocast or dtype)

    def projection(hidden: int, needs: Needs) -> Projection:
        head = Head(_meta(vocab_size, hidden, dtype=dtype), _meta(vocab_size, dtype=dtype) if bias else None)
        return Projection(head, _meta(layout.mask.numel(), hidden, dtype=dtype), autocast or dtype, needs)

    no_gradient = Needs(False, False, False)
    own = projection(hidden_size, Needs(trainable_input, trainable_head, trainable_head and bias))
    reference, teacher = (
        None if h is None else projection(h, no_gradient) for h in (ref_hidden_size, teacher_hidden_size)
    )
    top_k = None
    if teacher_top_k is not None:
        shape_of_top_k = (layout.mask.numel(), teacher_top_k)
        top_k = _meta(*shape_of_top_k, dtype=torch.float32), _meta(*shape_of_top_k)
    with torch.no_grad(), ledger:
        if reference is not None:
            rehearse_stats(ledger, reference, layout, options)
        if isinstance(loss, LigerFusedLinearDistillationBase):
            route = _route(loss, own.head, layout, teacher, top_k)
            rehearse_distillation(ledger, own, teacher, layout, options, route, loss.weight_hard_loss > 0)
        elif isinstance(loss, StatsLoss) and not _per_token(loss):
            plan = Plan.of(
                own.head,
                layout,
                own.dtype,
                outputs=loss._outputs,
                differentiates=loss._differentiates,
                options=options,
                whole_batch=loss._whole_batch,
                wide_tiles=_wide_tiles(capability),
            )
            rehearse_fused(ledger, own, plan)
        else:
            rehearse_stats(ledger, own, layout, options)
    return ledger.most


def _check_pieces(options: LogitOptions, n_valid: int, vocab_size: int, dtype: torch.dtype) -> None:
    """Raise ValueError if the estimate would take minutes."""
    budget = options.logits_budget
    if budget is None:
        return
    assert isinstance(budget, int)
    pieces = n_valid * vocab_size * dtype.itemsize // budget
    if pieces > _MOST_PIECES:
        raise ValueError(
            f"logits_budget={budget} bytes cuts this step into about {pieces} pieces, and an estimate goes through at "
            f"most {_MOST_PIECES}: one row of logits takes {vocab_size * dtype.itemsize} bytes. Pass a larger budget, "
            "such as '256MiB'"
        )


def _wide_tiles(capability: tuple[int, int] | None) -> bool:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if capability is None and accelerator is not None:
        return has_wide_tiles(accelerator)
    return wide_tiles(capability or _HOPPER)


def _per_token(loss: nn.Module) -> bool:
    """Return whether gradients wait for the backward."""
    return isinstance(loss, LigerFusedLinearCrossEntropyLoss) and loss.reduction == "none"


def _meta(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _read(
    loss: Loss, ref_hidden_size: int | None, teacher_hidden_size: int | None, teacher_top_k: int | None
) -> tuple[Group, LogitOptions]:
    """Return the loss's group and options. Check its reference model and teacher."""
    if isinstance(loss, (LigerFusedLinearDistillationBase, StatsLoss)):
        name, group, options = type(loss).__name__, loss._group, loss.options
    elif loss is linear_token_stats:
        name, group, options = "linear_token_stats", "token", LogitOptions()
    else:
        bases = (LigerFusedLinearDistillationBase, LigerFusedLinearCrossEntropyLoss, LigerFusedLinearPolicyBase)
        expected = ", ".join(base.__name__ for base in (*bases, *_PREFERENCE))
        described = f"the class {loss.__name__}" if isinstance(loss, type) else f"a {type(loss).__name__}"
        raise TypeError(f"loss must be linear_token_stats or an instance of {expected}, got {described}")
    if ref_hidden_size is not None:
        refuses = isinstance(loss, _PREFERENCE) and loss.use_ref_model is False
        if refuses or not isinstance(loss, (LigerFusedLinearPolicyBase, *_PREFERENCE)):
            raise ValueError(f"{name} takes no reference, got ref_hidden_size={ref_hidden_size}")
    distils = isinstance(loss, LigerFusedLinearDistillationBase)
    if (teacher_hidden_size is not None) + (teacher_top_k is not None) != distils:
        expected = "one of teacher_hidden_size and teacher_top_k" if distils else "no teacher"
        raise ValueError(
            f"{name} takes {expected}, got teacher_hidden_size={teacher_hidden_size}, teacher_top_k={teacher_top_k}"
        )
    if isinstance(loss, LigerFusedLinearDistillationBase) and teacher_top_k is not None and not loss.of_distributions:
        raise ValueError(f"{name} needs the teacher's logits, got teacher_top_k={teacher_top_k}")
    return group, options


def _route(
    loss: LigerFusedLinearDistillationBase,
    head: Head,
    layout: Layout,
    teacher: Projection | None,
    top_k: tuple[Tensor, Tensor] | None,
) -> Route:
    if teacher is not None:
        return loss._route_of_logits()
    assert top_k is not None
    logps, ids = (layout.input_rows(x, slice(0, layout.n_valid)) for x in top_k)
    return TopK(loss.divergence, loss.options, logps, ids)


def _layout(group: Group, shape: tuple[int, ...], valid: int | Sequence[int] | None) -> Layout:
    """Return the layout of a target of this shape, on meta tensors."""
    n_sequences, length = (shape if len(shape) == 2 else (1, *shape)) if shape else (0, 0)
    if len(shape) not in (1, 2) or (group != "token" and len(shape) != 2) or min(shape) < 1:
        expected = "(B, T) or (N,)" if group == "token" else "(B, T)"
        raise ValueError(f"shape must be {expected}, of positive sizes, for this loss, got {shape}")
    if group == "pair" and n_sequences % 2:
        raise ValueError(f"shape must stack as many chosen as rejected sequences, got an odd {n_sequences} in {shape}")
    lengths = _lengths(valid, n_sequences, length)
    per_group = {"token": n_sequences, "sequence": 1, "pair": 2}[group]
    n_groups = n_sequences // per_group
    # A pair's sequences are n_groups rows apart.
    group_lengths = [sum(lengths[i::n_groups]) for i in range(n_groups)]
    n, n_positions = sum(lengths), n_sequences * length
    slots = None if n == n_positions else _meta(n)
    dense = (n_positions,) if group == "token" else (n_groups, per_group, length)
    return Layout(
        shape=dense,
        target=_meta(1).expand(n) if slots is None else _meta(n),  # the caller's own
        rows=slots,
        slots=slots,
        mask=_meta(*dense, dtype=torch.bool),
        lengths=None if group == "token" else _meta(n_groups, per_group),
        side_lengths=_meta(2) if group == "pair" else None,
        group_lengths=None if group == "token" else group_lengths,
        stacked=group == "pair" and n_groups > 1,
    )


def _lengths(valid: int | Sequence[int] | None, n_sequences: int, length: int) -> list[int]:
    """Return the valid tokens of each sequence, with one count spread evenly."""
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
