"""Two processes under DDP log what TRL's trainers log under it: means over ranks, and gradients that were reduced."""

from __future__ import annotations

import os
import socket
import warnings
from pathlib import Path

import pytest

pytest.importorskip("trl")
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import torch
import torch.distributed as dist
from datasets import disable_progress_bars
from test_trl_trainers import assert_same, run

from liger_chunked import LigerFusedLinearDPOLoss, LigerFusedLinearGRPOLoss

WORLD = 2
# A head that is swapped, one where TRL has logits, two models one in the other; then gradients in forward.
CASES = {
    "SFT": None,
    "ORPO": None,
    "Distillation": None,
    "DPO": LigerFusedLinearDPOLoss(beta=0.1),
    "GRPO": LigerFusedLinearGRPOLoss(reduction="dapo"),
}


def worker(rank: int, folder: str, port: int) -> None:
    torch.set_num_threads(1)
    disable_progress_bars()
    warnings.simplefilter("ignore", FutureWarning)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for kind, loss in CASES.items():
        stock = run(Path(folder), kind, ours=False)
        ours = run(Path(folder), kind, ours=True, loss=loss)
        assert_same(ours, stock, common=loss is not None)
    # The same on both: the optimizer saw the same gradients.
    norms = torch.tensor([entry["grad_norm"] for entry in ours if "grad_norm" in entry])
    gathered = [torch.empty_like(norms) for _ in range(WORLD)]
    dist.all_gather(gathered, norms)
    assert torch.equal(*gathered)
    dist.destroy_process_group()


@pytest.mark.ordinary_memory
@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="no gloo")
def test_two_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(worker, args=(str(tmp_path), port), nprocs=WORLD)
