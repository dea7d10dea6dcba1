"""Stock trainers of TRL under `patch_trl`, and ours without `loss=`: TRL's values, without logits."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("trl")

import tiny
import torch
from spies import Memory
from torch import Tensor
from transformers import LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutput
from trl_kinds import (
    KINDS,
    PATCHED,
    PLAIN,
    SEQUENCES,
    SHARING,
    Log,
    assert_same,
    build,
    log_of,
    measured,
    of_family,
    rare,
    recorder,
)

from liger_chunked import LigerFusedLinearCrossEntropyLoss, LigerFusedLinearDPOLoss, LigerFusedLinearKTOLoss
from liger_chunked.integrations.trl import patch_trl

pytestmark = [
    # Warnings of transformers and TRL about themselves, and about short runs without a GPU.
    pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`label_smoothing_factor` is deprecated in `SFTTrainer`:FutureWarning"),
]


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., Log]:
    return recorder(tmp_path)


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
    assert_same(train(kind, ours=PATCHED, config=config, evaluate=evaluate), stock)


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
    assert_same(train(kind, ours=PATCHED, config=config, **of_family(kind, family)), stock)


@pytest.mark.parametrize("kind", ["SFT", "DPO", "ORPO", "GRPO", rare("KTO"), rare("GKD")])
def test_gradient_checkpointing_and_autocast(train, kind):
    """Both project the head in bfloat16, but sum up in another order."""
    config = {**PLAIN, "gradient_checkpointing": True, "bf16": True}
    stock, ours = (train(kind, ours=ours, config=config) for ours in (False, PATCHED))
    for mine, theirs in zip(ours[:4], stock[:4], strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=0.02)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=0.05)


@pytest.mark.parametrize("kind", ["SFT", "DPO", "ORPO", "GRPO"])
def test_liger_kernels_own_switch_is_refused(tmp_path, kind):
    """Its losses would silently replace our heads."""
    with pytest.raises(ValueError, match=r"use_liger_kernel=True activates the package Liger-Kernel, .* leave it off"):
        build(tmp_path, kind, ours=PATCHED, config={"use_liger_kernel": True})


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

    def predictions(ours: bool | str, **own: Any) -> tuple[float, np.ndarray, np.ndarray]:
        seen: list[Any] = []

        def keep(prediction: Any) -> dict[str, float]:
            seen.append(prediction)
            return {"seen": 1.0}

        trainer = build(tmp_path, kind, ours, evaluate=True, compute_metrics=keep, **own)
        return trainer.evaluate()["eval_loss"], seen[0].predictions, seen[0].label_ids

    loss_of, *rest = predictions(PATCHED) if loss is None else predictions(True, loss=loss)
    loss_of_trl, *rest_of_trl = predictions(False)
    assert loss_of == pytest.approx(loss_of_trl, rel=2e-5)
    for x, x_of_trl in zip(rest, rest_of_trl, strict=True):
        np.testing.assert_allclose(x, x_of_trl, rtol=1e-4, atol=1e-5)


VOCABULARY = 300


@pytest.mark.parametrize("name", KINDS)
def test_without_logits(tmp_path: Path, name: str) -> None:
    """Two steps give stock's parameters, with no tensor of more rows of logits than the budget, and few products."""
    rows, runs = 8, []
    for budget in (None, rows * VOCABULARY * 4):
        with nullcontext() if budget is None else patch_trl(logits_budget=budget):
            trainer = build(tmp_path, name, config={**PLAIN, "max_steps": 2})
        runs.append((measured(trainer), trainer))
    (stock, of_stock), (ours, patched) = runs
    assert ours.rows <= rows < stock.rows, f"{ours.rows} rows of logits in {ours.where}, {stock.rows} in stock"
    # A chunk of a loss over the budget is projected once more, a token of a router or a metric too.
    assert ours.products <= 1.5 * stock.products
    assert_same(log_of(patched), log_of(of_stock), entries=3)
    for (key, x), (_, y) in zip(patched.model.state_dict().items(), of_stock.model.state_dict().items(), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6, msg=key)
    assert type(patched.model) is type(of_stock.model) and type(patched.model.lm_head) is torch.nn.Linear
    assert vars(patched.model).keys() <= vars(of_stock.model).keys()


SCALE, WIDE = 4, 1500


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
        name: tiny.model(seed=seed, vocab_size=WIDE)
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
    logits = n_tokens * WIDE * 4
    weight_gradient = WIDE * 32 * 4
    if ours:
        assert weight_gradient <= memory.largest <= 1.5 * weight_gradient < logits / 2
    else:
        assert memory.largest > logits


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
    assert_same(train(kind, ours=PATCHED, config=PLAIN, model=model(), **own), stock)


def test_trl_keeps_its_own_head(train):
    """TRL's function is restored after a trainer is built, even if that fails."""
    module = importlib.import_module("trl.trainer.dpo_trainer")
    before = module.add_fused_lm_head
    with pytest.raises(ValueError, match="cannot be the same object"):
        model = tiny.model()
        train("DPO", ours=PATCHED, model=model, ref_model=model)
    assert module.add_fused_lm_head is before
