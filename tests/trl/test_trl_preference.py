"""ORPO, CPO, SimPO, DPO's options and DFT against TRL's code, on full logits in float64."""

from __future__ import annotations

import os
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import eager
import pytest
import torch
from table import SMALL, Batch, evaluate, pairs, relative_error, tokens
from torch import Tensor, nn

from liger_chunked import (
    LigerFusedLinearCPOLoss,
    LigerFusedLinearCrossEntropyLoss,
    LigerFusedLinearDPOLoss,
    LigerFusedLinearORPOLoss,
    LigerFusedLinearSimPOLoss,
)

pytest.importorskip("trl")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

from test_trl import trl_loss as trl_dpo_loss
from trl.experimental.cpo.cpo_trainer import CPOTrainer
from trl.experimental.orpo.orpo_trainer import ORPOTrainer
from trl.trainer.sft_trainer import SFTTrainer

BUDGET = 8 * 9 * SMALL.vocab  # nine tokens
CPU = SimpleNamespace(device="cpu", gather_for_metrics=lambda x: x)


class Logits(nn.Module):
    """A model that returns given logits for any ids. The last position predicts nothing."""

    def __init__(self, batch: Batch) -> None:
        super().__init__()
        self.value = eager.logits(batch["weight"], batch["input"], batch["bias"])

    def forward(self, ids: Tensor, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(logits=nn.functional.pad(self.value, (0, 0, 0, 1)))


def trl_batch(batch: Batch) -> dict[str, Tensor]:
    """Build a batch like TRL's collator: ids of prompt and response, labels of the response. Only TRL shifts."""
    labels = nn.functional.pad(batch["target"], (1, 0), value=-100)
    nll_labels = nn.functional.pad(batch.get("nll_target", batch["target"]), (1, 0), value=-100)
    result = {}
    for name, rows in zip(("chosen", "rejected"), (slice(0, 3), slice(3, 6)), strict=True):
        result[f"{name}_labels"] = labels[rows]
        result[f"{name}_input_ids"] = nll_labels[rows].clamp(min=0)
        result[f"{name}_attention_mask"] = (nll_labels[rows] != -100).long()
    return result


def trl_loss(trainer: type, batch: Batch, **settings: Any) -> tuple[Tensor, dict[str, float]]:
    """Run `get_batch_loss_metrics` of a trainer with only the attributes that it reads."""

    def bound(name: str) -> Any:
        return lambda *args, **kwargs: getattr(trainer, name)(stand_in, *args, **kwargs)

    stand_in = SimpleNamespace(
        is_encoder_decoder=False,
        aux_loss_enabled=False,
        padding_value=0,
        pad_token_id=0,
        accelerator=CPU,
        concatenated_inputs=trainer.concatenated_inputs,
        get_batch_logps=trainer.get_batch_logps,
        **settings,
    )
    for name in ("concatenated_forward", "odds_ratio_loss", "cpo_loss"):
        if hasattr(trainer, name):
            setattr(stand_in, name, bound(name))
    return trainer.get_batch_loss_metrics(stand_in, Logits(batch), trl_batch(batch))


def assert_equal_to_trl(loss: nn.Module, trainer: type, batch: Batch, exact: float = 1e-12, **settings: Any) -> None:
    """Compare the loss, its gradients and its metrics."""
    theirs = evaluate(lambda batch: trl_loss(trainer, batch, **settings)[0], batch)
    for name, value in evaluate(lambda batch: loss(**batch)[0], batch).items():
        assert relative_error(value, theirs[name]) < exact, name
    expected = trl_loss(trainer, batch, **settings)[1]
    metrics = loss(**batch)[1]
    for name in ("logps", "rewards"):
        for side in ("chosen", "rejected"):
            ours = float(getattr(metrics, f"{side}_{name}").mean())
            assert ours == pytest.approx(expected[f"{name}/{side}"], rel=exact), (name, side)
    assert float(metrics.nll_loss) == pytest.approx(expected["nll_loss"], rel=exact)


def with_prompts(batch: Batch) -> Batch:
    """Extend `nll_target` to the tokens before the response."""
    target = batch["target"]
    in_prompt = (target != -100).cumsum(1) == 0
    in_prompt &= (target != -100).any(1, keepdim=True)
    prompts = torch.arange(target.numel()).view(target.shape) % SMALL.vocab
    return {**batch, "nll_target": torch.where(in_prompt, prompts, target)}


# TRL computes the log-odds in float32 for every dtype.
FLOAT32 = 1e-5


@pytest.mark.parametrize("beta", [0.1, 1.0])
def test_orpo(beta):
    """TRL's NLL spans prompt and response."""
    batch = with_prompts(pairs(SMALL, seed=0, ref=None))
    assert (batch["nll_target"] != batch["target"]).any()
    loss = LigerFusedLinearORPOLoss(beta=beta, logits_budget=BUDGET)
    assert_equal_to_trl(loss, ORPOTrainer, batch, exact=FLOAT32, beta=beta)


CPO = {
    "sigmoid": {},
    "sigmoid-smoothing": {"label_smoothing": 0.1},
    "hinge": {"loss_type": "hinge"},
    "ipo": {"loss_type": "ipo"},
    "simpo": {"loss_type": "simpo", "simpo_gamma": 1.0, "beta": 2.0},
    "simpo-smoothing": {"loss_type": "simpo", "label_smoothing": 0.1},
    "no-nll": {"cpo_alpha": 0.0},
    "alphapo": {"loss_type": "simpo", "cpo_alpha": 0.0, "alphapo_alpha": 0.25},
    "alphapo-negative-ipo": {"loss_type": "ipo", "alphapo_alpha": -0.3},
    "alphapo-sigmoid": {"alphapo_alpha": 0.05},
}


@pytest.mark.parametrize("case", CPO)
def test_cpo(case):
    settings = {"beta": 0.1, "cpo_alpha": 1.0, "label_smoothing": 0.0, "loss_type": "sigmoid", "simpo_gamma": 0.5}
    settings |= {"alphapo_alpha": 0.0, **CPO[case]}
    loss = LigerFusedLinearCPOLoss(**settings, logits_budget=BUDGET)
    settings["alpha"] = settings.pop("alphapo_alpha")
    assert_equal_to_trl(loss, CPOTrainer, pairs(SMALL, seed=0, ref=None), exact=1e-11, **settings)


@pytest.mark.parametrize("nll", [False, True], ids=["simpo", "cpo-simpo"])
def test_simpo_is_trls_cpo(nll):
    settings = {"beta": 2.0, "label_smoothing": 0.1}
    term = {"alpha": 0.7, "compute_nll_loss": True} if nll else {}
    loss = LigerFusedLinearSimPOLoss(**settings, **term, gamma=1.0, logits_budget=BUDGET)
    theirs = {**settings, "loss_type": "simpo", "simpo_gamma": 1.0, "cpo_alpha": 0.7 if nll else 0.0, "alpha": 0.0}
    assert_equal_to_trl(loss, CPOTrainer, pairs(SMALL, seed=0, ref=None), **theirs)


DPO = {
    "forward_kl": {"f_divergence_type": "forward_kl"},
    "js_divergence": {"f_divergence_type": "js_divergence"},
    "ld_alpha": {"ld_alpha": 0.3},
    "ld_alpha-0": {"ld_alpha": 0.0},
    "wpo": {"use_weighting": True},
    "js-ld-wpo": {"f_divergence_type": "js_divergence", "ld_alpha": 0.6, "use_weighting": True},
}


def assert_dpo_equal_to_trl(
    settings: dict[str, Any], loss_type: str | list[str], exact: float, dtype: torch.dtype
) -> None:
    batch = {name: x.to(dtype) if x.is_floating_point() else x for name, x in pairs(SMALL, seed=0).items()}
    loss = LigerFusedLinearDPOLoss(loss_type=loss_type, **settings, logits_budget=BUDGET)
    loss_types = [loss_type] if isinstance(loss_type, str) else loss_type
    ours = evaluate(lambda batch: loss(**batch)[0], batch)
    settings = {"beta": 0.1, "label_smoothing": 0.0, **settings}
    theirs = evaluate(lambda batch: trl_dpo_loss(batch, loss_types, [1.0] * len(loss_types), **settings), batch)
    for name in ours:
        assert relative_error(ours[name], theirs[name]) < exact, name


@pytest.mark.parametrize("loss_type", ["sigmoid", "hinge", "ipo", "sigmoid_norm", "discopop"])
@pytest.mark.parametrize("case", DPO)
def test_dpo_options(case, loss_type):
    if loss_type == "hinge" and "use_weighting" in DPO[case]:
        pytest.skip("TRL writes its weights over the output of relu, and fails in backward")
    assert_dpo_equal_to_trl(DPO[case], loss_type, 1e-11, torch.float64)


@pytest.mark.parametrize("loss_type", ["apo_zero", "aot", ["sft", "apo_zero"]])
def test_dpo_length_desensitized_with_every_kind_of_loss(loss_type):
    assert_dpo_equal_to_trl({"ld_alpha": 0.3}, loss_type, 1e-11, torch.float64)


def test_sft_alone_reads_no_ld_alpha():
    for loss_type in ("sft", ["sft", "sft"]):
        with pytest.raises(ValueError, match=r"ld_alpha=0.3 is not read by loss_type 'sft'"):
            LigerFusedLinearDPOLoss(loss_type=loss_type, ld_alpha=0.3)


@pytest.mark.parametrize("alpha", [0.5, 0.9, 1.0, 1.3])
def test_dpo_alpha_divergence(alpha):
    """TRL computes it in float32 only."""
    settings = {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": alpha}
    assert_dpo_equal_to_trl(settings, "sigmoid", FLOAT32, torch.float32)


@pytest.mark.parametrize("num_items", [None, 37])
def test_dft(num_items):
    batch = tokens(SMALL, seed=0)

    def model(labels: Tensor, **_: Any) -> SimpleNamespace:
        arguments = (batch["weight"], batch["input"], labels, batch["bias"])
        stats = eager.token_stats(*arguments, outputs=("logps", "entropy", "is_top1"))
        return SimpleNamespace(log_probs=stats.pop("logps"), label_mask=labels != -100, **stats)

    trainer = SimpleNamespace(
        model=SimpleNamespace(training=False),
        accelerator=SimpleNamespace(parallelism_config=None, **vars(CPU)),
        args=SimpleNamespace(loss_type="dft", average_tokens_across_devices=False),
        aux_loss_enabled=False,
        compute_loss_func=None,
        label_smoother=None,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0,
    )
    theirs = SFTTrainer.compute_loss(trainer, model, {"labels": batch["target"]}, num_items_in_batch=num_items)
    ours = LigerFusedLinearCrossEntropyLoss(dft=True)(**batch, num_items=num_items)
    assert relative_error(ours, theirs) < 1e-12
