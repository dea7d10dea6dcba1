"""Run chunks of the student, and project the teacher for each tile.

The loss is linear in the divergences, so their upstream gradients are known. Only divergences of single tokens wait for
them, and then run the step once more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_chunked.engine import choose
from liger_chunked.engine.adapter import apply_down
from liger_chunked.engine.checks import compute_dtype
from liger_chunked.engine.cutting import Tile
from liger_chunked.engine.divergences import ByAutograd, ClosedForm
from liger_chunked.engine.gradients import NOTHING_NEEDED, HeadGradients, Needs
from liger_chunked.engine.head import HeadPass
from liger_chunked.engine.hooks import isolated
from liger_chunked.engine.plan import Plan, flattened
from liger_chunked.engine.precision import gemms
from liger_chunked.engine.ranked import Ranked
from liger_chunked.engine.rows import Rows, hide_ignored
from liger_chunked.engine.saved import savable, save, saved
from liger_chunked.engine.step import Result
from liger_chunked.engine.top_k import TopK
from liger_chunked.kernels.backend import first_derivative, torch_on_host
from liger_chunked.kernels.operands import along
from liger_chunked.types import HeadTensors, LogitOptions, LossHead, accumulation_dtype

# Each computes a divergence per token from untransformed logits (n, V).
Route = ByAutograd | ClosedForm | Ranked | TopK


class Divergences(NamedTuple):
    divergence: Tensor
    logps: Tensor | None  # of the target
    by_scale: Tensor | None  # as in `Measured`


class LossWeights(NamedTuple):
    """The upstream gradients of a token's divergence, and of its target's log-probability if that is in the loss.

    Each is a number or a tensor () for all tokens, or (n_valid,), one for each of the plan's rows.
    """

    divergence: float | Tensor
    logps: float | Tensor | None

    def loss(self, values: Divergences) -> Tensor:
        """Return the batch's loss (), float64."""
        loss = _weighted_sum(self.divergence, values.divergence)
        if self.logps is None:
            return loss
        assert values.logps is not None
        return loss + _weighted_sum(self.logps, values.logps)


def _is_by_token(weight: float | Tensor) -> bool:
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


