"""Distillation on two heads, forward and backward, beside eager torch and the installed peers.

    python -m benchmarks.distillation 8192:1536:4096:151936        tokens:hidden:hidden of the teacher:vocabulary

The floor is three products of the student and one of the teacher.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness import DEVICE, Table, gemm_floor, parser
from liger_chunked import LigerFusedLinearJSDLoss, LigerFusedLinearKLDivLoss, LigerFusedLinearTVDLoss

# (input, weight, teacher's input, teacher's weight) -> loss
Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
SOFT = {"weight_hard_loss": 0.0, "weight_soft_loss": 1.0}


def eager(x: Tensor, w: Tensor, teacher_x: Tensor, teacher_w: Tensor) -> Tensor:
    """JSD(0.5)."""
    log_p = (x @ w.t()).float().log_softmax(-1)
    log_q = (teacher_x @ teacher_w.t()).float().log_softmax(-1)
    log_m = torch.logsumexp(torch.stack([log_p, log_q]), 0) - math.log(2)
    halves = (F.kl_div(log_m, log_r, log_target=True, reduction="sum") for log_r in (log_p, log_q))
    return 0.5 * sum(halves) / x.shape[0]


def contenders() -> Iterator[tuple[str, Loss]]:
    for name, ours in (
        ("JSD(0.5)", LigerFusedLinearJSDLoss(beta=0.5, **SOFT)),
        ("KL", LigerFusedLinearKLDivLoss(**SOFT)),
        ("TVD", LigerFusedLinearTVDLoss(**SOFT)),
    ):
        yield f"liger_chunked {name}", lambda x, w, tx, tw, ours=ours: ours(w, x, tw, tx)[0]
    yield "eager JSD(0.5)", eager
    try:
        from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss as Chunked
        from liger_kernel.transformers import LigerFusedLinearJSD as Triton

        def chunked(x: Tensor, w: Tensor, tx: Tensor, tw: Tensor) -> Tensor:
            return Chunked(**SOFT)(x, w, tx, tw, torch.zeros(x.shape[0], dtype=torch.int64, device=x.device))

        yield "liger-kernel chunked JSD(0.5)", chunked
        yield "liger-kernel Triton JSD(0.5)", lambda x, w, tx, tw: Triton()(x, w, tx, tw, None)
    except ImportError:
        pass
    try:
        from trl.kernels.chunked_divergence import ChunkedDivergenceFunction as Divergence

        yield "trl JSD(0.5)", lambda x, w, tx, tw: Divergence.apply(x, w, None, tx, tw, None, 0.5)[0].mean()
    except ImportError:
        pass


def measure(table: Table, n: int, h: int, teacher_h: int, v: int) -> None:
    """Every contender at one shape."""
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    floor = gemm_floor(n, h, v, dtype).all + gemm_floor(n, teacher_h, v, dtype).logits
    table.task(f"distillation {n}x({h}, {teacher_h})x{v}", floor)
    torch.manual_seed(0)
    x = torch.randn(n, h, device=DEVICE, dtype=dtype, requires_grad=True)
    w = (torch.randn(v, h, device=DEVICE) / h**0.5).to(dtype).requires_grad_()
    teacher_x = torch.randn(n, teacher_h, device=DEVICE, dtype=dtype)
    teacher_w = (torch.randn(v, teacher_h, device=DEVICE) / teacher_h**0.5).to(dtype)
    for name, loss in contenders():
        table.measure(name, partial(loss, x, w, teacher_x, teacher_w), {"input": x, "weight": w})


def main() -> None:
    parse = parser(__doc__)
    parse.add_argument(
        "shapes", nargs="*", default=["8192:1536:4096:151936"], help="tokens:hidden:teacher's:vocabulary"
    )
    args = parse.parse_args()
    table = Table("distillation", args)
    if DEVICE == "cpu":
        print("no GPU: a small shape in float32, which says nothing about a GPU")
        args.shapes = ["256:64:128:4096"]
    for shape in args.shapes:
        measure(table, *map(int, shape.split(":")))
    table.save()


if __name__ == "__main__":
    main()
