"""Choose the path of a tensor: Triton where it runs, torch everywhere else.

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
from liger_chunked.kernels.later import HAS_TRITON, constant, jit, tl
from liger_chunked.types import LogitOptions

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

# Elements per block of the torch path. Small enough for temporaries to fit a CPU's cache, and small compared with a
# tile.
TORCH_BLOCK = {"cpu": 1 << 18}
TORCH_BLOCK_DEFAULT = 1 << 24


_MOST_ROWS = 65_535

# Major compute capabilities with a tensor memory accelerator and 227 KiB of shared memory: Hopper (9) and data-centre
# Blackwell (10). Blackwell runs `project_exp` only on request, because it was measured only on Hopper.
_CAN_HAVE_WIDE_TILES = (9, 10)
WIDE_TILES_VARIABLE = "LIGER_CHUNKED_WIDE_TILES"


def wide_tiles_setting(text: str | None) -> tuple[int, ...]:
    """Return the GPUs that run `project_exp`, from the environment variable `LIGER_CHUNKED_WIDE_TILES`, read on import.

    Args:
        text: major compute capabilities, separated by commas: "9" is Hopper (the default), "9,10" adds data-centre
            Blackwell, "" is none. None if the variable is not set.

    Raises:
        ValueError: the text is something else.

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

# Whether kernels are compiled to NVIDIA's assembly (PTX).
PTX = constant(torch.version.cuda is not None and not INTERPRETED)

# Largest value of a row relative to the centre of its sums. exp(30), its square, and the sum of such squares over a
# vocabulary fit in float32.
REACH = constant(30.0)


def use_triton(x: Tensor) -> bool:
    """Return whether the Triton kernel serves `x`: on devices for which PyTorch ships a Triton backend.

    float64 takes the torch path: it is for reference results, not for speed.
    """
    if not HAS_TRITON or x.dtype == torch.float64:
        return False
    return x.is_cuda or x.is_xpu or (INTERPRETED and x.is_cpu)


def wide_tiles(capability: tuple[int, int]) -> bool:
    """Return whether `project_exp` runs on NVIDIA GPUs of this compute capability. See `wide_tiles_setting`."""
    return capability[0] in WIDE_TILES


@functools.cache
def has_wide_tiles(device: torch.device) -> bool:
    """Return whether `project_exp` runs on the device."""
    if not HAS_TRITON or INTERPRETED or device.type != "cuda" or torch.version.cuda is None:
        return False
    return wide_tiles(torch.cuda.get_device_capability(device))


def operator(name: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a host function that returns new tensors the operator `liger_chunked::<name>`.

    Compilers trace one opaque operator, whose output shapes come from `fake`. Eager code calls the function directly,
    because the dispatch of an operator written in Python takes longer than a small kernel. Operators must return
    tensors, so under a compiler an output that is None is an empty tensor.
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
    """Return `x` (..., D) as rows with a uniform stride, and that stride in elements. Copy only if there is none."""
    if x.is_contiguous():
        return x, x.shape[-1]
    if x.stride(-1) != 1:
        x = x.contiguous()
    rows = x.reshape(-1, x.shape[-1])
    return rows, rows.stride(0)


def matrix(x: Tensor) -> Tensor:
    """Return `x` (..., D) as (N, D) with contiguous rows and a uniform stride: a view of `x` if possible."""
    return strided_rows(x)[0].view(-1, x.shape[-1])


def has_own_memory(x: Tensor) -> bool:
    """Return whether the elements of `x` have distinct addresses, so that writing one changes no other.

    False if `x` was expanded or its rows overlap.
    """
    reached = 0  # by the dimensions so far, innermost first
    for stride, n in sorted(zip(x.stride(), x.shape, strict=True)):
        if n > 1:
            if stride <= reached:
                return False
            reached += (n - 1) * stride
    return True


def contiguous_like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return contiguous memory of the shape of `x`, in half the time of `x.new_empty(x.shape)`."""
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


# Private, and the only way to ask. Without it torch raises in its own words.
_is_batched: Callable[[Tensor], bool] = getattr(torch._C._functorch, "is_legacy_batchedtensor", lambda _: False)


def first_derivative(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Make a backward raise on second derivatives, that is, with `create_graph=True`.

    A gradient depends on the saved tensors and on the upstream gradient. The result is connected to all of them, so a
    second derivative with respect to any of them raises. torch's `once_differentiable` connects it only to the upstream
    gradient.
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
        # One tensor may be the gradient of two inputs: connect it once.
        distinct = list({id(g): g for g in several if g is not None}.values())
        if not distinct:
            return gradients
        sources = [x for x in (*saved, *upstream) if x is not None and x.requires_grad]
        # The gradients require a gradient themselves, so that a penalty on a constant gradient raises too.
        connected = _Once.apply(len(distinct), *(g.detach().requires_grad_() for g in distinct), *sources)
        by_id = dict(zip(map(id, distinct), connected, strict=True))
        result = tuple(None if g is None else by_id[id(g)] for g in several)
        return result if isinstance(gradients, tuple) else result[0]

    return call


def refuse_second_derivative(*_: Any) -> NoReturn:
    """Raise: the derivative of a gradient.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError("second derivatives through fused losses and base kernels are not supported")


class _Unpacked:
    """The context of a backward with its saved tensors unpacked, because a checkpoint allows unpacking only once."""

    def __init__(self, ctx: Any, saved_tensors: tuple[Tensor | None, ...]) -> None:
        vars(self).update(_ctx=ctx, saved_tensors=saved_tensors)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._ctx, name, value)


