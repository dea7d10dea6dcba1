"""Time small steps, where the host may be slower than the GPU, beside eager and compiled code.

    python -m benchmarks.host_time                      # a table of all rows
    python -m benchmarks.host_time --only DPO --trace   # and the Python calls of one step, by time
    python -m benchmarks.host_time --only layer         # base kernels beside torch's own operators
    python -m benchmarks.host_time --before ../before   # in turns with the library of another checkout
    python -m benchmarks.host_time --calls              # calls, operators and launches alone; on a CPU too

Steps follow each other without a wait, as in training. `wall` is the time of a step then, `host` that of three steps
that start on an idle GPU, until the last one is issued, `GPU` the sum of the kernels' times, `launches` their number.
Where wall is above GPU, the GPU waits for Python. `eager` and `compiled` compute the same loss from full logits,
`compiled` by torch.compile. Implementations take turns, so that all see the same host and the same clocks.

`captured` replays forward and backward as one CUDA graph: the host then launches nothing, and wall
time is the GPU's. Only steps of the same shapes can replay.

`calls`, `files` and `depth` are of the library's Python functions, `operators` those that torch dispatches, views and
allocations included. With `TRITON_INTERPRET=1`, `--calls` counts the path of a GPU on a CPU, and its launches.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import liger_chunked as lc
from benchmarks import before_after
from benchmarks.before_after import BETA, DEVICE, Captured, Step, _head, _randn, digest
from benchmarks.harness import RESULTS, RowsFile, synchronize
from liger_chunked.kernels.launch import Kernel

HERE = Path(__file__).parents[1]
IGNORED = -100
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


def token_logps(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    z = (x @ w.t()).float()
    return z.gather(-1, t[..., None])[..., 0] - z.logsumexp(-1)


def eager_simpo(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    chosen, rejected = token_logps(x, w, t).mean(-1).chunk(2)
    return -F.logsigmoid(BETA * (chosen - rejected) - 0.5).mean()


def eager_orpo(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    means = token_logps(x, w, t).mean(-1)
    chosen, rejected = (means - torch.log1p(-means.exp())).chunk(2)
    return -means.chunk(2)[0].mean() - BETA * F.logsigmoid(chosen - rejected).mean()


def eager_kto(x: Tensor, w: Tensor, t: Tensor, desirable: Tensor, ref_logps: Tensor) -> Tensor:
    gain = BETA * (token_logps(x, w, t).sum(-1) - ref_logps)
    return torch.sigmoid(torch.where(desirable, -gain, gain)).mean()


def eager_grpo(x: Tensor, w: Tensor, t: Tensor, advantages: Tensor, old_logps: Tensor) -> Tensor:
    ratio, a = torch.exp(token_logps(x, w, t) - old_logps), advantages[:, None]
    return -torch.min(ratio * a, ratio.clamp(0.8, 1.2) * a).mean()


def eager_grpo_ignoring(x: Tensor, w: Tensor, t: Tensor, advantages: Tensor, old_logps: Tensor) -> Tensor:
    mask, a = t != IGNORED, advantages[:, None]
    ratio = torch.exp(token_logps(x, w, t.clamp(min=0)) - old_logps)
    cost = torch.where(mask, -torch.min(ratio * a, ratio.clamp(0.8, 1.2) * a), 0.0)
    return (cost.sum(-1) / mask.sum(-1).clamp(min=1)).mean()


class OnThisThread(Step):
    """A step whose backward runs on the caller's thread: autograd would switch to another one and back."""

    def __call__(self) -> Tensor:
        with torch.autograd.set_multithreading_enabled(False):
            return super().__call__()


def of_losses(leaves: tuple[Tensor, ...], losses: dict[str, Callable[[], Tensor]]) -> dict[str, Run]:
    steps: dict[str, Run] = {name: Step(loss, leaves) for name, loss in losses.items()}
    steps["ours, backward on this thread"] = OnThisThread(losses["ours"], leaves)
    x, w = leaves
    if DEVICE == "cuda" and x.shape[:-1].numel() * len(w) < 1 << 30:  # a larger step does not wait for the host
        for name, loss in (("ours, captured", "ours"), ("compiled, captured", "compiled")):
            steps[name] = Step(losses[loss], leaves).captured()
    return steps


