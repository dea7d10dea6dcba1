from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from liger_chunked.engine.divergences import Measured
from liger_chunked.kernels.transform import transform, transform_and_slope
from liger_chunked.types import LogitOptions, accumulation_dtype

_INDEX = 8  # bytes of a sort's index


@dataclass(frozen=True)
class Ranked:
    """Computes `sum(|a sorted(p) - b sorted(q)|)`, the shorter one padded with zeros."""

    options: LogitOptions
    teacher_options: LogitOptions
    ratio: float  # teacher's columns per student's column
    scale: Tensor | None  # (n_valid,) a, or 1
    teacher_scale: Tensor | None  # (n_valid,) b, or 1

    def bytes_per_logit(self, student: torch.dtype, teacher: torch.dtype | None) -> int:
        assert teacher is not None
        wide = accumulation_dtype(student).itemsize
        # Copy, probabilities, sorted values and index; of the student, also differences and gradient.
        of_teacher = teacher.itemsize + 3 * wide + _INDEX
        return student.itemsize + math.ceil(self.ratio * of_teacher) + 6 * wide + _INDEX

    def measure(
        self, student: Tensor, teacher: Tensor | None, target: Tensor | None, rows: slice, with_gradient: bool
    ) -> Measured:
        assert teacher is not None and target is None
        wide = accumulation_dtype(student.dtype)
        p = _probabilities(student, self.options, wide)
        ranked, order = p.sort(-1, descending=True)
        q = _probabilities(teacher, self.teacher_options, wide).sort(-1, descending=True).values
        a, b = (None if x is None else x[rows, None].to(wide) for x in (self.scale, self.teacher_scale))
        if b is not None:
            q *= b
        shared = min(p.shape[1], q.shape[1])
        difference = ranked.clone() if a is None else ranked * a
        difference[:, :shared] -= q[:, :shared]
        divergence = difference.abs().sum(1) + q[:, shared:].sum(1)
        signs = difference.sign_()
        by_scale = (signs * ranked).sum(1)

        def backward(g_divergence: Tensor, g_logps: Tensor | None) -> Tensor:
            g = ranked.scatter_(1, order, signs)
            # The gradient of a softmax. `by_scale` is its sum of p * g.
            g = g.sub_(by_scale[:, None]).mul_(p).mul_(g_divergence[:, None])
            if a is not None:
                g *= a
            options = self.options
            g *= options.logit_scale / options.temperature
            if options.softcap is not None:
                _, slope = transform_and_slope(student.to(wide), options.logit_scale, options.softcap, 1.0)
                assert slope is not None
                g *= slope
            return student.copy_(g)

        return Measured(divergence, None, backward, by_scale)


def _probabilities(logits: Tensor, options: LogitOptions, dtype: torch.dtype) -> Tensor:
    z = transform(logits.to(dtype), options.logit_scale, options.softcap, options.temperature)
    return z.softmax(-1)
