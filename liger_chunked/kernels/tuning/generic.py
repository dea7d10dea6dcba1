"""Constants of devices without a table of their own, and constants that do not depend on the device.

Each line says what a constant bounds, and in quotes the section of docs/tuning.md that backs it. All were chosen on an
H200. "Launch sizes" is the section of those whose alternatives were not kept.
"""

from __future__ import annotations

from typing import NamedTuple


class Launch(NamedTuple):
    """Elements that a program handles at a time (a power of two), and its warps."""

    block: int
    num_warps: int


class Tuning(NamedTuple):
    """Launch constants of one architecture."""

    # Logits
    logits_stats: Launch = Launch(2048, 4)  # columns of a row at a time: "Launch sizes"
    logits_stats_argmax_block: int = 1024  # the same with an argmax, whose indices take registers: "Launch sizes"
    logits_grad: Launch = Launch(1024, 2)  # columns per program: "Order of blocks"
    divergence: Launch = Launch(2048, 4)  # columns of both rows at a time: "Divergence sweeps"
    pointwise_divergence: Launch = Launch(2048, 4)  # columns of both rows at a time: "Launch sizes"
    loads_in_flight: int = 4  # blocks of a row that a sweep loads ahead: "Launch sizes"
    hidden: Launch = Launch(1024, 4)  # columns of a hidden state at a time: "Launch sizes"

    # Norms
    norm_forward_elements: int = 2048  # of a tile: "Launch sizes"
    norm_backward_elements: int = 4096  # of a tile: "Norms and gated units"
    norm_resident_elements: int = 8192  # of the tiles of a multiprocessor, for its registers: "Norms and gated units"
    norm_elements_per_warp: int = 512  # 16 for each thread, up to the most warps: "Norms and gated units"
    norm_most_warps: int = 16  # "Norms and gated units"
    norm_narrow: int = 1024  # columns up to which a backward uses 4 warps, to sum over fewer threads: "Launch sizes"
    norm_pipelined_bytes: int = 1 << 14  # of a tile that fits shared memory three times: "Launch sizes"
    norm_sums: tuple[int, int, int] = (256, 16, 8)  # programs and columns of a tile, warps: "Norms and gated units"

    # Others
    glu: Launch = Launch(1024, 4)  # columns per program: "Norms and gated units"
    rope: Launch = Launch(2048, 4)  # pairs of columns per tile: "Launch sizes"
    scale: Launch = Launch(4096, 8)  # elements of a program at a time: "Launch sizes"
    scale_programs: int = 2048  # a few waves on any GPU, few enough to return at once: "Launch sizes"
    survey: Launch = Launch(4096, 4)  # targets per program: "Survey of the target"
    survey_top_k_block: int = 64  # entries that are compared at a time: "Launch sizes"
    survey_top_k_most: int = 1024  # entries of a row that the kernel compares; torch sorts longer rows: "Launch sizes"


GENERIC = Tuning()

# Paths
MAX_ROW = 1 << 15  # columns of a norm; wider rows would spill registers and take the torch path: "Launch sizes"
TORCH_BLOCK = {"cpu": 1 << 18}  # elements per block of the torch path, for a CPU's cache: "Launch sizes"
TORCH_BLOCK_DEFAULT = 1 << 24  # the same elsewhere, small compared with a tile: "Launch sizes"
UPCAST_BLOCK = 1 << 20  # elements that a CPU upcasts at a time for a float32 product: "Launch sizes"
REMEMBERED = 1 << 10  # compiled variants per kernel, and shapes of norms, that the host remembers: "Host time"

# Chunks
ONE_CHUNK = 2_500_000_000  # bytes of logits up to which a step is one chunk: "Chunk sizes"
CHUNK_TOKENS = 4096  # fewest tokens of a chunk under the automatic budget: "Chunk sizes"
ROUND = 256  # chunks and tiles are whole cuBLAS tiles, of up to this many rows: "Chunk sizes"
MIN_TILE_COLUMNS = 1024  # narrower products do not fill the matrix units; rows are cut instead: "Chunk sizes"
TEACHER_TOKENS = 2048  # most tokens of teacher logits in memory at once: "Chunk sizes"
FEWEST_TEACHER_TOKENS = 512  # the same under a small budget: "Chunk sizes"
TEACHER_VOCAB = 152_000  # a smaller vocabulary allows proportionally more teacher tokens: "Chunk sizes"
