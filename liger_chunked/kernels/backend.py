"""Dispatch, layouts, autograd and device functions of kernels."""

from __future__ import annotations

import functools
import inspect
import os
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, requires
from typing import Any, NoReturn

import torch
from torch import Tensor

from liger_chunked.device import IS_NVIDIA, capability, runs_triton
from liger_chunked.kernels.operands import all_plain, plain
from liger_chunked.kernels.tuning.generic import TORCH_BLOCK, TORCH_BLOCK_DEFAULT
from liger_chunked.private import graph_is_retained as graph_is_retained
from liger_chunked.private import is_batched

# Why there is no Triton. To torch's has_triton_package too, an ImportError says that it is not installed, and any other
# error that it is broken. A CPU needs it in neither case, so the error waits for the first tensor that does.
TRITON_ERROR: str | None = None
TRITON_IS_BROKEN = False
try:
    import triton
    import triton.language as tl
except Exception as error:
    triton = None
    tl = None
    TRITON_ERROR, TRITON_IS_BROKEN = f"{type(error).__name__}: {error}", not isinstance(error, ImportError)
try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except Exception:  # no fused epilogue; a broken Triton fails again as above
    TensorDescriptor = None

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

_MOST_ROWS = 65_535  # limit of a grid's y and z

# Hopper, and data-centre Blackwell (unmeasured).
_CAN_HAVE_WIDE_TILES = (9, 10)
WIDE_TILES_VARIABLE = "LIGER_CHUNKED_WIDE_TILES"


def wide_tiles_setting(text: str | None) -> tuple[int, ...]:
    """Return major compute capabilities for `project_exp`.

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

PTX = tl is not None and tl.constexpr(IS_NVIDIA and not INTERPRETED)

# Largest distance of maximum and centre: sums of squared exponentials fit in float32.
REACH = 30.0 if tl is None else tl.constexpr(30.0)


# Differ from batch to batch, or from chunk to chunk: Triton compiles one variant for all values.
UNSPECIALIZED = ("n_tokens",)


def jit(function: Callable[..., Any]) -> Any:
    if triton is None:
        return function
    names = inspect.signature(function).parameters
    return triton.jit(function, do_not_specialize=[name for name in UNSPECIALIZED if name in names])


def use_triton(x: Tensor) -> bool:
    """Whether `x` takes the Triton path."""
    if x.dtype == torch.float64:
        return False
    if triton is None:
        if runs_triton(x) and not torch.compiler.is_compiling():
            say_what_triton_lacks(x.device.type)
        return False
    return runs_triton(x) or (INTERPRETED and x.is_cpu)


@functools.cache  # warns once; errors are not kept
def say_what_triton_lacks(device_type: str) -> None:
    """Warn that PyTorch code runs on a GPU without Triton.

    Raises:
        RuntimeError: Triton is installed and broken, which nobody wants to find out by slow steps.
    """
    text = f"`import triton` fails with {TRITON_ERROR}"
    if TRITON_IS_BROKEN:
        raise RuntimeError(f"{text}. The kernels of liger_chunked need it on {device_type}: repair or uninstall it")
    try:
        wanted = [line.partition(";")[0].strip() for line in requires("torch") or () if "triton" in line]
    except PackageNotFoundError:
        wanted = []
    # A build of torch knows the name of its Triton, and the version.
    install = f"{wanted[0]}, which torch {torch.__version__} requires" if wanted else "the Triton of your torch"
    warnings.warn(
        f"liger_chunked runs PyTorch code on {device_type}, which is slower and takes more memory than its kernels, "
        f"because {text}. Install {install}",
        RuntimeWarning,
        stacklevel=3,
    )


def on_host(x: Tensor) -> bool:
    return x.device.type == "cpu"


def torch_on_host(x: Any) -> bool:
    """Whether the tensor is on a CPU and PyTorch code computes on it.

    False under Triton's interpreter, which runs the kernels on the CPU: tests take the paths of a GPU there.
    """
    return on_host(x) and not INTERPRETED


def wide_tiles(capability: tuple[int, int]) -> bool:
    return capability[0] in WIDE_TILES


@functools.cache
def has_wide_tiles(device: torch.device) -> bool:
    """Whether the fused epilogue runs on `device`. False for AMD and Intel: it needs NVIDIA's tensor descriptors."""
    if TensorDescriptor is None or INTERPRETED:
        return False
    found = capability(device)
    return found is not None and wide_tiles(found)


