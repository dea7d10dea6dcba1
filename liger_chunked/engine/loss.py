"""Losses of token statistics: plan a step and run it (docs/how-it-works.md)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from liger_chunked.engine import choose
from liger_chunked.engine.checks import compute_dtype
from liger_chunked.engine.packed import Sequences, whole
from liger_chunked.engine.rows import Rows
from liger_chunked.engine.sequence import SequenceSplit
from liger_chunked.engine.stats import stats_of_kept
from liger_chunked.engine.step import Fused, Objective, Step, refuse_parameters_of_split_sequences, run_step
from liger_chunked.kept_ids import KeptIds
from liger_chunked.kernels.operands import mapped, other_leaves
from liger_chunked.types import (
    DIFFERENTIABLE,
    OUTPUTS,
    LogitOptions,
    LossHead,
    accumulation_dtype,
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
    return run_step(Step(plan, objective, choose.source_of_loss, torch.is_grad_enabled(), owner), head, input)


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
    whole_batch = rows.every
    values = dense
    if rows.groups is None and (places := rows.dense_index) is not None:
        values = mapped(lambda x: x[places], dense)
    if isinstance(sequences, SequenceSplit):
        # From detached statistics, so that the leaves of the graph are the tensors that the loss itself holds.
        loss_without_head = objective.loss(mapped(Tensor.detach, values), rows.group_index(whole_batch))
        refuse_parameters_of_split_sequences(other_leaves(loss_without_head, ()), owner)
    loss = objective.loss(values, rows.group_index(whole_batch)).to(accumulation_dtype(input.dtype))
    return Fused(loss, mapped(Tensor.detach, dense))
