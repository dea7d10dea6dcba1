"""Distillation: values of tokens are divergences of a student from a teacher, projected for each tile.

The loss is linear in the divergences, so their upstream gradients are known before they are measured. Only divergences
of single tokens wait for them, and then run the step once more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_chunked.engine import choose
from liger_chunked.engine.adapter import apply_down
from liger_chunked.engine.checks import compute_dtype
from liger_chunked.engine.cutting import Chunk, Tile
from liger_chunked.engine.divergences import ByAutograd, ClosedForm
from liger_chunked.engine.plan import Plan, Tokens
from liger_chunked.engine.rows import Rows, hide_ignored
from liger_chunked.engine.sink import NOTHING_NEEDED, Needs, Sink
from liger_chunked.engine.source import LogitsSource
from liger_chunked.engine.step import Objective, Operands, Share, Step, differentiable, operands_of
from liger_chunked.engine.top_k import TopK
from liger_chunked.kernels.backend import torch_on_host
from liger_chunked.kernels.operands import along, joined
from liger_chunked.shapes import shapes_only
from liger_chunked.types import HeadTensors, LogitOptions, LossHead, accumulation_dtype

# Each computes a divergence per token from untransformed logits (n, V).
Route = ByAutograd | ClosedForm | TopK


class Divergences(NamedTuple):
    divergence: Tensor
    logps: Tensor | None  # of the target


class LossWeights(NamedTuple):
    """The upstream gradients of a token's divergence, and of its target's log-probability if that is in the loss.

    Each is a number or a tensor () for all tokens, or (n_valid,), one for each of the plan's rows.
    """

    divergence: float | Tensor
    logps: float | Tensor | None

    def at(self, rows: slice | Tensor) -> LossWeights:
        """Return the weights of some rows."""
        return self._replace(**{name: g[rows] for name, g in self._asdict().items() if _is_by_token(g)})

    def loss(self, values: Divergences) -> Tensor:
        """Return the loss (), float64."""
        loss = _weighted_sum(self.divergence, values.divergence)
        if self.logps is None:
            return loss
        assert values.logps is not None
        return loss + _weighted_sum(self.logps, values.logps)


def _is_by_token(weight: float | Tensor | None) -> bool:
    return isinstance(weight, Tensor) and weight.ndim > 0


def _weighted_sum(weight: float | Tensor, values: Tensor) -> Tensor:
    if _is_by_token(weight):
        return (weight * values).sum(dtype=torch.float64)
    return weight * values.sum(dtype=torch.float64)


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

    def readers(self, plan: Plan, row_slice: slice) -> list[Callable[[slice], Tensor]]:
        """Return functions from rows to hidden states and `u`."""
        return [plan.reader(x, row_slice, self.dtype) for x in (self.input, self.u) if x is not None]


@dataclass(frozen=True, eq=False)
class Distillation(Objective):
    """The loss of divergences of a student from a teacher. It is linear in them.

    Attributes:
        route: what measures; `TopK`, which has log-probabilities, needs no `teacher`.
    """

    plan: Plan
    weights: LossWeights
    route: Route
    teacher: Teacher | None
    has_target: bool

    @property
    def step(self) -> Step:
        return Step(self.plan, self, lambda *given: DivergenceSource(self, *given))

    def share(self, values: Divergences, rows: Rows, chunk: Chunk, with_gradient: bool) -> Share:
        # `DivergenceSource` knows the weights, and formed the gradient of the logits together with the divergences.
        values = hide_ignored(values, rows.counted_in(chunk))
        return Share(self.weights.at(chunk.row_slice).loss(values), None, values)

    def join(self, rows: Rows, parts: list[Divergences]) -> Divergences:
        return rows.join_compact(parts)

    def without_values(self, plan: Plan, device: torch.device) -> Divergences:
        x = torch.empty(plan.rows.n_valid, dtype=accumulation_dtype(plan.dtype), device=device)
        return Divergences(x, x if self.has_target else None)

    def of_live_rows(self) -> Distillation:
        """Return the step of the rows whose `weights`, of single tokens, are not all 0. Waits for the device."""
        by_token = [weight for weight in self.weights if isinstance(weight, Tensor)]
        is_live = torch.stack([g != 0 for g in by_token]).any(0)
        if is_live.all():
            return self
        live, route = is_live.nonzero().view(-1), self.route
        if isinstance(route, TopK):
            route = replace(route, logps=route.logps[live], ids=route.ids[live])
        return replace(self, plan=self.plan.of_rows(live), weights=self.weights.at(live), route=route)


@dataclass(eq=False)
class DivergenceSource:
    """A `Source` of a student's divergences from a teacher.

    `statistics` projects the student for a chunk, and for each tile of its rows projects the teacher, measures the
    divergence, and overwrites the student's logits with their gradient, for which it needs no second pass over the
    logits. `backward` adds the chunk's dX, dW and db.
    """

    loss: Distillation
    plan: Plan
    head: HeadTensors
    sink: Sink | None
    _student: LogitsSource = field(init=False)
    _teacher: _TeacherLogits | None = field(init=False)
    _upstream: dict[str, Tensor] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        plan, teacher = self.plan, self.loss.teacher
        self._student = LogitsSource(self.head, plan.options)
        self._student.reserve(max(chunk.length for chunk in plan.chunks) * self._student.columns)
        self._teacher = None if teacher is None else _TeacherLogits(plan, teacher)

    def statistics(self, tokens: Tokens) -> tuple[Divergences, Tensor]:
        chunk, sink = tokens.row_slice, self.sink
        logits = self._student.project_all(tokens.x, tokens.u)  # (n, V)
        if sink is not None and not self._upstream:
            self._upstream = self._equal_gradients()  # now: the GPU is idle until the first product
        if self._teacher is not None:
            self._teacher.open(chunk)
        given = None
        if sink is not None and tokens.x.shape[0]:
            given = sink.normalize(
                {k: self._at(k, g, chunk) for k, g in self._upstream.items()}, self.loss.route.slopes
            )
        parts = []
        # Without tokens, an empty tile: `join` needs the values of one.
        for in_chunk, _ in tokens.tiles or (Tile(slice(0, 0), slice(0, 0)),):
            rows = slice(chunk.start + in_chunk.start, chunk.start + in_chunk.stop)
            parts.append(self._measure(along(logits, in_chunk), rows, in_chunk, given))
        if chunk == self.plan.chunks[-1].row_slice:
            self._teacher = None  # dW can use its memory
        return joined(parts), logits

    def backward(self, tokens: Tokens, memo: Tensor, gradients: dict[str, Tensor]) -> None:
        assert self.sink is not None
        whole = Tile(slice(0, tokens.x.shape[0]), slice(0, self._student.columns))
        self.sink.open_chunk(self._student.head, tokens.x, tokens.row_slice, (whole,), tokens.u)
        self.sink.add(whole, memo)
        self.sink.close_chunk()

    def release(self) -> None:
        self._student.release()

    def _measure(self, logits: Tensor, rows: slice, in_chunk: slice, upstream: dict[str, Tensor] | None) -> Divergences:
        """Return the divergences of a tile. With `upstream`, its logits become the gradient.

        Args:
            rows, in_chunk: the tile's rows among those of the step, and of the chunk.
            upstream: the chunk's upstream gradients.
        """
        target = self.plan.rows.target if self.loss.has_target else None
        measured = self.loss.route.measure(
            student=logits,
            teacher=None if self._teacher is None else self._teacher.project(rows),
            target=None if target is None else target[rows],
            rows=rows,
            with_gradient=upstream is not None,
        )
        if upstream is not None:
            # A user's divergence may have another dtype.
            given = {
                name: self._at(name, g, in_chunk).to(getattr(measured, name).dtype) for name, g in upstream.items()
            }
            measured.backward(given["divergence"], given.get("logps"))
        return Divergences(measured.divergence, measured.logps)

    def _at(self, name: str, g: Tensor, rows: slice) -> Tensor:
        """Return the upstream gradients of some rows: of single tokens their own, of equal ones as many."""
        is_by_token = _is_by_token(getattr(self.loss.weights, name))
        return along(g, rows if is_by_token else slice(0, min(rows.stop - rows.start, g.shape[0])))

    def _equal_gradients(self) -> dict[str, Tensor]:
        """Return the upstream gradients: those of single tokens, or (n,) equal ones for the longest tile."""
        n_rows, dtype, device = self.plan.most_rows, accumulation_dtype(self.plan.dtype), self.head.weight.device
        return {
            name: weight if _is_by_token(weight) else torch.empty(n_rows, dtype=dtype, device=device).fill_(weight)
            for name, weight in self.loss.weights._asdict().items()
            if weight is not None
        }


@dataclass(frozen=True, eq=False)
class _DivergencesRule:
    """Divergences and, with a target, log-probabilities of single tokens, dense (N,) each.

    The backward runs the step again, because only then are the gradients of tokens known.
    """

    loss: Distillation

    @property
    def names(self) -> tuple[str, ...]:
        return ("divergence", "logps") if self.loss.has_target else ("divergence",)

    def forward(self, operands: Operands, needs: Needs, may_hold: bool) -> tuple[Sequence[Tensor], Any]:
        values = self.loss.step.run(operands, NOTHING_NEEDED).values
        return [self.loss.plan.rows.to_dense(getattr(values, name)) for name in self.names], None

    def backward(
        self, operands: Operands, memo: None, upstream: dict[str, Tensor], needs: Needs
    ) -> tuple[Tensor | None, ...]:
        loss, plan = self.loss, self.loss.plan
        dtype = accumulation_dtype(plan.dtype)
        given = {name: plan.rows.to_compact(g).to(dtype).contiguous() for name, g in upstream.items()}
        loss = replace(loss, weights=LossWeights(given.get("divergence", 0.0), given.get("logps")))
        if torch_on_host(operands.input) and plan.scattered is None:
            loss = loss.of_live_rows()
        return loss.step.run(operands, needs).gradients


def divergences_of_tokens(loss: Distillation, head: LossHead, input: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the differentiable divergences (N,) of all positions, and the log-probabilities of their targets.

    Both are 0 at ignored positions. Takes the products of the forward once more in the backward.
    """
    if shapes_only():
        empty = loss.plan.rows.to_dense(loss.without_values(loss.plan, input.device).divergence)
        return empty, empty if loss.has_target else None
    values = differentiable(_DivergencesRule(loss), operands_of(head, input, loss.plan.dtype))
    values = {name: loss.plan.rows.fill_ignored(x) for name, x in values.items()}
    return values["divergence"], values.get("logps")


