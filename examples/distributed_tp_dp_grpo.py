"""GRPO on a mesh of two dimensions: ranks of `tp` split the model and share rollouts, ranks of `dp` have their own.

torchrun --nproc-per-node 2 examples/distributed_tp_dp_grpo.py           1 x 2: two ranks split the model
torchrun --nproc-per-node 2 examples/distributed_tp_dp_grpo.py --tp 1    2 x 1: two ranks split the rollouts
torchrun --nproc-per-node 4 examples/distributed_tp_dp_grpo.py           2 x 2
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from distributed_common import Batch, Log, clip_gradients, process_group, split_layers, tokens
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from toy import sums, tiny_model

from liger_chunked import LigerFusedLinearGRPOLoss, linear_token_stats
from liger_chunked.integrations.transformers import HeadInput, attach_head
from liger_chunked.types import Head

STEPS, PROMPTS, ANSWERS = 10, 8, 4


def build(mesh: DeviceMesh) -> Any:
    model = tiny_model().to(mesh.device_type).train()  # the same weights on all ranks, from the same seed
    split_layers(model, mesh["tp"])
    parallelize_module(model, mesh["tp"], {"lm_head": ColwiseParallel()})
    attach_head(model)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def rollouts(mesh: DeviceMesh) -> tuple[Batch, Tensor]:
    """Return a batch and its advantages (B,): the answers to this dp rank's prompts, as if sampled.

    Ranks of a `tp` group get the same rollouts. Where an engine samples them, one rank of the group must send them to
    the others: the loss compares hidden states in its first call only.
    """
    prompts = sums(PROMPTS)[mesh.get_local_rank("dp") :: mesh["dp"].size()]
    answers, rewards = [], []
    for row in prompts:
        right = int(row["chosen"])
        guesses = [right + offset for offset in (0, 1, 0, -right)]  # ANSWERS of them
        answers += [{"prompt": row["prompt"], "answer": f" {guess}"} for guess in guesses]
        rewards.append([float(guess == right) for guess in guesses])
    groups = torch.tensor(rewards, device=mesh.device_type)
    advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
    return tokens(answers, ("answer",), groups.device), advantages.flatten()


def token_logps(head: Head, input: HeadInput) -> Tensor:
    """Return the log-probability of each target: (B, T)."""
    options = asdict(input.options)
    return linear_token_stats(head.weight, input.hidden_states, input.target, head.bias, **options).logps


def main(device: torch.device, tp: int) -> Log:
    dp = dist.get_world_size() // tp
    mesh = init_device_mesh(device.type, (dp, tp), mesh_dim_names=("dp", "tp"))
    model = build(mesh)
    batch, advantages = rollouts(mesh)
    with torch.no_grad():
        old_logps = model(**batch, head_fn=token_logps)
    # The divisor is the number of tokens of all dp ranks. Ranks of a `tp` group have the same tokens: not theirs too.
    num_items = (batch["labels"][:, 1:] != -100).sum()
    dist.all_reduce(num_items, group=mesh.get_group("dp"))
    grpo = LigerFusedLinearGRPOLoss(reduction="dapo", epsilon_high=0.28)

    def head_fn(head: Head, input: HeadInput) -> Tensor:
        # head.weight is a DTensor: rows of the vocabulary over `tp`, gathered over `dp`.
        loss, _ = input.loss(grpo, head, advantages=advantages, old_logps=old_logps, num_items=num_items)
        return loss

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    log = Log()
    for _ in range(STEPS):
        loss = model(**batch, head_fn=head_fn)
        # Each dp rank has its tokens' part of the loss, and FSDP averages over dp.
        (dp * loss).backward()
        norm = clip_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach()
        dist.all_reduce(total, group=mesh.get_group("dp"))
        log.step(total, norm)
    return log


if __name__ == "__main__":
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--tp", type=int, help="ranks that split the model (default: 2, or 1 in one process)")
    with process_group() as device:
        log = main(device, arguments.parse_args().tp or min(2, dist.get_world_size()))
