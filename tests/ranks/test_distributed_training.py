"""Training with a vocabulary split over two ranks: 100 steps, and a rank that dies or hangs."""

from __future__ import annotations

import json
import os
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fresh_process import FreshProcesses
from ranks import no_gloo
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from liger_chunked import LigerFusedLinearCrossEntropyLoss

pytestmark = no_gloo

WORLD, VOCAB, HIDDEN = 2, 61, 16
TIMEOUT = 3  # seconds that a collective waits


class Model(nn.Module):
    """Predicts a token from the one before it; `mesh` splits the head over its ranks."""

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.Sequential(nn.Linear(HIDDEN, 2 * HIDDEN), nn.GELU(), nn.Linear(2 * HIDDEN, HIDDEN))
        weight = torch.randn(VOCAB, HIDDEN) / 4
        self.head = nn.Parameter(weight if mesh is None else distribute_tensor(weight, mesh, [Shard(0)]))
        self.loss = LigerFusedLinearCrossEntropyLoss(logits_budget=4 * VOCAB * 20)  # several chunks
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=5e-3)

    def step(self, i: int) -> Tensor:
        ids = torch.randint(VOCAB, (64,), generator=torch.Generator().manual_seed(i))
        x = self.embedding(ids)
        loss = self.loss(self.head, x + self.layers(x), (3 * ids + 1) % VOCAB)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def state(self) -> dict[str, dict]:
        return {"model": self.state_dict(), "optimizer": self.optimizer.state_dict()}


def start(rank: int, folder: str) -> DeviceMesh:
    torch.set_num_threads(1)
    rendezvous = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", rendezvous, timedelta(seconds=TIMEOUT), rank=rank, world_size=WORLD)
    return init_device_mesh("cpu", (WORLD,))


def track(rank: int, folder: str) -> None:
    model, one = Model(start(rank, folder)), Model()
    losses = torch.stack([torch.stack([model.step(i), one.step(i)]) for i in range(100)])
    assert losses[-1, 1] < 0.5 * losses[0, 1]
    error = ((losses[:, 0] - losses[:, 1]) / losses[:, 1]).abs().max()
    assert error < 1e-5, error  # eager code, which adds up in another order, differs by 1e-6


@pytest.mark.slow
def test_100_steps_track_one_process(tmp_path: Path, fresh_process: FreshProcesses) -> None:
    fresh_process.spawn(track, WORLD, str(tmp_path))


def lose_a_rank(rank: int, folder: str, way: str) -> None:
    """Save after step 2, and lose rank 1 in step 5."""
    raised = Path(folder, "error.json")
    model = Model(start(rank, folder))
    for i in range(5):
        model.step(i)
        if i == 2:
            dcp.save(model.state(), checkpoint_id=f"{folder}/checkpoint")
    if rank == 1:
        deadline = time.monotonic() + 4 * TIMEOUT
        while way == "hangs" and not raised.exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        os._exit(0)
    before = time.monotonic()
    with pytest.raises(RuntimeError) as error:
        model.step(5)
    raised.write_text(json.dumps([time.monotonic() - before, str(error.value)]))
    os._exit(0)  # the process group cannot be destroyed


def resume(rank: int, folder: str) -> None:
    mesh = start(rank, folder)
    uninterrupted, model = Model(mesh), Model(mesh)
    losses = [uninterrupted.step(i) for i in range(8)]
    model.step(9)  # other weights, and a state of the optimizer to load into
    state = model.state()
    dcp.load(state, checkpoint_id=f"{folder}/checkpoint")
    model.load_state_dict(state["model"])
    model.optimizer.load_state_dict(state["optimizer"])
    for i in range(3, 8):
        assert torch.equal(model.step(i), losses[i]), i


@pytest.mark.slow
@pytest.mark.parametrize("way", ["dies", "hangs"])
def test_a_lost_rank(tmp_path: Path, fresh_process: FreshProcesses, way: str) -> None:
    """The other rank raises an error within the timeout, and training goes on from the last checkpoint."""
    fresh_process.spawn(lose_a_rank, WORLD, str(tmp_path), way)
    seconds, message = json.loads((tmp_path / "error.json").read_text())
    assert seconds < 1.5 * TIMEOUT and message, (seconds, message)  # half of it for a busy machine
    (tmp_path / "rendezvous").unlink(missing_ok=True)
    fresh_process.spawn(resume, WORLD, str(tmp_path))
