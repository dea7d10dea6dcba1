"""benchmarks/scaling.py: its formulas against the collectives of real steps and measured memory, and its tables."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import scaling
from benchmarks.scaling import LOSSES, Collective
from liger_chunked import (
    LigerFusedLinearCrossEntropyLoss,
    LigerFusedLinearDPOLoss,
    LigerFusedLinearGRPOLoss,
    LigerFusedLinearJSDLoss,
    VocabShard,
    estimate_memory,
    memory,
)
from liger_chunked.engine import checks

B, T, H, V = 4, 16, 24, 40
KINDS = {"_allgather_base_": "all_gather", "allreduce_": "all_reduce", "_reduce_scatter_base_": "reduce_scatter"}


class Wire(TorchDispatchMode):
    """Records the collectives of this rank. An unknown one is a KeyError."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Collective] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d":
            kind = KINDS[function._schema.name.removeprefix("c10d::")]
            tensors = [x for x in torch.utils._pytree.tree_leaves(args) if isinstance(x, Tensor)]
            given = tensors[-1]  # after the result, if that is another tensor
            self.found.append(Collective(kind, given.numel() * given.element_size(), dist.get_world_size()))
        return function(*args, **(kwargs or {}))


def step(loss: str, weights: list[Tensor], hidden: list[Tensor], target: Tensor, **options: Any) -> list[Collective]:
    """Return the collectives of a step, after one that compares the ranks."""
    w, x = weights[0].clone().requires_grad_(), hidden[0].clone().requires_grad_()
    budget = {"logits_budget": options.pop("budget", None)}

    def run() -> Tensor:
        if loss == "cross entropy":
            return LigerFusedLinearCrossEntropyLoss(**budget)(w, x, target, **options)
        if loss == "DPO":
            given = (w, x, target, None, hidden[1], weights[1])
            return LigerFusedLinearDPOLoss(**budget)(*given, **options)[0]
        if loss == "GRPO":
            return LigerFusedLinearGRPOLoss(**budget)(w, x, target, torch.ones(B), **options)[0]
        soft = LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0, **budget)
        return soft(w, x, weights[1], hidden[1], **options)[0]

    run()
    with Wire() as counted:
        run().backward()
    return counted.found


def totals(found: list[Collective]) -> Counter[tuple[str, int]]:
    """Return the bytes given to each kind of collective."""
    given: Counter[tuple[str, int]] = Counter()
    for collective in found:
        given[collective.kind, collective.ranks] += collective.given
    return given


# With two ranks, a formula could have a 2 in the place of their number.
@pytest.mark.slow
@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.exhaustive), 4])
@on_ranks()
def test_collectives_of_steps(rank: int, world: int) -> None:
    # The formulas leave out two numbers by which ranks compare their calls and targets in each step.
    checks._tells_ranks = checks._check_same_targets = lambda *_: False
    ranks = world
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(V, H, generator=generator) for _ in range(2)]
    hidden = [torch.randn(B, T, H, generator=generator) for _ in range(2)]
    target = torch.randint(V, (B, T), generator=generator)
    n, own = B * T, slice(rank * V // ranks, (rank + 1) * V // ranks)
    parts = [x.chunk(ranks, 1)[rank].contiguous() for x in hidden]
    for loss, exchange in LOSSES.items():
        for dtype in (torch.float32, torch.bfloat16):
            size = dtype.itemsize
            whole, rows = ([x.to(dtype) for x in y] for y in (weights, [w[own] for w in weights]))
            for scattered in (False, True):
                shard = VocabShard(None, own.start, V, "reduce_scatter" if scattered else "all_reduce")
                given = [x.to(dtype) for x in (parts if scattered else hidden)]
                expected = scaling.of_split_vocabulary(exchange, n, H, ranks, size, scattered)
                found = step(loss, rows, given, target, vocab_shard=shard)
                assert sorted(found) == sorted(expected), (loss, dtype, scattered, found)
                # Chunks give as many bytes, in more collectives.
                budget = 2 * n * V // ranks * size // 4
                found = step(loss, rows, given, target, vocab_shard=shard, budget=budget)
                assert totals(found) == totals(expected), (loss, dtype, scattered, found)
                assert len(found) > len(expected), (loss, dtype, scattered, found)
            own_target = target.chunk(ranks, 1)[rank].contiguous()
            found = step(loss, whole, [x.to(dtype) for x in parts], own_target, sequence_group=dist.group.WORLD)
            expected = scaling.of_split_sequence(exchange, n // ranks, ranks)
            assert sorted(found) == sorted(expected), (loss, dtype, found)
    gathers(ranks, weights[0], hidden[0].flatten(0, 1))


class Head(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight.t()).square().sum()


def gathers(ranks: int, weight: Tensor, x: Tensor) -> None:
    """The two other ways: FSDP's, and a gather of the logits."""
    for rows in (V, V - 3):  # even, and padded
        head = Head(weight[:rows].clone())
        fully_shard(head, mesh=init_device_mesh("cpu", (ranks,)))
        with Wire() as counted:
            head(x).backward()
        assert sorted(counted.found) == sorted(scaling.of_gathered_weight(rows, H, ranks, 4)), counted.found

    from benchmarks.distributed import Copied, GatheredColumns

    own = weight.chunk(ranks)[dist.get_rank()].clone().requires_grad_()
    x = x.clone().requires_grad_()
    with Wire() as counted:
        GatheredColumns.apply(Copied.apply(x) @ own.t()).square().sum().backward()
    assert sorted(counted.found) == sorted(scaling.of_gathered_logits(len(x), V, H, ranks, 4)), counted.found


@pytest.mark.parametrize("kind, given", [("all_gather", 10), ("reduce_scatter", 30), ("all_reduce", 30)])
def test_a_ring_sends_each_part_to_all_others(kind: str, given: int) -> None:
    """Of three ranks. A ring that reduces to all sends twice as much as one that gathers the same result."""
    assert Collective(kind, given, 3).sent == (40 if kind == "all_reduce" else 20)


def test_memory_is_what_was_measured() -> None:
    content = json.loads((scaling.RESULTS / "vocab_shard-c69e6f1.json").read_text())
    checked = 0
    for row in content["rows"]:
        match = re.fullmatch(r"(cross entropy|DPO|GRPO|JSD) (\d+)x(\d+)x(\d+), one of (\d) ranks.*", row["task"])
        if match and row["name"] == "liger_chunked, logits":
            n, h, v, ranks = map(int, match.groups()[1:])
            assert scaling.memory(n, v, h, ranks).step / 2**20 == pytest.approx(row["mib"], rel=1e-3), row
            checked += 1
    assert checked == 10


@pytest.mark.few(3)
@pytest.mark.parametrize("model", scaling.MODELS)
@pytest.mark.parametrize("n", [8192, 20000, 65536])  # one chunk and several
def test_memory_of_one_rank_is_estimated_alike(model: str, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_has_wide_tiles", lambda: False)
    v, h = scaling.MODELS[model]
    sizes = {"vocab_size": v, "hidden_size": h, "shape": (1, n), "valid": n}
    estimate = estimate_memory(LigerFusedLinearCrossEntropyLoss(), **sizes)
    assert scaling.memory(n, v, h, 1).step == pytest.approx(estimate.peak, rel=1e-3)


def test_the_tables_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    scaling.main()
    out = capsys.readouterr().out
    for name, table in scaling.TABLES.items():
        assert f"{name}: {table.__doc__}" in out and table() in out
