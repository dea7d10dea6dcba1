"""Write your own loss on each of the four bases: you define the cost of an example, and the base does the rest.

    python examples/custom_loss.py

Each class below is a complete loss. Its gradients are computed in forward, without logits. The script compares each
loss with the same loss on full logits and prints the largest difference.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_chunked import (
    Examples,
    LigerFusedLinearDistillationBase,
    LigerFusedLinearPolicyBase,
    LigerFusedLinearPreferenceBase,
    LigerFusedLinearUnpairedPreferenceBase,
    Pairs,
    Rollouts,
)


class SimPOWithMargin(LigerFusedLinearPreferenceBase):
    """Pairs: the chosen sequence should be likelier per token, by a margin of 0.5 in the logit."""

    def preference_loss(self, pairs: Pairs) -> Tensor:
        chosen, rejected = (pairs.logps / pairs.lengths).unbind(-1)
        return -F.logsigmoid(self.beta * (chosen - rejected) - 0.5)


class Hinge(LigerFusedLinearUnpairedPreferenceBase):
    """Labelled sequences: push the log-ratio to the right side of a margin."""

    def preference_loss(self, examples: Examples) -> Tensor:
        return torch.relu(1 - self.beta * examples.signs * examples.logratios)


class PPO(LigerFusedLinearPolicyBase):
    """Rollouts: the clipped surrogate, for each token."""

    scope = "token"

    def policy_loss(self, rollouts: Rollouts) -> Tensor:
        clipped = rollouts.ratio.clamp(0.8, 1.2)
        return -torch.min(rollouts.ratio * rollouts.advantages, clipped * rollouts.advantages)


class Hellinger(LigerFusedLinearDistillationBase):
    """Distributions: half the squared distance of their square roots."""

    def divergence(self, student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
        p, q = student_logits.softmax(-1), teacher_logits.softmax(-1)
        return 1 - (p.sqrt() * q.sqrt()).sum(-1)


def compare(name: str, fused: Callable[[Tensor, Tensor], Tensor], eager: Callable[[Tensor, Tensor], Tensor]) -> float:
    """Return the largest difference of the loss and its gradients, on a random head and random hidden states."""
    torch.manual_seed(0)
    weight, hidden = torch.randn(100, 16) / 4, torch.randn(4, 8, 16)
    results = []
    for loss in (fused, eager):
        leaves = weight.clone().requires_grad_(), hidden.clone().requires_grad_()
        value = loss(*leaves)
        results.append((value.detach(), *torch.autograd.grad(value, leaves)))
    difference = max(float((a - b).abs().max()) for a, b in zip(*results, strict=True))
    print(f"{name:16s} loss {float(results[0][0]):.4f}, largest difference to full logits {difference:.1e}")
    return difference


def main() -> list[float]:
    torch.manual_seed(1)
    target = torch.randint(100, (4, 8))  # chosen, chosen, rejected, rejected for pairs
    labels = torch.tensor([True, False, False, True])
    advantages, old_logps = torch.randn(4), torch.randn(4, 8) - 5
    teacher_weight, teacher_hidden = torch.randn(100, 24) / 5, torch.randn(4, 8, 24)

    def token_logps(weight: Tensor, hidden: Tensor) -> Tensor:
        return (hidden @ weight.T).log_softmax(-1).gather(-1, target[..., None])[..., 0]

    def simpo(weight: Tensor, hidden: Tensor) -> Tensor:
        chosen, rejected = token_logps(weight, hidden).mean(-1).chunk(2)
        return -F.logsigmoid(2.0 * (chosen - rejected) - 0.5).mean()

    def hinge(weight: Tensor, hidden: Tensor) -> Tensor:
        return torch.relu(1 - 0.1 * torch.where(labels, 1, -1) * token_logps(weight, hidden).sum(-1)).mean()

    def ppo(weight: Tensor, hidden: Tensor) -> Tensor:
        ratio, a = (token_logps(weight, hidden) - old_logps).exp(), advantages[:, None]
        return -torch.min(ratio * a, ratio.clamp(0.8, 1.2) * a).mean()

    def hellinger(weight: Tensor, hidden: Tensor) -> Tensor:
        p, q = (hidden @ weight.T).softmax(-1), (teacher_hidden @ teacher_weight.T).softmax(-1)
        return (1 - (p * q).sqrt().sum(-1)).mean()

    soft = {"weight_hard_loss": 0.0, "weight_soft_loss": 1.0}
    return [
        compare("SimPOWithMargin", lambda w, x: SimPOWithMargin(beta=2.0)(w, x, target)[0], simpo),
        compare("Hinge", lambda w, x: Hinge(beta=0.1, use_ref_model=False)(w, x, target, labels)[0], hinge),
        compare("PPO", lambda w, x: PPO(reduction="bnpo")(w, x, target, advantages, old_logps=old_logps)[0], ppo),
        compare("Hellinger", lambda w, x: Hellinger(**soft)(w, x, teacher_weight, teacher_hidden)[0], hellinger),
    ]


if __name__ == "__main__":
    main()
