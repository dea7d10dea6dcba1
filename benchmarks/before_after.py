"""Compare two checkouts of the library: step time, peak memory, and the bits of losses and gradients.

    python -m benchmarks.before_after ../before                     # this checkout against the one in ../before
    python -m benchmarks.before_after ../before --task DPO --rounds 20
    python -m benchmarks.before_after . --task graph                # the same step, without a CUDA graph and with it

Each checkout runs in its own process. The two processes take turns on the same task, a few steps each, so that both see
the same clocks and the same temperature of the card. `ratio` is the median over the rounds of after / before.

Tasks with a CUDA graph capture the step of this checkout alone. Steps of these tasks follow each other without a wait,
as in training; the other tasks wait after each step.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

ROOT = Path(__file__).parents[1]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
BETA = 0.1
SOFT = {"weight_hard_loss": 0.0, "weight_soft_loss": 1.0}
DIGEST_BLOCK = 1 << 26


class Step(NamedTuple):
    """Forward and backward of one step: `loss()` returns the loss, `leaves` receive gradients."""

    loss: Callable[[], Tensor]
    leaves: tuple[Tensor, ...]

    def __call__(self) -> Tensor:
        for leaf in self.leaves:
            leaf.grad = None
        loss = self.loss()
        loss.backward()
        return loss

    def captured(self) -> Captured:
        """Return the step as a CUDA graph."""
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(3):
                self()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = self()
        return Captured(self, graph, loss)


class Captured(NamedTuple):
    """A graph of `step`, which owns the inputs. Each call writes the same loss and gradients."""

    step: Step
    graph: Any
    loss: Tensor

    def __call__(self) -> Tensor:
        self.graph.replay()
        return self.loss

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        return self.step.leaves


def _randn(*shape: int, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(*shape, device=DEVICE)).to(DTYPE)


def _head(*shape: int, v: int) -> tuple[Tensor, Tensor]:
    return _randn(*shape).requires_grad_(), _randn(v, shape[-1], scale=shape[-1] ** -0.5).requires_grad_()


def cross_entropy(n: int, h: int, v: int, **options: Any) -> Step:
    from liger_chunked import LigerFusedLinearCrossEntropyLoss

    x, w = _head(n, h, v=v)
    t = torch.randint(v, (n,), device=DEVICE)
    loss = LigerFusedLinearCrossEntropyLoss(**options)
    return Step(lambda: loss(w, x, t), (x, w))


def token_stats(n: int, h: int, v: int, *, entropy: bool = False, **options: Any) -> Step:
    from liger_chunked import linear_token_stats

    x, w = _head(n, h, v=v)
    t = torch.randint(v, (n,), device=DEVICE)
    outputs = ("logps", "entropy") if entropy else ("logps",)

    def loss() -> Tensor:
        stats = linear_token_stats(w, x, t, outputs=outputs, **options)
        return -stats.logps.mean() - (0.01 * stats.entropy.mean() if entropy else 0.0)

    return Step(loss, (x, w))


def preference(
    name: str,
    pairs: int,
    length: int,
    h: int,
    v: int,
    *,
    prompt: float = 0.0,
    **options: Any,
) -> Step:
    import liger_chunked

    x, w = _head(2 * pairs, length, h, v=v)
    t = torch.randint(v, (2 * pairs, length), device=DEVICE)
    t[:, : int(length * prompt)] = -100
    module = getattr(liger_chunked, f"LigerFusedLinear{name}Loss")(beta=BETA, **options)
    if name == "DPO":
        ref_x, ref_w = x.detach() + 0.1 * _randn(*x.shape), w.detach().clone()
        return Step(lambda: module(w, x, t, None, ref_x, ref_w)[0], (x, w))
    if name == "KTO":
        desirable = torch.arange(2 * pairs, device=DEVICE) < pairs
        return Step(lambda: module(w, x, t, desirable, kl=0.0)[0], (x, w))
    return Step(lambda: module(w, x, t)[0], (x, w))


def policy(b: int, length: int, h: int, v: int, **options: Any) -> Step:
    from liger_chunked import LigerFusedLinearGRPOLoss, linear_token_stats

    x, w = _head(b, length, h, v=v)
    t = torch.randint(v, (b, length), device=DEVICE)
    advantages = torch.randn(b, device=DEVICE)
    with torch.no_grad():
        logps = linear_token_stats(w, x, t).logps
    old_logps = logps + 0.02 * torch.randn(b, length, device=DEVICE)
    loss = LigerFusedLinearGRPOLoss(**options)
    return Step(lambda: loss(w, x, t, advantages, old_logps=old_logps)[0], (x, w))


def distillation(name: str, n: int, h: int, teacher_h: int, v: int, **options: Any) -> Step:
    import liger_chunked

    x, w = _head(n, h, v=v)
    teacher_x, teacher_w = _randn(n, teacher_h), _randn(v, teacher_h, scale=teacher_h**-0.5)
    loss = getattr(liger_chunked, f"LigerFusedLinear{name}Loss")(**SOFT, **options)
    return Step(lambda: loss(w, x, teacher_w, teacher_x)[0], (x, w))


def top_k_distillation(n: int, h: int, v: int, k: int = 64) -> Step:
    from liger_chunked import LigerFusedLinearKLDivLoss

    x, w = _head(n, h, v=v)
    ids = torch.stack([torch.randperm(v, device=DEVICE)[:k] for _ in range(64)]).repeat(-(-n // 64), 1)[:n]
    logps = (torch.randn(n, k, device=DEVICE).log_softmax(-1) - 0.1).contiguous()
    loss = LigerFusedLinearKLDivLoss(**SOFT)
    return Step(lambda: loss(w, x, teacher_logps=logps, teacher_ids=ids)[0], (x, w))


MIB = 1 << 20
ON_GPU: Mapping[str, Callable[[], Step]] = {
    "cross entropy 8192x4096x128256": lambda: cross_entropy(8192, 4096, 128256),
    "cross entropy 8192x1536x151936": lambda: cross_entropy(8192, 1536, 151936),
    "cross entropy 8192x1536x151936, 1792-token chunks": lambda: cross_entropy(
        8192, 1536, 151936, logits_budget=1792 * 151936 * 2
    ),
    "cross entropy 32768x896x151936": lambda: cross_entropy(32768, 896, 151936),
    "cross entropy 65536x2048x151936": lambda: cross_entropy(65536, 2048, 151936),
    "cross entropy, smoothing, z-loss, softcap 8192x2304x256000": lambda: cross_entropy(
        8192, 2304, 256000, label_smoothing=0.1, lse_square_scale=1e-4, softcap=30.0
    ),
    "linear_token_stats 8192x4096x128256, 256 MiB": lambda: token_stats(8192, 4096, 128256, logits_budget=256 * MIB),
    "linear_token_stats, entropy 8192x4096x128256, 1 GiB": lambda: token_stats(
        8192, 4096, 128256, entropy=True, logits_budget=1024 * MIB
    ),
    "linear_token_stats 8192x1536x151936, 256 MiB": lambda: token_stats(8192, 1536, 151936, logits_budget=256 * MIB),
    "linear_token_stats, entropy 16384x2048x151936, 512 MiB": lambda: token_stats(
        16384, 2048, 151936, entropy=True, logits_budget=512 * MIB
    ),
    "linear_token_stats 2048x896x151936, 256 MiB": lambda: token_stats(2048, 896, 151936, logits_budget=256 * MIB),
    "linear_token_stats 8192x1536x151936": lambda: token_stats(8192, 1536, 151936),
    "linear_token_stats, entropy 32768x896x151936, 512 MiB": lambda: token_stats(
        32768, 896, 151936, entropy=True, logits_budget=512 * MIB
    ),
    "DPO, reference 4x2x2048x4096x128256": lambda: preference("DPO", 4, 2048, 4096, 128256, prompt=0.5),
    "DPO, one pair 1x2x16384x2048x151936": lambda: preference("DPO", 1, 16384, 2048, 151936),
    "ORPO 4x2x2048x4096x128256": lambda: preference("ORPO", 4, 2048, 4096, 128256, prompt=0.5),
    "SimPO 4x2x2048x4096x128256": lambda: preference("SimPO", 4, 2048, 4096, 128256, prompt=0.5),
    "KTO 4x2x2048x4096x128256": lambda: preference(
        "KTO", 4, 2048, 4096, 128256, prompt=0.5, average_log_prob=True, use_ref_model=False
    ),
    "GRPO 8x2048x2048x151936": lambda: policy(8, 2048, 2048, 151936),
    "GRPO, entropy bonus 8x2048x2048x151936": lambda: policy(8, 2048, 2048, 151936, entropy_coef=0.01),
    "JSD 8192x(1536, 4096)x151936": lambda: distillation("JSD", 8192, 1536, 4096, 151936),
    "KL 8192x(1536, 4096)x151936": lambda: distillation("KLDiv", 8192, 1536, 4096, 151936),
    "TVD 8192x(1536, 4096)x151936": lambda: distillation("TVD", 8192, 1536, 4096, 151936),
    "KL, teacher's top 64 8192x1536x151936": lambda: top_k_distillation(8192, 1536, 151936),
}
SMALL: Mapping[str, Callable[[], Step]] = {
    "cross entropy 4096x1024x32000": lambda: cross_entropy(4096, 1024, 32000),
    "DPO 2x2x512x1024x32000": lambda: preference("DPO", 2, 512, 1024, 32000),
}
ON_CPU: Mapping[str, Callable[[], Step]] = {
    "cross entropy 128x32x1024": lambda: cross_entropy(128, 32, 1024),
    "DPO, reference 2x2x16x32x1024": lambda: preference("DPO", 2, 16, 32, 1024, prompt=0.5),
    "JSD 32x(32, 48)x1024": lambda: distillation("JSD", 32, 32, 48, 1024),
}
IN_A_ROW = 10
WITH_GRAPH = ", a CUDA graph"
TASKS = [*ON_GPU, *SMALL, *(name + WITH_GRAPH for name in SMALL)]
if DEVICE == "cpu":
    TASKS = list(ON_CPU)


def build(task: str, plain: bool) -> Step | Captured:
    """Return a task's step. `plain`: without the graph that its name has."""
    name = task.removesuffix(WITH_GRAPH)
    if name not in SMALL:
        return (ON_GPU if DEVICE == "cuda" else ON_CPU)[task]()
    step = SMALL[name]()
    return step.captured() if name != task and not plain else step


