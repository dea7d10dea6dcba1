"""The losses on pairs and examples, DFT and the generalized JSD against TRL's code, on full logits in float64."""

from __future__ import annotations

import os
from collections import defaultdict
from functools import partial
from types import SimpleNamespace
from typing import Any

import eager
import pytest
import torch
from eager.dpo import LOSS_TYPES
from table import LABELS, SMALL, Batch, evaluate, examples, pairs, relative_error, students, tokens
from torch import Tensor, nn

from liger_chunked import (
    LigerFusedLinearCPOLoss,
    LigerFusedLinearCrossEntropyLoss,
    LigerFusedLinearDPOLoss,
    LigerFusedLinearJSDLoss,
    LigerFusedLinearKTOLoss,
    LigerFusedLinearORPOLoss,
    LigerFusedLinearSimPOLoss,
)

pytest.importorskip("trl")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

from trl.experimental.cpo.cpo_trainer import CPOTrainer
from trl.experimental.gkd.gkd_trainer import GKDTrainer
from trl.experimental.orpo.orpo_trainer import ORPOTrainer
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.kto_trainer import KTOTrainer
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


@pytest.mark.few(1)
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


@pytest.mark.few(2)
@pytest.mark.parametrize("case", CPO)
def test_cpo(case):
    settings = {"beta": 0.1, "cpo_alpha": 1.0, "label_smoothing": 0.0, "loss_type": "sigmoid", "simpo_gamma": 0.5}
    settings |= {"alphapo_alpha": 0.0, **CPO[case]}
    loss = LigerFusedLinearCPOLoss(**settings, logits_budget=BUDGET)
    settings["alpha"] = settings.pop("alphapo_alpha")
    assert_equal_to_trl(loss, CPOTrainer, pairs(SMALL, seed=0, ref=None), exact=1e-11, **settings)


@pytest.mark.few(1)
@pytest.mark.parametrize("nll", [False, True], ids=["simpo", "cpo-simpo"])
def test_simpo_is_trls_cpo(nll):
    settings = {"beta": 2.0, "label_smoothing": 0.1}
    term = {"alpha": 0.7, "compute_nll_loss": True} if nll else {}
    loss = LigerFusedLinearSimPOLoss(**settings, **term, gamma=1.0, logits_budget=BUDGET)
    theirs = {**settings, "loss_type": "simpo", "simpo_gamma": 1.0, "cpo_alpha": 0.7 if nll else 0.0, "alpha": 0.0}
    assert_equal_to_trl(loss, CPOTrainer, pairs(SMALL, seed=0, ref=None), **theirs)


class Model(nn.Module):
    """The interface that TRL's loss needs from a model: statistics of given hidden states.

    KTO's mismatched completions are recognized by their length.
    """

    is_gradient_checkpointing = False

    def __init__(self, batch: Batch, prefix: str = "") -> None:
        super().__init__()
        self.head = batch[f"{prefix}weight"], batch[f"{prefix}bias"]
        names = (f"{prefix}input", f"{prefix}kl_input")
        self.states = {batch[name].shape[1]: batch[name] for name in names if name in batch}

    def forward(self, labels: Tensor, **_: Any) -> SimpleNamespace:
        (weight, bias), target = self.head, labels[:, 1:]
        outputs = ("logps", "entropy", "mean_logits", "is_top1", "log_sum_sq_probs")
        stats = eager.token_stats(weight, self.states[target.shape[1]], target, bias, outputs=outputs)
        return SimpleNamespace(log_probs=stats.pop("logps"), **stats)


def trl_dpo_loss(batch: Batch, loss_types: list[str], loss_weights: list[float], **settings: Any) -> Tensor:
    """Run `DPOTrainer._compute_loss` on a trainer with only the attributes that it reads."""
    policy = Model(batch)
    trainer = SimpleNamespace(
        model=policy,
        ref_model=Model(batch, "ref_"),
        accelerator=SimpleNamespace(device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x),
        args=SimpleNamespace(gradient_checkpointing_kwargs=None, discopop_tau=0.05),
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=False,
        f_divergence_type="reverse_kl",
        use_weighting=False,
        loss_types=loss_types,
        loss_weights=loss_weights,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0,
        _tp_size=1,
    )
    vars(trainer).update(settings)
    # TRL shifts: the hidden state at t - 1 predicts the token at t.
    before = torch.full_like(batch["target"][:, :1], -100)
    labels = torch.cat([before, batch["target"]], dim=1)
    inputs = {
        "input_ids": labels.clamp(min=0),
        "attention_mask": torch.ones_like(labels),
        "completion_mask": (labels != -100).long(),
    }
    return DPOTrainer._compute_loss(trainer, policy, inputs, False)


