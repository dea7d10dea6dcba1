"""Accumulate the gradients of a head, tile by tile and chunk by chunk: dX, dW and db, and du and dup of an adapter.

    sink = Sink(plan, input, head, needs, u)
    for each chunk:
        gradients = sink.normalize(gradients, slopes)      upstream gradients, in range for float16
        dx = sink.open_chunk(head, x, row_slice, tiles)    memory for the chunk's dX
        for tile in reversed(tiles):
            sink.add(tile, dz)                             dX += dz W, dW += dz^T X, db += sum of dz
        sink.close_chunk()                                 dX goes to the rows of the input
    dx, dw, db, du, dup = sink.finish()

`InputGradient` holds dX and du, `WeightGradient` dW and dup. Where ranks split the vocabulary, each has a part of the
sum over ids: `SummedInputGradient` adds these parts, `ScatteredInputGradient` gives each rank the rows that it holds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from liger_chunked.device import is_on_gpu
from liger_chunked.engine.cutting import Tile, Tiles, row_blocks
from liger_chunked.engine.plan import Plan
from liger_chunked.kernels import add_rows_, place_rows, scale_, sorted_rows
from liger_chunked.kernels.operands import along
from liger_chunked.kernels.tuning.generic import UPCAST_BLOCK
from liger_chunked.kernels.tuning.hopper import TARGET_RUN
from liger_chunked.types import HeadTensors, Slopes, accumulation_dtype


def accumulate(out: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """Compute `out = a @ b` if `first`, else `out += a @ b`, with sums in the dtype of `out`.

    Args:
        out: (n, m), in the operands' dtype or a wider one. Uninitialised if `first`.
        a, b: (n, k) and (k, m), in one dtype.
    """
    if out.dtype == a.dtype:
        torch.mm(a, b, out=out) if first else out.addmm_(a, b)
    elif is_on_gpu(out) and out.dtype == torch.float32:
        # The product keeps its float32 sums: it is not rounded before it is added, and no operand is copied to float32.
        if first:
            torch.mm(a, b, out_dtype=torch.float32, out=out)
        else:
            torch.addmm(out, a, b, out_dtype=torch.float32, out=out)
    else:
        # No product of 16-bit operands has a wider result here, so operands are copied: `a`, the larger one, in blocks.
        n_rows = max(1, UPCAST_BLOCK // max(a.shape[1], 1))
        b = b.to(out.dtype)
        for start in range(0, a.shape[0], n_rows):
            block = out[start : start + n_rows]
            block.addmm_(a[start : start + n_rows].to(out.dtype), b, beta=0 if first else 1)


def _column_sums(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return (columns,), the sum over the rows of `x` in `dtype`, without torch's large workspace on a GPU."""
    if is_on_gpu(x):
        ones = x.new_ones(1, x.shape[0])
        return torch.mm(ones, x)[0] if x.dtype == dtype else torch.mm(ones, x, out_dtype=dtype)[0]
    return x.sum(0, dtype=dtype)


# The largest float16 gradient by a logit, in its unit. float16 ends at 65504; the rest is for rounding errors.
_LARGEST_HALF = 60000.0
# The least bound on a float16 gradient by a logit, which may be zero.
_SMALLEST = 2.0**-64


class Needs(NamedTuple):
    """Which gradients a step computes; `u` and `up` are an adapter's.

    Several tuples have this order: the tensors of the autograd Functions in `step` and `stats`, their
    `ctx.needs_input_grad[:5]`, and what `Sink.finish` returns.
    """

    input: bool
    weight: bool
    bias: bool = False
    u: bool = False
    up: bool = False


NOTHING_NEEDED = Needs(False, False)


