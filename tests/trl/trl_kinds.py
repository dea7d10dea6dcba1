"""Trainers of TRL with tiny models: how they are built, run and compared."""

from __future__ import annotations

import atexit
import copy
import dataclasses
import functools
import json
import os
import socket
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from datasets import Dataset, disable_progress_bars
from fresh_process import FreshProcesses
from peft import LoraConfig
from torch import nn

from benchmarks.trl_kinds import DATA, KINDS
from liger_chunked import (
    LigerFusedLinearCrossEntropyLoss,
    LigerFusedLinearDPOLoss,
    LigerFusedLinearGRPOLoss,
    LigerFusedLinearJSDLoss,
    LigerFusedLinearKTOLoss,
)
from liger_chunked.integrations import trl as integration
from liger_chunked.integrations.trl.heads import Heads, HeadSettings


def reward(completions: list[Any], **_: Any) -> list[float]:
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [float(sum(map(ord, text)) % 7) for text in texts]


@functools.cache
def _folder() -> str:
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    tiny.tokenizer().save_pretrained(folder.name)
    return folder.name


def beside(name: str) -> dict[str, Any]:
    """Return what a trainer needs beside its policy. A reference that equals the policy would give tied rewards."""
    found: dict[str, Any] = {}
    for need in KINDS[name].needs:
        if need == "reward_funcs":
            found[need] = [reward]
        else:
            found[need] = tiny.model(seed=2) if need == "ref_model" else tiny.model("wide", seed=1)
            found[need].config._name_or_path = _folder()  # from which IW-OPD loads the teacher's tokenizer
    return found


def data(kind: str) -> Dataset:
    """Return rows of a key of `DATA`."""
    made = DATA[kind]
    return Dataset.from_list([made(i, *row.values()) for i, row in enumerate(tiny.rows())])


# For each trainer with `loss=`, the loss that is TRL's own.
LOSS_OF: dict[str, Callable[[], Any]] = {
    "SFT": LigerFusedLinearCrossEntropyLoss,
    "DPO": lambda: LigerFusedLinearDPOLoss(beta=0.1),
    "KTO": lambda: LigerFusedLinearKTOLoss(beta=0.1),
    "GRPO": lambda: LigerFusedLinearGRPOLoss(reduction="dapo"),
    "Distillation": LigerFusedLinearJSDLoss,
}
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
    settings = {**settings, **kind.config, kind.length: 6, **(config or {})}
    known = {x.name for x in dataclasses.fields(kind.config_class())}
    args = kind.config_class()(**{key: x for key, x in settings.items() if key in known or key in (config or {})})
    given = {
        "model": tiny.model(),
        "processing_class": tiny.tokenizer(),
        "train_dataset": data(kind.data),
        **beside(name),
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
        found, expected = ({k: -1 if x[k] is None else x[k] for k in keys} for x in (mine, theirs))
        assert found == pytest.approx(expected, rel=2e-5, abs=1e-5)


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


def state_of(model: nn.Module) -> dict[str, Any]:
    """Return the classes of a model's modules, and what is set on its instance."""
    classes = {name: type(module) for name, module in model.named_modules()}
    slots = ("forward", "_original_forward", "_is_accelerate_prepared", "_liger_forward")
    return {**classes, "set": {name: vars(model)[name] for name in slots if name in vars(model)}}


def set_head(model: Any, **settings: Any) -> Heads:
    """Give a model the head of a trainer that has one, without the trainer."""
    heads = Heads(HeadSettings())
    heads.give(model, HeadSettings(**settings))
    return heads


def lora(kind: str, target_modules: tuple[str, ...] = ("q_proj", "v_proj"), **config: Any) -> dict[str, Any]:
    """Return the arguments of a trainer with a nonzero adapter. The reference is the model without it."""
    adapter = LoraConfig(r=4, target_modules=list(target_modules), init_lora_weights=False, **config)
    return {"peft_config": adapter, **({"ref_model": None} if "ref_model" in KINDS[kind].needs else {})}


def spawn(fresh_process: FreshProcesses, worker: Callable[..., None], *arguments: str) -> None:
    """Run `worker(rank, *arguments, port)` on two ranks."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    fresh_process.spawn(worker, 2, *arguments, str(port))


def join(rank: int, port: str) -> None:
    """Let the trainers of this process meet those of the other rank."""
    torch.set_num_threads(1)
    disable_progress_bars()
    warnings.simplefilter("ignore", FutureWarning)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
