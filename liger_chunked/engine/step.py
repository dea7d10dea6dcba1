"""Run a step, whose gradients are computed in the forward, and put its loss into the autograd graph."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from liger_chunked.engine.adapter import apply_down
from liger_chunked.engine.gradients import Needs
from liger_chunked.engine.hooks import isolated
from liger_chunked.engine.plan import Plan
from liger_chunked.kernels import scale_
from liger_chunked.kernels.backend import first_derivative, graph_is_retained
from liger_chunked.types import HeadTensors, LossHead


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


class Step(Protocol):
    """A loss and its gradients, chunk by chunk."""

    @property
    def plan(self) -> Plan: ...

    def run(self, input: Tensor, head: HeadTensors, u: Tensor | None, needs: Needs) -> Result: ...


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
        # A parameter that the loss holds may be on another device than the loss.
        scale_([g for g in gradients if g is not None and g.device == upstream.device], upstream)
        gradients = [g if g is None or g.device == upstream.device else g * upstream.to(g.device) for g in gradients]
        pairs = zip(gradients, ctx.shapes_and_dtypes, strict=True)
        return None, None, *(None if g is None else g.view(shape).to(dtype) for g, (shape, dtype) in pairs)


class Fused(NamedTuple):
    """A loss () in the autograd graph, and detached values of the batch's tokens, for metrics."""

    loss: Tensor
    values: Any


def run_step(step: Step, head: LossHead, input: Tensor) -> Fused:
    """Run a step, and put its loss into the graph."""
    (weight, bias, up, shard), u = apply_down(head, input, step.plan.dtype)
    tensors = input, weight, bias, u, up
    trains = torch.is_grad_enabled()
    needs = Needs(*[trains and x is not None and x.requires_grad for x in tensors])
    with torch.no_grad(), isolated():
        loss, gradients, values, of_parameters = step.run(input, HeadTensors(weight, bias, up, shard), u, needs)
    if True in needs or of_parameters:
        gradients = *gradients, *of_parameters.values()
        loss = GradientInForward.apply(loss, gradients, *tensors, *of_parameters)
    return Fused(loss, values)
