"""Ranks that fail as `test_benchmarks.py` asks: `python -m tests.failing_ranks --rank`."""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist

from benchmarks.harness import Skipped
from benchmarks.ranks import Answer, Request, agreed, serve


def handle(request: Request) -> Answer:
    what, rank = request["what"], dist.get_rank()
    if what == "skip":
        raise Skipped("not here")
    if what == "no memory":
        raise torch.OutOfMemoryError("CUDA out of memory")
    if rank == 1 and what == "one":
        raise ValueError("of one")
    if rank == 1 and what == "dies":
        print("last words", file=sys.stderr, flush=True)
        os._exit(3)
    if rank == 1 and what == "hangs":
        time.sleep(60)
    return {"rank": rank, "agreed": agreed(float(rank))}


if __name__ == "__main__":
    serve(handle)
