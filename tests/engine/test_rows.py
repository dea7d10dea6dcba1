"""Test the order of tokens, and how their values return to the batch."""

from __future__ import annotations

import gc
import types
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import FreshProcesses
from torch import Tensor

from liger_chunked.engine import select_rows
from liger_chunked.engine.collectives import OncePerGroup
from liger_chunked.engine.rows import Group, Rows
from liger_chunked.engine.saved import save, saved

VOCAB, LENGTH = 40, 6


def targets(ignored: bool) -> Tensor:
    """Return ids (4, 6) that all differ, so that an id says where it came from."""
    target = torch.arange(4 * LENGTH).view(4, LENGTH)
    if ignored:
        target[0, :2] = target[1] = target[2, 3:] = -100
    return target


@pytest.mark.parametrize("group", ["token", "sequence", "pair"])
def test_side_inputs_follow_their_tokens(group: Group) -> None:
    target = targets(ignored=True)
    pairs_of_ids = torch.stack([target, target + 1], -1).view(-1, 2)
    rows = select_rows(target, group, -100, VOCAB).with_side("candidates", pairs_of_ids)
    order = torch.randperm(rows.n_valid)
    for moved in (rows, rows.reordered(order), through_autograd(rows)):
        assert moved.target is not None
        assert torch.equal(moved.side["candidates"], torch.stack([moved.target, moved.target + 1], -1))


def through_autograd(rows: Rows) -> Rows:
    """Return what a backward finds of rows that a forward saved, of which autograd alone holds the tensors."""
    ctx = types.SimpleNamespace()
    ctx.save_for_backward = lambda *tensors: setattr(ctx, "saved_tensors", [x.clone() for x in tensors])
    save(ctx, {"rows": rows})
    assert not any(isinstance(x, Tensor) for x in vars(ctx.tree["rows"]).values())
    found = saved(ctx)["rows"]
    assert type(found) is type(rows) and found.target is not rows.target
    return found


def of_groups(rank: int, folder: str) -> None:
    once, calls = OncePerGroup(), []

    def check() -> int:
        calls.append(None)
        return len(calls)

    for start in range(2):
        store = dist.FileStore(f"{folder}/{start}", 1)
        dist.init_process_group("gloo", rank=rank, world_size=1, store=store)
        group = dist.new_group([0])
        first, second = once.result(None, "a", check), once.result(group, "a", check)
        assert once.result(dist.group.WORLD, "a", check) == first and once.result(group, "a", check) == second
        once.result(group, "b", check)
        names = dist.group.WORLD.group_name, group.group_name
        assert len(calls) == 3 * (start + 1), "groups of an earlier name are checked again"
        with pytest.raises(ZeroDivisionError):
            once.result(group, "c", lambda: 1 / 0)
        assert once.result(group, "c", lambda: 3) == 3
        dist.destroy_process_group()
        del group
        gc.collect()
        assert not once._of_groups, f"groups {names} are alive"


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="no gloo")
def test_checks_live_as_long_as_their_group(tmp_path: Path, fresh_process: FreshProcesses) -> None:
    fresh_process.spawn(of_groups, 1, str(tmp_path))
