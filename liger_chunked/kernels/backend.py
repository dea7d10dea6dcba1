"""Which path a tensor takes: Triton where it runs, torch everywhere else.

A step's kernels also take tensors on the meta device, which stand for tensors on a GPU: the kernels allocate the same
memory and launch nothing. `estimate_memory` makes a dry run with them.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from liger_chunked.kernels.checks import plain
from liger_chunked.types import LogitOptions

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # no wheels outside Linux; the torch path serves there
    triton = None
    tl = None
    TensorDescriptor = None

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

# The torch path works through a tile in blocks of this many elements: its temporaries then stay in a CPU's cache,
# and are small beside the tile itself.
TORCH_BLOCK = {"cpu": 1 << 18}
TORCH_BLOCK_DEFAULT = 1 << 24


_MOST_ROWS = 65_535

# Major compute capabilities with a tensor memory accelerator and 227 KiB of shared memory: Hopper (9), and Blackwell of
# data centres (10). Blackwell runs `project_exp` only where the user asks for it: it was measured on Hopper alone.
_CAN_HAVE_WIDE_TILES = (9, 10)
WIDE_TILES_VARIABLE = "LIGER_CHUNKED_WIDE_TILES"


def wide_tiles_setting(text: str | None) -> tuple[int, ...]:
    """The GPUs that run `project_exp`, from the environment variable `LIGER_CHUNKED_WIDE_TILES`, read on import.

    Args:
        text: major compute capabilities with commas between them: "9" is Hopper (the default), "9,10" adds Blackwell of
            data centres, and "" is none. None: not set.

    Raises:
        ValueError: something else.

    >>> wide_tiles_setting("9,10")
    (9, 10)
    """
    if text is None:
        return (9,)
    majors = [part.strip() for part in text.split(",") if part.strip()]
    known = [str(major) for major in _CAN_HAVE_WIDE_TILES]
    if not set(majors) <= set(known):
        raise ValueError(
            f"{WIDE_TILES_VARIABLE} must list major compute capabilities among {', '.join(known)}, with commas between "
            f"them, got {text!r}"
        )
    return tuple(sorted({int(major) for major in majors}))


WIDE_TILES = wide_tiles_setting(os.environ.get(WIDE_TILES_VARIABLE))

# Whether kernels are compiled to NVIDIA's assembly.
PTX = tl is not None and tl.constexpr(torch.version.cuda is not None and not INTERPRETED)

# How far above the centre of its sums a row may rise: float32 has room for exp(30), for its square, and for the sum
# of as many squares as a vocabulary has.
REACH = 30.0 if tl is None else tl.constexpr(30.0)


def jit(function: Callable[..., Any]) -> Any:
    """`triton.jit`, or the undecorated function where Triton is not installed."""
    return function if triton is None else triton.jit(function)


def use_triton(x: Tensor) -> bool:
    """Whether the Triton kernel serves `x`: on devices whose PyTorch builds come with a backend of Triton.

    float64 takes the torch path: it is there for oracles, not for speed.
    """
    if triton is None or x.dtype == torch.float64:
        return False
    return x.is_cuda or x.is_xpu or (INTERPRETED and x.is_cpu)


def wide_tiles(capability: tuple[int, int]) -> bool:
    """Whether `project_exp` runs on NVIDIA's GPUs of this compute capability, see `wide_tiles_setting`."""
    return capability[0] in WIDE_TILES


@functools.cache
def has_wide_tiles(device: torch.device) -> bool:
    """Whether `project_exp` runs on the device."""
    if triton is None or INTERPRETED or device.type != "cuda" or torch.version.cuda is None:
        return False
    return wide_tiles(torch.cuda.get_device_capability(device))


