"""Trainers with `loss=`: it trains and logs as TRL's own, and what it cannot serve is refused at construction."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")

import tiny
import torch
import trl
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from trl_kinds import KINDS, LOSS_OF, PLAIN, SEQUENCES, Log, assert_same, build, rare, recorder, run

from liger_chunked import (
    Clipped,
    LigerFusedLinearBCOLoss,
    LigerFusedLinearCrossEntropyLoss,
    LigerFusedLinearDPOLoss,
    LigerFusedLinearGRPOLoss,
    LigerFusedLinearJSDLoss,
    LigerFusedLinearKTOLoss,
    LigerFusedLinearPolicyBase,
    LigerFusedLinearPreferenceBase,
    LigerFusedLinearSimPOLoss,
)
from liger_chunked.deferred import rules
from liger_chunked.integrations import trl as integration
from liger_chunked.integrations.transformers import apply_liger_kernel, layers
from liger_chunked.layers import liger_rms_norm

pytestmark = [
    # Warnings of transformers and TRL about themselves, and about short runs without a GPU.
    pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`label_smoothing_factor` is deprecated in `SFTTrainer`:FutureWarning"),
]


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., Log]:
    return recorder(tmp_path)


@pytest.mark.parametrize(
    ("kind", "loss"),
    [
        ("SFT", None),
        ("DPO", None),
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


@pytest.mark.parametrize("kind", ["SFT", "DPO", "KTO"])
def test_what_a_model_gets(tmp_path, kind):
    """Its own arguments alone: other columns of a batch are the loss's, and a model without **kwargs would raise."""
    trainer, calls = build(tmp_path, kind, ours=True, loss=LOSS_OF[kind]()), []
    known = {"input_ids", "attention_mask", "labels", "use_cache", "head_fn", "fused_lm_head"}
    for name in ("model", "ref_model"):
        if (model := getattr(trainer, name, None)) is not None:
            model.register_forward_pre_hook(lambda _, args, kwargs: calls.append({*kwargs}), with_kwargs=True)
    trainer.compute_loss(trainer.model, next(iter(trainer.get_train_dataloader())))
    assert calls and all(names - known <= {"return_dict"} for names in calls), calls


@pytest.mark.parametrize("kind", LOSS_OF)
def test_attributes_of_a_subclass(tmp_path, monkeypatch, kind):
    """A user, or a release of TRL, may assign names that are not ours."""

    class Own(getattr(integration, f"Liger{kind}Trainer")):  # type: ignore[misc]
        def __init__(self, *args, **kwargs):
            self.mode_metrics, self._aux_inputs = "train", {"own": 1}
            super().__init__(*args, **kwargs)

    monkeypatch.setattr(integration, f"Liger{kind}Trainer", Own)
    trainer = build(tmp_path, kind, ours=True, config={"max_steps": 1}, loss=LOSS_OF[kind]())
    trainer.train()
    assert (trainer.mode_metrics, trainer._aux_inputs) == ("train", {"own": 1})


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
    "SFT": (LigerFusedLinearCrossEntropyLoss, {"lse_square_scale": 0.1, "return_z_loss": True}),
    "Distillation": (LigerFusedLinearJSDLoss, {"weight_hard_loss": 0.0, "weight_soft_loss": 1.0}),
}


@pytest.mark.parametrize("kind", WITH_OWN)
def test_a_metric_of_ones_own(train, kind):
    config = {"loss_type": "kto"} if kind == "KTO" else {}
    cls, options = WITH_OWN[kind]
    loss = type("WithOwn", (Own, cls), {})(**options)
    log = train(kind, ours=True, evaluate=kind in ("DPO",), config=config, loss=loss)
    entries = [entry for entry in log if "loss" in entry or "eval_loss" in entry]
    for entry in entries:
        prefix = "eval_" if "eval_loss" in entry else ""
        same = next(name for name in OWN.values() if prefix + name in entry)
        assert entry[f"{prefix}own"] == pytest.approx(entry[prefix + same], rel=1e-5)
        assert entry[f"{prefix}number"] == 2
        # The last batch of an evaluation has a sample twice, which the log leaves out, also of these two values.
        assert entry[f"{prefix}flags"] == pytest.approx(2 / 3 if prefix else 0.5)
    assert len(entries) == (5 if kind in ("DPO",) else 4)


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


