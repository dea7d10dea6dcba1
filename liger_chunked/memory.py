from __future__ import annotations

import dataclasses
import functools
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from liger_chunked.engine import Group, LossWeights, Rows, Teacher, TopK, choose, linear_token_stats, token_stats
from liger_chunked.engine.choose import logit_bytes
from liger_chunked.engine.distillation import DistillationStep, Route, distillation_step
from liger_chunked.engine.epilogue import EpiloguePass, StatisticsPass
from liger_chunked.engine.gradients import HeadGradients
from liger_chunked.engine.head import HeadPass
from liger_chunked.engine.hooks import isolated
from liger_chunked.engine.objective import Differentiated
from liger_chunked.engine.rows import SEQUENCES_PER_GROUP, group_rows, token_rows
from liger_chunked.engine.step import StatisticsStep, run_step
from liger_chunked.kernels.backend import has_wide_tiles, wide_tiles
from liger_chunked.losses import (
    LigerFusedLinearCrossEntropyLoss,
    LigerFusedLinearDistillationBase,
    LigerFusedLinearPolicyBase,
    LigerFusedLinearPreferenceBase,
    LigerFusedLinearUnpairedPreferenceBase,
)
from liger_chunked.losses.base import StatsLoss
from liger_chunked.private import DispatchMode, tree_leaves, without_modes
from liger_chunked.types import (
    AdaptedWeight,
    LogitOptions,
    LossHead,
    MemoryEstimate,
    TokenStats,
    check_number,
    shown,
)

Loss = nn.Module | Callable[..., Any]

_PREFERENCE = (LigerFusedLinearPreferenceBase, LigerFusedLinearUnpairedPreferenceBase)
_MOST_PIECES = 1 << 16  # each takes milliseconds
_HOPPER = (9, 0)


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
    logits_budget: int | float | str | None = None,
    capability: tuple[int, int] | None = None,
) -> MemoryEstimate:
    """Estimate the peak GPU memory of a step of `loss` above its inputs, gradients included.

    Runs the step on meta tensors, without a GPU. Does not count cuBLAS's workspace, values per token, or `kl_input`.

    Args:
        loss: `linear_token_stats`, or an instance of the cross entropy or of a subclass of
            `LigerFusedLinearPolicyBase`, `LigerFusedLinearPreferenceBase`, `LigerFusedLinearUnpairedPreferenceBase` or
            `LigerFusedLinearDistillationBase`, also your own. ULD and on-policy distillation are refused.
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
        logits_budget: most bytes of logits in memory: a number, or a string such as "512MiB". None: the loss's own.
        capability: the GPU's compute capability, such as (9, 0) for Hopper, which decides whether the fused epilogue
            runs. None: that of this machine's GPU, or without one Hopper's.

    Returns:
        A `MemoryEstimate`: bytes by part, and their sum `peak`.

    Raises:
        TypeError: `loss` is of another kind, or a size, `dtype`, `shape`, `capability` or `logits_budget` has the wrong
            type.
        ValueError: a size is not positive, `shape` or `valid` does not fit the loss, or the loss takes no such
            reference or teacher, or needs one. Or a `logits_budget` is invalid, or so small that it cuts the step into
            more than 65,536 pieces.

    >>> from liger_chunked import LigerFusedLinearDPOLoss
    >>> batch = {"vocab_size": 128256, "hidden_size": 4096, "shape": (8, 2048), "valid": 8192}
    >>> print(estimate_memory(LigerFusedLinearDPOLoss(), **batch, ref_hidden_size=4096))
    3262 MiB: logits 2004, weight_grad 1002, input_grad 192, hidden 64
    >>> print(estimate_memory(LigerFusedLinearDPOLoss(), **batch, trainable_head=False, logits_budget=256 << 20))
    443 MiB: logits 251, input_grad 176, hidden 16

    >>> from liger_chunked import LigerFusedLinearCrossEntropyLoss
    >>> batch = {"vocab_size": 151936, "hidden_size": 896, "shape": (32768,)}
    >>> print(estimate_memory(LigerFusedLinearCrossEntropyLoss(), **batch, capability=(8, 0)))
    1763 MiB: logits 1187, weight_grad 519, input_grad 56
    >>> print(estimate_memory(LigerFusedLinearCrossEntropyLoss(), **batch, capability=(9, 0)))
    1781 MiB: logits 1187, weight_grad 519, input_grad 56, other 19
    """
    check_sizes(dtype, shape, vocab_size=vocab_size, hidden_size=hidden_size, lora_rank=lora_rank,
                ref_hidden_size=ref_hidden_size, teacher_hidden_size=teacher_hidden_size,
                teacher_top_k=teacher_top_k)  # fmt: skip
    if capability is not None and not (isinstance(capability, tuple) and len(capability) == 2):
        raise TypeError(f"capability must be two ints, (9, 0) for Hopper, got {shown(capability)}")
    group, options = read_loss(loss, ref_hidden_size, teacher_hidden_size, teacher_top_k)
    if logits_budget is not None:
        options = dataclasses.replace(options, logits_budget=logits_budget)
    counted = _Bytes()
    with counted:
        rows = meta_rows(group, tuple(shape), valid)
    compute_dtype = autocast or dtype
    _check_pieces(options, rows.n_valid, vocab_size, compute_dtype)
    inputs = functools.partial(_inputs, vocab_size, rows.n_positions, dtype, bias)
    head, input = counted.given(*inputs(hidden_size, trainable_head, trainable_input, lora_rank))
    reference, given_teacher = (
        None if size is None else counted.given(*inputs(size)) for size in (ref_hidden_size, teacher_hidden_size)
    )
    wide_tiles = _has_wide_tiles(capability)
    with counted:
        if reference is not None:
            token_stats(*reference, rows, ("logps",), options, dtype=compute_dtype, wide_tiles=wide_tiles)
        if isinstance(loss, LigerFusedLinearDistillationBase):
            step = _distillation(loss, rows, compute_dtype, head, options, given_teacher, teacher_top_k)
            _differentiate(run_step(step, head, input), head, input)
        elif isinstance(loss, StatsLoss) and not (
            isinstance(loss, LigerFusedLinearCrossEntropyLoss) and loss.reduction == "none"
        ):
            plan = choose.for_loss(
                head,
                rows,
                compute_dtype,
                outputs=loss._outputs,
                differentiates=loss._differentiates,
                options=options,
                whole_batch=loss._whole_batch,
                wide_tiles=wide_tiles,
            )

            def objective(stats: TokenStats, index: slice | Tensor) -> Tensor:
                return functools.reduce(torch.add, (getattr(stats, name).sum() for name in plan.differentiates))

            _differentiate(run_step(StatisticsStep(plan, Differentiated(objective)), head, input), head, input)
        else:
            stats = token_stats(head, input, rows, ("logps",), options, dtype=compute_dtype, wide_tiles=wide_tiles)
            assert stats.logps is not None
            _differentiate(stats.logps.sum(), head, input)
    return counted.most


