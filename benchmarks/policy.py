"""Benchmark GRPO on an `lm_head`, forward and backward, against eager torch and the installed peers.

    python -m benchmarks.policy 8:2048:2048:151936        sequences:length:hidden:vocabulary

The mean entropy is computed with the loss, because trainers log it. In a second task it is also a bonus in the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.harness import (
    DEVICE,
    Contenders,
    Loss,
    Table,
    benchmark,
    compiled,
    gemm_floor,
    head_weight,
    hidden_states,
)
from benchmarks.oracle import token_gradients, token_statistics
from benchmarks.peers import trl_token_stats
from liger_chunked import LigerFusedLinearGRPOLoss

SHAPES = ["8:2048:2048:151936"]
SMALL = ["2:16:32:1024"]


def grpo(logps: Tensor, old_logps: Tensor, advantages: Tensor) -> Tensor:
    """Return PPO's clipped surrogate of (B, T), (B, T), (B,); all sequences have the same length."""
    ratio, advantages = (logps - old_logps).exp(), advantages[:, None]
    return -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()


@dataclass(frozen=True)
class Task:
    """GRPO with an entropy bonus; contenders are functions of (input, weight, target, advantages, old logps)."""

    entropy_coef: float

    def formula(self, logps: Tensor, entropy: Tensor, advantages: Tensor, old_logps: Tensor) -> Tensor:
        loss = grpo(logps, old_logps, advantages)
        return loss - self.entropy_coef * entropy.mean() if self.entropy_coef else loss

    def eager(self, x: Tensor, w: Tensor, t: Tensor, advantages: Tensor, old_logps: Tensor) -> Tensor:
        log_p = (x @ w.t()).float().log_softmax(-1)
        with torch.set_grad_enabled(self.entropy_coef != 0):
            entropy = -(log_p.exp() * log_p).sum(-1)
        return self.formula(log_p.gather(2, t[..., None])[..., 0], entropy, advantages, old_logps)

    def ours(self) -> Loss:
        loss = LigerFusedLinearGRPOLoss(entropy_coef=self.entropy_coef)
        return lambda x, w, t, advantages, old_logps: loss(w, x, t, advantages, old_logps=old_logps)[0]

    def trl(self) -> Loss:
        token_stats = trl_token_stats("log_probs", "entropy")

        def loss(x: Tensor, w: Tensor, t: Tensor, advantages: Tensor, old_logps: Tensor) -> Tensor:
            logps, entropy = token_stats(x.flatten(0, 1), w, t.flatten())
            return self.formula(logps.view(t.shape), entropy.view(t.shape), advantages, old_logps)

        return loss

    def contenders(self) -> Contenders:
        peers: Contenders = {"torch.compile": compiled(self.eager), "trl": self.trl}
        if not self.entropy_coef:
            peers = {**peers, "liger-kernel": liger}
        return {"eager": lambda: self.eager, "liger_chunked": self.ours, **peers}


def liger() -> Loss:
    """Return Liger-Kernel's loss, which does not compute the entropy."""
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss as Liger

    loss = Liger(beta=0.0, use_ref_model=False)

    def run(x: Tensor, w: Tensor, t: Tensor, advantages: Tensor, old_logps: Tensor) -> Tensor:
        return loss(x, w, t, torch.ones_like(old_logps), advantages, old_per_token_logps=old_logps)[0]

    return run


TASKS = {"GRPO": Task(0.0), "GRPO, entropy bonus": Task(0.01)}


def measure(table: Table, b: int, length: int, h: int, v: int) -> None:
    floor = gemm_floor(b * length, h, v).all
    x, w = hidden_states(b, length, h).requires_grad_(), head_weight(v, h).requires_grad_()
    t = torch.randint(v, (b, length), device=DEVICE)
    advantages = torch.randn(b, device=DEVICE)
    # Keep the policy close to the sampler: clipped tokens have no gradient, and products with zeros run faster.
    logps = token_statistics(x.detach(), w.detach(), t)[0]
    old_logps = logps.float() + 0.02 * torch.randn(b, length, device=DEVICE)
    inputs = (x, w, t, advantages, old_logps)
    for name, task in TASKS.items():
        table.measure(
            f"{name} {b}x{length}x{h}x{v}",
            floor,
            {"sequences": b, "length": length, "hidden": h, "vocabulary": v},
            task.contenders(),
            inputs,
            {"input": x, "weight": w},
            lambda task=task: token_gradients(
                x, w, t, lambda logps, entropy: task.formula(logps, entropy, advantages, old_logps)
            ),
        )


def main(arguments: Sequence[str] | None = None) -> Path:
    return benchmark("policy", __doc__, "sequences:length:hidden:vocabulary", SHAPES, SMALL, measure, 60, arguments)


if __name__ == "__main__":
    main()
