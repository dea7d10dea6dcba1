"""Benchmark a draft's loss, forward and backward, against eager torch, and speculators' and SpecForge's own losses.

    python -m benchmarks.drafts                             # the two shapes below
    python -m benchmarks.drafts 8192:2048:4096:151936:32000:3 --budget 1GiB
    python -m benchmarks.drafts --profile                   # and the kernels of each step, longest first

A shape is tokens:hidden of the draft:hidden of the teacher:vocabulary:tokens of the draft:steps of the draft.

    ms         median of CUDA-event times
    x floor    ms over the time of the products alone: three of the draft for each step, one of the teacher
    MiB        peak above hidden states, weights and gradients
    err        of loss, dX and dW to float64 on 512 tokens, over those of eager code in bfloat16

"whole" compares with the teacher's probabilities of all its tokens, "EAGLE-3" with those renormalised over the draft's,
at the positions whose most likely token the draft has. "cut teacher" gets the teacher's rows of the draft's tokens
alone, as speculators does: its floor has a smaller product. The packages of speculators and SpecForge may be unpacked
wheels on `PYTHONPATH`, without what they depend on: only files of their losses are imported.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness import (
    DEVICE,
    RESULTS,
    RowsFile,
    gemm_floor,
    head_weight,
    hidden_states,
    is_out_of_memory,
    median_ms,
    peak_mib,
    synchronize,
)
from liger_chunked import LigerFusedLinearDraftLoss

SHAPES = ["8192:2048:4096:151936:32000:1", "8192:2048:4096:151936:32000:3", "8192:2048:4096:151936:151936:1"]
KINDS = ("kl", "jsd", "tvd", "log_acceptance")
CHECKED = 512  # tokens


class Case(NamedTuple):
    x: Tensor  # (K, N, H)
    w: Tensor  # (V_draft, H)
    teacher_x: Tensor  # (N, H_teacher)
    teacher_w: Tensor  # (V, H_teacher)
    ids: Tensor | None  # (V_draft,)

    @property
    def draft_ids(self) -> Tensor:
        return torch.arange(self.w.shape[0], device=DEVICE) if self.ids is None else self.ids


def make_case(n: int, h: int, teacher_h: int, v: int, v_draft: int, steps: int) -> Case:
    ids = None if v == v_draft else torch.randperm(v, device=DEVICE)[:v_draft].sort().values
    x, w = hidden_states(steps, n, h).requires_grad_(), head_weight(v_draft, h).requires_grad_()
    # Teachers are sure: of logits with a standard deviation of 3, the largest probability is near 0.3.
    return Case(x, w, hidden_states(n, teacher_h), 3 * head_weight(v, teacher_h), ids)


def ours(case: Case, **settings: Any) -> Callable[[], Tensor]:
    loss = LigerFusedLinearDraftLoss(draft_ids=case.ids, **settings)
    return lambda: loss(case.w, case.x, case.teacher_w, case.teacher_x)[0]


def eager(case: Case, kind: str, rounds: bool = True) -> Tensor:
    """Return the loss against the teacher's probabilities of all tokens, with float32 or float64 softmaxes."""
    wide = torch.float32 if rounds else torch.float64
    x, w, teacher_x, teacher_w = (t if rounds else t.double() for t in case[:4])
    p = (teacher_x @ teacher_w.t()).to(wide).softmax(-1).index_select(-1, case.draft_ids)
    total = torch.zeros((), dtype=wide, device=DEVICE)
    for k in range(len(x)):
        z, q_of_teacher = (x[k, : x.shape[1] - k] @ w.t()).to(wide), p[k:]
        log_q, left = z.log_softmax(-1), 1 - q_of_teacher.sum(-1)
        q, log_p = log_q.exp(), q_of_teacher.log()
        if kind == "kl":
            values = (q_of_teacher * (log_p - log_q)).sum(-1)
        elif kind == "jsd":
            log_m = ((q + q_of_teacher) / 2).log()
            values = 0.5 * ((q_of_teacher * (log_p - log_m)).sum(-1) + (q * (log_q - log_m)).sum(-1))
            values = values + 0.5 * left * torch.tensor(2.0).log().item()
        else:
            accepted = torch.minimum(q, q_of_teacher).sum(-1)
            values = 1 - accepted if kind == "tvd" else -accepted.log()
        total = total + values.mean()
    return total


