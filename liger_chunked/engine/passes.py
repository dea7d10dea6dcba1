"""Run a chunk of tokens through the head, forward and backward.

Only this file and epilogue.py multiply by `weight`.

statistics   for each tile: project, reduce to PartialStats, merge                one matrix product
backward     for each tile, last first: project again unless it is in memory,
             logits -> gradient in place, dX, dW, db                              two products, three with recomputing
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from liger_chunked.engine.checks import autocasts
from liger_chunked.engine.precision import Refused, refused
from liger_chunked.engine.schedule import Layout, Tile, along, row_blocks
from liger_chunked.kernels import (
    LogitsCotangents,
    PartialStats,
    add_target_rows_,
    finish,
    logits_grad_,
    logits_stats,
    merge,
    occurrences,
    row_stats,
    scale_,
    unround_logps_,
)
from liger_chunked.kernels.logits_stats import concatenate
from liger_chunked.types import DIFFERENTIABLE, Head, LogitOptions, TokenStats, accumulation_dtype

# Rows that a CPU upcasts at a time, because it has no product with 16-bit inputs and a float32 result.
_UPCAST_BLOCK = 1 << 20


def accumulate(out: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """Compute `out = a @ b` if `first`, else `out += a @ b`, without rounding the product below the dtype of `out`."""
    if out.is_meta:
        return  # a dry run: a GPU's product allocates nothing
    if out.dtype == a.dtype:
        torch.mm(a, b, out=out) if first else out.addmm_(a, b)
    elif out.device.type == "cuda" and out.dtype == torch.float32:
        if first:
            torch.mm(a, b, out_dtype=torch.float32, out=out)
        else:
            torch.addmm(out, a, b, out_dtype=torch.float32, out=out)
    else:
        rows = max(1, _UPCAST_BLOCK // max(a.shape[1], 1))
        b = b.to(out.dtype)
        for start in range(0, a.shape[0], rows):
            block = out[start : start + rows]
            block.addmm_(a[start : start + rows].to(out.dtype), b, beta=0 if first else 1)


def _column_sums(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `x.sum(0)` in `dtype`, which is that of `x` or wider.

    On a GPU this is a matrix product, whose float32 precision the caller sets: torch's own sum over the rows of float32
    logits allocated more memory than the logits.
    """
    if x.device.type == "cuda":
        ones = x.new_ones(1, x.shape[0])
        return torch.mm(ones, x)[0] if x.dtype == dtype else torch.mm(ones, x, out_dtype=dtype)[0]
    return x.sum(0, dtype=dtype)


@contextmanager
def gemms(device: torch.device, *dtypes: torch.dtype) -> Iterator[None]:
    """Run a block on `device`, with autocast off and with products in `dtypes` that accumulate in float32."""
    autocast = autocasts(device.type)
    elsewhere = device.type == "cuda" and device.index != torch.cuda.current_device()
    entered: list[Refused] = []
    try:
        for permission in refused(dtypes):
            permission.enter()
            entered.append(permission)
        with (
            torch.cuda.device(device) if elsewhere else nullcontext(),
            torch.autocast(device.type, enabled=False) if autocast else nullcontext(),
        ):
            yield
    finally:
        for permission in entered:
            permission.leave()


# Smallest unit of float16 gradients, for gradients that are all zero.
_SMALLEST_UNIT = 2.0**-64


class Needs(NamedTuple):
    """The gradients that are needed; the others are not computed."""

    input: bool
    weight: bool
    bias: bool


class Gradients(Protocol):
    """What a pass adds its dX, dW and db to. See `HeadGradients`."""

    @property
    def accumulates(self) -> bool: ...

    def normalize(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]: ...

    def open_input(self, x: Tensor, chunk_rows: slice, one_slice: bool) -> Tensor | None: ...

    def open_weight(self) -> bool: ...

    def add(self, vocab: slice, dz: Tensor, x: Tensor, first: bool) -> None: ...

    def add_exponentials(
        self, exponentials: Tensor, scaled: Tensor, target: Tensor, target_scale: Tensor, x: Tensor
    ) -> None: ...

    def close_chunk(self, dx: Tensor | None, chunk_rows: slice) -> None: ...


