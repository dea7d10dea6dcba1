"""SFT under tensor parallelism: each rank has some rows of the head, and no rank gathers the head or its logits.

torchrun --nproc-per-node 2 examples/distributed_tp_sft.py [--tied]
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
from distributed_common import Log, batches, clip_gradients, process_group, split_layers, tokens
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from toy import sums, tiny_model

from liger_chunked import apply_liger_kernel

STEPS, ROWS = 20, 8


def build(mesh: DeviceMesh, tied: bool) -> Any:
    """Return a model whose layers, embeddings and head are split over the ranks of `mesh`."""
    model = tiny_model().to(mesh.device_type).train()  # the same weights on all ranks, from the same seed
    split_layers(model, mesh)
    # The columns of the output are the rows of the weight. In a fused step the hook that would gather or cut the
    # logits does not run, so any output layout of ColwiseParallel will do.
    parallelize_module(model, mesh, {"lm_head": ColwiseParallel()})
    if tied:  # embeddings and head are split alike
        model.lm_head.weight = model.model.embed_tokens.weight
    # Last: the patch keeps what parallelize_module has set up.
    apply_liger_kernel(model)
    return model


def main(device: torch.device, tied: bool = False) -> Log:
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = build(mesh, tied)
    weight = model.lm_head.weight
    if dist.get_rank() == 0:
        print(f"lm_head {tuple(weight.shape)}, of which this rank has {tuple(weight.to_local().shape)}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    log, data = Log(), batches(sums(16), ROWS)
    for _ in range(STEPS):
        # All ranks have the same batch, and get the same loss: nothing is divided by, or multiplied with, their number.
        loss = model(**tokens(next(data), ("chosen",), device)).loss
        loss.backward()
        norm = clip_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        log.step(loss.detach(), norm)
    return log


if __name__ == "__main__":
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--tied", action="store_true", help="the head is the embeddings' weight")
    with process_group() as device:
        log = main(device, **vars(arguments.parse_args()))
