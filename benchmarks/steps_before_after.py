"""Compare two checkouts of the library at whole training steps: time, peak memory, loss and norm of the gradient.

    python -m benchmarks.steps_before_after ../before                   # this checkout against the one in ../before
    python -m benchmarks.steps_before_after ../before --task SFT --rounds 6

As in `benchmarks.before_after`, each checkout runs in its own process and the two take turns on a task, a few steps
each. SFT steps are those of `benchmarks.sft`, DPO and GRPO steps those of TRL's trainers in `benchmarks.trainers`.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

ON_GPU = [
    "SFT:llama-3.2-1b:8:2048",
    "SFT:qwen2.5-0.5b:8:4096",
    "SFT:gemma-2-2b-8l:4:2048",
    "SFT:qwen3-30b-a3b-4l:4:2048",
    "SFT, compiled layers:llama-3.2-1b:8:2048",
    "DPO:llama-3.2-1b:8:2048",
    "GRPO:qwen2.5-0.5b:8:2048",
]
ON_CPU = ["SFT:tiny-llama:2:32", "SFT, compiled layers:tiny-llama:2:32", "DPO:tiny-llama:4:32", "GRPO:tiny-qwen2:4:32"]


def build(task: str, stack: ExitStack) -> Any:
    """Return the `TrainingStep` of a task; `stack` keeps what it needs."""
    kind, model, n, length = task.split(":")
    if kind.startswith("SFT"):
        return _sft(model, int(n), int(length), kind.endswith("compiled layers"), stack)
    return _trainer(kind, model, int(n), int(length), stack)


def _sft(name: str, n: int, length: int, compiled: bool, stack: ExitStack) -> Any:
    from benchmarks import models, sft
    from benchmarks.steps import TrainingStep

    model = models.build(name)
    stack.enter_context(models.ours(model, fused=True))
    if compiled:
        for layer in model.model.layers:
            layer.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)
    ids = sft.random_tokens(name, n, length)

    def backward() -> Any:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        return loss.detach()

    return TrainingStep(backward, optimizer)


def _trainer(name: str, model: str, n: int, length: int, stack: ExitStack) -> Any:
    from benchmarks import models, trainers
    from benchmarks.steps import TrainingStep

    kind = trainers.KINDS[name]
    policy = models.build(model)
    data = trainers.Completions.random(n, length, int(length * kind.prompt), models.vocabulary(model))
    batch, others = kind.batch(data, policy), kind.others(model)
    own = [policy, *(x for x in others.values() if isinstance(x, torch.nn.Module))]
    others["share_prefix"] = False
    stack.enter_context(models.ours(*own, fused=False))
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    trainer = trainers.build(kind, kind.ours, policy, others, folder, n)
    return TrainingStep(lambda: trainer.training_step(trainer.model_wrapped, dict(batch), None), trainer.optimizer)


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def worker() -> None:
    """Answer the requests of the parent process, one JSON object per line."""
    step: Callable[[], None] | None = None
    stack = ExitStack()
    answers, sys.stdout = sys.stdout, sys.stderr  # trainers print
    for line in sys.stdin:
        request = json.loads(line)
        answer: dict[str, Any] = {"imported": sys.modules["liger_chunked"].__file__ if step else None}
        if "task" in request:
            step = None
            stack.close()
            torch._dynamo.reset()
            gc.collect()
            if DEVICE == "cuda":
                torch.cuda.empty_cache()
            stack = ExitStack()
            if request["task"]:
                torch.manual_seed(0)
                step = made = build(request["task"], stack)
                answer["loss"], answer["norm"] = made.first()
                step()
                answer["imported"] = sys.modules["liger_chunked"].__file__
                if DEVICE == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                    step()
                    synchronize()
                    answer["mib"] = round(torch.cuda.max_memory_allocated() / 2**20, 1)
        else:
            assert step is not None
            times = []
            for _ in range(request["repeats"]):
                synchronize()
                begin = time.perf_counter()
                step()
                synchronize()
                times.append((time.perf_counter() - begin) * 1e3)
            answer["ms"] = statistics.median(times)
        print(json.dumps(answer), file=answers, flush=True)


def compare(before: Any, after: Any, task: str, rounds: int, repeats: int) -> dict[str, Any]:
    from benchmarks.before_after import in_turns  # the path is set by `main`

    built = [checkout.ask(task=task) for checkout in (before, after)]
    for checkout, answer in zip((before, after), built, strict=True):
        assert Path(answer["imported"]).is_relative_to(checkout.path), answer["imported"]
    before_ms, after_ms = in_turns(before, after, rounds, repeats)
    for checkout in (before, after):
        checkout.ask(task="")  # frees the memory
    _, _, n, length = task.split(":")
    tokens = int(n) * int(length)
    return {
        "task": task,
        "before_ms": round(statistics.median(before_ms), 3),
        "after_ms": round(statistics.median(after_ms), 3),
        "ratio": round(statistics.median(b / a for a, b in zip(before_ms, after_ms, strict=True)), 4),
        "before_tokens_per_s": round(tokens / statistics.median(before_ms) * 1e3),
        "after_tokens_per_s": round(tokens / statistics.median(after_ms) * 1e3),
        **{f"{side}_{name}": x.get(name) for side, x in zip(("before", "after"), built, strict=True)
           for name in ("mib", "loss", "norm")},
    }  # fmt: skip


def main() -> None:
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("before", type=Path, nargs="?", help="folder of the other checkout")
    parse.add_argument("--task", default="", help="only tasks whose name has this regular expression")
    parse.add_argument("--rounds", type=int, default=6, help="turns of each checkout at a task (%(default)s)")
    parse.add_argument("--repeats", type=int, default=5, help="steps of a turn (%(default)s)")
    parse.add_argument("--out", type=Path, default=ROOT / "benchmarks/results", help="folder for the JSON")
    parse.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parse.parse_args()
    if args.worker:
        worker()
        return
    if args.before is None:
        parse.error("name the folder of the other checkout")
    sys.path.insert(0, str(ROOT))
    from benchmarks.before_after import checkouts, commit_of
    from benchmarks.harness import environment, new_file

    facts = {**environment(DEVICE), "before": commit_of(args.before)}
    path = new_file(args.out, "steps_before_after", facts)
    rows: list[dict[str, Any]] = []
    with checkouts(args.before, ROOT, script=Path(__file__)) as (before, after):
        for task in ON_GPU if DEVICE == "cuda" else ON_CPU:
            if not re.search(args.task, task):
                continue
            row = compare(before, after, task, args.rounds, args.repeats)
            rows.append(row)
            print(
                f"{task:44s} {row['before_ms']:9.2f} -> {row['after_ms']:9.2f} ms  x{row['ratio']:.4f}  "
                f"{row['before_tokens_per_s']} -> {row['after_tokens_per_s']} tok/s  "
                f"{row['before_mib']} -> {row['after_mib']} MiB  loss {row['before_loss']:.6f} {row['after_loss']:.6f}"
                f"  norm {row['before_norm']:.6g} {row['after_norm']:.6g}",
                flush=True,
            )
            path.parent.mkdir(parents=True, exist_ok=True)
            content = {"family": "steps_before_after", "environment": facts, "rows": rows}
            path.write_text(json.dumps(content, indent=1) + "\n")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
