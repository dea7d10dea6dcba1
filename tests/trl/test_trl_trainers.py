"""Our trainers against TRL's: the same log, without logits."""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("trl")
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import tiny
from fused import asked_logits
from peft import LoraConfig
from spies import Memory
from table import relative_error
from torch import Tensor
from transformers import LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutput

from liger_chunked import (
    Clipped,
    LigerFusedLinearBCOLoss,
    LigerFusedLinearCPOLoss,
    LigerFusedLinearCrossEntropyLoss,
    LigerFusedLinearDPOLoss,
    LigerFusedLinearGRPOLoss,
    LigerFusedLinearJSDLoss,
    LigerFusedLinearKTOLoss,
    LigerFusedLinearORPOLoss,
    LigerFusedLinearPolicyBase,
    LigerFusedLinearPreferenceBase,
    LigerFusedLinearSimPOLoss,
)
from liger_chunked.deferred import rules
from liger_chunked.integrations import trl as integration
from liger_chunked.integrations.transformers import apply_liger_kernel, layers
from liger_chunked.integrations.trl import add_chunked_lm_head, heads
from liger_chunked.layers import liger_rms_norm

pytestmark = [
    # Warnings of transformers and TRL about themselves, and about short runs without a GPU.
    pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`label_smoothing_factor` is deprecated in `SFTTrainer`:FutureWarning"),
]


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


@dataclass(frozen=True)
class Kind:
    """A trainer of TRL, its data, and the arguments of all its runs."""

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
        Kind("SFT", "text", config={"loss_type": "nll"}),
        Kind("DPO", "pairs", reference),
        Kind("KTO", "unpaired", reference),
        Kind("GRPO", "prompts", rewards, GENERATION),
        Kind("RLOO", "prompts", rewards, {**GENERATION, "beta": 0.0}),
        Kind("Distillation", "prompts", teacher, {"max_completion_length": 6}),
        Kind("ORPO", "pairs", module="trl.experimental.orpo"),
        Kind("CPO", "pairs", module="trl.experimental.cpo"),
        Kind("GKD", "messages", teacher, {"lmbda": 0.0}, module="trl.experimental.gkd"),
        Kind(
            "GOLD",
            "messages",
            teacher,
            {"lmbda": 0.0, "max_length": 64, "max_completion_length": 6, "use_uld_loss": False},
            module="trl.experimental.gold",
        ),
        Kind("OnlineDPO", "prompts", rewards, {"max_new_tokens": 6}, module="trl.experimental.online_dpo"),
    )
}

# With `share_prefix`.
SHARING = ("GRPO", "RLOO", "DPO", "ORPO", "CPO", "OnlineDPO")

Log = list[dict[str, float]]


def run(
    folder: Path,
    name: str,
    ours: bool,
    config: dict[str, Any] | None = None,
    evaluate: bool = False,
    **arguments: Any,
) -> Log:
    """Run four steps, evaluate on five samples if requested, and return the log without times."""
    trainer = build(folder, name, ours, config, evaluate, **arguments)
    trainer.train()
    if evaluate:
        trainer.evaluate()
    timed = ("runtime", "per_second", "time")
    history = trainer.state.log_history
    return [{k: v for k, v in entry.items() if not any(t in k for t in timed)} for entry in history]


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


