"""Divergences of a block of logits, and their gradient, by kernels or autograd."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_chunked.engine.checks import check_graph, check_values
from liger_chunked.engine.collectives import gather
from liger_chunked.kernels import divergence_grad_, divergence_stats
from liger_chunked.kernels.transform import transform
from liger_chunked.types import Divergence, LogitOptions, Slopes, VocabShard, accumulation_dtype

# (n, V) logits of student and teacher to (n,).
DivergenceFunction = Callable[[Tensor, Tensor], Tensor]


class Measured(NamedTuple):
    """A block's results. `backward(g_divergence, g_logps)` overwrites student logits with their gradient."""

    divergence: Tensor
    logps: Tensor | None  # of the target
    backward: Callable[[Tensor, Tensor | None], object]


# The largest slopes assumed of divergences whose slope has no bound. In float16 a gradient steeper than assumed
# overflows. Assuming twice as much makes gradients underflow that are up to twice as large.
_STEEPEST = 1024.0
_STEEPEST_KL = 128.0  # of reverse KL, a quarter of the largest gap between log p and log q
_STEEPEST_COSINE = 16.0  # 1 / |z|


def slopes_of_divergence(options: LogitOptions, steepest: float = _STEEPEST) -> Slopes:
    """Return the bounds of a divergence, and of a target's log-probability at a temperature of 1.

    Args:
        steepest: a bound on the divergence's gradient by a transformed logit.
    """
    scale = abs(options.logit_scale)
    return {"divergence": steepest * (scale / options.temperature), "logps": scale}


def transformed(logits: Tensor, options: LogitOptions) -> Tensor:
    """Apply the transform without the temperature."""
    return transform(logits, options.logit_scale, options.softcap, 1.0)


def tempered(z: Tensor, options: LogitOptions) -> Tensor:
    return z if options.temperature == 1.0 else z / options.temperature


@dataclass(frozen=True)
class ClosedForm:
    divergence: Divergence
    options: LogitOptions
    teacher_options: LogitOptions
    shard: VocabShard | None = None

    def bytes_per_logit(self, student: torch.dtype, teacher: torch.dtype | None) -> int:
        assert teacher is not None
        return student.itemsize + teacher.itemsize

    def slopes(self) -> Slopes:
        return slopes_of_divergence(self.options, _steepest(self.divergence, self.options.temperature))

    def measure(
        self, student: Tensor, teacher: Tensor | None, target: Tensor | None, rows: slice, with_gradient: bool
    ) -> Measured:
        assert teacher is not None
        how = (self.divergence, self.options, self.teacher_options)
        of_ranks = None
        if self.shard is not None:
            of_ranks = functools.partial(gather, group=self.shard.group)
            target = None if target is None else target - self.shard.start
        stats = divergence_stats(student, teacher, target, *how, gather=of_ranks)

        def backward(g_divergence: Tensor, g_logps: Tensor | None) -> Tensor:
            return divergence_grad_(student, teacher, target, stats, g_divergence, g_logps, *how)

        return Measured(stats.divergence, stats.logps, backward)


def _steepest(divergence: Divergence, temperature: float) -> float:
    """Return a bound on the gradient by a logit that is divided by the temperature."""
    kind, beta = divergence.kind, divergence.beta
    if kind == "reverse_kl":
        return _STEEPEST_KL
    if kind == "cosine":
        return _STEEPEST_COSINE * temperature
    if kind == "mixture":
        if not 0.0 <= beta < 1.0:
            return _STEEPEST
        # p |log(p / m)| and p q / m, and their sums over ids, which are the slope
        of_log, of_ratio = max(1.0, -math.log1p(-beta)), 1.0 / max(beta, 1.0 - beta)
        return 2.0 * (abs(divergence.on_student) * of_log + abs(divergence.on_ratio) * of_ratio)
    return 1.0


@dataclass(frozen=True)
class ByAutograd:
    """Uses autograd, in the accumulation dtype."""

    function: DivergenceFunction
    options: LogitOptions
    teacher_options: LogitOptions

    def bytes_per_logit(self, student: torch.dtype, teacher: torch.dtype | None) -> int:
        assert teacher is not None
        # Copies, transforms, gradients, and saved tensors, two each.
        return student.itemsize + teacher.itemsize + 8 * accumulation_dtype(student).itemsize

    def slopes(self) -> Slopes:
        return slopes_of_divergence(self.options)

    def measure(
        self, student: Tensor, teacher: Tensor | None, target: Tensor | None, rows: slice, with_gradient: bool
    ) -> Measured:
        assert teacher is not None
        wide = accumulation_dtype(student.dtype)
        leaf = student.to(wide, copy=True)
        t = tempered(transformed(teacher.to(wide), self.teacher_options), self.teacher_options)
        logps = None
        with torch.set_grad_enabled(with_gradient):
            leaf.requires_grad_(with_gradient)
            z = transformed(leaf, self.options)
            divergence = measured_by(self.function, tempered(z, self.options), t)
            if target is not None:
                logps = -F.cross_entropy(z, target, reduction="none")

        def backward(g_divergence: Tensor, g_logps: Tensor | None) -> Tensor:
            return student.copy_(vector_jacobian({divergence: g_divergence, logps: g_logps}, [leaf])[0])

        return Measured(divergence.detach(), None if logps is None else logps.detach(), backward)


def vector_jacobian(outputs: Mapping[Tensor | None, Tensor | None], leaves: list[Tensor]) -> list[Tensor]:
    """Return vector-Jacobian products, zero for unused leaves."""
    connected = {x: g for x, g in outputs.items() if x is not None and g is not None and x.requires_grad}
    if not connected:
        return [torch.zeros_like(leaf) for leaf in leaves]
    with torch.autograd.set_multithreading_enabled(False):
        vjps = torch.autograd.grad(list(connected), leaves, list(connected.values()), allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, vjps, strict=True)]


def measured_by(function: DivergenceFunction, student: Tensor, teacher: Tensor) -> Tensor:
    """Return a user's divergence, checked to be (n,) with a gradient."""
    divergence = function(student, teacher)
    check_values("divergence", divergence, student.shape[:1], "tokens")
    if torch.is_grad_enabled() and student.requires_grad and not divergence.requires_grad:
        raise ValueError(
            "divergence has no gradient: it does not depend on the student's logits, or is detached from them"
        )
    check_graph("divergence", divergence, [student], owner=getattr(function, "__self__", None))
    return divergence
