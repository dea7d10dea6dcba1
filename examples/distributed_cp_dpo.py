"""DPO of one long pair under context parallelism: a rank has some positions of both sequences.

torchrun --nproc-per-node 2 examples/distributed_cp_dpo.py
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from distributed_common import Log, clip_gradients, process_group, tokens
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard
from toy import sums, tiny_model
from transformers import AttentionInterface

from liger_chunked import LigerFusedLinearDPOLoss, linear_token_stats
from liger_chunked.integrations.transformers import HeadInput, attach_head
from liger_chunked.types import Head

STEPS = 20


def gathered(x: Tensor, dim: int) -> Tensor:
    """Return the parts of all ranks, in the order of the ranks. The gradient is summed over them, and split again."""
    # On gloo, torch.distributed.nn.functional.all_gather (torch 2.13) permutes gradients that are not contiguous.
    mesh = init_device_mesh(x.device.type, (dist.get_world_size(),))
    return DTensor.from_local(x, mesh, [Shard(dim)], run_check=False).full_tensor(grad_placements=[Partial()])


def context_parallel_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, *, position_ids: Tensor, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attend from this rank's queries to the keys and values of all ranks, as in the training of Llama 3."""
    causal = position_ids[0, :, None] >= gathered(position_ids, 1)[0]
    key, value = gathered(key, 2), gathered(value, 2)  # (B, heads, T, head size)
    output = F.scaled_dot_product_attention(query, key, value, attn_mask=causal, scale=kwargs["scaling"])
    return output.transpose(1, 2), None


def long_pair(device: torch.device) -> dict[str, Tensor]:
    """Return token ids and labels (2, T) of a chosen and a rejected sequence: many sums in a row."""
    rows = sums(32)
    answers = {kind: "\n".join(row["prompt"] + row[kind] for row in rows) for kind in ("chosen", "rejected")}
    return tokens([{"prompt": "Add.\n", **answers}], ("chosen", "rejected"), device)


def own_part(ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Return this rank's positions: an early and a late piece, so that all ranks have as much causal attention.

    Labels are shifted first: a piece's last position predicts the first token of another piece.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    target = F.pad(labels[:, 1:], (0, 1), value=-100)
    padding = -ids.shape[1] % (2 * ranks)
    ids, target = F.pad(ids, (0, padding)), F.pad(target, (0, padding), value=-100)
    positions = torch.arange(ids.shape[1], device=ids.device)[None]

    def part(x: Tensor) -> Tensor:
        pieces = x.chunk(2 * ranks, dim=1)
        return torch.cat([pieces[rank], pieces[-1 - rank]], dim=1)

    return {"input_ids": part(ids), "position_ids": part(positions), "shift_labels": part(target)}


def token_logps(head: Head, input: HeadInput) -> Tensor:
    """Return the log-probability of each target of this rank: (2, T / ranks). Tokens need no other rank."""
    options = asdict(input.options)
    return linear_token_stats(head.weight, input.hidden_states, input.target, head.bias, **options).logps


def main(device: torch.device) -> Log:
    AttentionInterface.register("context_parallel", context_parallel_attention)
    model = tiny_model().to(device).train()
    model.set_attn_implementation("context_parallel")
    attach_head(model)
    # Weights are sharded over the ranks that split the sequences.
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    pair = long_pair(device)
    batch = own_part(pair["input_ids"], pair["labels"])
    with torch.no_grad():  # before the first step the policy is the reference
        ref_logps = model(**batch, head_fn=token_logps)
    dpo = LigerFusedLinearDPOLoss(beta=0.1, use_ref_model=True)

    def head_fn(head: Head, input: HeadInput) -> Tensor:
        loss, _ = input.loss(dpo, head, ref_logps=ref_logps, sequence_group=dist.group.WORLD)
        return loss

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    log = Log()
    for _ in range(STEPS):
        loss = model(**batch, head_fn=head_fn)
        # All ranks have the loss of the whole pair, and each rank its share of the gradients. Their sum is wanted, and
        # FSDP averages, so multiply by the number of ranks.
        (dist.get_world_size() * loss).backward()
        norm = clip_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        log.step(loss.detach(), norm)
    return log


if __name__ == "__main__":
    with process_group() as device:
        log = main(device)
