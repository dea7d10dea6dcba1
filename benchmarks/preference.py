"""Benchmark preference losses on an `lm_head`, forward and backward, against eager torch and the installed peers.

    python -m benchmarks.preference ORPO:4:2048:4096:128256:0.5      loss:pairs:length:hidden:vocabulary:prompt share

DPO has a reference model, given as hidden states and a head: its floor is four products, that of the others three.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
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
from benchmarks.oracle import IGNORE_INDEX, token_gradients, token_statistics
from benchmarks.peers import trl_token_stats
from liger_chunked import (
    LigerFusedLinearCPOLoss,
    LigerFusedLinearDPOLoss,
    LigerFusedLinearKTOLoss,
    LigerFusedLinearORPOLoss,
    LigerFusedLinearSimPOLoss,
)

SHAPES = ["all:4:2048:4096:128256:0.5", "DPO:1:16384:2048:151936:0", "DPO:2:512:1024:32000:0"]
SMALL = ["all:1:32:32:1024:0.5"]
BETA = 0.1


def dpo(logps: Tensor, lengths: Tensor, ref_logps: Tensor | None) -> Tensor:
    """Return the loss from log-probabilities of sequences (2 n,), chosen then rejected, as the functions below do."""
    assert ref_logps is not None
    chosen, rejected = (logps - ref_logps).chunk(2)
    return -F.logsigmoid(BETA * (chosen - rejected)).mean()


def nll(logps: Tensor, lengths: Tensor) -> Tensor:
    """Return the mean NLL of the chosen sequences' tokens."""
    return -logps.chunk(2)[0].sum() / lengths.chunk(2)[0].sum()


def orpo(logps: Tensor, lengths: Tensor, ref_logps: Tensor | None) -> Tensor:
    means = logps / lengths
    chosen, rejected = (means - torch.log1p(-means.exp())).chunk(2)
    return nll(logps, lengths) - BETA * F.logsigmoid(chosen - rejected).mean()


def cpo(logps: Tensor, lengths: Tensor, ref_logps: Tensor | None) -> Tensor:
    chosen, rejected = logps.chunk(2)
    return nll(logps, lengths) - F.logsigmoid(BETA * (chosen - rejected)).mean()


def simpo(logps: Tensor, lengths: Tensor, ref_logps: Tensor | None) -> Tensor:
    chosen, rejected = (logps / lengths).chunk(2)
    return -F.logsigmoid(BETA * (chosen - rejected) - 0.5).mean()


def kto(logps: Tensor, lengths: Tensor, ref_logps: Tensor | None) -> Tensor:
    """Return KTO without a reference and with a KL of 0; the first half of the batch is desirable."""
    desirable, undesirable = (BETA * logps / lengths).chunk(2)
    return torch.cat([torch.sigmoid(-desirable), torch.sigmoid(undesirable)]).mean()


@dataclass(frozen=True)
class Task:
    """A loss in plain torch, and its fused contenders; `ours` and `liger` take (input, weight, target, reference
    input, reference weight)."""

    formula: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    ours: Callable[[], Loss]
    liger: Callable[[], Loss]
    with_reference: bool = False

    def eager(self, x: Tensor, w: Tensor, t: Tensor, ref_x: Tensor, ref_w: Tensor) -> Tensor:
        mask = t != IGNORE_INDEX

        def logps(x: Tensor, w: Tensor) -> Tensor:
            tokens = (x @ w.t()).float().log_softmax(-1).gather(2, t.clamp(min=0)[..., None])[..., 0]
            return (tokens * mask).sum(-1)

        reference = None
        if self.with_reference:
            with torch.no_grad():
                reference = logps(ref_x, ref_w)
        return self.formula(logps(x, w), mask.sum(-1), reference)

    def trl(self) -> Loss:
        token_stats = trl_token_stats("log_probs")

        def loss(x: Tensor, w: Tensor, t: Tensor, ref_x: Tensor, ref_w: Tensor) -> Tensor:
            mask = t != IGNORE_INDEX

            def logps(x: Tensor, w: Tensor) -> Tensor:
                values = token_stats(x[mask], w, t[mask])[0]
                return values.new_zeros(mask.shape).masked_scatter(mask, values).sum(-1)

            reference = None
            if self.with_reference:
                with torch.no_grad():
                    reference = logps(ref_x, ref_w)
            return self.formula(logps(x, w), mask.sum(-1), reference)

        return loss

    def expected(self, x: Tensor, w: Tensor, t: Tensor, ref_x: Tensor, ref_w: Tensor) -> dict[str, Tensor]:
        lengths = (t != IGNORE_INDEX).sum(-1)
        reference = token_statistics(ref_x, ref_w, t)[0].sum(-1) if self.with_reference else None
        return token_gradients(x, w, t, lambda logps, entropy: self.formula(logps.sum(-1), lengths, reference))

    def contenders(self) -> Contenders:
        return {
            "eager": lambda: self.eager,
            "liger_chunked": self.ours,
            "torch.compile": compiled(self.eager),
            "liger-kernel": self.liger,
            "trl": self.trl,
        }


