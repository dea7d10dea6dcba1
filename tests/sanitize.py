"""Run the Triton kernels on small shapes, for NVIDIA's compute-sanitizer.

    python tests/sanitize.py                            # compiles the kernels
    export PYTORCH_NO_CUDA_MEMORY_CACHING=1             # each tensor has an allocation of its own
    compute-sanitizer --tool memcheck --error-exitcode 1 python tests/sanitize.py
    compute-sanitizer --tool racecheck --error-exitcode 1 python tests/sanitize.py --only epilogue

A case is an operation of `tests/base_ops.py`, experts, statistics of tokens, or a row of `tests/table.py`, with logits
and with the fused epilogue, in bfloat16. Every loss runs once before any runs again with other options: an early stop
has launched most kernels. Values are not checked: the test suite does that. The last lines count the cases, and
name the kernels launched and those not launched. `--part 1/8` to `--part 8/8` share the cases among eight processes.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from base_ops import OPS, run
from table import ROWS, SMALL, Row, evaluate, moved
from torch import Tensor

from liger_chunked import linear_token_stats
from liger_chunked.engine import epilogue
from liger_chunked.kernels import backend, launch, merge_ranks, project_sums

sys.path.append(str(Path(__file__).parent / "layers"))
from test_experts import CASES, gradients, ours, sample

# No dimension is a multiple of a block, and TMA can read the rows.
SIZES = SMALL._replace(hidden=72, vocab=603, ref_hidden=40)
BUDGET = 13 * SIZES.vocab * 2  # 13 tokens a chunk
STATISTICS = ("logps", "lse", "entropy", "mean_logits")


def in_turns(rows: list[Row]) -> list[Row]:
    """Sort the first row of every loss before all second rows.

    A loss is the part of an id before the first dash. With a top-k it counts as another loss: it runs other kernels.
    """
    seen: Counter[tuple[str, bool]] = Counter()

    def turn(row: Row) -> int:
        loss = row.id.split("-")[0], "top-k" in row.id
        seen[loss] += 1
        return seen[loss]

    return sorted(rows, key=turn)


def statistics(x: Tensor, weight: Tensor, target: Tensor, **options: Any) -> tuple[Tensor, ...]:
    stats = linear_token_stats(weight, x, target, outputs=STATISTICS, **options)
    values = torch.stack([getattr(stats, name) for name in STATISTICS])
    return torch.autograd.grad(values.sum(), (x, weight))


def kept_tile(x: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, ...]:
    """Keep the exponentials of the second tile, aligned to the kernel's tiles."""
    stats = linear_token_stats(weight, x, target, logits_budget=2 * 256 * SIZES.vocab)
    assert stats.logps is not None
    return torch.autograd.grad(stats.logps.sum(), (x, weight))


def two_ranks(x: Tensor, weight: Tensor, target: Tensor) -> object:
    """Merge the sums of two parts of a vocabulary."""
    x, weight = x.detach(), weight.detach()
    sums, half = [], SIZES.vocab // 2 + 1
    for part, own in ((weight[:half], target), (weight[half:], target - half)):
        own = own.masked_fill(own >= len(part), -1)
        out = x.new_empty(len(x), epilogue.padded(len(part)))[:, : len(part)]
        sums.append(project_sums(x, part, own, part.sum(0, dtype=torch.float32), out, 1.0, STATISTICS, len(weight)))
    return merge_ranks(torch.stack(sums), len(x), 0, out, STATISTICS)


def cases(device: str) -> Iterator[tuple[str, Callable[[], object]]]:
    for op in OPS:
        for shape in op.shapes:
            yield f"{op.id} {shape}", partial(run, op.ours, op.sample(shape, torch.bfloat16, device))
    for case in CASES:
        leaves, index, upstream = sample(case, torch.bfloat16, device, absent=True)
        for inplace in (False, True):
            experts = partial(ours, inplace=inplace)
            yield f"experts {case}, inplace={inplace}", partial(gradients, experts, leaves, index, upstream)
    n = 61
    x, weight = (torch.randn(m, SIZES.hidden, device=device).bfloat16().requires_grad_() for m in (n, SIZES.vocab))
    target = torch.randint(SIZES.vocab, (n,), device=device)
    yield "statistics", partial(statistics, x, weight, target)
    if backend.has_wide_tiles(torch.device(device)):
        yield "statistics, epilogue", partial(statistics, x, weight, target, logits_budget=BUDGET)
        long_x, more = torch.randn(300, SIZES.hidden, device=device).bfloat16().requires_grad_(), target.repeat(5)[:300]
        yield "statistics, last tile kept, epilogue", partial(kept_tile, long_x, weight, more)
        yield "statistics of two ranks", partial(two_ranks, x, weight, target)
    for row in in_turns([row for row in ROWS if row.kernels]):
        for name, budget in (("one chunk", None), ("several chunks", BUDGET)):
            batch = moved(row.sample(SIZES, 0), torch.bfloat16, device)
            loss = partial(row.ours, logits_budget=budget)
            yield f"{row.id}, {name}", partial(evaluate, loss, batch)
            if backend.has_wide_tiles(torch.device(device)):
                without_bias = {key: x for key, x in batch.items() if not key.endswith("bias")}
                yield f"{row.id}, {name}, epilogue", partial(evaluate, loss, without_bias)


def main() -> int:
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("--only", default="", help="only cases whose name contains this")
    parse.add_argument("--part", default="1/1", help="a part of the cases, such as 2/8 (%(default)s)")
    parse.add_argument("--minutes", type=float, default=60.0, help="stop after a case that ends later (%(default)s)")
    args = parse.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    launched: set[launch.Kernel] = set()
    call = launch.Kernel.__call__

    def counted(kernel: launch.Kernel, *rest: Any, **options: Any) -> None:
        launched.add(kernel)
        call(kernel, *rest, **options)

    launch.Kernel.__call__ = counted
    end = time.monotonic() + 60 * args.minutes
    done = 0
    part, parts = map(int, args.part.split("/"))
    if not 1 <= part <= parts:
        parse.error(f"--part must be 1/{parts} to {parts}/{parts}, got {args.part}")
    for turn, (name, case) in enumerate(cases(device)):
        if args.only not in name or turn % parts != part - 1:
            continue
        if time.monotonic() > end:
            print(f"stopped before {name!r}")
            break
        # Chunks of any size use the fused epilogue where the name says so, and none without.
        epilogue.SMALLEST = 0 if name.endswith("epilogue") else 1 << 60
        case()
        done += 1
    if device == "cuda":
        torch.cuda.synchronize()
    kernels = {kernel for kernel in gc.get_objects() if isinstance(kernel, launch.Kernel)}
    print(f"{done} cases, {len(launched)} of {len(kernels)} kernels")
    for what, some in (("launched:", launched), ("not launched:", kernels - launched)):
        functions = [kernel.kernel.fn for kernel in some]
        print(what, *sorted(f"{fn.__module__.rsplit('.')[-1]}.{fn.__name__}" for fn in functions))
    return 0


if __name__ == "__main__":
    sys.exit(main())