def operator(name: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make `liger_chunked::<name>` of a host function that returns tensors of its own.

    Compilers trace one opaque operator, whose outputs' shapes `fake` tells them. Everyone else calls the function as it
    stands: the dispatch of an operator written in Python takes longer than a small kernel runs. An output that is None
    is an empty tensor under a compiler, where operators return tensors alone.
    """

    def tensors(outputs: Any, like: Tensor) -> Any:
        if isinstance(outputs, Tensor):
            return outputs
        return tuple(like.new_empty(0) if output is None else output for output in outputs)

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def whole(*args: Any) -> Any:
            return tensors(function(*args), args[0])

        traced = torch.library.custom_op(f"liger_chunked::{name}", whole, mutates_args=())
        traced.register_fake(lambda *args: tensors(fake(*args), args[0]))

        @functools.wraps(function)
        def call(*args: Any) -> Any:
            return traced(*args) if torch.compiler.is_compiling() else function(*args)

        return call

    return decorate


def strided_rows(x: Tensor) -> tuple[Tensor, int]:
    """`x` (..., D) as rows that lie one stride apart, and that stride in elements; a copy only where there is none."""
    if x.is_contiguous():
        return x, x.shape[-1]
    if x.stride(-1) != 1:
        x = x.contiguous()
    rows = x.reshape(-1, x.shape[-1])
    return rows, rows.stride(0)


def matrix(x: Tensor) -> Tensor:
    """`x` (..., D) as (N, D) rows one stride apart, each without gaps: a view of `x` where there is one."""
    return strided_rows(x)[0].view(-1, x.shape[-1])


def has_own_memory(x: Tensor) -> bool:
    """Whether each element of `x` has a place to itself, so that one may be written while others are to be read: not
    where `x` was expanded, or its rows overlap.
    """
    reached = 0  # by the dimensions so far, the innermost first
    for stride, n in sorted(zip(x.stride(), x.shape, strict=True)):
        if n > 1:
            if stride <= reached:
                return False
            reached += (n - 1) * stride
    return True


def contiguous_like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Memory of the shape of `x`, without gaps: half the time of `x.new_empty(x.shape)`."""
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


# Private, and the only way to ask. Without it torch raises in its own words.
_is_batched: Callable[[Tensor], bool] = getattr(torch._C._functorch, "is_legacy_batchedtensor", lambda _: False)


def first_derivative(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Make a backward refuse second derivatives, for `create_graph=True`.

    A gradient depends on the saved tensors and on the upstream gradient, so the result is connected to all of them:
    whichever of them a second derivative is taken with respect to, it raises. `once_differentiable` of torch connects
    the result to the upstream gradient alone.
    """

    @functools.wraps(backward)
    def call(ctx: Any, *upstream: Tensor | None) -> Any:
        upstream = plain(("an upstream gradient",) * len(upstream), upstream)
        if not torch.compiler.is_compiling() and any(g is not None and _is_batched(g) for g in upstream):
            raise NotImplementedError(
                "fused kernels have no batched backward: call torch.autograd.grad without is_grads_batched, and "
                "torch.autograd.functional without vectorize"
            )
        if not torch.is_grad_enabled():
            return backward(ctx, *upstream)
        saved = ctx.saved_tensors
        with torch.no_grad():
            gradients = backward(_Unpacked(ctx, saved), *upstream)
        several = gradients if isinstance(gradients, tuple) else (gradients,)
        # One tensor may be the gradient of two inputs, and stays one.
        distinct = list({id(g): g for g in several if g is not None}.values())
        if not distinct:
            return gradients
        sources = [x for x in (*saved, *upstream) if x is not None and x.requires_grad]
        # They require a gradient themselves, so that a penalty on a constant gradient raises too.
        connected = _Once.apply(len(distinct), *(g.detach().requires_grad_() for g in distinct), *sources)
        by_id = dict(zip(map(id, distinct), connected, strict=True))
        result = tuple(None if g is None else by_id[id(g)] for g in several)
        return result if isinstance(gradients, tuple) else result[0]

    return call


def refuse_second_derivative(*_: Any) -> NoReturn:
    """Raise, as the derivative of a gradient.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError("second derivatives through fused losses and base kernels are not supported")


class _Unpacked:
    """The context of a backward, with its saved tensors unpacked: a checkpoint allows that once."""

    def __init__(self, ctx: Any, saved_tensors: tuple[Tensor | None, ...]) -> None:
        vars(self).update(_ctx=ctx, saved_tensors=saved_tensors)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._ctx, name, value)


class _Once(torch.autograd.Function):
    """`apply(n, *gradients, *sources)`: the first `n` tensors, connected to the others, without derivatives."""

    @staticmethod
    def forward(ctx: Any, n: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(g.data for g in tensors[:n])  # no views, so that they may be changed in place

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        refuse_second_derivative()


# Wider rows would spill registers; the torch path serves them.
MAX_ROW = 1 << 15


class RowTile(NamedTuple):
    """How a kernel that holds whole rows in registers takes them: `rows` of up to `block` columns at a time."""

    rows: int
    block: int
    num_warps: int


def power_of_two(n: int) -> int:
    """Return the next power of two. `triton.next_power_of_2` takes the host as long as a launch."""
    return 1 << (n - 1).bit_length()


def block_size(n: int, most: int) -> int:
    """Of a loop over `n` elements, or of one block for all of them."""
    return min(most, power_of_two(n))


@functools.cache
def row_tile(n_cols: int) -> RowTile:
    """Of a forward. Short rows share a program: each thread has 16 elements to load, until there are 16 warps."""
    block = power_of_two(n_cols)
    rows = max(1, 2048 // block)
    return RowTile(rows, block, num_warps=min(16, max(4, rows * block // 512)))


class RowSweep(NamedTuple):
    """How the programs of a backward go through all rows, each keeping a sum of its own: tile after tile."""

    tile: RowTile
    programs: int
    stages: int


@functools.lru_cache(maxsize=1024)
def row_sweep(n_rows: int, n_cols: int, element_size: int, device: torch.device) -> RowSweep:
    """As many programs as run at once, with two or three tensors of `element_size` to load.

    A tile is 4096 elements, or one row. Of rows up to 1024 columns each thread has 32 of them: half the programs, and
    fewer sums across threads, take 9.8 us of RMSNorm and 10.7 of LayerNorm at 4096 x 896, where tiles of 2048 take 10.7
    and 12.5 (H200, bfloat16). Two rows of 2048 columns to 8 warps take 17.0 and 19.6 us of 4096 rows, one row to 4
    warps 17.9 and 19.6. A multiprocessor has registers for two such tiles, and shared memory for their pipelines. That
    is 64 registers a thread for 16 warps to 4096 columns, which RMSNorm alone fits into: 103 us in the place of 108 at
    16384 x 4096, but 142 of LayerNorm for 105, and 143 of RMSNorm of a sum for 133.
    """
    block = power_of_two(n_cols)
    rows = max(1, 4096 // block)
    elements = rows * block
    tile = RowTile(rows, block, num_warps=4 if block <= 1024 else min(16, elements // 512))
    tiles = -(-n_rows // rows)
    turns = -(-tiles // (max(1, 8192 // elements) * processors(device)))
    return RowSweep(tile, -(-tiles // max(1, turns)), stages=3 if elements * element_size <= 1 << 14 else 1)


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; in the interpreter few, so that a program there has several tiles to go through."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    if device.type == "xpu":
        return torch.xpu.get_device_properties(device).max_compute_units
    return 2


def row_blocks(x: Tensor) -> Iterator[slice]:
    """Slices of the rows of `x` (N, V) that hold about `TORCH_BLOCK` elements each."""
    rows = max(1, TORCH_BLOCK.get(x.device.type, TORCH_BLOCK_DEFAULT) // max(1, x.shape[1]))
    for start in range(0, x.shape[0], rows):
        yield slice(start, min(start + rows, x.shape[0]))


def transform(z: Tensor, logit_scale: float, softcap: float | None, temperature: float) -> Tensor:
    """The transform of `LogitOptions` on a tensor in the accumulation dtype; may write into `z`."""
    if logit_scale != 1.0:
        z = z.mul_(logit_scale)
    if softcap is not None:
        z = z.div_(softcap).tanh_().mul_(softcap)
    if temperature != 1.0:
        z = z.div_(temperature)
    return z


def grid_of_rows(n_rows: int, blocks: int) -> tuple[int, int, int]:
    """A launch grid of every block of every row, for `grid_row`.

    A row's blocks lie beside one another: what runs at once then lies together in memory, worth a sixth of the time of
    a kernel that reads and writes. The axes y and z stop at 65,535.
    """
    y = min(n_rows, _MOST_ROWS)
    return blocks, y, -(-n_rows // y)


@jit
def grid_row():
    """The row of this program, which may lie beyond the last."""
    return tl.program_id(1).to(tl.int64) + tl.program_id(2).to(tl.int64) * tl.num_programs(1)


@jit
def exp(x, PRECISE: tl.constexpr):
    """exp. PRECISE, for float32 logits: the hardware's 2**x loses bits of a large argument x log2(e)."""
    if PRECISE:
        # exp(x) = exp(x - n log 2) 2**n with a small first argument, and a power of two that is exact. log 2 in two
        # parts, the first short enough that n times it is exact too. Below -120 the result is 0, also where x is -inf.
        x = tl.where(x < -120.0, -120.0, x)
        n = tl.floor(x * 1.4426950408889634 + 0.5)
        x = (x - n * 0.693359375) + n * 2.12194440e-4
        return tl.exp2(x * 1.4426950408889634) * tl.exp2(n)
    else:
        # tl.exp keeps results that are not normal numbers, for three more instructions.
        return tl.exp2(x * 1.4426950408889634)


@jit
def factor(x):
    """A factor of `tl.dot`: Triton's interpreter multiplies the bits of bfloat16."""
    if PTX:
        return x
    else:
        return x.to(tl.float32)


@jit
def log2(x):
    """log2, off by 2**-22 near 1 and, elsewhere, of itself: one instruction, where tl.log2 takes twenty."""
    if PTX:
        return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    else:
        return tl.log2(x)


@jit
def log(x):
    """log, off as `log2` is."""
    if PTX:
        return log2(x) * 0.6931471805599453
    else:
        return tl.log(x)


@jit
def reciprocal(x):
    """1 / x of a number a row: a plain division is off by two units, the exact one takes a subroutine."""
    y = 1.0 / x
    return tl.fma(tl.fma(-x, y, 1.0), y, y)


@jit
def tanh(x):
    # Triton's interpreter has no libdevice. A polynomial near 0, where 1 - 2 / (1 + exp(2x)) would cancel.
    s = x * x
    p = -0.0059058417
    p = p * s + 0.0208053611
    p = p * s - 0.0537866764
    p = p * s + 0.133319582
    p = p * s - 0.333332993
    size = tl.abs(x)
    large = 1.0 - 2.0 / (1.0 + exp(2.0 * size, False))
    return tl.where(size < 0.6, x + x * s * p, tl.where(x < 0, -large, large))


def transform_arguments(options: LogitOptions) -> dict[str, float | None]:
    """The transform as `transform_block` takes it: what does nothing is None and compiles to nothing."""

    def unless_one(factor: float) -> float | None:
        return None if factor == 1.0 else float(factor)

    if options.softcap is None:
        return {
            "scale": unless_one(options.logit_scale / options.temperature),
            "softcap": None,
            "inv_temperature": None,
        }
    return {
        "scale": unless_one(options.logit_scale / options.softcap),
        "softcap": float(options.softcap),
        "inv_temperature": unless_one(1.0 / options.temperature),
    }


@jit
def transform_block(z, scale, softcap, inv_temperature):
    if scale is not None:
        z = z * scale
    if softcap is not None:
        z = softcap * tanh(z)
    if inv_temperature is not None:
        z = z * inv_temperature
    return z