def our_dpo() -> Loss:
    loss = LigerFusedLinearDPOLoss(beta=BETA)
    return lambda x, w, t, ref_x, ref_w: loss(w, x, t, None, ref_x, ref_w)[0]


def liger_dpo() -> Loss:
    from liger_kernel.chunked_loss import LigerFusedLinearDPOLoss as Liger

    loss = Liger(beta=BETA)
    return lambda x, w, t, ref_x, ref_w: loss(w, x, t, None, ref_x, ref_w)[0]


def our_reference_free(kind: type[torch.nn.Module]) -> Callable[[], Loss]:
    def build() -> Loss:
        loss = kind(beta=BETA)
        return lambda x, w, t, ref_x, ref_w: loss(w, x, t)[0]

    return build


def liger_reference_free(name: str, **settings: bool) -> Callable[[], Loss]:
    def build() -> Loss:
        from liger_kernel import chunked_loss

        loss = getattr(chunked_loss, f"LigerFusedLinear{name}Loss")(beta=BETA, **settings)
        return lambda x, w, t, ref_x, ref_w: loss(w, x, t)[0]

    return build


def first_half(x: Tensor) -> Tensor:
    return torch.arange(x.shape[0], device=x.device) < x.shape[0] // 2


def our_kto() -> Loss:
    # Without a reference, sums over tokens would saturate the sigmoid, and products with zeros run faster.
    loss = LigerFusedLinearKTOLoss(beta=BETA, average_log_prob=True, use_ref_model=False)
    return lambda x, w, t, ref_x, ref_w: loss(w, x, t, first_half(x), kl=0.0)[0]


def liger_kto() -> Loss:
    from liger_kernel.chunked_loss import LigerFusedLinearKTOLoss as Liger

    loss = Liger(beta=BETA, average_log_prob=True)

    def run(x: Tensor, w: Tensor, t: Tensor, ref_x: Tensor, ref_w: Tensor) -> Tensor:
        return loss(x, w, t, preference_labels=first_half(x), kl=torch.zeros(1, device=x.device))[0]

    return run


TASKS = {
    "DPO": Task(dpo, our_dpo, liger_dpo, with_reference=True),
    "ORPO": Task(orpo, our_reference_free(LigerFusedLinearORPOLoss), liger_reference_free("ORPO")),
    "CPO": Task(cpo, our_reference_free(LigerFusedLinearCPOLoss), liger_reference_free("CPO")),
    "SimPO": Task(
        simpo,
        our_reference_free(LigerFusedLinearSimPOLoss),
        liger_reference_free("SimPO", compute_nll_loss=False),
    ),
    "KTO": Task(kto, our_kto, liger_kto),
}


def measure(table: Table, loss: str, pairs: int, length: int, h: int, v: int, prompt: float) -> None:
    n_prompt = int(length * prompt)
    floor = gemm_floor(2 * pairs * (length - n_prompt), h, v)
    x, w = hidden_states(2 * pairs, length, h).requires_grad_(), head_weight(v, h).requires_grad_()
    # Keep the policy close to its reference: large margins would saturate the loss.
    ref_x, ref_w = x.detach() + 0.1 * hidden_states(*x.shape), w.detach().clone()
    t = torch.randint(v, (2 * pairs, length), device=DEVICE)
    t[:, :n_prompt] = IGNORE_INDEX
    inputs = (x, w, t, ref_x, ref_w)
    for name in TASKS if loss == "all" else [loss]:
        task = TASKS[name]
        table.measure(
            f"{name} {pairs}x2x{length}x{h}x{v}" + (f", prompt {prompt:g}" if prompt else ""),
            floor.all + (floor.logits if task.with_reference else 0),
            {"pairs": pairs, "length": length, "hidden": h, "vocabulary": v, "prompt": prompt},
            task.contenders(),
            inputs,
            {"input": x, "weight": w},
            lambda task=task: task.expected(*inputs),
        )


def main(arguments: Sequence[str] | None = None) -> Path:
    sizes = "loss or all:pairs:length:hidden:vocabulary:prompt share"
    return benchmark("preference", __doc__, sizes, SHAPES, SMALL, measure, 120, arguments)


if __name__ == "__main__":
    main()
