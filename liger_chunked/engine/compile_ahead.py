"""Compile the kernels of a new kind of step at once: one after another takes seconds."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from liger_chunked.device import IS_NVIDIA, is_capturing, is_on_gpu
from liger_chunked.engine.cutting import Chunk
from liger_chunked.engine.gradients import Needs
from liger_chunked.engine.plan import Path, Plan
from liger_chunked.engine.rows import TokenRows
from liger_chunked.kernels.backend import INTERPRETED
from liger_chunked.kernels.launch import compiled_together, is_dry
from liger_chunked.types import HeadTensors

_compiled: set[Hashable] = set()


def _applies(input: Tensor) -> bool:
    return is_on_gpu(input) and IS_NVIDIA and not INTERPRETED


def compile_ahead(
    dry_run: Callable[..., object],
    plan: Plan,
    input: Tensor,
    head: HeadTensors,
    u: Tensor | None,
    needs: Needs,
) -> None:
    """Compile what `dry_run` would launch for the first chunk, once for each kind of step on a GPU.

    It allocates real tensors: meta tensors would import sympy, for seconds. Steps on shards, with kept ids,
    candidates or a teacher compile at their launches.
    """
    rows, weight = plan.rows, head.weight
    if not _applies(input) or is_dry():
        return
    if plan.shard is not None or rows.gathers_statistics:  # a dry run would wait for other ranks
        return
    if plan.kept is not None or "candidates" in rows.side:
        return
    # What decides which kernels a step launches, and which of their variants. It has no number of tokens, of which
    # variants are independent. Built inline, and of what has a hash in C, because every step on a GPU comes by.
    kind = (
        dry_run, needs, plan.path is Path.EPILOGUE, plan.path is Path.INVARIANT, plan.outputs, plan.differentiates,
        len(plan.tiles[0]) > 1, plan.skips_rows,  # code
        input.device, weight.shape, None if u is None else u.shape[-1],  # numbers
        plan.dtype, input.dtype, weight.dtype, plan.options.logits_dtype,  # pointers
        head.bias is None, plan.class_weight is None, rows.input_index is None, _token_at(plan) is None,  # absent ones
        tuple(rows.side),
    )  # fmt: skip
    if kind in _compiled or not rows.n_valid or (is_on_gpu(input) and is_capturing()):
        return
    # Before the attempt, because a dry run that fails would fail, and warn, in every step.
    _compiled.add(kind)
    try:
        with torch.no_grad(), compiled_together(input.device):
            dry_run(_first_chunk(plan), input, head, u, needs)
    except Exception as error:  # the launch raises its own
        warnings.warn(f"the kernels of this step compile one after another: {error!r}", RuntimeWarning, stacklevel=2)


def _token_at(plan: Plan) -> Tensor | None:
    """Return what the dX of a step reads that has one chunk."""
    return plan.rows.token_at if len(plan.chunks) == 1 else None


def _first_chunk(plan: Plan) -> Plan:
    row_slice, rows = slice(0, plan.chunks[0].row_slice.stop), plan.rows
    assert rows.target is not None
    first = TokenRows(
        n_valid=row_slice.stop,
        dense_shape=(row_slice.stop,),
        target=rows.target[row_slice],
        target_mask=None,
        input_index=None if rows.input_index is None else rows.input_index[row_slice],
        token_at=_token_at(plan),
        side={name: x[row_slice] for name, x in rows.side.items()},
    )
    return dataclasses.replace(plan, rows=first, chunks=(Chunk(row_slice, row_slice),), tiles=plan.tiles[:1])