class InputGradient:
    """dX of a step, (N, H) like its flattened input. Of an adapter, du (N, r).

        dx = gradient.open(x, row_slice, one_product)   memory (n, H) for the dX of a chunk of n rows
        gradient.add(tile, dz, weight)                  dx[rows] += dz @ weight[columns]
        gradient.close()                                the chunk's rows go to those of the input
        total = gradient.finish(unit)

    A chunk's dX is formed in its place in `total` if its rows are consecutive there and the dtypes agree. Else it has
    memory of its own, from which `close` copies it. Rows of ignored tokens are zero.

    Args:
        plan: of the step.
        input: (N, H), or an adapter's (N, r). Gives shape, dtype and device.
        wide: dtype of sums, float32, or float64 for float64 products.
        has_wide_products: whether products stay in `wide` until `close`, because what is added to them comes later.
    """

    def __init__(self, plan: Plan, input: Tensor, wide: torch.dtype, has_wide_products: bool) -> None:
        self._input = input
        self._input_index, self._token_at = plan.rows.input_index, plan.rows.token_at
        self._is_in_order = plan.rows.input_index is None and plan.scattered is None
        is_half = plan.dtype == torch.float16
        # float32 for float16, which could overflow until the backward multiplied by the loss scale.
        self._dtype = wide if is_half else input.dtype
        self._wide = wide
        self._product_dtype = wide if has_wide_products or is_half else plan.dtype
        n_written = plan.rows.n_valid if plan.scattered is None else plan.scattered.n_own
        # The only chunk writes the zeros of ignored tokens together with its rows: zeros first would be another launch.
        self._is_only_chunk = len(plan.chunks) == 1 and plan.scattered is None
        self._create = torch.empty if self._is_only_chunk or n_written == input.shape[0] else torch.zeros
        self.total: Tensor | None = None  # (N, H), from the first chunk on
        # Of the open chunk:
        self._dx: Tensor | None = None  # (n, H)
        self._row_slice = slice(0, 0)
        self._live: Tensor | None = None  # (n,)

    def open(self, x: Tensor, row_slice: slice, one_product: bool, live: Tensor | None = None) -> Tensor:
        """Return memory (n, H) for the dX of a chunk.

        Args:
            x, row_slice, live: as in `Sink.open_chunk`.
            one_product: whether one product writes each row. Several are added in `wide`, and rounded by `close`.
        """
        if self.total is None:
            # Not before the first chunk: the GPU is idle until its product.
            self.total = self._create(self._input.shape, dtype=self._dtype, device=self._input.device)
        total, dtype = self.total, self._product_dtype if one_product else self._wide
        if self._is_in_order and live is None and dtype == total.dtype:
            dx = total if x.shape[0] == total.shape[0] else total[row_slice]
        else:
            dx = torch.empty(x.shape, dtype=dtype, device=x.device)
        self._dx, self._row_slice, self._live = dx, row_slice, live
        return dx

    def add(self, tile: Tile, dz: Tensor, weight: Tensor) -> None:
        """Add `dz @ weight`, a tile's dz (rows, columns) times its columns of `weight` (V, H)."""
        dx, (rows, vocab) = self._dx, tile
        assert dx is not None
        # Slicing costs host time, and most chunks are one tile.
        dx = dx if dz.shape[0] == dx.shape[0] else dx[rows]
        columns = weight if dz.shape[1] == weight.shape[0] else weight[vocab]
        # Tiles come in reverse, so a row's first product is that of the last ids. It overwrites uninitialised memory.
        accumulate(dx, dz, columns, first=vocab.stop == weight.shape[0])

    def start_sum(self) -> None:
        """Start to add the ranks' parts of the open chunk's dX, which is complete. Does nothing on one rank."""

    def close(self) -> None:
        """Copy the chunk's dX to the rows of the input, unless it was formed there."""
        dx, live, total, index = self._dx, self._live, self.total, self._input_index
        self._dx = self._live = None
        assert dx is not None and total is not None
        if index is None and live is None:
            if dx.dtype != total.dtype:  # else `dx` is a part of `total`
                total[self._row_slice] = dx
            return
        if index is not None and self._is_only_chunk:
            if live is None:
                place_rows(dx, index, self._token_at, total)
            else:
                place_rows(dx, index[live], None, total)
            return
        if index is None:
            # Rows without a gradient are zero, and `total` may be uninitialised.
            total, places = along(total, self._row_slice).zero_(), live
        else:
            places = along(index, self._row_slice)
            if live is not None:
                total.index_fill_(0, places, 0.0)
                places = places[live]
        assert places is not None
        total.index_copy_(0, places, dx.to(total.dtype))

    def finish(self, unit: Tensor | None) -> Tensor:
        """Return dX times `unit` (None: 1), in the input's dtype, or float32 for float16. Holds it no longer."""
        total, self.total = self.total, None
        if total is None:  # no row had a gradient
            return torch.zeros(self._input.shape, dtype=self._dtype, device=self._input.device)
        return total if unit is None else total.mul_(unit)


