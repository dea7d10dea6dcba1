from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from liger_chunked.device import is_on_gpu
from liger_chunked.engine.cutting import Tile
from liger_chunked.engine.estimated import part_of_next
from liger_chunked.engine.plan import Plan
from liger_chunked.kernels import add_target_rows_, occurrences, scale_
from liger_chunked.kernels.launch import is_dry
from liger_chunked.kernels.operands import along
from liger_chunked.kernels.tuning.generic import UPCAST_BLOCK
from liger_chunked.types import HeadTensors, accumulation_dtype


def accumulate(out: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """Compute `out = a @ b` if `first`, else `out += a @ b`."""
    if out.is_meta or is_dry():
        return  # a product on a GPU allocates nothing
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
        rows = max(1, UPCAST_BLOCK // max(a.shape[1], 1))
        b = b.to(out.dtype)
        for start in range(0, a.shape[0], rows):
            block = out[start : start + rows]
            block.addmm_(a[start : start + rows].to(out.dtype), b, beta=0 if first else 1)


def _column_sums(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `x.sum(0)` without torch's large workspace on a GPU."""
    if is_on_gpu(x):
        ones = x.new_ones(1, x.shape[0])
        return torch.mm(ones, x)[0] if x.dtype == dtype else torch.mm(ones, x, out_dtype=dtype)[0]
    return x.sum(0, dtype=dtype)


# The unit if all float16 gradients are zero.
_SMALLEST_UNIT = 2.0**-64


class Needs(NamedTuple):
    input: bool
    weight: bool
    bias: bool = False
    u: bool = False
    up: bool = False


NOTHING_NEEDED = Needs(False, False)


class HeadGradients:
    """dX, dW and db of one step, and du and dup of an adapter.

    dW is float32, but has the weight's dtype if that is the products' dtype, not float16, and each element is written
    at most once (`n_contributions`).

    In float16, where a mean's gradients would underflow, those of statistics are divided by `unit`, a power of two, and
    dX and dW are float32.
    """

    def __init__(
        self,
        plan: Plan,
        input: Tensor,
        head: HeadTensors,
        needs: Needs,
        u: Tensor | None = None,
        wide_input: bool = False,
    ) -> None:
        self._input_index, self._scattered = plan.rows.input_index, plan.scattered
        self._half = plan.dtype == torch.float16
        # Whether dX's products are float32.
        self._wide_input = wide_input or self._half or head.shard is not None
        self._unit: Tensor | None = None
        self._dtypes = (input.dtype, head.weight.dtype, None if head.bias is None else head.bias.dtype)
        self._dw_is_unwritten = True
        self._wide = accumulation_dtype(plan.dtype)
        self._given_input = input if needs.input else None
        self._given_weight = head.weight if needs.weight else None
        # A 16-bit dW to which chunks add would be rounded each time: only one that is written once has few bits.
        direct = plan.n_contributions <= 1 and not self._half and head.weight.dtype == plan.dtype
        self._weight_dtype = plan.dtype if direct else self._wide
        # Rows of ignored tokens must be zero.
        n_written = plan.rows.n_valid if plan.scattered is None else plan.scattered.n_own
        self._create_input = torch.empty if n_written == input.shape[0] else torch.zeros
        # The first product overwrites dW, so zeros are only for what no product writes: the padding of a shard, or all
        # of dW without tokens.
        is_padded = head.shard is not None and head.is_padded
        self._create_weight = torch.empty if plan.n_contributions and not is_padded else torch.zeros
        self._input: Tensor | None = None
        self._weight: Tensor | None = None
        self._slice: Tensor | None = None  # float32 sum of a rounded dW's blocks of rows
        self._bias: Tensor | None = None
        if needs.bias:
            assert head.bias is not None
            # db is small, and sums many terms.
            part_of_next.set("weight_grad")
            self._bias = torch.zeros(head.bias.shape, dtype=torch.float64, device=head.bias.device)
        self._shard = head.shard
        self._sum: dist.Work | None = None  # over the ranks, of the open chunk's dX
        self._summed: Tensor | None = None  # this rank's part, if hidden states are scattered
        self._row_slice = slice(0, 0)
        self._live: Tensor | None = None  # rows of the open chunk that take part; None: all
        self._chunk_has_rows = False  # whether any do
        self._low_rank: HeadGradients | None = None
        self._chunk: tuple[Tensor, Tensor, Tensor | None] | None = None  # u, up and du of the open chunk
        if u is not None:
            assert head.up is not None
            small = HeadTensors(head.up, shard=head.shard)
            self._low_rank = HeadGradients(plan, u, small, Needs(needs.u, needs.up), wide_input=True)

    def normalize(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """Divide gradients by `unit`; if it must grow, rescale dX, dW and db."""
        if not self._half:
            return gradients
        # A power of two divides exactly. It may grow: a first chunk with no or small gradients does not fix a unit in
        # which later ones would overflow.
        largest = torch.stack([g.abs().max() for g in gradients.values()]).max()
        unit = torch.exp2(largest.clamp(min=_SMALLEST_UNIT).log2().ceil())
        if self._unit is not None:
            unit = torch.maximum(self._unit, unit)
            self._rescale(self._unit / unit)
        self._unit = unit
        if self._low_rank is not None:
            self._low_rank._unit = unit
        return {name: g / unit for name, g in gradients.items()}

    def _rescale(self, factor: Tensor) -> None:
        scale_([x for x in (self._input, self._weight) if x is not None], factor)
        if self._bias is not None:
            self._bias.mul_(factor)
        if self._low_rank is not None:
            self._low_rank._rescale(factor)

    def open_input(
        self,
        x: Tensor,
        row_slice: slice,
        one_slice: bool,
        u: Tensor | None = None,
        up: Tensor | None = None,
        live: Tensor | None = None,
    ) -> Tensor | None:
        """Return memory for a chunk's dX, or None if unneeded.

        Args:
            x: (n, H), the hidden states that take part.
            row_slice: the rows of the chunk.
            one_slice: whether one product writes each row of dX.
            u, up: the adapter's, like `x`.
            live: (n,), the place of each row of `x` in the chunk, if others have no gradient. None: `x` has all.
        """
        if self._low_rank is not None:
            assert u is not None and up is not None
            self._chunk = u, up, self._low_rank.open_input(u, row_slice, one_slice, live=live)
        gradient, self._row_slice, self._live = self._input_gradient(), row_slice, live
        self._chunk_has_rows = x.shape[0] > 0
        if gradient is None:
            return None
        dtype = accumulation_dtype(x.dtype) if self._wide_input or not one_slice else x.dtype
        if live is None and self._input_index is None and self._scattered is None and dtype == gradient.dtype:
            return gradient if x.shape[0] == gradient.shape[0] else gradient[row_slice]
        part_of_next.set("input_grad")
        return torch.empty(x.shape, dtype=dtype, device=x.device)

    def add(self, tile: Tile, dz: Tensor, x: Tensor, weight: Tensor, dx: Tensor | None) -> None:
        """Add a tile to dX, dW and db. Tiles come in reverse order."""
        rows, vocab = tile
        has_all_rows, has_all_columns = dz.shape[0] == x.shape[0], dz.shape[1] == weight.shape[0]
        # dX first: the ranks of a split vocabulary sum it while dW is computed.
        if dx is not None:
            of_rows, of_columns = dx if has_all_rows else dx[rows], weight if has_all_columns else weight[vocab]
            accumulate(of_rows, dz, of_columns, first=vocab.stop == weight.shape[0])
            if rows.start == vocab.start == 0 and self._shard is not None:  # the last tile to come
                self.start_sum(dx)
        d_weight = self.weight_gradient()
        if d_weight is not None:
            # Longer than `weight` if it has rows of padding.
            of_columns = d_weight if dz.shape[1] == d_weight.shape[0] else d_weight[vocab]
            self._add_weight(of_columns, rows, dz, x)
        if self._bias is not None:
            along(self._bias, vocab).add_(_column_sums(dz, self._wide))
        if self._low_rank is not None and self._chunk is not None:
            self._low_rank.add(tile, dz, *self._chunk)

    def _add_weight(self, out: Tensor, rows: slice, dz: Tensor, x: Tensor) -> None:
        opens, closes = rows.stop == x.shape[0], rows.start == 0
        if out.dtype == self._wide or (opens and closes):
            accumulate(out, dz.t(), x if opens and closes else x[rows], first=opens and self._dw_is_unwritten)
            return
        if opens:
            part_of_next.set("weight_grad")
            self._slice = torch.empty(out.shape, dtype=self._wide, device=out.device)
        assert self._slice is not None
        accumulate(self._slice, dz.t(), along(x, rows), first=opens)
        if closes:
            out.copy_(self._slice)
            self._slice = None

    def start_sum(self, dx: Tensor) -> None:
        """Start to sum a chunk's dX over the ranks of a split vocabulary."""
        if self._scattered is not None:
            self._sum, self._summed = self._scattered.start_reduce(dx, self._row_slice)
        elif self._shard is not None and self._shard.input_grad == "all_reduce":
            self._sum = dist.all_reduce(dx, group=self._shard.group, async_op=True)

    @property
    def accumulates(self) -> bool:
        """Whether dW, if needed, is float32."""
        return self._given_weight is None or self._weight_dtype == self._wide

    def _input_gradient(self) -> Tensor | None:
        """Allocated late: the GPU is idle until the first product."""
        if self._input is None and (given := self._given_input) is not None:
            dtype = self._wide if self._half else given.dtype
            part_of_next.set("input_grad")
            self._input = self._create_input(given.shape, dtype=dtype, device=given.device)
        return self._input

    def weight_gradient(self) -> Tensor | None:
        """Return dW, None if unneeded. Allocated late: a teacher's logits may be free by then."""
        if self._weight is None and (given := self._given_weight) is not None:
            part_of_next.set("weight_grad")
            self._weight = self._create_weight(given.shape, dtype=self._weight_dtype, device=given.device)
        return self._weight

    def add_exponentials(
        self, exponentials: Tensor, scaled: Tensor, target: Tensor, target_scale: Tensor, x: Tensor
    ) -> None:
        """Add `exponentials.T @ scaled` to a float32 dW, and `target_scale[n] * x[n]` at row `target[n]`."""
        weight = self.weight_gradient()
        assert weight is not None
        weight = along(weight, slice(0, exponentials.shape[1]))
        found = occurrences(target)
        if not self._dw_is_unwritten:  # early, to overlap the start of dX
            add_target_rows_(weight, target, found, target_scale, x)
        accumulate(weight, exponentials.t(), scaled, first=self._dw_is_unwritten)
        if self._dw_is_unwritten:  # late, because the product above overwrote dW
            add_target_rows_(weight, target, found, target_scale, x)

    def close_chunk(self, dx: Tensor | None) -> None:
        row_slice, live, self._live = self._row_slice, self._live, None
        if self._chunk_has_rows:
            self._dw_is_unwritten = False
        if self._sum is not None:
            self._sum.wait()
            self._sum = None
        if self._low_rank is not None and self._chunk is not None:
            self._low_rank.close_chunk(self._chunk[2])
            self._chunk = None
        if self._input is None or dx is None:
            return
        if self._scattered is not None:
            assert self._summed is not None
            self._scattered.write(self._input, row_slice, self._summed)
            self._summed = None
        elif self._input_index is not None:
            index = along(self._input_index, row_slice)
            if live is not None:  # rows without a gradient are zero, and dX may be uninitialised
                self._input.index_fill_(0, index, 0.0)
                index = index[live]
            self._input.index_copy_(0, index, dx.to(self._input.dtype))
        elif live is not None:
            along(self._input, row_slice).zero_().index_copy_(0, live, dx.to(self._input.dtype))
        elif dx.dtype != self._input.dtype:
            self._input[row_slice] = dx

    def finish(self) -> tuple[Tensor | None, ...]:
        """Return dX, dW, db, du and dup, in the parameters' dtypes, or float32 for float16."""
        if self._dw_is_unwritten:  # no row had a gradient
            self._create_weight = torch.zeros
        grads: list[Tensor | None] = [self._input_gradient(), self.weight_gradient(), self._bias]
        self._input = self._weight = self._bias = self._given_input = self._given_weight = None
        for i, (grad, dtype) in enumerate(zip(grads, self._dtypes, strict=True)):
            # In float32 until the backward multiplied them by the loss scale: float16 could overflow.
            if grad is not None and self._half:
                grads[i] = grad if self._unit is None else grad.mul_(self._unit)
            elif grad is not None and dtype is not None:
                grads[i] = grad.to(dtype)
        of_adapter = (None, None) if self._low_rank is None else self._low_rank.finish()[:2]
        return *grads, *of_adapter
