"""Benchmark each kernel of the engine alone, against the bytes that it must move.

python -m benchmarks.kernels 8192:151936 8192:128256        tokens:vocabulary

`x bytes` is the kernel's time over that of a device copy of as many bytes: every tile of logits that the kernel's file
says it reads or writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from benchmarks.harness import DEVICE, copy_tb_per_s, median_ms, parser
from liger_chunked.kernels import (
    LogitsCotangents,
    divergence_grad_,
    divergence_stats,
    logits_grad_,
    logits_stats,
    tail_grad_,
    tail_stats,
)
from liger_chunked.types import Divergence, LogitOptions

PLAIN = LogitOptions()
DIVERGENCES = {
    "forward KL": (Divergence("forward_kl"), 2),
    "reverse KL": (Divergence("reverse_kl"), 2),
    "JSD": (Divergence("mixture", beta=0.5, on_student=0.5, on_teacher=0.5), 4),
    "TVD": (Divergence("tvd"), 4),
    "cosine": (Divergence("cosine"), 2),
}


def kernels(n: int, v: int, dtype: torch.dtype) -> Iterator[tuple[str, int, Callable[[], object]]]:
    """Yield name, number of logits tiles moved, and the call."""
    z = 2 * torch.randn(n, v, device=DEVICE, dtype=dtype)
    work = z.clone()
    target = torch.randint(v, (n,), device=DEVICE)
    g = torch.full((n,), 1 / n, device=DEVICE)
    for outputs in (("logps",), ("logps", "entropy"), ("logps", "mean_logits"), ("logps", "argmax")):
        yield f"statistics: {', '.join(outputs)}", 1, lambda outputs=outputs: logits_stats(z, target, PLAIN, outputs)
    stats = logits_stats(z, target, PLAIN, ("logps",))
    cotangents = LogitsCotangents(stats.max, stats.sum_exp, logps=g)
    yield "gradient: logps", 2, lambda: logits_grad_(work, target, cotangents, PLAIN, v)
    entropy = torch.full((n,), 5.0, device=DEVICE)
    both = cotangents._replace(entropy=g, entropy_value=entropy)
    yield "gradient: logps, entropy", 2, lambda: logits_grad_(work, target, both, PLAIN, v)
    t = 2 * torch.randn(n, v, device=DEVICE, dtype=dtype)
    for name, (divergence, tiles) in DIVERGENCES.items():
        how = (divergence, PLAIN, PLAIN)
        yield f"{name}: sweeps", tiles, lambda how=how: divergence_stats(z, t, None, *how)
        found = divergence_stats(z, t, None, *how)
        work.copy_(z)
        yield (
            f"{name}: gradient",
            3,
            lambda how=how, found=found: divergence_grad_(work, t, None, found, g, None, *how),
        )
    yield "tail of a top-k: sweep", 1, lambda: tail_stats(z, PLAIN, hard=False)
    tail = tail_stats(z, PLAIN, hard=False)
    yield "tail of a top-k: gradient", 2, lambda: tail_grad_(work, tail, g, None, PLAIN)


def main() -> None:
    parse = parser(__doc__ or "", peer_seconds=0)
    parse.add_argument("shapes", nargs="*", default=["8192:151936", "8192:128256"], help="tokens:vocabulary")
    args = parse.parse_args()
    if DEVICE == "cpu":
        print("no GPU: a small shape in float32, which says nothing about a GPU")
        args.shapes = ["64:4096"]
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    bandwidth = copy_tb_per_s()
    for shape in args.shapes:
        n, v = map(int, shape.split(":"))
        print(f"{n} x {v}, {dtype}, copy {bandwidth:.2f} TB/s\n{'':32} {'ms':>8} {'x bytes':>8}")
        for name, tiles, run in kernels(n, v, dtype):
            if args.only in name:
                ms = median_ms(run, repeats=15)
                floor = tiles * n * v * dtype.itemsize / bandwidth / 1e9
                print(f"{name:32} {ms:8.3f} {ms / floor:8.2f}")


if __name__ == "__main__":
    main()
