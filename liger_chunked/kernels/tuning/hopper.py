"""Constants of Hopper, compute capability 9, and of the fused epilogue, which was measured only there (H200).

Each line says what a constant bounds, and in quotes the section of docs/tuning.md that backs it.
"""

from __future__ import annotations

from typing import NamedTuple

from liger_chunked.kernels.tuning.generic import Tuning

HOPPER = Tuning()


class Tiling(NamedTuple):
    """Tile sizes and launch parameters of the fused product: "Fused epilogue".

    - `rows`, `cols`, `inner`: size of a tile
    - `group`: row blocks that share a column block of weights while it is in the L2 cache
    - `programs`: resident programs per multiprocessor
    """

    rows: int = 128
    cols: int = 256
    inner: int = 64
    stages: int = 4
    num_warps: int = 8
    group: int = 16
    programs: int = 1

    @classmethod
    def of(cls, hidden: int) -> Tiling:
        """Return the tiling for a hidden size.

        Up to H = 1536, one of two programs multiplies during the other's epilogue. Above, larger tiles are faster,
        because they are read less often from the L2 cache.
        """
        if hidden > 1536:
            return cls()
        return cls(cols=128, stages=3, num_warps=4, group=32 if hidden <= 1024 else 8, programs=2)


# Kernels beside the fused product
REDUCED = 16, 256  # rows and partial sums that a program reduces at a time: "Launch sizes"
REDUCE_WARPS = 8  # of that program: "Launch sizes"
SORTED = 16, 256  # tokens that a program sorts, and tokens that it compares with them at a time: "Launch sizes"
MOST_SORTED = 1 << 15  # tokens of a chunk that the kernel sorts; torch sorts more: "Launch sizes"
TARGET_RUN = 8  # tokens of one target that are added at a time: "Launch sizes"
TARGET_COLS = 512  # columns of dW that a program adds to: "Launch sizes"
TARGET_WARPS = 4  # of the two programs above: "Launch sizes"

# When a step uses the fused epilogue
WIDEST = 3072  # largest H for which it is faster than storing logits: "When a step uses the fused epilogue"
SMALLEST = 1 << 37  # multiplications of one product, below which the host is the bottleneck: same section
FEWEST_TOKENS = 3584  # tokens per chunk, on average, of a step that could be one chunk of logits: same section
LARGE = 1 << 39  # multiplications of one product in each chunk of such a step: same section
WIDEST_CUT = 2048  # largest H for which that split was measured: same section
PRODUCT = 1 << 22  # elements of a product of dX in float32, at least, so that it fills the GPU: "Parts of a step"