class _TeacherLogits:
    """Projects a teacher for the tiles of one chunk after another, into one buffer."""

    def __init__(self, plan: Plan, teacher: Teacher) -> None:
        self._plan, self._teacher = plan, teacher
        self._logits: LogitsSource | None = None
        self._readers: list[Callable[[slice], Tensor]] = []

    def open(self, row_slice: slice) -> None:
        """Start a chunk of the step's rows."""
        self._readers = self._teacher.readers(self._plan, row_slice)

    def project(self, row_slice: slice) -> Tensor:
        """Return the untransformed logits (n, V) of rows of the chunk, until the next call."""
        if self._logits is None:
            # Not earlier: the GPU is idle until the student's first product.
            self._logits = LogitsSource(self._teacher.head.for_products(self._teacher.dtype), self._teacher.options)
            self._logits.reserve(self._plan.most_rows * self._logits.columns)
        return self._logits.project_all(*(read(row_slice) for read in self._readers))


def distillation_loss(
    head: LossHead,
    dtype: torch.dtype,
    teacher: Teacher | None,
    rows: Rows,
    weights: LossWeights,
    route: Route,
    options: LogitOptions,
    has_target: bool,
) -> Distillation:
    """Plan a loss of divergences. `dtype` is that of the student's products."""
    wide = options.logits_dtype or (None if teacher is None else teacher.options.logits_dtype)
    if wide is not None:
        raise ValueError(f"distillation rounds logits to the products' dtype, got logits_dtype={wide}")
    teacher_dtype = None if teacher is None else teacher.dtype
    plan = choose.for_distillation(
        head,
        rows,
        dtype,
        bytes_per_logit=route.bytes_per_logit(dtype, teacher_dtype),
        options=options,
        wants_weight=torch.is_grad_enabled() and head.weight.requires_grad,
        teacher_dtype=teacher_dtype,
    )
    if plan.scattered is not None and isinstance(route, TopK):
        order = plan.scattered.order
        route = replace(route, logps=route.logps[order], ids=route.ids[order])
    if plan.rows.counted is not None:
        counted = plan.rows.counted.to(accumulation_dtype(dtype))
        weights = LossWeights(counted * weights.divergence, None if weights.logps is None else counted * weights.logps)
    return Distillation(plan, weights, route, teacher, has_target)
