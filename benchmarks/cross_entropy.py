"""SFT cross entropy on an `lm_head`, forward and backward, beside eager torch and the installed peers.

python -m benchmarks.cross_entropy 8192:4096:128256 8192:1536:151936        tokens:hidden:vocabulary
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness import DEVICE, Table, gemm_floor, parser
from liger_chunked import LigerFusedLinearCrossEntropyLoss, linear_token_stats

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def eager(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy((x @ w.t()).float(), t)


def ours() -> Iterator[tuple[str, Loss]]:
    yield "liger_chunked", lambda x, w, t: LigerFusedLinearCrossEntropyLoss()(w, x, t)
    for mib in (1024, 512, 256):
        loss = LigerFusedLinearCrossEntropyLoss(logits_budget=mib << 20)
        yield f"liger_chunked, {mib} MiB", lambda x, w, t, loss=loss: loss(w, x, t)
    yield (
        "liger_chunked.linear_token_stats, 256 MiB",
        lambda x, w, t: -linear_token_stats(w, x, t, logits_budget=256 << 20).logps.mean(),
    )


def peers() -> Iterator[tuple[str, Loss]]:
    yield "eager", eager
    yield "torch.compile(eager)", torch.compile(eager)
    if hasattr(F, "linear_cross_entropy"):
        options = torch.nn.LinearCrossEntropyOptions()
        yield "torch F.linear_cross_entropy", lambda x, w, t: F.linear_cross_entropy(x, w, t, options=options)
    yield from liger_kernel()
    try:
        from trl.kernels.chunked_logprob import ChunkedLogProbFunction as Chunked

        outputs = ("log_probs",)
        yield "trl", lambda x, w, t: -Chunked.apply(x, w, None, t, 1.0, 32768, None, 1.0, outputs)[0].mean()
    except ImportError:
        pass
    try:
        from cut_cross_entropy import linear_cross_entropy as cce

        yield "cut-cross-entropy, filtered", cce
        yield "cut-cross-entropy, exact", lambda x, w, t: cce(x, w, t, filter_eps=None)
    except ImportError:
        pass
    try:
        from quack.linear_cross_entropy import chunked_linear_cross_entropy as quack

        yield "quack", lambda x, w, t: quack(x, w, t, chunk_size=4096, tuned=False)
    except ImportError:
        pass


def liger_kernel() -> Iterator[tuple[str, Loss]]:
    try:
        from liger_kernel.ops import LigerFusedLinearCrossEntropyFunction as Function
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss as Liger
    except ImportError:
        return
    yield "liger-kernel", lambda x, w, t: Liger()(w, x, t)
    parameters = list(inspect.signature(Function.forward).parameters.values())[1:]
    defaults = [None if p.default is inspect.Parameter.empty else p.default for p in parameters]
    names = [p.name for p in parameters]
    if "chunk_mem_const" not in names:
        return
    for accumulator in (None, torch.float32):
        arguments = list(defaults)
        arguments[names.index("chunk_mem_const")] = 16
        arguments[names.index("accum_dtype")] = accumulator

        def loss(x: Tensor, w: Tensor, t: Tensor, arguments: list = arguments) -> Tensor:
            return Function.apply(x, w, t, *arguments[3:])[0]

        yield f"liger-kernel, C=16, {'bf16' if accumulator is None else 'fp32'} accumulation", loss


def float64_gradients(x: Tensor, w: Tensor, t: Tensor) -> dict[str, Tensor]:
    """The gradients in float64, in chunks of tokens so that they fit beside everything else."""
    x64, w64 = x.detach().double(), w.detach().double()
    dx, dw = torch.empty_like(x64), torch.zeros_like(w64)
    for rows in torch.arange(x.shape[0], device=x.device).split(2048):
        p = (x64[rows] @ w64.t()).softmax(-1)
        p[torch.arange(len(rows), device=x.device), t[rows]] -= 1
        p /= x.shape[0]
        dx[rows] = p @ w64
        dw.addmm_(p.t(), x64[rows])
    return {"input": dx, "weight": dw}


def measure(table: Table, n: int, h: int, v: int) -> None:
    """Every contender at one shape."""
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    floor = gemm_floor(n, h, v, dtype)
    table.task(f"cross entropy {n}x{h}x{v}", floor.all, logits=floor.logits, dx=floor.dx, dw=floor.dw)
    torch.manual_seed(0)
    x = torch.randn(n, h, device=DEVICE, dtype=dtype, requires_grad=True)
    w = (torch.randn(v, h, device=DEVICE) / h**0.5).to(dtype).requires_grad_()
    t = torch.randint(v, (n,), device=DEVICE)
    expected = float64_gradients(x, w, t) if table.with_errors else None
    for name, loss in (*ours(), *peers()):
        table.measure(name, partial(loss, x, w, t), {"input": x, "weight": w}, expected)


def main() -> None:
    parse = parser(__doc__)
    parse.add_argument("shapes", nargs="*", default=["8192:4096:128256"], help="tokens:hidden:vocabulary")
    args = parse.parse_args()
    table = Table("cross_entropy", args)
    if DEVICE == "cpu":
        print("no GPU: a small shape in float32, which says nothing about a GPU")
        args.shapes = ["512:128:8192"]
    for shape in args.shapes:
        measure(table, *map(int, shape.split(":")))
    table.save()


if __name__ == "__main__":
    main()
