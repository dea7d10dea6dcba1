"""Benchmark distillation on an `lm_head`, forward and backward, against eager torch and the installed peers.

    python -m benchmarks.distillation 8192:1536:4096:151936        tokens:hidden:hidden of the teacher:vocabulary

The floor is three matrix products of the student, plus one of the teacher unless the teacher is given as top-k
log-probabilities.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness import (
    Contenders,
    Loss,
    Table,
    benchmark,
    compiled,
    gemm_floor,
    head_weight,
    hidden_states,
)
from benchmarks.oracle import logits_gradients
from liger_chunked import (
    LigerFusedLinearCosineSimilarityLoss,
    LigerFusedLinearJSDLoss,
    LigerFusedLinearKLDivLoss,
    LigerFusedLinearTVDLoss,
)

SHAPES = ["8192:1536:4096:151936"]
SMALL = ["32:32:48:1024"]
TOP_K = 64
SOFT = {"weight_hard_loss": 0.0, "weight_soft_loss": 1.0}


def jsd(z: Tensor, t: Tensor) -> Tensor:
    """Return the Jensen-Shannon divergence of each token (N,), from student and teacher logits (N, V)."""
    log_p, log_q = z.log_softmax(-1), t.log_softmax(-1)
    log_m = torch.logsumexp(torch.stack([log_p, log_q]), 0) - math.log(2)
    return 0.5 * sum(F.kl_div(log_m, log_r, log_target=True, reduction="none").sum(-1) for log_r in (log_p, log_q))


def kl(z: Tensor, t: Tensor) -> Tensor:
    return F.kl_div(z.log_softmax(-1), t.log_softmax(-1), log_target=True, reduction="none").sum(-1)


def reverse_kl(z: Tensor, t: Tensor) -> Tensor:
    return kl(t, z)


def tvd(z: Tensor, t: Tensor) -> Tensor:
    return (z.softmax(-1) - t.softmax(-1)).abs().sum(-1) / 2


def cosine(z: Tensor, t: Tensor) -> Tensor:
    return 1 - F.cosine_similarity(z, t, dim=-1)


def top_k_kl(z: Tensor, logps: Tensor, ids: Tensor) -> Tensor:
    """Return KL(teacher || student) over the k tokens and one bin for all others."""
    log_p = z.log_softmax(-1).gather(-1, ids)

    def bins(log_r: Tensor) -> Tensor:
        return torch.cat([log_r, torch.log1p(-log_r.exp().sum(-1, keepdim=True))], -1)

    return F.kl_div(bins(log_p), bins(logps), log_target=True, reduction="none").sum(-1)


@dataclass(frozen=True)
class Task:
    """A divergence in plain torch, and its fused contenders: functions of (input, weight, teacher input and weight)."""

    divergence: Callable[[Tensor, Tensor], Tensor]
    module: Callable[..., torch.nn.Module]
    peers: Contenders

    def eager(self, x: Tensor, w: Tensor, teacher_x: Tensor, teacher_w: Tensor) -> Tensor:
        return self.divergence((x @ w.t()).float(), (teacher_x @ teacher_w.t()).float()).mean()

    def ours(self) -> Loss:
        loss = self.module(**SOFT)
        return lambda x, w, teacher_x, teacher_w: loss(w, x, teacher_w, teacher_x)[0]

    def expected(self, x: Tensor, w: Tensor, teacher_x: Tensor, teacher_w: Tensor) -> dict[str, Tensor]:
        teacher_w = teacher_w.double()
        return logits_gradients(x, w, lambda z, rows: self.divergence(z, teacher_x[rows].double() @ teacher_w.t()))

    def contenders(self) -> Contenders:
        return {
            "eager": lambda: self.eager,
            "liger_chunked": self.ours,
            "torch.compile": compiled(self.eager),
            **self.peers,
        }


def liger(name: str, **settings: Any) -> Callable[[], Loss]:
    def build() -> Loss:
        from liger_kernel import chunked_loss

        loss = getattr(chunked_loss, f"LigerFusedLinear{name}Loss")(**SOFT, **settings)

        def run(x: Tensor, w: Tensor, teacher_x: Tensor, teacher_w: Tensor) -> Tensor:
            return loss(x, w, teacher_x, teacher_w, torch.zeros(x.shape[0], dtype=torch.int64, device=x.device))

        return run

    return build


def liger_triton_jsd() -> Loss:
    from liger_kernel.transformers import LigerFusedLinearJSD

    loss = LigerFusedLinearJSD()
    return lambda x, w, teacher_x, teacher_w: loss(x, w, teacher_x, teacher_w, None)


def trl(beta: float) -> Callable[[], Loss]:
    def build() -> Loss:
        from trl.kernels.chunked_divergence import ChunkedDivergenceFunction as Divergence

        return lambda x, w, teacher_x, teacher_w: Divergence.apply(x, w, None, teacher_x, teacher_w, None, beta)[
            0
        ].mean()

    return build


def jsd_peers(beta: float) -> Contenders:
    """Return the peers. Both define beta 0 as KL(teacher || student), and beta 1 as KL(student || teacher)."""
    return {"liger-kernel": liger("JSD", beta=beta), "trl": trl(beta)}


TASKS = {
    "JSD": Task(jsd, LigerFusedLinearJSDLoss, {**jsd_peers(0.5), "liger-kernel, Triton": liger_triton_jsd}),
    "KL(teacher, student)": Task(kl, LigerFusedLinearKLDivLoss, jsd_peers(0.0)),
    "KL(student, teacher)": Task(
        reverse_kl, functools.partial(LigerFusedLinearKLDivLoss, reverse=True), jsd_peers(1.0)
    ),
    "TVD": Task(tvd, LigerFusedLinearTVDLoss, {}),
    "cosine": Task(cosine, LigerFusedLinearCosineSimilarityLoss, {"liger-kernel": liger("CosineSimilarity", beta=1.0)}),
}


def eager_top_k(x: Tensor, w: Tensor, logps: Tensor, ids: Tensor) -> Tensor:
    return top_k_kl((x @ w.t()).float(), logps, ids).mean()


def our_top_k() -> Loss:
    loss = LigerFusedLinearKLDivLoss(**SOFT)
    return lambda x, w, logps, ids: loss(w, x, teacher_logps=logps, teacher_ids=ids)[0]


@torch.no_grad()
def top_k_of(teacher_x: Tensor, teacher_w: Tensor) -> tuple[Tensor, Tensor]:
    """Return log-probabilities (N, k) in float32 and ids (N, k) of a teacher's most likely tokens."""
    logits = ((rows @ teacher_w.t()).float() for rows in teacher_x.split(1024))
    logps, ids = zip(*(z.log_softmax(-1).topk(TOP_K) for z in logits), strict=True)
    return torch.cat(logps), torch.cat(ids)


