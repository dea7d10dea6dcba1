"""Compare three ways to end a compiled model: logits and cross entropy, the fused loss after it, the fused loss inside.

python -m benchmarks.compiled [tokens:hidden:vocabulary]

A step is forward and backward of a small body (residual MLPs with RMSNorm) and a loss; everything is trainable. `x
floor` is the time above the body's time, over the time of the head's three matrix products. `MiB` is the peak memory
above parameters and input, including gradients.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.harness import DEVICE, DTYPE, gemm_floor, median_ms, parser, peak_mib
from liger_chunked import LigerFusedLinearCrossEntropyLoss

N_LAYERS = 4


class Layer(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden, bias=False), nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.up(self.norm(x))))


class Model(nn.Module):
    """A body and a head; the loss takes the head's weight."""

    def __init__(self, hidden: int, vocabulary: int) -> None:
        super().__init__()
        self.body = nn.Sequential(*(Layer(hidden) for _ in range(N_LAYERS)), nn.RMSNorm(hidden))
        self.head = nn.Linear(hidden, vocabulary, bias=False)
        self.fused = LigerFusedLinearCrossEntropyLoss()

    def by_logits(self, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.body(x)).float(), target)

    def by_fused_loss(self, x: Tensor, target: Tensor) -> Tensor:
        return self.fused(self.head.weight, self.body(x), target)


def contenders(model: Model) -> Iterator[tuple[str, Callable[[Tensor, Tensor], Tensor]]]:
    """Yield names and losses, each compiled anew; the first one is the body alone."""
    body = torch.compile(model.body, dynamic=False)
    yield "the body alone", lambda x, target: body(x).sum()
    yield "F.cross_entropy on logits, compiled", torch.compile(model.by_logits, dynamic=False, fullgraph=True)
    yield "fused, eager after a compiled body", lambda x, target: model.fused(model.head.weight, body(x), target)
    yield "fused, all compiled", torch.compile(model.by_fused_loss, dynamic=False)


def main() -> None:
    parse = parser(__doc__ or "", peer_seconds=0)
    parse.add_argument("shape", nargs="?", default="8192:2048:151936", help="tokens:hidden:vocabulary")
    args = parse.parse_args()
    if DEVICE == "cpu":
        print("no GPU: a small shape in float32, which says nothing about a GPU")
        args.shape = "64:32:2048"
    n, h, v = map(int, args.shape.split(":"))
    torch.manual_seed(0)
    model = Model(h, v).to(DEVICE, DTYPE)
    x = torch.randn(n, h, device=DEVICE, dtype=DTYPE)
    target = torch.randint(v, (n,), device=DEVICE)
    parameters = list(model.parameters())

    def step(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        for parameter in parameters:
            parameter.grad = None
        loss(x, target).backward()

    floor, of_body = gemm_floor(n, h, v).all, 0.0
    print(f"{n} x {h} x {v}, {DTYPE}, floor {floor:.2f} ms\n{'':36} {'ms':>8} {'x floor':>8} {'MiB':>8}")
    for (name, loss), is_body in zip(contenders(model), itertools.chain([True], itertools.repeat(False)), strict=False):
        ms = median_ms(lambda loss=loss: step(loss), repeats=15)
        mib = peak_mib(lambda loss=loss: step(loss), parameters)
        of_body = ms if is_body else of_body
        print(f"{name:36} {ms:8.2f} {(ms - of_body) / floor:8.2f} {'' if mib is None else mib:>8}")


if __name__ == "__main__":
    main()