def build(
    folder: Path,
    name: str,
    ours: bool,
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
    args = kind.config_class()(**{**settings, **kind.config, **(config or {})})
    given = {
        "model": tiny.model(),
        "processing_class": tiny.tokenizer(),
        "train_dataset": tiny.dataset(kind.data),
        **kind.arguments(),
        **arguments,
    }
    if evaluate:
        given["eval_dataset"] = given["train_dataset"].select(range(5))
    return (kind.ours() if ours else kind.stock())(args=args, **given)


@functools.cache
def log_of_trl(name: str, config: str, evaluate: bool) -> Log:
    """Return the log of TRL's own trainer with its usual arguments. Several tests compare with the same one."""
    with tempfile.TemporaryDirectory() as folder:
        return run(Path(folder), name, False, json.loads(config), evaluate)


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., Log]:
    """Return `run` in a folder of the test. A process runs TRL's own trainer once for each config."""

    def train(
        name: str, ours: bool, config: dict[str, Any] | None = None, evaluate: bool = False, **arguments: Any
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


@pytest.mark.parametrize("name", ["GRPO", rare("SFT"), rare("DPO"), rare("KTO"), rare("RLOO")])
def test_chunked_heads(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL's own trainer, and a subclass, with our head; afterwards TRL's functions are in their places."""
    stock = run(tmp_path, name, ours=False)
    calls = []

    def noted(*args: Any, **kwargs: Any) -> None:
        calls.append(kwargs)
        add_chunked_lm_head(*args, **kwargs)

    monkeypatch.setattr(heads, "add_chunked_lm_head", noted)
    kind, theirs = KINDS[name], heads._THEIRS
    subclass = type("Own", (kind.stock(),), {})
    monkeypatch.setattr(Kind, "stock", lambda self: subclass)
    with integration.chunked_heads(logits_budget="1MiB"):
        ours = run(tmp_path, name, ours=False)
        fresh = ModuleType("made_inside")
        fresh.add_fused_lm_head = sys.modules["trl.trainer.utils"].add_fused_lm_head  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "made_inside", fresh)
    assert calls and all(call["logits_budget"] == 2**20 for call in calls)
    assert_same(ours, stock)
    held = [m.add_fused_lm_head for m in [*sys.modules.values()] if "add_fused_lm_head" in getattr(m, "__dict__", {})]
    assert fresh in sys.modules.values() and all(function is theirs for function in held)


SEQUENCES = {"temperature": 0.8, "importance_sampling_level": "sequence", "loss_type": "grpo", "num_iterations": 2}


CASES = [
    ("SFT", {}),
    rare("SFT", {"loss_type": "dft"}),
    rare("SFT", {"label_smoothing_factor": 0.1}),
    rare("SFT", {"label_smoothing_factor": 0.3, "average_tokens_across_devices": False}),
    rare("SFT", {"label_smoothing_factor": 0.1, "packing": True, "max_length": 24}),
    rare("SFT", {"packing": True, "max_length": 24}),
    rare("SFT", {"packing": True, "packing_strategy": "wrapped", "max_length": 16}),
    ("SFT", {"padding_free": True, "max_length": None}),
    rare("SFT", {"completion_only_loss": False, "average_tokens_across_devices": False}),
    ("DPO", {}),
    rare("DPO", {"loss_type": "ipo"}),
    rare("DPO", {"loss_type": "aot"}),
    rare("DPO", {"loss_type": "robust", "label_smoothing": 0.1}),
    ("DPO", {"use_weighting": True, "ld_alpha": 0.5}),
    rare("DPO", {"precompute_ref_log_probs": True}),
    rare("DPO", {"padding_free": True}),
    ("KTO", {}),
    rare("KTO", {"loss_type": "apo_zero_unpaired", "precompute_ref_log_probs": True}),
    ("GRPO", {}),
    ("GRPO", SEQUENCES),
    rare("GRPO", {"cast_lm_head_to_fp32": True, "entropy_coef": 0.01}),
    ("RLOO", {"temperature": 0.8}),
    ("Distillation", {"temperature": 0.8, "beta": 0.5}),
    rare("Distillation", {"beta": 1.0}),
    ("ORPO", {}),
    ("CPO", {}),
    rare("CPO", {"loss_type": "simpo", "cpo_alpha": 0.0}),
    rare("CPO", {"loss_type": "ipo", "cpo_alpha": 0.5}),
    ("GKD", {}),
    rare("GKD", {"beta": 0.0}),
    ("GOLD", {"temperature": 0.8}),
    ("OnlineDPO", {}),
]


@pytest.mark.parametrize(("kind", "config"), CASES, ids=str)
def test_logs_what_trl_logs(train, kind, config):
    """Compares training and evaluation. TRL's online DPO does not support evaluation."""
    evaluate = kind != "OnlineDPO"
    stock = train(kind, ours=False, config=config, evaluate=evaluate)
    assert_same(train(kind, ours=True, config=config, evaluate=evaluate), stock)


# Not Adam: it divides a gradient by its size, so rounding of a zero gradient would become a step.
PLAIN = {"optim": "sgd", "learning_rate": 0.02}


def of_family(kind: str, family: str) -> dict[str, Any]:
    model = tiny.model(family)
    # ORPO and CPO add the auxiliary loss if the config requests router logits, the others if the model has them.
    model.config.output_router_logits = family == "experts" and kind in ("ORPO", "CPO")
    return {"model": model, **({"ref_model": tiny.model(family, seed=2)} if kind in ("DPO", "KTO") else {})}


@pytest.mark.parametrize(
    ("kind", "family"),
    [
        *((kind, "softcap") for kind in ("ORPO", "GKD")),
        *(rare(kind, "softcap") for kind in ("SFT", "DPO", "CPO", "Distillation")),
        ("Distillation", "scaled"),
        *(rare(kind, "scaled") for kind in ("SFT", "CPO")),
        *((kind, "experts") for kind in ("SFT", "GRPO")),
        *(rare(kind, "experts") for kind in ("DPO", "KTO", "ORPO", "CPO")),
        ("SFT-smoothed", "softcap"),
        rare("SFT-smoothed", "experts"),
        rare("SFT-smoothed", "scaled"),
    ],
)
def test_families(train, kind, family):
    """Covers logits transforms, tied embeddings, and the load-balancing loss of a mixture of experts."""
    config = PLAIN
    if kind == "SFT-smoothed":
        kind, config = "SFT", {**PLAIN, "label_smoothing_factor": 0.1}
    stock = train(kind, ours=False, config=config, **of_family(kind, family))
    assert_same(train(kind, ours=True, config=config, **of_family(kind, family)), stock)


@pytest.mark.parametrize(
    ("kind", "loss"),
    [
        ("SFT", None),
        ("DPO", None),
        ("ORPO", None),
        ("SFT", LigerFusedLinearCrossEntropyLoss()),
        ("DPO", LigerFusedLinearDPOLoss(beta=0.1)),
    ],
)
def test_beside_the_base_kernels(train, monkeypatch, kind, loss):
    """The layers of a patched model stay patched, and its fused cross entropy is not used."""
    model = tiny.model()
    apply_liger_kernel(model)
    norms: list[None] = []

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        norms.append(None)
        return liger_rms_norm(*args, **kwargs)

    def asked(*args: Any, **kwargs: Any) -> None:
        pytest.fail("the fused cross entropy ran")

    monkeypatch.setattr(layers, "liger_rms_norm", counted)
    monkeypatch.setattr(rules, "once", asked)  # what builds it
    ours = train(kind, ours=True, config=PLAIN, model=model, loss=loss)
    assert len(norms) >= 5 * 8  # five norms, eight micro-batches
    assert_same(ours, train(kind, ours=False, config=PLAIN), common=loss is not None)


@pytest.mark.parametrize("kind", ["SFT", "DPO", "ORPO", "GRPO", rare("KTO"), rare("GKD")])
def test_gradient_checkpointing_and_autocast(train, kind):
    """Both project the head in bfloat16, but sum up in another order."""
    config = {**PLAIN, "gradient_checkpointing": True, "bf16": True}
    stock, ours = (train(kind, ours=ours, config=config) for ours in (False, True))
    for mine, theirs in zip(ours[:4], stock[:4], strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=0.02)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=0.05)


# The second step on the same rollouts is off-policy, and these bounds clip some of its ratios.
CLIPS = {"epsilon_low": 0.01, "epsilon_high": 0.02}
CLIPPED = {"num_iterations": 2, "epsilon": 0.01, "epsilon_high": 0.02}

OVERRIDES = {
    "SFT": ("SFT", {}, lambda: LigerFusedLinearCrossEntropyLoss(return_token_accuracy=True)),
    "DPO": ("DPO", {}, lambda: LigerFusedLinearDPOLoss(beta=0.1)),
    "DPO-precomputed": ("DPO", {"precompute_ref_log_probs": True}, lambda: LigerFusedLinearDPOLoss(beta=0.1)),
    "DPO-ipo": ("DPO", {"loss_type": "ipo"}, lambda: LigerFusedLinearDPOLoss(beta=0.1, loss_type="ipo")),
    "DPO-hinge": ("DPO", {"loss_type": "hinge"}, lambda: Hinge(beta=0.1)),
    "KTO": ("KTO", {}, lambda: LigerFusedLinearKTOLoss(beta=0.1)),
    "KTO-precomputed": ("KTO", {"precompute_ref_log_probs": True}, lambda: LigerFusedLinearKTOLoss(beta=0.1)),
    "GRPO": ("GRPO", {}, lambda: LigerFusedLinearGRPOLoss(reduction="dapo")),
    "GRPO-sequence": (
        "GRPO",
        SEQUENCES,
        lambda: LigerFusedLinearGRPOLoss(importance_level="sequence", reduction="grpo"),
    ),
    "GRPO-clipped": (
        "GRPO",
        {**CLIPPED, "loss_type": "bnpo", "importance_sampling_level": "token"},
        lambda: LigerFusedLinearGRPOLoss(reduction="bnpo", **CLIPS),
    ),
    "GRPO-sequence-clipped": (
        "GRPO",
        {**CLIPPED, "loss_type": "grpo", "importance_sampling_level": "sequence"},
        lambda: LigerFusedLinearGRPOLoss(importance_level="sequence", reduction="grpo", **CLIPS),
    ),
    "GRPO-cispo": (
        "GRPO",
        {"num_iterations": 2, "loss_type": "cispo", "epsilon_high": 1.01},
        lambda: LigerFusedLinearGRPOLoss.from_loss_type("cispo", epsilon_high=1.01),
    ),
    "ORPO": ("ORPO", {}, lambda: LigerFusedLinearORPOLoss(beta=0.1)),
    "CPO": ("CPO", {}, lambda: LigerFusedLinearCPOLoss(beta=0.1)),
    "SimPO": (
        "CPO",
        {"loss_type": "simpo", "cpo_alpha": 0.0, "simpo_gamma": 0.5, "beta": 2.0},
        lambda: LigerFusedLinearSimPOLoss(beta=2.0, gamma=0.5),
    ),
    "GKD": ("GKD", {}, lambda: LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0)),
    "Distillation": (
        "Distillation",
        {"temperature": 0.8, "beta": 0.5},
        lambda: LigerFusedLinearJSDLoss(temperature=0.8, weight_hard_loss=0.0, weight_soft_loss=1.0),
    ),
}