def measure(table: Table, n: int, h: int, teacher_h: int, v: int) -> None:
    student, teacher = gemm_floor(n, h, v), gemm_floor(n, teacher_h, v)
    x, w = hidden_states(n, h).requires_grad_(), head_weight(v, h).requires_grad_()
    teacher_x, teacher_w = hidden_states(n, teacher_h), head_weight(v, teacher_h)
    shape = {"tokens": n, "hidden": h, "teacher_hidden": teacher_h, "vocabulary": v}
    leaves = {"input": x, "weight": w}
    for name, task in TASKS.items():
        table.measure(
            f"{name} {n}x({h}, {teacher_h})x{v}",
            student.all + teacher.logits,
            shape,
            task.contenders(),
            (x, w, teacher_x, teacher_w),
            leaves,
            lambda task=task: task.expected(x, w, teacher_x, teacher_w),
        )
    logps, ids = top_k_of(teacher_x, teacher_w)
    table.measure(
        f"KL, teacher's top {TOP_K} {n}x{h}x{v}",
        student.all,
        shape,
        {"eager": lambda: eager_top_k, "liger_chunked": our_top_k, "torch.compile": compiled(eager_top_k)},
        (x, w, logps, ids),
        leaves,
        lambda: logits_gradients(x, w, lambda z, rows: top_k_kl(z, logps[rows].double(), ids[rows])),
    )


def main(arguments: Sequence[str] | None = None) -> Path:
    sizes = "tokens:hidden:hidden of the teacher:vocabulary"
    return benchmark("distillation", __doc__, sizes, SHAPES, SMALL, measure, 60, arguments)


if __name__ == "__main__":
    main()
