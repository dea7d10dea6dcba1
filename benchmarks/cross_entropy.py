"""Benchmark SFT cross entropy on an `lm_head`, forward and backward, against eager torch and the installed peers.

python -m benchmarks.cross_entropy 8192:4096:128256 8192:1536:151936        tokens:hidden:vocabulary
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness import (
    DEVICE,
    Contenders,
    Loss,
    Skipped,
    Table,
    benchmark,
    compiled,
    gemm_floor,
    head_weight,
    hidden_states,
)
from benchmarks.oracle import token_gradients
from benchmarks.peers import trl_token_stats
from liger_chunked import LigerFusedLinearCrossEntropyLoss, linear_token_stats

SHAPES = ["8192:4096:128256", "8192:1536:151936", "32768:896:151936", "65536:2048:151936", "4096:1024:32000"]
SMALL = ["128:32:1024"]


def eager(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy((x @ w.t()).float(), t)


def eager_if_it_fits(n: int, v: int) -> Loss:
    needs = 12 * n * v  # logits and their gradient in bfloat16 and in float32
    if DEVICE == "cuda" and needs > 0.75 * torch.cuda.get_device_properties(0).total_memory:
        raise Skipped(f"needs {needs / 1e9:.0f} GB")
    return eager


def ours(logits_budget: int | None = None) -> Loss:
    loss = LigerFusedLinearCrossEntropyLoss(logits_budget=logits_budget)
    return lambda x, w, t: loss(w, x, t)


def ours_by_token_stats() -> Loss:
    return lambda x, w, t: -linear_token_stats(w, x, t, logits_budget=256 << 20).logps.mean()


def torch_fused() -> Loss:
    if not hasattr(F, "linear_cross_entropy"):
        raise Skipped("torch has it from 2.12 on")
    options = torch.nn.LinearCrossEntropyOptions()
    return lambda x, w, t: F.linear_cross_entropy(x, w, t, options=options)


def liger() -> Loss:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss as Liger

    loss = Liger()
    return lambda x, w, t: loss(w, x, t)


def liger_in_16_chunks() -> Loss:
    """Use large chunks and a float32 accumulator, which Liger-Kernel's module does not offer."""
    from liger_kernel.ops import LigerFusedLinearCrossEntropyFunction as Function

    parameters = inspect.signature(Function.forward).parameters
    defaults = {name: None if p.default is p.empty else p.default for name, p in parameters.items()}
    settings = {"chunk_mem_const": 16, "accum_dtype": torch.float32}
    if not settings.keys() <= defaults.keys():
        raise Skipped("this liger-kernel has a fixed number of chunks")
    # An autograd.Function takes positional arguments; skip (ctx, _input, weight, target).
    rest = list({**defaults, **settings}.values())[4:]
    return lambda x, w, t: Function.apply(x, w, t, *rest)[0]


def liger_cute() -> Loss:
    """Return Liger-Kernel's kernels in NVIDIA's CuTe DSL, which are for Hopper; a V that 256 does not divide fails."""
    from liger_kernel.ops.cutedsl.ops import fused_linear_cross_entropy_sm90 as cute

    def loss(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
        found = cute.LigerFusedLinearCrossEntropySM90Function.apply(x, w, t)
        return found[0] if isinstance(found, tuple) else found

    return loss


def trl() -> Loss:
    token_stats = trl_token_stats("log_probs")
    return lambda x, w, t: -token_stats(x, w, t)[0].mean()


def cut_cross_entropy() -> Loss:
    from cut_cross_entropy import linear_cross_entropy

    return lambda x, w, t: linear_cross_entropy(x, w, t, filter_eps=None)


def quack() -> Loss:
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    def loss(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
        # CCE tells rows from columns by their number.
        chunk = 2048 if x.shape[1] == 4096 else 4096
        return chunked_linear_cross_entropy(x, w, t, chunk_size=chunk, tuned=False)

    return loss


def contenders(n: int, v: int) -> Contenders:
    return {
        "eager": lambda: eager_if_it_fits(n, v),
        "liger_chunked": ours,
        "liger_chunked, 1792-token chunks": lambda: ours(logits_budget=1792 * v * torch.bfloat16.itemsize),
        "liger_chunked.linear_token_stats, 256 MiB": ours_by_token_stats,
        "torch.compile": compiled(eager),
        "torch F.linear_cross_entropy": torch_fused,
        "liger-kernel": liger,
        "liger-kernel, C=16, fp32 accumulation": liger_in_16_chunks,
        "liger-kernel, CuTe": liger_cute,
        "trl": trl,
        "cut-cross-entropy, exact": cut_cross_entropy,
        "quack": quack,
    }


def measure(table: Table, n: int, h: int, v: int) -> None:
    x, w = hidden_states(n, h).requires_grad_(), head_weight(v, h).requires_grad_()
    t = torch.randint(v, (n,), device=DEVICE)
    table.measure(
        f"cross entropy {n}x{h}x{v}",
        gemm_floor(n, h, v).all,
        {"tokens": n, "hidden": h, "vocabulary": v},
        contenders(n, v),
        (x, w, t),
        {"input": x, "weight": w},
        lambda: token_gradients(x, w, t, lambda logps, entropy: -logps.mean()),
    )


def main(arguments: Sequence[str] | None = None) -> Path:
    return benchmark("cross_entropy", __doc__, "tokens:hidden:vocabulary", SHAPES, SMALL, measure, 100, arguments)


if __name__ == "__main__":
    main()
