"""Compute a loss with its gradients in the forward, chunk by chunk (docs/how-it-works.md)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor

from liger_chunked.engine import choose
from liger_chunked.engine.adapter import apply_down
from liger_chunked.engine.checks import compute_dtype, named, other_leaves
from liger_chunked.engine.collectives import mapped
from liger_chunked.engine.cutting import Chunk
from liger_chunked.engine.gradients import NOTHING_NEEDED, HeadGradients, Needs
from liger_chunked.engine.hooks import isolated
from liger_chunked.engine.objective import Objective
from liger_chunked.engine.packed import Sequences, whole
from liger_chunked.engine.plan import Plan, flattened
from liger_chunked.engine.precision import gemms
from liger_chunked.engine.rows import Rows, joined
from liger_chunked.engine.sampling import SamplingFilter
from liger_chunked.engine.sequence import SequenceSplit
from liger_chunked.engine.stats import stats_of_kept
from liger_chunked.kept_ids import KeptIds
from liger_chunked.kernels import scale_
from liger_chunked.kernels.backend import first_derivative, graph_is_retained
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
    values: Any = field(default=None, init=False)  # dense `TokenStats`, or None if the objective returns none
    # Whether to differentiate the loss by tensors that the objective holds: the caller's grad mode.
    trains_objective: bool = False
    owner: Any = None  # the loss's module, whose parameters have names in messages
    aux: Any = field(default=None, init=False)  # what the objective computed of all groups (`Share.aux`), joined
    # Gradients by tensors that the objective holds (`Share.of_parameters`), summed over chunks.
    of_parameters: dict[Tensor, Tensor] = field(default_factory=dict, init=False)

    def run(
        self, input: Tensor, head: HeadTensors, u: Tensor | None, needs: Needs
    ) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        plan, rows = self.plan, self.plan.rows
        flat, flat_u = flattened(input, u)
        grads = HeadGradients(plan, flat, head, needs, flat_u) if True in needs else None
        head_pass = choose.pass_of_loss(plan, head.for_products(plan.dtype), grads)

        parts: list[Any] = []
        aux: list[Any] = []
        loss: Tensor | None = None
        declared, has_gradient = set(plan.differentiates), False
        with gemms(input.device, plan.dtype):
            for i, chunk in enumerate(plan.chunks):
                tokens = plan.tokens(i, flat, flat_u)
                stats = head_pass.statistics(tokens)
                with torch.set_grad_enabled(self.trains_objective):
                    share = self.objective.evaluate(stats, rows, chunk, grads is not None)
                if share.of_parameters:
                    self._add_parameters(share.of_parameters)
                parts.append(share.values)
                aux.append(share.aux)
                if grads is not None:
                    if not share.gradients.keys() <= declared:
                        self._refuse_undeclared(share.gradients)
                    has_gradient |= bool(share.gradients)
                    if tokens.x.shape[0]:
                        head_pass.backward(tokens, dict(share.gradients))  # a copy, which the pass may change
                # Added in float64, so that many chunks lose no digits. The sum is rounded once, below.
                loss = share.loss if loss is None else loss.double() + share.loss
        head_pass.release()
        if grads is not None and rows.n_valid and not has_gradient:
            raise ValueError(
                "the loss has no gradient: it does not depend on the statistics it was given, or is detached from them"
            )
        self.values = None if parts[0] is None else rows.join(parts)
        self.aux = None if aux[0] is None else joined(aux)
        assert loss is not None
        if len(parts) == 1 and share.rounded is not None and not rows.gathers_statistics:
            loss = share.rounded  # the only share, of this rank alone
        else:
            loss = rows.sum_of_shares(loss).to(accumulation_dtype(plan.dtype))
        return loss, (None,) * len(needs) if grads is None else grads.finish()

    def _add_parameters(self, gradients: Mapping[Tensor, Tensor]) -> None:
        if self.plan.rows.gathers_statistics:
            _refuse_parameters_of_split_sequences(gradients, self.owner)
        for parameter, g in gradients.items():
            g = g.to(accumulation_dtype(g.dtype))  # of several chunks
            earlier = self.of_parameters.get(parameter)
            self.of_parameters[parameter] = g if earlier is None else earlier + g

    def _refuse_undeclared(self, gradients: Mapping[str, Tensor]) -> NoReturn:
        undeclared = tuple(name for name in gradients if name not in self.plan.differentiates)
        raise ValueError(
            f"the gradient of the loss reaches {', '.join(undeclared)}, which the loss does not declare: add it to "
            f"token_outputs, as in token_outputs = {undeclared}"
        )


def _refuse_parameters_of_split_sequences(parameters: Iterable[Tensor], owner: Any) -> None:
    """Raise ValueError for the first tensor that a loss holds and that requires a gradient.

    dW of a rank is its share, which trainers sum over ranks. The gradient by a parameter may be whole on each.
    """
    for parameter in parameters:
        raise ValueError(
            f"the loss depends on a tensor that requires a gradient, {named(parameter, owner)}, and ranks of a "
            "sequence_group split its tokens: freeze or detach that tensor, or pass whole sequences"
        )


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
            tensors = input, weight, bias, u, up
            ctx.shapes_and_dtypes = [(None, None) if x is None else (x.shape, x.dtype) for x in tensors]
            # No gradient needs it: with a saved tensor torch notices a backward of a freed graph.
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
        # `scale_` works in place, and another backward needs the gradients unscaled.
        if graph_is_retained():
            gradients = tuple(None if g is None else g.clone() for g in gradients)
        else:
            ctx.gradients = None  # else dX and dW live as long as the loss
        scale_([g for g in gradients if g is not None], upstream)
        return (
            *[
                None if g is None else (g if g.shape == shape else g.view(shape)).to(dtype)
                for g, (shape, dtype) in zip(gradients, ctx.shapes_and_dtypes, strict=True)
            ],
            None,
            None,
        )


class WithParameters(torch.autograd.Function):
    """`apply(loss, gradients, *parameters)`: the loss, with gradients by parameters that its objective holds."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: tuple[Tensor, ...], *parameters: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.gradients = gradients
        ctx.dtypes = [x.dtype for x in parameters]
        result = loss.view_as(loss)
        ctx.save_for_backward(loss)
        return result

    @staticmethod
    @first_derivative
    def backward(ctx: Any, upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors  # raises if the graph was freed
        if upstream is None:
            return None, None, *[None] * len(ctx.gradients)
        pairs = zip(ctx.gradients, ctx.dtypes, strict=True)
        return upstream, None, *[(upstream.to(g.device) * g).to(dtype) for g, dtype in pairs]


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


_KNOWN = frozenset(OUTPUTS)


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
    filter: SamplingFilter | None = None,
    skips_rows: bool = False,
    owner: Any = None,
) -> Fused:
    """Return the loss of an objective, and what its metrics read.

    Args:
        skips_rows: whether to look for tokens without a gradient on a GPU, if the host may wait. A CPU always does.
        owner: the module of the loss, for messages.
    """
    if not _KNOWN.issuperset(outputs):
        unknown = [name for name in outputs if name not in OUTPUTS]
        raise ValueError(f"token_outputs must name fields of TokenStats {OUTPUTS}, got {unknown}")
    plan = choose.for_loss(
        head,
        rows,
        compute_dtype(head, input),
        outputs=outputs,
        differentiates=differentiates,
        options=options,
        whole_batch=whole_batch,
        class_weight=class_weight,
        filter=filter,
        skips_rows=skips_rows,
    )
    step = StatisticsStep(plan, objective, trains_objective=torch.is_grad_enabled(), owner=owner)
    loss = run_step(step, head, input)
    if step.of_parameters:
        loss = WithParameters.apply(loss, tuple(step.of_parameters.values()), *step.of_parameters)
    return Fused(loss, step.values, step.aux)


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
    n_valid: int | None,
    sparse_weight_grad: bool = False,
    owner: Any = None,
) -> Fused:
    """Return what `fused_loss` returns, of the softmax over the ids that a sampler kept.

    Its gradients come in the backward: without logits there is nothing that a gradient in the forward would save.

    Args:
        target: as the caller gave it, so that `kept` are the ids of its positions in order.
        rows: of the padded target.
        n_valid: as in `place`.
        sparse_weight_grad: as in `stats_of_kept`.
        owner: the module of the loss, for messages.
    """
    flat = stats_of_kept(
        head, input, target, kept, outputs, options, temperature, n_valid=n_valid, sparse_weight_grad=sparse_weight_grad
    )
    dense = mapped(lambda x: _whole_with_gradient(x.view(target.shape), sequences).reshape(rows.dense_shape), flat)
    whole_batch = Chunk(slice(0, rows.n_valid), slice(0, rows.dense_shape[0]))
    values = dense
    if rows.groups is None and (places := rows.dense_index) is not None:
        values = mapped(lambda x: x[places], dense)
    if isinstance(sequences, SequenceSplit):
        # Its graph has neither weight nor input, so its leaves are what the loss itself holds.
        loss_without_head = objective.loss(mapped(Tensor.detach, values), rows.group_index(whole_batch))
        _refuse_parameters_of_split_sequences(other_leaves(loss_without_head, ()), owner)
    loss = objective.loss(values, rows.group_index(whole_batch)).to(accumulation_dtype(input.dtype))
    return Fused(loss, mapped(Tensor.detach, dense), None)