@dataclass
class HeadPass:
    """The head of one step, in the dtype of its matrix products, and one buffer for every tile of logits.

    Call `backward` after `statistics` of the same chunk: it starts from the last tile's logits, which are still in the
    buffer. It multiplies the gradient of logps by the factor that `unround_logps_` returned for them.
    """

    head: Head
    options: LogitOptions
    class_weight: Tensor | None = None  # (V,) weights of TokenStats.mean_logits
    logps_grad_scale: Tensor | None = field(default=None, repr=False)  # set by `statistics`, read by `backward`
    differentiable: ClassVar[tuple[str, ...]] = DIFFERENTIABLE
    _buffer: Tensor | None = field(default=None, init=False, repr=False)
    _held: Tensor | None = field(default=None, init=False, repr=False)

    @property
    def vocab_size(self) -> int:
        return self.head.weight.shape[0]

    def reserve(self, elements: int) -> None:
        """Allocate the buffer for the largest tile; all tiles share it."""
        if self._buffer is None or self._buffer.numel() < elements:
            self._buffer = self.head.weight.new_empty(elements)

    def release(self) -> None:
        """Free the buffer."""
        self._buffer = self._held = None

    def project(self, x: Tensor, tile: Tile) -> Tensor:
        """Return the logits (rows, columns) of a tile of `x` (n, H), before the logit transform, in the buffer."""
        assert self._buffer is not None
        x, weight = along(x, tile.rows), along(self.head.weight, tile.vocab)
        logits = along(self._buffer, slice(0, x.shape[0] * weight.shape[0])).view(x.shape[0], weight.shape[0])
        if self.head.bias is None:
            return torch.mm(x, weight.t(), out=logits)
        return torch.addmm(along(self.head.bias, tile.vocab), x, weight.t(), out=logits)

    def _class_weight(self, tile: Tile) -> Tensor | None:
        return None if self.class_weight is None else along(self.class_weight, tile.vocab)

    def statistics(
        self, x: Tensor, target: Tensor, tiles: list[Tile], outputs: tuple[str, ...]
    ) -> tuple[PartialStats, TokenStats]:
        """Return the statistics of a chunk, `x` (n, H) and `target` (n,), with logps corrected for rounding."""
        partial, stats = self._reduce(x, target, tiles, outputs)
        if stats.logps is not None and x.dtype in (torch.bfloat16, torch.float16):
            self.logps_grad_scale = unround_logps_(
                stats.logps, x, self.head, target, partial.max, partial.sum_exp, self.options
            )
        return partial, stats

    def _reduce(
        self, x: Tensor, target: Tensor, tiles: list[Tile], outputs: tuple[str, ...]
    ) -> tuple[PartialStats, TokenStats]:
        """Return the statistics of the rounded logits."""
        if len(tiles) == 1:
            self._held = self.project(x, tiles[0])
            return row_stats(self._held, target, self.options, outputs, self.class_weight)
        by_rows: dict[int, PartialStats] = {}
        for tile in tiles:
            self._held = self.project(x, tile)
            part = logits_stats(
                logits=self._held,
                target=along(target, tile.rows),
                options=self.options,
                outputs=outputs,
                vocab_start=tile.vocab.start,
                class_weight=self._class_weight(tile),
            )
            earlier = by_rows.get(tile.rows.start)
            by_rows[tile.rows.start] = part if earlier is None else merge(earlier, part)
        if by_rows:
            stats = concatenate(list(by_rows.values()))
        else:
            stats = logits_stats(x.new_empty(0, self.vocab_size), target, self.options, outputs)
        return stats, finish(stats, target, self.vocab_size, outputs)

    def backward(
        self, x: Tensor, target: Tensor, tiles: list[Tile], cotangents: LogitsCotangents, grads: Gradients,
        chunk_rows: slice,
    ) -> None:  # fmt: skip
        """Add a chunk's dX, dW and db to `grads`. `chunk_rows` are its tokens in the layout of the batch."""
        given = {name: g for name in DIFFERENTIABLE if (g := getattr(cotangents, name)) is not None}
        if self.logps_grad_scale is not None and cotangents.logps is not None:
            given["logps"] = cotangents.logps * self.logps_grad_scale
        cotangents = cotangents._replace(**grads.normalize(given))
        dx = grads.open_input(x, chunk_rows, one_slice=len(tiles) == row_blocks(tiles))
        for tile in reversed(tiles):
            logits = self.project(x, tile) if self._held is None else self._held
            self._held = None
            dz = logits_grad_(
                logits=logits,
                target=along(target, tile.rows),
                cotangents=cotangents if logits.shape[0] == x.shape[0] else cotangents.at(tile.rows),
                options=self.options,
                vocab_size=self.vocab_size,
                vocab_start=tile.vocab.start,
                class_weight=self._class_weight(tile),
            )
            if dx is not None:
                last_slice = tile.vocab.stop == self.vocab_size
                accumulate(along(dx, tile.rows), dz, along(self.head.weight, tile.vocab), first=last_slice)
            grads.add(tile.vocab, dz, along(x, tile.rows), first=tile.rows.stop == x.shape[0])
        grads.close_chunk(dx, chunk_rows)

    def backward_from(self, x: Tensor, dz: Tensor, grads: Gradients, chunk_rows: slice) -> None:
        """Add a chunk's dX, dW and db, given the gradient `dz` (n, V) of all its logits."""
        dx = grads.open_input(x, chunk_rows, one_slice=True)
        if dx is not None:
            accumulate(dx, dz, self.head.weight, first=True)
        grads.add(slice(0, self.vocab_size), dz, x, first=True)
        grads.close_chunk(dx, chunk_rows)


