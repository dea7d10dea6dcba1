"""A pack through the head without its logits: what `HeadPass` does, where a loss reaches no more than logps and lse.

statistics   one product, whose epilogue writes exponentials and sums them
backward     dX and dW as products with these exponentials, beside one another: no pass over the chunk

The target's part of both gradients is added in float32, beside the products.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from liger_chunked.engine.aside import Aside
from liger_chunked.engine.passes import Gradients, accumulate
from liger_chunked.engine.schedule import Tile, along, largest
from liger_chunked.kernels import (
    Exponentials,
    LogitsCotangents,
    PartialStats,
    RowScales,
    add_target_rows_of_weight,
    project_exp,
    scale_rows,
)
from liger_chunked.types import Head, LogitOptions, TokenStats

# Descriptors want the rows of a tensor 16 bytes apart: so many elements of bfloat16.
_DESCRIPTOR_BYTES = 16
_DESCRIPTOR_ELEMENTS = _DESCRIPTOR_BYTES // torch.bfloat16.itemsize
# The widest hidden states that gain. What is saved, two passes over the logits, does not grow with H; what it costs, a
# product that may be slower than cuBLAS's and dX in float32, does. Steps of cross entropy on an H200, of 16384 tokens,
# by logits and by the epilogue: over 151936 classes H = 1536 38.9 and 35.9 ms, 2048 48.9 and 46.2, 2560 60.3 and 57.8;
# over 128256 classes 3072 60.6 and 59.9, 4096 79.5 and 78.5, but of 32768 tokens 156.8 and 156.2.
_WIDEST = 3072
# The smallest packs that gain, in multiplications of a product. Below, the host is what takes time, and it had 0.4 ms
# more to do a pack (before launches with descriptors were remembered): two packs of 2048 x 1024 over 32000 classes took
# 3.2 ms, by logits 1.8; of 4096, 3.5 and 3.1; of 8192, 5.7 and 5.9; two packs of 1024 x 896 over 151936 took 3.69 and
# 3.75.
_SMALLEST = 1 << 37
# The smallest packs for which a step is cut that could be one chunk of logits: so many tokens on an average, and
# multiplications of a product in each. See `instead_of_one_chunk`.
_FEWEST_TOKENS = 3584
_LARGE = 1 << 39
# The widest hidden states for which that was measured.
_WIDEST_CUT = 2048
# What the product's epilogue has a sum for, and the mean. An argmax, or a sum of squares, would take registers that it
# has not.
_COMPUTABLE = {"logps", "lse", "entropy", "mean_logits"}
# Elements of dX that are formed in float32 at a time, as many or up to twice as many: such a product fills a GPU.
_PRODUCT = 1 << 22


def _fits_descriptor(x: Tensor) -> bool:
    return x.is_contiguous() and x.data_ptr() % _DESCRIPTOR_BYTES == 0


def serves(
    head: Head,
    dtype: torch.dtype,
    options: LogitOptions,
    class_weight: Tensor | None,
    outputs: tuple[str, ...],
    differentiates: tuple[str, ...],
    packs: list[list[Tile]],
) -> bool:
    """Whether `EpiloguePass` can take the place of `HeadPass` in a step, on a device with the tiles for it, and gains.

    Args:
        head: as it was given, for its shapes and its layout.
        dtype: of its products.
        options, class_weight, outputs: of the step.
        differentiates: the statistics that the gradient of its loss reaches.
        packs: the tiles of each pack.
    """
    hidden_size = head.weight.shape[1]
    # A cast makes a copy of its own, which is aligned.
    fits = _fits_descriptor(head.weight) if head.weight.dtype == dtype else head.weight.is_contiguous()
    return (
        dtype == torch.bfloat16
        and head.bias is None
        and options.softcap is None
        and options.logit_scale != 0
        and class_weight is None
        and _COMPUTABLE.issuperset(outputs)
        and set(EpiloguePass.differentiable).issuperset(differentiates)
        and all(len(tiles) == 1 for tiles in packs)
        and hidden_size <= _WIDEST
        and max(map(largest, packs)) * hidden_size >= _SMALLEST
        and hidden_size % _DESCRIPTOR_ELEMENTS == 0
        and fits
    )


def instead_of_one_chunk(packs: list[list[Tile]], hidden_size: int) -> bool:
    """Whether these packs by the epilogue take less memory than one chunk of their logits, and about as long.

    A chunk of N tokens holds 2 N V bytes of logits and 2 V H of dW, packs of at most n hold 2 n V of exponentials and
    4 V H of dW in float32: less where n + H < N. Cross entropy on an H200, in packs and in one chunk:

        tokens x hidden x classes       ms                                MiB
        8192 x 1536 x 151936            18.77, 19.23 and 19.07, 18.91     2126, 2843
        8192 x 2048 x 151936            24.23, 24.95                      2425, 3000
        8192 x 2048 x 128256            20.31, 20.89                      2052, 2537
        6144 x 1536 x 151936            14.68, 14.64                      1817, 2244
        6144 x 2048 x 128256            16.55, 16.00                      1802, 2030
        32768 x 2048 x 32000            22.62, 20.62                      644, 2255
        8192 x 2048 x 32000             6.05, 5.38                        548, 657

    (No file was kept of these; packs took larger blocks of the product then, and more of the host. 8192 x 896 x 151936
    took 1.129 of its products' time in packs, in one chunk 1.171.) A pack has a tenth of a millisecond of small
    kernels, and dW to read and to write. `serves` has to be asked too.
    """
    return (
        len(packs) > 1
        and hidden_size <= _WIDEST_CUT
        and sum(tiles[-1].rows.stop for tiles in packs) >= _FEWEST_TOKENS * len(packs)
        and all(largest(tiles) * hidden_size >= _LARGE for tiles in packs)
    )


@dataclass
class EpiloguePass:
    """The head of one step, and the one buffer that every pack's exponentials are written to.

    With `z = scale x W^T` and a centre `c` for each row, the projection's epilogue turns a block of logits, still in
    registers, into `E = exp(z - c)` and its share of each row's sums. As the gradient of a row by its logits is `s E`,
    but for the target,

        dW = E^T (s x),   dX = s (E W),   and at the target a x and a W[y]

    so that neither direction ever reads logits: `HeadPass` goes over them twice, to reduce them and to overwrite them
    with their gradient, 6 N V bytes of bfloat16. `kernels/projection.py` and `kernels/target_rows.py` have the algebra.

    When. `serves` has the conditions: bfloat16, as E is rounded to 8 bits; whole rows of the vocabulary in a tile; a
    loss that reaches logps and lse alone, whose gradient is that multiple of E; H <= 3072, above which hardly anything
    is left to gain. And dW accumulates in float32, as it does over several packs, or is not asked for: a dW that is
    written once, in bfloat16, has no place to add the target's part to.

    dX has few tiles, and either product leaves some of a GPU idle in its last wave, which the other may take. Of 151936
    classes 8192 x 1536 took 19.25 ms with one after the other, 18.77 beside one another; 8192 x 896 12.64 and 12.08.
    Products of H = 4096, or written in bfloat16, gained nothing. dX begins first, as small kernels precede dW in its
    stream: a block of dX's takes a millisecond; begun last, it would leave the others idle. cuBLAS keeps a workspace
    for each stream, on Hopper 32 MiB from the first step on, which no estimate has.

    Bytes, of a pack of n tokens, beside the gradients of the step:

        E                      2 n V         the buffer, like that of the logits; none where no backward follows
        statistics   parts     n V / 32      a float32 sum for each block of columns, half as many bytes where H > 1536;
                                             twice with an entropy
        backward     s x       2 n H         in the place of dX, where there is one
                     E W       4 n H         while dX is formed; at most 32 MiB

    Statistics and backward do not overlap: 4096 tokens of 151936 classes and H = 896 hold 1187 MiB of E, and 19 MiB or
    else 14 MiB beside it.

    The arguments and results of its methods are those of `HeadPass`; each pack is one tile.

    Args:
        head: weight (V, H) in bfloat16, no bias.
        options: the transform.
        backward_follows: whether E is wanted.
    """

    head: Head
    options: LogitOptions
    backward_follows: bool = True
    differentiable: ClassVar[tuple[str, ...]] = ("logps", "lse")
    _buffer: Tensor | None = field(default=None, init=False, repr=False)
    _held: Exponentials | None = field(default=None, init=False, repr=False)

    @property
    def vocab_size(self) -> int:
        return self.head.weight.shape[0]

    @property
    def _scale(self) -> float:
        return self.options.logit_scale / self.options.temperature

    def reserve(self, elements: int) -> None:
        """Make room for the exponentials of the largest pack, once."""
        if self.backward_follows:
            row_stride = -(-self.vocab_size // _DESCRIPTOR_ELEMENTS) * _DESCRIPTOR_ELEMENTS
            self._buffer = self.head.weight.new_empty(elements // self.vocab_size, row_stride)

    def release(self) -> None:
        """Give the buffer back."""
        self._buffer = self._held = None

    @functools.cached_property
    def _weight_sum(self) -> Tensor:
        """(H,) float32, over the vocabulary: 2 V H bytes are read, once a step."""
        return self.head.weight.sum(0, dtype=torch.float32)

    def statistics(
        self, x: Tensor, target: Tensor, tiles: list[Tile], outputs: tuple[str, ...]
    ) -> tuple[PartialStats, TokenStats]:
        """Reduce a pack: `x` (n, H) and `target` (n,)."""
        assert len(tiles) == 1
        x = x if _fits_descriptor(x) else x.clone(memory_format=torch.contiguous_format)
        out = None if self._buffer is None else self._buffer[: x.shape[0], : self.vocab_size]
        weight_sum = self._weight_sum if "mean_logits" in outputs else None
        exponentials, stats = project_exp(x, self.head.weight, target, weight_sum, out, self._scale, outputs)
        self._held = exponentials if self.backward_follows else None
        return PartialStats(exponentials.centre, exponentials.sum_exp), stats

    def backward(
        self, x: Tensor, target: Tensor, tiles: list[Tile], cotangents: LogitsCotangents, grads: Gradients,
        pack_rows: slice,
    ) -> None:  # fmt: skip
        """Add a pack's dX and dW to `grads`; `pack_rows` are its tokens in the layout of the batch."""
        exponentials, self._held = self._held, None
        assert exponentials is not None and exponentials.values is not None
        x = x.contiguous()
        dx = grads.open_input(x, pack_rows, one_slice=True)
        # In the place of dX, which is written last.
        scaled = (torch.empty_like(x) if dx is None else dx) if grads.open_weight() else None
        scales = scale_rows(x, exponentials, cotangents.logps, cotangents.lse, self._scale, scaled)
        with Aside(x.device) as aside:
            if scaled is not None:
                with aside.stream() if dx is not None else nullcontext():
                    grads.add_exponentials(exponentials.values, scaled, target, scales.target, x)
            if dx is not None:
                self._form_input_gradient(dx, exponentials.values, target, scales, before_writing=aside.join)
        grads.close_pack(dx, pack_rows)

    def _form_input_gradient(
        self, dx: Tensor, exponentials: Tensor, target: Tensor, scales: RowScales, before_writing: Callable[[], None]
    ) -> None:
        """dX (n, H), with the product in float32 for some of the rows at a time."""
        n, hidden = dx.shape
        rows = -(-n // max(1, dx.numel() // _PRODUCT))
        product = dx.new_empty(rows, hidden, dtype=torch.float32)
        for start in range(0, n, rows):
            block = slice(start, min(start + rows, n))
            part = along(product, slice(0, block.stop - start))
            accumulate(part, along(exponentials, block), self.head.weight, first=True)
            before_writing()
            add_target_rows_of_weight(
                part,
                self.head.weight,
                along(target, block),
                RowScales(*(along(s, block) for s in scales)),
                out=along(dx, block),
            )
