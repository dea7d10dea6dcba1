"""DPO under FSDP2: a rank has some pairs of each batch, and a shard of every weight of policy and reference.

torchrun --nproc-per-node 2 examples/distributed_fsdp2_dpo.py
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from distributed_common import Log, batches, clip_gradients, process_group, tokens
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from toy import sums, tiny_model

from liger_chunked import LigerFusedLinearDPOLoss, PreferenceMetrics, linear_token_stats
from liger_chunked.integrations.transformers import HeadInput, attach_head
from liger_chunked.types import Head

STEPS, PAIRS = 20, 8  # pairs of all ranks in a step


def sharded(model: Any, **options: Any) -> Any:
    """Shard each layer as a group. Embeddings, last norm and head are the group of the root."""
    for layer in model.model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def sequence_logps(head: Head, input: HeadInput) -> Tensor:
    """Return the log-probability of each sequence's target: (2 n,)."""
    options = asdict(input.options)
    return linear_token_stats(head.weight, input.hidden_states, input.target, head.bias, **options).logps.sum(-1)


def main(device: torch.device) -> Log:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    # All ranks build the same weights, from the same seed.
    policy = sharded(tiny_model().to(device).train())
    # Without a backward, FSDP2 would keep the root's group whole after its forward, unless it is told not to.
    reference = sharded(tiny_model().to(device).eval().requires_grad_(False), reshard_after_forward=True)
    # The head runs inside model.forward, where FSDP has gathered its weight and will reduce its gradient.
    attach_head(policy)
    attach_head(reference)
    dpo = LigerFusedLinearDPOLoss(beta=0.1, use_ref_model=True)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=5e-4)
    log, data = Log(), batches(sums(16), PAIRS)
    for _ in range(STEPS):
        batch = tokens(next(data)[rank::ranks], ("chosen", "rejected"), device)
        with torch.no_grad():
            ref_logps = reference(**batch, head_fn=sequence_logps)

        def head_fn(head: Head, input: HeadInput, ref_logps: Tensor = ref_logps) -> tuple[Tensor, PreferenceMetrics]:
            return input.loss(dpo, head, ref_logps=ref_logps)

        # The loss is a mean over this rank's pairs, and FSDP averages gradients over the ranks. With as many pairs on
        # each rank, as here, that is the mean over all pairs. Otherwise multiply the loss by ranks * own pairs / pairs.
        loss, _ = policy(**batch, head_fn=head_fn)
        loss.backward()
        norm = clip_gradients(policy)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / ranks
        dist.all_reduce(mean)
        log.step(mean, norm)
    return log


if __name__ == "__main__":
    with process_group() as device:
        log = main(device)