# TRL uses label_smoothing in these; in "sigmoid" it ignores it.
SMOOTHED = ("exo_pair", "robust", "aot", "aot_unpaired")


def assert_dpo_equal_to_trl(
    settings: dict[str, Any], loss_type: str | list[str], exact: float = 1e-11, dtype: torch.dtype = torch.float64
) -> None:
    batch = {name: x.to(dtype) if x.is_floating_point() else x for name, x in pairs(SMALL, seed=0).items()}
    loss_types = [loss_type] if isinstance(loss_type, str) else loss_type
    weights = settings.pop("loss_weights", [1.0] * len(loss_types))
    loss = LigerFusedLinearDPOLoss(loss_type=loss_type, loss_weights=weights, **settings, logits_budget=BUDGET)
    ours = evaluate(lambda batch: loss(**batch)[0], batch)
    settings = {"beta": 0.1, "label_smoothing": 0.0, **settings}
    theirs = evaluate(lambda batch: trl_dpo_loss(batch, loss_types, weights, **settings), batch)
    for name in ours:
        assert relative_error(ours[name], theirs[name]) < exact, name


@pytest.mark.parametrize("loss_type", [*LOSS_TYPES, ["sigmoid", "bco_pair", "sft"]], ids=str)
def test_dpo(loss_type):
    smoothing = {"label_smoothing": 0.1} if loss_type in SMOOTHED else {}
    weights = [0.8, 0.2, 1.0][: 1 if isinstance(loss_type, str) else len(loss_type)]
    # TRL converts its label smoothing to float32, so its logarithm has an error of 1e-8.
    exact = 1e-6 if loss_type == "exo_pair" else 1e-12
    try:
        assert_dpo_equal_to_trl({**smoothing, "loss_weights": weights}, loss_type, exact)
    except ValueError as error:
        if f"Unknown loss type: {loss_type}" not in str(error):
            raise
        pytest.skip("TRL has no such loss")


DPO = {
    "forward_kl": {"f_divergence_type": "forward_kl"},
    "js_divergence": {"f_divergence_type": "js_divergence"},
    "ld_alpha": {"ld_alpha": 0.3},
    "wpo": {"use_weighting": True},
    "js-ld-wpo": {"f_divergence_type": "js_divergence", "ld_alpha": 0.6, "use_weighting": True},
}


@pytest.mark.few(2)
@pytest.mark.parametrize("loss_type", ["sigmoid", "hinge", "ipo", "sigmoid_norm", "discopop"])
@pytest.mark.parametrize("case", DPO)
def test_dpo_options(case, loss_type):
    if loss_type == "hinge" and "use_weighting" in DPO[case]:
        pytest.skip("TRL writes its weights over the output of relu, and fails in backward")
    assert_dpo_equal_to_trl({**DPO[case]}, loss_type)


@pytest.mark.few(1)
@pytest.mark.parametrize("loss_type", ["apo_zero", "aot", ["sft", "apo_zero"]])
def test_dpo_length_desensitized_with_every_kind_of_loss(loss_type):
    assert_dpo_equal_to_trl({"ld_alpha": 0.3}, loss_type)


