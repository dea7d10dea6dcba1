"""Benchmark whole GRPO updates of TRL's trainer: all that follows the generation of a batch.

python -m benchmarks.grpo                                       Llama-3.2-1B and Qwen2.5-0.5B
python -m benchmarks.grpo qwen2.5-0.5b:5:2048:512               model:prompts:prompt length:completion length
python -m benchmarks.grpo --compiled                            shared prompts with and without compiled layers

A prompt has 8 completions. An update is the old policy's pass, which TRL runs when it updates several times on a batch,
then `training_step` and AdamW at learning rate 0, with random weights in bfloat16 under TRL's mixed precision, and all
layers checkpointed. `old_ms` is the old policy's pass alone; `--no-old-policy` leaves it out, as TRL's default settings
do.

Most responses have an advantage of zero (`--zero-advantage`), because all completions of their prompt got the same
reward. Names of contenders:

    stock                         TRL's trainer
    liger-kernel layers           the same, with Liger-Kernel's layers
    liger_chunked                 ours without what follows
    ..., shared                   share_prefix="auto"
    ..., skipping                 skip_zero_advantage="auto"
    ..., kept ids                 the ids that the sampler kept, as benchmarks.kept_ids draws them

With `--compiled`: ours, shared, all of the above, and the same with `layer.compile()` for every layer
(docs/shared_prefix.md).

`apart` is the norm of the difference to the gradients of the first contender, over their norm. Kept ids are another
distribution, so they are compared with the first contender that has kept ids.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from trl.models.utils import disable_gradient_checkpointing

from benchmarks import models
from benchmarks.harness import DEVICE, OURS, STOCK, Table, median_ms
from benchmarks.kept_ids import drawn
from benchmarks.steps import StepRow, TrainingStep, allocated_mib, parts, steps_parser
from benchmarks.trainers import KINDS, LAYERS, Batch, Completions, build, rollouts
from liger_chunked import KeptIds

GROUP = 8  # completions of a prompt
MEAN_KEPT = 8.0  # ids a token
SHAPES = ["llama-3.2-1b:5:2048:512", "qwen2.5-0.5b:5:2048:512"]
SMALL = ["tiny-qwen2:5:24:8"]


class Contender(NamedTuple):
    """A trainer class of `KINDS["GRPO"]`, the context manager that patches its model, and what it is given."""

    side: str
    kernels: Callable[..., Any]
    shares: bool = False
    skips: bool = False
    keeps: bool = False
    compiles: bool = False


CONTENDERS = {
    STOCK: Contender("stock", models.nobody),
    f"{OURS}, shared": Contender("ours", models.ours, shares=True),
    f"{OURS}, shared, skipping": Contender("ours", models.ours, shares=True, skips=True),
    f"{OURS}, kept ids": Contender("ours", models.ours, keeps=True),
    f"{OURS}, shared, skipping, kept ids": Contender("ours", models.ours, shares=True, skips=True, keeps=True),
    OURS: Contender("ours", models.ours),
    LAYERS: Contender("stock", models.liger_kernel),
    f"{OURS}, shared, compiled": Contender("ours", models.ours, shares=True, compiles=True),
    f"{OURS}, shared, stock layers compiled": Contender("ours", models.nobody, shares=True, compiles=True),
    f"{OURS}, shared, skipping, kept ids, stock layers compiled": Contender(
        "ours", models.nobody, shares=True, skips=True, keeps=True, compiles=True
    ),
}


WITH_COMPILED = [
    OURS,
    f"{OURS}, shared",
    f"{OURS}, shared, skipping, kept ids",
    *(name for name, x in CONTENDERS.items() if x.compiles),
]


@dataclass
class UpdateRow(StepRow):
    """An update; `old_ms` is its pass of the old policy, `apart` the relative difference of its gradients."""

    old_ms: float | None = None
    apart: float | None = None

    def measured(self, first: Any) -> str:
        text = f"loss {self.loss:.6f}  norm {self.grad_norm:.4g}"
        if self.apart is not None:
            text += f"  gradients {self.apart:.1e} apart"
        if self.mib is not None and self.resident_mib is not None:
            text = f"{(self.mib + self.resident_mib) / 1024:.1f} GiB  {text}"
        old = "" if self.old_ms is None else f", of these {self.old_ms:.1f} ms of the old policy"
        return f"{self.ms:9.1f} ms  x{(first.ms or self.ms) / self.ms:.2f} {first.name}{old}  {text}"


def batch_of(model: str, n_prompts: int, prompt: int, length: int, zero: float) -> tuple[Batch, KeptIds]:
    """Return a batch without old log-probabilities, and the ids that were kept of its tokens, which are among them."""
    n, v = GROUP * n_prompts, models.vocabulary(model)
    data = Completions.random(n, prompt + length, prompt, v, GROUP)
    kept, sampled = drawn(n * length, v, MEAN_KEPT)
    data.ids[:, prompt:] = sampled.view(n, length)
    # Groups of equal rewards have no advantage. Prompts alternate, so that skipped sequences are not neighbours.
    of_prompt = torch.arange(n, device=DEVICE) % n_prompts
    advantages = torch.randn(n, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(2))
    advantages[of_prompt < round(zero * n_prompts)] = 0.0
    return {**rollouts(data, None), "advantages": advantages}, kept  # type: ignore[arg-type]


def by_sequence(kept: KeptIds, n: int) -> list[KeptIds]:
    """Return the ids of each sequence, as the trainer's rollouts have them."""
    places = torch.arange(kept.positions, device=DEVICE).view(n, -1)
    return [kept.take(row) for row in places]


