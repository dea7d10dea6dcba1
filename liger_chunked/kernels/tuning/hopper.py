"""Constants of Hopper, and of the fused epilogue, measured only there."""

from __future__ import annotations

from typing import NamedTuple

from liger_chunked.kernels.tuning.generic import Tuning

HOPPER = Tuning(
    attention_small_heads={
        "bwd_BLOCK_M1": 64, "bwd_BLOCK_N1": 64, "bwd_BLOCK_M2": 64, "bwd_BLOCK_N2": 64, "bwd_num_warps": 4,
        "bwd_num_stages": 3,
    },
)  # fmt: skip


class Tiling(NamedTuple):
    """Tile sizes and launch parameters of the product (docs/tuning.md, "Fused epilogue").

    `group` row blocks share a column block of weights in L2; `programs` is per multiprocessor.
    """

    rows: int = 128
    cols: int = 256
    inner: int = 64
    stages: int = 4
    num_warps: int = 8
    group: int = 16
    programs: int = 1

    @classmethod
    def of(cls, hidden: int, heavy: bool = False) -> Tiling:
        """`heavy`: with exponentials and entropies, where two programs lose at H = 896 too (1.26 against 1.16)."""
        if hidden > 1536:
            return cls()
        if heavy or hidden > 1024:
            return cls(stages=3, group=32)
        return cls(cols=128, stages=3, num_warps=4, group=32, programs=2)


# Kernels next to the fused product
REDUCED = 16, 256  # rows and partial sums at a time
REDUCE_WARPS = 8
GRADIENT_ROWS = 256  # rows of a program that prepares factors
EXPONENTIALS = 4, 1024
EXPONENTIALS_WARPS = 4
TARGET_RUN = 16  # tokens whose rows a program adds to dW

# When a step uses the fused epilogue (docs/tuning.md, "Fused epilogue")
WIDEST = 3072  # largest H of losses or entropies with a backward, unless logits are float32
SMALLEST = 1 << 37  # multiplications of a product; below, the host is the bottleneck
FEWEST_TOKENS = 3584  # mean tokens per chunk, to split a step that fits one
FEWEST_TILES, FEWEST_TILES_OF_ENTROPY = 2, 4  # of statistics with a backward; an entropy takes a fourth product
LARGE = 1 << 39  # multiplications of a product per chunk
WIDEST_CUT = 2048  # its largest H
PRODUCT = 1 << 22  # least elements of a product of dX, to fill the GPU
