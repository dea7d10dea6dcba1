"""What the ranks of a test share: `fresh_process.spawn(worker, world, ...)` starts them, and a worker joins the others.

def worker(rank: int, world: str, folder: str) -> None:
    join(rank, world, folder)
    assert same_on_all_ranks(loss)
    dist.destroy_process_group()

`Gathering` stands for ZeRO-3, on one process too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def join(rank: int, world: int | str, folder: str, device: str = "cpu") -> None:
    """Make a process group of `world` ranks, which meet in a file of `folder`; on "cuda", each has a GPU."""
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=int(world),
    )


def same_on_all_ranks(x: Tensor) -> bool:
    """Return whether all ranks have the same bits. A collective: every rank calls it."""
    others = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(others, x.contiguous())
    return all(torch.equal(x, other) for other in others)


def summed(x: Tensor) -> Tensor:
    """Return the sum over all ranks, in a tensor of its own."""
    x = x.clone()
    dist.all_reduce(x)
    return x


class Gathering(torch.autograd.Function):
    """`apply(x, gather)`: a module's result `x`, whose backward first calls `gather`, as ZeRO-3 does.

    `gather` brings back the parameters that ZeRO-3 released after the module's forward.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, gather: Callable[[], object]) -> Tensor:
        ctx.gather = gather
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.gather()
        return grad, None
