"""Count what one small step does on a CPU: calls of the library, its files, depth, and operators of torch.

    python -m benchmarks.step_calls
    python -m benchmarks.step_calls --package ../before       # another checkout of the library

- calls, files, deep: Python functions of the library in forward and backward, the files that define them, and the
  longest chain of them
- switches: how often a call goes from one file of the library to another
- operators: of torch, as the dispatcher sees them
- ms: the step, and the same loss on full logits in plain PyTorch, in float32 on one thread
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).parents[1]
PAIRS, LENGTH, HIDDEN, VOCAB = 2, 16, 64, 1000


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


class Calls:
    """Counts calls of Python functions below a folder."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.count = self.deepest = self.switches = 0
        self.files: set[str] = set()

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event != "call" or not file.startswith(self.folder):
            return
        self.count += 1
        self.files.add(file)
        depth, caller = 0, frame.f_back
        above = None
        while caller is not None:
            if caller.f_code.co_filename.startswith(self.folder):
                depth += 1
                above = above or caller.f_code.co_filename
            caller = caller.f_back
        self.deepest = max(self.deepest, depth + 1)
        self.switches += above is not None and above != file


def steps() -> dict[str, tuple[Callable[[], Tensor], Callable[[], Tensor]]]:
    """Return, by name, our loss and that of full logits, of the same tensors."""
    from liger_chunked import LigerFusedLinearCrossEntropyLoss, LigerFusedLinearDPOLoss, LigerFusedLinearGRPOLoss

    torch.manual_seed(0)
    x = torch.randn(2 * PAIRS, LENGTH, HIDDEN, requires_grad=True)
    w = (torch.randn(VOCAB, HIDDEN) / 8).requires_grad_()
    target = torch.randint(VOCAB, (2 * PAIRS, LENGTH))
    ref = torch.full((2 * PAIRS,), -100.0)
    advantages = torch.randn(2 * PAIRS)
    losses = LigerFusedLinearCrossEntropyLoss(), LigerFusedLinearDPOLoss(), LigerFusedLinearGRPOLoss()

    def logps() -> Tensor:
        return (x @ w.T).log_softmax(-1).gather(-1, target[..., None])[..., 0]

    def eager_dpo() -> Tensor:
        chosen, rejected = (logps().sum(-1) - ref).chunk(2)
        return -F.logsigmoid(0.1 * (chosen - rejected)).mean()

    def eager_grpo() -> Tensor:
        now = logps()
        ratio, a = (now - now.detach()).exp(), advantages[:, None]
        return -torch.min(ratio * a, ratio.clamp(0.8, 1.2) * a).mean(-1).mean()

    return {
        "cross entropy": (
            lambda: losses[0](w, x, target),
            lambda: F.cross_entropy((x @ w.T).flatten(0, 1), target.flatten()),
        ),
        "DPO": (lambda: losses[1](w, x, target, ref_logps=ref)[0], eager_dpo),
        "GRPO": (lambda: losses[2](w, x, target, advantages)[0], eager_grpo),
    }


def milliseconds(loss: Callable[[], Tensor]) -> float:
    times = []
    for _ in range(200):
        begin = time.perf_counter()
        loss().backward()
        times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times)


def main() -> None:
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("--package", type=Path, default=ROOT, help="folder of the checkout to measure")
    sys.path.insert(0, str(parse.parse_args().package.resolve()))
    torch.set_num_threads(1)
    import liger_chunked

    folder = str(Path(liger_chunked.__file__).parent)
    print(f"{folder}\n{'step':14s} calls files deep switches operators (eager)      ms (eager)")
    for name, (ours, eager) in steps().items():
        for loss in (ours, eager):
            for _ in range(3):
                loss().backward()
        calls = Calls(folder)
        sys.setprofile(calls)
        with torch.autograd.set_multithreading_enabled(False):
            ours().backward()
        sys.setprofile(None)
        operators = []
        for loss in (ours, eager):
            with Operators() as counter, torch.autograd.set_multithreading_enabled(False):
                loss().backward()
            operators.append(counter.count)
        print(
            f"{name:14s} {calls.count:5d} {len(calls.files):5d} {calls.deepest:4d} {calls.switches:8d} "
            f"{operators[0]:9d} {operators[1]:7d} {milliseconds(ours):7.2f} {milliseconds(eager):7.2f}"
        )


if __name__ == "__main__":
    main()