def cross_entropy(n: int, h: int, v: int) -> dict[str, Run]:
    x, w = _head(n, h, v=v)
    t = torch.randint(v, (n,), device=DEVICE)
    loss, compiled = lc.LigerFusedLinearCrossEntropyLoss(), torch.compile(eager_cross_entropy)
    losses = {
        "ours": lambda: loss(w, x, t),
        "compiled": lambda: compiled(x, w, t),
        "eager": lambda: eager_cross_entropy(x, w, t),
    }
    return of_losses((x, w), losses)


def dpo(pairs: int, length: int, h: int, v: int) -> dict[str, Run]:
    x, w = _head(2 * pairs, length, h, v=v)
    t = torch.randint(v, (2 * pairs, length), device=DEVICE)
    ref_x, ref_w = x.detach() + 0.1 * _randn(*x.shape), w.detach().clone()
    loss, compiled = lc.LigerFusedLinearDPOLoss(beta=BETA), torch.compile(eager_dpo)
    losses = {
        "ours": lambda: loss(w, x, t, None, ref_x, ref_w)[0],
        "compiled": lambda: compiled(x, w, t, ref_x, ref_w),
        "eager": lambda: eager_dpo(x, w, t, ref_x, ref_w),
    }
    return of_losses((x, w), losses)


def sequences(name: str, n: int, length: int, h: int, v: int, ignored: float = 0.0) -> dict[str, Run]:
    """Return steps of another loss of `n` sequences. About the share `ignored` of their tokens has no target."""
    x, w = _head(n, length, h, v=v)
    t = torch.randint(v, (n, length), device=DEVICE)
    more, given, eager = (), {}, eager_simpo
    if name == "ORPO":
        eager = eager_orpo
    if name == "KTO":
        ref_logps = torch.full((n,), -10.0 * length, device=DEVICE)
        more, given, eager = (torch.arange(n, device=DEVICE) < n // 2, ref_logps), {"kl": 0.0}, eager_kto
    if name == "GRPO":
        more = torch.randn(n, device=DEVICE), torch.full((n, length), -10.0, device=DEVICE)
        eager = eager_grpo_ignoring if ignored else eager_grpo
    settings = {} if name == "GRPO" else {"beta": BETA}
    loss, compiled = getattr(lc, f"LigerFusedLinear{name}Loss")(**settings), torch.compile(eager)
    names = {"KTO": ("preference_labels", "ref_logps"), "GRPO": ("advantages", "old_logps")}.get(name, ())
    given |= dict(zip(names, more, strict=True))
    losses = {
        "ours": lambda: loss(w, x, t, **given)[0],
        "compiled": lambda: compiled(x, w, t, *more),
        "eager": lambda: eager(x, w, t, *more),
    }
    if ignored:
        # A captured step launches the kernels of a step that ignores nothing, and cannot compile them.
        for _ in range(3):
            Step(losses["ours"], (x, w))()
        t[torch.rand(n, length, device=DEVICE) < ignored] = IGNORED
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
        f"{name} 4x512x1024x32000": partial(sequences, name, 4, 512, 1024, 32000)
        for name in ("SimPO", "ORPO", "KTO", "GRPO")
    },
    "GRPO, 30% ignored 4x512x1024x32000": partial(sequences, "GRPO", 4, 512, 1024, 32000, 0.3),
    **{
        f"layer {name} {n}x{width}": partial(make, n, width)
        for name, make in LAYERS.items()
        for width in (896, 4096)
        for n in (4096, 16384)
    },
}


TINY: dict[str, Callable[[], dict[str, Run]]] = {
    "cross entropy": lambda: cross_entropy(32, 16, 64),
    "DPO": lambda: dpo(2, 8, 16, 64),
    **{name: partial(sequences, name, 4, 8, 16, 64) for name in ("SimPO", "ORPO", "KTO", "GRPO")},
    "GRPO, 30% ignored": partial(sequences, "GRPO", 4, 8, 16, 64, 0.3),
}


def rows() -> dict[str, Callable[[], dict[str, Run]]]:
    """Return the rows of a GPU, or small ones on a CPU, which show that the benchmark runs."""
    return ROWS if DEVICE == "cuda" else TINY


class Calls(NamedTuple):
    """What one step of the library does on the host."""

    calls: int
    files: int
    depth: int
    operators: int
    launches: int  # operators that compute, and kernels


_ALLOCATIONS = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided")


