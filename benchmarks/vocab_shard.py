"""Benchmark the local part of a rank's step on a vocabulary split over 2 and 4 ranks. Communication is not in it.

    python -m benchmarks.vocab_shard 8192:4096:128256 16384:2048:151936        tokens:hidden:vocabulary

One process computes as the first rank of a group whose collectives do nothing (torch's fake process group): their time,
their waits and their overlap with products are not measured. All targets are in the rank's rows, the most work that a
rank can have. The floor is the products of the rank's rows: three, and one for a reference or teacher.

"logits" contenders never take the fused epilogue. Both are equal where a step cannot take it, as in distillation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.harness import DEVICE, OURS, Contenders, Loss, Table, benchmark, gemm_floor, head_weight, hidden_states
from benchmarks.token_stats import forward_alone, objective
from liger_chunked import (
    LigerFusedLinearCrossEntropyLoss,
    LigerFusedLinearDPOLoss,
    LigerFusedLinearGRPOLoss,
    LigerFusedLinearJSDLoss,
    VocabShard,
    linear_token_stats,
)
from liger_chunked.engine import checks, stats, step
from liger_chunked.kernels.backend import has_wide_tiles
from liger_chunked.types import RankFacts

SHAPES = ["8192:4096:128256", "16384:2048:151936"]
SMALL = ["64:32:1024"]
RANKS = (2, 4)
BUDGETS = (None, "512MiB")
PAIRS, ROLLOUTS = 2, 8


@contextmanager
def only_rank() -> Iterator[None]:
    """Check no other ranks: those of a fake group do not answer."""
    check = checks._check_ranks
    checks._check_ranks = lambda shard, columns, input: RankFacts(columns, True)
    try:
        yield
    finally:
        checks._check_ranks = check


@contextmanager
def first_of(ranks: int) -> Iterator[None]:
    """Make this process the first rank of a fake group."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        with only_rank():
            yield
    finally:
        dist.destroy_process_group()


def with_epilogue(allowed: bool, build: Callable[[], Loss]) -> Callable[[], Loss]:
    def built() -> Loss:
        for module in (step, stats):
            module.has_wide_tiles = has_wide_tiles if allowed else lambda device: False  # type: ignore[assignment]
        return build()

    return built


def contenders(build: Callable[[str | None], Loss], budgets: Sequence[str | None] = BUDGETS) -> Contenders:
    found: dict[str, Callable[[], Loss]] = {}
    for budget in budgets:
        for allowed in (True, False):
            name = ", ".join(filter(None, (OURS, budget, None if allowed else "logits")))
            found[name] = with_epilogue(allowed, lambda budget=budget: build(budget))
    return found


def cross_entropy(shard: VocabShard, n: int) -> Callable[[str | None], Loss]:
    def build(budget: str | None) -> Loss:
        loss = LigerFusedLinearCrossEntropyLoss(logits_budget=budget)
        return lambda x, w, t, *_: loss(w, x, t, vocab_shard=shard)

    return build


def dpo(shard: VocabShard, n: int) -> Callable[[str | None], Loss]:
    shape = 2 * PAIRS, n // (2 * PAIRS)

    def build(budget: str | None) -> Loss:
        loss = LigerFusedLinearDPOLoss(logits_budget=budget)

        def run(x: Tensor, w: Tensor, t: Tensor, ref_x: Tensor, ref_w: Tensor) -> Tensor:
            x, t, ref_x = (y.unflatten(0, shape) for y in (x, t, ref_x))
            return loss(w, x, t, ref_input=ref_x, ref_weight=ref_w, vocab_shard=shard)[0]

        return run

    return build


def grpo(shard: VocabShard, n: int) -> Callable[[str | None], Loss]:
    shape = ROLLOUTS, n // ROLLOUTS
    advantages = torch.randn(ROLLOUTS, device=DEVICE)

    def build(budget: str | None) -> Loss:
        loss = LigerFusedLinearGRPOLoss(logits_budget=budget)

        def run(x: Tensor, w: Tensor, t: Tensor, *_: Tensor) -> Tensor:
            return loss(w, x.unflatten(0, shape), t.unflatten(0, shape), advantages, vocab_shard=shard)[0]

        return run

    return build


def jsd(shard: VocabShard, n: int) -> Callable[[str | None], Loss]:
    def build(budget: str | None) -> Loss:
        loss = LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0, logits_budget=budget)
        return lambda x, w, t, ref_x, ref_w: loss(w, x, ref_w, ref_x, vocab_shard=shard)[0]

    return build


def token_statistics(shard: VocabShard, n: int, *outputs: str) -> Callable[[str | None], Loss]:
    def build(budget: str | None) -> Loss:
        def run(x: Tensor, w: Tensor, t: Tensor, *_: Tensor) -> Tensor:
            found = linear_token_stats(w, x, t, outputs=outputs, logits_budget=budget, vocab_shard=shard)
            assert found.logps is not None
            return objective(found.logps, found.entropy)

        return run

    return build


def measure(table: Table, n: int, h: int, v: int) -> None:
    print("\nlocal work of one rank; COMMUNICATION IS NOT IN THESE TIMES: collectives do nothing", flush=True)
    for ranks in RANKS:
        rows = -(-v // ranks)
        floor = gemm_floor(n, h, rows)
        x, w = hidden_states(n, h).requires_grad_(), head_weight(rows, h).requires_grad_()
        # Close to its reference: large margins would saturate the loss.
        ref_x, ref_w = x.detach() + 0.1 * hidden_states(n, h), w.detach().clone()
        t = torch.randint(rows, (n,), device=DEVICE)
        inputs, leaves = (x, w, t, ref_x, ref_w), {"input": x, "weight": w}
        sizes = {"tokens": n, "hidden": h, "vocabulary": v, "ranks": ranks, "communication": "none"}
        of = f"{n}x{h}x{v}, one of {ranks} ranks, no communication"
        with first_of(ranks):
            shard = VocabShard(None, 0, v)
            both = token_statistics(shard, n, "logps", "entropy")
            tasks: dict[str, tuple[float, Contenders]] = {
                "cross entropy": (floor.all, contenders(cross_entropy(shard, n))),
                "DPO": (floor.all + floor.logits, contenders(dpo(shard, n))),
                "GRPO": (floor.all, contenders(grpo(shard, n))),
                "JSD": (floor.all + floor.logits, contenders(jsd(shard, n), [None])),
                "log-probabilities and entropies": (floor.all, contenders(both)),
            }
            for name, (ms, found) in tasks.items():
                table.measure(f"{name} {of}", ms, sizes, found, inputs, leaves)
            forward = {name: forward_alone(build) for name, build in contenders(both, [None]).items()}
            frozen = x.detach(), w.detach(), t
            table.measure(f"log-probabilities and entropies, forward {of}", floor.logits, sizes, forward, frozen, {})


def main(arguments: Sequence[str] | None = None) -> Path:
    return benchmark("vocab_shard", __doc__, "tokens:hidden:vocabulary", SHAPES, SMALL, measure, 0, arguments)


if __name__ == "__main__":
    main()
