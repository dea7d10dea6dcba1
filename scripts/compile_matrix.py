"""Compile every Triton kernel for GPUs that this machine need not have, and check what each architecture can hold.

    python scripts/compile_matrix.py                              every kernel and variant, seven targets
    python scripts/compile_matrix.py --quick --targets sm_80 gfx942       the largest variant of each kernel
    python scripts/compile_matrix.py --markdown                   a table of all kernels and GPUs
    python scripts/compile_matrix.py --json rows.json             every variant, with a hash of its code

The losses and base kernels run on meta tensors, at the shapes of `benchmarks/`. What they would launch is collected.
Triton then compiles it for each target, without a device: it needs ptxas for NVIDIA, which its wheel has, and LLVM for
AMD. A target takes the tuned constants and the paths of its architecture. Nothing runs: a kernel that compiles may be
wrong or slow there.

A variant fails if it does not compile, if a block needs more shared memory or registers than the architecture has, or
if registers spill without a reason in `ALLOWED_SPILLS`. The exit status is 1 if any variant fails.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import itertools
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # for liger_chunked and benchmarks

KIB = 1024


@dataclass(frozen=True)
class Target:
    """An architecture, and what a block of threads may use on it.

    Sources: NVIDIA's CUDA programming guide, technical specifications per compute capability; ROCm's documentation,
    GPU hardware specifications; LLVM's user guide for AMDGPU targets. libcu++'s `arch_traits.h` has NVIDIA's too.
    """

    name: str  # as `liger_chunked.device.architecture` names it
    gpu: str  # one that has it
    processors: int  # of that GPU: multiprocessors or compute units
    shared: int  # most bytes of shared memory (LDS) of a block
    threads: int = 32  # of a warp
    registers: int = 255  # most of a thread, 32 bits each

    @property
    def is_nvidia(self) -> bool:
        return self.name.startswith("sm_")

    @property
    def triton(self) -> tuple[str, int | str, int]:
        """Arguments of Triton's `GPUTarget`."""
        return ("cuda", int(self.name[3:]), self.threads) if self.is_nvidia else ("hip", self.name, self.threads)

    def most_registers(self, num_warps: int) -> int:
        """Return the most registers of a thread in a block of so many warps."""
        if self.is_nvidia:
            # A block's share of 64 Ki registers, which warps get in units of 8 per thread.
            return min(self.registers, (1 << 16) // (num_warps * self.threads) // 8 * 8)
        # 512 registers for the waves of a SIMD; a compute unit has four SIMDs.
        return self.registers // -(-num_warps // 4)


TARGETS = {
    target.name: target
    for target in (
        Target("sm_80", "A100", 108, 163 * KIB),
        Target("sm_89", "L40S", 142, 99 * KIB),
        Target("sm_90", "H200", 132, 227 * KIB),
        Target("sm_100", "B200", 148, 227 * KIB),
        Target("sm_120", "RTX 5090", 170, 99 * KIB),
        Target("gfx942", "MI300X", 304, 64 * KIB, threads=64, registers=512),
        Target("gfx950", "MI355X", 256, 160 * KIB, threads=64, registers=512),
    )
}

NVIDIA = tuple(name for name in TARGETS if name.startswith("sm_"))


@dataclass(frozen=True)
class Allowed:
    """Spills that are known: of a kernel, on targets, up to `most` registers, for a reason."""

    kernel: str
    targets: tuple[str, ...]
    most: int  # with some room, because compilers differ
    because: str


_LARGE_TILES = "measured with these spills on Hopper; smaller tiles were slower (docs/tuning.md, Fused epilogue)"
_FEW_WORDS = "ptxas uses 64 to 96 of 255 registers, and puts a word or two on the stack: no lack of registers"
ALLOWED_SPILLS = (
    Allowed("projection.project", ("sm_90",), 32, _LARGE_TILES),
    Allowed("projection.rescue", ("sm_90",), 32, _LARGE_TILES),
    Allowed("projection_grad.project_grad", ("sm_90",), 32, _LARGE_TILES),
    Allowed("logits_stats.logits_stats", NVIDIA, 6, _FEW_WORDS),
    Allowed("divergence_sums.sums", NVIDIA, 6, _FEW_WORDS),
    Allowed("divergence_sums.products", NVIDIA, 6, _FEW_WORDS),
    Allowed(
        "rms_norm.backward", NVIDIA, 16, "gated norms hold three tensors of 4096 elements in 4 warps, mostly float32"
    ),
)


def allowed_spills(kernel: str, target: str) -> int:
    return max((one.most for one in ALLOWED_SPILLS if one.kernel == kernel and target in one.targets), default=0)


@dataclass(frozen=True)
class Variant:
    """One compiled variant of a kernel. `spills` counts 32-bit registers of a thread."""

    kernel: str
    target: str
    task: str  # the first that launches it
    arguments: str
    num_warps: int
    shared: int = 0
    registers: int = 0
    spills: int = 0
    code: str = ""  # a hash of PTX or of AMD's assembly
    error: str = ""

    @property
    def problem(self) -> str:
        """Why this variant cannot run, or should not; empty if it fits."""
        target = TARGETS[self.target]
        if self.error:
            return self.error
        if self.shared > target.shared:
            return f"a block needs {self.shared} bytes of shared memory, and {self.target} has {target.shared}"
        if self.registers > (most := target.most_registers(self.num_warps)):
            return f"a thread needs {self.registers} registers, and {self.num_warps} warps leave it {most}"
        if self.spills > (allowed := allowed_spills(self.kernel, self.target)):
            return f"{self.spills} registers spill, and {allowed} may"
        return ""


# Tasks: what runs on meta tensors

Task = tuple[str, Callable[[], object]]


def tasks(target: Target) -> Iterator[Task]:
    """Yield what launches the kernels, at the shapes of `benchmarks/`: names, and functions of meta tensors."""
    yield from losses(target)
    yield from statistics(target)
    yield from kernels_alone()
    yield from split_vocabulary(target)
    yield from surveys()
    yield from kept_ids()
    yield from base_kernels()
    yield from experts()


def sizes(shapes: Iterable[str]) -> Iterator[tuple[str, list[int]]]:
    """Yield a benchmark's shapes, as text and as whole numbers."""
    for shape in shapes:
        yield shape, [int(part) for part in shape.split(":") if part.isdigit()]


def head_and_hidden(
    vocab_size: int, hidden_size: int, shape: tuple[int, ...], dtype: Any = None, bias: bool = False
) -> dict[str, Any]:
    """Return weight, input, target and maybe a bias on the meta device, in bfloat16 or `dtype`. Each is trainable."""
    import torch

    meta = partial(torch.empty, device="meta", dtype=dtype or torch.bfloat16, requires_grad=True)
    given = {
        "weight": meta(vocab_size, hidden_size),
        "input": meta(*shape, hidden_size),
        "target": torch.empty(shape, dtype=torch.int64, device="meta"),
    }
    return given | ({"bias": meta(vocab_size)} if bias else {})


def losses(target: Target) -> Iterator[Task]:
    import torch

    import liger_chunked as lc
    from benchmarks import cross_entropy, distillation, lora_head, policy, preference

    meta = partial(torch.empty, device="meta")
    half = partial(meta, dtype=torch.bfloat16)

    def step(loss: Any, v: int, h: int, shape: tuple[int, ...], /, *, lora_rank: int = 0, **more: Any) -> None:
        """Run forward and backward. `more` has options of the head and further arguments of the loss."""
        options = {name: more.pop(name) for name in ("dtype", "bias") if name in more}
        given = head_and_hidden(v, h, shape, **options)
        leaves = [x for x in given.values() if x.requires_grad]
        if lora_rank:
            base, up, down = given["weight"].detach(), meta(v, lora_rank), meta(lora_rank, h)
            leaves = [given["input"], up.requires_grad_(), down.requires_grad_()]
            given["weight"] = lc.AdaptedWeight(base, up, lambda x: x.float() @ down.t())
        value = loss(**given, **more)
        torch.autograd.grad((value[0] if isinstance(value, tuple) else value).sum(), leaves)

    plain = lc.LigerFusedLinearCrossEntropyLoss
    for shape, (n, h, v) in sizes(cross_entropy.SHAPES):
        yield f"cross entropy {shape}", partial(step, plain(), v, h, (n,))
        yield f"cross entropy {shape}, budget", partial(step, plain(logits_budget="256MiB"), v, h, (n,))
    _, (n, h, v) = next(sizes(cross_entropy.SHAPES))
    yield "cross entropy, bias and softcap", partial(step, plain(softcap=30.0), v, h, (n,), bias=True)
    smoothed = plain(label_smoothing=0.1, lse_square_scale=1e-4)
    yield "cross entropy, smoothing and z-loss", partial(step, smoothed, v, h, (n,))
    yield "cross entropy, float32 logits", partial(step, plain(logits_dtype=torch.float32), v, h, (n,))
    for dtype in (torch.float16, torch.float32):
        yield f"cross entropy, {dtype}", partial(step, plain(), v, h, (n,), dtype=dtype)
    for shape, (b, t, h, v, *_) in sizes(preference.SHAPES):
        reference = {"ref_weight": half(v, h), "ref_input": half(2 * b, t, h)}
        yield f"DPO {shape}", partial(step, lc.LigerFusedLinearDPOLoss(), v, h, (2 * b, t), **reference)
    for shape, (b, t, h, v) in sizes(policy.SHAPES):
        rollouts = {"advantages": meta(b), "old_logps": meta(b, t), "ref_logps": meta(b, t)}
        yield f"GRPO {shape}", partial(step, lc.LigerFusedLinearGRPOLoss(), v, h, (b, t), **rollouts)
    for shape, (n, h, teacher_h, v) in sizes(distillation.SHAPES):
        teacher = {"teacher_weight": half(v, teacher_h), "teacher_input": half(n, teacher_h)}
        for name in ("KLDiv", "JSD", "TVD", "CosineSimilarity"):
            loss = getattr(lc, f"LigerFusedLinear{name}Loss")(weight_hard_loss=0.5)
            yield f"{name} {shape}", partial(step, loss, v, h, (n,), **teacher)
        top_k = {"teacher_ids": meta(n, 128, dtype=torch.int64), "teacher_logps": meta(n, 128)}
        yield f"KLDiv of a top-k {shape}", partial(step, lc.LigerFusedLinearKLDivLoss(), v, h, (n,), **top_k)
    for shape, (b, t, h, v, rank) in sizes(lora_head.SHAPES):
        yield f"LoRA on the head {shape}", partial(step, plain(), v, h, (b * t,), lora_rank=rank)


def statistics(target: Target) -> Iterator[Task]:
    import torch

    from benchmarks.token_stats import SHAPES
    from liger_chunked import linear_token_stats

    is_hopper = target.name == "sm_90"

    def run(n: int, h: int, v: int, outputs: tuple[str, ...], differentiated: tuple[str, ...], **options: Any) -> None:
        given = head_and_hidden(v, h, (n,))
        stats = linear_token_stats(**given, **options, outputs=outputs, logits_budget="256MiB")
        sums = [getattr(stats, name).sum() for name in differentiated]
        if sums:
            sum(sums).backward()

    for shape, (n, h, v) in sizes(SHAPES):
        yield f"linear_token_stats {shape}", partial(run, n, h, v, ("logps",), ("logps",))
        both = ("logps", "entropy")
        yield f"linear_token_stats {shape}, entropies", partial(run, n, h, v, both, both)
        yield f"linear_token_stats {shape}, entropies as metrics", partial(run, n, h, v, both, ("logps",))
    every = ("logps", "lse", "entropy", "mean_logits")
    yield "linear_token_stats, all but argmax", partial(run, n, h, v, every, every)
    yield "linear_token_stats, argmax", partial(run, n, h, v, ("logps", "argmax"), ())
    if not is_hopper:
        return
    for shape, (n, h, v) in sizes(SHAPES):
        for dtype in (None, torch.float32):
            invariant = partial(run, softcap=30.0, deterministic="batch", logits_dtype=dtype)
            yield (
                f"linear_token_stats {shape}, softcap, independent of the batch, {dtype or 'rounded'} logits",
                partial(invariant, n, h, v, ("logps", "entropy"), ("logps",)),
            )


def kernels_alone() -> Iterator[Task]:
    import torch

    from benchmarks import kernels as benchmark
    from liger_chunked.types import Divergence

    benchmark.DEVICE = "meta"
    benchmark.DIVERGENCES["JSD, other beta"] = Divergence.jensen_shannon(0.1), 4
    for (n, v), dtype in itertools.product(
        ((8192, 151936), (8192, 128256)), (torch.bfloat16, torch.float16, torch.float32)
    ):
        for name, _, run in benchmark.kernels(n, v, dtype):
            yield f"{name} {n}:{v}, {dtype}", run


def split_vocabulary(target: Target) -> Iterator[Task]:
    """Yield the fused epilogue of a rank, which the other tasks do not reach: a group of ranks would be needed."""
    import torch

    from benchmarks.vocab_shard import RANKS, SHAPES
    from liger_chunked.kernels import (
        grad_from_exponentials_,
        merge_ranks,
        project_grad,
        project_sums,
        row_factors,
    )

    if target.name != "sm_90":
        return
    outputs = ("logps", "lse", "entropy", "mean_logits")

    def run(n: int, h: int, v: int, ranks: int) -> None:
        meta = partial(torch.empty, device="meta")
        columns = v // ranks
        x, w, out = (meta(*shape, dtype=torch.bfloat16) for shape in ((n, h), (columns, h), (n, columns)))
        target, weight_sum = meta(n, dtype=torch.int64), meta(h)
        sums = project_sums(x, w, target, weight_sum, out, 1.0, outputs, v)
        exponentials, stats = merge_ranks(sums.expand(ranks, -1, -1).contiguous(), n, 0, out, outputs)
        for names in (("logps", "lse", "mean_logits"), outputs):
            factors = row_factors(exponentials, stats.entropy, {name: meta(n) for name in names}, 1.0, v)
            if factors.slope is None:
                grad_from_exponentials_(out, target, factors, exponentials.values_scale)
            project_grad(x, w, target, factors, out, 1.0)

    for shape, (n, h, v) in sizes(SHAPES):
        for ranks in RANKS:
            yield f"a rank of {ranks}, {shape}", partial(run, n, h, v, ranks)


def kept_ids() -> Iterator[Task]:
    import torch

    from liger_chunked.kernels import SortedRows, add_rows_, kept, kept_tile
    from liger_chunked.kernels.logits_grad import LogitsCotangents
    from liger_chunked.types import LogitOptions

    meta = partial(torch.empty, device="meta")
    ids = partial(meta, dtype=torch.int64)

    def run(n: int, h: int, v: int, dtype: torch.dtype, options: LogitOptions, by_token: bool) -> None:
        m = 8 * n
        x, weight, bias = (meta(*shape, dtype=dtype) for shape in ((n, h), (v, h), (v,)))
        entries = kept.Entries(ids(m), ids(n + 1), ids(m), ids(n))
        temperature = meta(n) if by_token else None
        kept.kept_places(ids(m), ids(n + 1), ids(m), ids(n), -100, ids(3))
        z = kept.kept_logits(x, weight, bias, entries)
        stats = kept.kept_stats(z, entries, options, temperature)
        g = {name: meta(n) for name in ("logps", "lse", "entropy")}
        cotangents = LogitsCotangents(
            stats.max, stats.sum_exp, **g, entropy_value=stats.entropy, temperature=temperature
        )
        dz = kept.kept_logits_grad(z, entries, cotangents, options)
        kept.kept_input_grad(dz, weight, entries, meta(n, h, dtype=dtype))
        add_rows_(meta(v, h, dtype=dtype), x, SortedRows(ids(m), ids(m), dz))
        logits = meta(n, v, dtype=torch.float32)
        kept_tile.read_kept_(z, logits, entries, ids(n), 0)
        kept_tile.spread_kept_(logits.to(dtype), dz, entries, ids(n), 0)

    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for by_token in (False, True):
            yield f"kept ids, {dtype}", partial(run, 8192, 4096, 151936, dtype, LogitOptions(softcap=30.0), by_token)


def surveys() -> Iterator[Task]:
    import torch

    from liger_chunked.kernels import find_tokens, place_rows, survey, survey_top_k
    from liger_chunked.kernels.survey import _survey_kernel

    meta = partial(torch.empty, device="meta")

    def of_target(rows: int, columns: int) -> None:
        target = meta(rows, columns, dtype=torch.int64)
        surveyed = survey(target, -100)
        mask, summary, _ = surveyed
        places, _, token_at = find_tokens(target, surveyed, -100, rows * columns // 2)
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            place_rows(
                meta(rows * columns // 2, 4096, dtype=dtype), places, token_at, meta(rows * columns, 4096, dtype=dtype)
            )
        # `survey` launches it so on a GPU. A meta tensor stands for the host's pinned memory.
        _survey_kernel((rows, 1, 1), (target, mask, summary, summary), (columns, -100, 1024), num_warps=4)

    for shape in ((1, 8192), (8, 2048), (2, 16384)):
        yield f"survey of targets {shape}", partial(of_target, *shape)
    for k in (8, 128):
        ids, logps = meta(8192, k, dtype=torch.int64), meta(8192, k)
        yield f"survey of a top-{k}", partial(survey_top_k, logps, ids)


class OnMeta:
    """Stands for the benchmarks' table: runs the library's contender, forward and backward, and measures nothing."""

    def __init__(self) -> None:
        self.environment = {"copy_tb_per_s": 1.0}
        self.tasks: list[Task] = []

    def measure(self, task: str, *given: Any, **_: Any) -> None:
        _, _, builders, inputs, *_ = given

        def run() -> None:
            builders["liger_chunked"]()(*inputs).backward()

        self.tasks.append((task, run))


def base_kernels() -> Iterator[Task]:
    import torch

    from benchmarks import base_kernels as benchmark

    benchmark.DEVICE, benchmark.liger = "meta", None
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        table, benchmark.DTYPE = OnMeta(), dtype
        benchmark.layers(table, 1)
        if dtype != torch.float16:
            benchmark.variants(table, 1)
        for name, run in table.tasks:
            yield f"{name}, {dtype}", run


def experts() -> Iterator[Task]:
    """Yield the layers of `benchmarks/experts.py`, by their sizes."""
    import torch

    from liger_chunked.layers.experts import Routing, add_bias_, combine_rows, gather_tokens

    meta = partial(torch.empty, device="meta")

    def run(n_experts: int, top_k: int, hidden: int, inner: int, biased: bool, dtype: torch.dtype) -> None:
        n = 8192
        integers = partial(meta, dtype=torch.int64)
        routing = Routing(integers(n * top_k), integers(n, top_k), meta(n_experts, dtype=torch.int32))
        x = meta(n, hidden, dtype=torch.bfloat16, requires_grad=True)
        weight = meta(n, top_k, dtype=dtype, requires_grad=True)
        rows = gather_tokens(x, routing)
        for columns in (2 * inner, hidden):
            y = rows.new_empty(n * top_k, columns)
            if biased:
                bias = meta(n_experts, columns, dtype=torch.bfloat16, requires_grad=True)
                add_bias_(y, bias, routing).sum().backward()
        y = rows * 1.0
        combine_rows(y, weight, routing).sum().backward()

    for name, *layer in (
        ("Qwen3-30B-A3B", 128, 8, 2048, 768, False, torch.bfloat16),
        ("GPT-OSS-20B", 32, 4, 2880, 2880, True, torch.bfloat16),
        ("DeepSeek-V3", 32, 8, 7168, 2048, False, torch.float32),
    ):
        yield f"experts of {name}", partial(run, *layer)


# Launches that are collected instead

# A kernel, and its call without values: grid, dtypes, numbers, warps, stages, descriptors.
Launch = tuple[Any, tuple[Any, ...]]


@contextmanager
def collected_launches() -> Iterator[list[Launch]]:
    """Collect what the block would launch. Nothing runs: results are not set, and tensors may be on the meta device."""
    from liger_chunked.engine import checks
    from liger_chunked.kernels.launch import Kernel

    launches: list[Launch] = []

    def collect(
        kernel: Kernel, grid: Any, tensors: Any, numbers: Any, num_warps: int, num_stages: Any = None, blocks: Any = ()
    ) -> None:
        dtypes = tuple(None if x is None else x.dtype for x in tensors)
        launches.append((kernel, (grid, dtypes, numbers, num_warps, num_stages, blocks)))

    before = Kernel.__call__, checks.refuse_meta
    Kernel.__call__, checks.refuse_meta = collect, lambda *_: None  # type: ignore[method-assign]
    try:
        yield launches
    finally:
        Kernel.__call__, checks.refuse_meta = before  # type: ignore[method-assign]


def compile_launch(kernel: Any, call: tuple[Any, ...]) -> Any:
    """Return Triton's compiled variant of a collected launch on aligned tensors, for the active target."""
    grid, dtypes, numbers, num_warps, num_stages, descriptors = call
    arguments = kernel._in_order((*dtypes, *numbers, *descriptors))
    return kernel.kernel.warmup(*arguments, grid=grid, **kernel.options(num_warps, num_stages))


# A worker: one process for targets of one vendor


class OtherDriver:
    """Stands for Triton's driver of a GPU that is not here. Each target is a device, with caches of its own."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def select(self, target: Target) -> None:
        from triton.backends.compiler import GPUTarget

        if target.name not in self.names:
            self.names.append(target.name)
        self.device = self.names.index(target.name)
        self.target = GPUTarget(*target.triton)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 0


def pretend(is_nvidia: bool) -> OtherDriver:
    """Make torch and Triton in this process those of a vendor, before the package is imported."""
    import torch
    from triton.runtime import driver

    torch.version.cuda, torch.version.hip = ("13.0", None) if is_nvidia else (None, "7.0")
    other = OtherDriver()
    driver.set_active(other)
    return other


def collect(target: Target, quick: bool) -> list[tuple[str, Any, tuple[Any, ...]]]:
    """Return the launches of all tasks on a target: task, kernel and call; with `quick`, the largest of each kernel."""
    import torch

    from liger_chunked.kernels import backend
    from liger_chunked.kernels.tuning import TUNING, table_of

    TUNING[torch.device("meta")] = table_of(target.name)
    backend.runs_triton = lambda x: True
    folders = ("liger_chunked.kernels", "liger_chunked.layers")
    for name, module in [*sys.modules.items()]:
        if name.startswith("liger_chunked.") and "has_wide_tiles" in vars(module):
            module.has_wide_tiles = lambda device: target.name == "sm_90"
        if not name.startswith(folders):
            continue
        if hasattr(module, "processors"):
            module.processors = lambda device: target.processors
        for function in vars(module).values():
            if hasattr(function, "cache_clear"):  # sizes of the target before
                function.cache_clear()
    found: dict[Any, tuple[str, Any, tuple[Any, ...]]] = {}
    with collected_launches():  # tasks that prepare their tensors by kernels run none either
        for name, run in tasks(target):
            with collected_launches() as launches:
                run()
            for kernel, call in launches:
                found.setdefault((name_of(kernel), repr(call[1:])), (name, kernel, call))
    launches = list(found.values())
    if not quick:
        return launches
    launches.sort(key=lambda launch: held(*launch[1:]))
    return list({name_of(kernel): (name, kernel, call) for name, kernel, call in launches}.values())


def held(kernel: Any, call: tuple[Any, ...]) -> int:
    """Return about how much a warp holds at once: elements of a tile by bytes of all tensors, to compare launches."""
    _, dtypes, numbers, num_warps, num_stages, descriptors = call
    constants = {parameter.name for parameter in kernel.kernel.params if parameter.is_constexpr}
    names = [name for name in kernel.kernel.arg_names if not name.endswith(("_ptr", "_desc"))]
    sizes = [n for name, n in zip(names, numbers, strict=True) if name in constants and type(n) is int and n > 1]
    of_tensors = [dtype for dtype in dtypes if dtype is not None] + [x.base.dtype for x in descriptors if x is not None]
    return math.prod(sizes) * sum(dtype.itemsize for dtype in of_tensors) * (num_stages or 1) // num_warps


def name_of(kernel: Any) -> str:
    function = kernel.kernel.fn
    return f"{function.__module__.rpartition('.')[2]}.{function.__name__.strip('_').removesuffix('_kernel')}"


def compile_for(target: Target, driver: OtherDriver, quick: bool, only: Collection[str] = ()) -> list[Variant]:
    """Compile the launches of a target; launches that share a variant are compiled once. `only` names kernels."""
    driver.select(target)
    variants, seen = [], set()
    for task, kernel, call in collect(target, quick):
        if only and name_of(kernel) not in only:
            continue
        _, dtypes, numbers, num_warps, num_stages, descriptors = call
        types = ["-" if d is None else str(d).removeprefix("torch.") for d in dtypes]
        types += ["-" if d is None else f"{d.base.dtype}{d.block_shape}".removeprefix("torch.") for d in descriptors]
        arguments = f"{' '.join(types)}; {numbers}; {num_stages} stages"
        common = name_of(kernel), target.name, task, arguments, num_warps
        try:
            compiled = compile_launch(kernel, call)
        except Exception as error:
            lines = str(error).strip().splitlines()
            variants.append(Variant(*common, error=f"does not compile: {type(error).__name__}: {lines[-1:]}"))
            continue
        if id(compiled) not in seen:
            seen.add(id(compiled))
            variants.append(Variant(*common, **measured(compiled, target)))
    return variants


def measured(compiled: Any, target: Target) -> dict[str, Any]:
    """Return what a compiled kernel uses."""
    text = compiled.asm["ptx" if target.is_nvidia else "amdgcn"]
    usage = nvidia_usage(compiled.asm["cubin"]) if target.is_nvidia else amd_usage(text)
    return {"shared": compiled.metadata.shared, "code": hashlib.sha256(text.encode()).hexdigest()[:16], **usage}


def nvidia_usage(cubin: bytes) -> dict[str, int]:
    """Return registers and spills of a cubin, whose stack has nothing but spills: kernels have no arrays or calls."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    used = {name: int(n) for name, n in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}
    return {"registers": used["REG"], "spills": max(used["STACK"], used["LOCAL"]) // 4}


def amd_usage(assembly: str) -> dict[str, int]:
    """Return registers and spills from the metadata of AMD's assembly.

    Scalar registers that spill are no spills here: they move to lanes of vector registers, not to memory.
    """

    def field(name: str) -> int:
        match = re.search(rf"\.{name}:\s+(\d+)", assembly)
        assert match is not None, name
        return int(match[1])

    # `vgpr_count` includes accumulators, which are registers of the same file.
    spills = max(field("vgpr_spill_count"), field("private_segment_fixed_size") // 4)
    return {"registers": field("vgpr_count"), "spills": spills}


def work(names: list[str], quick: bool, only: Collection[str] = ()) -> None:
    """Compile for targets of one vendor, and print the variants as JSON."""
    targets = [TARGETS[name] for name in names]
    driver = pretend(targets[0].is_nvidia)
    for target in targets:
        for variant in compile_for(target, driver, quick, only):
            print(json.dumps(asdict(variant)), flush=True)


# The command


def compile_matrix(
    names: Iterable[str], quick: bool = False, processes: int = 1, only: Collection[str] = ()
) -> list[Variant]:
    """Compile all kernels, or `only` these, for targets in processes of one vendor each.

    Line numbers are left out: they change with comments.
    """
    unset = ("TRITON_INTERPRET", "LIGER_CHUNKED_WIDE_TILES")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    environment["TRITON_DISABLE_LINE_INFO"] = "1"
    by_vendor = [[name for name in names if TARGETS[name].is_nvidia is nvidia] for nvidia in (True, False)]
    groups = [group for group in by_vendor if group] if processes == 1 else [[name] for name in names]

    def run(group: list[str]) -> list[Variant]:
        command = [sys.executable, __file__, "--worker", "--targets", *group, *(["--quick"] if quick else [])]
        command += ["--only", *sorted(only)] if only else []
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"compiling for {', '.join(group)} failed:\n{done.stderr[-4000:]}")
        return [Variant(**json.loads(line)) for line in done.stdout.splitlines() if line.startswith("{")]

    with ThreadPoolExecutor(processes) as threads:
        return [variant for variants in threads.map(run, groups) for variant in variants]


def markdown(variants: list[Variant]) -> str:
    """Return a table of kernels and targets. A cell has the most of any variant: KiB of shared memory · registers."""
    names = list(dict.fromkeys(variant.target for variant in variants))
    cells: dict[str, dict[str, list[Variant]]] = defaultdict(lambda: defaultdict(list))
    for variant in variants:
        cells[variant.kernel][variant.target].append(variant)

    def cell(found: list[Variant]) -> str:
        if not found:
            return "–"
        most = [max(getattr(variant, name) for variant in found) for name in ("shared", "registers", "spills")]
        text = f"{most[0] / KIB:.0f} · {most[1]}" + (f" · {most[2]} spilled" if most[2] else "")
        return f"**{text}**" if any(variant.problem for variant in found) else text

    lines = [f"| kernel | {' | '.join(names)} |", "|---|" + "---|" * len(names)]
    for kernel in sorted(cells):
        lines.append(f"| `{kernel}` | {' | '.join(cell(cells[kernel][name]) for name in names)} |")
    counts = [sum(variant.target == name for variant in variants) for name in names]
    lines.append(f"| variants | {' | '.join(map(str, counts))} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS), metavar="NAME")
    parser.add_argument("--quick", action="store_true", help="the largest variant of each kernel")
    parser.add_argument("--only", nargs="+", default=(), metavar="KERNEL", help="names as in the table")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write all variants")
    parser.add_argument("--markdown", action="store_true", help="print the table of the docs alone")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args.targets, args.quick, args.only)
        return 0
    variants = compile_matrix(args.targets, args.quick, args.processes, args.only)
    if args.json:
        args.json.write_text("\n".join(json.dumps(asdict(variant)) for variant in variants) + "\n")
    if args.markdown:
        import torch
        import triton

        print(f"torch {torch.__version__}, triton {triton.__version__}, {datetime.date.today()}:\n")
    print(markdown(variants))
    failed = [variant for variant in variants if variant.problem]
    for variant in failed:
        print(f"\n{variant.kernel} for {variant.target}: {variant.problem}\n  {variant.task}: {variant.arguments}")
    print(f"\n{len(variants)} variants compiled, {len(failed)} fail")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