# Config fields for which the loss has no equivalent. They raise when a loss is given.
ONLY_STOCK = {
    "DPO-hinge": ("loss_type",),
    "GRPO-sequence": ("loss_type",),
    "GRPO-clipped": ("loss_type", "epsilon", "epsilon_high"),
    "GRPO-sequence-clipped": ("loss_type", "epsilon", "epsilon_high"),
    "GRPO-cispo": ("loss_type", "epsilon_high"),
    "SimPO": ("loss_type", "cpo_alpha", "simpo_gamma"),
}


class Hinge(LigerFusedLinearPreferenceBase):
    """A user-defined loss that TRL has too."""

    def preference_loss(self, pairs):
        chosen, rejected = pairs.logratios.unbind(-1)
        return torch.relu(1 - self.beta * (chosen - rejected))


class Margin(LigerFusedLinearPreferenceBase):
    """A user-defined loss without a reference."""

    def preference_loss(self, pairs):
        chosen, rejected = pairs.logps.unbind(-1)
        return -torch.nn.functional.logsigmoid(self.beta * (chosen - rejected))


# These run the same code as another case, with another setting.
_RARE = ("DPO-precomputed", "DPO-ipo", "KTO-precomputed", "GRPO-sequence")


@pytest.mark.parametrize("case", [rare(case) if case in _RARE else case for case in OVERRIDES])
def test_a_loss_in_the_place_of_the_trainers(train, case):
    """The loss trains like TRL's, and its metrics are logged under TRL's names."""
    kind, config, loss = OVERRIDES[case]
    stock = train(kind, ours=False, config=config)
    kept = {name: value for name, value in config.items() if name not in ONLY_STOCK.get(case, ())}
    ours = train(kind, ours=True, config=kept, loss=loss())
    assert_same(ours, stock, common=True)
    assert stock[0].keys() <= ours[0].keys()
    clips = [{name for name in log[0] if "clip_ratio" in name} for log in (stock, ours)]
    assert clips[0] == clips[1] and bool(clips[0]) == (kind == "GRPO")
    if "clipped" in case or "cispo" in case:
        assert any(0 < entry[name] < 1 for entry in stock[:4] for name in clips[0])


WEIGHTED = {
    "DPO": ("chosen", {}, lambda: LigerFusedLinearDPOLoss(beta=0.1)),
    "DPO-precomputed": ("chosen", {"precompute_ref_log_probs": True}, lambda: LigerFusedLinearDPOLoss(beta=0.1)),
    # The other types' estimate of the KL joins the examples of a batch.
    "KTO": (
        "completion",
        {"loss_type": "apo_zero_unpaired"},
        lambda: LigerFusedLinearKTOLoss(beta=0.1, loss_type="apo_zero_unpaired"),
    ),
}


def weighted(kind: str, column: str) -> Any:
    """Return data whose weights follow from the text, so that they are known of a shuffled batch."""
    data = tiny.dataset({"DPO": "pairs", "KTO": "unpaired"}[kind])
    return data.add_column("sample_weight", [len(text) / 4 for text in data[column]])


@pytest.mark.parametrize("case", WEIGHTED)
def test_weights_of_examples(tmp_path, case):
    """A batch's loss is the mean of each example's own loss times its weight."""
    column, config, loss = WEIGHTED[case]
    kind = case.partition("-")[0]
    data = weighted(kind, column)
    trainer = build(tmp_path, kind, ours=True, config=config, loss=loss(), train_dataset=data, eval_dataset=data)
    for batch in (*trainer.get_train_dataloader(), *trainer.get_eval_dataloader()):
        weights = batch.pop("sample_weight")
        lengths = batch["completion_mask"][: len(weights)].sum(1) - 1  # without the end of the sequence
        assert torch.equal(weights, lengths / 4)
        parts = []
        for i in range(len(weights)):
            of_one = {name: x.unflatten(0, (-1, len(weights)))[:, i] for name, x in batch.items()}
            parts.append(trainer.compute_loss(trainer.model, of_one).detach())
        value = trainer.compute_loss(trainer.model, {**batch, "sample_weight": weights})
        assert float(value.detach()) == pytest.approx(float((weights * torch.stack(parts)).mean()), rel=1e-5)


@pytest.mark.parametrize("kind", ["DPO", "KTO"])
def test_weights_of_one_are_no_weights(train, kind):
    loss = {"DPO": LigerFusedLinearDPOLoss(beta=0.1), "KTO": LigerFusedLinearKTOLoss(beta=0.1)}[kind]
    data = tiny.dataset({"DPO": "pairs", "KTO": "unpaired"}[kind])
    ones, twos = (data.add_column("sample_weight", [x] * len(data)) for x in (1, 2.0))
    plain = train(kind, ours=True, loss=loss, train_dataset=data)
    assert_same(train(kind, ours=True, loss=loss, train_dataset=ones), plain)
    # The logged norm of the first step is of the same weights; later ones differ by what Adam made of it.
    assert train(kind, ours=True, loss=loss, train_dataset=twos)[0]["grad_norm"] == pytest.approx(
        2 * plain[0]["grad_norm"], rel=1e-5
    )


def test_both_completions_have_the_weight_of_their_pair(tmp_path):
    """KTO makes two examples of a pair."""
    data = weighted("DPO", "chosen")
    trainer = build(tmp_path, "KTO", ours=True, loss=LigerFusedLinearKTOLoss(beta=0.1), train_dataset=data)
    assert trainer.train_dataset["sample_weight"] == [*data["sample_weight"]] * 2


