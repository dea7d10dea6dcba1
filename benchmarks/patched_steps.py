"""Time whole SFT and DPO steps of a model unchanged and patched, eager, with compiled layers and compiled, in turns.

    python -m benchmarks.patched_steps                              SmolLM2-135M, Qwen2.5-0.5B and Llama-3.2-1B
    python -m benchmarks.patched_steps smollm2-135m:4:256           model:sequences:length
    python -m benchmarks.patched_steps --parts smollm2-135m:4:256   the head and the layers alone as well
    torchrun --nproc-per-node 2 -m benchmarks.patched_steps --parts llama-3.2-1b:4:4096    two GPUs, tensor parallel

Under torchrun the model is split over all GPUs by the plain plan of `benchmarks/sharded_steps.py`, with all layers
checkpointed, and the rows are the first rank's times.

A step is forward, backward and AdamW in bfloat16 on random tokens, with a learning rate of 0. DPO is written in plain
PyTorch on the model's logits, without a reference: half of the sequences are chosen, the others rejected. Steps of
32,768 tokens or more recompute their layers (gradient checkpointing).

    ms         median of a step, until the device is done
    host       median until the host has launched forward and backward
    MiB        peak above weights and optimizer state
    of stock   ms over stock's, of the same run, eager or compiled like itself
    compiled   no, each of its layers (`layer.compile()`), or the model (`model.compile()`)
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks import models, sharded_steps
from benchmarks.harness import DEVICE, OURS, RESULTS, STOCK, RowsFile, peak_mib, synchronize
from benchmarks.preference import BETA
from benchmarks.ranks import agreed
from liger_chunked import apply_liger_kernel

SHAPES = [
    f"{name}:{batch}"
    for name in ("smollm2-135m", "qwen2.5-0.5b", "llama-3.2-1b")
    for batch in ("4:256", "4:1024", "32:1024")
]
SMALL = ["tiny-llama:2:32"]
CHECKPOINTED = 32768  # tokens


@contextmanager
def head_alone(model: PreTrainedModel, fused: bool) -> Iterator[None]:
    apply_liger_kernel(model, rope=False, rms_norm=False, swiglu=False, parallel_linear=False)
    yield


@contextmanager
def layers_alone(model: PreTrainedModel, fused: bool) -> Iterator[None]:
    apply_liger_kernel(model, fused_linear_cross_entropy=False)
    yield


@contextmanager
def on_dtensors(model: PreTrainedModel, fused: bool) -> Iterator[None]:
    apply_liger_kernel(model, parallel_linear=False)
    yield


WHOLE = {STOCK: models.nobody, OURS: models.ours}
PARTS = {STOCK: models.nobody, "head": head_alone, "layers": layers_alone, OURS: models.ours}
SPLIT = {"without parallel_linear": on_dtensors}  # of a model that is split over ranks


def sft(model: PreTrainedModel, ids: Tensor) -> Tensor:
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def dpo(model: PreTrainedModel, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    nll = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(len(ids), -1)
    chosen, rejected = nll.sum(-1).neg().chunk(2)
    return -F.logsigmoid(BETA * (chosen - rejected)).mean()


LOSSES: dict[str, Callable[[PreTrainedModel, Tensor], Tensor]] = {"SFT": sft, "DPO": dpo}


class Contender:
    """A model that trains; `parts()` runs a step and returns the host's seconds of its two passes, and all seconds."""

    def __init__(self, name: str, loss: str, ids: Tensor, patched: Any, compiled: str) -> None:
        is_split = dist.is_initialized()
        self.model = models.build(name, checkpointing=is_split or ids.numel() >= CHECKPOINTED)
        if is_split:
            sharded_steps.shard_tensors(self.model)
        self.patched = patched(self.model, fused=True)
        self.patched.__enter__()
        for part in {"no": (), "layers": self.model.model.layers, "model": (self.model,)}[compiled]:
            part.compile()
        self.optimizer = sharded_steps.optimizer_of(self.model)
        self.loss, self.ids = LOSSES[loss], ids

    def parts(self) -> tuple[float, float]:
        synchronize()
        start = time.perf_counter()
        self.loss(self.model, self.ids).backward()
        launched = time.perf_counter()
        self.optimizer.step()
        self.optimizer.zero_grad()
        synchronize()
        return launched - start, time.perf_counter() - start

    def close(self) -> None:
        self.patched.__exit__(None, None, None)


def join_the_others() -> int:
    """Join torchrun's process group, and return this process's rank."""
    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
    return dist.get_rank()


def measure(shape: str, loss: str, compiled: str, contenders: dict[str, Any], turns: int) -> list[dict[str, Any]]:
    name, batch, length = shape.split(":")
    torch.manual_seed(1)
    ids = torch.randint(models.vocabulary(name), (int(batch), int(length)), device=DEVICE)
    torch._dynamo.reset()
    steps = {kind: Contender(name, loss, ids, patched, compiled) for kind, patched in contenders.items()}
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    about = {"shape": shape, "loss": loss, "compiled": compiled, "ranks": ranks}
    rows = {kind: {**about, "contender": kind} for kind in steps}
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in steps}
    for kind, step in steps.items():
        step.parts()
        step.parts()
        rows[kind]["MiB"] = peak_mib(step.parts, ())
    for _ in range(turns):
        for kind, step in steps.items():
            found[kind].append(step.parts())
    for kind, row in rows.items():
        host, whole = (statistics.median(seconds) * 1e3 for seconds in zip(*found[kind], strict=True))
        tokens_per_s = round(ids.numel() / whole * 1e3 / ranks)  # of a GPU
        row |= {"ms": round(whole, 2), "host": round(host, 2), "tokens_per_s": tokens_per_s}
        row["of stock"] = round(row["ms"] / rows[STOCK]["ms"], 3)
    for step in steps.values():
        step.close()
    return list(rows.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", default=SHAPES if DEVICE == "cuda" else SMALL)
    parser.add_argument("--turns", type=int, default=11)
    parser.add_argument("--seconds", type=float, default=3600, help="start no table after this time")
    parser.add_argument("--parts", action="store_true", help="time the head and the layers alone as well")
    parser.add_argument("--losses", nargs="+", default=list(LOSSES), choices=LOSSES)
    parser.add_argument("--compiled", nargs="+", default=["no", "layers"], choices=["no", "layers", "model"])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON")
    given = parser.parse_args()
    rank, family, contenders = 0, "patched_steps", PARTS if given.parts else WHOLE
    if "TORCHELASTIC_RUN_ID" in os.environ:
        rank, family, contenders = join_the_others(), "patched_steps_of_ranks", contenders | SPLIT
    kept = RowsFile(given.out, family) if rank == 0 else None
    end = time.monotonic() + given.seconds
    for shape in given.shapes:
        for compiled in given.compiled:
            for loss in given.losses:
                late = float(time.monotonic() > end)
                if agreed(late) if dist.is_initialized() else late:
                    return
                for row in measure(shape, loss, compiled, contenders, given.turns):
                    if kept is not None:
                        kept.add(row)
                        print(row, flush=True)
                gc.collect()
                if DEVICE == "cuda":
                    torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
