"""DPO on an `lm_head`, forward and backward with a reference, beside eager torch and the installed peers.

python -m benchmarks.preference 4:2048:4096:128256:0.5        pairs:length:hidden:vocabulary:share of prompt
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness import DEVICE, Table, gemm_floor, parser
from liger_chunked import (
    LigerFusedLinearCPOLoss,
    LigerFusedLinearDPOLoss,
    LigerFusedLinearKTOLoss,
    LigerFusedLinearORPOLoss,
    LigerFusedLinearSimPOLoss,
)

BETA = 0.1
# (input, weight, target, reference's input, reference's weight) -> loss
Loss = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def dpo(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """DPO on one log-probability a sequence, chosen then rejected."""
    chosen, rejected = (logps - ref_logps).chunk(2)
    return -F.logsigmoid(BETA * (chosen - rejected)).mean()


def eager(x: Tensor, w: Tensor, t: Tensor, ref_x: Tensor, ref_w: Tensor) -> Tensor:
    def logps(x: Tensor, w: Tensor) -> Tensor:
        tokens = (x @ w.t()).float().log_softmax(-1).gather(2, t.clamp(min=0)[..., None])[..., 0]
        return (tokens * (t != -100)).sum(-1)

    with torch.no_grad():
        reference = logps(ref_x, ref_w)
    return dpo(logps(x, w), reference)


def contenders() -> Iterator[tuple[str, Loss]]:
    yield (
        "liger_chunked",
        lambda x, w, t, ref_x, ref_w: LigerFusedLinearDPOLoss(beta=BETA)(w, x, t, None, ref_x, ref_w)[0],
    )
    small = LigerFusedLinearDPOLoss(beta=BETA, logits_budget=256 << 20)
    yield "liger_chunked, 256 MiB", lambda x, w, t, ref_x, ref_w: small(w, x, t, None, ref_x, ref_w)[0]
    yield "eager", eager
    try:
        from liger_kernel.chunked_loss import LigerFusedLinearDPOLoss as Liger

        yield "liger-kernel", lambda x, w, t, ref_x, ref_w: Liger(beta=BETA)(w, x, t, None, ref_x, ref_w)[0]
    except ImportError:
        pass
    try:
        from trl.kernels.chunked_logprob import ChunkedLogProbFunction as Chunked
    except ImportError:
        return

    def trl(x: Tensor, w: Tensor, t: Tensor, ref_x: Tensor, ref_w: Tensor) -> Tensor:
        mask = t != -100

        def logps(x: Tensor, w: Tensor) -> Tensor:
            values = Chunked.apply(x[mask], w, None, t[mask], 1.0, 32768, None, 1.0, ("log_probs",))[0]
            return values.new_zeros(mask.shape).masked_scatter(mask, values).sum(-1)

        with torch.no_grad():
            reference = logps(ref_x, ref_w)
        return dpo(logps(x, w), reference)

    yield "trl", trl


def reference_free() -> Iterator[tuple[str, Callable[[Tensor, Tensor, Tensor], Tensor]]]:
    """Of (input, weight, target)."""
    yield "liger_chunked ORPO", lambda x, w, t: LigerFusedLinearORPOLoss()(w, x, t)[0]
    yield "liger_chunked CPO", lambda x, w, t: LigerFusedLinearCPOLoss()(w, x, t)[0]
    yield "liger_chunked SimPO", lambda x, w, t: LigerFusedLinearSimPOLoss()(w, x, t)[0]

    def desirable(x: Tensor) -> Tensor:
        return torch.arange(x.shape[0], device=x.device) < x.shape[0] // 2

    # Without a reference, sums over tokens saturate the sigmoid, and products of zeros are cheaper than products.
    kto = LigerFusedLinearKTOLoss(average_log_prob=True)
    yield "liger_chunked KTO", lambda x, w, t: kto(w, x, t, desirable(x), kl=0.0)[0]
    try:
        from liger_kernel import chunked_loss as liger
    except ImportError:
        return
    for name in ("ORPO", "CPO", "SimPO"):
        loss = getattr(liger, f"LigerFusedLinear{name}Loss")()
        yield f"liger-kernel {name}", lambda x, w, t, loss=loss: loss(w, x, t)[0]
    liger_kto = liger.LigerFusedLinearKTOLoss(average_log_prob=True)
    yield (
        "liger-kernel KTO",
        lambda x, w, t: liger_kto(x, w, t, preference_labels=desirable(x), kl=torch.zeros(1, device=x.device))[0],
    )


def float64_gradients(x: Tensor, w: Tensor, t: Tensor, ref_x: Tensor, ref_w: Tensor) -> dict[str, Tensor]:
    """The gradients of `eager` in float64, one sequence of logits at a time."""
    n = x.shape[0] // 2
    x64, w64 = x.detach().double(), w.detach().double()

    def log_softmax(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w.t()).log_softmax(-1)

    def logps(x: Tensor, w: Tensor) -> Tensor:
        values = []
        for sequence, y in zip(x, t, strict=True):
            mask = y != -100
            values.append(log_softmax(sequence[mask].double(), w).gather(1, y[mask, None]).sum())
        return torch.stack(values)

    margin = (logps(x64, w64) - logps(ref_x, ref_w.double())).view(2, n)
    upstream = -BETA * torch.sigmoid(-BETA * (margin[0] - margin[1])) / n
    dx, dw = torch.zeros_like(x64), torch.zeros_like(w64)
    for i, g in enumerate(torch.cat([upstream, -upstream])):
        mask = t[i] != -100
        dz = -log_softmax(x64[i, mask], w64).exp()
        dz[torch.arange(len(dz)), t[i, mask]] += 1
        dz *= g
        dx[i, mask] = dz @ w64
        dw.addmm_(dz.t(), x64[i, mask])
    return {"input": dx, "weight": dw}


def measure(table: Table, pairs: int, length: int, h: int, v: int, prompt: float) -> None:
    """Every contender at one shape."""
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    n_prompt = int(length * prompt)
    floor = gemm_floor(2 * pairs * length, h, v, dtype)
    share = 1 - n_prompt / length
    table.task(f"DPO with reference {pairs}x{length}x{h}x{v}, prompt {prompt}", (floor.all + floor.logits) * share)
    torch.manual_seed(0)
    x = torch.randn(2 * pairs, length, h, device=DEVICE, dtype=dtype, requires_grad=True)
    ref_x = torch.randn(2 * pairs, length, h, device=DEVICE, dtype=dtype)
    w = (torch.randn(v, h, device=DEVICE) / h**0.5).to(dtype).requires_grad_()
    ref_w = w.detach().clone()
    t = torch.randint(v, (2 * pairs, length), device=DEVICE)
    t[:, :n_prompt] = -100
    inputs = (x, w, t, ref_x, ref_w)
    expected = float64_gradients(*inputs) if table.with_errors else None
    for name, loss in contenders():
        table.measure(name, partial(loss, *inputs), {"input": x, "weight": w}, expected)
    del expected, ref_x, ref_w, inputs
    table.task(f"no reference {pairs}x{length}x{h}x{v}, prompt {prompt}", floor.all * share)
    for name, loss in reference_free():
        table.measure(name, partial(loss, x, w, t), {"input": x, "weight": w})


def main() -> None:
    parse = parser(__doc__)
    default = ["4:2048:4096:128256:0.5"]
    parse.add_argument("shapes", nargs="*", default=default, help="pairs:length:hidden:vocabulary:share of prompt")
    args = parse.parse_args()
    table = Table("preference", args)
    if DEVICE == "cpu":
        print("no GPU: a small shape in float32, which says nothing about a GPU")
        args.shapes = ["2:128:128:8192:0.5"]
    for shape in args.shapes:
        *sizes, prompt = shape.split(":")
        measure(table, *map(int, sizes), prompt=float(prompt))
    table.save()


if __name__ == "__main__":
    main()
