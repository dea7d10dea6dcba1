"""Constants of all devices, or those without a table, from an H200.

Measure again before you change one: `python -m benchmarks.base_kernels` and `python -m benchmarks.kernels` time the
kernels with these sizes. docs/tuning.md has what lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class Launch(NamedTuple):
    """Elements at a time, a power of two, and warps."""

    block: int
    num_warps: int


class Tuning(NamedTuple):
    logits_stats: Launch = Launch(2048, 4)  # columns
    logits_stats_argmax_block: int = 1024  # an argmax takes registers
    logits_grad: Launch = Launch(1024, 2)  # columns
    divergence: Launch = Launch(2048, 4)  # columns
    loads_in_flight: int = 4  # blocks loaded ahead
    hidden: Launch = Launch(1024, 4)  # columns of hidden states

    # Of kept ids: entries and columns of hidden states at a time, warps
    kept_logits: tuple[int, int, int] = (8, 256, 4)
    kept_input_grad: tuple[int, int, int] = (2, 1024, 4)
    # Rows of dW: entries of a program, sums added at a time, columns, warps. A program for all entries of an id took
    # 16 ms in place of 3 at 136 ids a token, because a few ids come thousands of times.
    added_rows: tuple[int, int, int, int] = (64, 8, 512, 2)
    kept_stats: Launch = Launch(64, 1)  # entries of a token
    kept_grad: Launch = Launch(1024, 4)  # entries
    kept_tile: Launch = Launch(1024, 4)  # entries of a token, of long lists

    norm_forward_elements: int = 2048  # of a tile
    norm_backward_elements: int = 4096  # of a tile; 2048 take 1.09 to 1.17 of the time at 4096 x 896
    norm_resident_elements: int = 8192  # per multiprocessor, for its registers
    norm_elements_per_warp: int = 512  # 16 per thread
    norm_most_warps: int = 16
    norm_narrow: int = 1024  # most columns of 4 warps
    norm_pipelined_bytes: int = 1 << 14  # of a tile that fits shared memory thrice
    norm_sums: tuple[int, int, int] = (256, 16, 8)  # programs and columns of a tile, warps

    # FlexAttention's kernel_options for heads of up to 64 values, in the attention of shared prompts
    attention_small_heads: Mapping[str, int] = MappingProxyType({})

    glu: Launch = Launch(1024, 4)  # columns: 2048 take 1 to 2% longer, 4096 take 8%
    rope: Launch = Launch(2048, 4)  # pairs of columns
    experts: Launch = Launch(1024, 4)  # columns of a token's rows; below 256 a warp, sums take 2 to 10 times as long
    experts_bias: tuple[int, int, int] = (32, 128, 8)  # rows and columns of a tile, warps
    scale: Launch = Launch(4096, 8)
    scale_programs: int = 2048  # a few waves
    survey: Launch = Launch(4096, 4)  # targets
    survey_top_k_block: int = 64  # entries compared at a time
    survey_top_k_most: int = 1024  # longer rows are sorted by torch


GENERIC = Tuning()

MAX_ROW = 1 << 15  # columns of a norm; wider rows spill registers
TORCH_BLOCK = {"cpu": 1 << 18}  # elements of a torch block, for the cache
TORCH_BLOCK_DEFAULT = 1 << 24  # elsewhere
UPCAST_BLOCK = 1 << 20  # elements at a time, on a CPU
# Bytes of a column, and rows of a token, in a program of experts: more spill registers.
MOST_SUMMED, MOST_SPREAD = 64, 8
COUNTED_BLOCKS = 256  # blocks of a survey whose counts a program of `find_tokens` sums at once; most have fewer
REMEMBERED = 1 << 10  # variants per kernel, and shapes of norms

# Chunks (docs/tuning.md, "Products and chunks")
# Most bytes of logits in one chunk: 8192 tokens of a vocabulary of 152,000 took 1.12 of the floor, in chunks 1.17.
ONE_CHUNK = 2_500_000_000
CHUNK_TOKENS = 4096  # fewest under the automatic budget
ROUND = 256  # of chunks and tiles: rows of the largest cuBLAS tile
MIN_TILE_COLUMNS = 1024  # narrower products are slow
TEACHER_TOKENS = 2048  # most teacher tokens at once; 1024 take the same time, within 1%
FEWEST_TEACHER_TOKENS = 512  # the same under a small budget
TEACHER_VOCAB = 152_000  # smaller ones allow proportionally more tokens

# Kept ids take products of whole rows (`engine/choose.py` has the measurement)
KEPT_OF_VOCAB = 180  # from one id of this many on, of all ids of all tokens
SMALLEST_OF_KEPT = 1 << 33  # multiplications of a product; a smaller step waits for the host either way

# Rows without a gradient are left out of a backward's products (`engine/live_rows.py`). The bounds are estimates
SMALLEST_OF_LIVE_ROWS = 1 << 39  # multiplications of a chunk's product; below, a dozen small launches take too long
ONE_DEAD_ROW_OF = 64  # rows: fewer dead ones do not pay for gathering hidden states
MOST_GATHERED = 1 << 24  # logits at a time
