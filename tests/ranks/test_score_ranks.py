"""Scores and a top k where ranks hold parts of the vocabulary, or of all parameters, are those of one process."""

from __future__ import annotations

import torch
from ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from liger_chunked import VocabShard, defer_logits, score, teacher_top_k

V, H = 22, 8
OUTPUTS = ("logps", "lse", "entropy", "is_top1")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(H, H), nn.Linear(H, V)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).tanh())


def close(found, expected) -> None:
    for name in OUTPUTS:
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-10, atol=1e-10, msg=name)


@on_ranks(2)
def test_two_ranks(rank: int) -> None:
    torch.manual_seed(0)
    model, x, target = Model().double(), torch.randn(3, 5, H, dtype=torch.float64), torch.randint(V, (3, 5))
    target[0, 2] = -100
    defer_logits(model.head)
    expected, top = score(model, (x, target), OUTPUTS), teacher_top_k(model, (x, target), 4)

    hidden, rows = model.body(x).tanh().detach(), slice(11 * rank, 11 * rank + 11)
    shard = VocabShard(None, start=rows.start, vocab_size=V)
    part = model.head.weight[rows], hidden, model.head.bias[rows]
    close(score(part, target, OUTPUTS, vocab_shard=shard), expected)

    mesh = init_device_mesh("cpu", (2,))
    for wrap in ("tensor parallel", "fsdp"):
        torch.manual_seed(0)
        wrapped = Model().double()
        if wrap == "fsdp":
            fully_shard(wrapped.head, mesh=mesh)
            fully_shard(wrapped, mesh=mesh)
        else:
            parallelize_module(wrapped, mesh, {"head": ColwiseParallel(output_layouts=Replicate())})
        defer_logits(wrapped.head)
        for _ in range(2):
            close(score(wrapped, (x, target), OUTPUTS), expected)
        found = teacher_top_k(wrapped, (x, target), 4)
        assert torch.equal(found.ids, top.ids)
        torch.testing.assert_close(found.logps, top.logps, rtol=1e-10, atol=1e-10)
