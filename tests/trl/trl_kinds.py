"""Every trainer of TRL that runs without a server: its data, its settings, and what a step of it is measured by."""

from __future__ import annotations

import dataclasses
import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import tiny
import torch
from datasets import Dataset
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from transformers.generation import GenerationMixin

from liger_chunked.deferred.lazy import PLAIN
from liger_chunked.integrations import trl as integration


def reward(completions: list[Any], **_: Any) -> list[float]:
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [float(sum(map(ord, text)) % 7) for text in texts]


def teacher() -> dict[str, Any]:
    return {"teacher_model": tiny.model("wide", seed=1)}


def reference() -> dict[str, Any]:
    # Differs from the policy; equal models would give tied rewards, decided by rounding.
    return {"ref_model": tiny.model(seed=2)}


def rewards() -> dict[str, Any]:
    return {"reward_funcs": [reward]}


def data(kind: str) -> Dataset:
    if kind == "triples":
        return tiny.dataset("pairs").map(lambda row: {"reference": row["chosen"][::-1]})
    if kind == "privileged":
        return tiny.dataset("prompts").map(lambda row: {"privileged_context": row["prompt"][::-1]})
    return tiny.dataset(kind)


@dataclass(frozen=True)
class Kind:
    """A trainer of TRL, its data, and the arguments of all its runs."""

    name: str
    data: str
    arguments: Callable[[], dict[str, Any]] = dict
    config: dict[str, Any] = field(default_factory=dict)
    module: str = "trl"
    config_name: str = ""
    shares: bool = False  # prompts

    def stock(self) -> Any:
        return getattr(importlib.import_module(self.module), f"{self.name}Trainer")

    def ours(self) -> Any:
        return getattr(integration, f"Liger{self.name}Trainer")

    def config_class(self) -> Any:
        name = self.config_name or f"{self.name}Config"
        try:
            return getattr(importlib.import_module(self.module), name)
        except AttributeError:  # that of the trainer it derives from
            return getattr(importlib.import_module("trl"), name)


GENERATION = {"num_generations": 2, "max_completion_length": 6}
_EXPERIMENTAL = "trl.experimental."
KINDS = {
    kind.name: kind
    for kind in (
        Kind("SFT", "text", config={"loss_type": "nll"}),
        Kind("DPO", "pairs", reference, shares=True),
        Kind("KTO", "unpaired", reference),
        Kind("GRPO", "prompts", rewards, GENERATION, shares=True),
        Kind("RLOO", "prompts", rewards, {**GENERATION, "beta": 0.0}, shares=True),
        Kind("Distillation", "prompts", teacher, {"max_completion_length": 6}),
        Kind("ORPO", "pairs", module=f"{_EXPERIMENTAL}orpo"),
        Kind("CPO", "pairs", module=f"{_EXPERIMENTAL}cpo"),
        Kind("GKD", "messages", teacher, {"lmbda": 0.0}, f"{_EXPERIMENTAL}gkd"),
        Kind(
            "GOLD",
            "messages",
            teacher,
            {"lmbda": 0.0, "max_length": 64, "max_completion_length": 6, "use_uld_loss": False},
            f"{_EXPERIMENTAL}gold",
        ),
        Kind("OnlineDPO", "prompts", rewards, {"max_new_tokens": 6}, f"{_EXPERIMENTAL}online_dpo"),
        Kind("GMPO", "prompts", rewards, GENERATION, f"{_EXPERIMENTAL}gmpo", "GMPOConfig", shares=True),
        Kind("A2PO", "prompts", rewards, {"max_completion_length": 6}, f"{_EXPERIMENTAL}a2po"),
        Kind("TPO", "triples", module=f"{_EXPERIMENTAL}tpo"),
        Kind(
            "IWOPD",
            "messages",
            lambda: {**teacher(), "teacher_processing_class": tiny.tokenizer()},
            {"max_length": 64, "max_completion_length": 6},
            f"{_EXPERIMENTAL}iw_opd",
        ),
        Kind(
            "SDFT",
            "privileged",
            config={
                **GENERATION,
                "distillation_mode": "full_logits",
                "distillation_topk": None,
                "teacher_model_kind": "live",
            },
            module=f"{_EXPERIMENTAL}sdft",
        ),
        Kind("SDPO", "privileged", rewards, {**GENERATION, "teacher_model_kind": "live"}, f"{_EXPERIMENTAL}sdpo"),
    )
}

