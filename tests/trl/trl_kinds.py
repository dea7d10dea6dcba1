"""Every trainer of TRL that runs without a server: its data, its settings, and what a step of it is measured by."""

from __future__ import annotations

import atexit
import copy
import dataclasses
import functools
import importlib.util
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import pytest
import tiny
from datasets import Dataset
from peft import LoraConfig
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from transformers.generation import GenerationMixin

from liger_chunked.deferred.lazy import PLAIN as ORDINARY
from liger_chunked.integrations import trl as integration
from liger_chunked.integrations.trl.heads import Heads, HeadSettings


def reward(completions: list[Any], **_: Any) -> list[float]:
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [float(sum(map(ord, text)) % 7) for text in texts]


def teacher() -> dict[str, Any]:
    return {"teacher_model": tiny.model("wide", seed=1)}


@functools.cache
def _folder() -> str:
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    tiny.model("wide", seed=1).save_pretrained(folder.name)
    tiny.tokenizer().save_pretrained(folder.name)
    return folder.name


def saved_teacher() -> Any:
    """Return a teacher with a path, from which TRL loads its tokenizer."""
    model = tiny.model("wide", seed=1)
    model.config._name_or_path = _folder()
    return model


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
            lambda: {"teacher_model": saved_teacher()},
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
if importlib.util.find_spec("trl.experimental.ssd") is not None:  # of TRL 1.15
    KINDS["SSD"] = Kind("SSD", "prompts", config={"max_completion_length": 6}, module=f"{_EXPERIMENTAL}ssd")

# Those with `loss=`, `kept_ids` or `skip_zero_advantage`, for which a subclass is needed.
CLASSES = ("SFT", "DPO", "KTO", "GRPO", "RLOO", "Distillation")
PATCHED = "patched"
SHARING = tuple(kind.name for kind in KINDS.values() if kind.shares)

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
    ours: bool | str = False,
    config: dict[str, Any] | None = None,
    evaluate: bool = False,
    **arguments: Any,
) -> Any:
    """Build a trainer of four steps with two micro-batches of two samples; `arguments` go to the trainer.

    `ours` is the class with `loss=`, if there is one, or else (and with `PATCHED`) TRL's under `patch_trl`.
    """
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
    if not ours:
        return kind.stock()(args=args, **given)
    if name in CLASSES and ours is not PATCHED:
        return getattr(integration, f"Liger{name}Trainer")(args=args, **given)
    settings = {name: given.pop(name) for name in ("logits_budget", "share_prefix") if name in given}
    with integration.patch_trl(**settings):
        return kind.stock()(args=args, **given)


def log_of(trainer: Any) -> Log:
    """Return a trainer's log without times."""
    timed = ("runtime", "per_second", "time")
    history = trainer.state.log_history
    return [{k: v for k, v in entry.items() if not any(t in k for t in timed)} for entry in history]


def run(
    folder: Path,
    name: str,
    ours: bool | str = False,
    config: dict[str, Any] | None = None,
    evaluate: bool = False,
    **arguments: Any,
) -> Log:
    """Run a trainer, evaluate on five samples if requested, and return the log without times."""
    trainer = build(folder, name, ours, config, evaluate, **arguments)
    trainer.train()
    if evaluate:
        trainer.evaluate()
    return log_of(trainer)


@functools.cache
def log_of_trl(name: str, config: str, evaluate: bool) -> Log:
    """Return the log of TRL's own trainer with its usual arguments. Several tests compare with the same one."""
    with tempfile.TemporaryDirectory() as folder:
        return run(Path(folder), name, False, json.loads(config), evaluate)