class HeadGradients:
    """dX, dW and db of one step, to which the chunks add.

    If every element of dW is written once, dW has the weight's dtype. Otherwise it accumulates in float32.

    float16 gradients of a mean over many tokens would underflow. The gradient of the logits is therefore divided by
    `unit`, a power of two near the largest gradient of a statistic so far, and dX and dW stay in float32 until
    they are multiplied by the upstream gradient.

    Args:
        layout: where the rows of dX go.
        input: (N, H), for its shape and dtype.
        head: as the caller gave it, for its shapes and dtypes.
        compute_dtype: of the matrix products.
        needs: which gradients are needed.
        n_contributions: number of products that are added to each element of dW; 0 if no token has a target.
    """

    def __init__(
        self, layout: Layout, input: Tensor, head: Head, compute_dtype: torch.dtype, needs: Needs, n_contributions: int
    ) -> None:
        self._layout = layout
        self._half = compute_dtype == torch.float16
        self._unit: Tensor | None = None
        self._dtypes = (input.dtype, head.weight.dtype, None if head.bias is None else head.bias.dtype)
        self._nothing_yet = True
        self._wide = accumulation_dtype(compute_dtype)
        self._given_input = input if needs.input else None
        self._given_weight = head.weight if needs.weight else None
        direct = n_contributions <= 1 and not self._half and head.weight.dtype == compute_dtype
        self._weight_dtype = compute_dtype if direct else self._wide
        # Every element is written, except the rows of ignored tokens.
        self._create_input = torch.empty if layout.n_valid == input.shape[0] else torch.zeros
        self._create_weight = torch.empty if n_contributions else torch.zeros
        self._input: Tensor | None = None
        self._weight: Tensor | None = None
        self._bias: Tensor | None = None
        if needs.bias:
            assert head.bias is not None
            # float64, because db is small and may sum as many terms as there are tokens.
            self._bias = torch.zeros(head.bias.shape, dtype=torch.float64, device=head.bias.device)

    def normalize(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """Divide the gradients of a chunk's statistics by `unit`.

        If they are larger than all before, `unit` grows, and dX, dW and db are rescaled. (In distillation, all blocks
        of a chunk have the gradient of one mean, so `unit` does not change before the chunk's products.)
        """
        if not self._half:
            return gradients
        largest = torch.stack([g.abs().max() for g in gradients.values()]).max()
        unit = torch.exp2(largest.clamp(min=_SMALLEST_UNIT).log2().ceil())
        if self._unit is not None:
            unit = torch.maximum(self._unit, unit)
            # Returns at once if the unit did not grow.
            scale_([x for x in (self._input, self._weight) if x is not None], self._unit / unit)
            if self._bias is not None:
                self._bias.mul_(self._unit / unit)
        self._unit = unit
        return {name: g / unit for name, g in gradients.items()}

    def open_input(self, x: Tensor, chunk_rows: slice, one_slice: bool) -> Tensor | None:
        """Return memory for a chunk's dX, or None if not needed.

        A dX that is one product in the right dtype is written straight to its place in the batch's gradient.
        """
        gradient = self._input_gradient()
        if gradient is None:
            return None
        dtype = x.dtype if one_slice and not self._half else accumulation_dtype(x.dtype)
        if self._layout.rows is None and dtype == gradient.dtype:
            return along(gradient, chunk_rows)
        return torch.empty(x.shape, dtype=dtype, device=x.device)

    def open_weight(self) -> bool:
        """Allocate dW before its first product is enqueued, and return whether dW is needed."""
        return self._weight_gradient() is not None

    def add(self, vocab: slice, dz: Tensor, x: Tensor, first: bool) -> None:
        """Add a tile to dW and db. `first`: the chunk's first tile of this slice of the vocabulary."""
        weight = self._weight_gradient()
        if weight is not None:
            accumulate(along(weight, vocab), dz.t(), x, first=first and self._nothing_yet)
        if self._bias is not None:
            along(self._bias, vocab).add_(_column_sums(dz, self._wide))

    @property
    def accumulates(self) -> bool:
        """Whether something may be added to dW after a product: dW is float32, or is not needed."""
        return self._given_weight is None or self._weight_dtype == self._wide

    def _input_gradient(self) -> Tensor | None:
        """Return dX, or None. Allocated late, because the GPU is idle until the first product is enqueued."""
        if self._input is None and (given := self._given_input) is not None:
            dtype = self._wide if self._half else given.dtype
            self._input = self._create_input(given.shape, dtype=dtype, device=given.device)
        return self._input

    def _weight_gradient(self) -> Tensor | None:
        """Return dW, or None. Allocated late, because a teacher's logits may have been freed by then."""
        if self._weight is None and (given := self._given_weight) is not None:
            self._weight = self._create_weight(given.shape, dtype=self._weight_dtype, device=given.device)
        return self._weight

    def add_exponentials(
        self, exponentials: Tensor, scaled: Tensor, target: Tensor, target_scale: Tensor, x: Tensor
    ) -> None:
        """Add a chunk to a float32 dW: `exponentials.T @ scaled`, and `target_scale[n] * x[n]` at row `target[n]`.

        If dW has values already, the rows of the targets come first: this small kernel then overlaps the start of a
        longer product.
        """
        weight = self._weight_gradient()
        assert weight is not None, "asked of `open_weight`"
        found = occurrences(target)
        if not self._nothing_yet:
            add_target_rows_(weight, target, found, target_scale, x)
        accumulate(weight, exponentials.t(), scaled, first=self._nothing_yet)
        if self._nothing_yet:
            add_target_rows_(weight, target, found, target_scale, x)

    def close_chunk(self, dx: Tensor | None, chunk_rows: slice) -> None:
        """Move a chunk's dX to its place. Later tiles add to dW."""
        self._nothing_yet = False
        if self._input is None or dx is None:
            return
        if self._layout.rows is not None:
            self._input.index_copy_(0, along(self._layout.rows, chunk_rows), dx.to(self._input.dtype))
        elif dx.dtype != self._input.dtype:
            self._input[chunk_rows] = dx

    def finish(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients in the parameters' dtypes (float32 for float16). Call once: it drops its references."""
        grads: list[Tensor | None] = [self._input_gradient(), self._weight_gradient(), self._bias]
        self._input = self._weight = self._bias = self._given_input = self._given_weight = None
        for i, (grad, dtype) in enumerate(zip(grads, self._dtypes, strict=True)):
            if grad is not None and self._half:
                grads[i] = grad if self._unit is None else grad.mul_(self._unit)
            elif grad is not None and dtype is not None:
                grads[i] = grad.to(dtype)
        return grads[0], grads[1], grads[2]