class _Operators(TorchDispatchMode):
    """Counts operators, and those that launch: not views, allocations, and reads of the host."""

    def __init__(self) -> None:
        super().__init__()
        self.paused, self.all, self.launching = False, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.paused:
            aliases = (result.alias_info for result in func._schema.returns)
            is_view = any(alias is not None and not alias.is_write for alias in aliases)
            name = func.overloadpacket.__name__
            self.all += 1
            self.launching += not (is_view or name in _ALLOCATIONS or name == "_local_scalar_dense")
        return func(*args, **(kwargs or {}))


def count_calls(step: Run) -> Calls:
    """Count in two steps after a warm-up, with the backward on this thread."""
    root = str(Path(lc.__file__).parent)
    files: set[str] = set()
    calls = depth = deepest = kernels = 0
    operators, launch = _Operators(), Kernel.__call__

    def profile(frame: Any, event: str, _: Any) -> None:
        nonlocal calls, depth, deepest
        file = frame.f_code.co_filename
        if event not in ("call", "return") or not file.startswith(root):
            return
        depth += 1 if event == "call" else -1
        if event == "call":
            files.add(file)
            calls, deepest = calls + 1, max(deepest, depth)

    def counted(*given: Any, **named: Any) -> None:
        nonlocal kernels
        kernels += 1
        # A launch is one call. The interpreter runs a kernel as Python code and torch operators.
        profiled, operators.paused = sys.getprofile(), True
        sys.setprofile(None)
        try:
            launch(*given, **named)
        finally:
            operators.paused = False
            sys.setprofile(profiled)

    with torch.autograd.set_multithreading_enabled(False):
        for _ in range(3):
            step()
        Kernel.__call__ = counted  # type: ignore[method-assign]
        try:
            sys.setprofile(profile)
            step()
            sys.setprofile(None)
            kernels = 0
            with operators:
                step()
        finally:
            sys.setprofile(None)
            Kernel.__call__ = launch  # type: ignore[method-assign]
    return Calls(calls, len(files), deepest, operators.all, operators.launching + kernels)


class Turn(NamedTuple):
    wall_ms: float
    host_ms: float


def turn(step: Run) -> Turn:
    """Time about 50 ms of steps, or one step that takes longer."""
    step()
    synchronize()
    start = time.perf_counter()
    step()
    synchronize()
    first = time.perf_counter() - start
    n, is_long = max(1, min(60, int(0.05 / first))), first > 0.02
    start = time.perf_counter()
    for _ in range(n):
        step()
    synchronize()
    wall, start = (time.perf_counter() - start) / n * 1e3, time.perf_counter()
    n = 1 if is_long else 3
    for _ in range(n):
        step()
    host = (time.perf_counter() - start) / n * 1e3
    synchronize()
    if is_long and DEVICE == "cuda":
        torch.cuda.empty_cache()  # leave memory to the other process, whose next step comes now
    return Turn(wall, host)


def kernels_of(step: Run) -> tuple[float, int]:
    """Return the sum of the kernels' times of a step, in ms, and their number; nothing on a CPU."""
    if DEVICE == "cpu":
        return 0.0, 0
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        synchronize()
    kernels = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return sum(e.device_time_total for e in kernels) / 1e3, len(kernels)


def trace(step: Run) -> None:
    """Print where Python spends a step's time. The profiler makes calls about three times as slow."""
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(50):
        step()
    profile.disable()
    pstats.Stats(profile).sort_stats("tottime").print_stats(45)


class Side:
    """The library of one checkout: its steps, which a `turn` runs."""

    def __init__(self) -> None:
        self._steps: dict[str, Run] = {}

    def make(self, row: str) -> list[str]:
        self._steps.clear()
        torch.manual_seed(0)
        self._steps |= rows()[row]()
        return list(self._steps)

    def turn(self, name: str) -> tuple[float, ...]:
        return turn(self._steps[name])

    def kernels_of(self, name: str) -> tuple[float, ...]:
        return kernels_of(self._steps[name])

    def calls(self, name: str) -> tuple[float, ...]:
        return count_calls(self._steps[name])

    def digest(self, name: str) -> list[int]:
        """Return what is equal if the bits of loss and gradients are."""
        step = self._steps[name]
        assert isinstance(step, Step | Captured)
        loss = step()
        return digest([loss, *(x.grad for x in step.leaves if x.grad is not None)])

    def trace(self, name: str) -> None:
        trace(self._steps[name])


