"""Run a step, and put what it computed into the autograd graph.

    GradientInForward    of a loss (): its gradients are known, and the backward multiplies them by the upstream one
    GradientInBackward   of values with an upstream gradient each: the backward computes the second half

`Step.run` is the loop over chunks of the first. Drivers of the second are a `Rule`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor

from liger_chunked.engine.adapter import apply_down
from liger_chunked.engine.cutting import Chunk
from liger_chunked.engine.plan import Plan, flattened
from liger_chunked.engine.rows import Rows, hide_ignored
from liger_chunked.engine.saved import save, saved
from liger_chunked.engine.sink import NOTHING_NEEDED, Needs, Sink
from liger_chunked.engine.source import Source
from liger_chunked.engine.surroundings import gemms, hooks_active, isolated
from liger_chunked.kernels import scale_
from liger_chunked.kernels.backend import first_derivative, graph_is_retained
from liger_chunked.kernels.operands import named, other_leaves
from liger_chunked.private import is_view, without_hooks
from liger_chunked.shapes import shapes_only
from liger_chunked.types import DIFFERENTIABLE, OUTPUTS, HeadTensors, LossHead, TokenStats, accumulation_dtype


def empty_stats(plan: Plan, device: torch.device) -> TokenStats:
    """Return compact statistics of a plan's tokens without values."""
    n, dtype, side = plan.rows.n_valid, accumulation_dtype(plan.dtype), plan.rows.side
    dtypes = {"argmax": torch.int64, "is_top1": torch.bool}
    stats = TokenStats(**{x: torch.empty(n, dtype=dtypes.get(x, dtype), device=device) for x in plan.outputs})
    if "candidates" not in side:
        return stats
    return stats._replace(candidate_logps=torch.empty(side["candidates"].shape, dtype=dtype, device=device))


class Share(NamedTuple):
    """A chunk's part of the loss.

    Attributes:
        loss: (), detached.
        gradients: of `loss`, compact, by name of the statistic. Empty if it depends on none, or none is wanted. None:
            the source knew them when it computed the values.
        values: of the chunk's tokens, which `Objective.join` joins over chunks.
        of_parameters: gradients of `loss` by tensors that the loss holds and that require one.
    """

    loss: Tensor
    gradients: Mapping[str, Tensor] | None
    values: Any = None
    of_parameters: Mapping[Tensor, Tensor] = MappingProxyType({})


class Objective:
    """A loss of token statistics, which autograd differentiates.

    A loss may hold tensors that require a gradient, such as a parameter of its module. In grad mode it is
    differentiated by these too, even if nothing wants the gradient by statistics.
    """

    def loss(self, values: TokenStats, index: slice | Tensor) -> Tensor:
        """Return some groups' differentiable share of the loss, ().

        Args:
            values: dense statistics of these groups (see `Rows`).
            index: selects the groups from tensors of the whole batch.
        """
        raise NotImplementedError

    def share(self, values: Any, rows: Rows, chunk: Chunk, with_gradient: bool) -> Share:
        """Return a chunk's share, with compact gradients.

        Args:
            values: compact statistics (n,) of the chunk's tokens.
            rows: the step's.
            with_gradient: whether gradients are wanted.
        """
        counted = rows.counted_in(chunk)
        dense = rows.for_objective(hide_ignored(values, counted), chunk)
        leaves = leaves_of(dense) if with_gradient else {}
        with torch.set_grad_enabled(with_gradient or torch.is_grad_enabled()):
            loss = self.loss(dense, rows.group_index(chunk))
        gradients, of_parameters = gradients_of(loss, leaves)
        gradients = {name: rows.from_objective(g, chunk) for name, g in gradients.items()}
        if counted is not None:
            gradients = {name: g.where(counted, 0) for name, g in gradients.items()}
        return Share(loss.detach(), gradients, dense, of_parameters)

    def join(self, rows: Rows, parts: list[Any]) -> Any:
        """Return the batch's values, from those of the shares."""
        return rows.join(parts)

    def without_values(self, plan: Plan, device: torch.device) -> Any:
        """Return what `join` returns, without values, for a call that computes shapes alone."""
        return self.join(plan.rows, [plan.rows.for_objective(empty_stats(plan, device), plan.rows.every)])


