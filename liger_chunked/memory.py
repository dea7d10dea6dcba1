from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from liger_chunked.calls import altered
from liger_chunked.engine import Differentiated, Fused, Objective, Rows
from liger_chunked.engine.choose import logit_bytes
from liger_chunked.engine.estimated import Estimated, Part, estimated, part_of_next
from liger_chunked.engine.hooks import isolated
from liger_chunked.kernels.backend import has_wide_tiles, wide_tiles
from liger_chunked.losses import LigerFusedLinearCrossEntropyLoss
from liger_chunked.losses.base import StatsLoss
from liger_chunked.private import DispatchMode, tree_leaves, without_modes
from liger_chunked.types import LogitOptions, LossHead, MemoryEstimate, TokenStats, shown
from liger_chunked.typical import Loss, TypicalCall

_MOST_PIECES = 1 << 16  # each takes milliseconds
_HOPPER = (9, 0)
_META = torch.device("meta")


@contextmanager
def ordinary_autograd() -> Iterator[None]:
    with (
        without_modes(),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autograd.set_detect_anomaly(False),
        isolated(),
    ):
        yield


@ordinary_autograd()
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
    lora_rank: int | None = None,
    ref_hidden_size: int | None = None,
    teacher_hidden_size: int | None = None,
    teacher_top_k: int | None = None,
    teacher_vocab_size: int | None = None,
    logits_budget: int | float | str | None = None,
    capability: tuple[int, int] | None = None,
) -> MemoryEstimate:
    """Estimate the peak GPU memory of a step of `loss` above its inputs, gradients included.

    Runs the step on meta tensors, without a GPU. Does not count cuBLAS's workspace, values per token, or `kl_input`.

    Args:
        loss: `linear_token_stats`, or an instance of the cross entropy or of a subclass of
            `LigerFusedLinearPolicyBase`, `LigerFusedLinearPreferenceBase`, `LigerFusedLinearUnpairedPreferenceBase` or
            `LigerFusedLinearDistillationBase`, also your own, or of ULD or on-policy distillation.
        vocab_size: V, the rows of the head's weight.
        hidden_size: H, its columns.
        shape: of the target, (B, T) or (N,); (B, T) for losses of sequences, and with an even B for losses of pairs.
        valid: tokens with a target: an int, the number in the batch, spread evenly, or a sequence of B ints. None: all.
        dtype: of weight, bias and hidden states.
        autocast: the dtype of an active autocast. None: it is off.
        bias: whether the head has a bias.
        trainable_head: whether weight and bias need a gradient.
        trainable_input: whether the hidden states need one; if neither they nor the head do, only a forward runs.
        lora_rank: r of a trainable float32 adapter on the head (`AdaptedWeight`). None: no adapter.
        ref_hidden_size: the columns of the reference's weight. None: calls pass `ref_logps`, or no reference.
        teacher_hidden_size: the columns of the teacher's weight. None: calls pass `teacher_logps`, or no teacher.
        teacher_top_k: k of `teacher_logps`; distillation needs this or `teacher_hidden_size`. None: there are none.
        teacher_vocab_size: the rows of the teacher's weight. None: `vocab_size`.
        logits_budget: most bytes of logits in memory: a number, or a string such as "512MiB". None: the loss's own.
        capability: the GPU's compute capability, such as (9, 0) for Hopper, which decides whether the fused epilogue
            runs. None: that of this machine's GPU, or without one Hopper's.

    Returns:
        A `MemoryEstimate`: bytes by part, and their sum `peak`.

    Raises:
        TypeError: `loss` is of another kind, or a size, `dtype`, `autocast`, `shape`, `capability` or `logits_budget`
            has the wrong type.
        ValueError: a size is not positive, `shape` or `valid` does not fit the loss, or the loss takes no such
            reference or teacher, or needs one. Or a `logits_budget` is invalid, or so small that it cuts the step into
            more than 65,536 pieces.

    >>> from liger_chunked import LigerFusedLinearDPOLoss
    >>> batch = {"vocab_size": 128256, "hidden_size": 4096, "shape": (8, 2048), "valid": 8192}
    >>> print(estimate_memory(LigerFusedLinearDPOLoss(), **batch, ref_hidden_size=4096))
    3263 MiB: logits 2004, weight_grad 1002, input_grad 192, hidden 64, other 1
    >>> print(estimate_memory(LigerFusedLinearDPOLoss(), **batch, trainable_head=False, logits_budget=256 << 20))
    444 MiB: logits 251, input_grad 176, hidden 16, other 1

    >>> from liger_chunked import LigerFusedLinearCrossEntropyLoss
    >>> batch = {"vocab_size": 151936, "hidden_size": 896, "shape": (32768,)}
    >>> print(estimate_memory(LigerFusedLinearCrossEntropyLoss(), **batch, capability=(8, 0)))
    1763 MiB: logits 1187, weight_grad 519, input_grad 56
    >>> print(estimate_memory(LigerFusedLinearCrossEntropyLoss(), **batch, capability=(9, 0)))
    1781 MiB: logits 1187, weight_grad 519, input_grad 56, other 19
    """
    call = TypicalCall(
        loss, vocab_size, hidden_size, shape, valid, dtype, bias, trainable_head, trainable_input, lora_rank,
        ref_hidden_size, teacher_hidden_size, teacher_vocab_size, teacher_top_k,
    )  # fmt: skip
    if capability is not None and not (isinstance(capability, tuple) and len(capability) == 2):
        raise TypeError(f"capability must be two ints, (9, 0) for Hopper, got {shown(capability)}")
    if autocast is not None and not (isinstance(autocast, torch.dtype) and autocast.is_floating_point):
        raise TypeError(f"autocast must be a floating-point torch.dtype or None, got {shown(autocast)}")
    options = call.options
    if logits_budget is not None:
        options = dataclasses.replace(options, logits_budget=logits_budget)
    _check_pieces(options, sum(call.lengths), vocab_size, autocast or dtype)
    given, trainable = call.arguments(_META)
    given["n_valid"] = call.n_valid
    if sum(call.lengths) < given["input"].shape[:-1].numel():
        given |= call.marked(given, call.lengths)
    counted = _Bytes(hidden=[x for name, x in given.items() if name.endswith("input")])
    token = estimated.set(Estimated(_has_wide_tiles(capability), autocast))
    try:
        with counted:
            value = _value(loss, options, given)
            if trainable:
                torch.autograd.grad(value, trainable)
    finally:
        estimated.reset(token)
    return counted.most


