# /// script
# requires-python = "==3.12.*"
# dependencies = ["torch==2.11.0", "megatron-core==0.19.2"]
# ///
"""Megatron-Core 0.19.2: optimizer steps of a GPTModel, with its head and loss and with our `OutputProcessor`.

Environment: megatron-core with its dependencies, and torch 2.11.0. No package is a stub, and Transformer Engine is not
installed: layers are Megatron's local ones. `torch.cuda.current_device` and the tracker of CUDA's random states are
replaced, because Megatron puts new weights on the current device.

Runs `GPTModel` on two gloo ranks with tensor parallelism, and AdamW. Sequence parallelism needs Apex or Transformer
Engine, for its norm. Compares the mean of the tokens' losses of each step from equal weights (steps 0 to 7 with an own
head, 8 to 15 with tied embeddings), and exits with 1 if one differs by more than 1e-5. All is float32.
"""

from __future__ import annotations

import tempfile
from collections import Counter

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import compare, count_calls
from megatron_common import LENGTH, VOCAB, build, initialize, inputs

RANKS, STEPS, BATCH = 2, 8, 4


def train(tied: bool, ours: bool) -> list[float]:
    """Return the loss of each step, from equal random weights."""
    from liger_chunked.integrations.frameworks.megatron import OutputProcessor

    model = build(RANKS, tied)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(STEPS):
        ids = torch.randint(VOCAB // 8, (BATCH, LENGTH + 1), generator=generator)
        loss_mask = torch.rand(BATCH, LENGTH, generator=generator) < 0.8
        processor = OutputProcessor() if ours else None
        given = {"labels": ids[:, 1:], "loss_mask": loss_mask, "output_processor": processor}
        tokens = model(ids[:, :-1], *inputs(BATCH), **given)
        loss = (tokens * loss_mask).sum() / loss_mask.sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def worker(rank: int, folder: str) -> None:
    from liger_chunked.integrations.frameworks.megatron import OutputProcessor

    initialize(rank, RANKS, folder)
    calls = count_calls(OutputProcessor, "__call__")
    stock, ours = ([loss for tied in (False, True) for loss in train(tied, ours)] for ours in (False, True))
    if rank == 0:
        torch.save((stock, ours, dict(calls)), f"{folder}/losses")
    dist.destroy_process_group()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (folder,), RANKS)
        stock, ours, calls = torch.load(f"{folder}/losses")
    compare("megatron-core", stock, ours, 1e-5, Counter(calls))


if __name__ == "__main__":
    main()
