"""Compare every trainer of TRL that needs no server with the same trainer under `patch_trl`.

python -m benchmarks.patched_trainers                  every trainer
python -m benchmarks.patched_trainers --task DPO       trainers whose name contains this

Both train from the same weights on the same rows, by `train()`. On a GPU the model has the head of Qwen2.5-0.5B and
four of its layers. Two steps of plain descent in float32 show what a step computes:

    rows         of the largest tensor with one value for each id of the vocabulary, as rows x V, on a CPU
    products     matrix products with a head, in rows: 2 N H V operations are N, on a CPU; a GPU's kernels compute tiles
    apart        largest difference of a parameter from stock's, and its ratio to the largest change of a parameter

Then steps without a change of the weights are timed, on a GPU with bfloat16's autocast, AdamW not included:

    ms, MiB      median time of `training_step`, and its peak memory above the start of the step

None of these include `generate`, where a sampler reads logits of one position at a time.
"""

from __future__ import annotations

import gc
import logging
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PrinterCallback

from benchmarks import models
from benchmarks.harness import DEVICE, OURS, STOCK, Row, Table, parser, synchronize
from benchmarks.trainers import dataset, tokenizer
from benchmarks.trl_kinds import DATA, KINDS, Kind, around_generate, measured
from liger_chunked.integrations.trl import patch_trl

N_TIMED = 5


class Size(NamedTuple):
    """The model, the rows of a step, or the prompts of a trainer that samples, and the most tokens of each text."""

    model: str
    rows: int
    prompts: int
    prompt: int
    completion: int
    sampled: int


SIZE = Size("qwen2.5-0.5b-4l", 8, 16, 128, 384, 64) if DEVICE == "cuda" else Size("tiny-llama", 4, 4, 8, 12, 6)


def reward(completions: list[Any], **_: Any) -> list[float]:
    return [float(3 * i % 7) for i in range(len(completions))]  # not equal within a group


