"""Benchmark losses on an `lm_head` with LoRA: time, peak memory, and products of matrices.

python -m benchmarks.lora_head SFT:1:8192:2048:128256:16 DPO:2:2048:2048:128256:16
                               loss:sequences or pairs:length:hidden:vocabulary:rank

The head is frozen, and its adapter is in float32, as PEFT keeps it. Eager code is PEFT's own forward, and a loss on its
logits. Half of each DPO sequence is a prompt, and the reference is the head without the adapter. Further columns:

    products     FLOPs over those of one product of the tokens that have a target with the head, 2 N H V: a frozen head
                 needs two and a reference one more, and the products of the adapter are of its rank
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.harness import (
    BASELINE,
    DEVICE,
    OURS,
    Loss,
    LossRow,
    Table,
    benchmark,
    compiled,
    fill_loss,
    gemm_floor,
    head_weight,
    hidden_states,
)
from benchmarks.oracle import IGNORE_INDEX, token_gradients, token_statistics
from benchmarks.preference import BETA, dpo
from liger_chunked import (
    AdaptedWeight,
    LigerFusedLinearCrossEntropyLoss,
    LigerFusedLinearDPOLoss,
)

SHAPES = ["SFT:1:8192:2048:128256:16", "DPO:2:2048:2048:128256:16"]
SMALL = ["SFT:1:64:32:1024:4", "DPO:1:32:32:1024:4"]
BUDGETS = {"automatic": None, "1 GiB": 1 << 30, "256 MiB": 256 << 20}
SMALL_BUDGETS = {"automatic": None, "32 KiB": 32 << 10}
COMPILED = "torch.compile"


def _addmm_flops(_: object, a: Sequence[int], b: Sequence[int], *rest: object, **options: object) -> int:
    return 2 * a[0] * a[1] * b[1]


# FlopCounterMode does not count addmm_, nor, in torch 2.11, addmm with an `out_dtype`.
COUNTED = {torch.ops.aten.addmm_: _addmm_flops, torch.ops.aten.addmm: _addmm_flops}


@dataclass
class LoraRow(LossRow):
    """`products` are above; `budget` is the `logits_budget`, None for the automatic one."""

    products: float | None = None
    budget: int | None = None

    def measured(self, first: LossRow) -> str:
        products = "" if self.products is None else f"  {self.products:.3f} products"
        return f"{super().measured(first)}{products}"


class Batch:
    """A head with PEFT's adapter and the tensors of a step; a pair is two sequences, chosen then rejected."""

    def __init__(self, n: int, length: int, hidden: int, vocab: int, rank: int, prompt: float) -> None:
        model = nn.Module()
        model.lm_head = nn.Linear(hidden, vocab, bias=False, device="meta")
        model.lm_head.weight = nn.Parameter(head_weight(vocab, hidden))
        config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=["lm_head"], init_lora_weights=False)
        self.layer: Any = get_peft_model(model, config).base_model.model.lm_head
        self.scaling = self.layer.scaling["default"]
        self.down, self.up = self.layer.lora_A["default"].weight, self.layer.lora_B["default"].weight
        self.input = hidden_states(n, length, hidden).requires_grad_()
        self.ref_input = self.input.detach() + 0.1 * hidden_states(n, length, hidden)
        self.target = torch.randint(vocab, (n, length), device=DEVICE)
        self.target[:, : int(length * prompt)] = IGNORE_INDEX
        self.lengths = (self.target != IGNORE_INDEX).sum(-1)
        self.valid = int(self.lengths.sum())

    @property
    def base(self) -> Tensor:
        return self.layer.base_layer.weight

    @property
    def leaves(self) -> dict[str, Tensor]:
        return {"input": self.input, "down": self.down, "up": self.up}

    def weight(self) -> AdaptedWeight:
        layer = self.layer.lora_A["default"]
        return AdaptedWeight(self.base, self.up, lambda x: self.scaling * layer(x.to(self.down.dtype)))

    def logps(self, head: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Return eager log-probabilities of sequences, with PEFT's forward as the head."""
        tokens = head(x).float().log_softmax(-1).gather(2, self.target.clamp(min=0)[..., None])[..., 0]
        return (tokens * (self.target != IGNORE_INDEX)).sum(-1)

    def exact(self, objective: Callable[[Tensor, Tensor], Tensor]) -> dict[str, Tensor]:
        """Return the gradients in float64, from those of the dense head `base + scaling * up @ down`."""
        down, up = self.down.detach().double(), self.up.detach().double()
        dense = self.base.double() + self.scaling * up @ down
        found = token_gradients(self.input, dense, self.target, objective)
        of_dense = self.scaling * found["weight"]
        return {"input": found["input"], "down": up.t() @ of_dense, "up": of_dense @ down.t()}


@dataclass(frozen=True)
class Task:
    """A loss on a batch: eager, ours, its gradients in float64, and the share of a sequence that is a prompt."""

    eager: Callable[[Batch, Tensor], Tensor]
    module: Callable[..., nn.Module]
    ours: Callable[[nn.Module, Batch, Tensor], Tensor]
    exact: Callable[[Batch], dict[str, Tensor]]
    sequences: int = 1
    prompt: float = 0.0
    has_reference: bool = False


def eager_sft(batch: Batch, x: Tensor) -> Tensor:
    return F.cross_entropy(batch.layer(x).flatten(0, 1).float(), batch.target.flatten())


def our_sft(loss: nn.Module, batch: Batch, x: Tensor) -> Tensor:
    return loss(batch.weight(), x, batch.target)


def exact_sft(batch: Batch) -> dict[str, Tensor]:
    return batch.exact(lambda logps, entropy: -logps.mean())


def eager_dpo(batch: Batch, x: Tensor) -> Tensor:
    with torch.no_grad():
        reference = batch.logps(batch.layer.base_layer, batch.ref_input)
    return dpo(batch.logps(batch.layer, x), batch.lengths, reference)


def our_dpo(loss: nn.Module, batch: Batch, x: Tensor) -> Tensor:
    return loss(batch.weight(), x, batch.target, None, batch.ref_input, batch.base)[0]


def exact_dpo(batch: Batch) -> dict[str, Tensor]:
    reference = token_statistics(batch.ref_input, batch.base, batch.target)[0].sum(-1)
    return batch.exact(lambda logps, entropy: dpo(logps.sum(-1), batch.lengths, reference))


TASKS = {
    "SFT": Task(eager_sft, LigerFusedLinearCrossEntropyLoss, our_sft, exact_sft),
    "DPO": Task(
        eager_dpo, partial(LigerFusedLinearDPOLoss, beta=BETA), our_dpo, exact_dpo, 2, prompt=0.5, has_reference=True
    ),
}


def fill(
    row: LoraRow, build: Callable[[], Loss], batch: Batch, floor_ms: float, exact: Mapping[str, Tensor] | None
) -> None:
    loss = build()
    if not row.name.startswith(COMPILED):  # which counting would disable
        with FlopCounterMode(display=False, custom_mapping=COUNTED) as counter:
            loss(batch.input).backward()
        row.products = counter.get_total_flops() / (2 * batch.valid * batch.base.numel())
    fill_loss(row, lambda: loss, floor_ms, [batch.input], batch.leaves, exact)


def fill_ours(
    row: LoraRow, task: Task, batch: Batch, budget: int | None, floor_ms: float, exact: Mapping[str, Tensor] | None
) -> None:
    loss = task.module(logits_budget=budget)
    row.budget = budget
    fill(row, lambda: partial(task.ours, loss, batch), batch, floor_ms, exact)


def measure(table: Table, name: str, groups: int, length: int, hidden: int, vocab: int, rank: int) -> None:
    task = TASKS[name]
    batch = Batch(task.sequences * groups, length, hidden, vocab, rank, task.prompt)
    floor = gemm_floor(batch.valid, hidden, vocab)
    floor_ms = floor.logits + floor.dx + (floor.logits if task.has_reference else 0)
    measured: dict[str, Any] = {"batch": batch, "floor_ms": floor_ms}
    measured["exact"] = None if table.args.no_errors else task.exact(batch)
    eager = partial(task.eager, batch)
    fills = {BASELINE: partial(fill, build=lambda: eager, **measured)}
    for text, budget in (BUDGETS if DEVICE == "cuda" else SMALL_BUDGETS).items():
        fills[f"{OURS}, {text}"] = partial(fill_ours, task=task, budget=budget, **measured)
    fills[COMPILED] = partial(fill, build=compiled(eager), **measured)
    facts = {"groups": groups, "length": length, "hidden": hidden, "vocabulary": vocab, "rank": rank}
    sizes = f"{groups}x{task.sequences}x{length}x{hidden}x{vocab}, rank {rank}"
    table.compare(f"{name} {sizes}", {"floor_ms": floor_ms, **facts}, fills, LoraRow, f"floor {floor_ms:.2f} ms")


def main(arguments: Sequence[str] | None = None) -> Path:
    sizes = "loss:sequences or pairs:length:hidden:vocabulary:rank"
    return benchmark("lora_head", __doc__, sizes, SHAPES, SMALL, measure, 100, arguments)


if __name__ == "__main__":
    main()