def leaves_of(values: TokenStats) -> dict[str, Tensor]:
    """Return the statistics that have gradients, by name, after they were made to require one."""
    return {name: x.requires_grad_() for name in DIFFERENTIABLE if (x := getattr(values, name)) is not None}


def gradients_of(loss: Tensor, leaves: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[Tensor, Tensor]]:
    """Return the gradients of `loss` by `leaves`, by name, and by all other leaves of its graph.

    Leaves on which `loss` does not depend are missing. `leaves` require no gradient afterwards.
    """
    parameters = other_leaves(loss, list(leaves.values()))
    computed: tuple[Tensor | None, ...] = ()
    if loss.requires_grad:
        # Single-threaded, because handing this small graph to autograd's worker thread takes longer than running it.
        # Hooks of parameters are off here: they run once, in the backward of the loss, on the gradient of all chunks.
        with torch.autograd.set_multithreading_enabled(False), without_hooks(parameters):
            # The next chunk needs the graph again between a parameter and a tensor that the caller computed from it.
            retained = True if parameters else None
            # No upstream gradient is passed, because torch would import sympy for one.
            computed = torch.autograd.grad(loss, [*leaves.values(), *parameters], None, retained, allow_unused=True)
    for leaf in leaves.values():
        leaf.requires_grad_(False)
    gradients = {name: g for name, g in zip(leaves, computed, strict=False) if g is not None}
    pairs = zip(parameters, computed[len(leaves) :], strict=True)
    return gradients, {parameter: g for parameter, g in pairs if g is not None}