def operator(name: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register `liger_chunked::<name>` for torch.compile; `fake` returns outputs of the same shapes.

    The operator returns an empty tensor for None.
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
    """Return `x` (..., D), copied unless rows are contiguous, and their stride."""
    if x.is_contiguous():
        return x, x.shape[-1]
    if x.stride(-1) != 1:
        x = x.contiguous()
    rows = x.reshape(-1, x.shape[-1])
    return rows, rows.stride(0)


def matrix(x: Tensor) -> Tensor:
    return strided_rows(x)[0].view(-1, x.shape[-1])


def has_own_memory(x: Tensor) -> bool:
    reached = 0
    for stride, n in sorted(zip(x.stride(), x.shape, strict=True)):
        if n > 1:
            if stride <= reached:
                return False
            reached += (n - 1) * stride
    return True


def may_overwrite(x: Tensor) -> bool:
    # Compiled operators may not change inputs.
    return not torch.compiler.is_compiling() and has_own_memory(x)


def is_intermediate(x: Tensor) -> bool:
    """Whether a backward may overwrite `x`, unless the graph is retained."""
    return x.requires_grad and not x.is_leaf and x.is_contiguous() and not torch.compiler.is_compiling()


def contiguous_like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def checked_upstream(upstream: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """Return upstream gradients as plain tensors; an error names the kinds that kernels do not take."""
    if torch.compiler.is_compiling():
        return upstream
    if not all_plain(upstream):
        upstream = plain(("an upstream gradient",) * len(upstream), upstream)
    for g in upstream:
        if g is not None and is_batched(g):
            raise NotImplementedError(
                "fused kernels have no batched backward: call torch.autograd.grad without is_grads_batched, and "
                "torch.autograd.functional without vectorize"
            )
    return upstream


def first_derivative(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Make second derivatives raise, also by saved tensors, unlike torch's `once_differentiable`."""

    @functools.wraps(backward)
    def call(ctx: Any, *upstream: Tensor | None) -> Any:
        upstream = checked_upstream(upstream)
        if not torch.is_grad_enabled():
            return backward(ctx, *upstream)
        saved = ctx.saved_tensors
        with torch.no_grad():
            gradients = backward(_Unpacked(ctx, saved), *upstream)
        several = gradients if isinstance(gradients, tuple) else (gradients,)
        distinct = list({id(g): g for g in several if g is not None}.values())
        if not distinct:
            return gradients
        sources = [x for x in (*saved, *upstream) if x is not None and x.requires_grad]
        connected = _Once.apply(len(distinct), *(g.detach().requires_grad_() for g in distinct), *sources)
        by_id = dict(zip(map(id, distinct), connected, strict=True))
        result = tuple(None if g is None else by_id[id(g)] for g in several)
        return result if isinstance(gradients, tuple) else result[0]

    return call


def refuse_second_derivative(*_: Any) -> NoReturn:
    raise RuntimeError("second derivatives through fused losses and base kernels are not supported")


class _Unpacked:
    """A context with unpacked tensors, which checkpoints unpack only once."""

    def __init__(self, ctx: Any, saved_tensors: tuple[Tensor | None, ...]) -> None:
        vars(self).update(_ctx=ctx, saved_tensors=saved_tensors)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._ctx, name, value)


class _Once(torch.autograd.Function):
    """`apply(n, *gradients, *sources)` connects gradients to sources without a derivative."""

    @staticmethod
    def forward(ctx: Any, n: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(g.data for g in tensors[:n])  # unlike views, callers may change these

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        refuse_second_derivative()


def power_of_two(n: int) -> int:
    """Return the next power of two, faster than `triton.next_power_of_2`."""
    return 1 << (n - 1).bit_length()


def block_size(n: int, most: int) -> int:
    return most if n >= most else 1 << (n - 1).bit_length()


def row_blocks(x: Tensor) -> Iterator[slice]:
    rows = max(1, TORCH_BLOCK.get(x.device.type, TORCH_BLOCK_DEFAULT) // max(1, x.shape[1]))
    for start in range(0, x.shape[0], rows):
        yield slice(start, min(start + rows, x.shape[0]))


def grid_of_rows(n_rows: int, blocks: int) -> tuple[int, int, int]:
    """Return a grid, row by row: programs that run at once access nearby memory.

    This saves a sixth of the time of a kernel that reads and writes (docs/tuning.md, "Kernels over logits").
    """
    y = min(n_rows, _MOST_ROWS)
    return blocks, y, -(-n_rows // y)


@jit
def grid_row():
    """Return this program's row, maybe beyond the last."""
    return tl.program_id(1).to(tl.int64) + tl.program_id(2).to(tl.int64) * tl.num_programs(1)


@jit
def exp(x, PRECISE: tl.constexpr):
    """Return exp(x); PRECISE keeps the bits of large float32 arguments."""
    if PRECISE:
        # log 2 in two parts; n times the first is exact.
        x = tl.where(x < -120.0, -120.0, x)
        n = tl.floor(x * 1.4426950408889634 + 0.5)
        x = (x - n * 0.693359375) + n * 2.12194440e-4
        return tl.exp2(x * 1.4426950408889634) * tl.exp2(n)
    else:
        # tl.exp takes three more instructions.
        return tl.exp2(x * 1.4426950408889634)


@jit
def factor(x):
    """Prepare an operand of `tl.dot`: the interpreter cannot multiply bfloat16."""
    if PTX:
        return x
    else:
        return x.to(tl.float32)


@jit
def exp2(x):
    """Return exp2 in one instruction. `tl.exp2` branches in LLVM, so that large tiles compile slowly."""
    if PTX:
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    else:
        return tl.exp2(x)


@jit
def log2(x):
    """Return log2 in one instruction, with an error of 2**-22: absolute near 1, else relative."""
    if PTX:
        return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    else:
        return tl.log2(x)


@jit
def log(x):
    if PTX:
        return log2(x) * 0.6931471805599453
    else:
        return tl.log(x)


@jit
def reciprocal(x):
    """Return 1 / x, with a Newton step for an error of 2 ulp."""
    y = 1.0 / x
    return tl.fma(tl.fma(-x, y, 1.0), y, y)


@jit
def log1p(x):
    # Corrects the rounding of 1 + x.
    u = 1.0 + x
    return tl.where(u == 1.0, x, tl.log(u) * (x / tl.where(u == 1.0, 1.0, u - 1.0)))


@jit
def tanh(x):
    # 1 - 2/(1 + exp(2x)) would cancel near 0.
    s = x * x
    p = -0.0059058417
    p = p * s + 0.0208053611
    p = p * s - 0.0537866764
    p = p * s + 0.133319582
    p = p * s - 0.333332993
    size = tl.abs(x)
    large = 1.0 - 2.0 / (1.0 + exp(2.0 * size, False))
    return tl.where(size < 0.6, x + x * s * p, tl.where(x < 0, -large, large))