@pytest.mark.few(2)
@pytest.mark.parametrize("alpha", [0.5, 0.9, 1.0, 1.3])
def test_dpo_alpha_divergence(alpha):
    """TRL computes it in float32 only."""
    settings = {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": alpha}
    assert_dpo_equal_to_trl(settings, "sigmoid", FLOAT32, torch.float32)


@pytest.mark.parametrize("beta", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("num_items", [None, 37])
def test_jsd(beta, num_items):
    batch, settings = students(SMALL, seed=0), {"beta": beta, "temperature": 0.9}

    def theirs(batch: Batch) -> Tensor:
        student, teacher = (batch[f"{x}input"] @ batch[f"{x}weight"].T + batch[f"{x}bias"] for x in ("", "teacher_"))
        return GKDTrainer.generalized_jsd_loss(
            student, teacher, labels=batch["target"], num_items_in_batch=num_items, **settings
        )

    soft = LigerFusedLinearJSDLoss(**settings, weight_hard_loss=0.0, weight_soft_loss=1.0)
    ours, exact = evaluate(lambda b: soft(**b, num_items=num_items)[0], batch), evaluate(theirs, batch)
    for name in exact:
        assert relative_error(ours[name], exact[name]) < 1e-12, name


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


def trl_kto_loss(batch: Batch, precomputed: bool, **settings: Any) -> tuple[Tensor, dict[str, list[float]]]:
    """Run `KTOTrainer._compute_loss` on a trainer with only the attributes that it reads, and return its logs too."""
    policy = Model(batch)
    metrics: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    trainer = SimpleNamespace(
        model=policy,
        ref_model=Model(batch, "ref_"),
        accelerator=SimpleNamespace(device="cpu", gather_for_metrics=lambda x: x),
        args=SimpleNamespace(gradient_checkpointing_kwargs=None),
        aux_loss_enabled=False,
        precompute_ref_logps=precomputed,
        calculate_KL=settings["loss_type"] == "kto",
        _metrics=metrics,
        _total_train_tokens=0,
        _tp_size=1,
        **settings,
    )
    trainer._compute_kl_logps = partial(KTOTrainer._compute_kl_logps, trainer)

    # TRL shifts: the hidden state at t - 1 predicts the token at t.
    def shifted(target: Tensor, prefix: str = "") -> Batch:
        labels = torch.cat([torch.full_like(target[:, :1], -100), target], dim=1)
        return {
            f"{prefix}input_ids": labels.clamp(min=0),
            f"{prefix}attention_mask": torch.ones_like(labels),
            f"{prefix}completion_mask": (labels != -100).long(),
        }

    inputs = {"label": batch["preference_labels"], **shifted(batch["target"]), **shifted(batch["kl_target"], "KL_")}
    if precomputed:
        ref = Model(batch, "ref_")
        for name, prefix in (("ref_logps", ""), ("ref_KL_logps", "KL_")):
            labels = inputs[f"{prefix}input_ids"].masked_fill(inputs[f"{prefix}completion_mask"] == 0, -100)
            inputs[name] = ref(labels).log_probs.sum(1)
    return KTOTrainer._compute_loss(trainer, policy, inputs, False), metrics["train"]


def sample(labels: str, sign: str) -> Batch:
    """Make mismatched completions that are longer, and likelier or less likely under the policy than the reference."""
    batch = examples(SMALL, seed=11, labels=labels)
    others = examples(SMALL._replace(length=SMALL.length + 2), seed=12, mismatched="states")
    batch |= {name: others[name] for name in ("kl_input", "kl_target", "ref_kl_input")}
    if sign == "negative":
        batch["kl_input"] = 100 * batch["kl_input"]
    return batch


SETTINGS = {"beta": 0.07, "desirable_weight": 1.3, "undesirable_weight": 0.6}


@pytest.mark.parametrize("budget", [None, 8 * 9 * SMALL.vocab], ids=["auto", "packs"])
@pytest.mark.parametrize("sign", ["positive", "negative"])
@pytest.mark.parametrize("labels", LABELS)
@pytest.mark.parametrize("precomputed", [False, True], ids=["ref-states", "ref-logps"])
@pytest.mark.parametrize("loss_type", ["kto", "apo_zero_unpaired"])
def test_kto(loss_type, precomputed, labels, sign, budget):
    batch = sample(labels, sign)
    settings = {**SETTINGS, "loss_type": loss_type}
    module = LigerFusedLinearKTOLoss(logits_budget=budget, **settings)
    read = [name for name in batch if loss_type == "kto" or "kl_" not in name]

    def ours(batch: Batch) -> Tensor:
        return module(**{name: batch[name] for name in read})[0]

    result = evaluate(ours, batch)
    exact = evaluate(lambda batch: trl_kto_loss(batch, precomputed, **settings)[0], batch)
    for name in exact:
        assert relative_error(result[name], exact[name]) < 1e-12, name

    _, metrics = module(**{name: batch[name] for name in read})
    _, logged = trl_kto_loss(batch, precomputed, **settings)
    assert (metrics.reference_point > 0) == (loss_type == "kto" and sign == "positive")
    assert metrics.reference_point.item() == pytest.approx(logged["kl"][0], rel=1e-12)
    for side, present in (("chosen", metrics.chosen_count), ("rejected", metrics.rejected_count)):
        for ours_, theirs in (("rewards", "rewards"), ("logps", "logps"), ("logits_mean", "logits")):
            expected = logged[f"{theirs}/{side}"]
            assert len(expected) == (present > 0)
            if expected:
                assert getattr(metrics, f"{side}_{ours_}").item() == pytest.approx(expected[0], rel=1e-12)