def bare(name: str) -> Any:
    """Import a module without the `__init__` of its parents, which need packages that the loss does not."""
    *parents, _ = name.split(".")
    found = importlib.util.find_spec(parents[0]) if parents[0] not in sys.modules else sys.modules[parents[0]].__spec__
    if found is None or not found.submodule_search_locations:
        raise ImportError(f"no package {parents[0]}")
    path = Path(next(iter(found.submodule_search_locations)))
    for i in range(len(parents)):
        if (full := ".".join(parents[: i + 1])) not in sys.modules:
            stub = ModuleType(full)
            stub.__path__ = [str(path.joinpath(*parents[1 : i + 1]))]
            stub.__spec__ = importlib.util.spec_from_loader(full, None, is_package=True)
            stub.__spec__.submodule_search_locations = stub.__path__
            sys.modules[full] = stub
    return importlib.import_module(name)


def speculators(case: Case) -> Callable[[], Tensor]:
    utils = ModuleType("speculators.utils.util")
    utils.is_npu_available = lambda: False
    sys.modules.setdefault(utils.__name__, utils)  # the real one imports transformers
    losses = bare("speculators.losses.fused")
    cut = case.teacher_w.index_select(0, case.draft_ids)  # once, when the model is loaded

    def run() -> Tensor:
        with torch.no_grad():
            targets = (case.teacher_x @ cut.t())[None]
        total = torch.zeros((), device=DEVICE)
        for k in range(len(case.x)):
            z = (case.x[k] @ case.w.t())[None]
            n = z.shape[1] - k
            total = total + losses.fused_kl_div_loss(z[:, :n].contiguous(), targets[:, k:].contiguous()).mean()
        return total

    return run


def specforge(case: Case, compact: bool) -> Callable[[], Tensor]:
    core, teacher = bare("specforge.core.loss"), bare("specforge.core.compact_teacher")
    t2d = torch.zeros(case.teacher_w.shape[0], dtype=torch.bool, device=DEVICE)
    t2d[case.draft_ids] = True
    steps, n = case.x.shape[:2]
    mask = torch.ones(1, n, 1, device=DEVICE)

    @torch.compile(dynamic=None)
    def target_of(target: Tensor) -> tuple[Tensor, Tensor]:  # as its `_compute_target_p`
        t = target.float()
        return t[..., t2d].softmax(-1), t2d[t.argmax(-1)][..., None] * mask

    def run() -> Tensor:
        with torch.no_grad():
            if compact:
                p, _, _, kept = teacher.compute_target_p_padded_from_hidden(
                    case.teacher_x[None], case.teacher_w, t2d, mask, steps
                )
            else:
                p, kept = target_of((case.teacher_x @ case.teacher_w.t())[None])
                p = F.pad(p, (0, 0, 0, steps), value=1 / p.shape[-1])
        total = torch.zeros((), device=DEVICE)
        for k in range(steps):
            z = (case.x[k] @ case.w.t())[None]
            of_step = F.pad(kept[:, k:], (0, 0, 0, k))
            total = total + core.LogSoftmaxLoss.apply(z, p[:, k : k + n].contiguous(), of_step)
        return total

    return run


def gradients(case: Case, loss: Tensor) -> list[Tensor]:
    case.x.grad = case.w.grad = None
    return [loss.detach(), *torch.autograd.grad(loss, [case.x, case.w])]