@ordinary_autograd()
def count_bytes(step: Callable[[], object]) -> MemoryEstimate:
    counted = _Bytes()
    with counted:
        step()
    return counted.most


Part = Literal["logits", "weight_grad", "input_grad", "hidden", "other"]

_ALLOCATE: dict[Part, tuple[Any, ...]] = {
    "logits": (HeadPass.reserve, HeadPass._gradient, EpiloguePass.reserve, StatisticsPass.reserve),
    "weight_grad": (
        HeadGradients.__init__, HeadGradients.weight_gradient, HeadGradients.add, HeadGradients.add_exponentials,
    ),
    "input_grad": (HeadGradients._input_gradient, HeadGradients.open_input),
    "hidden": (Rows.take,),
}  # fmt: skip
_PARTS: dict[CodeType, Part] = {
    function.__code__: part for part, functions in _ALLOCATE.items() for function in functions
}
# A cast of the hidden states counts as "other" if torch lacks the first.
_COPIES = tuple(op.default for name in ("_to_copy", "clone") if (op := getattr(torch.ops.aten, name, None)))


class _Bytes(DispatchMode):  # type: ignore[misc]
    """Counts bytes of new tensors, by part; `most` is the peak."""

    def __init__(self) -> None:
        super().__init__()
        self.most = MemoryEstimate()
        self._alive = dataclasses.asdict(self.most)
        self._parts: weakref.WeakKeyDictionary[torch.UntypedStorage, Part | None] = weakref.WeakKeyDictionary()

    def given(self, head: LossHead, hidden_states: Tensor) -> tuple[LossHead, Tensor]:
        """Count a cast of hidden states as "hidden", and no other input."""
        self._parts[hidden_states.untyped_storage()] = "hidden"
        return head, hidden_states

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [x.untyped_storage() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        for storage in given:
            self._parts.setdefault(storage, None)
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            # No scalars: the engine caches one.
            if isinstance(x, Tensor) and x.ndim and x.untyped_storage() not in self._parts:
                of_source = self._parts[given[0]] if func in _COPIES else None
                self._count(x.untyped_storage(), of_source or _part_of_caller())
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


def _part_of_caller() -> Part:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in _PARTS:
            return _PARTS[frame.f_code]
        frame = frame.f_back
    return "other"


def _inputs(
    vocab_size: int,
    n_positions: int,
    dtype: torch.dtype,
    has_bias: bool,
    hidden_size: int,
    trainable_head: bool = False,
    trainable_input: bool = False,
    lora_rank: int | None = None,
) -> tuple[LossHead, Tensor]:
    weight = _meta(vocab_size, hidden_size, dtype=dtype).requires_grad_(trainable_head)
    bias = _meta(vocab_size, dtype=dtype).requires_grad_(trainable_head) if has_bias else None
    input = _meta(n_positions, hidden_size, dtype=dtype).requires_grad_(trainable_input)
    return LossHead(weight if lora_rank is None else _adapted(weight, lora_rank), bias), input


def _adapted(weight: Tensor, rank: int) -> AdaptedWeight:
    down, up = (_meta(*shape, dtype=torch.float32) for shape in ((rank, weight.shape[1]), (weight.shape[0], rank)))
    down.requires_grad_()
    return AdaptedWeight(weight, up.requires_grad_(), lambda x: x.to(down.dtype) @ down.t())


def _differentiate(loss: Tensor, head: LossHead, input: Tensor) -> None:
    weight = head.weight
    of_weight = (weight.weight, weight.up) if isinstance(weight, AdaptedWeight) else (weight,)
    trainable = [x for x in (input, *of_weight, head.bias) if x is not None and x.requires_grad]
    if trainable:
        torch.autograd.grad(loss, trainable)


def _distillation(
    loss: LigerFusedLinearDistillationBase,
    rows: Rows,
    dtype: torch.dtype,
    head: LossHead,
    options: LogitOptions,
    given_teacher: tuple[LossHead, Tensor] | None,
    teacher_top_k: int | None,
) -> DistillationStep:
    teacher = None
    route: Route
    if given_teacher is not None:
        teacher = Teacher.of(*given_teacher, loss.teacher_options)._replace(dtype=dtype)
        route = loss._route_of_logits()
    else:
        assert teacher_top_k is not None
        n, every = rows.n_positions, slice(0, rows.n_valid)
        logps, ids = (rows.take(_meta(n, teacher_top_k, dtype=t), every) for t in (torch.float32, torch.int64))
        route = TopK(loss.divergence, loss.options, logps, ids)
    hard = loss.weight_hard_loss > 0
    weights = LossWeights(1.0, -1.0 if hard else None)
    return distillation_step(head, dtype, teacher, rows, weights, route, options, has_target=hard)


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


def _meta(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def check_sizes(dtype: torch.dtype, shape: Sequence[int], **sizes: int | None) -> None:
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype, got {shown(dtype)}")
    for argument, size in sizes.items():
        check_number(argument, size, whole=True, optional=True)
        if size is not None and size < 1:
            raise ValueError(f"{argument} must be positive, got {size}")
    if not isinstance(shape, Sequence) or not all(isinstance(n, int) for n in shape):
        raise TypeError(f"shape must be a tuple of ints, the target's, got {shown(shape)}")


def read_loss(
    loss: Loss, ref_hidden_size: int | None, teacher_hidden_size: int | None, teacher_top_k: int | None
) -> tuple[Group, LogitOptions]:
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


def meta_rows(group: Group, shape: tuple[int, ...], valid: int | Sequence[int] | None) -> Rows:
    n_sequences, length = (shape if len(shape) == 2 else (1, *shape)) if shape else (0, 0)
    if len(shape) not in (1, 2) or (group != "token" and len(shape) != 2) or min(shape) < 1:
        expected = "(B, T) or (N,)" if group == "token" else "(B, T)"
        raise ValueError(f"shape must be {expected}, of positive sizes, for this loss, got {shape}")
    if group == "pair" and n_sequences % 2:
        raise ValueError(f"shape must stack as many chosen as rejected sequences, got an odd {n_sequences} in {shape}")
    lengths = valid_lengths(valid, n_sequences, length)
    n, n_positions = sum(lengths), n_sequences * length
    index = None if n == n_positions else _meta(n)
    target = _meta(1).expand(n) if index is None else _meta(n)  # the caller's, unless some tokens are ignored
    if group == "token":
        return token_rows(target, _meta(n_positions, dtype=torch.bool), index, length)
    per_group = SEQUENCES_PER_GROUP[group]
    counts, of_sides = _meta(n_sequences // per_group, per_group), _meta(2) if group == "pair" else None
    return group_rows(target, _meta(*shape, dtype=torch.bool), index, lengths, counts, of_sides)


def valid_lengths(valid: int | Sequence[int] | None, n_sequences: int, length: int) -> list[int]:
    """Return each sequence's valid tokens, spreading one count evenly."""
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