class Other:
    """A `Side` in a process of its own, with the library of another checkout."""

    def __init__(self, checkout: Path) -> None:
        code = (
            f"import sys; sys.path.insert(0, {str(checkout)!r}); import liger_chunked; sys.path[0] = {str(HERE)!r}; "
            "from benchmarks import host_time; host_time.serve()"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", code], cwd=HERE, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __getattr__(self, method: str) -> Callable[[str], Any]:
        def ask(argument: str) -> Any:
            assert self._process.stdin is not None and self._process.stdout is not None
            print(json.dumps([method, argument]), file=self._process.stdin, flush=True)
            answer = self._process.stdout.readline()
            if not answer:
                raise RuntimeError(f"the other checkout failed at {method} of {argument}")
            return json.loads(answer)

        return ask


def serve() -> None:
    """Answer the questions of `Other`."""
    side, answers = Side(), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    for line in sys.stdin:
        method, argument = json.loads(line)
        print(json.dumps(getattr(side, method)(argument)), file=answers, flush=True)


def print_calls(only: str) -> None:
    before_after.DTYPE = torch.bfloat16  # that of the steps on a GPU
    print("| step | of | calls | files | depth | operators | launches |", "|---|---|---|---|---|---|---|", sep="\n")
    for name, make in TINY.items():
        if only in name:
            for of, step in make().items():
                if of.startswith("ours"):
                    print("|", " | ".join(map(str, (name, of, *count_calls(step)))), "|", flush=True)


def measure(sides: dict[str, Any], row: str, of: str, turns: int, counts: bool) -> list[dict[str, Any]]:
    """Return the measurements of a row's implementations whose name contains `of`, all of them in turns."""
    todo = []
    for prefix, side in sides.items():
        # Eager and compiled code are the same in both checkouts.
        todo += [(prefix, x) for x in side.make(row) if of in x and (not prefix or x.startswith("ours"))]
    times: dict[tuple[str, str], list[tuple[float, ...]]] = {key: [] for key in todo}
    for i in range(turns):
        for key in todo[i % len(todo) :] + todo[: i % len(todo)]:
            times[key].append(sides[key[0]].turn(key[1]))
        if times[todo[0]][0][0] > 50 and i == 2:
            break  # long steps differ little from turn to turn
    found = []
    for (prefix, name), both in times.items():
        side = sides[prefix]
        gpu_ms, launches = side.kernels_of(name)
        walls, hosts = zip(*both, strict=True)
        found.append(
            {
                "task": row,
                "of": prefix + name,
                "wall_ms": round(statistics.median(walls), 4),
                "least_wall_ms": round(min(walls), 4),
                "host_ms": round(statistics.median(hosts), 4),
                "gpu_ms": round(gpu_ms, 4),
                "launches": launches,
            }
        )
        if counts and name.startswith("ours") and "captured" not in name:
            found[-1] |= dict(zip(("calls", "files", "depth", "operators"), side.calls(name)[:4], strict=True))
        if prefix and counts:
            found[-1]["same_bits"] = side.digest(name) == sides[""].digest(name)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--of", default="", help="implementations whose name contains this")
    parser.add_argument("--before", type=Path, help="another checkout, or a folder that holds its liger_chunked")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no row after this time")
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--calls", action="store_true", help="count on tiny shapes, and time nothing")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON")
    given = parser.parse_args()
    if given.calls:
        print_calls(given.only)
        return
    sides: dict[str, Any] = {"": Side()}
    if given.before is not None:
        sides["before: "] = Other(given.before.resolve())
    end = time.monotonic() + given.seconds
    columns = ("wall_ms", "least_wall_ms", "host_ms", "gpu_ms", "launches", "calls", "operators", "same_bits")
    print("| step | of |", " | ".join(columns), "|\n" + "|---" * (2 + len(columns)) + "|")
    kept = RowsFile(given.out, "host_time")
    for name in rows():
        if given.only not in name or time.monotonic() > end:
            continue
        try:
            measured = measure(sides, name, given.of, given.turns, counts=not name.startswith("layer"))
        except torch.OutOfMemoryError as error:
            print(f"{name}: {str(error)[:100]}", flush=True)
            continue
        for row in measured:
            kept.add(row)
            print("|", name, "|", row["of"], "|", " | ".join(str(row.get(x, "")) for x in columns), "|", flush=True)
            if given.trace and not row["of"].startswith("before"):
                sides[""].trace(row["of"])


if __name__ == "__main__":
    main()
