"""Compute a loss of token statistics with its gradients in the forward, chunk by chunk (docs/how-it-works.md)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from liger_chunked.engine import choose
from liger_chunked.engine.checks import compute_dtype, named, other_leaves
from liger_chunked.engine.collectives import mapped
from liger_chunked.engine.cutting import Chunk
from liger_chunked.engine.gradients import HeadGradients, Needs
from liger_chunked.engine.objective import Objective
from liger_chunked.engine.packed import Sequences, whole
from liger_chunked.engine.plan import Plan, flattened
from liger_chunked.engine.precision import gemms
from liger_chunked.engine.rows import Rows
from liger_chunked.engine.sequence import SequenceSplit
from liger_chunked.engine.stats import stats_of_kept
from liger_chunked.engine.step import Fused, Result, run_step
from liger_chunked.kept_ids import KeptIds
from liger_chunked.types import (
    DIFFERENTIABLE,
    OUTPUTS,
    HeadTensors,
    LogitOptions,
    LossHead,
    TokenStats,
    accumulation_dtype,
)


@dataclass(frozen=True, eq=False)
class StatisticsStep:
    """The loss of an objective of token statistics.

    For each chunk: project the hidden states and reduce their logits to statistics, evaluate the objective and its
    gradient by the statistics, and turn that into the chunk's part of dX, dW and db.

    Attributes:
        trains_objective: whether to differentiate the loss by tensors that the objective holds: the caller's grad mode.
        owner: the loss's module, whose parameters have names in messages.
    """

    plan: Plan
    objective: Objective
    trains_objective: bool = False
    owner: Any = None

    def run(self, input: Tensor, head: HeadTensors, u: Tensor | None, needs: Needs) -> Result:
        plan, rows = self.plan, self.plan.rows
        flat, flat_u = flattened(input, u)
        grads = HeadGradients(plan, flat, head, needs, flat_u) if True in needs else None
        head_pass = choose.pass_of_loss(plan, head.for_products(plan.dtype), grads)

        parts: list[TokenStats] = []
        loss: Tensor | None = None
        declared, has_gradient = set(plan.differentiates), False
        of_parameters: dict[Tensor, Tensor] = {}
        with gemms(input.device, plan.dtype):
            for i, chunk in enumerate(plan.chunks):
                tokens = plan.tokens(i, flat, flat_u)
                stats = head_pass.statistics(tokens)
                with torch.set_grad_enabled(self.trains_objective):
                    share = self.objective.evaluate(stats, rows, chunk, grads is not None)
                parts.append(share.values)
                if share.of_parameters and rows.gathers_statistics:
                    _refuse_parameters_of_split_sequences(share.of_parameters, self.owner)
                for parameter, g in share.of_parameters.items():
                    total = of_parameters.get(parameter, 0)
                    of_parameters[parameter] = total + g.to(accumulation_dtype(g.dtype))  # summed over chunks
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
        assert loss is not None
        loss = rows.sum_of_shares(loss).to(accumulation_dtype(plan.dtype))
        gradients = (None,) * len(needs) if grads is None else grads.finish()
        return Result(loss, gradients, rows.join(parts), of_parameters)

    def _refuse_undeclared(self, gradients: Mapping[str, Tensor]) -> NoReturn:
        undeclared = tuple(name for name in gradients if name not in self.plan.differentiates)
        raise ValueError(
            f"the gradient of the loss reaches {', '.join(undeclared)}, which the loss does not declare: add it to "
            f"token_outputs, as in token_outputs = {undeclared}"
        )


def _refuse_parameters_of_split_sequences(parameters: Iterable[Tensor], owner: Any) -> None:
    """Raise ValueError if the loss holds a tensor that requires a gradient.

    Trainers sum gradients over ranks. dW of a rank is its share of the sum, but the gradient by a tensor of the loss
    may be the whole sum on each rank, because each evaluates the loss of whole sequences.
    """
    for parameter in parameters:
        raise ValueError(
            f"the loss depends on a tensor that requires a gradient, {named(parameter, owner)}, and ranks of a "
            "sequence_group split its tokens: freeze or detach that tensor, or pass whole sequences"
        )


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
    skips_rows: bool = False,
    owner: Any = None,
) -> Fused:
    """Return the loss of an objective, and what its metrics read.

    Args:
        skips_rows: whether to look for tokens without a gradient on a GPU, where the host may wait for the count. On a
            CPU the step always looks for them.
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
        skips_rows=skips_rows,
    )
    return run_step(StatisticsStep(plan, objective, torch.is_grad_enabled(), owner), head, input)


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
    owner: Any = None,
) -> Fused:
    """Return what `fused_loss` returns, of the softmax over the ids that a sampler kept.

    Its gradients come in the backward: without logits there is nothing that a gradient in the forward would save.

    Args:
        target: as the caller gave it, so that `kept` are the ids of its positions in order.
        rows: of the padded target.
        owner: the module of the loss, for messages.
    """
    flat = stats_of_kept(head, input, target, kept, outputs, options, temperature)
    dense = mapped(lambda x: _whole_with_gradient(x.view(target.shape), sequences).reshape(rows.dense_shape), flat)
    whole_batch = Chunk(slice(0, rows.n_valid), slice(0, rows.dense_shape[0]))
    values = dense
    if rows.groups is None and (places := rows.dense_index) is not None:
        values = mapped(lambda x: x[places], dense)
    if isinstance(sequences, SequenceSplit):
        # From detached statistics, so that the leaves of the graph are the tensors that the loss itself holds.
        loss_without_head = objective.loss(mapped(Tensor.detach, values), rows.group_index(whole_batch))
        _refuse_parameters_of_split_sequences(other_leaves(loss_without_head, ()), owner)
    loss = objective.loss(values, rows.group_index(whole_batch)).to(accumulation_dtype(input.dtype))
    return Fused(loss, mapped(Tensor.detach, dense))
