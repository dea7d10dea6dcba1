"""Token statistics of the softmax over the ids that a sampler kept, differentiable."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from liger_chunked.device import current_stream, is_accelerator
from liger_chunked.engine.checks import check_same_temperature, refuse_capture
from liger_chunked.engine.sink import Needs
from liger_chunked.engine.step import Operands, differentiable, operands_of
from liger_chunked.kept_ids import KeptIds
from liger_chunked.kernels import LogitsCotangents, SortedRows, add_rows_
from liger_chunked.kernels.kept import (
    Entries,
    KeptStats,
    kept_input_grad,
    kept_logits,
    kept_logits_grad,
    kept_places,
    kept_stats,
)
from liger_chunked.private import version_of
from liger_chunked.types import LogitOptions, LossHead, TokenStats, VocabShard, described

# `mean_logits` and `log_sum_sq_probs` are of the whole vocabulary.
OUTPUTS_OF_KEPT = ("logps", "lse", "entropy", "argmax", "is_top1")


def check_kept(kept: Any, head: LossHead, outputs: tuple[str, ...], temperature: float | None) -> None:
    """Refuse what kept ids exclude.

    Args:
        kept: the argument of the call.
        temperature: of the call's logits; None: each token has its own, which `check_temperature_values` compares.

    Raises:
        TypeError: `kept` is no `KeptIds`.
        ValueError: an output is of all ids, or the ids were drawn at another temperature.
    """
    if not isinstance(kept, KeptIds):
        raise TypeError(f"kept must be a KeptIds, got {described(kept)}")
    if temperature is not None and kept.temperature is not None:
        check_same_temperature(kept.temperature, temperature, temperature)
    refused = [name for name in outputs if name not in OUTPUTS_OF_KEPT]
    if refused:
        raise ValueError(f"kept has statistics {OUTPUTS_OF_KEPT} of the ids that were kept, got outputs {refused}")
    if head.shard is not None and head.shard.input_grad == "reduce_scatter":
        raise ValueError("kept needs each rank's hidden states whole, got input_grad='reduce_scatter' of vocab_shard")


class Placed(NamedTuple):
    """Kept ids at the positions of a target.

    Attributes:
        entries: of all positions; those of ignored ones have an id of -1, which no rank has, and do not count.
        has_entries: (N,) bool; False: the position has the whole vocabulary.
        n_kept, n_whole: how many positions with a target have kept ids, and the whole vocabulary.
        layout: of the kept ids, for their order.
    """

    entries: Entries
    has_entries: Tensor
    n_kept: int
    n_whole: int
    layout: _Layout


class ById(NamedTuple):
    """Entries in the order of their ids, (M,) each; equal ids in the order of the entries.

    Attributes:
        ids, tokens: of the entries in this order.
        order: the entry at each place.
    """

    ids: Tensor
    tokens: Tensor
    order: Tensor


class _Layout:
    """What of kept ids does not depend on a target: computed once, however many calls get the same `KeptIds`.

    One sort, by id and then by token, finds ids that a position repeats, and is the order in which dW sums.

    - `versions`: of the tensors when they were sorted
    - `sorted_on`: the accelerator's stream that sorts, and an event after its work; None without streams
    """

    sorted_on: tuple[Any, Any] | None = None

    def __init__(self, kept: KeptIds) -> None:
        self.versions = _versions(kept)
        n, m, device = max(1, kept.positions), kept.ids.shape[0], kept.ids.device
        # Copies: the order, and a backward, stay those of these ids, also after a write that torch does not count.
        self.ids, self.offsets = (
            x.to(torch.int64, copy=True, memory_format=torch.contiguous_format) for x in (kept.ids, kept.offsets)
        )
        lengths = self.offsets.diff()
        # Of any offsets, also wrong ones: those are reported together with what else may be wrong.
        self.tokens = torch.searchsorted(self.offsets[1:], torch.arange(m, device=device), right=True)
        self.tokens.clamp_(max=n - 1)
        self.has_entries = lengths > 0
        low, high = self.ids.aminmax() if m else (self.ids.new_zeros(()),) * 2
        keys, order = torch.sort((self.ids - low) * n + self.tokens)
        self.by_id = ById(self.ids[order], self.tokens[order], order)
        repeated = (keys[1:] == keys[:-1]).any()
        ordered = (lengths >= 0).all() & (self.offsets[0] == 0) & (self.offsets[-1] == m)
        none = torch.zeros_like(low)  # of `kept_places`, which counts with a copy
        self.counts_and_facts = torch.stack([none, none, none, ordered.long(), repeated.long(), low, high])

    def let_others_wait(self) -> None:
        """Mark the end of the sort on the current stream, for calls on other streams."""
        device = self.ids.device
        if is_accelerator(device):
            stream = current_stream(device)
            self.sorted_on = stream, stream.record_event()

    def wait(self) -> None:
        """Make the current stream wait for the sort, if another stream does that.

        The host does not wait. The tensors keep their memory until this stream has read them, also if the layout is
        gone by then: the allocator knows only the stream that made them.
        """
        if self.sorted_on is None:
            return
        sorted_on, is_sorted = self.sorted_on
        stream = current_stream(self.ids.device)
        if stream == sorted_on:
            return
        stream.wait_event(is_sorted)
        for x in (self.ids, self.offsets, self.tokens, self.has_entries, *self.by_id, self.counts_and_facts):
            x.record_stream(stream)


_LAYOUTS: weakref.WeakKeyDictionary[KeptIds, _Layout] = weakref.WeakKeyDictionary()


def _versions(kept: KeptIds) -> tuple[int, int]:
    return version_of(kept.ids), version_of(kept.offsets)


def _layout_of(kept: KeptIds) -> _Layout:
    layout = _LAYOUTS.get(kept)
    if layout is None or layout.versions != _versions(kept):  # changed in place: the order is that of other ids
        # The next call may have a backward, which cannot save tensors of inference mode.
        with torch.inference_mode(False):
            layout = _Layout(kept)
        layout.let_others_wait()
        _LAYOUTS[kept] = layout
    else:
        layout.wait()
    return layout


def place(kept: KeptIds, target: Tensor, ignore_index: int, vocab_size: int) -> Placed:
    """Check kept ids, and find each target among those of its position. Waits for the device once.

    Args:
        target: (N,) int64, or `ignore_index`.

    Raises:
        ValueError: offsets or ids are no kept ids of these positions, or miss a target.
    """
    refuse_capture(target, "kept")
    n, m, device = target.shape[0], kept.ids.shape[0], target.device
    if kept.positions != n:
        raise ValueError(
            f"kept must have the ids of {n} positions, those of the target in order, got {kept.positions}: its offsets "
            f"are {described(kept.offsets)}"
        )
    if kept.ids.device != device:
        raise ValueError(
            f"kept is on {kept.ids.device}, target on {device}: expected one device, as by kept.to(device)"
        )
    if m and not n:
        raise ValueError(f"kept.offsets must rise from 0 to the number of ids, {m}, got one offset")
    layout = _layout_of(kept)
    counts = layout.counts_and_facts.clone()
    read_ids, places = kept_places(layout.ids, layout.offsets, layout.tokens, target, ignore_index, counts)
    n_targets, n_whole, n_missing, *facts = counts.tolist()
    _check_facts(facts, m, vocab_size)
    if n_missing:
        missing = (target != ignore_index) & layout.has_entries & (places < 0)
        first_missing = int(missing.nonzero()[0])
        raise ValueError(
            f"kept has no id {int(target[first_missing])} at position {first_missing} of the flattened target, "
            "which that token was sampled from: kept ids are those of the sampler, in the order of the target"
        )
    entries = Entries(read_ids, layout.offsets, layout.tokens, places)
    return Placed(entries, layout.has_entries, n_targets - n_whole, n_whole, layout)


def _check_facts(facts: list[int], n_ids: int, vocab_size: int) -> None:
    ordered, repeated, low, high = facts
    if not ordered:
        raise ValueError(f"kept.offsets must rise from 0 to the number of ids, {n_ids}")
    if n_ids and (low < 0 or high >= vocab_size):
        raise ValueError(
            f"kept.ids must be indices into the vocabulary of weight, 0 to {vocab_size - 1}, got {low} to {high}"
        )
    if repeated:
        raise ValueError("kept.ids must be distinct within a position")


@dataclass(frozen=True, eq=False)
class _KeptRule:
    """Statistics (N,) of kept ids, and their gradients.

    Attributes:
        by_id: the order of the entries, if a matrix or the bias has a gradient. None: none has.
        temperature: (N,).
    """

    entries: Entries
    by_id: ById | None
    temperature: Tensor | None
    shard: VocabShard | None
    options: LogitOptions
    names: tuple[str, ...]

    def forward(self, operands: Operands, needs: Needs, may_hold: bool) -> tuple[Sequence[Tensor], Any]:
        input, weight, bias, u, up = operands
        entries, shard = self.entries, self.shard
        own = _own_entries(entries, shard)
        z = kept_logits(_rows(input), _strided(weight), bias, own)
        if u is not None and up is not None:
            z = z + kept_logits(_rows(u), _strided(up), None, own)
        if shard is not None and z.numel():
            dist.all_reduce(z, group=shard.group)  # each entry is one rank's: the others add zeros
        stats = kept_stats(z, entries, self.options, self.temperature)
        memo = _Memo(z, LogitsCotangents(stats.max, stats.sum_exp, entropy_value=stats.entropy))
        return list(_returned(stats, entries, self.names).values()), memo

    def backward(
        self, operands: Operands, memo: _Memo, upstream: dict[str, Tensor], needs: Needs
    ) -> tuple[Tensor | None, ...]:
        input, weight, bias, u, up = operands
        entries, shard, z = self.entries, self.shard, memo.z
        g = {name: x.to(z.dtype).contiguous() for name, x in upstream.items()}
        cotangents = memo.rows._replace(**g, temperature=self.temperature)
        weight_grad = None
        if needs.weight:
            # First, because it keeps the device busy for longer than the host takes to launch the rest.
            weight_grad = torch.zeros_like(weight, memory_format=torch.contiguous_format)
        dz = kept_logits_grad(z, entries, cotangents, self.options)
        own = _own_entries(entries, shard)
        by_id = None if self.by_id is None else _sorted(self.by_id, shard, dz)
        grads: list[Tensor | None] = [None] * 5
        for at_x, at_matrix, x, matrix in ((0, 1, input, weight), (3, 4, u, up)):
            if x is None or matrix is None:
                continue
            if needs[at_x]:
                grads[at_x] = _input_gradient(x, dz, matrix, own, shard)
            if not needs[at_matrix]:
                continue
            assert by_id is not None
            of_matrix = weight_grad if matrix is weight else None
            if of_matrix is None:
                of_matrix = torch.zeros_like(matrix, memory_format=torch.contiguous_format)
            grads[at_matrix] = of_matrix
            add_rows_(of_matrix, _rows(x), by_id)
        if needs.bias and bias is not None:
            assert by_id is not None
            of_bias = torch.zeros(bias.shape[0], 1, dtype=z.dtype, device=z.device)
            add_rows_(of_bias, z.new_ones(entries.offsets.shape[0] - 1, 1), by_id)
            grads[2] = of_bias[:, 0]
        return tuple(grads)


class _Memo(NamedTuple):
    z: Tensor  # (M,) untransformed logits of the entries
    rows: LogitsCotangents  # of tokens


def _rows(x: Tensor) -> Tensor:
    return _strided(x.reshape(-1, x.shape[-1]))


def _strided(x: Tensor) -> Tensor:
    """Return a matrix whose rows the kernels can read."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _own_entries(entries: Entries, shard: VocabShard | None) -> Entries:
    """Return entries with ids relative to this rank's first row; padding rows have no ids."""
    return entries if shard is None else entries._replace(ids=entries.ids - shard.start)


