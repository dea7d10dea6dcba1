"""Compute a loss with its gradients in the forward, chunk by chunk (docs/how-it-works.md)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from liger_chunked.engine import choose
from liger_chunked.engine.adapter import apply_down
from liger_chunked.engine.batch import Layout
from liger_chunked.engine.checks import check_graph, compute_dtype
from liger_chunked.engine.choose import Plan, flattened
from liger_chunked.engine.compile_ahead import compile_ahead
from liger_chunked.engine.cutting import Chunk
from liger_chunked.engine.estimated import estimated
from liger_chunked.engine.gradients import NOTHING_NEEDED, HeadGradients, Needs
from liger_chunked.engine.hooks import isolated
from liger_chunked.engine.precision import gemms
from liger_chunked.kernels import scale_
from liger_chunked.kernels.backend import first_derivative, graph_is_retained, has_wide_tiles
from liger_chunked.types import (
    DIFFERENTIABLE,
    OUTPUTS,
    HeadTensors,
    LogitOptions,
    LossHead,
    TokenStats,
    accumulation_dtype,
)

# Maps some groups' dense statistics (see `Layout`) to their share of the loss. `index` selects them.
Objective = Callable[[TokenStats, slice | Tensor], Tensor]


class LinearObjective:
    """A loss linear in the values; its gradients need no autograd."""

    def loss(self, values: Any) -> Tensor:
        """Return the batch's loss (), float64."""
        raise NotImplementedError

    def gradients(self, values: Any) -> dict[str, Tensor]:
        raise NotImplementedError


@dataclass(frozen=True)
class NegativeLogLikelihood(LinearObjective):
    items: float | Tensor

    def loss(self, values: TokenStats) -> Tensor:
        assert values.logps is not None
        return (-values.logps).sum(dtype=torch.float64) / self.items  # not -0 without tokens

    def gradients(self, values: TokenStats) -> dict[str, Tensor]:
        assert values.logps is not None
        return {"logps": torch.empty_like(values.logps).fill_(-1 / self.items)}


class Step(Protocol):
    """What `GradientInForward` runs: a loss and its gradients, chunk by chunk."""

    plan: Plan
    values: Any  # a NamedTuple of detached values of tokens, once the step ran

    def run(
        self, input: Tensor, head: HeadTensors, u: Tensor | None, needs: Needs
    ) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        """Return the loss () and the gradients that are needed, in the order of `Needs`; set `values`."""
        ...


@dataclass(eq=False)
class StatisticsStep:
    """The loss of an objective of token statistics.

    For each chunk: project the hidden states and reduce their logits to statistics, evaluate the objective and its
    gradient by the statistics, and turn that into the chunk's part of dX, dW and db.
    """

    plan: Plan
    objective: Objective | LinearObjective
    values: Any = field(default=None, init=False)  # dense `TokenStats`

    def run(
        self, input: Tensor, head: HeadTensors, u: Tensor | None, needs: Needs
    ) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        plan, layout, objective = self.plan, self.plan.layout, self.objective
        compile_ahead(_dry_run, plan, input, head, u, needs)
        flat, flat_u = flattened(input, u)
        grads = HeadGradients(plan, flat, head, needs, flat_u) if True in needs else None
        head_pass = choose.pass_of_loss(plan, head.to(plan.dtype), grads)

        parts: list[Any] = []
        loss: Tensor | None = None
        has_gradient = isinstance(objective, LinearObjective)
        assert not has_gradient or layout.group_lengths is None  # values stay in token order
        with gemms(input.device, plan.dtype):
            for i, chunk in enumerate(plan.chunks):
                tokens = plan.tokens(i, flat, flat_u)
                values = head_pass.statistics(tokens)
                share: Tensor | None = None
                gradients: dict[str, Tensor] = {}
                if not isinstance(objective, LinearObjective):
                    values, share, gradients = self._differentiate(values, chunk, with_gradient=grads is not None)
                    has_gradient |= bool(gradients)
                elif grads is not None:
                    gradients = objective.gradients(values)
                parts.append(values)
                if grads is not None and tokens.x.shape[0]:
                    head_pass.backward(tokens, gradients)
                if share is not None:
                    check_graph("the loss", share, [f for f in values if f is not None])
                    # Add in float64, before rounding.
                    loss = share.detach().double() if loss is None else loss + share.detach()
        head_pass.release()
        if grads is not None and layout.n_valid and not has_gradient:
            raise ValueError(
                "the loss has no gradient: it does not depend on the statistics it was given, or is detached from them"
            )
        self.values = layout.join(parts)
        if isinstance(objective, LinearObjective):
            loss = objective.loss(self.values)
        else:
            assert loss is not None
            loss = layout.sum_of_shares(loss)
        loss = loss.to(accumulation_dtype(plan.dtype))
        return loss, (None,) * len(needs) if grads is None else grads.finish()

    def _differentiate(
        self, stats: TokenStats, chunk: Chunk, with_gradient: bool
    ) -> tuple[TokenStats, Tensor, dict[str, Tensor]]:
        layout, objective = self.plan.layout, cast(Objective, self.objective)
        dense = layout.dense_values(stats, chunk)
        leaves = {name: f for name in DIFFERENTIABLE if with_gradient and (f := getattr(dense, name)) is not None}
        for leaf in leaves.values():
            leaf.requires_grad_()
        with torch.set_grad_enabled(with_gradient):
            loss = objective(dense, layout.index(chunk))
        gradients: tuple[Tensor | None, ...] = (None,) * len(leaves)
        if loss.requires_grad:
            # Handing this small graph to autograd's worker thread takes longer than running it here.
            with torch.autograd.set_multithreading_enabled(False):
                # With an upstream gradient, torch imports sympy.
                gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        for leaf in leaves.values():
            leaf.requires_grad_(False)
        reached = {name: g for name, g in zip(leaves, gradients, strict=True) if g is not None}
        undeclared = tuple(name for name in reached if name not in self.plan.differentiates)
        if undeclared:
            raise ValueError(
                f"the gradient of the loss reaches {', '.join(undeclared)}, which the loss does not declare: add it to "
                f"token_outputs, as in token_outputs = {undeclared}"
            )
        by_name = {name: layout.compact(g, chunk) for name, g in reached.items()}
        return dense, loss, by_name


