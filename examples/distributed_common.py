"""Code shared by the distributed examples: the process group, a layer's tensor parallelism, clipping, and a log.

torchrun --nproc-per-node 2 examples/distributed_fsdp2_dpo.py    gloo on CPUs, NCCL if each process has a GPU
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle, islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from toy import byte_tokenizer, collate, encode

Batch = dict[str, Tensor]


@contextmanager
def process_group() -> Iterator[torch.device]:
    """Join the processes that torchrun started. Yields this process's device."""
    if "LOCAL_RANK" not in os.environ:
        sys.exit(f"start this script with torchrun: torchrun --nproc-per-node 2 {sys.argv[0]}")
    device = torch.device("cpu")
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
    yield device
    dist.destroy_process_group()


def batches(rows: list[dict[str, str]], size: int) -> Iterator[list[dict[str, str]]]:
    """Yield `size` rows at a time, the same on all ranks, forever."""
    endless = cycle(rows)
    while True:
        yield list(islice(endless, size))


def tokens(rows: list[dict[str, str]], kinds: tuple[str, ...], device: torch.device) -> Batch:
    """Return a batch of the prompts with the answers of the first kind, then of the second, and so on."""
    tokenizer = byte_tokenizer()
    batch = collate(encode(tokenizer, row["prompt"], row[kind]) for kind in kinds for row in rows)
    return {name: x.to(device) for name, x in batch.items()}


def split_layers(model: Any, mesh: DeviceMesh) -> None:
    """Split the layers of a Llama over `mesh`, by heads and by columns of the MLP, and the rows of its embeddings."""
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    plan = {name: ColwiseParallel() for name in columns}
    plan |= {name: RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
    for layer in model.model.layers:
        parallelize_module(layer, mesh, plan)
    parallelize_module(model, mesh, {"model.embed_tokens": RowwiseParallel(input_layouts=Replicate())})


def clip_gradients(model: torch.nn.Module, max_norm: float = 1.0) -> float:
    """Clip as `clip_grad_norm_` does, which refuses gradients of which some are plain or on another mesh.

    Returns the norm before.
    """
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    squares: dict[tuple[dist.ProcessGroup, ...], Tensor] = {}  # by the groups that split a gradient
    for gradient in gradients:
        groups: list[dist.ProcessGroup] = []
        if isinstance(gradient, DTensor):
            split = [i for i, placement in enumerate(gradient.placements) if not placement.is_replicate()]
            groups = [gradient.device_mesh.get_group(i) for i in split]
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        squares[tuple(groups)] = squares.get(tuple(groups), 0) + local.square().sum()
    for groups, x in squares.items():
        for group in groups:
            dist.all_reduce(x, group=group)
    norm = float(sum(squares.values())) ** 0.5
    for gradient in gradients:
        gradient.mul_(min(1.0, max_norm / norm))
    return norm


class Log(list[tuple[float, float]]):
    """The loss and the gradient's norm of each step. Rank 0 prints them."""

    def step(self, loss: Tensor | float, norm: float) -> None:
        self.append((float(loss), norm))
        if dist.get_rank() == 0:
            print(f"step {len(self)}: loss {float(loss):.4f}, gradient norm {norm:.4f}", flush=True)
