"""A vocabulary split over ranks: every loss equals that of one process, with the same bits on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fresh_process import FreshProcesses
from table import ROWS, SMALL, Batch, Row, evaluate, relative_error
from torch import Tensor

from liger_chunked import VocabShard

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="no gloo")

# The ranks' rows, and rows of padding behind them.
LAYOUTS = {
    2: {
        "even": [(12, 0), (11, 1)],
        "uneven": [(5, 0), (18, 0)],
        "padded": [(16, 0), (7, 9)],
        "all-padding": [(23, 0), (0, 4)],
    },
    4: {"even": [(6, 0), (6, 0), (6, 0), (5, 1)], "uneven": [(1, 0), (13, 0), (9, 2), (0, 3)]},
}
HEADS = {"weight": "bias", "ref_weight": "ref_bias", "teacher_weight": "teacher_bias"}
BUDGETS: dict[str, Callable[[Row], int | None]] = {
    "whole": lambda row: None,
    "chunks": lambda row: 8 * 9 * 5,  # some rows of this rank's logits
}


def shards(parts: list[tuple[int, int]], vocab_size: int = SMALL.vocab, **options: Any) -> VocabShard:
    """Return this rank's shard."""
    return VocabShard(None, sum(n for n, _ in parts[: dist.get_rank()]), vocab_size, **options)


def cut(batch: Batch, parts: list[tuple[int, int]], **options: Any) -> Batch:
    """Return this rank's batch. Padding holds large numbers."""
    shard, (n, padding) = shards(parts, **options), parts[dist.get_rank()]

    def own(x: Tensor) -> Tensor:
        return torch.cat([x[shard.start : shard.start + n], x.new_full((padding, *x.shape[1:]), 50.0)])

    named = {name for pair in HEADS.items() for name in pair}
    return {name: own(x) if name in named else x for name, x in batch.items()} | {"vocab_shard": shard}


def same_on_all_ranks(x: Tensor) -> bool:
    others = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(others, x.contiguous())
    return all(torch.equal(x, other) for other in others)


def check(row: Row, batch: Batch, parts: list[tuple[int, int]], budget: int | None, tolerance: float = 1e-9) -> None:
    loss = partial(row.ours, logits_budget=budget)
    if not row.kernels:  # a user's divergence
        with pytest.raises(ValueError, match=r"needs whole rows of logits, got vocab_shard"):
            loss(cut(batch, parts))
        return
    whole, ours = evaluate(partial(row.ours), batch), evaluate(loss, cut(batch, parts))
    start, (n, _) = shards(parts).start, parts[dist.get_rank()]
    assert ours.keys() == whole.keys()
    for name, expected in whole.items():
        if name in HEADS or name == "bias":
            assert not ours[name][n:].any(), f"{name}: the padding has a gradient"
            expected, found = expected[start : start + n], ours[name][:n]
        else:
            found = ours[name]
            assert same_on_all_ranks(found), f"{name} differs between ranks"
        assert relative_error(found, expected) < tolerance, (name, relative_error(found, expected))


def initialize(rank: int, world: str, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=int(world))


def all_losses(rank: int, world: str, folder: str, every: str) -> None:
    initialize(rank, world, folder)
    layouts = list(LAYOUTS[int(world)].items())
    for i, row in enumerate(ROWS):
        batch = row.sample(SMALL, i)
        for j, (name, parts) in enumerate(layouts):
            for k, (budget, of_row) in enumerate(BUDGETS.items()):
                if every == "True" or (i % len(layouts) == j and (i // len(layouts)) % 2 == k):
                    try:
                        check(row, batch, parts, of_row(row))
                    except Exception as error:
                        raise AssertionError(f"{row.id}, {name}, {budget}") from error
    dist.destroy_process_group()


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_all_losses(tmp_path: Path, fresh_process: FreshProcesses, world: int, every: bool) -> None:
    fresh_process.spawn(all_losses, world, str(world), str(tmp_path), str(every))
