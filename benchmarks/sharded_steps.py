"""Training steps of a model that is sharded over the ranks of a process group; `benchmarks/distributed.py` runs them.

- TP: `parallelize_module` splits the layers, the embedding and the head. All ranks train on the same batch.
- FSDP: `fully_shard` on each layer and on the rest, the head included. Each rank trains on its own batch.

Contenders are transformers' model unchanged, patched by this library, and patched by Liger-Kernel, as in
`benchmarks/sft.py`: bfloat16, AdamW with a learning rate of 0, all layers checkpointed. SFT calls the model with
labels. DPO trains on the second half of each sequence; a frozen reference has the policy's first weights, and computes
hidden states, or logits for stock, in the same step. Liger-Kernel's DPO loss is its chunked loss; "layers" are its
layer kernels with stock's loss.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import PreTrainedModel

from benchmarks import models
from benchmarks.harness import DEVICE, OURS, STOCK, median_ms, peak_mib
from benchmarks.preference import BETA, dpo
from benchmarks.ranks import Answer, agreed
from benchmarks.steps import TrainingStep, allocated_mib
from liger_chunked import LigerFusedLinearDPOLoss

LIGER, LAYERS = "liger-kernel", "liger-kernel layers"
# Liger-Kernel's losses take no DTensor.
CONTENDERS = {"TP": (STOCK, OURS, LAYERS, LIGER), "FSDP": (STOCK, OURS, LIGER)}
REPEATS = 3
IGNORE_INDEX = -100
LAYER = {
    "self_attn.q_proj": ColwiseParallel(),
    "self_attn.k_proj": ColwiseParallel(),
    "self_attn.v_proj": ColwiseParallel(),
    "self_attn.o_proj": RowwiseParallel(),
    "mlp.gate_proj": ColwiseParallel(),
    "mlp.up_proj": ColwiseParallel(),
    "mlp.down_proj": RowwiseParallel(),
}
ENDS = {
    "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
    "lm_head": ColwiseParallel(output_layouts=Replicate()),
}


@functools.cache
def mesh() -> DeviceMesh:
    return init_device_mesh(DEVICE, (dist.get_world_size(),))


def shard_tensors(model: PreTrainedModel) -> None:
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    for layer in model.model.layers:
        parallelize_module(layer, mesh(), LAYER)
    parallelize_module(model, mesh(), ENDS)
    if tied:
        model.lm_head.weight = model.model.embed_tokens.weight


class Trainee(nn.Module):
    """Returns the loss of a batch. The root of FSDP, which gathers the heads for all of its forward."""

    def __init__(self, policy: PreTrainedModel, reference: PreTrainedModel | None, contender: str) -> None:
        super().__init__()
        self.policy, self.reference, self.contender = policy, reference, contender

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        if self.reference is None:
            return self.policy(input_ids=ids, labels=ids, use_cache=False).loss
        loss = stock_dpo if self.contender in (STOCK, LAYERS) else fused_dpo(self.contender)
        return loss(self.policy, self.reference, ids, target)


def stock_dpo(policy: PreTrainedModel, reference: PreTrainedModel, ids: Tensor, target: Tensor) -> Tensor:
    mask = target != IGNORE_INDEX

    def logps(model: PreTrainedModel) -> Tensor:
        logits = model(input_ids=ids, use_cache=False).logits
        index = target.clamp(min=0)[..., None]
        # Row by row, so that float32 copies are small.
        rows = [z.float().log_softmax(-1).gather(-1, i)[..., 0] for z, i in zip(logits, index, strict=True)]
        return (torch.stack(rows) * mask).sum(-1)

    with torch.no_grad():
        of_reference = logps(reference)
    return dpo(logps(policy), mask.sum(-1), of_reference)


def fused_dpo(contender: str) -> Callable[..., Tensor]:
    if contender == OURS:
        loss: Any = LigerFusedLinearDPOLoss(beta=BETA)
    else:
        from liger_kernel.chunked_loss import LigerFusedLinearDPOLoss as Liger

        loss = Liger(beta=BETA)

    def run(policy: PreTrainedModel, reference: PreTrainedModel, ids: Tensor, target: Tensor) -> Tensor:
        with torch.no_grad():
            of_reference = reference.model(input_ids=ids, use_cache=False).last_hidden_state
        hidden = policy.model(input_ids=ids, use_cache=False).last_hidden_state
        return loss(policy.lm_head.weight, hidden, target, None, of_reference, reference.lm_head.weight)[0]

    return run


def build(patches: ExitStack, way: str, kind: str, model: str, contender: str) -> Trainee:
    """Return the sharded and patched models. Closing `patches` removes the patches."""
    policy = models.build(model)
    reference = models.build(model, checkpointing=False).requires_grad_(False) if kind == "DPO" else None
    every = [x for x in (policy, reference) if x is not None]
    if contender in (LIGER, LAYERS):
        # Before sharding, which changes the classes of modules.
        patches.enter_context(models.liger_kernel(*every, fused=kind == "SFT" and contender == LIGER))
    trainee = Trainee(policy, reference, contender)
    if way == "TP":
        for x in every:
            shard_tensors(x)
    else:
        for x in every:
            for layer in x.model.layers:
                fully_shard(layer, mesh=mesh())
        fully_shard(trainee, mesh=mesh())
    if contender == OURS:
        patches.enter_context(models.ours(*every, fused=kind == "SFT"))
    return trainee


def batch(way: str, kind: str, model: str, n: int, length: int) -> tuple[Tensor, Tensor]:
    """Return random ids, and the target of each position."""
    torch.manual_seed(1 + (dist.get_rank() if way == "FSDP" else 0))
    ids = torch.randint(3, models.vocabulary(model), (n, length), device=DEVICE)
    target = torch.full_like(ids, IGNORE_INDEX)
    start = length // 2 if kind == "DPO" else 1
    target[:, start - 1 : -1] = ids[:, start:]
    return ids, target


def optimizer_of(trainee: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW, whose groups hold DTensors or plain parameters: one kernel cannot update both."""
    parameters = [p for p in trainee.parameters() if p.requires_grad]
    kinds = [[p for p in parameters if isinstance(p, DTensor) == sharded] for sharded in (True, False)]
    return torch.optim.AdamW([{"params": kind} for kind in kinds if kind], lr=0.0, fused=True)