@dataclass(eq=False)
class DistillationStep:
    """The loss of divergences of a student and a teacher.

    For each chunk: project the student; for each tile of its rows, project the teacher, measure the divergence, and
    overwrite the student's logits with their gradient; then add the chunk's dX, dW and db. The loss is linear in the
    divergences, so gradients need no second pass over the logits.

    Attributes:
        route: what measures; `TopK` and the like, which have log-probabilities, need no `teacher`.
    """

    plan: Plan
    weights: LossWeights
    route: Route
    teacher: Teacher | None
    has_target: bool

    def tensors(self) -> dict[str, Tensor | None]:
        """Return, by name, what a later run reads beside the student."""
        found = {f"plan.{name}": x for name, x in self.plan.tensors().items()}
        if self.teacher is not None:
            weight, bias, up, _ = self.teacher.head
            of_teacher = {"weight": weight, "bias": bias, "up": up, "input": self.teacher.input, "u": self.teacher.u}
            found |= {f"teacher.{name}": x for name, x in of_teacher.items()}
        if isinstance(self.route, TopK):
            found |= {"route.logps": self.route.logps, "route.ids": self.route.ids}
        return found

    def without_tensors(self) -> DistillationStep:
        """Return a step that holds none of `tensors`; `with_tensors` gives them back."""
        return self._with({name: None for name in self.tensors()}, self.plan.without_tensors())

    def with_tensors(self, tensors: Mapping[str, Tensor | None]) -> DistillationStep:
        of_plan = {name.removeprefix("plan."): x for name, x in tensors.items() if name.startswith("plan.")}
        return self._with(tensors, self.plan.with_tensors(of_plan))

    def _with(self, tensors: Mapping[str, Any], plan: Plan) -> DistillationStep:
        teacher, route = self.teacher, self.route
        if teacher is not None:
            weight, bias, up, input, u = (tensors[f"teacher.{x}"] for x in ("weight", "bias", "up", "input", "u"))
            teacher = teacher._replace(head=HeadTensors(weight, bias, up, teacher.head.shard), input=input, u=u)
        if isinstance(route, TopK):
            route = replace(route, logps=tensors["route.logps"], ids=tensors["route.ids"])
        return DistillationStep(plan, self.weights, route, teacher, self.has_target)

    def of_live_rows(self) -> DistillationStep:
        """Return the step of the rows whose `weights`, of single tokens, are not all 0. Waits for the device."""
        plan, weights, route = self.plan, self.weights, self.route
        by_token = [weight for weight in weights if isinstance(weight, Tensor)]
        is_live = torch.stack([g != 0 for g in by_token]).any(0)
        if is_live.all():
            return self
        live = is_live.nonzero().view(-1)
        if isinstance(route, TopK):
            route = replace(route, logps=route.logps[live], ids=route.ids[live])
        weights = weights._replace(**{name: g[live] for name, g in weights._asdict().items() if isinstance(g, Tensor)})
        return DistillationStep(plan.of_rows(live), weights, route, self.teacher, self.has_target)

    def run(self, input: Tensor, head: HeadTensors, u: Tensor | None, needs: Needs) -> Result:
        plan = self.plan
        flat, flat_u = flattened(input, u)
        grads = HeadGradients(plan, flat, head, needs, flat_u) if True in needs else None
        student = HeadPass(head.for_products(plan.dtype), plan.options)
        student.reserve(max(chunk.length for chunk in plan.chunks) * student.columns)
        teacher = None if self.teacher is None else _TeacherLogits(plan, self.teacher)
        upstream: dict[str, Tensor] = {}
        parts = []
        with gemms(input.device, plan.dtype, None if self.teacher is None else self.teacher.dtype):
            for i, chunk in enumerate(plan.chunks):
                x = plan.take(flat, chunk.row_slice)
                of_adapter = None if flat_u is None else plan.take(flat_u, chunk.row_slice)
                logits = student.project_all(x, of_adapter)  # (n, V)
                if grads is not None and not upstream:
                    upstream = self._upstream(input.device)  # now: the GPU is idle until the first product
                if teacher is not None:
                    teacher.open(chunk.row_slice)
                start, given = chunk.row_slice.start, None
                if grads is not None and chunk.length:
                    of_chunk = {name: self._at(name, g, chunk.row_slice) for name, g in upstream.items()}
                    given = grads.normalize(of_chunk, self.route.slopes)
                # Without tokens, an empty tile: `join` needs the values of one.
                for in_chunk, _ in plan.tiles[i] or (Tile(slice(0, 0), slice(0, 0)),):
                    row_slice = slice(start + in_chunk.start, start + in_chunk.stop)
                    parts.append(self._measure(along(logits, in_chunk), row_slice, in_chunk, teacher, given))
                if i == len(plan.chunks) - 1:
                    teacher = None  # dW can use its memory
                if grads is not None and chunk.length:
                    whole = Tile(slice(0, chunk.length), slice(0, student.columns))
                    grads.open_chunk(student.head, x, chunk.row_slice, (whole,), of_adapter)
                    grads.add(whole, logits)
                    grads.close_chunk()
        student.release()
        del logits
        values = hide_ignored(plan.rows.join_compact(parts), plan.rows.counted)
        loss = self.weights.loss(values).to(accumulation_dtype(plan.dtype))
        return Result(loss, (None,) * len(needs) if grads is None else grads.finish(), values)

    def _measure(
        self,
        logits: Tensor,
        row_slice: slice,
        in_chunk: slice,
        teacher: _TeacherLogits | None,
        upstream: dict[str, Tensor] | None,
    ) -> Divergences:
        """Return the divergences of a tile. With `upstream`, its logits become the gradient.

        Args:
            row_slice, in_chunk: the tile's rows among those of the step, and of the chunk.
            upstream: the chunk's upstream gradients.
        """
        target = self.plan.rows.target if self.has_target else None
        measured = self.route.measure(
            student=logits,
            teacher=None if teacher is None else teacher.project(row_slice),
            target=None if target is None else target[row_slice],
            rows=row_slice,
            with_gradient=upstream is not None,
        )
        if upstream is not None:
            # A user's divergence may have another dtype.
            given = {
                name: self._at(name, g, in_chunk).to(getattr(measured, name).dtype) for name, g in upstream.items()
            }
            measured.backward(given["divergence"], given.get("logps"))
        return Divergences(measured.divergence, measured.logps, measured.by_scale)

    def _at(self, name: str, g: Tensor, rows: slice) -> Tensor:
        """Return the upstream gradients of some rows: of single tokens their own, of equal ones as many."""
        is_by_token = _is_by_token(getattr(self.weights, name))
        return along(g, rows if is_by_token else slice(0, min(rows.stop - rows.start, g.shape[0])))

    def _upstream(self, device: torch.device) -> dict[str, Tensor]:
        """Return the upstream gradients: those of single tokens, or (n,) equal ones for the longest tile."""
        n_rows, dtype = self.plan.most_rows, accumulation_dtype(self.plan.dtype)
        return {
            name: weight if _is_by_token(weight) else torch.empty(n_rows, dtype=dtype, device=device).fill_(weight)
            for name, weight in self.weights._asdict().items()
            if weight is not None
        }


