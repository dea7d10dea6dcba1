"""Our trainers against TRL's own: the same log, without logits."""

from __future__ import annotations

import dataclasses
import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("trl")
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import tiny
from peft import LoraConfig
from test_cost import Memory

from liger_chunked import (
    LigerFusedLinearBCOLoss,
    LigerFusedLinearCPOLoss,
    LigerFusedLinearCrossEntropyLoss,
    LigerFusedLinearDPOLoss,
    LigerFusedLinearGRPOLoss,
    LigerFusedLinearJSDLoss,
    LigerFusedLinearKTOLoss,
    LigerFusedLinearORPOLoss,
    LigerFusedLinearPreferenceBase,
    LigerFusedLinearSimPOLoss,
)
from liger_chunked.integrations import trl as integration

pytestmark = [
    # transformers and TRL on themselves, and on a run of four steps without a GPU.
    pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning"),
]


def reward(completions: list[Any], **_: Any) -> list[float]:
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [float(sum(map(ord, text)) % 7) for text in texts]


def teacher() -> dict[str, Any]:
    return {"teacher_model": tiny.model("wide", seed=1)}


def reference() -> dict[str, Any]:
    return {"ref_model": tiny.model()}


def rewards() -> dict[str, Any]:
    return {"reward_funcs": [reward]}


@dataclass(frozen=True)
class Kind:
    """A trainer of TRL, what it is fed, and the arguments of every run of it."""

    name: str
    data: str
    arguments: Callable[[], dict[str, Any]] = dict
    config: dict[str, Any] = field(default_factory=dict)
    module: str = "trl"

    def stock(self) -> type:
        return getattr(importlib.import_module(self.module), f"{self.name}Trainer")

    def ours(self) -> type:
        return getattr(integration, f"Liger{self.name}Trainer")

    def config_class(self) -> type:
        return getattr(importlib.import_module(self.module), f"{self.name}Config")


GENERATION = {"num_generations": 2, "max_completion_length": 6}
KINDS = {
    kind.name: kind
    for kind in (
        Kind("SFT", "text"),
        Kind("DPO", "pairs", reference),
        Kind("KTO", "unpaired", reference),
        Kind("GRPO", "prompts", rewards, GENERATION),
        Kind("RLOO", "prompts", rewards, {**GENERATION, "beta": 0.0}),
        Kind("Distillation", "prompts", teacher, {"max_completion_length": 6}),
        Kind("ORPO", "pairs", module="trl.experimental.orpo"),
        Kind("CPO", "pairs", module="trl.experimental.cpo"),
        Kind("GKD", "messages", teacher, {"lmbda": 0.0}, module="trl.experimental.gkd"),
        Kind("GOLD", "messages", teacher, {"lmbda": 0.0, "max_length": 64, "use_uld_loss": False, "max_completion_length": 6},
             module="trl.experimental.gold"),
        Kind("OnlineDPO", "prompts", rewards, {"max_new_tokens": 6}, module="trl.experimental.online_dpo"),
    )
}

Log = list[dict[str, float]]


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., Log]:
    """Run four steps and return what was logged, but for the time it took."""

    def run(kind: str, ours: bool, config: dict[str, Any] | None = None, evaluate: bool = False, **arguments: Any) -> Log:
        k = KINDS[kind]
        settings = {
            "output_dir": str(tmp_path),
            "use_cpu": True,
            "bf16": False,
            "gradient_checkpointing": False,
            "report_to": "none",
            "disable_tqdm": True,
            "save_strategy": "no",
            "dataloader_pin_memory": False,
            "logging_steps": 1,
            "max_steps": 4,
            "per_device_train_batch_size": 2,
            "per_device_eval_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "learning_rate": 1e-2,
            "seed": 0,
        }
        args = k.config_class()(**{**settings, **k.config, **(config or {})})
        given = {"model": tiny.model(), "train_dataset": tiny.dataset(k.data), **k.arguments(), **arguments}
        if evaluate:
            given["eval_dataset"] = given["train_dataset"].select(range(5))
        trainer = (k.ours() if ours else k.stock())(args=args, processing_class=tiny.tokenizer(), **given)
        trainer.train()
        if evaluate:
            trainer.evaluate()
        timed = ("runtime", "per_second", "time")
        return [{k: v for k, v in entry.items() if not any(t in k for t in timed)} for entry in trainer.state.log_history]

    return run


def assert_same(ours: Log, stock: Log, common: bool = False, rel: float = 2e-5) -> None:
    """The same keys, or with `common` at least a loss and a gradient, and the same values."""
    assert len(ours) == len(stock) > 4
    for mine, theirs in zip(ours, stock, strict=True):
        keys = mine.keys() & theirs.keys()
        assert keys >= {"loss", "grad_norm"} or "train_loss" in keys or "eval_loss" in keys
        if not common:
            assert mine.keys() == theirs.keys()
        assert {k: mine[k] for k in keys} == pytest.approx({k: theirs[k] for k in keys}, rel=rel, abs=1e-5)


CASES = [
    ("SFT", {}, True),
    ("SFT", {"loss_type": "dft"}, False),
    ("SFT", {"packing": True, "packing_strategy": "wrapped", "max_length": 16}, False),
    ("DPO", {}, True),
    ("DPO", {"loss_type": "ipo"}, False),
    ("DPO", {"loss_type": "aot"}, False),
    ("DPO", {"loss_type": "robust", "label_smoothing": 0.1}, False),
    ("DPO", {"use_weighting": True, "ld_alpha": 0.5}, False),
    ("DPO", {"precompute_ref_log_probs": True}, True),
    ("KTO", {}, True),
    ("KTO", {"loss_type": "apo_zero_unpaired", "precompute_ref_log_probs": True}, False),
    ("GRPO", {}, True),
    ("GRPO", {"temperature": 0.8, "importance_sampling_level": "sequence", "loss_type": "grpo", "num_iterations": 2}, False),
    ("GRPO", {"cast_lm_head_to_fp32": True, "entropy_coef": 0.01}, False),
    ("RLOO", {"temperature": 0.8}, False),
    ("Distillation", {"temperature": 0.8, "beta": 0.5}, True),
    ("Distillation", {"beta": 1.0}, False),
    ("ORPO", {}, True),
    ("CPO", {}, True),
    ("CPO", {"loss_type": "simpo", "cpo_alpha": 0.0}, False),
    ("CPO", {"loss_type": "ipo", "cpo_alpha": 0.5}, False),
    ("GKD", {}, True),
    ("GKD", {"beta": 0.0}, False),
    ("GOLD", {"temperature": 0.8}, False),
    ("OnlineDPO", {}, False),
]


@pytest.mark.parametrize(("kind", "config", "evaluate"), CASES, ids=lambda x: str(x) if not isinstance(x, bool) else "")
def test_logs_what_trl_logs(train, kind, config, evaluate):
    stock = train(kind, ours=False, config=config, evaluate=evaluate)
    assert_same(train(kind, ours=True, config=config, evaluate=evaluate), stock)