def check(shape: Sequence[int]) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield, for each kind, the errors of loss, dX and dW over those of eager code."""
    _, *rest = shape
    case = make_case(CHECKED, *rest)
    for kind in KINDS:
        exact = gradients(case, eager(case, kind, rounds=False))
        errors = []
        for loss in (ours(case, divergence=kind)(), eager(case, kind)):
            pairs = zip(gradients(case, loss), exact, strict=True)
            errors.append([float((x.double() - e).norm() / e.norm()) for x, e in pairs])
        names = ("loss_of_eager", "dX_of_eager", "dW_of_eager")
        yield (
            kind,
            {name: round(mine / max(theirs, 1e-12), 3) for name, mine, theirs in zip(names, *errors, strict=True)},
        )


def contenders(case: Case, budget: str | None) -> dict[str, Callable[[], Callable[[], Tensor]]]:
    given: dict[str, Any] = {"logits_budget": budget}
    found = {f"ours, {kind}, whole": lambda kind=kind: ours(case, divergence=kind, **given) for kind in KINDS}
    if case.ids is not None:
        cut = case._replace(teacher_w=case.teacher_w.index_select(0, case.ids), ids=None)
        eagle = {"renormalize": True, "skip_outside": True, **given}
        found["ours, kl, EAGLE-3"] = lambda: ours(case, **eagle)
        found["ours, kl, cut teacher"] = lambda: ours(cut, **given)
    return found | {
        "eager, kl": lambda: lambda: eager(case, "kl"),
        "speculators, kl, cut teacher": lambda: speculators(case),
        "SpecForge, kl": lambda: specforge(case, compact=False),
        "SpecForge, kl, compact teacher": lambda: specforge(case, compact=True),
    }


def step(loss: Callable[[], Tensor], leaves: Sequence[Tensor]) -> None:
    for leaf in leaves:
        leaf.grad = None
    loss().backward()


def profile(run: Callable[[], object]) -> Iterator[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        run()
        synchronize()
    kernels = [e for e in found.key_averages() if e.device_type == torch.autograd.DeviceType.CUDA]
    for e in sorted(kernels, key=lambda e: -e.self_device_time_total)[:12]:
        yield f"    {e.self_device_time_total / 1e3:8.3f} ms  {e.count:5}  {e.key[:100]}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", default=SHAPES)
    parser.add_argument("--budget", help="logits_budget, such as 1GiB; default: automatic")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--only", default="", help="contenders whose name contains this")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON")
    given = parser.parse_args(arguments)
    kept = RowsFile(given.out, "drafts")
    for text in given.shapes:
        shape = [int(size) for size in text.split(":")]
        n, h, teacher_h, v, v_draft, steps = shape
        torch.manual_seed(0)
        print(f"\n{text}", flush=True)
        if not given.only:
            for kind, of_eager in check(shape):
                kept.add({"shape": text, "error_of": kind, **of_eager})
                print(f"errors of {kind} over eager's: {of_eager}", flush=True)
        # Steps after the first draft fewer positions.
        rows = sum(n - k for k in range(steps)) / n
        teacher, cut = gemm_floor(n, teacher_h, v).logits, gemm_floor(n, teacher_h, v_draft).logits
        floor = rows * gemm_floor(n, h, v_draft).all
        print(f"floor: {floor:.2f} ms of the draft, {teacher:.2f} ms of the teacher, {cut:.2f} ms of its cut")
        case = make_case(*shape)
        leaves = [case.x, case.w]
        of_gradients = sum(x.numel() * x.element_size() for x in leaves) / 2**20
        for name, build in contenders(case, given.budget).items():
            if given.only not in name:
                continue
            try:
                loss = build()

                run = functools.partial(step, loss, leaves)
                ms = median_ms(run)
                of_teacher = cut if "cut" in name else teacher
                peak = peak_mib(run, leaves)
                above = None if peak is None else round(peak - of_gradients)
                over = round(ms / (floor + of_teacher), 3)
                kept.add({"shape": text, "contender": name, "ms": round(ms, 2), "over_floor": over, "MiB": above})
                print(f"{name:32} {ms:9.2f} ms  {over:6.3f} x floor {above} MiB", flush=True)
                if given.profile:
                    print("\n".join(profile(run)), flush=True)
            except Exception as failure:  # a peer may be missing, or need more memory than there is
                reason = "out of memory" if is_out_of_memory(failure) else f"{type(failure).__name__}: {failure}"
                kept.add({"shape": text, "contender": name, "failure": reason[:150]})
                print(f"{name:32} {reason[:150]}", flush=True)


if __name__ == "__main__":
    main()