def data(kind: Kind, n: int) -> list[dict[str, Any]]:
    """Return rows of random letters. Lengths are uneven: the shortest is half of the longest."""
    generator = torch.Generator().manual_seed(1)

    def text(longest: int, i: int) -> str:
        letters = torch.randint(26, (longest - i % 4 * longest // 6,), generator=generator)
        return "".join(chr(97 + letter) for letter in letters.tolist())

    made, longest = DATA[kind.data], SIZE.completion
    return [made(i, text(SIZE.prompt, i), text(longest, i), text(longest, i + 1)) for i in range(n)]


def build(kind: Kind, patched: bool, folder: Path, n_steps: int, bf16: bool, rate: float) -> Any:
    """Return a trainer of `n_steps` steps. `folder` has a tokenizer."""
    n = SIZE.prompts if kind.data in ("prompts", "privileged") else SIZE.rows
    settings: dict[str, Any] = {
        "output_dir": str(folder / "out"),
        "max_steps": n_steps,
        "per_device_train_batch_size": n,
        "learning_rate": rate,
        "optim": "sgd",  # AdamW would turn the rounding of a zero gradient into a step
        "use_cpu": DEVICE == "cpu",
        "bf16": bf16,
        "gradient_checkpointing": False,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        **kind.config,
    }
    if kind.length in {field.name for field in fields(kind.config_class())}:
        settings[kind.length] = SIZE.sampled
    others: dict[str, Any] = {"reward_funcs": [reward]} if "reward_funcs" in kind.needs else {}
    for name in {"ref_model", "teacher_model"} & {*kind.needs}:
        others[name] = model = models.build(SIZE.model, seed=1, checkpointing=False).float()
        model.config._name_or_path = str(folder)  # where IW-OPD looks for the teacher's tokenizer
    with patch_trl() if patched else nullcontext():
        trainer = kind.stock()(
            model=models.build(SIZE.model, checkpointing=False).float(),
            args=kind.config_class()(**settings),
            processing_class=tokenizer(),
            train_dataset=dataset(data(kind, n * n_steps)),
            **others,
        )
    trainer.remove_callback(PrinterCallback)
    return trainer


class Timer:
    """Time each step of a trainer, and its peak memory in MiB (0 on a CPU), without `generate`."""

    def __init__(self, trainer: Any) -> None:
        self.ms: list[float] = []
        self.mib: list[float] = []
        self._step, self._sampling = trainer.training_step, 0.0
        trainer.training_step = self.step

    def step(self, *args: Any, **kwargs: Any) -> Tensor:
        self._sampling, before, start = 0.0, self._mib(reset=True), self._now()
        with around_generate(self._pause):
            loss = self._step(*args, **kwargs)
        self.ms.append(1e3 * (self._now() - start - self._sampling))
        self.mib.append(self._mib() - before)
        return loss

    @contextmanager
    def _pause(self) -> Iterator[None]:
        start = self._now()
        yield
        self._mib(reset=True)
        self._sampling += self._now() - start

    @staticmethod
    def _now() -> float:
        synchronize()
        return time.perf_counter()

    @staticmethod
    def _mib(reset: bool = False) -> float:
        """Return the peak since the last reset; with `reset`, what is allocated now."""
        if DEVICE == "cpu":
            return 0.0
        if reset:
            torch.cuda.reset_peak_memory_stats()
        return torch.cuda.max_memory_allocated() / 2**20


@dataclass
class PatchedRow(Row):
    """A trainer, see above; `apart` is None for stock, and without stock."""

    rows: int | None = None
    products: float | None = None
    apart: tuple[float, float] | None = None

    def measured(self, first: Any) -> str:
        line = "" if self.rows is None else f"{self.rows:6d} x V  {self.products:9.0f} products  "
        line += f"{self.ms:8.1f} ms"
        line += "" if self.mib is None else f"  {self.mib:7.0f} MiB"
        if self.apart is not None:
            line += "  apart {:.1e} ({:.1e} of the change)".format(*self.apart) + f"  time x{first.ms / self.ms:.2f}"
            line += "" if self.mib is None else f"  memory x{first.mib / self.mib:.2f}"
        return line


def measure(table: Table, kind: Kind, folder: Path) -> None:
    of_stock: dict[str, Tensor] = {}

    def fill(row: PatchedRow, patched: bool) -> None:
        trainer = build(kind, patched, folder, n_steps=2, bf16=False, rate=0.1)
        before = {name: x.detach().clone() for name, x in trainer.model.named_parameters()}
        if DEVICE == "cpu":
            watched = measured(trainer)
            row.rows, row.products = watched.rows, watched.products
        else:
            trainer.train()
        after = {name: x.detach() for name, x in trainer.model.named_parameters()}
        if patched and of_stock:
            apart, change = (max((x - of_stock[n]).abs().max().item() for n, x in y.items()) for y in (after, before))
            row.apart = apart, apart / change
        elif not patched:
            of_stock.update(after)
        del trainer, before, after
        gc.collect()
        trainer = build(kind, patched, folder, n_steps=1 + N_TIMED, bf16=DEVICE == "cuda", rate=0.0)
        timer = Timer(trainer)
        trainer.train()
        row.ms = round(median(timer.ms[1:]), 3)
        row.mib = round(max(timer.mib[1:]), 1) if DEVICE == "cuda" else None

    fills = {STOCK: partial(fill, patched=False), OURS: partial(fill, patched=True)}
    table.compare(kind.name, SIZE._asdict(), fills, PatchedRow)


def main(arguments: Sequence[str] | None = None) -> Path:
    table = Table("patched_trainers", parser(__doc__ or "", peer_seconds=0).parse_args(arguments))
    # cuDNN's attention gives NaN where a mask leaves nothing, as at padding on the left of a prompt.
    torch.backends.cuda.enable_cudnn_sdp(False)
    logging.disable(logging.WARNING)  # of TRL and transformers, about short runs
    try:
        with tempfile.TemporaryDirectory() as folder:
            tokenizer().save_pretrained(folder)
            for kind in KINDS.values():
                measure(table, kind, Path(folder))
    finally:
        logging.disable(logging.NOTSET)
    return table.finish()


if __name__ == "__main__":
    main()