class SummedInputGradient(InputGradient):
    """dX where ranks split the vocabulary and all have the same rows: an all-reduce that overlaps with dW."""

    def __init__(self, plan: Plan, input: Tensor, wide: torch.dtype, has_wide_products: bool) -> None:
        super().__init__(plan, input, wide, has_wide_products)
        self._shard = plan.shard
        self._sum: dist.Work | None = None

    def add(self, tile: Tile, dz: Tensor, weight: Tensor) -> None:
        super().add(tile, dz, weight)
        if tile.row_slice.start == tile.vocab_slice.start == 0:  # the last tile to come
            self.start_sum()

    def start_sum(self) -> None:
        assert self._shard is not None
        self._sum = dist.all_reduce(self._dx, group=self._shard.group, async_op=True)

    def close(self) -> None:
        self._wait()
        super().close()

    def _wait(self) -> None:
        if self._sum is not None:
            self._sum.wait()
            self._sum = None


class ScatteredInputGradient(SummedInputGradient):
    """dX where ranks split the vocabulary and the hidden states too: a reduce-scatter that overlaps with dW."""

    def __init__(self, plan: Plan, input: Tensor, wide: torch.dtype, has_wide_products: bool) -> None:
        super().__init__(plan, input, wide, has_wide_products)
        assert plan.scattered is not None
        self._scattered = plan.scattered
        self._own_rows: Tensor | None = None  # of the open chunk's sum

    def start_sum(self) -> None:
        dx, live = self._dx, self._live
        assert dx is not None
        if live is not None:  # each rank sends a fixed number of rows
            n = self._row_slice.stop - self._row_slice.start
            dx = dx.new_zeros(n, dx.shape[1]).index_copy_(0, live, dx)
        self._sum, self._own_rows = self._scattered.start_reduce(dx, self._row_slice)

    def close(self) -> None:
        if self._own_rows is None:  # no row has a gradient, on any rank
            self.start_sum()
        self._wait()
        assert self.total is not None and self._own_rows is not None
        self._scattered.write(self.total, self._row_slice, self._own_rows)
        self._dx = self._live = self._own_rows = None


class WeightGradient:
    """dW of a step, (V, H) like its weight. Of an adapter, dup (V, r).

        gradient.add(tile, dz, x)             dW[columns] += dz.T @ x[rows]
        gradient.add_exponentials(...)        instead, what the fused epilogue kept of a chunk
        total = gradient.finish(unit)

    It is summed in float32, or float64 for float64 products. If each element is written at most once
    (`Plan.n_contributions`), it has the 16 bits of the weight instead: only a sum over chunks would be rounded often.

    Args:
        plan: of the step.
        weight: (V, H), or an adapter's `up` (V, r), as the caller gave it. Gives shape, dtype and device.
        is_padded: whether its last rows pad a rank's part of the vocabulary. No product writes them.
        wide: dtype of sums.
    """

    def __init__(self, plan: Plan, weight: Tensor, is_padded: bool, wide: torch.dtype) -> None:
        self._weight = weight
        self._wide = wide
        is_half = plan.dtype == torch.float16
        is_written_once = plan.n_contributions <= 1 and not is_half and weight.dtype == plan.dtype
        self._dtype = plan.dtype if is_written_once else wide
        self._result_dtype = wide if is_half else weight.dtype
        # The first product overwrites dW, so zeros are only for what no product writes: padding, or all without tokens.
        self._create = torch.empty if plan.n_contributions and not is_padded else torch.zeros
        self._is_unwritten = True
        self._row_sum: Tensor | None = None  # (columns, H), see `add`
        self.total: Tensor | None = None  # (V, H), from the first product on

    @property
    def is_wide(self) -> bool:
        """Whether products are added in float32, or float64, and rounded by `finish` alone."""
        return self._dtype == self._wide

    def allocate(self) -> Tensor:
        """Return dW, on the current stream. The first tile does this: a teacher's logits may be free by then."""
        if self.total is None:
            self.total = self._create(self._weight.shape, dtype=self._dtype, device=self._weight.device)
        return self.total

    def add(self, tile: Tile, dz: Tensor, x: Tensor) -> None:
        """Add `dz.T @ x`, a tile's dz (rows, columns) times its rows of the chunk's `x` (n, H).

        Tiles of the same ids follow each other, the last rows first.
        """
        rows, vocab = tile
        total = self.allocate() if self.total is None else self.total
        # Of a padded vocabulary, `total` has more rows than all tiles have columns.
        total = total if dz.shape[1] == total.shape[0] else total[vocab]
        opens, closes = rows.stop == x.shape[0], rows.start == 0
        if total.dtype == self._wide or (opens and closes):
            accumulate(total, dz.t(), x if opens and closes else x[rows], first=opens and self._is_unwritten)
        else:
            # Several products make up a rounded dW: they are added in float32, and the sum is rounded once.
            if opens:
                self._row_sum = torch.empty(total.shape, dtype=self._wide, device=total.device)
            assert self._row_sum is not None
            accumulate(self._row_sum, dz.t(), along(x, rows), first=opens)
            if closes:
                total.copy_(self._row_sum)
                self._row_sum = None
        if closes and vocab.start == 0:  # the last tile of a chunk: later ones add to what is there
            self._is_unwritten = False

    def add_exponentials(
        self, exponentials: Tensor, scaled: Tensor, target: Tensor, target_scale: Tensor, x: Tensor
    ) -> None:
        """Add a chunk's `exponentials.T @ scaled`, and `target_scale[i] * x[i]` at row `target[i]`. Only if `is_wide`.

        Args:
            exponentials: (n, V), of the chunk's logits.
            scaled: (n, H), rows of `x` times the scale of their exponentials.
            target: (n,) ids, -1 where another rank has the target.
            target_scale: (n,).
            x: (n, H), the chunk's hidden states.
        """
        weight = along(self.allocate(), slice(0, exponentials.shape[1]))
        rows = sorted_rows(target, target_scale)
        if not self._is_unwritten:  # early, to overlap the start of dX
            add_rows_(weight, x, rows, TARGET_RUN)
        accumulate(weight, exponentials.t(), scaled, first=self._is_unwritten)
        if self._is_unwritten:  # late, because the product above overwrote dW
            add_rows_(weight, x, rows, TARGET_RUN)
        self._is_unwritten = False

    def finish(self, unit: Tensor | None) -> Tensor:
        """Return dW times `unit` (None: 1), in the weight's dtype, or float32 for float16. Holds it no longer."""
        total, self.total = self.total, None
        if total is None:  # no row had a gradient
            total = torch.zeros(self._weight.shape, dtype=self._dtype, device=self._weight.device)
        elif unit is not None:
            total.mul_(unit)
        return total.to(self._result_dtype)


