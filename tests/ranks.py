"""What the ranks of a test share. A test that runs on ranks is their function:

@on_ranks(2)
def test_sums(rank: int, every: bool) -> None:
    assert same_on_all_ranks(loss)

`Gathering` stands for ZeRO-3, on one process too.
"""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor


def join(rank: int, world: int | str, folder: str, device: str = "cpu") -> None:
    """Make a process group of `world` ranks, which meet in a file of `folder`; on "cuda", each has a GPU."""
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # transformers would give each rank a GPU, also where there is one
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=int(world),
    )


no_gloo = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="no gloo")
# One part of the cases, or with `--exhaustive` all.
some_or_all = pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.exhaustive)])


def on_ranks(world: int | None = None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a function of a rank a test, which runs it in `world` processes that have joined a group.

    Its first argument is the rank. The others are those of the test, fixtures and parameters, which are pickled;
    `tmp_path` is a folder of all ranks. `world=None`: the parameter `world`.
    """

    def decorate(worker: Callable[..., None]) -> Callable[..., None]:
        _, *parameters = inspect.signature(worker).parameters.values()

        def test(tmp_path: Path, fresh_process: Any, **given: Any) -> None:
            ranks = given["world"] if world is None else world
            if any(p.name == "tmp_path" for p in parameters):
                given["tmp_path"] = tmp_path
            fresh_process.spawn(run_joined, ranks, str(tmp_path), ranks, worker.__module__, worker.__name__, given)

        known = [p for name, p in inspect.signature(test).parameters.items() if name != "given"]
        own = [p for p in parameters if p.name != "tmp_path"]
        vars(test).update(worker=worker, __signature__=inspect.Signature([*known, *own]))
        test.__module__, test.__name__, test.__doc__ = worker.__module__, worker.__name__, worker.__doc__
        return no_gloo(test)

    return decorate


def run_joined(rank: int, folder: str, world: int, module: str, name: str, given: dict[str, Any]) -> None:
    join(rank, world, folder)
    getattr(importlib.import_module(module), name).worker(rank, **given)


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
