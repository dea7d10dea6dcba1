"""Time small steps, where the host may be slower than the GPU, beside eager and compiled code.

    python -m benchmarks.host_time                     # a table of all rows
    python -m benchmarks.host_time --only DPO --trace  # and the Python calls of one step, by time
    python -m benchmarks.host_time --only layer        # base kernels beside torch's own operators

Steps follow each other without a wait, as in training. `wall` is the time of a step then, `GPU` the sum of its kernels'
times, `launches` their number. Where wall is above GPU, the GPU waits for Python. `eager` and `compiled` compute the
same loss from full logits, `compiled` by torch.compile.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import liger_chunked as lc
from benchmarks.before_after import BETA, DEVICE, Step, _head, _randn
from benchmarks.harness import RESULTS, RowsFile

Run = Callable[[], Any]


def eager_cross_entropy(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy((x @ w.t()).float(), t)


def eager_dpo(x: Tensor, w: Tensor, t: Tensor, ref_x: Tensor, ref_w: Tensor) -> Tensor:
    def logps(x: Tensor, w: Tensor) -> Tensor:
        z = (x @ w.t()).float()
        return (z.gather(-1, t[..., None])[..., 0] - z.logsumexp(-1)).sum(-1)

    with torch.no_grad():
        reference = logps(ref_x, ref_w)
    ratios = logps(x, w) - reference
    chosen, rejected = ratios.chunk(2)
    return -F.logsigmoid(BETA * (chosen - rejected)).mean()


def of_losses(leaves: tuple[Tensor, ...], losses: dict[str, Callable[[], Tensor]]) -> dict[str, Run]:
    return {name: Step(loss, leaves) for name, loss in losses.items()}


def cross_entropy(n: int, h: int, v: int) -> dict[str, Run]:
    x, w = _head(n, h, v=v)
    t = torch.randint(v, (n,), device=DEVICE)
    loss, compiled = lc.LigerFusedLinearCrossEntropyLoss(), torch.compile(eager_cross_entropy)
    losses = {
        "ours": lambda: loss(w, x, t),
        "ours, n_valid": lambda: loss(w, x, t, n_valid=n),
        "compiled": lambda: compiled(x, w, t),
        "eager": lambda: eager_cross_entropy(x, w, t),
    }
    return of_losses((x, w), losses)


def dpo(pairs: int, length: int, h: int, v: int) -> dict[str, Run]:
    x, w = _head(2 * pairs, length, h, v=v)
    t = torch.randint(v, (2 * pairs, length), device=DEVICE)
    ref_x, ref_w = x.detach() + 0.1 * _randn(*x.shape), w.detach().clone()
    loss, compiled = lc.LigerFusedLinearDPOLoss(beta=BETA), torch.compile(eager_dpo)
    n_valid = [length] * 2 * pairs
    losses = {
        "ours": lambda: loss(w, x, t, None, ref_x, ref_w)[0],
        "ours, n_valid": lambda: loss(w, x, t, None, ref_x, ref_w, n_valid=n_valid)[0],
        "compiled": lambda: compiled(x, w, t, ref_x, ref_w),
        "eager": lambda: eager_dpo(x, w, t, ref_x, ref_w),
    }
    return of_losses((x, w), losses)


def of_layers(leaves: tuple[Tensor, ...], ours: Run, torchs: Run) -> dict[str, Run]:
    """Return forward and backward of a layer, with fixed upstream gradients."""

    def run(outputs: Run, grads: list[Tensor]) -> None:
        result = outputs()
        torch.autograd.grad(result, leaves, grads)

    result = ours()
    grads = [torch.randn_like(y) for y in (result if isinstance(result, tuple) else (result,))]
    return {"ours": partial(run, ours, grads), "torch": partial(run, torchs, grads)}


def rms_norm(n: int, width: int) -> dict[str, Run]:
    x, w = _randn(n, width).requires_grad_(), _randn(width).requires_grad_()
    return of_layers((x, w), lambda: lc.liger_rms_norm(x, w, 1e-6), lambda: F.rms_norm(x, (width,), w, 1e-6))


def layer_norm(n: int, width: int) -> dict[str, Run]:
    x, w, b = _randn(n, width).requires_grad_(), _randn(width).requires_grad_(), _randn(width).requires_grad_()
    return of_layers((x, w, b), lambda: lc.liger_layer_norm(x, w, b), lambda: F.layer_norm(x, (width,), w, b))


def swiglu(n: int, width: int) -> dict[str, Run]:
    gate, up = _randn(n, width).requires_grad_(), _randn(n, width).requires_grad_()
    return of_layers((gate, up), lambda: lc.liger_swiglu(gate, up), lambda: F.silu(gate) * up)


def rotary(n: int, width: int) -> dict[str, Run]:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    size, kv_heads = (64, 2) if width == 896 else (128, 8)  # of Qwen2.5-0.5B and Llama-3-8B
    q, k = (_randn(1, n, heads, size).transpose(1, 2).requires_grad_() for heads in (width // size, kv_heads))
    angle = torch.rand(1, n, size // 2, device=DEVICE).repeat(1, 1, 2)
    cos, sin = angle.cos().to(q.dtype), angle.sin().to(q.dtype)
    return of_layers(
        (q, k),
        lambda: lc.liger_rotary_pos_emb(q, k, cos, sin),
        lambda: apply_rotary_pos_emb(q, k, cos, sin),
    )


LAYERS = {"RMSNorm": rms_norm, "LayerNorm": layer_norm, "SwiGLU": swiglu, "rotary": rotary}
ROWS: dict[str, Callable[[], dict[str, Run]]] = {
    "cross entropy 4096x1024x32000": lambda: cross_entropy(4096, 1024, 32000),
    "cross entropy 1024x2048x128256": lambda: cross_entropy(1024, 2048, 128256),
    "cross entropy 512x896x151936": lambda: cross_entropy(512, 896, 151936),
    "DPO 2x2x512x1024x32000": lambda: dpo(2, 512, 1024, 32000),
    "DPO 1x2x16384x2048x151936": lambda: dpo(1, 16384, 2048, 151936),
    **{
        f"layer {name} {n}x{width}": partial(make, n, width)
        for name, make in LAYERS.items()
        for width in (896, 4096)
        for n in (4096, 16384)
    },
}


class Times(NamedTuple):
    wall_ms: float
    gpu_ms: float
    launches: int


def measure(step: Run, rounds: int = 5) -> Times:
    for _ in range(4):
        step()
    torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    torch.cuda.synchronize()
    n = max(3, min(60, int(0.15 / (time.perf_counter() - start))))
    walls = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(n):
            step()
        torch.cuda.synchronize()
        walls.append((time.perf_counter() - start) / n * 1e3)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    kernels = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return Times(statistics.median(walls), sum(e.device_time_total for e in kernels) / 1e3, len(kernels))


def trace(step: Run) -> None:
    """Print where Python spends a step's time. The profiler makes calls about three times as slow."""
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(50):
        step()
    profile.disable()
    pstats.Stats(profile).sort_stats("tottime").print_stats(45)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--of", default="", help="implementations whose name contains this")
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON")
    given = parser.parse_args()
    rows = RowsFile(given.out, "host_time")
    print("| step | of | wall, ms | GPU, ms | launches |", "|---|---|---|---|---|", sep="\n")
    for name, make in ROWS.items():
        if given.only not in name:
            continue
        for implementation, step in make().items():
            if given.of not in implementation:
                continue
            times = measure(step)
            rows.add({"task": name, "of": implementation, **times._asdict()})
            print(
                f"| {name} | {implementation} | {times.wall_ms:.3f} | {times.gpu_ms:.3f} | {times.launches} |",
                flush=True,
            )
            if given.trace:
                trace(step)


if __name__ == "__main__":
    main()