# Settings of every trainer here: one that computes on the CPU and writes nothing.
QUIET = {
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "report_to": "none",
    "disable_tqdm": True,
    "save_strategy": "no",
    "dataloader_pin_memory": False,
}

Log = list[dict[str, float]]


def build(
    folder: Path,
    name: str,
    ours: bool = False,
    config: dict[str, Any] | None = None,
    evaluate: bool = False,
    **arguments: Any,
) -> Any:
    """Build a trainer of four steps with two micro-batches of two samples; `arguments` go to the trainer."""
    kind = KINDS[name]
    settings = {
        "output_dir": str(folder),
        **QUIET,
        "logging_steps": 1,
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "seed": 0,
    }
    settings = {**settings, **kind.config, **(config or {})}
    known = {x.name for x in dataclasses.fields(kind.config_class())}
    args = kind.config_class()(**{key: x for key, x in settings.items() if key in known or key in (config or {})})
    given = {
        "model": tiny.model(),
        "processing_class": tiny.tokenizer(),
        "train_dataset": data(kind.data),
        **kind.arguments(),
        **arguments,
    }
    if evaluate:
        given["eval_dataset"] = given["train_dataset"].select(range(5))
    return (kind.ours() if ours else kind.stock())(args=args, **given)


def log_of(trainer: Any) -> Log:
    """Return a trainer's log without times."""
    timed = ("runtime", "per_second", "time")
    history = trainer.state.log_history
    return [{k: v for k, v in entry.items() if not any(t in k for t in timed)} for entry in history]


def run(folder: Path, name: str, ours: bool = False, *args: Any, evaluate: bool = False, **arguments: Any) -> Log:
    """Run a trainer, evaluate on five samples if requested, and return the log without times."""
    trainer = build(folder, name, ours, *args, evaluate=evaluate, **arguments)
    trainer.train()
    if evaluate:
        trainer.evaluate()
    return log_of(trainer)


def measured(trainer: Any) -> Measured:
    """Train, and measure the steps without their sampling, which reads logits of one position at a time."""
    watched = Measured(trainer.model.config.vocab_size)
    generate = GenerationMixin.generate

    def unwatched(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return generate(*args, **kwargs)

    GenerationMixin.generate = unwatched
    try:
        with watched:
            trainer.train()
    finally:
        GenerationMixin.generate = generate
    return watched


_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}


class Measured(TorchDispatchMode):
    """Measure what runs under this mode.

    - `rows`: of the largest tensor of rows of the vocabulary
    - `products`: matrix products with a head, in rows: 2 N H V operations are N
    """

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary, self.rows, self.products = vocabulary, 0, 0.0
        self.where = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(t not in PLAIN for t in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        name, size = func.overloadpacket.__name__, self.vocabulary
        for x in tree_leaves(result):
            # Weights and their gradients have as many columns as the model is wide.
            if isinstance(x, Tensor) and not x.is_meta and x.ndim > 1 and x.is_floating_point() and x.shape[-1] == size:
                rows = x.numel() // size
                if not (name in ("t", "transpose", "detach", "alias", "view", "expand") and x.ndim == 2) and rows > self.rows:
                    self.rows, self.where = rows, name
        if name in _PRODUCTS:
            a, b = [x for x in args if isinstance(x, Tensor)][-2:]
            m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
            if size in (m, k, n):
                batch = a.shape[0] if a.ndim == 3 else 1
                others = sorted([m, k, n])
                others.remove(size)
                self.products += batch * others[0] * others[1]
        return result