def test_weights_of_examples_that_do_not_arrive(tmp_path, caplog):
    pairs = weighted("DPO", "chosen")
    some = tiny.dataset("pairs").add_column("sample_weight", [1.0, None] * (len(pairs) // 2))
    trainer = build(tmp_path, "DPO", ours=True, loss=LigerFusedLinearDPOLoss(), train_dataset=some)
    with pytest.raises(ValueError, match="sample_weight must be a number for each example, got None for 1 of 2"):
        trainer.data_collator([trainer.train_dataset[i] for i in range(2)])
    build(tmp_path, "DPO", ours=True, train_dataset=pairs)
    assert "LigerDPOTrainer trains without the column 'sample_weight'" in caplog.text


class Own:
    """Logs metrics of its own, from those of the call."""

    def logged_metrics(self, metrics):
        name = next(name for name in OWN if hasattr(metrics, name))
        return {"own": getattr(metrics, name), "number": 2, "flags": torch.tensor([True, False])}


# For each kind of metrics, one that the trainer logs too, and under which name.
OWN = {
    "reward_accuracies": "rewards/accuracies",
    "reference_point": "kl",
    "z_loss": "z_loss",
    "soft_loss": "soft_loss",
}
WITH_OWN: dict[str, tuple[type, dict[str, Any]]] = {
    "DPO": (LigerFusedLinearDPOLoss, {}),
    "KTO": (LigerFusedLinearKTOLoss, {}),
    "ORPO": (LigerFusedLinearORPOLoss, {}),
    "SFT": (LigerFusedLinearCrossEntropyLoss, {"lse_square_scale": 0.1, "return_z_loss": True}),
    "GKD": (LigerFusedLinearJSDLoss, {"weight_hard_loss": 0.0, "weight_soft_loss": 1.0}),
}


@pytest.mark.parametrize("kind", WITH_OWN)
def test_a_metric_of_ones_own(train, kind):
    config = {"loss_type": "kto"} if kind == "KTO" else {}
    cls, options = WITH_OWN[kind]
    loss = type("WithOwn", (Own, cls), {})(**options)
    log = train(kind, ours=True, evaluate=kind in ("DPO", "ORPO"), config=config, loss=loss)
    entries = [entry for entry in log if "loss" in entry or "eval_loss" in entry]
    for entry in entries:
        prefix = "eval_" if "eval_loss" in entry else ""
        same = next(name for name in OWN.values() if prefix + name in entry)
        assert entry[f"{prefix}own"] == pytest.approx(entry[prefix + same], rel=1e-5)
        assert entry[f"{prefix}number"] == 2
        # The last batch of an evaluation has a sample twice, which the log leaves out, also of these two values.
        assert entry[f"{prefix}flags"] == pytest.approx(2 / 3 if prefix else 0.5)
    assert len(entries) == (5 if kind in ("DPO", "ORPO") else 4)


class Clips(LigerFusedLinearPolicyBase):
    """PPO that logs a metric which only its method knows."""

    scope = "token"

    def __init__(self, **options):
        super().__init__(**options, clipped=lambda r: Clipped(low=None, high=r.ratio > 1.001))
        self.seen = []

    def policy_loss(self, rollouts):
        high = (rollouts.ratio.detach() > 1.001) & rollouts.mask
        self.seen.append(torch.stack([high.sum(), rollouts.mask.sum()]))
        return -torch.where(high, rollouts.ratio.detach(), rollouts.ratio) * rollouts.advantages

    def logged_metrics(self, metrics):
        clipped, tokens = torch.stack(self.seen).sum(0)
        self.seen.clear()
        return {"own/clipped": clipped / tokens.clamp(min=1)}


def test_a_metric_of_the_method(train):
    """The method sees each token once, also where a small budget cuts the batch; a trainer runs copies of the loss."""
    config = {"num_iterations": 2, "gradient_accumulation_steps": 1}
    for budget in (None, 300 * 4 * 4):
        log = train("GRPO", ours=True, config=config, loss=Clips(reduction="dapo", logits_budget=budget))
        shares = [(entry["own/clipped"], entry["clip_ratio/high_mean"]) for entry in log if "loss" in entry]
        assert any(share for share, _ in shares)
        assert [share for share, _ in shares] == pytest.approx([same for _, same in shares], abs=1e-6)


class Learned(LigerFusedLinearPreferenceBase):
    """A user-defined loss with a parameter."""

    def __init__(self):
        super().__init__(use_ref_model=False)
        self.margin = torch.nn.Parameter(torch.tensor(0.5))

    def preference_loss(self, pairs):
        chosen, rejected = pairs.logps.unbind(-1)
        return torch.nn.functional.softplus(self.margin - self.beta * (chosen - rejected))


def test_a_parameter_of_the_loss(tmp_path):
    """It is trained if the model knows it, and refused otherwise."""
    loss, none = Learned(), {"ref_model": None}
    with pytest.raises(ValueError, match=r"Learned has the trainable parameter margin \(\) .* model.own_loss = loss"):
        build(tmp_path, "DPO", ours=True, loss=loss, **none)
    model = tiny.model()
    model.own_loss = loss
    with pytest.raises(ValueError, match="An adapter freezes what the model had before it"):
        adapter = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
        build(tmp_path, "DPO", ours=True, loss=loss, model=model, peft_config=adapter, **none)
    model, loss = tiny.model(), Learned()
    model.own_loss = loss
    build(tmp_path, "DPO", ours=True, loss=loss, model=model, **none).train()
    assert abs(loss.margin.item() - 0.5) > 1e-3
    loss.margin.requires_grad_(False)
    build(tmp_path, "DPO", ours=True, loss=loss, **none)


def test_a_loss_without_a_reference_needs_none(train):
    """DPO's trainer then loads no second model. The step equals that of the same loss with an unused reference."""
    alone = train("DPO", ours=True, loss=Margin(use_ref_model=False), ref_model=None)
    unread = train("DPO", ours=True, loss=Margin())
    for entry in (*alone, *unread):
        for name in [name for name in entry if name.startswith("rewards/")]:
            entry.pop(name)
    assert_same(alone, unread)


def test_kto_without_a_reference_needs_none(train):
    """Its rewards are then log-probabilities."""
    logs = train("KTO", ours=True, loss=LigerFusedLinearKTOLoss(beta=0.1, use_ref_model=False), ref_model=None)
    for entry in logs[:4]:
        assert entry["rewards/chosen"] == pytest.approx(0.1 * entry["logps/chosen"], rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "family"),
    [
        ("DPO", "softcap"),
        rare("GRPO", "softcap"),
        rare("KTO", "experts"),
        ("ORPO", "experts"),
    ],
)
def test_a_loss_takes_the_models_transform(train, kind, family):
    loss = {
        "DPO": LigerFusedLinearDPOLoss(beta=0.1),
        "KTO": LigerFusedLinearKTOLoss(beta=0.1),
        "ORPO": LigerFusedLinearORPOLoss(beta=0.1),
        "GRPO": LigerFusedLinearGRPOLoss(reduction="dapo"),
    }[kind]
    stock = train(kind, ours=False, config=PLAIN, **of_family(kind, family))
    ours = train(kind, ours=True, config=PLAIN, loss=loss, **of_family(kind, family))
    assert_same(ours, stock, common=True)


REFUSED = {
    "another-kind": ("KTO", LigerFusedLinearDPOLoss(), r"LigerKTOTrainer takes a LigerFusedLinearUnpaired.*DPOLoss"),
    "no-loss": ("RLOO", LigerFusedLinearGRPOLoss(), "LigerRLOOTrainer takes no loss"),
    "a-class": ("DPO", LigerFusedLinearDPOLoss, "got the class LigerFusedLinearDPOLoss"),
    "a-name": ("DPO", "sigmoid", "takes a LigerFusedLinearPreferenceBase, got loss=str"),
    "a-function": ("GRPO", torch.sum, "takes a LigerFusedLinearPolicyBase, got loss=builtin_function_or_method"),
    "no-reference-point": ("KTO", LigerFusedLinearBCOLoss(), "asks for the reference point 'delta'"),
    "no-reference": ("ORPO", LigerFusedLinearDPOLoss(use_ref_model=True), "LigerORPOTrainer keeps none: see LigerDPO"),
    "a-reference": ("DPO", LigerFusedLinearSimPOLoss(), "SimPOLoss takes no reference, got a ref_model"),
    "a-reference-of-kto": ("KTO", LigerFusedLinearKTOLoss(use_ref_model=False), "no reference, got a ref_model"),
    "no-beta": ("GRPO", LigerFusedLinearGRPOLoss(beta=0.1), r"beta=0.1: set GRPOConfig\(beta"),
    "no-beta-of-a-reference": ("GRPO", LigerFusedLinearGRPOLoss(surrogate="a2po"), r"set GRPOConfig\(beta=1.0\)"),
    "a-temperature": ("DPO", LigerFusedLinearDPOLoss(temperature=2.0), "temperature=2.0, and LigerDPOTrainer"),
    "another-temperature": ("KTO", LigerFusedLinearKTOLoss(temperature=0.5), "temperature=0.5, and LigerKTOTrainer"),
    "whole-groups": (
        "GRPO",
        LigerFusedLinearGRPOLoss(surrogate="real", group_size=2),
        "TRL shuffles the completions",
    ),
    "a-sum": ("SFT", LigerFusedLinearCrossEntropyLoss(reduction="sum"), "a mean over tokens, got reduction='sum'"),
    "a-value-a-token": ("GKD", LigerFusedLinearJSDLoss(reduction="none"), "a mean over tokens, got reduction='none'"),
    "other-labels": ("GKD", LigerFusedLinearJSDLoss(ignore_index=-1), "the loss has ignore_index=-1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_loss_that_does_not_fit_is_refused(tmp_path, case):
    kind, loss, message = REFUSED[case]
    with pytest.raises((TypeError, ValueError), match=message):
        build(tmp_path, kind, ours=True, loss=loss)


def test_a_trainer_of_trl_before_ours_does_not_read_the_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gmpo = importlib.import_module("trl.experimental.gmpo").GMPOTrainer
    of_grpo = integration.LigerGRPOTrainer

    class Theirs(gmpo, of_grpo):  # type: ignore[misc, valid-type]
        pass

    class Ours(of_grpo, gmpo):  # type: ignore[misc, valid-type]
        pass

    class Calls(importlib.import_module("trl").GRPOTrainer):  # type: ignore[misc, name-defined]
        def _compute_loss(self, model, inputs):
            return 2 * super()._compute_loss(model, inputs)

    class CallsOurs(Calls, of_grpo):  # type: ignore[misc, valid-type]
        pass

    class Own(of_grpo):  # type: ignore[misc, valid-type]
        def _compute_loss(self, model, inputs):
            return self.loss_override

    loss = LigerFusedLinearGRPOLoss(reduction="dapo")
    monkeypatch.setattr(integration, "LigerGRPOTrainer", Theirs)
    message = r"read loss=, because GMPOTrainer overrides _compute_loss .*class Theirs\(LigerGRPOTrainer, GMPOTrainer\)"
    with pytest.raises(TypeError, match=message):
        build(tmp_path, "GRPO", ours=True, loss=loss)
    assert build(tmp_path, "GRPO", ours=True).loss_override is None
    for trainer in (Ours, CallsOurs, Own):
        monkeypatch.setattr(integration, "LigerGRPOTrainer", trainer)
        assert build(tmp_path, "GRPO", ours=True, loss=loss).loss_override is loss


def test_a_reference_without_a_kl_term(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A*-PO reads the reference, which TRL keeps for any `beta`, and not that `beta`."""
    read, stock = [], LigerFusedLinearGRPOLoss.policy_loss
    monkeypatch.setattr(
        LigerFusedLinearGRPOLoss, "policy_loss", lambda self, rollouts: read.append(rollouts) or stock(self, rollouts)
    )
    model = tiny.model()
    model.save_pretrained(tmp_path / "reference")
    losses = []
    for beta in (1.0, 0.1):
        loss, policy = LigerFusedLinearGRPOLoss(surrogate="a2po", reduction="grpo"), copy.deepcopy(model)
        policy.config._name_or_path = str(tmp_path / "reference")  # from which TRL loads the reference
        trainer = build(tmp_path, "GRPO", True, {"beta": beta, "max_steps": 1}, loss=loss, model=policy)
        trainer.train()
        losses.append(trainer.state.log_history[0]["loss"])
    assert len(read) == 4 and all(rollouts.ref_logps is not None for rollouts in read)
    assert losses[0] == losses[1] and losses[0] != 0


def test_a_reference_has_the_logits_dtype_of_the_loss(tmp_path: Path) -> None:
    """Else the reference's logits are rounded and the policy's are not, and equal models have other rewards than 0."""
    policy = tiny.model().bfloat16()
    with torch.no_grad():
        policy.lm_head.weight.mul_(8)
    loss = LigerFusedLinearDPOLoss(logits_dtype=torch.float32)
    log = run(tmp_path, "DPO", True, {"max_steps": 1}, model=policy, ref_model=copy.deepcopy(policy), loss=loss)
    assert abs(log[0]["rewards/chosen"]) < 1e-5


# One loss per trainer, and a non-default value for every field that it replaces.
LOSS_OF = {
    "SFT": LigerFusedLinearCrossEntropyLoss,
    "DPO": LigerFusedLinearDPOLoss,
    "KTO": LigerFusedLinearKTOLoss,
    "GRPO": LigerFusedLinearGRPOLoss,
    "ORPO": LigerFusedLinearORPOLoss,
    "CPO": LigerFusedLinearCPOLoss,
    "GKD": LigerFusedLinearJSDLoss,
    "GOLD": LigerFusedLinearJSDLoss,
    "Distillation": LigerFusedLinearJSDLoss,
}
OTHER = {
    "loss_weights": [0.5],
    "ld_alpha": 0.5,
    "f_divergence_type": "js_divergence",
    "importance_sampling_level": "sequence",
    "delta": 3.0,
    "epsilon_high": 0.28,
    "off_policy_mask_threshold": 0.5,
    "use_bias_correction_kl": False,
}
OTHER_TYPE = {"SFT": "dft", "DPO": "hinge", "GRPO": "bnpo", "CPO": "hinge"}
REPLACED = [(kind, name) for kind in LOSS_OF for name in KINDS[kind].ours().replaced_fields]


def fields_of(kind: str) -> dict[str, Any]:
    return {f.name: f for f in dataclasses.fields(KINDS[kind].config_class())}


@pytest.mark.parametrize(("kind", "name"), REPLACED, ids=str)
def test_a_config_field_that_a_loss_replaces(tmp_path, kind, name):
    """A field that is not at its default raises before anything is loaded."""
    fields = fields_of(kind)
    if name not in fields and not heads.trl.__version__.startswith("1.16."):
        pytest.skip(f"TRL {heads.trl.__version__} has no such field")
    default = fields[name].default
    if name == "loss_type":
        other = OTHER_TYPE[kind]
    elif name in OTHER:
        other = OTHER[name]
    else:
        other = not default if isinstance(default, bool) else (default - 0.125 if default else 0.125)
    ours = KINDS[kind].ours()
    config = KINDS[kind].config_class()(output_dir=str(tmp_path), use_cpu=True, bf16=False, **{name: other})
    calls = [functools.partial(ours, "no such model", args=config)]
    if kind in ("SFT", "DPO"):
        calls.append(functools.partial(ours, "no such model", *([None] if kind == "DPO" else []), config))
    for call in calls:
        with pytest.raises(ValueError, match=rf"with loss=, Liger{kind}Trainer does not read .*: {name}="):
            call(loss=LOSS_OF[kind]())


@pytest.mark.parametrize("kind", LOSS_OF)
def test_a_config_at_its_defaults_goes_with_a_loss(kind, tmp_path):
    config = KINDS[kind].config_class()(output_dir=str(tmp_path), use_cpu=True, bf16=False)
    KINDS[kind].ours()._check_config(LOSS_OF[kind](), config)


def test_the_refusal_names_every_field_and_what_the_loss_has(tmp_path):
    config = {"beta": 0.3, "loss_type": "hinge", "ld_alpha": 0.5, "max_length": 32}
    message = (
        r"does not read these fields of DPOConfig: .*loss_type=\['hinge'\] \(the loss has loss_types='sigmoid'\), "
        r"ld_alpha=0.5 \(the loss has ld_alpha=None\), beta=0.3 \(the loss has beta=0.1\)\. Set the loss up"
    )
    with pytest.raises(ValueError, match=message):
        build(tmp_path, "DPO", ours=True, config=config, loss=LigerFusedLinearDPOLoss())
    # Another loss may lack this attribute.
    with pytest.raises(ValueError, match=r"loss_type=\['hinge'\]\. Set"):
        build(tmp_path, "DPO", ours=True, config={"loss_type": "hinge"}, loss=Hinge())


def test_a_config_that_agrees_with_the_loss(tmp_path):
    config = {"beta": 0.3, "loss_type": ["sigmoid", "sft"], "loss_weights": [0.5, 1.0], "ld_alpha": 0.5}
    loss = LigerFusedLinearDPOLoss(**config)
    assert build(tmp_path, "DPO", ours=True, config=config, loss=loss).loss_override is loss


def test_a_cpo_config_that_agrees_with_the_loss(tmp_path):
    config = {"cpo_alpha": 0.5, "beta": 0.2}
    assert build(tmp_path, "CPO", ours=True, config=config, loss=LigerFusedLinearCPOLoss(**config))


def test_a_run_without_a_reference_warns_once(train):
    with pytest.warns(UserWarning, match="got no reference") as warned:
        train("ORPO", ours=True, loss=LigerFusedLinearDPOLoss())
    assert len([w for w in warned if "got no reference" in str(w.message)]) == 1


def test_defaults_of_a_users_config_are_no_defaults(tmp_path):
    """TRL would use them, so the loss must not ignore them."""

    @dataclasses.dataclass
    class Ours(KINDS["DPO"].config_class()):
        beta: float = 0.7

    config = Ours(output_dir=str(tmp_path), use_cpu=True, bf16=False)
    with pytest.raises(ValueError, match=r"fields of Ours: beta=0.7 \(the loss has beta=0.1\)"):
        KINDS["DPO"].ours()("no such model", args=config, loss=LigerFusedLinearDPOLoss())


def test_a_budget_beside_a_loss(tmp_path, monkeypatch):
    with pytest.raises(
        ValueError,
        match=r"logits_budget='1MiB' of the trainer would not be read: pass it to the loss, LigerFusedLinearDPOLoss",
    ):
        build(tmp_path, "DPO", ours=True, loss=LigerFusedLinearDPOLoss(), logits_budget="1MiB")
    # The loss's budget also applies to the heads that score the reference.
    trainer = build(tmp_path, "DPO", ours=True, loss=LigerFusedLinearDPOLoss(logits_budget="1MiB"))
    assert trainer.logits_budget == 2**20
    assert build(tmp_path, "ORPO", ours=True, logits_budget="0.5MiB").logits_budget == 2**19


@pytest.mark.filterwarnings("ignore:`compute_loss_func` is deprecated:FutureWarning")
def test_a_loss_beside_compute_loss_func(tmp_path):
    with pytest.raises(ValueError, match=r"loss= and compute_loss_func both take the place"):
        build(tmp_path, "SFT", ours=True, loss=LigerFusedLinearCrossEntropyLoss(), compute_loss_func=len)


@pytest.mark.parametrize("kind", ["SFT", "DPO", "ORPO", "GRPO"])
def test_liger_kernels_own_switch_is_refused(tmp_path, kind):
    """Its losses would silently replace our heads."""
    with pytest.raises(ValueError, match=r"use_liger_kernel=True activates the package Liger-Kernel, .* leave it off"):
        build(tmp_path, kind, ours=True, config={"use_liger_kernel": True})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("peft_confg", "LigerDPOTrainer has no argument 'peft_confg': did you mean 'peft_config'\\?"),
        ("logits_buget", "LigerDPOTrainer has no argument 'logits_buget': did you mean 'logits_budget'\\?"),
        ("share_prefx", "did you mean 'share_prefix'\\?"),
        ("beta", r"LigerDPOTrainer has no argument 'beta': it is set in args=DPOConfig\(beta=\.\.\.\)"),
        ("learning_rte", r"did you mean args=DPOConfig\(learning_rate=\.\.\.\)\?"),
        ("zzzzzz", "LigerDPOTrainer has no argument 'zzzzzz': it takes model, ref_model, args, "),
    ],
)
@pytest.mark.parametrize("with_config", [True, False])
def test_an_argument_that_no_trainer_has(tmp_path, wrong, message, with_config):
    """The error is of the class that was called, and says the way out. No model is read before it."""
    args = {"args": KINDS["DPO"].config_class()(output_dir=str(tmp_path), **QUIET)} if with_config else {}
    with pytest.raises(TypeError, match=message):
        integration.LigerDPOTrainer("no such model", **args, **{wrong: None})


def test_every_trainer_knows_its_arguments():
    names = [name for name in integration._NAMES if name.endswith("Trainer")]
    for name in names:
        with pytest.raises(TypeError, match=f"{name} has no argument 'train_datset': did you mean 'train_dataset'"):
            getattr(integration, name)("no such model", train_datset=None)


@pytest.mark.parametrize("kind", ["DPO", "KTO", "GRPO", "RLOO"])
def test_a_misspelt_adapter_is_not_a_missing_reference(tmp_path, kind):
    """A model that was built in memory has no name by which TRL could load a reference. An adapter needs none."""
    policy, config = tiny.model(), KINDS[kind].config_class()
    policy.config._name_or_path = ""
    arguments = {"args": config(output_dir=str(tmp_path), beta=0.1, **QUIET), "peft_confg": None}
    with pytest.raises(TypeError, match=r"has no argument 'peft_confg': did you mean 'peft_config'\?"):
        getattr(integration, f"Liger{kind}Trainer")(model=policy, **arguments)


def test_settings_of_a_reference_that_the_loss_refuses(tmp_path):
    for kind, loss in (("DPO", LigerFusedLinearSimPOLoss()), ("KTO", LigerFusedLinearKTOLoss(use_ref_model=False))):
        with pytest.raises(ValueError, match=r"takes no reference, got precompute_ref_log_probs=True"):
            build(tmp_path, kind, ours=True, config={"precompute_ref_log_probs": True}, loss=loss, ref_model=None)


def test_precomputed_sums_for_a_loss_of_tokens(tmp_path, monkeypatch):
    """They are refused before anything is loaded, and before the reference runs over the data set."""
    config = KINDS["DPO"].config_class()(
        output_dir=str(tmp_path), use_cpu=True, bf16=False, precompute_ref_log_probs=True
    )
    message = (
        r"LigerFusedLinearDPOLoss\(ld_alpha=0.5\) needs reference log-probabilities per token, but "
        r"precompute_ref_log_probs=True keeps one sum a sequence: set precompute_ref_log_probs=False, .*, or leave "
        "ld_alpha out of the loss"
    )
    loss = LigerFusedLinearDPOLoss(ld_alpha=0.5)
    for arguments, named in (((None, config), {}), ((), {"args": config})):
        with pytest.raises(ValueError, match=message):
            KINDS["DPO"].ours()("no such model", *arguments, loss=loss, **named)
    assert not LigerFusedLinearDPOLoss().needs_token_ref_logps

    class Compares(LigerFusedLinearKTOLoss):
        """Declares the need; any loss may."""

        needs_token_ref_logps = True

    message = r"Compares needs reference log-probabilities per token, .* so that the reference runs in each step$"
    with pytest.raises(ValueError, match=message):
        build(tmp_path, "KTO", ours=True, config={"precompute_ref_log_probs": True}, loss=Compares())


# Only the loss reads `ld_alpha`, and the reference runs in each step.
def test_ld_alpha_with_a_reference_that_is_not_precomputed(train):
    stock = train("DPO", ours=False, config={"ld_alpha": 0.5})
    ours = train("DPO", ours=True, config={"ld_alpha": 0.5}, loss=LigerFusedLinearDPOLoss(ld_alpha=0.5))
    assert_same(ours, stock, common=True)


@pytest.mark.parametrize("loss_type", ["sft", ["sft"]], ids=str)
def test_ld_alpha_without_effect(tmp_path, loss_type):
    with pytest.raises(ValueError, match=r"ld_alpha=0.5 of DPOConfig has no effect with loss_type='sft'"):
        build(tmp_path, "DPO", ours=True, config={"ld_alpha": 0.5, "loss_type": loss_type})


@pytest.mark.parametrize("kind", ["ORPO", "CPO"])
def test_log_of_a_loss_of_another_kind(train, kind):
    """Before the first step the model is the same, and so is what TRL logs of the model and not of its loss."""
    (stock, *_), (ours, *_) = train(kind, ours=False), train(kind, ours=True, loss=Margin(beta=0.1))
    assert stock.keys() <= ours.keys()
    names = [name for name in stock if name.startswith(("logits/", "log_odds"))]
    assert len(names) == (4 if kind == "ORPO" else 2)
    assert {name: ours[name] for name in names} == pytest.approx({name: stock[name] for name in names}, rel=1e-5)


def without_labels(batch: dict[str, Any]) -> dict[str, Any]:
    return {**batch, "labels": torch.full_like(batch["labels"], -100)}


@pytest.mark.sampled
@pytest.mark.parametrize("items", [0, torch.tensor(0)], ids=["int", "tensor"])
@pytest.mark.parametrize(
    ("kind", "loss", "config"),
    [
        ("SFT", LigerFusedLinearCrossEntropyLoss(), {}),
        ("SFT", None, {"label_smoothing_factor": 0.1}),
        ("GKD", LigerFusedLinearJSDLoss(), {}),
        ("GKD", None, {}),
        ("GOLD", None, {}),
    ],
    ids=["SFT", "SFT-smoothed", "GKD", "GKD-stock", "GOLD-stock"],
)
def test_a_step_without_items(tmp_path, kind, loss, config, items):
    """All labels are ignored, and the trainer counted no item: the loss is 0, and so is every gradient."""
    trainer = build(tmp_path, kind, ours=True, config=config, loss=loss)
    batch = without_labels(next(iter(trainer.get_train_dataloader())))
    value = trainer.compute_loss(trainer.model, batch, num_items_in_batch=items)
    value.backward()
    assert value == 0
    gradients = [p.grad for p in trainer.model.parameters() if p.grad is not None]
    assert gradients and not any(g.any() for g in gradients)


EMPTY_SIDES = {
    "ORPO": ("ORPO", {}, LigerFusedLinearORPOLoss(beta=0.1)),
    "CPO": ("CPO", {}, LigerFusedLinearCPOLoss(beta=0.1)),
    "CPO-ipo": ("CPO", {"loss_type": "ipo"}, LigerFusedLinearCPOLoss(beta=0.1, loss_type="ipo")),
    "SimPO": (
        "CPO",
        {"loss_type": "simpo", "cpo_alpha": 0.0},
        LigerFusedLinearSimPOLoss(beta=0.1, gamma=0.5),
    ),
}


@pytest.mark.sampled
@pytest.mark.parametrize("sides", [("chosen",), ("rejected",), ("chosen", "rejected")], ids="-".join)
@pytest.mark.parametrize("case", EMPTY_SIDES)
def test_a_pair_with_an_empty_side(tmp_path, case, sides):
    """Truncation can leave a response no token. Stock divides by 0; ours trains the other side, also with loss=."""
    kind, config, loss = EMPTY_SIDES[case]
    results = []
    for own in ({"config": config}, {"loss": loss}):
        trainer = build(tmp_path, kind, ours=True, **own)
        batch = next(iter(trainer.get_train_dataloader()))
        for row, side in enumerate(sides):
            batch[f"{side}_labels"][row] = -100
        value = trainer.get_batch_loss_metrics(trainer.model, batch)[0]
        value.backward()
        results.append([value, *(p.grad for p in trainer.model.parameters())])
    for mine, of_loss in zip(*results, strict=True):
        assert mine.isfinite().all()
        assert relative_error(mine.detach(), of_loss.detach()) < 1e-4
    assert any(x.any() for x in results[0][1:])


def test_a_transform_that_is_not_the_models_is_refused(train):
    with pytest.raises(ValueError, match=r"the loss has softcap=5.0, but the model is trained with softcap=None"):
        train("DPO", ours=True, loss=LigerFusedLinearDPOLoss(softcap=5.0))


@pytest.mark.filterwarnings("ignore:`return_outputs=True`:FutureWarning")
@pytest.mark.parametrize(
    ("kind", "loss"),
    [
        *((kind, None) for kind in ("SFT", "DPO", "KTO", "GKD", "ORPO")),
        ("SFT", LigerFusedLinearCrossEntropyLoss()),
        ("DPO", LigerFusedLinearDPOLoss(beta=0.1)),
        ("KTO", LigerFusedLinearKTOLoss(beta=0.1)),
    ],
)
def test_compute_metrics_gets_what_trl_hands_it(tmp_path, kind, loss):
    """It gets logits if TRL's trainer returns them."""

    def predictions(ours: bool, **own: Any) -> tuple[float, np.ndarray, np.ndarray]:
        seen: list[Any] = []

        def keep(prediction: Any) -> dict[str, float]:
            seen.append(prediction)
            return {"seen": 1.0}

        trainer = build(tmp_path, kind, ours, evaluate=True, compute_metrics=keep, **own)
        return trainer.evaluate()["eval_loss"], seen[0].predictions, seen[0].label_ids

    loss_of, *rest = predictions(ours=True, loss=loss)
    loss_of_trl, *rest_of_trl = predictions(ours=False)
    assert loss_of == pytest.approx(loss_of_trl, rel=2e-5)
    for x, x_of_trl in zip(rest, rest_of_trl, strict=True):
        np.testing.assert_allclose(x, x_of_trl, rtol=1e-4, atol=1e-5)


SCALE, VOCABULARY = 4, 1500


# GRPO's and RLOO's trainers share their head.
_SIZED = [*((kind, {}) for kind in KINDS if kind != "RLOO"), ("SFT", {"label_smoothing_factor": 0.1})]


@pytest.mark.parametrize(
    ("kind", "settings", "ours"),
    [
        *((*case, True) for case in _SIZED if case[0] in ("SFT", "DPO", "GRPO", "CPO", "GKD")),
        *(rare(*case, True) for case in _SIZED if case[0] not in ("SFT", "DPO", "GRPO", "CPO", "GKD")),
        ("ORPO", {}, False),
        rare("RLOO", {}, True),
        *(rare(*case, False) for case in [*_SIZED, ("RLOO", {})] if case != ("ORPO", {})),
    ],
    ids=str,
)
def test_no_tensor_of_the_size_of_the_logits(train, kind, settings, ours):
    """During a run with evaluation, no tensor is larger than the head's gradient or the attention scores.

    Stock builds logits or, without a GPU, a tile of that size. This shows that the measurement can fail.
    """
    budget = 64 * 1024
    config = {"max_steps": 1, "optim": "sgd", "gradient_accumulation_steps": 1}
    config |= {"per_device_train_batch_size": 8, "per_device_eval_batch_size": 4}
    config |= {name: 24 for name in ("max_completion_length", "max_new_tokens") if name in KINDS[kind].config}
    config |= {"num_generations": 4} if kind in ("GRPO", "RLOO") else {}
    config |= settings

    models = {
        name: tiny.model(seed=seed, vocab_size=VOCABULARY)
        for seed, name in enumerate(("model", "ref_model", "teacher_model"))
        if name == "model" or name in KINDS[kind].arguments()
    }
    memory = Memory()
    memory.expect(*(parameter for model in models.values() for parameter in model.parameters()))
    # Shared prompts have dense masks here (test_trl_shared_prefix.py).
    own = {"logits_budget": budget, **({"share_prefix": False} if kind in SHARING else {})}
    with memory:
        train(
            kind,
            ours=ours,
            config=config,
            evaluate=kind != "OnlineDPO",
            train_dataset=tiny.dataset(KINDS[kind].data, SCALE),
            **models,
            **(own if ours else {}),
        )
    n_tokens = 8 * 28 if kind == "SFT" else 8 * 16
    logits = n_tokens * VOCABULARY * 4
    weight_gradient = VOCABULARY * 32 * 4
    if ours:
        assert weight_gradient <= memory.largest <= 1.5 * weight_gradient < logits / 2
    else:
        assert memory.largest > logits


@pytest.mark.parametrize(("given", "expected"), [(None, 512 * 2**20), (1 << 16, 1 << 16)])
def test_budget_of_a_head_in_the_place_of_trls(tmp_path, monkeypatch, given, expected):
    budgets = []
    add = heads.add_chunked_lm_head

    def watch(*args, logits_budget, **kwargs):
        budgets.append(logits_budget)
        return add(*args, logits_budget=logits_budget, **kwargs)

    monkeypatch.setattr(heads, "add_chunked_lm_head", watch)
    build(tmp_path, "DPO", ours=True, logits_budget=given)
    assert budgets == [expected] * 2  # for the policy and for the reference


def test_a_trl_without_fused_heads(tmp_path, monkeypatch):
    """Trainers that get no fused head of TRL, as perhaps those of a later one: their models have ours all the same."""
    for kind in KINDS.values():
        for module in {sys.modules[cls.__module__] for cls in kind.stock().__mro__}:
            if "add_fused_lm_head" in vars(module):
                monkeypatch.setattr(module, "add_fused_lm_head", lambda *args, **kwargs: None)
    monkeypatch.setattr(heads, "_THEIRS", None)
    monkeypatch.setattr(heads, "_head_of", lambda name, module: None)
    trainer = build(tmp_path, "DPO", ours=True)
    ids = torch.tensor([[5, 6, 7]])
    for model in (trainer.model, trainer.ref_model):
        with asked_logits() as asked:
            output = model(ids, labels=ids, fused_lm_head=True)
        assert output.log_probs.shape == (1, 2) and not asked
    build(tmp_path, "ORPO", ours=True)


def test_imports(fresh_process):
    """The package imports no framework, and a trainer imports only its own module of TRL."""
    code = """
import sys, liger_chunked
assert not {"trl", "transformers"} & sys.modules.keys()
from liger_chunked.integrations.trl import LigerDPOTrainer
assert "trl.experimental.orpo" not in sys.modules and "trl.trainer.grpo_trainer" not in sys.modules
"""
    fresh_process.run(code)
    assert set(dir(integration)) == {f"Liger{kind}Trainer" for kind in KINDS} | {"add_chunked_lm_head", "chunked_heads"}
    with pytest.raises(AttributeError, match="LigerPPOTrainer"):
        _ = integration.LigerPPOTrainer


def test_a_copy_of_a_model_runs_on_its_own_weights():
    model = tiny.model()
    add_chunked_lm_head(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.lm_head.weight.zero_()
    ids = torch.tensor([[5, 6, 7]])
    assert twin(ids, labels=ids, fused_lm_head=True).loss.item() == pytest.approx(math.log(300))
    assert not twin(ids).logits.any()
    assert model(ids).logits.any()


class FewArguments(LlamaForCausalLM):
    """As remote code may be: its forward takes no cache."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, return_dict: bool = True) -> Any:
        hidden = self.model(input_ids=input_ids, attention_mask=attention_mask)[0]
        return CausalLMOutput(logits=self.lm_head(hidden))


@pytest.mark.parametrize(("kind", "own"), [("SFT", {}), ("DPO", {"share_prefix": False})], ids=["SFT", "DPO"])
def test_a_forward_of_few_arguments(train, kind, own):
    """TRL passes `use_cache` to backbones; ours runs the model's own forward."""

    def model() -> Any:
        few = FewArguments(tiny.model().config)
        few.load_state_dict(tiny.model().state_dict())
        return few

    stock = train(kind, ours=False, config=PLAIN, model=model())
    assert_same(train(kind, ours=True, config=PLAIN, model=model(), **own), stock)


def test_trl_keeps_its_own_head(train):
    """TRL's function is restored after a trainer is built, even if that fails."""
    module = importlib.import_module("trl.trainer.dpo_trainer")
    before = module.add_fused_lm_head
    with pytest.raises(ValueError, match="cannot be the same object"):
        model = tiny.model()
        train("DPO", ours=True, model=model, ref_model=model)
    assert module.add_fused_lm_head is before