class Sink:
    """All gradients of a step's head. The module's docstring shows its use.

    In float16, where the gradients of a mean would underflow, upstream gradients are divided by a power of two, the
    unit. All sums are then float32, and `finish` multiplies them by it.

    The unit takes the largest gradient by a logit to the top of float16's range. A forward does not know the loss scale
    that its backward will get. Eager code multiplies all gradients by that one scale, and overflows unless the largest
    stays in range. So at no scale that works does eager code lift small gradients further above float16's underflow
    than the unit does.

    Attributes:
        input, weight: dX and dW, for a source that forms them without `add`. None: not needed.

    Args:
        plan: of the step.
        input: (N, H) flattened hidden states.
        head: as the caller gave it.
        needs: which gradients to compute.
        u: (N, r), the hidden states that the head's adapter projects. None: it has none.
    """

    def __init__(self, plan: Plan, input: Tensor, head: HeadTensors, needs: Needs, u: Tensor | None = None) -> None:
        wide, shard = accumulation_dtype(plan.dtype), head.shard
        is_padded = shard is not None and head.is_padded
        kind = InputGradient
        if plan.scattered is not None:
            kind = ScatteredInputGradient
        elif shard is not None and shard.input_grad == "all_reduce":
            kind = SummedInputGradient
        # Ranks add their parts of dX, so that each part must not be rounded.
        self.input = kind(plan, input, wide, shard is not None) if needs.input else None
        self.weight = WeightGradient(plan, head.weight, is_padded, wide) if needs.weight else None
        # The caller multiplies du by `down` to get a part of dX, so that it is not rounded either.
        self._u = kind(plan, u, wide, True) if needs.u and u is not None else None
        self._up = WeightGradient(plan, head.up, is_padded, wide) if needs.up and head.up is not None else None
        self._bias: Tensor | None = None  # (V,)
        if needs.bias:
            assert head.bias is not None
            # float64, because db is small and each element sums all tokens.
            self._bias = torch.zeros(head.bias.shape, dtype=torch.float64, device=head.bias.device)
        self._is_half = plan.dtype == torch.float16
        self._bias_dtype = None if head.bias is None or self._is_half else head.bias.dtype  # None: as it is summed
        self._wide = wide
        self._unit: Tensor | None = None  # ()
        # Operands of the open chunk's products, x W^T and u up^T:
        self._head: HeadTensors | None = None
        self._chunk_x: Tensor | None = None
        self._chunk_u: Tensor | None = None

    def normalize(
        self, gradients: dict[str, Tensor], slopes: Callable[[], Slopes], temperature: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Divide a chunk's upstream gradients by the unit. Once a chunk, before its gradients by logits are written.

        If the unit must grow for this chunk, what earlier chunks summed is rescaled.

        Args:
            gradients: (n,) or (n, K) upstream gradients of the whole chunk, by name.
            slopes: returns `Slopes`, at a temperature of 1 if there is one of each row. Called in float16 alone.
            temperature: (n,) of the rows. None: `slopes` include it.
        """
        if not self._is_half:
            return gradients
        bounds, by_name = [], slopes()
        for name, g in gradients.items():
            of_rows = g.abs() if g.ndim == 1 else g.abs().sum(1)
            bounds.append((of_rows if temperature is None else of_rows / temperature).max() * by_name[name])
        # A power of two divides exactly. It may grow: a first chunk with no or small gradients does not fix a unit in
        # which later ones would overflow.
        largest = torch.stack(bounds).sum().clamp(min=_SMALLEST)
        unit = torch.exp2((largest / _LARGEST_HALF).log2().ceil())
        if self._unit is not None:
            unit = torch.maximum(self._unit, unit)
            factor, sums = self._unit / unit, (self.input, self.weight, self._u, self._up)
            scale_([x.total for x in sums if x is not None and x.total is not None], factor)
            if self._bias is not None:
                self._bias.mul_(factor)
        self._unit = unit
        return {name: g / unit for name, g in gradients.items()}

    def open_chunk(
        self,
        head: HeadTensors,
        x: Tensor,
        row_slice: slice,
        tiles: Tiles,
        u: Tensor | None = None,
        live: Tensor | None = None,
    ) -> Tensor | None:
        """Start a chunk, and return memory (n, H) for its dX, or None if unneeded.

        Args:
            head: what the products read, in their dtype and without padding.
            x: (n, H), the chunk's hidden states, without rows that have no gradient.
            row_slice: the chunk's rows in the step's order, with those that have no gradient.
            tiles: those that will come.
            u: (n, r), the adapter's, like `x`.
            live: (n,), the place of each row of `x` in the chunk. None: `x` has all rows.
        """
        self._head, self._chunk_x, self._chunk_u = head, x, u
        one_product = len(tiles) == 1 or len(tiles) == row_blocks(tiles)
        if self._u is not None:
            assert u is not None
            self._u.open(u, row_slice, one_product, live)
        return None if self.input is None else self.input.open(x, row_slice, one_product, live)

    def add(self, tile: Tile, dz: Tensor) -> None:
        """Add a tile's gradient by its logits, `dz` (rows, columns). Tiles come in reverse order."""
        head, x = self._head, self._chunk_x
        assert head is not None and x is not None
        # dX first: the ranks of a split vocabulary sum it while dW is computed.
        if self.input is not None:
            self.input.add(tile, dz, head.weight)
        if self.weight is not None:
            self.weight.add(tile, dz, x)
        if self._bias is not None:
            along(self._bias, tile.vocab_slice).add_(_column_sums(dz, self._wide))
        if self._u is not None and head.up is not None:
            self._u.add(tile, dz, head.up)
        if self._up is not None and self._chunk_u is not None:
            self._up.add(tile, dz, self._chunk_u)

    def close_chunk(self) -> None:
        """End a chunk: its dX, complete, goes to the rows of the input."""
        self._head = self._chunk_x = self._chunk_u = None
        if self.input is not None:
            self.input.close()
        if self._u is not None:
            self._u.close()

    def finish(self) -> tuple[Tensor | None, ...]:
        """Return dX, dW, db, du and dup, in the parameters' dtypes, or float32 for float16. Holds them no longer.

        float16 could overflow until the backward multiplied the gradients by the upstream one, a loss scale.
        """
        unit, bias, self._bias = self._unit, self._bias, None
        if bias is not None:
            bias = bias.to(self._bias_dtype) if unit is None else bias.mul_(unit)
        return (
            None if self.input is None else self.input.finish(unit),
            None if self.weight is None else self.weight.finish(unit),
            bias,
            None if self._u is None else self._u.finish(unit),
            None if self._up is None else self._up.finish(unit),
        )