def recorder(tmp_path: Path) -> Callable[..., Log]:
    """Return `run` in a folder of the test. A process runs TRL's own trainer once for each config."""

    def train(
        name: str, ours: bool | str, config: dict[str, Any] | None = None, evaluate: bool = False, **arguments: Any
    ) -> Log:
        if ours or arguments:
            return run(tmp_path, name, ours, config, evaluate, **arguments)
        # An evaluation comes after the training, and adds the last entry.
        evaluated = name != "OnlineDPO"  # TRL's does not support it
        log = copy.deepcopy(log_of_trl(name, json.dumps(config or {}, sort_keys=True), evaluated))
        return log if evaluate or not evaluated else log[:-1]

    return train


def assert_same(ours: Log, stock: Log, common: bool = False, entries: int = 5) -> None:
    """Compare the keys and values of at least `entries` logs. With `common`, compare only the keys in both."""
    assert len(ours) == len(stock) >= entries
    for mine, theirs in zip(ours, stock, strict=True):
        keys = mine.keys() & theirs.keys()
        assert keys >= {"loss", "grad_norm"} or "train_loss" in keys or "eval_loss" in keys
        if not common:
            assert mine.keys() == theirs.keys()
        assert {k: mine[k] for k in keys} == pytest.approx({k: theirs[k] for k in keys}, rel=2e-5, abs=1e-5)


def rare(*values: Any) -> Any:
    """Settings that change what TRL's own code does, or a second value of one: not in every run."""
    return pytest.param(*values, marks=pytest.mark.exhaustive)


SEQUENCES = {"temperature": 0.8, "importance_sampling_level": "sequence", "loss_type": "grpo", "num_iterations": 2}


# Not Adam: it divides a gradient by its size, so rounding of a zero gradient would become a step.
PLAIN = {"optim": "sgd", "learning_rate": 0.02}


def of_family(kind: str, family: str) -> dict[str, Any]:
    model = tiny.model(family)
    # ORPO and CPO add the auxiliary loss if the config requests router logits, the others if the model has them.
    model.config.output_router_logits = family == "experts" and kind in ("ORPO", "CPO")
    return {"model": model, **({"ref_model": tiny.model(family, seed=2)} if kind in ("DPO", "KTO") else {})}


def set_head(model: Any, **settings: Any) -> Heads:
    """Give a model the head of a trainer that has one, without the trainer."""
    heads = Heads(HeadSettings())
    heads.give(model, HeadSettings(**settings))
    return heads


def lora(kind: str, target_modules: tuple[str, ...] = ("q_proj", "v_proj"), **config: Any) -> dict[str, Any]:
    """Return the arguments of a trainer with a nonzero adapter. The reference is the model without it."""
    adapter = LoraConfig(r=4, target_modules=list(target_modules), init_lora_weights=False, **config)
    return {"peft_config": adapter, **({"ref_model": None} if "ref_model" in KINDS[kind].arguments() else {})}


_OF_WEIGHTS = {"t", "transpose", "detach", "alias", "view", "expand"}  # and of what is no new tensor
_PRODUCTS = {"mm", "addmm", "addmm_", "bmm", "baddbmm"}


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
        if any(t not in ORDINARY for t in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        name, size = func.overloadpacket.__name__, self.vocabulary
        for x in tree_leaves(result):
            # Weights and their gradients have as many columns as the model is wide.
            if isinstance(x, Tensor) and not x.is_meta and x.ndim > 1 and x.is_floating_point() and x.shape[-1] == size:
                rows = x.numel() // size
                if (
                    not (name in ("t", "transpose", "detach", "alias", "view", "expand") and x.ndim == 2)
                    and rows > self.rows
                ):
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


def measured(trainer: Any, evaluate: bool = False) -> Measured:
    """Train, evaluate, and measure this without the sampling, which reads logits of one position at a time."""
    watched = Measured(trainer.model.config.vocab_size)
    generate = GenerationMixin.generate

    def unwatched(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return generate(*args, **kwargs)

    GenerationMixin.generate = unwatched
    try:
        with watched:
            trainer.train()
            if evaluate:
                trainer.evaluate()
    finally:
        GenerationMixin.generate = generate
    return watched