class _Once(torch.autograd.Function):
    """`apply(n, *gradients, *sources)`: the first `n` tensors, connected to the others, without a derivative."""

    @staticmethod
    def forward(ctx: Any, n: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(g.data for g in tensors[:n])  # these are no views and may be changed in place

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        refuse_second_derivative()


# Wider rows would spill registers; the torch path serves them.
MAX_ROW = 1 << 15


class RowTile(NamedTuple):
    """How a kernel that keeps whole rows in registers tiles them: `rows` of up to `block` columns at a time."""

    rows: int
    block: int
    num_warps: int


def power_of_two(n: int) -> int:
    """Return the next power of two. `triton.next_power_of_2` takes the host as long as a launch."""
    return 1 << (n - 1).bit_length()


def block_size(n: int, most: int) -> int:
    """Return the block size of a loop over `n` elements, or of a single block if `most` allows."""
    return min(most, power_of_two(n))


@functools.cache
def row_tile(n_cols: int) -> RowTile:
    """Return the tile of a forward. Short rows share a program. Each thread loads 16 elements, up to 16 warps."""
    block = power_of_two(n_cols)
    rows = max(1, 2048 // block)
    return RowTile(rows, block, num_warps=min(16, max(4, rows * block // 512)))


class RowSweep(NamedTuple):
    """How the programs of a backward sweep all rows, tile after tile. Each program accumulates its own partial sum."""

    tile: RowTile
    programs: int
    stages: int


@functools.lru_cache(maxsize=1024)
def row_sweep(n_rows: int, n_cols: int, element_size: int, device: torch.device) -> RowSweep:
    """Return the sweep of a backward: as many programs as run at once.

    A program loads two or three tensors of `element_size`. A tile is 4096 elements, or one row if that is longer. Rows
    of up to 1024 columns get 32 elements per thread, which means fewer programs and fewer sums across threads. A
    multiprocessor has registers for two tiles, and shared memory for their pipelines. See docs/tuning.md.
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
    """Return the multiprocessors of a GPU; 2 in the interpreter, so that each program sweeps several tiles."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    if device.type == "xpu":
        return torch.xpu.get_device_properties(device).max_compute_units
    return 2


def row_blocks(x: Tensor) -> Iterator[slice]:
    """Yield slices of the rows of `x` (N, V) with about `TORCH_BLOCK` elements each."""
    rows = max(1, TORCH_BLOCK.get(x.device.type, TORCH_BLOCK_DEFAULT) // max(1, x.shape[1]))
    for start in range(0, x.shape[0], rows):
        yield slice(start, min(start + rows, x.shape[0]))


def transform(z: Tensor, logit_scale: float, softcap: float | None, temperature: float) -> Tensor:
    """Apply the transform of `LogitOptions` to a tensor in the accumulation dtype. May overwrite `z`."""
    if logit_scale != 1.0:
        z = z.mul_(logit_scale)
    if softcap is not None:
        z = z.div_(softcap).tanh_().mul_(softcap)
    if temperature != 1.0:
        z = z.div_(temperature)
    return z


def grid_of_rows(n_rows: int, blocks: int) -> tuple[int, int, int]:
    """Return a launch grid with every block of every row, for `grid_row`.

    The blocks of a row have consecutive indices, so that programs that run at once access nearby memory. See
    docs/tuning.md. The axes y and z are limited to 65,535.
    """
    y = min(n_rows, _MOST_ROWS)
    return blocks, y, -(-n_rows // y)


@jit
def grid_row():
    """The row of this program. It may be beyond the last row."""
    return tl.program_id(1).to(tl.int64) + tl.program_id(2).to(tl.int64) * tl.num_programs(1)


@jit
def exp(x, PRECISE: tl.constexpr):
    """exp(x). PRECISE is for float32 logits: the hardware's 2**x loses bits of a large argument x log2(e)."""
    if PRECISE:
        # exp(x) = exp(x - n log 2) 2**n has a small first argument and an exact power of two. log 2 is split into two
        # parts, and n times the first is exact too. Below -120, also for -inf, the result is 0.
        x = tl.where(x < -120.0, -120.0, x)
        n = tl.floor(x * 1.4426950408889634 + 0.5)
        x = (x - n * 0.693359375) + n * 2.12194440e-4
        return tl.exp2(x * 1.4426950408889634) * tl.exp2(n)
    else:
        # tl.exp keeps subnormal results, at the cost of three more instructions.
        return tl.exp2(x * 1.4426950408889634)


@jit
def factor(x):
    """Prepare an operand of `tl.dot`: Triton's interpreter would multiply the bits of bfloat16."""
    if PTX:
        return x
    else:
        return x.to(tl.float32)


@jit
def log2(x):
    """log2 with an error of 2**-22, absolute near 1 and relative elsewhere. One instruction; tl.log2 takes twenty."""
    if PTX:
        return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    else:
        return tl.log2(x)


@jit
def log(x):
    """log, with the error of `log2`."""
    if PTX:
        return log2(x) * 0.6931471805599453
    else:
        return tl.log(x)


@jit
def reciprocal(x):
    """1 / x for one number per row: plain division is off by two units in the last place, exact division needs a
    subroutine.
    """
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
    """Return the arguments of `transform_block`. Steps without effect are None and compile to nothing."""

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
