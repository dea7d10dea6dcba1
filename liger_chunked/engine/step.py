"""Compute a loss with its gradients in the forward, chunk by chunk (docs/how-it-works.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from liger_chunked.engine import choose
from liger_chunked.engine.adapter import apply_down
from liger_chunked.engine.checks import compute_dtype
from liger_chunked.engine.choose import Plan, flattened
from liger_chunked.engine.collectives import mapped
from liger_chunked.engine.compile_ahead import compile_ahead
from liger_chunked.engine.cutting import Chunk
from liger_chunked.engine.estimated import estimated
from liger_chunked.engine.gradients import NOTHING_NEEDED, HeadGradients, Needs
from liger_chunked.engine.hooks import isolated
from liger_chunked.engine.objective import Objective, Share
from liger_chunked.engine.packed import Sequences, whole
from liger_chunked.engine.precision import gemms
from liger_chunked.engine.rows import Rows, joined
from liger_chunked.engine.sequence import SequenceSplit
from liger_chunked.engine.stats import stats_of_kept
from liger_chunked.kept_ids import KeptIds
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
    objective: Objective
    values: Any = field(default=None, init=False)  # dense `TokenStats`
    aux: Any = field(default=None, init=False)  # that of `Share`, of all groups

    def run(
        self, input: Tensor, head: HeadTensors, u: Tensor | None, needs: Needs
    ) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        plan, rows = self.plan, self.plan.rows
        compile_ahead(_dry_run, plan, input, head, u, needs)
        flat, flat_u = flattened(input, u)
        grads = HeadGradients(plan, flat, head, needs, flat_u) if True in needs else None
        head_pass = choose.pass_of_loss(plan, head.for_products(plan.dtype), grads)

        parts: list[Any] = []
        aux: list[Any] = []
        loss: Tensor | None = None
        has_gradient = False
        with gemms(input.device, plan.dtype):
            for i, chunk in enumerate(plan.chunks):
                tokens = plan.tokens(i, flat, flat_u)
                values = rows.dense(head_pass.statistics(tokens), chunk)
                share = self.objective.value_and_grad(values, rows.index(chunk), grads is not None)
                parts.append(values)
                aux.append(share.aux)
                if grads is not None:
                    self._check_declared(share.gradients)
                    has_gradient |= bool(share.gradients)
                    if tokens.x.shape[0]:
                        compact = {name: rows.compact(g, chunk) for name, g in share.gradients.items()}
                        head_pass.backward(tokens, compact)
                # Add in float64, before rounding.
                loss = share.loss if loss is None else loss.double() + share.loss
        head_pass.release()
        if grads is not None and rows.n_valid and not has_gradient:
            raise ValueError(
                "the loss has no gradient: it does not depend on the statistics it was given, or is detached from them"
            )
        self.values = rows.join(parts)
        self.aux = None if aux[0] is None else joined(aux)
        assert loss is not None
        loss = rows.sum_of_shares(loss).to(accumulation_dtype(plan.dtype))
        return loss, (None,) * len(needs) if grads is None else grads.finish()

    def _check_declared(self, gradients: Mapping[str, Tensor]) -> None:
        undeclared = tuple(name for name in gradients if name not in self.plan.differentiates)
        if undeclared:
            raise ValueError(
                f"the gradient of the loss reaches {', '.join(undeclared)}, which the loss does not declare: add it to "
                f"token_outputs, as in token_outputs = {undeclared}"
            )


@dataclass(frozen=True)
class _EveryStatistic(Objective):
    """Any loss of a plan's statistics, for a dry run."""

    differentiates: tuple[str, ...]

    def value_and_grad(self, values: TokenStats, index: slice | Tensor, with_gradient: bool) -> Share:
        gradients = {name: torch.empty_like(getattr(values, name)) for name in self.differentiates}
        return Share(next(f for f in values if f is not None).sum(), gradients)


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


def run_step(step: Step, head: LossHead, input: Tensor) -> Tensor:
    """Run a step and return its differentiable loss ()."""
    (weight, bias, up, _), u = apply_down(head, input, step.plan.dtype)
    return GradientInForward.apply(input, weight, bias, u, up, step, torch.is_grad_enabled())


class Fused(NamedTuple):
    """What `fused_loss` returns.

    Attributes:
        loss: (), differentiable.
        values: the batch's dense statistics, detached.
        aux: the objective's, of all groups.
    """

    loss: Tensor
    values: TokenStats
    aux: Any


def fused_loss(
    head: LossHead,
    input: Tensor,
    rows: Rows,
    objective: Objective,
    *,
    outputs: tuple[str, ...],
    options: LogitOptions,
    differentiates: tuple[str, ...] = DIFFERENTIABLE,
    whole_batch: bool = False,
    class_weight: Tensor | None = None,
) -> Fused:
    """Return the loss of an objective, and what its metrics read."""
    unknown = [name for name in outputs if name not in OUTPUTS]
    if unknown:
        raise ValueError(f"token_outputs must name fields of TokenStats {OUTPUTS}, got {unknown}")
    estimate = estimated.get()
    plan = choose.for_loss(
        head,
        rows.on_this_rank(whole_batch),
        compute_dtype(head, input),
        outputs=outputs,
        differentiates=differentiates,
        options=options,
        whole_batch=whole_batch,
        wide_tiles=has_wide_tiles(input.device) if estimate is None else estimate.wide_tiles,
        class_weight=class_weight,
    )
    step = StatisticsStep(plan, objective)
    return Fused(run_step(step, head, input), step.values, step.aux)


def _whole_with_gradient(x: Tensor, sequences: Sequences) -> Tensor:
    """Return `whole`, differentiable by this rank's values: every rank evaluates the same loss, of all of them."""
    gathered = whole(x, sequences)
    if isinstance(sequences, SequenceSplit):
        gathered[..., sequences.local_slice] = x
    return gathered


def loss_of_kept(
    head: LossHead,
    input: Tensor,
    target: Tensor,
    kept: KeptIds,
    rows: Rows,
    objective: Objective,
    *,
    sequences: Sequences,
    outputs: tuple[str, ...],
    options: LogitOptions,
    temperature: Tensor | None,
    may_wait: bool,
) -> Fused:
    """Return what `fused_loss` returns, of the softmax over the ids that a sampler kept.

    Its gradients come in the backward: without logits there is nothing that a gradient in the forward would save.

    Args:
        target: as the caller gave it, so that `kept` are the ids of its positions in order.
        rows: of the padded target.
    """
    flat = stats_of_kept(head, input, target, kept, outputs, options, temperature, may_wait=may_wait)
    dense = mapped(lambda x: _whole_with_gradient(x.view(target.shape), sequences).reshape(rows.dense_shape), flat)
    every = Chunk(slice(0, rows.n_valid), slice(0, rows.dense_shape[0]))
    values = dense
    if rows.groups is None and (places := rows.dense_index) is not None:
        values = mapped(lambda x: x[places], dense)
    loss = objective.loss(values, rows.index(every)).to(accumulation_dtype(input.dtype))
    return Fused(loss, mapped(Tensor.detach, dense), None)
