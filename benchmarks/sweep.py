"""Measure time and memory of cross entropy against the number of tokens and the vocabulary size, for the figures.

python -m benchmarks.sweep
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.cross_entropy import contenders
from benchmarks.harness import DEVICE, Table, gemm_floor, head_weight, hidden_states, parser

NAMES = ("eager", "liger_chunked", "torch.compile", "liger-kernel", "trl")
# (hidden, vocabulary of the sweep over tokens, its tokens, tokens of the sweep over vocabularies, its vocabularies)
ON_GPU = (
    2048,
    151936,
    (1024, 2048, 4096, 8192, 16384, 32768, 65536),
    8192,
    (32000, 65024, 128256, 200064, 262144),
)
ON_CPU = (32, 2048, (64, 128), 64, (1024, 2048))


def measure(table: Table, sweep: str, n: int, h: int, v: int) -> None:
    torch.manual_seed(0)
    x, w = hidden_states(n, h).requires_grad_(), head_weight(v, h).requires_grad_()
    every = contenders(n, v)
    table.measure(
        f"by {sweep} {n}x{h}x{v}",
        gemm_floor(n, h, v).all,
        {"sweep": sweep, "tokens": n, "hidden": h, "vocabulary": v},
        {name: every[name] for name in NAMES},
        (x, w, torch.randint(v, (n,), device=DEVICE)),
        {"input": x, "weight": w},
    )


def main(arguments: Sequence[str] | None = None) -> Path:
    args = parser(__doc__, 90).parse_args(arguments)
    table = Table("sweep", args)
    h, vocabulary, token_counts, tokens, vocabularies = ON_GPU if DEVICE == "cuda" else ON_CPU
    for n in token_counts:
        measure(table, "tokens", n, h, vocabulary)
    for v in vocabularies:
        measure(table, "vocabulary", tokens, h, v)
    return table.finish()


if __name__ == "__main__":
    main()
