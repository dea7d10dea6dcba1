"""A decoder that knows nothing of this library, with a deferring head, trained by DDP and FSDP2 on two processes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fresh_process import FreshProcesses
from ranks import join
from test_deferred import Decoder, V, decoder_step
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from liger_chunked import DeferredLogits, defer_logits

WORLD = 2


def batches(steps: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(V, (2 * WORLD, 9), generator=generator) for _ in range(steps)]


def trained(model: nn.Module, mine: slice, accumulate: int = 1, compiled: bool = False) -> list[Tensor]:
    """Train for three steps; return the losses, and whole parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    run = torch.compile(model, backend="eager") if compiled else model
    losses = []
    for ids in batches(3):
        parts = ids[mine].chunk(accumulate)
        for part in parts:
            loss = decoder_step(run, part) / len(parts)
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return [torch.stack(losses).sum(), *(p.detach() for p in whole)]


class AllGathers(TorchDispatchMode):
    """Counts the collectives that gather parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "allgather" in function.name().replace("_", "")
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def no_logits(model: nn.Module) -> Iterator[None]:
    """Fail if the head computes logits in training."""
    head: Any = model.lm_head
    computed = []
    stock = nn.Linear.forward

    def forward(self: nn.Linear, x: Tensor) -> Tensor:
        if self.out_features == V:
            computed.append(x.shape)
        return stock(self, x)

    nn.Linear.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Linear.forward = stock  # type: ignore[method-assign]
    assert not computed, (head, computed)


def on_two_ranks(rank: int, folder: str) -> None:
    join(rank, WORLD, folder)
    mesh = init_device_mesh("cpu", (WORLD,))
    mine = slice(2 * rank, 2 * rank + 2)

    def built(defers: bool, tied: bool = False) -> Decoder:
        torch.manual_seed(0)
        model = Decoder()
        if tied:
            model.lm_head.weight = model.embedding.weight
        if defers:
            defer_logits(model.lm_head)
        return model

    for options in ({}, {"static_graph": True}, {"find_unused_parameters": True}):
        results = [trained(DistributedDataParallel(built(defers), **options), mine) for defers in (True, False)]
        for ours, theirs in zip(*results, strict=True):
            # float32: the fused loss adds in another order than eager code.
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    results = [trained(DistributedDataParallel(built(defers)), mine, compiled=True) for defers in (True, False)]
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)

    for own_group in (False, True):
        for defers_first in (True, False):
            for tied, accumulate in ((False, 1), (False, 2), (True, 1)):
                if tied and own_group:
                    continue  # FSDP refuses a parameter in two groups
                results, gathers = [], []
                for defers in (True, False):
                    model = built(defers and defers_first, tied)
                    for layer in model.layers:
                        fully_shard(layer, mesh=mesh)
                    if own_group:
                        fully_shard(model.lm_head, mesh=mesh)
                    fully_shard(model, mesh=mesh)
                    if defers and not defers_first:
                        defer_logits(model.lm_head)
                    with AllGathers() as counted, no_logits(model) if defers else contextlib.nullcontext():
                        results.append(trained(model, mine, accumulate))
                    gathers.append(counted.count)
                    z = model(batches(1)[0][mine])
                    assert isinstance(z, DeferredLogits) == defers
                for ours, theirs in zip(*results, strict=True):
                    # float32: the fused loss adds in another order than eager code.
                    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
                assert gathers[0] <= gathers[1], (own_group, gathers)

    model = built(True)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model.lm_head, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    loss = decoder_step(model, batches(1)[0][mine])
    loss.backward()
    assert loss.dtype == torch.bfloat16 and model.lm_head.weight.grad.dtype == torch.float32
    dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="no gloo")
def test_on_two_ranks(tmp_path: Path, fresh_process: FreshProcesses) -> None:
    fresh_process.spawn(on_two_ranks, WORLD, str(tmp_path))