class _Fused(Exception):
    """Carries a loss () out of the call, whose rest reads values of tokens."""


def _value(loss: Any, options: LogitOptions, given: dict[str, Any]) -> Tensor:
    """Call a loss, or `linear_token_stats`, on meta tensors."""
    if not isinstance(loss, torch.nn.Module):
        return loss(**given, logits_budget=options.logits_budget).logps.sum()
    own: Any = altered(loss, options=options)
    if isinstance(loss, LigerFusedLinearCrossEntropyLoss) and loss.ce_weight is not None:
        given = {**given, "ce_weight": loss.ce_weight.to(_META)}

    def fuse(
        head: LossHead, input: Tensor, rows: Rows, objective: Objective, class_weight: Tensor | None = None
    ) -> Fused:
        """Fuse a sum in place of the objective, which may be a user's and read values."""

        def summed(stats: TokenStats, index: slice | Tensor) -> Tensor:
            return functools.reduce(torch.add, (getattr(stats, name).sum() for name in own._differentiates))

        raise _Fused(fuse_as_planned(head, input, rows, Differentiated(summed), class_weight).loss)

    if isinstance(loss, StatsLoss):
        fuse_as_planned, own._fuse = own._fuse, fuse
    try:
        result = own.forward(**given)
    except _Fused as fused:
        return fused.args[0]
    return result[0].sum() if isinstance(result, tuple) else result.sum()


@ordinary_autograd()
def count_bytes(step: Callable[[], object]) -> MemoryEstimate:
    counted = _Bytes()
    with counted:
        step()
    return counted.most


def peak_bytes(step: Callable[[], object]) -> int:
    """Return the most bytes of new tensors that `step` has at once."""
    return count_bytes(step).peak


# Some versions of torch lack the first.
_COPYING = ("_to_copy", "clone", "index_select")
_COPIES = tuple(op.default for name in _COPYING if (op := getattr(torch.ops.aten, name, None)))


def most_that_fits(fits: Callable[[int], bool], most: int) -> int:
    """Return the largest number up to `most` that fits, 0 if none does. All numbers below one that fits must fit.

    Doubles before it halves, because estimates of larger numbers take longer.
    """
    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)  # `low` fits, `high` does not or is too large
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


class _Bytes(DispatchMode):  # type: ignore[misc]
    """Counts the bytes of new tensors, by part; `most` is the peak. Copies of `hidden` are hidden states."""

    def __init__(self, hidden: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self.most = MemoryEstimate()
        self._alive = dataclasses.asdict(self.most)
        self._parts: weakref.WeakKeyDictionary[torch.UntypedStorage, Part | None] = weakref.WeakKeyDictionary()
        for x in hidden:
            self._parts[x.untyped_storage()] = "hidden"

    def __enter__(self) -> _Bytes:
        part_of_next.set("other")
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [x.untyped_storage() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        for storage in given:
            self._parts.setdefault(storage, None)
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            # No scalars: the engine caches one.
            if isinstance(x, Tensor) and x.ndim and x.untyped_storage() not in self._parts:
                of_source = self._parts[given[0]] if func in _COPIES else None
                self._count(x.untyped_storage(), of_source or part_of_next.get())
                part_of_next.set("other")
        return result

    def _count(self, storage: torch.UntypedStorage, part: Part) -> None:
        self._parts[storage] = part
        self._alive[part] += storage.nbytes()
        weakref.finalize(storage, self._free, part, storage.nbytes())
        moment = MemoryEstimate(**self._alive)
        if moment.peak > self.most.peak:
            self.most = moment

    def _free(self, part: Part, n_bytes: int) -> None:
        self._alive[part] -= n_bytes


def _check_pieces(options: LogitOptions, n_valid: int, vocab_size: int, dtype: torch.dtype) -> None:
    budget = options.logits_budget
    if budget is None:
        return
    assert isinstance(budget, int)
    row = vocab_size * logit_bytes(options, dtype)
    pieces = n_valid * row // budget
    if pieces > _MOST_PIECES:
        raise ValueError(
            f"logits_budget={budget} bytes cuts this step into about {pieces} pieces, and an estimate goes through at "
            f"most {_MOST_PIECES}: one row of logits takes {row} bytes. Pass a larger budget, "
            "such as '256MiB'"
        )


def _has_wide_tiles(capability: tuple[int, int] | None) -> bool:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if capability is None and accelerator is not None:
        return has_wide_tiles(accelerator)
    return wide_tiles(capability or _HOPPER)