def digest(tensors: list[Tensor]) -> list[int]:
    """Return two sums over the bits of each tensor, one weighted by position: equal bits give equal sums."""
    sums = []
    for x in tensors:
        bits = x.detach().contiguous().view(-1).view(torch.uint8)
        plain = weighted = 0
        for block in bits.split(DIGEST_BLOCK):
            wide = block.to(torch.int64)
            plain += int(wide.sum())
            weighted += int((wide * (torch.arange(len(block), device=wide.device) % 65521 + 1)).sum())
        sums += [plain, weighted]
    return sums


def _peak_mib(step: Step) -> float:
    for leaf in step.leaves:
        leaf.grad = None
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    _synchronize()
    return round((torch.cuda.max_memory_allocated() - before) / MIB, 1)


def _synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def _median_ms(step: Step | Captured, repeats: int, in_a_row: int) -> float:
    import time

    times = []
    for _ in range(max(1, repeats // in_a_row)):
        _synchronize()
        begin = time.perf_counter()
        for _ in range(in_a_row):
            step()
        _synchronize()
        times.append((time.perf_counter() - begin) * 1e3 / in_a_row)
    return statistics.median(times)


def worker() -> None:
    """Answer the requests of the parent process, one JSON object per line."""
    step: Step | Captured | None = None
    in_a_row = 1
    for line in sys.stdin:
        request = json.loads(line)
        if "task" in request:
            step = None
            gc.collect()
            if DEVICE == "cuda":
                torch.cuda.empty_cache()
            torch.manual_seed(0)
            step = build(request["task"], request["plain"])
            in_a_row = IN_A_ROW if WITH_GRAPH in request["task"] else 1
            loss = step()
            answer: dict[str, Any] = {"imported": sys.modules["liger_chunked"].__file__}
            answer["digest"] = digest([loss, *(x.grad for x in step.leaves if x.grad is not None)])
            del loss
            if DEVICE == "cuda":
                if isinstance(step, Step):
                    answer["mib"] = _peak_mib(step)
        else:
            assert step is not None
            answer = {"ms": _median_ms(step, request["repeats"], in_a_row)}
        print(json.dumps(answer), flush=True)


class Checkout:
    """A worker process that imports the library from `path`: `script --worker`, with `arguments`."""

    def __init__(self, path: Path, script: Path = Path(__file__), arguments: Sequence[str] = ()) -> None:
        self.path = path
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(path), os.environ.get("PYTHONPATH", "")])}
        self._process = subprocess.Popen(
            [sys.executable, str(script.resolve()), "--worker", *arguments],
            cwd=path,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the worker ended with exit status {self._process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@contextmanager
def checkouts(*paths: Path, script: Path = Path(__file__), arguments: Sequence[str] = ()) -> Iterator[list[Checkout]]:
    opened = [Checkout(path.resolve(), script, arguments) for path in paths]
    try:
        yield opened
    finally:
        for checkout in opened:
            checkout.close()


def in_turns(before: Checkout, after: Checkout, rounds: int, repeats: int) -> tuple[list[float], list[float]]:
    """Return the milliseconds of each checkout's turns at the task that both have built."""
    before_ms: list[float] = []
    after_ms: list[float] = []
    turns = [(before, before_ms), (after, after_ms)]
    for _ in range(rounds):
        for checkout, times in turns:
            times.append(checkout.ask(repeats=repeats)["ms"])
        turns.reverse()  # the first one runs on a slightly cooler card
    return before_ms, after_ms


def compare(before: Checkout, after: Checkout, task: str, rounds: int, milliseconds: float) -> dict[str, Any]:
    """Measure both checkouts at one task, alternating every `milliseconds` or so."""
    built = [checkout.ask(task=task, plain=checkout is before) for checkout in (before, after)]
    for checkout, answer in zip((before, after), built, strict=True):
        assert Path(answer["imported"]).is_relative_to(checkout.path), answer["imported"]
    estimate = before.ask(repeats=3)["ms"]
    after.ask(repeats=3)
    repeats = min(50, max(3, int(milliseconds / estimate)))
    before_ms, after_ms = in_turns(before, after, rounds, repeats)
    return {
        "task": task,
        "before_ms": round(statistics.median(before_ms), 4),
        "after_ms": round(statistics.median(after_ms), 4),
        "ratio": round(statistics.median(b / a for a, b in zip(before_ms, after_ms, strict=True)), 4),
        "before_mib": built[0].get("mib"),
        "after_mib": built[1].get("mib"),
        "equal_bits": built[0]["digest"] == built[1]["digest"],
    }


def commit_of(path: Path) -> str:
    """Return the content of a checkout's COMMIT file, or else its git commit."""
    if (path / "COMMIT").exists():
        return (path / "COMMIT").read_text().strip()
    git = ["git", "-C", str(path), "rev-parse", "HEAD"]
    return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()


def main() -> None:
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("before", type=Path, nargs="?", help="folder of the other checkout")
    parse.add_argument("--task", default="", help="only tasks whose name has this regular expression")
    parse.add_argument("--rounds", type=int, default=8, help="turns of each checkout at a task (%(default)s)")
    parse.add_argument("--milliseconds", type=float, default=250, help="length of a turn (%(default)s)")
    parse.add_argument("--out", type=Path, default=ROOT / "benchmarks/results", help="folder for the JSON")
    parse.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parse.parse_args()
    if args.worker:
        worker()
        return
    if args.before is None:
        parse.error("name the folder of the other checkout")
    sys.path.insert(0, str(ROOT))
    from benchmarks.harness import environment, new_file

    facts = {**environment(DEVICE), "before": commit_of(args.before)}
    path = new_file(args.out, "before_after", facts)
    rows: list[dict[str, Any]] = []
    with checkouts(args.before, ROOT) as (before, after):
        for task in TASKS:
            if not re.search(args.task, task):
                continue
            row = compare(before, after, task, args.rounds, args.milliseconds)
            rows.append(row)
            mib = row["before_mib"], row["after_mib"]
            memory = "" if None in mib else "  {:.0f} -> {:.0f} MiB".format(*mib)
            bits = "equal" if row["equal_bits"] else "OTHER BITS"
            print(
                f"{task:62s} {row['before_ms']:9.3f} -> {row['after_ms']:9.3f} ms  x{row['ratio']:.4f}{memory}  {bits}"
            )
            sys.stdout.flush()
            path.parent.mkdir(parents=True, exist_ok=True)
            content = {"family": "before_after", "environment": facts, "rows": rows}
            path.write_text(json.dumps(content, indent=1) + "\n")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
