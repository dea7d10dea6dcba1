"""GRPO on an `lm_head`, forward and backward, beside the installed peers.

python -m benchmarks.policy 8:2048:2048:151936        sequences:length:hidden:vocabulary
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.harness import DEVICE, Table, gemm_floor, parser
from liger_chunked import LigerFusedLinearGRPOLoss

# (input, weight, target, advantages, log-probabilities of the sampling policy) -> loss
Loss = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def contenders() -> Iterator[tuple[str, Loss]]:
    grpo = LigerFusedLinearGRPOLoss()
    yield "liger_chunked", lambda x, w, t, advantages, old: grpo(w, x, t, advantages, old_logps=old)[0]
    try:
        from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss as Liger

        liger = Liger(beta=0.0, use_ref_model=False)

        def loss(x: Tensor, w: Tensor, t: Tensor, advantages: Tensor, old: Tensor) -> Tensor:
            return liger(x, w, t, torch.ones_like(old), advantages, old_per_token_logps=old)[0]

        yield "liger-kernel", loss
    except ImportError:
        pass
    try:
        from trl.kernels.chunked_logprob import ChunkedLogProbFunction as Chunked
    except ImportError:
        return

    def trl(x: Tensor, w: Tensor, t: Tensor, advantages: Tensor, old: Tensor) -> Tensor:
        flat = x.view(-1, x.shape[-1])
        logps = Chunked.apply(flat, w, None, t.view(-1), 1.0, 32768, None, 1.0, ("log_probs", "entropy"))[0]
        ratio = (logps.view(old.shape) - old).exp()
        clipped = ratio.clamp(0.8, 1.2)
        return -torch.min(ratio * advantages[:, None], clipped * advantages[:, None]).mean()

    yield "trl", trl


def measure(table: Table, b: int, length: int, h: int, v: int) -> None:
    """Every contender at one shape."""
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    table.task(f"GRPO {b}x{length}x{h}x{v}", gemm_floor(b * length, h, v, dtype).all)
    torch.manual_seed(0)
    x = torch.randn(b, length, h, device=DEVICE, dtype=dtype, requires_grad=True)
    w = (torch.randn(v, h, device=DEVICE) / h**0.5).to(dtype).requires_grad_()
    t = torch.randint(v, (b, length), device=DEVICE)
    advantages = torch.randn(b, device=DEVICE)
    old = torch.randn(b, length, device=DEVICE) * 0.1 - 11.8
    for name, loss in contenders():
        table.measure(name, partial(loss, x, w, t, advantages, old), {"input": x, "weight": w})


def main() -> None:
    parse = parser(__doc__)
    parse.add_argument("shapes", nargs="*", default=["8:2048:2048:151936"], help="sequences:length:hidden:vocabulary")
    args = parse.parse_args()
    table = Table("policy", args)
    if DEVICE == "cpu":
        print("no GPU: a small shape in float32, which says nothing about a GPU")
        args.shapes = ["4:64:64:4096"]
    for shape in args.shapes:
        measure(table, *map(int, shape.split(":")))
    table.save()


if __name__ == "__main__":
    main()