def test_a_parameter_of_the_loss_beside_an_adapter(tmp_path):
    """PEFT saves what `modules_to_save` names. A parameter that it would train and drop is refused."""
    config = {"r": 2, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    none, loss, model = {"ref_model": None}, Learned(), get_peft_model(tiny.model(), LoraConfig(**config))
    model.own_loss = loss
    with pytest.raises(ValueError, match=r"margin \(\) .* which PEFT would train and not save: .* modules_to_save="):
        build(tmp_path, "DPO", ours=True, loss=loss, model=model, **none)
    model = tiny.model()
    model.own_loss = Learned()
    model = get_peft_model(model, LoraConfig(**config, modules_to_save=["own_loss"]))
    loss = model.base_model.model.own_loss.modules_to_save["default"]
    trainer = build(tmp_path, "DPO", ours=True, loss=loss, model=model, **none)
    trainer.train()
    trainer.save_model(tmp_path / "saved")
    assert abs(loss.margin.item() - 0.5) > 1e-3
    model = tiny.model()
    model.own_loss = Learned()
    loaded = PeftModel.from_pretrained(model, tmp_path / "saved")
    assert torch.equal(loaded.base_model.model.own_loss.modules_to_save["default"].margin, loss.margin)


def test_a_loss_without_a_reference_needs_none(train):
    """DPO's trainer then loads no second model. The step equals that of the same loss with an unused reference."""
    alone = train("DPO", ours=True, loss=Margin(use_ref_model=False), ref_model=None)
    unread = train("DPO", ours=True, loss=Margin())
    for entry in (*alone, *unread):
        for name in [name for name in entry if name.startswith("rewards/")]:
            entry.pop(name)
    assert_same(alone, unread)


REFUSED: dict[str, Any] = {
    "another-kind": ("KTO", LigerFusedLinearDPOLoss(), r"LigerKTOTrainer takes a LigerFusedLinearUnpaired.*DPOLoss"),
    "no-loss": ("RLOO", LigerFusedLinearGRPOLoss(), "LigerRLOOTrainer takes no loss"),
    "a-class": ("DPO", LigerFusedLinearDPOLoss, "got the class LigerFusedLinearDPOLoss"),
    "a-name": ("DPO", "sigmoid", "takes a LigerFusedLinearPreferenceBase, got loss=str"),
    "a-function": ("GRPO", torch.sum, "takes a LigerFusedLinearPolicyBase, got loss=builtin_function_or_method"),
    "no-reference-point": ("KTO", LigerFusedLinearBCOLoss(), "asks for the reference point 'delta'"),
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
    "a-value-a-token": (
        "Distillation",
        LigerFusedLinearJSDLoss(reduction="none"),
        "a mean over tokens, got reduction='none'",
    ),
    "other-labels": ("Distillation", LigerFusedLinearJSDLoss(ignore_index=-1), "the loss has ignore_index=-1"),
    "a-function-too": (
        "SFT",
        LigerFusedLinearCrossEntropyLoss(),
        "loss= and compute_loss_func both take the place",
        {"compute_loss_func": len},
    ),
    **{
        f"a-precomputed-reference-of-{kind}": (
            kind,
            loss,
            "takes no reference, got precompute_ref_log_probs=True",
            {"config": {"precompute_ref_log_probs": True}, "ref_model": None},
        )
        for kind, loss in (("DPO", LigerFusedLinearSimPOLoss()), ("KTO", LigerFusedLinearKTOLoss(use_ref_model=False)))
    },
}


@pytest.mark.filterwarnings("ignore:`compute_loss_func` is deprecated:FutureWarning")
@pytest.mark.parametrize("case", REFUSED)
def test_a_loss_that_does_not_fit_is_refused(tmp_path, case):
    kind, loss, message, *arguments = REFUSED[case]
    with pytest.raises((TypeError, ValueError), match=message):
        build(tmp_path, kind, ours=True, loss=loss, **dict(*arguments))


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


# A non-default value for every field that a loss replaces.
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


OTHER_TYPE = {"SFT": "dft", "DPO": "hinge", "GRPO": "bnpo"}


REPLACED = [(kind, name) for kind in LOSS_OF for name in getattr(integration, f"Liger{kind}Trainer").replaced_fields]


def fields_of(kind: str) -> dict[str, Any]:
    return {f.name: f for f in dataclasses.fields(KINDS[kind].config_class())}


@pytest.mark.parametrize(("kind", "name"), REPLACED, ids=str)
def test_a_config_field_that_a_loss_replaces(tmp_path, kind, name):
    """A field that is not at its default raises before anything is loaded."""
    fields = fields_of(kind)
    if name not in fields and not trl.__version__.startswith("1.16."):
        pytest.skip(f"TRL {trl.__version__} has no such field")
    default = fields[name].default
    if name == "loss_type":
        other = OTHER_TYPE[kind]
    elif name in OTHER:
        other = OTHER[name]
    else:
        other = not default if isinstance(default, bool) else (default - 0.125 if default else 0.125)
    ours = getattr(integration, f"Liger{kind}Trainer")
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
    getattr(integration, f"Liger{kind}Trainer")._check_config(LOSS_OF[kind](), config)


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


def test_defaults_of_a_users_config_are_no_defaults(tmp_path):
    """TRL would use them, so the loss must not ignore them."""

    @dataclasses.dataclass
    class Ours(KINDS["DPO"].config_class()):
        beta: float = 0.7

    config = Ours(output_dir=str(tmp_path), use_cpu=True, bf16=False)
    with pytest.raises(ValueError, match=r"fields of Ours: beta=0.7 \(the loss has beta=0.1\)"):
        integration.LigerDPOTrainer("no such model", args=config, loss=LigerFusedLinearDPOLoss())


def test_a_budget_beside_a_loss(tmp_path, monkeypatch):
    with pytest.raises(
        ValueError,
        match=r"logits_budget='1MiB' of the trainer would not be read: pass it to the loss, LigerFusedLinearDPOLoss",
    ):
        build(tmp_path, "DPO", ours=True, loss=LigerFusedLinearDPOLoss(), logits_budget="1MiB")
    # The loss's budget also applies to the heads that score the reference.
    trainer = build(tmp_path, "DPO", ours=True, loss=LigerFusedLinearDPOLoss(logits_budget="1MiB"))
    assert trainer._liger_heads.plain.logits_budget == 2**20


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
            integration.LigerDPOTrainer("no such model", *arguments, loss=loss, **named)
    assert not LigerFusedLinearDPOLoss().needs_token_ref_logps

    class Compares(LigerFusedLinearKTOLoss):
        """Declares the need; any loss may."""

        needs_token_ref_logps = True

    message = r"Compares needs reference log-probabilities per token, .* so that the reference runs in each step$"
    with pytest.raises(ValueError, match=message):
        build(tmp_path, "KTO", ours=True, config={"precompute_ref_log_probs": True}, loss=Compares())