def norm_of(optimizer: torch.optim.Optimizer) -> float:
    total = torch.zeros((), device=DEVICE)
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        if p.grad is not None:
            norm = torch.linalg.vector_norm(p.grad, dtype=torch.float32)
            total += (norm.full_tensor() if isinstance(norm, DTensor) else norm).square()
    return total.sqrt().item()


def measure(way: str, kind: str, model: str, n: int, length: int, contender: str) -> Answer:
    """Measure a training step on this rank, at the same time as on the others."""
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
    before = allocated_mib()
    with ExitStack() as patches:
        trainee = build(patches, way, kind, model, contender)
        ids, target = batch(way, kind, model, n, length)
        optimizer = optimizer_of(trainee)

        def backward() -> Tensor:
            loss = trainee(ids, target)
            loss.backward()
            return loss.detach()

        step = TrainingStep(backward, optimizer)
        loss, norm = backward().item(), norm_of(optimizer)
        optimizer.step()  # which creates the optimizer's state
        optimizer.zero_grad()
        peak = peak_mib(step, ())
        found: Answer = {"loss": loss, "grad_norm": norm, "mib": None if peak is None else agreed(peak)}
        if peak is not None:
            found["resident_mib"] = round(agreed(allocated_mib() - before), 1)
        ms = found["ms"] = round(agreed(median_ms(step, REPEATS, warmup=0)), 3)
        of_rank = n * length / (dist.get_world_size() if way == "TP" else 1)
        return found | {"tokens_per_s": round(of_rank / ms * 1e3, 1)}