def _sorted(by_id: ById, shard: VocabShard | None, dz: Tensor) -> SortedRows:
    ids = by_id.ids if shard is None else by_id.ids - shard.start
    return SortedRows(ids, by_id.tokens, dz.index_select(0, by_id.order))


def _input_gradient(x: Tensor, dz: Tensor, matrix: Tensor, own: Entries, shard: VocabShard | None) -> Tensor:
    sums_ranks = shard is not None and shard.input_grad == "all_reduce"
    dtype = dz.dtype if sums_ranks else x.dtype
    dx = torch.empty(x.reshape(-1, x.shape[-1]).shape, dtype=dtype, device=x.device)
    kept_input_grad(dz, _strided(matrix), own, dx)
    if sums_ranks:
        assert shard is not None
        dist.all_reduce(dx, group=shard.group)
    return dx.to(x.dtype).view(x.shape)


def _returned(stats: KeptStats, entries: Entries, outputs: tuple[str, ...]) -> dict[str, Tensor]:
    values: dict[str, Tensor] = {"logps": stats.logps, "lse": stats.lse, "entropy": stats.entropy}
    if "argmax" in outputs or "is_top1" in outputs:
        last = max(0, entries.ids.shape[0] - 1)
        place = stats.argmax.clamp(max=last)
        counts = entries.target >= 0
        values["argmax"] = (entries.ids[place] if entries.ids.numel() else place).where(counts, -1)
        values["is_top1"] = counts & (place == entries.target)
    return {name: values[name] for name in outputs}


def kept_token_stats(
    head: LossHead,
    input: Tensor,
    placed: Placed,
    outputs: tuple[str, ...],
    options: LogitOptions,
    temperature: Tensor | None,
    dtype: torch.dtype,
) -> TokenStats:
    """Return statistics (N,) of positions that have a target and kept ids; of the others 0, and an argmax of -1.

    Sums are float32, or float64 for float64 inputs, of operands as they are: autocast rounds none.
    """
    operands = operands_of(head, input, dtype)
    matrices = operands.weight, operands.bias, operands.up
    trains = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in matrices)
    by_id = placed.layout.by_id if trains else None
    rule = _KeptRule(placed.entries, by_id, temperature, head.shard, options, outputs)
    return TokenStats(**differentiable(rule, operands))