class _DivergencesOfTokens(torch.autograd.Function):
    """`apply(input, weight, bias, u, up, step)`: divergences and, with a target, log-probabilities, dense (N,) each.

    The backward runs the step again, because only then are the gradients of tokens known.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        u: Tensor | None,
        up: Tensor | None,
        step: DistillationStep,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        with isolated():
            result = step.run(input, HeadTensors(weight, bias, up, step.plan.shard), u, NOTHING_NEEDED)
        inputs = {"input": input, "weight": weight, "bias": bias, "u": u, "up": up}
        save(ctx, inputs=inputs, step=savable(step.tensors()))
        ctx.step = step.without_tensors()
        rows = step.plan.rows
        divergence, logps, _ = result.values
        return rows.to_dense(divergence), None if logps is None else rows.to_dense(logps)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        if all(g is None for g in upstream):
            return (None,) * 6
        tensors = saved(ctx)
        inputs, step = tensors["inputs"], ctx.step.with_tensors(tensors["step"])
        input, weight, bias, u, up = inputs.values()
        assert input is not None and weight is not None
        dtype, places = accumulation_dtype(step.plan.dtype), step.plan.rows.dense_index

        def compact(g: Tensor) -> Tensor:
            return (g if places is None else g[places]).to(dtype).contiguous()

        divergence, logps = (None if g is None else compact(g) for g in upstream)
        step.weights = LossWeights(0.0 if divergence is None else divergence, logps)
        if torch_on_host(input) and step.plan.scattered is None:
            step = step.of_live_rows()
        with isolated():
            result = step.run(
                input, HeadTensors(weight, bias, up, step.plan.shard), u, Needs(*ctx.needs_input_grad[:5])
            )
        pairs = zip(result.gradients, inputs.values(), strict=True)
        return *(None if g is None or x is None else g.view(x.shape).to(x.dtype) for g, x in pairs), None


def divergences_of_tokens(step: DistillationStep, head: LossHead, input: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the differentiable divergences (N,) of all positions, and the log-probabilities of their targets.

    Both are 0 at ignored positions. Takes the products of the forward once more in the backward.
    """
    (weight, bias, up, _), u = apply_down(head, input, step.plan.dtype)
    divergence, logps = _DivergencesOfTokens.apply(input, weight, bias, u, up, step)
    rows = step.plan.rows
    return rows.fill_ignored(divergence), None if logps is None else rows.fill_ignored(logps)


class _TeacherLogits:
    """Projects a teacher for the tiles of one chunk after another, into one buffer."""

    def __init__(self, plan: Plan, teacher: Teacher) -> None:
        self._plan, self._teacher = plan, teacher
        self._head_pass: HeadPass | None = None
        self._readers: list[Callable[[slice], Tensor]] = []

    def open(self, row_slice: slice) -> None:
        """Start a chunk of the step's rows."""
        self._readers = self._teacher.readers(self._plan, row_slice)

    def project(self, row_slice: slice) -> Tensor:
        """Return the untransformed logits (n, V) of rows of the chunk, until the next call."""
        if self._head_pass is None:
            # Not earlier: the GPU is idle until the student's first product.
            self._head_pass = HeadPass(self._teacher.head.for_products(self._teacher.dtype), self._teacher.options)
            self._head_pass.reserve(self._plan.most_rows * self._head_pass.columns)
        return self._head_pass.project_all(*(read(row_slice) for read in self._readers))


def distillation_step(
    head: LossHead,
    dtype: torch.dtype,
    teacher: Teacher | None,
    rows: Rows,
    weights: LossWeights,
    route: Route,
    options: LogitOptions,
    has_target: bool,
) -> DistillationStep:
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
    )
    if plan.scattered is not None and isinstance(route, TopK):
        order = plan.scattered.order
        route = replace(route, logps=route.logps[order], ids=route.ids[order])
    if plan.rows.counted is not None:
        counted = plan.rows.counted.to(accumulation_dtype(dtype))
        weights = LossWeights(counted * weights.divergence, None if weights.logps is None else counted * weights.logps)
    return DistillationStep(plan, weights, route, teacher, has_target)
