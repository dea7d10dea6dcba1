"""Time `Trainer.evaluate()` of a model unchanged, with deferred logits alone, and with our layers too, in turns.

    python -m benchmarks.evaluation                              SmolLM2-135M and Llama-3.2-1B
    python -m benchmarks.evaluation llama-3.2-1b:16:2048:8       model:sequences of a batch:length:batches

`seconds` is the median over `--turns` whole evaluations, the data loader included, on random tokens in bfloat16. `MiB`
is the peak above the weights. `loss` must agree.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainingArguments

from benchmarks import models
from benchmarks.harness import DEVICE, OURS, RESULTS, STOCK, RowsFile, peak_mib, synchronize
from liger_chunked import DeferHandle, defer_logits

SHAPES = ["smollm2-135m:8:1024:16", "smollm2-135m:32:1024:4", "llama-3.2-1b:8:1024:8", "llama-3.2-1b:16:2048:4"]
SMALL = ["tiny-llama:2:32:2"]


def head_alone(model: Any) -> DeferHandle:
    return defer_logits(model.lm_head)


CONTENDERS = {STOCK: nullcontext, f"{OURS} head alone": head_alone, OURS: partial(models.ours, fused=True)}


def measure(shape: str, turns: int) -> list[dict[str, Any]]:
    name, batch, length, batches = shape.split(":")
    model = models.build(name, checkpointing=False)
    torch.manual_seed(1)
    ids = torch.randint(models.vocabulary(name), (int(batch) * int(batches), int(length)))
    data = [{"input_ids": row, "labels": row} for row in ids]
    seconds: dict[str, list[float]] = {contender: [] for contender in CONTENDERS}
    rows: dict[str, dict[str, Any]] = {contender: {"shape": shape, "contender": contender} for contender in CONTENDERS}
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {"per_device_eval_batch_size": int(batch), "report_to": [], "disable_tqdm": True}
        trainer = Trainer(model, TrainingArguments(folder, **settings), eval_dataset=data)  # type: ignore[arg-type]
        for turn in range(turns + 1):
            for contender, patched in CONTENDERS.items():
                with patched(model):
                    if turn == 0:  # a warm-up
                        rows[contender]["MiB"] = peak_mib(trainer.evaluate, ())
                        continue
                    synchronize()
                    start = time.perf_counter()
                    rows[contender]["loss"] = trainer.evaluate()["eval_loss"]
                    synchronize()
                    seconds[contender].append(time.perf_counter() - start)
    for contender, row in rows.items():
        row["seconds"] = round(statistics.median(seconds[contender]), 4)
    return list(rows.values())


def main() -> Path:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", default=SHAPES if DEVICE == "cuda" else SMALL)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON")
    given = parser.parse_args()
    kept = RowsFile(given.out, "evaluation")
    for shape in given.shapes:
        for row in measure(shape, given.turns):
            kept.add(row)
            print(row, flush=True)
    return kept.path


if __name__ == "__main__":
    main()
