"""Run chunks of the student, and project the teacher for each tile.

The loss is linear in the divergences, so their upstream gradients are known.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from liger_chunked.engine.adapter import apply_down
from liger_chunked.engine.batch import Layout, Tile, along, joined
from liger_chunked.engine.checks import compute_dtype
from liger_chunked.engine.divergences import ByAutograd, ClosedForm
from liger_chunked.engine.gradients import HeadGradients
from liger_chunked.engine.head import HeadPass, Tokens
from liger_chunked.engine.plan import Plan
from liger_chunked.engine.ranked import Ranked
from liger_chunked.engine.step import LinearObjective, Step
from liger_chunked.engine.top_k import TopK
from liger_chunked.types import HeadTensors, LogitOptions, LossHead, accumulation_dtype

# Each computes a divergence per token from untransformed logits (n, V).
Route = ByAutograd | ClosedForm | Ranked | TopK


class Divergences(NamedTuple):
    divergence: Tensor
    logps: Tensor | None  # of the target


@dataclass(frozen=True)
class LossWeights(LinearObjective):
    divergence: float | Tensor
    logps: float | Tensor | None

    def loss(self, values: Divergences) -> Tensor:
        loss = self.divergence * values.divergence.sum(dtype=torch.float64)
        if self.logps is None:
            return loss
        assert values.logps is not None
        return loss + self.logps * values.logps.sum(dtype=torch.float64)

    def gradients(self, values: Divergences) -> dict[str, Tensor]:
        return {}  # `DistillationPass.statistics` has the teacher's logits


class Teacher(NamedTuple):
    """A teacher's head, cut to V rows, and its hidden states (..., H_teacher)."""

    head: HeadTensors
    input: Tensor
    options: LogitOptions
    dtype: torch.dtype
    u: Tensor | None = None  # (..., r), of an adapter

    @classmethod
    def of(cls, head: LossHead, input: Tensor, options: LogitOptions) -> Teacher:
        dtype = compute_dtype(head, input)
        with torch.no_grad():
            tensors, u = apply_down(head, input, dtype)
        return cls(tensors, input, options, dtype, u)

    def readers(self, plan: Plan, chunk_rows: slice) -> list[Callable[[slice], Tensor]]:
        """Return functions from rows to hidden states and `u`."""
        return [plan.reader(x, chunk_rows, self.dtype) for x in (self.input, self.u) if x is not None]


@dataclass
class DistillationPass:
    """A `Pass`. `teacher` is None if `route` has log-probabilities."""

    plan: Plan
    weights: LossWeights
    route: Route
    teacher: Teacher | None
    has_target: bool
    head: HeadTensors
    grads: HeadGradients | None
    _student: HeadPass = field(init=False, repr=False)
    _teacher: HeadPass | None = field(default=None, init=False, repr=False)
    _readers: list[Callable[[slice], Tensor]] = field(default_factory=list, init=False, repr=False)
    _gradient: Tensor | None = field(default=None, init=False, repr=False)  # of the chunk's logits

    def __post_init__(self) -> None:
        self._student = HeadPass(self.head, self.plan.options)
        longest = max(rows.stop - rows.start for rows, _ in self.plan.chunks)
        self._student.reserve(longest * self._student.columns)

    def statistics(self, tokens: Tokens) -> Divergences:
        """Return divergences. With `grads`, overwrite logits with their gradient."""
        logits = self._student.project_all(tokens.x, tokens.u)
        start = tokens.rows.start
        self._readers = [] if self.teacher is None else self.teacher.readers(self.plan, tokens.rows)
        found = [
            self._measure(along(logits, rows), slice(start + rows.start, start + rows.stop))
            for rows, _ in tokens.tiles or [Tile(slice(0, 0), slice(0, 0))]
        ]
        if tokens.rows.stop == self.plan.layout.n_valid:
            self._teacher = None  # dW can use its memory
        self._gradient = logits
        return joined(found)

    def backward(self, tokens: Tokens, gradients: dict[str, Tensor]) -> None:
        grads, dz, self._gradient = self.grads, self._gradient, None
        assert grads is not None and dz is not None
        dx = grads.open_input(tokens.x, tokens.rows, True, tokens.u, self.head.up)
        grads.add(Tile(slice(0, dz.shape[0]), slice(0, dz.shape[1])), dz, tokens.x, self.head.weight, dx)
        grads.close_chunk(dx)

    def release(self) -> None:
        self._gradient = None
        self._student.release()

    @functools.cached_property
    def _weights_of_tokens(self) -> dict[str, Tensor]:
        n, dtype = self.plan.most_rows, accumulation_dtype(self.plan.dtype)
        given = {"divergence": self.weights.divergence, "logps": self.weights.logps}
        return {k: self.head.weight.new_empty(n, dtype=dtype).fill_(x) for k, x in given.items() if x is not None}

    def _measure(self, logits: Tensor, rows: slice) -> Divergences:
        layout = self.plan.layout
        measured = self.route.measure(
            student=logits,
            teacher=self._teacher_logits(rows),
            target=layout.target[rows] if self.has_target else None,
            rows=rows,
            with_gradient=self.grads is not None,
        )
        if self.grads is not None and logits.shape[0]:
            every = slice(0, logits.shape[0])
            # A user's divergence may have another dtype.
            weights = self._weights_of_tokens
            given = {name: along(g, every).to(getattr(measured, name).dtype) for name, g in weights.items()}
            gradients = self.grads.normalize(given)
            measured.backward(gradients["divergence"], gradients.get("logps"))
        return Divergences(measured.divergence, measured.logps)

    def _teacher_logits(self, rows: slice) -> Tensor | None:
        if self.teacher is None:
            return None
        if self._teacher is None:
            # Late: the GPU is idle until the student's first product.
            self._teacher = HeadPass(self.teacher.head.to(self.teacher.dtype), self.teacher.options)
            self._teacher.reserve(self.plan.most_rows * self._teacher.columns)
        return self._teacher.project_all(*(read(rows) for read in self._readers))


def distillation_step(
    head: LossHead,
    dtype: torch.dtype,
    teacher: Teacher | None,
    layout: Layout,
    weights: LossWeights,
    route: Route,
    options: LogitOptions,
    has_target: bool,
) -> Step:
    wide = options.logits_dtype or (None if teacher is None else teacher.options.logits_dtype)
    if wide is not None:
        raise ValueError(f"distillation rounds logits to the products' dtype, got logits_dtype={wide}")
    teacher_dtype = None if teacher is None else teacher.dtype
    plan = Plan.of_distillation(
        head,
        layout.local(),
        dtype,
        bytes_per_logit=route.bytes_per_logit(dtype, teacher_dtype),
        options=options,
        wants_weight=torch.is_grad_enabled() and head.weight.requires_grad,
    )
    if plan.scattered is not None and isinstance(route, TopK):
        order = plan.scattered.order
        route = replace(route, logps=route.logps[order], ids=route.ids[order])
    make_pass = functools.partial(DistillationPass, plan, weights, route, teacher, has_target)
    return Step(plan, weights, make_pass, teacher_dtype)
