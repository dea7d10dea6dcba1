"""A pack through the head without its logits: what `HeadPass` does, where a loss reaches no more than logps and lse.

statistics   one product, whose epilogue writes exponentials and sums them
backward     dX and dW as products with these exponentials: no pass over the chunk

The target's part of both gradients is added in float32, beside the products.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from liger_chunked.engine.passes import HeadGradients, accumulate
from liger_chunked.engine.schedule import Tile
from liger_chunked.kernels import (
    Exponentials,
    LogitsCotangents,
    PartialStats,
    add_target_rows_of_weight,
    finish,
    project_exp,
    scale_rows,
)
from liger_chunked.kernels.backend import has_wide_tiles
from liger_chunked.kernels.projection import SAMPLE
from liger_chunked.types import Head, LogitOptions, TokenStats

# Elements that lie on 16 bytes, as descriptors ask of the rows of a bfloat16 tensor.
_ALIGNED = 8
# The widest hidden states that gain. What is saved, two passes over the logits, does not grow with H; what it costs, a
# product a fifth slower than cuBLAS's, does. A step of cross entropy over 151936 classes on an H200: 32768 x 896 from
# 50.9 to 47.5 ms, 8192 x 1536 in packs of 2048 from 21.0 to 20.3, 65536 x 2048 from 197 to 195 with 48 MiB more.
_WIDEST = 1536
_OUTPUTS = {"logps", "lse", "entropy", "mean_logits"}


def _aligned(x: Tensor) -> bool:
    return x.is_contiguous() and x.data_ptr() % 16 == 0


def serves(
    head: Head,
    options: LogitOptions,
    class_weight: Tensor | None,
    outputs: tuple[str, ...],
    differentiates: tuple[str, ...],
    packs: list[list[Tile]],
) -> bool:
    """Whether `EpiloguePass` can take the place of `HeadPass` in a step.

    Args:
        head: in the dtype of its products.
        options, class_weight, outputs: of the step.
        differentiates: the statistics that the gradient of its loss reaches.
        packs: the tiles of each pack.
    """
    weight = head.weight
    return (
        weight.dtype == torch.bfloat16
        and has_wide_tiles(weight.device)
        and head.bias is None
        and options.softcap is None
        and options.logit_scale != 0
        and class_weight is None
        and _OUTPUTS.issuperset(outputs)
        and set(EpiloguePass.differentiable).issuperset(differentiates)
        and all(len(tiles) == 1 for tiles in packs)
        and weight.shape[1] <= _WIDEST
        and weight.shape[1] % _ALIGNED == 0
        and _aligned(weight)
    )


@dataclass
class EpiloguePass:
    """The head of one step, and the one buffer that every pack's exponentials are written to.

    The arguments and results of its methods are those of `HeadPass`; each pack is one tile. dW must accumulate in
    float32, or not be asked for.
    """

    head: Head
    options: LogitOptions
    differentiable: ClassVar[tuple[str, ...]] = ("logps", "lse")
    _buffer: Tensor | None = field(default=None, init=False, repr=False)
    _held: Exponentials | None = field(default=None, init=False, repr=False)

    @property
    def _scale(self) -> float:
        return self.options.logit_scale / self.options.temperature

    def reserve(self, elements: int) -> None:
        """Make room for the largest pack, once."""
        vocab_size = self.head.weight.shape[0]
        padded = -(-vocab_size // _ALIGNED) * _ALIGNED
        self._buffer = self.head.weight.new_empty(elements // vocab_size, padded)

    def release(self) -> None:
        """Give the buffer back."""
        self._buffer = self._held = None

    def statistics(
        self, x: Tensor, target: Tensor, tiles: list[Tile], outputs: tuple[str, ...]
    ) -> tuple[PartialStats, TokenStats]:
        """Reduce a pack: `x` (n, H) and `target` (n,)."""
        assert self._buffer is not None and len(tiles) == 1
        weight = self.head.weight
        vocab_size = weight.shape[0]
        x = x if _aligned(x) else x.clone(memory_format=torch.contiguous_format)
        columns = weight[:: -(-vocab_size // SAMPLE)]
        sample = x.new_empty(x.shape[0], columns.shape[0], dtype=torch.float32)
        accumulate(sample, x, columns.t(), first=True)
        out = self._buffer[: x.shape[0], :vocab_size]
        self._held = project_exp(x, weight, target, sample, out, self._scale, outputs)
        stats = self._held.stats
        return stats, finish(stats, target, vocab_size, outputs)

    def backward(
        self, x: Tensor, target: Tensor, tiles: list[Tile], cotangents: LogitsCotangents, grads: HeadGradients,
        pack_rows: slice,
    ) -> None:  # fmt: skip
        """Add a pack's dX and dW to `grads`; `pack_rows` are its tokens in the layout of the batch."""
        assert self._held is not None
        exponentials, self._held = self._held, None
        x = x.contiguous()
        scaled = torch.empty_like(x) if grads.wants_weight else None
        scales = scale_rows(x, exponentials, cotangents.logps, cotangents.lse, self._scale, scaled)
        if scaled is not None:
            grads.add(tiles[0].vocab, exponentials.values, scaled, first=True)
            grads.add_targets(target, scales.target, x)
        del scaled  # it makes room for the next product
        dx = grads.open_input(x, pack_rows, one_slice=True)
        if dx is not None:
            product = torch.empty_like(x, dtype=torch.float32)
            accumulate(product, exponentials.values, self.head.weight, first=True)
            add_target_rows_of_weight(product, self.head.weight, target, scales, out=dx)
        grads.close_pack(dx, pack_rows)
