from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from liger_chunked.engine.divergences import Measured, slopes_of_divergence
from liger_chunked.kernels.transform import transform, transform_and_slope
from liger_chunked.types import LogitOptions, Slopes, accumulation_dtype

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
        # Copy, probabilities, sorted values and index; of the student, also differences and gradient. The sorts come
        # before these, so that their workspaces fit too, for a teacher of up to twice the student's columns.
        of_teacher = teacher.itemsize + 3 * wide + _INDEX
        return student.itemsize + math.ceil(self.ratio * of_teacher) + 6 * wide + _INDEX

    def slopes(self) -> Slopes:
        return slopes_of_divergence(self.options, 1.0 if self.scale is None else self.scale.abs().max().float())

    def measure(
        self, student: Tensor, teacher: Tensor | None, target: Tensor | None, rows: slice, with_gradient: bool
    ) -> Measured:
        assert teacher is not None and target is None
        wide = accumulation_dtype(student.dtype)
        # The teacher first: its sort has the largest workspace, and nothing of the student's is alive yet.
        q = _sorted(_probabilities(teacher, self.teacher_options, wide))[0]
        p = _probabilities(student, self.options, wide)
        ranked, order = _sorted(p)
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


def _sorted(p: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows (n, V) in descending order, and the place (n, V), int64, of each value in its row of `p`.

    Few rows are sorted in two blocks, so that CUDA's workspace is half as large. Rows are sorted apart, so the bits are
    those of one sort. Many rows are not cut, because their sort has a program for each row and few rows leave most of
    the GPU idle.
    """
    n_rows = p.shape[0]
    values, order = torch.empty_like(p), torch.empty(p.shape, dtype=torch.int64, device=p.device)
    step = -(-n_rows // 2) if 1 < n_rows < _BY_SEGMENT else max(1, n_rows)
    for start in range(0, n_rows, step):
        block = slice(start, start + step)
        torch.sort(p[block], -1, descending=True, out=(values[block], order[block]))
    return values, order


# From the source of torch 2.6 to 2.13 (`aten/src/ATen/native/cuda/SortStable.cu`): from so many rows on, each is sorted
# by a program of its own. Fewer are sorted as one list, which takes more memory.
_BY_SEGMENT = 128


def _probabilities(logits: Tensor, options: LogitOptions, dtype: torch.dtype) -> Tensor:
    z = transform(logits.to(dtype), options.logit_scale, options.softcap, options.temperature)
    return z.softmax(-1)