@dataclass(frozen=True)
class _EveryStatistic(LinearObjective):
    """Any loss of a plan's statistics, for a dry run."""

    differentiates: tuple[str, ...]

    def loss(self, values: TokenStats) -> Tensor:
        return next(f for f in values if f is not None).sum()

    def gradients(self, values: TokenStats) -> dict[str, Tensor]:
        return {name: torch.empty_like(getattr(values, name)) for name in self.differentiates}


def _dry_run(plan: Plan, input: Tensor, head: HeadTensors, u: Tensor | None, needs: Needs) -> None:
    loss, grads = StatisticsStep(plan, _EveryStatistic(plan.differentiates)).run(input, head, u, needs)
    scale_([g for g in grads if g is not None], loss)


def _like(x: Tensor | None, like: tuple[torch.Size, torch.dtype]) -> Tensor | None:
    if x is None:
        return None
    shape, dtype = like
    return (x if x.shape == shape else x.view(shape)).to(dtype)


class GradientInForward(torch.autograd.Function):
    """`apply(input, weight, bias, u, up, step, is_grad_enabled())`: the loss.

    Backward reads only gradients, so the caller may change tensors in between.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        u: Tensor | None,
        up: Tensor | None,
        step: Step,
        with_gradient: bool,
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        needs = Needs(*ctx.needs_input_grad[:5]) if with_gradient else NOTHING_NEEDED
        with isolated():
            loss, ctx.gradients = step.run(input, HeadTensors(weight, bias, up, step.plan.shard), u, needs)
        if True in needs:
            ctx.like = [None if x is None else (x.shape, x.dtype) for x in (input, weight, bias, u, up)]
            ctx.save_for_backward(loss)
        return loss

    @staticmethod
    @first_derivative
    def backward(ctx: Any, upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        if upstream is None:
            return (None,) * 7
        if not ctx.gradients:
            _ = ctx.saved_tensors  # raises if the graph was freed
        gradients = ctx.gradients
        if graph_is_retained():
            gradients = tuple(None if g is None else g.clone() for g in gradients)
        else:
            ctx.gradients = None
        scale_([g for g in gradients if g is not None], upstream)
        return *map(_like, gradients, ctx.like), None, None


def run_step(step: Step, head: LossHead, input: Tensor) -> tuple[Tensor, Any]:
    """Return the differentiable loss (), and the step's values."""
    (weight, bias, up, _), u = apply_down(head, input, step.plan.dtype)
    loss = GradientInForward.apply(input, weight, bias, u, up, step, torch.is_grad_enabled())
    return loss, step.values


def fused_loss(
    head: LossHead,
    input: Tensor,
    layout: Layout,
    objective: Objective | LinearObjective,
    *,
    outputs: tuple[str, ...],
    options: LogitOptions,
    differentiates: tuple[str, ...] = DIFFERENTIABLE,
    whole_batch: bool = False,
    class_weight: Tensor | None = None,
) -> tuple[Tensor, TokenStats]:
    """Return a differentiable loss (), and the detached dense statistics."""
    unknown = [name for name in outputs if name not in OUTPUTS]
    if unknown:
        raise ValueError(f"token_outputs must name fields of TokenStats {OUTPUTS}, got {unknown}")
    estimate = estimated.get()
    plan = choose.for_loss(
        head,
        layout.local(whole_batch),
        compute_dtype(head, input),
        outputs=outputs,
        differentiates=differentiates,
        options=options,
        whole_batch=whole_batch,
        wide_tiles=has_wide_tiles(input.device) if estimate is None else estimate.wide_tiles,
        class_weight=class_weight,
    )
    return run_step(StatisticsStep(plan, objective), head, input)