def update_of(
    trainer: Any, batch: Batch, kept: KeptIds | None, with_old_policy: bool
) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """Return the old policy's pass; and that pass, if wanted, with forward and backward. As TRL runs them."""
    n, length = batch["completion_ids"].shape
    ids, seen = (torch.cat([batch[f"prompt_{x}"], batch[f"completion_{x}"]], 1) for x in ("ids", "mask"))
    if kept is not None:
        batch = {**batch, "kept_ids": by_sequence(kept, n)}

    def old_logps() -> Tensor:
        if kept is not None:
            trainer._recorded = lambda target: kept  # what the trainer has while it makes a batch
        try:
            with torch.no_grad(), disable_gradient_checkpointing(trainer.model, {"use_reentrant": False}):
                found = trainer._get_per_token_logps_and_entropies(trainer.model, ids, seen, length, batch_size=n)
        finally:
            if kept is not None:
                trainer._recorded = None
        logps: Tensor = found[0]
        return logps

    def backward() -> Tensor:
        inputs = {**batch, "old_per_token_logps": old_logps()} if with_old_policy else batch
        loss: Tensor = trainer.training_step(trainer.model_wrapped, inputs, None)
        return loss

    return old_logps, backward


def compile_layers(model: Any) -> None:
    for layer in model.base_model.layers:
        layer.compile()


def fill(row: UpdateRow, table: Table, gradients: dict[bool, list[Tensor]], model: str, shape: tuple[int, ...]) -> None:
    """Measure a contender; `gradients` holds the first ones, with and without kept ids."""
    before = allocated_mib()
    contender, args = CONTENDERS[row.name], table.args
    batch, kept = batch_of(model, *shape, zero=args.zero_advantage)
    n, kind = len(batch["advantages"]), KINDS["GRPO"]
    policy = models.build(model, checkpointing=not args.no_checkpointing)
    others = kind.others(model)
    if contender.side == "ours":
        others |= {
            "share_prefix": "auto" if contender.shares else False,
            "skip_zero_advantage": "auto" if contender.skips else False,
        }
    with tempfile.TemporaryDirectory() as folder, contender.kernels(policy, fused=False):
        trainer = build(kind, getattr(kind, contender.side), policy, others, folder, n)
        if contender.compiles:
            compile_layers(policy)
        old_logps, backward = update_of(trainer, batch, kept if contender.keeps else None, not args.no_old_policy)
        row.loss = backward().item()
        found = [p.grad for p in policy.parameters() if p.grad is not None]
        row.grad_norm = _norm(found)
        expected = gradients.get(contender.keeps)
        if expected is None:
            gradients[contender.keeps] = [g.clone() for g in found]
        else:
            row.apart = _norm([g - e for g, e in zip(found, expected, strict=True)]) / _norm(expected)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        if DEVICE == "cuda":
            torch.cuda.reset_peak_memory_stats()
        row.ms = round(median_ms(TrainingStep(backward, trainer.optimizer), args.repeats, warmup=1), 3)
        if DEVICE == "cuda":
            resident = allocated_mib()
            row.resident_mib = round(resident - before, 1)
            row.mib = round(torch.cuda.max_memory_allocated() / 2**20 - resident, 1)
        if not args.no_old_policy:
            row.old_ms = round(median_ms(old_logps, args.repeats, warmup=0), 3)
        row.tokens_per_s = round(batch["num_items_in_batch"].item() / row.ms * 1e3, 1)


def _norm(tensors: list[Tensor]) -> float:
    return torch.stack([torch.linalg.vector_norm(x, dtype=torch.float32) for x in tensors]).norm().item()


def measure(table: Table, model: str, n_prompts: int, prompt: int, length: int) -> None:
    shared = {"table": table, "gradients": {}, "model": model, "shape": (n_prompts, prompt, length)}
    wanted = WITH_COMPILED if table.args.compiled else [name for name, x in CONTENDERS.items() if not x.compiles]
    fills = {name: partial(fill, **shared) for name in wanted}
    facts = {
        "model": model,
        "prompts": n_prompts,
        "prompt": prompt,
        "completion": length,
        "group": GROUP,
        "zero_advantage": table.args.zero_advantage,
        "kept_ids": MEAN_KEPT,
        "old_policy": not table.args.no_old_policy,
    }
    table.compare(f"GRPO {model} {n_prompts}x{prompt}x{length}x{GROUP}", facts, fills, UpdateRow)


def main(arguments: Sequence[str] | None = None) -> Path:
    parse = steps_parser(__doc__ or "", "model:prompts:prompt length:completion length", repeats=5, seconds=0)
    parse.add_argument("--zero-advantage", type=float, default=0.6, help="share of the prompts (%(default)s)")
    parse.add_argument("--no-old-policy", action="store_true", help="without the old policy's pass")
    parse.add_argument("--compiled", action="store_true", help="shared prompts alone, with and without compiled layers")
    args = parse.parse_args(arguments)
    table = Table("grpo_compiled" if args.compiled else "grpo", args, whole=not args.shapes)
    for shape in args.shapes or (SMALL if DEVICE == "cpu" else SHAPES):
        measure(table, *parts(shape))
    return table.finish()


if __name__ == "__main__":
    main()
