"""Benchmark log-probabilities and entropies of tokens, from hidden states, against the installed peers.

python -m benchmarks.token_stats 8192:4096:128256 32768:896:151936        tokens:hidden:vocabulary

Each shape is three tasks: log-probabilities with their backward; entropies as well, both with a gradient; and
log-probabilities without a backward, as of a reference or an old policy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import DEVICE, Contenders, Loss, Table, benchmark, gemm_floor, head_weight, hidden_states
from benchmarks.oracle import token_gradients
from benchmarks.peers import trl_token_stats
from liger_chunked import linear_token_stats

SHAPES = ["8192:4096:128256", "8192:1536:151936", "32768:896:151936", "65536:2048:151936"]
SMALL = ["128:32:1024"]
BUDGETS = ("256MiB", "512MiB", "1GiB")
ENTROPY_COEF = 0.01


def objective(logps: Tensor, entropy: Tensor | None) -> Tensor:
    """A policy gradient of equal advantages, with an entropy bonus."""
    loss = -logps.mean()
    return loss if entropy is None else loss - ENTROPY_COEF * entropy.mean()


def ours(budget: str, entropy: bool, **options: Any) -> Callable[[], Loss]:
    outputs = ("logps", "entropy") if entropy else ("logps",)

    def loss(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
        stats = linear_token_stats(w, x, t, outputs=outputs, logits_budget=budget, **options)
        return objective(stats.logps, stats.entropy)

    return lambda: loss


def trl(entropy: bool) -> Callable[[], Loss]:
    def build() -> Loss:
        token_stats = trl_token_stats(*(("log_probs", "entropy") if entropy else ("log_probs",)))

        def loss(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
            found = token_stats(x, w, t)
            return objective(found[0], found[1] if entropy else None)

        return loss

    return build


def liger(entropy: bool) -> Callable[[], Loss]:
    def build() -> Loss:
        from liger_kernel.ops.cutedsl.ops import fused_scaled_cross_entropy_sm90 as cute

        function = cute.LigerFusedScaledCrossEntropySM90Function

        def loss(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
            if not entropy:
                return objective(-function.apply(x, w, t), None)
            nll, of_tokens = function.apply(x, w, t, 1.0, -100, 1, True)
            return objective(-nll, of_tokens)

        return loss

    return build


def cut_cross_entropy() -> Loss:
    from cut_cross_entropy import linear_cross_entropy

    return lambda x, w, t: linear_cross_entropy(x, w, t, reduction="none", filter_eps=None).mean()


def contenders(entropy: bool) -> Contenders:
    found: dict[str, Callable[[], Loss]] = {f"liger_chunked, {budget}": ours(budget, entropy) for budget in BUDGETS}
    found["liger_chunked, 256MiB, float32 logits"] = ours("256MiB", entropy, logits_dtype=torch.float32)
    peers: dict[str, Callable[[], Loss]] = {"trl": trl(entropy), "liger-kernel, CuTe": liger(entropy)}
    if not entropy:
        peers["cut-cross-entropy, exact"] = cut_cross_entropy
    return found | peers


def forward_alone(build: Callable[[], Loss]) -> Callable[[], Loss]:
    """Return a loss without its own backward: a leaf of one element takes the gradient."""

    def built() -> Loss:
        loss = build()
        one = torch.ones((), device=DEVICE, requires_grad=True)

        def run(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
            with torch.no_grad():
                value = loss(x, w, t)
            return value * one

        return run

    return built


def measure(table: Table, n: int, h: int, v: int) -> None:
    x, w = hidden_states(n, h).requires_grad_(), head_weight(v, h).requires_grad_()
    t = torch.randint(v, (n,), device=DEVICE)
    floor, sizes = gemm_floor(n, h, v), {"tokens": n, "hidden": h, "vocabulary": v}
    for entropy in (False, True):
        table.measure(
            f"{'log-probabilities and entropies' if entropy else 'log-probabilities'} {n}x{h}x{v}",
            floor.all,
            sizes,
            contenders(entropy),
            (x, w, t),
            {"input": x, "weight": w},
            lambda entropy=entropy: token_gradients(x, w, t, lambda p, e: objective(p, e if entropy else None)),
        )
    forward = {name: forward_alone(build) for name, build in contenders(False).items()}
    table.measure(
        f"log-probabilities, forward {n}x{h}x{v}", floor.logits, sizes, forward, (x.detach(), w.detach(), t), {}
    )


def main(arguments: Sequence[str] | None = None) -> Path:
    return benchmark("token_stats", __doc__, "tokens:hidden:vocabulary", SHAPES, SMALL, measure, 100, arguments)


if __name__ == "__main__":
    main()