class Operands(NamedTuple):
    """The tensors of a step's products, in the order of `Needs`; `u` and `up` are an adapter's."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    u: Tensor | None
    up: Tensor | None

    def head(self, plan: Plan) -> HeadTensors:
        return HeadTensors(self.weight, self.bias, self.up, plan.shard)


def operands_of(head: LossHead, input: Tensor, dtype: torch.dtype) -> Operands:
    """Return the tensors of a head, whose adapter projects the hidden states with a graph."""
    (weight, bias, up, _), u = apply_down(head, input, dtype)
    return Operands(input, weight, bias, u, up)


class Result(NamedTuple):
    """What a step computed.

    Attributes:
        loss: (), detached.
        gradients: those that are needed, in the order of `Needs`.
        values: a NamedTuple of detached values of tokens, for metrics.
        of_parameters: gradients by tensors that the loss itself holds and that require one.
    """

    loss: Tensor
    gradients: tuple[Tensor | None, ...]
    values: Any
    of_parameters: Mapping[Tensor, Tensor] = MappingProxyType({})


@dataclass(frozen=True, eq=False)
class Step:
    """A loss, with its gradients in the forward.

    For each chunk: project the hidden states and reduce their logits to values of tokens, evaluate the objective and
    its gradient by these, and turn that into the chunk's part of dX, dW and db.

    Attributes:
        open_source: from the plan, the head in the products' dtype and what accumulates gradients (None: none is
            needed) to what computes values of tokens.
        trains_objective: whether to differentiate the loss by tensors that the objective holds: the caller's grad mode.
        owner: the loss's module, whose parameters have names in messages.
    """

    plan: Plan
    objective: Objective
    open_source: Callable[[Plan, HeadTensors, Sink | None], Source]
    trains_objective: bool = False
    owner: Any = None

    def run(self, operands: Operands, needs: Needs) -> Result:
        plan, rows = self.plan, self.plan.rows
        head, (flat, flat_u) = operands.head(plan), flattened(operands.input, operands.u)
        sink = Sink(plan, flat, head, needs, flat_u) if True in needs else None
        source = self.open_source(plan, head.for_products(plan.dtype), sink)

        parts = []
        loss: Tensor | None = None
        declared, has_gradient = set(plan.differentiates), False
        of_parameters: dict[Tensor, Tensor] = {}
        with gemms(flat.device, plan.dtype, plan.teacher_dtype):
            for i, chunk in enumerate(plan.chunks):
                tokens = plan.tokens(i, flat, flat_u)
                values, memo = source.statistics(tokens)
                with torch.set_grad_enabled(self.trains_objective):
                    share = self.objective.share(values, rows, chunk, sink is not None)
                parts.append(share.values)
                if share.of_parameters and rows.gathers_statistics:
                    refuse_parameters_of_split_sequences(share.of_parameters, self.owner)
                for parameter, g in share.of_parameters.items():
                    total = of_parameters.get(parameter, 0)
                    of_parameters[parameter] = total + g.to(accumulation_dtype(g.dtype))  # summed over chunks
                if sink is not None:
                    gradients = share.gradients
                    if gradients is not None and not gradients.keys() <= declared:
                        self._refuse_undeclared(gradients)
                    has_gradient |= gradients is None or bool(gradients)
                    if tokens.x.shape[0]:
                        source.backward(tokens, memo, dict(gradients or {}))  # a copy, which the source may change
                del memo  # it may be large
                # Added in float64, so that many chunks lose no digits. The sum is rounded once, below.
                loss = share.loss if loss is None else loss.double() + share.loss
        source.release()
        if sink is not None and rows.n_valid and not has_gradient:
            raise ValueError(
                "the loss has no gradient: it does not depend on the statistics it was given, or is detached from them"
            )
        assert loss is not None
        loss = rows.sum_of_shares(loss).to(accumulation_dtype(plan.dtype))
        of_operands = (None,) * len(needs) if sink is None else sink.finish()
        return Result(loss, of_operands, self.objective.join(rows, parts), of_parameters)

    def _refuse_undeclared(self, gradients: Mapping[str, Tensor]) -> NoReturn:
        undeclared = tuple(name for name in gradients if name not in self.plan.differentiates)
        raise ValueError(
            f"the gradient of the loss reaches {', '.join(undeclared)}, which the loss does not declare: add it to "
            f"token_outputs, as in token_outputs = {undeclared}"
        )


def refuse_parameters_of_split_sequences(parameters: Iterable[Tensor], owner: Any) -> None:
    """Raise ValueError if the loss holds a tensor that requires a gradient.

    Trainers sum gradients over ranks. dW of a rank is its share of the sum, but the gradient by a tensor of the loss
    may be the whole sum on each rank, because each evaluates the loss of whole sequences.
    """
    for parameter in parameters:
        raise ValueError(
            f"the loss depends on a tensor that requires a gradient, {named(parameter, owner)}, and ranks of a "
            "sequence_group split its tokens: freeze or detach that tensor, or pass whole sequences"
        )


class GradientInForward(torch.autograd.Function):
    """`apply(loss, gradients, *tensors)`: the loss as a function of `tensors`; `gradients` are its gradients by these.

    Backward reads only gradients, so the caller may change tensors in between.
    """

    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: tuple[Tensor | None, ...], *tensors: Tensor | None) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.gradients = gradients
        ctx.shapes_and_dtypes = [(None, None) if x is None else (x.shape, x.dtype) for x in tensors]
        result = loss.data  # unlike a view, callers may change it in place
        # The backward does not read it. A saved tensor lets torch raise for a second backward of a freed graph.
        ctx.save_for_backward(result)
        return result

    @staticmethod
    @first_derivative
    def backward(ctx: Any, upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        if upstream is None:
            return (None,) * (2 + len(ctx.shapes_and_dtypes))
        if not ctx.gradients:
            _ = ctx.saved_tensors  # raises if the graph was freed
        gradients = ctx.gradients
        # `scale_` works in place, and another backward needs the gradients unscaled.
        if graph_is_retained():
            gradients = tuple(None if g is None else g.clone() for g in gradients)
        else:
            ctx.gradients = None  # else dX and dW live as long as the loss
        scale_([g for g in gradients if g is not None and g.device == upstream.device], upstream)
        found: list[Tensor | None] = [None, None]
        for g, (shape, dtype) in zip(gradients, ctx.shapes_and_dtypes, strict=True):
            if g is not None and g.device != upstream.device:  # of a parameter that the loss holds
                g = g * upstream.to(g.device)
            found.append(None if g is None else g.view(shape).to(dtype))
        return tuple(found)


class Fused(NamedTuple):
    """A loss () in the autograd graph, and detached values of the batch's tokens, for metrics."""

    loss: Tensor
    values: Any


def run_step(step: Step, head: LossHead, input: Tensor) -> Fused:
    """Run a step, and put its loss into the graph."""
    if shapes_only():
        # Without the formula: a loss is (), and a user's formula may branch on values, or read tensors that have some.
        loss = torch.empty((), dtype=accumulation_dtype(step.plan.dtype), device=input.device)
        return Fused(loss, step.objective.without_values(step.plan, input.device))
    operands = operands_of(head, input, step.plan.dtype)
    trains = torch.is_grad_enabled()
    needs = Needs(*[trains and x is not None and x.requires_grad for x in operands])
    with torch.no_grad(), isolated():
        loss, gradients, values, of_parameters = step.run(operands, needs)
    if True in needs or of_parameters:
        gradients = *gradients, *of_parameters.values()
        loss = GradientInForward.apply(loss, gradients, *operands, *of_parameters)
    return Fused(loss, values)


class Rule(Protocol):
    """How to compute values of tokens, and their gradients later. A dataclass, whose tensors autograd keeps.

    Attributes:
        names: of the values.
    """

    @property
    def names(self) -> tuple[str, ...]: ...

    def forward(self, operands: Operands, needs: Needs, may_hold: bool) -> tuple[Sequence[Tensor], Any]:
        """Return the values, and a memo for `backward`, whose tensors autograd keeps.

        Args:
            may_hold: whether logits may stay in memory until the backward (`Unsaved`). Hooks on saved tensors, as of a
                checkpoint, would not see them.
        """
        ...

    def backward(
        self, operands: Operands, memo: Any, upstream: dict[str, Tensor], needs: Needs
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients by the operands, from upstream gradients of some of the values."""
        ...


class _Kept(NamedTuple):
    operands: Any
    rule: Any
    memo: Any


_CONSTANT = frozenset(OUTPUTS).difference(DIFFERENTIABLE)


class GradientInBackward(torch.autograd.Function):
    """`apply(rule, *operands)`: the rule's values. Under a name of `TokenStats` they have gradients as these do."""

    @staticmethod
    def forward(ctx: Any, rule: Rule, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        operands, may_hold = Operands(*tensors), not hooks_active()  # type: ignore[arg-type]
        with isolated():
            values, memo = rule.forward(operands, Needs(*ctx.needs_input_grad[1:]), may_hold)
        kept = save(ctx, _Kept(operands, rule, memo))
        # Autograd refuses in-place changes of views, such as `logps *= mask`, and the backward reads what it keeps.
        values = [x.clone() if is_view(x) or id(x) in kept else x for x in values]
        ctx.names = rule.names
        ctx.mark_non_differentiable(*[x for name, x in zip(ctx.names, values, strict=True) if name in _CONSTANT])
        return tuple(values)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        given = {name: g for name, g in zip(ctx.names, upstream, strict=True) if g is not None}
        operands, rule, memo = saved(ctx) if given else _Kept(None, None, None)
        if not graph_is_retained():
            ctx.tree = None  # else the results hold what autograd does not free, such as held logits
        if not given:
            return (None,) * (1 + len(Operands._fields))
        with isolated():
            gradients = rule.backward(operands, memo, given, Needs(*ctx.needs_input_grad[1:]))
        pairs = zip(gradients, operands, strict=True)
        return None, *(None if g is None or x is None else g.view(x.shape).to(x.dtype) for g, x in pairs)


def differentiable(rule: Rule, operands: Operands) -> dict[str, Tensor]:
    """Return the rule's values, in the autograd graph if an operand has a gradient."""
    if not (torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in operands)):
        with isolated():
            values, _ = rule.forward(operands, NOTHING_NEEDED, False)
    else:
        values = GradientInBackward.apply(rule, *operands)
    return dict(zip(rule.names, values, strict=True))
