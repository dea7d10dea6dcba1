"""`liger_chunked.compat`: Liger-Kernel's signatures against the oracles, and against Liger-Kernel if it is installed.

Its chunked losses are plain PyTorch and run on a CPU. Its kernels need a GPU.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import eager
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from packaging.version import Version
from sampling import sampled
from table import SMALL, Batch, evaluate, examples, moved, pairs, relative_error, rollouts, students, tokens
from torch import Tensor, nn

import liger_chunked as lc
from liger_chunked import compat
from liger_chunked.compat import chunked_loss, ops, transformers
from liger_chunked.compat.chunked_loss import functional as chunked_functional
from liger_chunked.compat.transformers import functional
from liger_chunked.compat.unsupported import MISSING

MODULES = {"chunked_loss": chunked_loss, "transformers": transformers}


def peer(module: str) -> Any:
    """Return Liger-Kernel's module. It may warn and be nondeterministic."""
    return pytest.importorskip(f"liger_kernel.{module}", exc_type=ImportError)


@dataclass(frozen=True)
class Case:
    """A fused loss in one setting.

    Args:
        id: the name in a test report.
        name: the name of the class in `module`.
        arguments: names in the batch, in the order of the call; a name that is not in the batch is passed as None.
        sample: returns a batch in float64.
        oracle: returns the loss of a batch.
        settings: arguments of the constructor.
        peer: whether Liger-Kernel has this loss in plain PyTorch, with the oracle's results.
    """

    id: str
    name: str
    arguments: tuple[str, ...]
    sample: Callable[[], Batch]
    oracle: Callable[[Batch], Tensor]
    settings: dict[str, Any] = field(default_factory=dict)
    module: str = "chunked_loss"
    peer: bool = True

    def __repr__(self) -> str:
        return self.id

    def run(self, module: Any, batch: Batch, **settings: Any) -> Any:
        loss = getattr(module, self.name)(**self.settings, **settings)
        return loss(*(batch.get(name) for name in self.arguments))


def first(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


# Preference

HEAD = ("weight", "input", "target", "bias")
PAIR = (*HEAD, "ref_input", "ref_weight", "ref_bias")


def dpo(id: str, ref: str | None = "states", **settings: Any) -> Case:
    known = {name: value for name, value in settings.items() if name != "use_ref_model"}
    return Case(
        f"dpo-{id}",
        "LigerFusedLinearDPOLoss",
        PAIR,
        lambda: pairs(SMALL, seed=1, ref=ref),
        lambda batch: eager.dpo(**batch, **known)[0],
        settings,
    )


def without_reference() -> Batch:
    return pairs(SMALL, seed=3, ref=None)


def paired(
    id: str,
    name: str,
    oracle: Callable[[Batch], Tensor],
    sample: Callable[[], Batch] = without_reference,
    **settings: Any,
) -> Case:
    """A loss of pairs without a reference."""
    arguments = (*HEAD, "nll_target") if name == "ORPO" and sample is not without_reference else HEAD
    return Case(id, f"LigerFusedLinear{name}Loss", arguments, sample, oracle, settings)


def cpo(id: str, oracle: dict[str, Any], **settings: Any) -> Case:
    return paired(f"cpo-{id}", "CPO", lambda batch: eager.cpo(**batch, **oracle), **settings)


def with_nll_target() -> Batch:
    """The NLL spans the whole chosen sequences and excludes the rejected ones."""
    batch = without_reference()
    chosen = torch.arange(SMALL.sequences)[:, None] < SMALL.sequences // 2
    ids = batch["target"].where(batch["target"] != -100, 7)
    return batch | {"nll_target": ids.where(chosen, -100)}


def orpo_without_nll(batch: Batch) -> Tensor:
    nll = eager.cpo(**batch, cpo_alpha=1.0) - eager.cpo(**batch, cpo_alpha=0.0)
    return eager.orpo(**batch, beta=0.2) - nll


def with_another_nll_target() -> Batch:
    """Every token differs; the rejected half is not read."""
    batch = with_nll_target()
    other = (batch["nll_target"] + 1) % SMALL.vocab
    return batch | {"nll_target": other.where(batch["nll_target"] != -100, 5)}


def orpo_with_its_own_nll(batch: Batch) -> Tensor:
    batch = dict(batch)
    target, pairs = batch.pop("nll_target"), SMALL.sequences // 2
    logits = batch["input"][:pairs] @ batch["weight"].T + batch["bias"]
    return orpo_without_nll(batch) + F.cross_entropy(logits.flatten(0, 1), target[:pairs].flatten())


UNPAIRED = ("input", "weight", "target", "bias", "preference_labels", "ref_input", "ref_weight", "ref_bias", "kl")


def kto(id: str, kl: float | None, ref: str | None, **settings: Any) -> Case:
    def sample() -> Batch:
        batch = examples(SMALL, seed=4, ref=ref)
        return batch if kl is None else batch | {"kl": torch.tensor(kl, dtype=torch.float64)}

    known = {name: value for name, value in settings.items() if name != "use_ref_model"}
    return Case(
        f"kto-{id}",
        "LigerFusedLinearKTOLoss",
        UNPAIRED,
        sample,
        lambda batch: eager.kto(**{"kl": 0.0, **batch}, **known),
        settings,
    )


def kto_without_clamp(batch: Batch) -> Tensor:
    logps = (batch["input"] @ batch["weight"].T + batch["bias"]).log_softmax(-1)
    mask = batch["target"] != -100
    ratios = logps.gather(-1, batch["target"].where(mask, 0)[..., None])[..., 0].where(mask, 0.0).sum(1)
    sign = batch["preference_labels"].double() * 2 - 1
    return torch.sigmoid(-0.1 * sign * (ratios - batch["kl"].detach())).mean()


# Policy

ROLLOUT = (
    "input",
    "weight",
    "selected_token_ids",
    "attention_mask",
    "advantages",
    "bias",
    "ref_logps",
    "old_logps",
    "ref_input",
    "ref_weight",
    "ref_bias",
    "importance_weights",
    "num_items",
)


def grpo(
    id: str,
    oracle: dict[str, Any],
    sample: dict[str, Any] | None = None,
    num_items: float | None = None,
    peer: bool = True,
    **settings: Any,
) -> Case:
    def batch() -> Batch:
        made = rollouts(SMALL, seed=5, **sample or {})
        target = made.pop("target")
        items = {} if num_items is None else {"num_items": torch.tensor(num_items, dtype=torch.float64)}
        return {
            **made,
            "selected_token_ids": target.where(target != -100, 3),
            "attention_mask": (target != -100).long(),
            **items,
        }

    def expected(batch: Batch) -> Tensor:
        batch = dict(batch)
        return eager.grpo(target=batch.pop("selected_token_ids"), **batch, **oracle)[0]

    return Case(f"grpo-{id}", "LigerFusedLinearGRPOLoss", ROLLOUT, batch, expected, settings, peer=peer)


def all_token_luspo(
    batch: Batch,
    beta: float = 0.04,
    importance_sampling_level: str = "token",
    delta: float = math.inf,
    temperature: float = 1.0,
    use_ref_model: bool = True,
    use_bias_correction_kl: bool = False,
) -> Tensor:
    """The mean over all tokens, ignored ones too, of the token's loss times its sequence's length."""
    logits = (batch["input"] @ batch["weight"].T + batch["bias"]) / temperature
    logps = logits.log_softmax(-1).gather(-1, batch["selected_token_ids"][..., None])[..., 0]
    mask, advantages = batch["attention_mask"].double(), batch["advantages"][:, None]
    lengths = mask.sum(1, keepdim=True)
    log_ratio = logps - batch["old_logps"]
    if importance_sampling_level == "sequence":
        log_ratio = (log_ratio * mask).sum(1, keepdim=True) / lengths.clamp(min=1)
    ratio = log_ratio.exp()
    cost = -torch.min(ratio.clamp(max=delta) * advantages, ratio.clamp(0.8, 1.2) * advantages)
    if use_ref_model:
        d = batch["ref_logps"] - logps
        cost = cost + beta * (d.exp() - d - 1) * (ratio if use_bias_correction_kl else 1)
    return (cost * lengths).mean()


def luspo(id: str, **settings: Any) -> Case:
    made = grpo(f"luspo-{id}", {}, {"ref": "tokens"}, loss_type="luspo", **settings)
    return dataclasses.replace(made, oracle=lambda batch: all_token_luspo(batch, **settings))


ALONE: dict[str, Any] = {"use_ref_model": False}
DAPO = {"reduction": "dapo"}
SAPO = {"sapo_temperature_pos": 0.7, "sapo_temperature_neg": 1.4}
VESPO = {"vespo_k_pos": 1.5, "vespo_lambda_pos": 2.5, "vespo_k_neg": 2.0, "vespo_lambda_neg": 1.5}

# Distillation

STUDENT = ("input", "weight", "teacher_input", "teacher_weight", "target", "bias", "teacher_bias")


def flat_students() -> Batch:
    batch = students(SMALL, seed=6)
    rows = {name: batch[name].flatten(0, 1) for name in ("input", "teacher_input", "target")}
    return batch | rows


def distillation(id: str, name: str, oracle: dict[str, Any], **settings: Any) -> Case:
    return Case(
        id,
        name,
        STUDENT,
        flat_students,
        lambda batch: eager.distillation(**batch, **oracle)[0],
        settings,
    )


WEIGHTS = {"weight_hard_loss": 0.3, "weight_soft_loss": 0.8}


# Cross entropy


def cross_entropy(id: str, oracle: dict[str, Any] | None = None, **settings: Any) -> Case:
    def sample() -> Batch:
        batch = tokens(SMALL, seed=7)
        ignored = batch["target"] == -100
        return batch | {"target": batch["target"].masked_fill(ignored, settings.get("ignore_index", -100))}

    return Case(
        f"cross-entropy-{id}",
        "LigerFusedLinearCrossEntropyLoss",
        HEAD,
        sample,
        lambda batch: eager.cross_entropy(**batch, **settings if oracle is None else oracle),
        settings,
        module="transformers",
        peer=False,
    )


CLASSES = torch.linspace(0.2, 2.0, SMALL.vocab, dtype=torch.float64)

CASES = [
    dpo("defaults"),
    *(dpo(kind, loss_type=kind, beta=0.2) for kind in ("hinge", "nca_pair", "bco_pair", "sppo_hard", "apo_zero")),
    dpo("apo-down", loss_type="apo_down"),
    dpo("discopop", loss_type="discopop", beta=0.02, discopop_tau=0.5),
    dpo("exo", loss_type="exo_pair", label_smoothing=0.1),
    dpo("robust", loss_type="robust", label_smoothing=0.1),
    dpo("nll", compute_nll_loss=True, alpha=0.7, average_log_prob=True),
    dpo("unread", alpha=0.7, discopop_tau=0.5),
    dpo("alone", ref=None, use_ref_model=False),
    paired("orpo", "ORPO", lambda batch: eager.orpo(**batch, beta=0.2), beta=0.2),
    paired("orpo-nll-target", "ORPO", lambda batch: eager.orpo(**batch), with_nll_target),
    paired("orpo-no-nll", "ORPO", orpo_without_nll, beta=0.2, compute_nll_loss=False),
    paired("orpo-other-nll-target", "ORPO", orpo_with_its_own_nll, with_another_nll_target, beta=0.2),
    cpo("defaults", {}),
    cpo("settings", {"beta": 0.2, "cpo_alpha": 0.6, "label_smoothing": 0.1}, beta=0.2, alpha=0.6, label_smoothing=0.1),
    cpo("no-nll", {"cpo_alpha": 0.0}, compute_nll_loss=False),
    cpo("average", {"loss_type": "simpo", "simpo_gamma": 0.0}, average_log_prob=True),
    paired("simpo", "SimPO", lambda batch: eager.simpo(**batch, compute_nll_loss=True)),
    paired(
        "simpo-settings",
        "SimPO",
        lambda batch: eager.simpo(**batch, beta=2.0, gamma=1.1, label_smoothing=0.1),
        **{"beta": 2.0, "gamma": 1.1, "label_smoothing": 0.1, "compute_nll_loss": False, "alpha": 0.7},
    ),
    kto("defaults", None, None),
    kto("reference", 0.4, "states", use_ref_model=True, beta=0.3),
    kto("average", 0.1, "states", use_ref_model=True, average_log_prob=True),
    Case(
        "kto-negative-kl",
        "LigerFusedLinearKTOLoss",
        UNPAIRED,
        lambda: examples(SMALL, seed=4, ref=None) | {"kl": torch.tensor([-3.0], dtype=torch.float64)},
        kto_without_clamp,
    ),
    grpo("defaults", {**DAPO, "beta": 0.04, "use_bias_correction_kl": False}, {"ref": "tokens"}),
    grpo(
        "states",
        {**DAPO, "beta": 0.3, "use_bias_correction_kl": True, "temperature": 0.8},
        {"ref": "states"},
        beta=0.3,
        use_bias_correction_kl=True,
        temperature=0.8,
    ),
    grpo("alone", DAPO, **ALONE),
    grpo("on-policy", {"reduction": "bnpo"}, {"old": False}, loss_type="bnpo", **ALONE),
    grpo("num-items", DAPO, num_items=40.0, **ALONE),
    grpo(
        "clip",
        {"epsilon_low": 0.1, "epsilon_high": 0.15, "delta": 1.3},
        {"weights": "tokens"},
        num_items=40.0,
        loss_type="grpo",
        epsilon_low=0.1,
        epsilon_high=0.15,
        delta=1.3,
        max_completion_length=9,
        **SAPO,
        **ALONE,
    ),
    grpo(
        "dr-grpo",
        {"reduction": "dr_grpo", "max_completion_length": 9},
        {"weights": "sequences"},
        loss_type="dr_grpo",
        max_completion_length=9,
        **ALONE,
    ),
    grpo("cispo", {"surrogate": "cispo", **DAPO, "epsilon_high": 1.1}, loss_type="cispo", epsilon_high=1.1, **ALONE),
    grpo("sapo", {"surrogate": "sapo", **SAPO}, loss_type="sapo", **SAPO, **ALONE),
    grpo(
        "vespo",
        {"surrogate": "vespo", **DAPO, **VESPO},
        {"weights": "sequences"},
        loss_type="vespo",
        **VESPO,
        **ALONE,
    ),
    grpo(
        "gspo",
        {"importance_level": "sequence", "epsilon_low": 0.01, "epsilon_high": 0.02},
        loss_type="grpo",
        importance_sampling_level="sequence",
        epsilon_low=0.01,
        epsilon_high=0.02,
        **ALONE,
    ),
    luspo("sequence", importance_sampling_level="sequence", **ALONE),
    luspo("token", delta=1.1, **ALONE),
    luspo("kl", importance_sampling_level="sequence", beta=0.05, use_bias_correction_kl=True, temperature=0.8),
    distillation("jsd", "LigerFusedLinearJSDLoss", {}),
    distillation(
        "jsd-settings",
        "LigerFusedLinearJSDLoss",
        {"parameter": 0.2, "temperature": 2.0, **WEIGHTS},
        beta=0.2,
        temperature=2.0,
        **WEIGHTS,
    ),
    distillation("jsd-forward", "LigerFusedLinearJSDLoss", {"name": "kl"}, beta=0.0),
    distillation("jsd-reverse", "LigerFusedLinearJSDLoss", {"name": "reverse_kl"}, beta=1.0),
    distillation("cosine", "LigerFusedLinearCosineSimilarityLoss", {"name": "cosine", "weight_soft_loss": 0.25}),
    distillation(
        "cosine-settings",
        "LigerFusedLinearCosineSimilarityLoss",
        {"name": "cosine", "weight_hard_loss": 0.3, "weight_soft_loss": 0.8 * 0.6},
        beta=0.6,
        **WEIGHTS,
    ),
    cross_entropy("defaults"),
    cross_entropy("sum", reduction="sum", softcap=5.0),
    cross_entropy("settings", label_smoothing=0.1, lse_square_scale=1e-2, ce_weight=CLASSES, ignore_index=3),
    cross_entropy("dft", {"dft": True}, use_token_scaling=True, accum_dtype=torch.float32),
    Case(
        "fused-jsd",
        "LigerFusedLinearJSD",
        STUDENT[:5],
        lambda: {name: x for name, x in flat_students().items() if not name.endswith("bias")},
        lambda batch: eager.distillation(**batch, parameter=0.3, weight_hard_loss=0.0, weight_soft_loss=1.0)[0],
        {"jsd_beta": 0.3},
        module="transformers",
        peer=False,
    ),
]  # fmt: skip


@pytest.mark.few(3, "kto-defaults")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_the_oracle(case: Case) -> None:
    batch = case.sample()
    ours = evaluate(lambda b: first(case.run(MODULES[case.module], b)), batch)
    exact = evaluate(case.oracle, batch)
    assert ours.keys() == exact.keys() and "weight" in ours
    # Both are in float64. A wrong argument causes a far larger error than another summation order.
    torch.testing.assert_close(ours, exact, rtol=1e-9, atol=1e-11)


@pytest.mark.few(8, "cpu-kto-negative-kl")
@pytest.mark.ordinary_memory
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", [case for case in CASES if case.peer], ids=str)
def test_matches_liger_kernel(case: Case, device: str) -> None:
    """Loss, gradients and other outputs agree."""
    module = peer(case.module)
    batch = moved(case.sample(), torch.float32, device)
    settings = {"compiled": False, "chunk_size": 2}
    theirs = evaluate(lambda b: first(case.run(module, b, **settings)), batch)
    ours = evaluate(lambda b: first(case.run(chunked_loss, b, **settings)), batch)
    # Both are in float32, and Liger-Kernel's losses also sum over a sequence in float32.
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    reports = [case.run(m, batch, **settings) for m in (chunked_loss, module)]
    if not isinstance(reports[1], tuple):
        return
    ours_beside, theirs_beside = (report[1] for report in reports)
    assert len(ours_beside) == len(theirs_beside)
    for i, (x, y) in enumerate(zip(ours_beside, theirs_beside, strict=True)):
        # Both sum in float32, in other orders.
        torch.testing.assert_close(x.float(), y.float(), rtol=1e-4, atol=1e-5, msg=f"metric {i}: {x} {y}")


# Names that Liger-Kernel's package does not export.
_MODULE_OF = {
    "LigerGEGLUMLPForGemma4": "transformers.geglu",
    **{
        f"LigerRMSNormFor{model}": "transformers.rms_norm"
        for model in ("Gemma", "Gemma2", "Gemma3", "Gemma4", "Glm4", "Olmo2", "Qwen3Next")
    },
}


@pytest.mark.few(5)
@pytest.mark.ordinary_memory
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("module", "name"),
    [(module, name) for module, ours in MODULES.items() for name in ours.__all__ if name != "CrossEntropyOutput"],
)
def test_signatures_are_liger_kernels(module: str, name: str) -> None:
    ours, theirs = getattr(MODULES[module], name), getattr(peer(_MODULE_OF.get(name, module)), name)

    def parameters(function: Any) -> list[tuple[str, Any]]:
        listed = list(inspect.signature(function).parameters.values())
        return [(p.name, None if p.default is inspect.Parameter.empty else p.default) for p in listed]

    if name == "LigerKLDIVLoss":  # passes the others on
        assert parameters(ours)[0] == parameters(theirs)[0]
        assert parameters(ours)[1:] == parameters(nn.KLDivLoss)
        return
    if name == "LigerSwiGLUMLPForMuseGlimmer":  # the same class as LigerSwiGLUMLP
        assert parameters(ours)[0] == parameters(theirs)[0]
    elif name in _MODULE_OF:  # one class serves several, with more arguments; the default of `in_place` has no effect
        arguments = [p for p in parameters(theirs) if p[0] != "in_place"]
        assert [p for p in parameters(ours) if p[0] != "in_place"][: len(arguments)] == arguments
    else:
        assert parameters(ours) == parameters(theirs)
    if inspect.isclass(ours) and "SwiGLUMLP" not in name:
        assert parameters(ours.forward) == parameters(theirs.forward)


@pytest.mark.ordinary_memory
@pytest.mark.filterwarnings("ignore")
def test_apply_signatures_are_liger_kernels() -> None:
    pytest.importorskip("transformers")
    module = peer("transformers")
    for family in FAMILIES:
        name = f"apply_liger_kernel_to_{family}"
        theirs = list(inspect.signature(getattr(module, name)).parameters)
        assert list(inspect.signature(getattr(transformers, name)).parameters) == theirs, name


# Return values


def test_orpo_reports_the_odds() -> None:
    batch = pairs(SMALL, seed=3, ref=None)
    loss, metrics = chunked_loss.LigerFusedLinearORPOLoss(beta=0.2)(*(batch[name] for name in HEAD))
    chosen_logps, rejected_logps, *_, nll, chosen_rewards, rejected_rewards, ratio, odds = metrics
    logits = [torch.logit(logps.exp()) for logps in (chosen_logps, rejected_logps)]
    torch.testing.assert_close(odds, (logits[0] - logits[1]).mean())
    torch.testing.assert_close(ratio, F.logsigmoid(logits[0] - logits[1]).mean())
    torch.testing.assert_close(loss, nll - 0.2 * ratio)
    torch.testing.assert_close(chosen_rewards - rejected_rewards, 0.2 * (chosen_logps - rejected_logps))


def test_kto_reports_sums() -> None:
    batch = examples(SMALL, seed=4, ref=None)
    labels = batch["preference_labels"]
    loss = chunked_loss.LigerFusedLinearKTOLoss(beta=0.3)
    _, sums = loss(*(batch.get(name) for name in UNPAIRED))
    head = {name: batch[name] for name in HEAD}
    logps = eager.token_stats(**head)["logps"].sum(-1)
    logits = (batch["input"] @ batch["weight"].T + batch["bias"]).sum((1, 2))
    expected = [x[side].sum() for x in (logps, logits, 0.3 * logps) for side in (labels, ~labels)]
    torch.testing.assert_close([x.double() for x in sums], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.few(3)
@pytest.mark.parametrize(("beta", "n"), [(0.0, 1), (0.1, 2)])
@pytest.mark.parametrize("loss_type", ["dapo", "sapo"])
def test_grpo_reports_by_beta(loss_type: str, beta: float, n: int) -> None:
    case = grpo("", {}, {"ref": "tokens"}, loss_type=loss_type, beta=beta)
    _, metrics = case.run(chunked_loss, case.sample())
    assert len(metrics) == n and all(metric.shape == () for metric in metrics)
    assert (metrics[-1] > 0) == (loss_type == "dapo")


@pytest.mark.parametrize("name", ["LigerFusedLinearJSDLoss", "LigerFusedLinearCosineSimilarityLoss"])
def test_soft_and_hard_losses(name: str) -> None:
    batch = flat_students()
    loss = getattr(chunked_loss, name)(return_soft_hard_loss=True, **WEIGHTS)
    total, soft, hard = loss(*(batch[name] for name in STUDENT))
    torch.testing.assert_close(total, 0.8 * soft.double() + 0.3 * hard.double())
    assert soft > 0 and hard > 0


def test_cross_entropy_output() -> None:
    batch = tokens(SMALL, seed=7)
    settings = {"return_z_loss": True, "return_token_accuracy": True, "return_predicted_tokens": True}
    loss = transformers.LigerFusedLinearCrossEntropyLoss(lse_square_scale=0.1, **settings)
    output = loss(*(batch[name] for name in HEAD))
    assert isinstance(output, transformers.CrossEntropyOutput)
    without = eager.cross_entropy(**batch)
    torch.testing.assert_close(output.loss - output.z_loss, without, rtol=1e-6, atol=0)
    predicted = (batch["input"] @ batch["weight"].T + batch["bias"]).argmax(-1)
    valid = batch["target"] != -100
    assert torch.equal(output.predicted_tokens, predicted.where(valid, -1))
    assert output.token_accuracy == (predicted == batch["target"])[valid].float().mean()
    assert (
        transformers.LigerFusedLinearCrossEntropyLoss(return_predicted_tokens=True)(
            batch["weight"], batch["input"], batch["target"]
        ).z_loss
        is None
    )


def test_ranks_share_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks; the other one has 10 tokens more."""
    case = grpo("", {}, **ALONE)
    batch = case.sample()
    n = int(batch["attention_mask"].sum())
    local = case.run(chunked_loss, batch)[0]
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_reduce", lambda x: x.mul_(2).add_(10))
    torch.testing.assert_close(case.run(chunked_loss, batch)[0], local * n / (n + 5))
    given = case.run(chunked_loss, batch | {"num_items": torch.tensor(2.0 * n)})[0]
    torch.testing.assert_close(given, local)


# Unsupported arguments

WIDER = {"teacher_weight": torch.zeros(SMALL.vocab + 1, SMALL.ref_hidden, dtype=torch.float64), "teacher_bias": None}
# Arguments that are refused: the call, the error, and what it says.
BAD: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "kto-kl": (
        lambda: kto("", None, None).run(
            chunked_loss, examples(SMALL, seed=0, ref=None) | {"kl": torch.zeros(SMALL.sequences)}
        ),
        NotImplementedError,
        r"kl of shape \(6,\)",
    ),
    "fused-jsd-vocabulary": (
        lambda: next(case for case in CASES if case.id == "fused-jsd").run(transformers, flat_students() | WIDER),
        NotImplementedError,
        "teacher_weight .* with more rows than student_weight",
    ),
    "scaling-smoothing": (
        lambda: transformers.LigerFusedLinearCrossEntropyLoss(use_token_scaling=True, label_smoothing=0.1),
        NotImplementedError,
        "label_smoothing",
    ),
    "dpo-missing": (
        lambda: dpo("", ref=None).run(chunked_loss, pairs(SMALL, seed=0, ref=None)),
        ValueError,
        "needs a reference",
    ),
    "dpo-type": (
        lambda: chunked_loss.LigerFusedLinearDPOLoss(loss_type="spin"),
        ValueError,
        "Unsupported loss_type 'spin'",
    ),
    **{
        f"grpo-{name}-sequence": (
            lambda name=name: grpo("", {}, loss_type=name, importance_sampling_level="sequence", **ALONE).run(
                chunked_loss, grpo("", {}).sample()
            ),
            ValueError,
            "Sequence-level importance sampling is not supported",
        )
        for name in ("cispo", "sapo", "vespo")
    },
    "grpo-type": (
        lambda: chunked_loss.LigerFusedLinearGRPOLoss(loss_type="ppo"),
        ValueError,
        "unknown loss_type 'ppo'",
    ),
    "rms-casting": (lambda: transformers.LigerRMSNorm(8, casting_mode="bert"), ValueError, "casting_mode must be"),
    "rope-dim": (
        lambda: transformers.liger_rotary_pos_emb(
            *(torch.zeros(1, 1, 2, 8),) * 2, *(torch.ones(1, 2, 2),) * 2, None, 1, 6
        ),
        ValueError,
        "rotary_dim must be even and at most twice",
    ),
    "kl-shape": (
        lambda: transformers.LigerKLDIVLoss()(torch.randn(3, 8), torch.randn(2, 8)),
        ValueError,
        "the teacher must have the shape and device of the student",
    ),
    "jsd-labels": (
        lambda: transformers.LigerJSD()(torch.randn(3, 8), torch.randn(3, 8), torch.arange(2)),
        ValueError,
        r"shift_labels must be \(3,\)",
    ),
    "tiled-act": (
        lambda: transformers.LigerTiledSwiGLUMLP(mlp_config("relu")),
        ValueError,
        r"hidden_act must be .*, got 'relu'",
    ),
    "tiled-shards": (
        lambda: ops.apply_tiled_mlp(None, nn.Linear(4, 4), torch.randn(2, 7, 4), num_shards=0),
        ValueError,
        "num_shards must be positive, got 0",
    ),
    "functions-positional": (
        lambda: chunked_functional.liger_fused_linear_dpo(*[None] * 19),
        TypeError,
        "too many positional arguments",
    ),
    "unknown-family": (
        lambda: transformers.apply_liger_kernel_to_lama,
        AttributeError,
        r"no attribute 'apply_liger_kernel_to_lama'.*such as .*llama",
    ),
    "set-after": (
        lambda: setattr(chunked_loss.LigerFusedLinearGRPOLoss(0.1), "beta", 0.2),
        AttributeError,
        r"LigerFusedLinearGRPOLoss.beta cannot be set: build a new",
    ),
}  # fmt: skip


@pytest.mark.few(12)
@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str) -> None:
    make, error, message = BAD[name]
    with pytest.raises(error, match=message):
        make()


# What Liger-Kernel accepts


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["DPO", "ORPO", "CPO", "SimPO"])
def test_means_of_logits_cover_ignored_tokens(name: str) -> None:
    batch = pairs(SMALL, seed=3, ref=None)
    settings = {"use_ref_model": False} if name == "DPO" else {}
    loss = getattr(chunked_loss, f"LigerFusedLinear{name}Loss")(**settings)
    _, metrics = loss(*(batch[key] for key in HEAD))
    means = (batch["input"] @ batch["weight"].T + batch["bias"]).unflatten(0, (2, -1)).mean((1, 2, 3))
    # Metrics are float32.
    torch.testing.assert_close(torch.stack(metrics[2:4]).double(), means, rtol=1e-5, atol=1e-6)


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["DPO", "KTO", "GRPO"])
def test_reference_that_is_not_read(kind: str) -> None:
    make, sample = {
        "DPO": (dpo("", use_ref_model=False), pairs(SMALL, seed=0)),
        "KTO": (kto("", None, None), examples(SMALL, seed=0, ref="states")),
        "GRPO": (grpo("", {}, **ALONE), grpo("", {}, {"ref": "states"}).sample()),
    }[kind]
    without = {name: None if name.startswith("ref_") else x for name, x in sample.items()}
    assert torch.equal(first(make.run(chunked_loss, sample)), first(make.run(chunked_loss, without)))


def test_grpo_reads_the_first_of_two_references() -> None:
    case = grpo("", {}, {"ref": "tokens"})
    batch = case.sample()
    states = grpo("", {}, {"ref": "states"}).sample()
    both = batch | {name: states[name] for name in ("ref_input", "ref_weight", "ref_bias")}
    with pytest.warns(UserWarning, match="ref_per_token_logps is read, ref_input is not"):
        loss = first(case.run(chunked_loss, both))
    assert torch.equal(loss, first(case.run(chunked_loss, batch)))


def test_clip_ratio_counts_tokens() -> None:
    case = grpo("", {}, loss_type="grpo", importance_sampling_level="sequence", epsilon_low=1e-3, epsilon_high=1e-3)
    batch = case.sample()
    _, (_, clip_ratio) = case.run(chunked_loss, batch | {"ref_logps": batch["old_logps"]})
    mask, advantages = batch["attention_mask"].double(), batch["advantages"]
    logps = (batch["input"] @ batch["weight"].T + batch["bias"]).log_softmax(-1)
    logps = logps.gather(-1, batch["selected_token_ids"][..., None])[..., 0]
    ratio = (((logps - batch["old_logps"]) * mask).sum(1) / mask.sum(1).clamp(min=1)).exp()
    clipped = ((ratio < 1 - 1e-3) & (advantages < 0)) | ((ratio > 1 + 1e-3) & (advantages > 0))
    torch.testing.assert_close(clip_ratio.double(), (clipped[:, None] * mask).sum() / mask.sum())
    assert 0 < clip_ratio < 1


@pytest.mark.parametrize("kind", ["sigmoid", "hinge"])
def test_dpo_label_smoothing_that_is_not_read(kind: str) -> None:
    with pytest.warns(UserWarning, match="does not read label_smoothing"):
        smoothed = dpo("", loss_type=kind, label_smoothing=0.2)
        loss = first(smoothed.run(chunked_loss, smoothed.sample()))
    assert torch.equal(loss, first(dpo("", loss_type=kind).run(chunked_loss, smoothed.sample())))


@pytest.mark.parametrize("name", ["jsd", "cosine"])
def test_larger_teacher_vocabulary(name: str) -> None:
    """The student's logits of the teacher's other tokens are 0 in the soft loss, and absent from the hard one."""
    case = next(case for case in CASES if case.id == name)
    batch = flat_students()
    generator = torch.Generator().manual_seed(0)
    more = torch.randn(3, SMALL.ref_hidden, generator=generator, dtype=torch.float64)
    batch["teacher_weight"] = torch.cat([batch["teacher_weight"], more])
    batch["teacher_bias"] = F.pad(batch["teacher_bias"], (0, 3), value=0.3)

    def oracle(batch: Batch) -> Tensor:
        logits = batch["input"] @ batch["weight"].T + batch["bias"]
        teacher = batch["teacher_input"] @ batch["teacher_weight"].T + batch["teacher_bias"]
        hard, valid = F.cross_entropy(logits, batch["target"]), batch["target"] != -100
        logits = F.pad(logits, (0, 3))
        if name == "cosine":
            soft = 0.5 * (1 - F.cosine_similarity(logits, teacher.detach(), dim=-1))
        else:
            q, p = logits.softmax(-1), teacher.detach().softmax(-1)
            m = (p + q) / 2
            soft = ((p * (p / m).log() + q * (q / m).log()) / 2).sum(-1)
        return 0.5 * hard + 0.5 * soft[valid].mean()

    ours = evaluate(lambda b: first(case.run(chunked_loss, b)), batch)
    # Both are in float64.
    torch.testing.assert_close(ours, evaluate(oracle, batch), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy_metrics(reduction: str) -> None:
    logits = torch.randn(6, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    target = torch.tensor([0, 3, -100, 10, 2, 2])
    target[1] = logits[1].argmax()
    loss = transformers.LigerCrossEntropyLoss(
        lse_square_scale=0.1, reduction=reduction, softcap=2.0, return_z_loss=True, return_token_accuracy=True,
        return_predicted_tokens=True,
    )  # fmt: skip
    output = loss(logits, target)
    valid = target != -100
    z = torch.where(valid, 0.1 * (2.0 * torch.tanh(logits / 2.0)).logsumexp(-1) ** 2, 0.0)
    plain = F.cross_entropy(2.0 * torch.tanh(logits / 2.0), target, reduction=reduction)
    correct = ((logits.argmax(-1) == target) & valid).double()
    if reduction != "none":
        z, correct = z.sum() / (5 if reduction == "mean" else 1), correct.sum() / 5
    torch.testing.assert_close(output.z_loss, z)
    torch.testing.assert_close(output.loss, plain + z)
    torch.testing.assert_close(output.token_accuracy, correct)
    assert torch.equal(output.predicted_tokens, logits.argmax(-1).where(valid, -1))
    # Both are rounded once, from float32.
    rounded = loss(logits.bfloat16(), target)
    exact = loss(logits.bfloat16().double(), target)
    assert torch.equal(rounded.loss, exact.loss.bfloat16()) and torch.equal(rounded.z_loss, exact.z_loss.bfloat16())


@pytest.mark.few(3)
@pytest.mark.parametrize("reduction", ["none", "sum", "mean", "batchmean"])
def test_kl_div_eps(reduction: Any) -> None:
    log_q, p = torch.randn(3, 7).double().log_softmax(-1), torch.randn(3, 7).double().softmax(-1)
    terms = p * (p.clamp(min=0.2).log() - log_q)
    expected = {"none": terms, "sum": terms.sum(), "mean": terms.mean(), "batchmean": terms.sum() / 3}[reduction]
    torch.testing.assert_close(transformers.LigerKLDIVLoss(0.2, reduction=reduction)(log_q, p), expected)


def test_divergences_take_teachers_as_they_are() -> None:
    """Another dtype, and gradients that nobody reads."""
    log_q = torch.randn(4, 9).log_softmax(-1).half().requires_grad_()
    log_p = torch.randn(4, 9, requires_grad=True).log_softmax(-1)
    jsd = transformers.LigerJSD()(log_q, log_p)
    kl = transformers.LigerKLDIVLoss(reduction="batchmean")(log_q, log_p.exp())
    tvd = transformers.LigerTVDLoss()(log_q, log_p.exp())
    assert jsd.dtype == torch.float16 and kl.dtype == tvd.dtype == torch.float32
    q, p = log_q.float(), log_p.detach()
    torch.testing.assert_close(kl, F.kl_div(q, p.exp(), reduction="batchmean"))
    torch.testing.assert_close(tvd, (q - p.exp()).abs().sum(-1).mean() / 2)
    m = (q.exp() + p.exp()) / 2
    expected = (
        F.kl_div(m.log(), p.exp(), reduction="batchmean") + F.kl_div(m.log(), q.exp(), reduction="batchmean")
    ) / 2
    torch.testing.assert_close(jsd.float(), expected, rtol=1e-3, atol=0)  # rounded to half: 5e-4
    (jsd + kl + tvd).backward()
    assert log_q.grad.dtype == torch.float16


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_jsd_of_valid_rows(beta: float, dtype: torch.dtype) -> None:
    """Ignored rows may hold anything."""
    generator = torch.Generator().manual_seed(1)
    log_q, log_p = (torch.randn(5, 9, generator=generator).log_softmax(-1).to(dtype) for _ in range(2))
    labels = torch.tensor([1, -100, 0, 2, -100])
    exact = log_q.double().clone().requires_grad_()
    q, p = exact[labels >= 0].exp(), log_p[labels >= 0].double().exp()
    m = beta * p + (1 - beta) * q
    if beta in (0.0, 1.0):
        rows = p * (p / q).log() if beta == 0.0 else q * (q / p).log()
    else:
        rows = beta * p * (p / m).log() + (1 - beta) * q * (q / m).log()
    expected = rows.sum(-1).mean()
    log_q[1], log_p[4] = torch.nan, torch.inf
    log_q.requires_grad_()
    loss = transformers.LigerJSD(beta)(log_q, log_p, labels)
    bound = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2**-7}[dtype]
    assert loss.dtype == dtype and relative_error(loss.detach().double(), expected.detach()) < bound
    (found,), (gradient,) = torch.autograd.grad(loss, log_q), torch.autograd.grad(expected, exact)
    assert relative_error(found.double(), gradient) < bound
    assert transformers.LigerJSD(beta)(log_q, log_p, torch.full_like(labels, -100)) == 0


@pytest.mark.parametrize("reduction", ["none", "sum", "mean", "batchmean"])
def test_tvd_of_valid_rows(reduction: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    p, q = (torch.randn(5, 9, generator=generator, dtype=torch.float64).softmax(-1) for _ in range(2))
    labels = torch.tensor([1, -100, 0, 2, -100])
    terms = 0.5 * (p - q).abs() * (labels >= 0)[:, None]
    divisor = {"none": 1, "sum": 1, "mean": 3 * 9, "batchmean": 3}[reduction]
    expected = (terms if reduction == "none" else terms.sum()) / divisor
    p[1] = torch.nan
    torch.testing.assert_close(transformers.LigerTVDLoss(reduction)(p, q, labels), expected)


def test_divergences_of_events_without_probability() -> None:
    log_q = torch.randn(3, 40).log_softmax(-1)
    log_p = log_q.masked_fill(torch.arange(40) >= 5, -torch.inf).log_softmax(-1)
    for loss, student, teacher in (
        (transformers.LigerKLDIVLoss(log_target=True), log_q, log_p),
        (transformers.LigerKLDIVLoss(), log_q, log_p.exp()),
        (transformers.LigerKLDIVLoss(log_target=True, reduction="none"), log_q, log_p),
        (transformers.LigerJSD(0.0), log_q, log_p),
        (transformers.LigerJSD(0.3), log_q, log_p),
        (transformers.LigerJSD(0.3), log_p, log_q),
        (transformers.LigerJSD(1.0), log_p, log_q),
    ):
        x = student.clone().requires_grad_()
        value = loss(x, teacher)
        (gradient,) = torch.autograd.grad(value.sum(), x)
        assert value.isfinite().all() and gradient.isfinite().all()


# Functions


def test_functions_by_position() -> None:
    batch = pairs(SMALL, seed=1)
    states = [batch[name] for name in ("input", "weight", "target", "bias", "ref_input", "ref_weight", "ref_bias")]
    loss, metrics = chunked_functional.liger_fused_linear_dpo(*states, -100, 0.2)
    expected, _ = chunked_loss.LigerFusedLinearDPOLoss(beta=0.2)(*(batch[name] for name in PAIR))
    assert torch.equal(loss, expected) and len(metrics) == 7
    again, _ = chunked_functional.LigerFusedLinearDPOFunction.apply(*states, -100, 0.2)
    assert torch.equal(again, expected)
    with pytest.raises(TypeError, match="too many positional arguments"):
        chunked_functional.liger_fused_linear_dpo(*[None] * 19)


def test_functions_have_their_own_defaults() -> None:
    batch = pairs(SMALL, seed=1, ref=None)
    states = [batch[name] for name in ("input", "weight", "target", "bias")]
    head = [batch[name] for name in HEAD]
    loss, _ = chunked_functional.liger_fused_linear_simpo(*states)
    assert torch.equal(loss, chunked_loss.LigerFusedLinearSimPOLoss(compute_nll_loss=False)(*head)[0])
    with pytest.raises(ValueError, match="needs a reference"):
        chunked_functional.liger_fused_linear_kto(*states[:3], examples(SMALL, seed=4)["preference_labels"])


@pytest.mark.few(5)
@pytest.mark.ordinary_memory
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["orpo", "dpo", "cpo", "simpo", "kto", "grpo", "jsd", "cosine"])
def test_functions_signatures_are_liger_kernels(name: str) -> None:
    theirs = vars(peer("chunked_loss.functional"))[f"liger_fused_linear_{name}"].__self__.forward
    ours = inspect.signature(getattr(chunked_functional, f"liger_fused_linear_{name}"))
    expected = {
        p.name: p.default for p in inspect.signature(theirs).parameters.values() if p.name not in ("cls", "ctx")
    }
    assert list(ours.parameters) == list(expected)
    # No default in Liger-Kernel.
    differ = {n for n, p in ours.parameters.items() if p.default != expected[n]}
    assert differ <= {"student_bias", "teacher_bias", "preference_labels"}


def test_layer_functions() -> None:
    x, y, w = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)
    torch.testing.assert_close(functional.liger_rms_norm(x, w, 1e-5), F.rms_norm(x, (8,), w, 1e-5))
    torch.testing.assert_close(ops.LigerRMSNormFunction.apply(x, w, 1e-5, 1.0), F.rms_norm(x, (8,), w + 1, 1e-5))
    norm, total = ops.LigerFusedAddRMSNormFunction.apply(x, y, w, 1e-5)
    torch.testing.assert_close((norm, total), (F.rms_norm(x + y, (8,), w, 1e-5), x + y))
    torch.testing.assert_close(functional.liger_layer_norm(x, w, y[0], 1e-5), F.layer_norm(x, (8,), w, y[0], 1e-5))
    torch.testing.assert_close(functional.liger_swiglu(x, y), F.silu(x) * y)
    torch.testing.assert_close(ops.LigerSiLUMulFunction.apply(x, y, 2.0, 0.5), F.silu(2 * x) * y / 2)
    torch.testing.assert_close(ops.LigerFusedGateUpSiLUMulFunction.apply(torch.cat([x, y], -1)), F.silu(x) * y)
    torch.testing.assert_close(ops.LigerGELUMulFunction.apply(x, y), F.gelu(x, approximate="tanh") * y)
    target = torch.tensor([1, -100, 3])
    loss, *rest = ops.LigerCrossEntropyFunction.apply(x, target, None)
    torch.testing.assert_close(loss, F.cross_entropy(x, target))
    assert rest == [None] * 3
    loss, *_ = ops.LigerFusedLinearCrossEntropyFunction.apply(x, torch.eye(8), target)
    torch.testing.assert_close(loss, F.cross_entropy(x, target))
    p, q = x.softmax(-1), y.softmax(-1)
    torch.testing.assert_close(functional.liger_tvd(p, q), (p - q).abs().mean() / 2)
    torch.testing.assert_close(functional.liger_kl_div(p.log(), q), (q * (q / p).log()).mean())
    jsd = functional.liger_jsd(p.log(), q.log(), beta=0.0)
    torch.testing.assert_close(jsd, F.kl_div(p.log(), q, reduction="batchmean"))
    fused = functional.liger_fused_linear_jsd(x, torch.eye(8), y, torch.eye(8), jsd_beta=0.0)
    torch.testing.assert_close(fused, jsd)


# Layers


def mlp_config(hidden_act: str, **more: Any) -> SimpleNamespace:
    return SimpleNamespace(hidden_size=4, intermediate_size=6, hidden_act=hidden_act, **more)


def gated_mlp(module: Any, x: Tensor, act: Callable[[Tensor], Tensor] = F.silu) -> Tensor:
    return module.down_proj(act(module.gate_proj(x)) * module.up_proj(x))


def packed_mlp(module: Any, x: Tensor) -> Tensor:
    gate, up = module.gate_up_proj(x).chunk(2, -1)
    return module.down_proj(F.silu(gate) * up)


def gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def rms(module: Any, x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], eps=module.variance_epsilon)


ZERO_CENTRED = ("Gemma", "Gemma2", "Gemma3", "Qwen3Next", "MuseGlimmerTextCentered")
# A layer, and its formula. All new norms of models are x / rms(x).
LAYERS: dict[str, tuple[Callable[[], Any], Callable[[Any, Tensor], Tensor]]] = {
    "rms-llama": (lambda: transformers.LigerRMSNorm(4, 1e-5, 0.0, "llama", "ones", False), rms),
    "rms-gemma": (lambda: transformers.LigerRMSNorm(4, 1e-5, 1.0, "gemma", "zeros", False), rms),
    "rms-without-weight": (lambda: transformers.LigerRMSNorm(4, elementwise_affine=False), rms),
    **{f"rms-{x}": (lambda x=x: getattr(transformers, f"LigerRMSNormFor{x}")(4), rms) for x in ZERO_CENTRED},
    **{
        f"rms-{x}": (lambda x=x: getattr(transformers, f"LigerRMSNormFor{x}")(dim=4, with_scale=False), rms)
        for x in ("Gemma4", "MuseGlimmer")
    },
    "layer-norm": (
        lambda: transformers.LigerLayerNorm(4, 1e-4, bias=True),
        lambda module, x: F.layer_norm(x, (4,), module.weight, module.bias, eps=1e-4),
    ),
    "swiglu-width": (lambda: transformers.LigerSwiGLUMLP(mlp_config("silu"), 10), gated_mlp),
    "phi3": (lambda: transformers.LigerPhi3SwiGLUMLP(mlp_config("silu")), packed_mlp),
    "block-sparse": (
        lambda: transformers.LigerBlockSparseTop2MLP(mlp_config("silu")),
        lambda module, x: module.w2(F.silu(module.w1(x)) * module.w3(x)),
    ),
    "falcon-h1": (
        lambda: transformers.LigerFalconH1SwiGLUMLP(mlp_config("silu", mlp_multipliers=[0.5, 3.0])),
        lambda module, x: 3 * gated_mlp(module, x, lambda gate: F.silu(gate / 2)),
    ),
    # The gelu of tanh, whatever the config names.
    "geglu": (lambda: transformers.LigerGEGLUMLP(mlp_config("silu")), lambda module, x: gated_mlp(module, x, gelu)),
    **{
        f"tiled-{name}-{shards}": (
            lambda name=name, act=act, shards=shards: getattr(transformers, f"LigerTiled{name}MLP")(
                mlp_config(act), num_shards=shards
            ),
            lambda module, x, act=act: gated_mlp(module, x, F.silu if act == "silu" else gelu),
        )
        for name, act in (("SwiGLU", "silu"), ("GEGLU", "gelu"))
        for shards in (None, 4, 100)
    },
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str) -> None:
    make, formula = LAYERS[name]
    layer = make().double()
    for shape in ((9, 4), (2, 7, 4)):
        x = torch.randn(*shape, dtype=torch.float64, requires_grad=True)
        leaves, upstream = [x, *layer.parameters()], torch.randn(*shape, dtype=torch.float64)
        y, expected = layer(x), formula(layer, x)
        torch.testing.assert_close(y, expected, rtol=1e-9, atol=1e-11)
        exact = torch.autograd.grad(expected, leaves, upstream, allow_unused=True)
        for found, g in zip(torch.autograd.grad(y, leaves, upstream), exact, strict=True):
            assert g is None or torch.allclose(found, g, rtol=1e-9, atol=1e-11)


def test_parameters_of_layers() -> None:
    """Their names, first values and sizes are Liger-Kernel's."""
    norm = transformers.LigerRMSNorm(8, 1e-5, 1.0, "gemma", "zeros", False)
    assert list(norm.state_dict()) == ["weight"] and not norm.weight.any()
    norm = transformers.LigerRMSNorm(8, elementwise_affine=False)
    assert not norm.state_dict() and "None" in repr(norm)
    norm = transformers.LigerLayerNorm(8, 1e-4)
    assert list(norm.state_dict()) == ["weight", "bias"] and not norm.bias.any()
    assert transformers.LigerLayerNorm(8, bias=True).bias.any()
    assert transformers.LigerSwiGLUMLP(mlp_config("silu"), 10).gate_proj.out_features == 10
    sharing = mlp_config("gelu", num_hidden_layers=4, num_kv_shared_layers=2, use_double_wide_mlp=True)
    for layer, width in ((None, 6), (1, 6), (2, 12)):  # wider where layers share keys and values
        assert transformers.LigerGEGLUMLPForGemma4(sharing, layer).gate_proj.out_features == width


def test_rms_norm_in_the_dtype_of_the_input() -> None:
    x, norm = torch.randn(3, 8).bfloat16(), transformers.LigerRMSNorm(8, casting_mode="none").bfloat16()
    nn.init.normal_(norm.weight)
    expected = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * norm.weight
    assert torch.equal(norm(x), expected)


def test_apply_tiled_mlp() -> None:
    rows = []

    def fn(module: Any, x: Tensor) -> Tensor:
        rows.append(tuple(x.shape))
        return module(x)

    linear, x = nn.Linear(4, 4).double(), torch.randn(2, 7, 4, dtype=torch.float64, requires_grad=True)
    y = ops.apply_tiled_mlp(fn, linear, x)
    assert torch.allclose(y, linear(x)) and rows == [(1, 7, 4), (1, 7, 4)]  # ceil(7 / 4) parts
    function = ops.LigerTiledMLPFunction.apply(fn, linear, x, 7, list(linear.parameters()))
    assert torch.allclose(function, y) and rows[2:] == 7 * [(1, 2, 4)]


def test_experts() -> None:
    mlp, x = transformers.LigerExperts(mlp_config("silu", num_local_experts=3)), torch.randn(5, 4)
    nn.init.normal_(mlp.gate_up_proj), nn.init.normal_(mlp.down_proj)
    index, weights = torch.tensor([[0, 2], [2, 0], [0, 2], [2, 0], [0, 2]]), torch.rand(5, 2)
    expected = torch.stack([
        sum(
            w * (F.silu((h := mlp.gate_up_proj[e] @ x[t])[:6]) * h[6:]) @ mlp.down_proj[e].T
            for e, w in zip(index[t], weights[t], strict=True)
        )
        for t in range(5)
    ])  # fmt: skip
    torch.testing.assert_close(mlp(x[None], index[None], weights[None]), expected[None])


@pytest.mark.parametrize("columns", [2, 4, 6])
def test_rotary_dim(columns: int) -> None:
    """Rotates the first 4 of 8 columns, with tables for half of them, all, or more than all."""
    q, k = torch.randn(1, 2, 3, 8), torch.randn(1, 1, 3, 8)
    angles = torch.randn(1, 3, 2)
    tables = [torch.cat([f(angles)] * 2 + [torch.zeros(1, 3, 2)], -1) for f in (torch.cos, torch.sin)]
    expected = lc.liger_rotary_pos_emb(q, k, *(table[..., :4].contiguous() for table in tables))
    rotated = transformers.liger_rotary_pos_emb(q, k, *(table[..., :columns] for table in tables), None, 1, 4)
    torch.testing.assert_close(rotated, expected, rtol=0, atol=0)
    assert torch.equal(rotated[0][..., 4:], q[..., 4:])


# Models


def llama() -> Any:
    hf = pytest.importorskip("transformers")
    sizes = {"vocab_size": 32, "hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2}
    return hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, num_hidden_layers=1))


def test_apply_by_position() -> None:
    model = llama()
    applied = transformers.apply_liger_kernel_to_llama(False, False, True, True, False, model)
    assert set(applied.replaced) == {"fused_linear_cross_entropy", "rms_norm"}
    lc.revert_liger_kernel(model)
    assert "rope" in transformers.apply_liger_kernel_to_llama(model=model).replaced
    with pytest.raises(TypeError, match="too many positional arguments"):
        transformers.apply_liger_kernel_to_llama(*[None] * 7)
    lc.revert_liger_kernel(model)


# All that `liger_kernel.transformers` 0.8.5 exports.
FAMILIES = """
deepseek_v2 deepseek_v3 deepseek_v4 exaone4 falcon_h1 gemma gemma2 gemma3 gemma3_text gemma4 gemma4_text glm4 glm4v
glm4v_moe gpt_oss granite hunyuan_v1_dense hunyuan_v1_moe internvl llama llama4 llava ministral mistral mixtral mllama
muse_glimmer nemotron olmo2 olmo3 paligemma phi3 pixtral qwen2 qwen2_5_vl qwen2_vl qwen3 qwen3_5 qwen3_5_moe qwen3_moe
qwen3_next qwen3_vl qwen3_vl_moe smollm3 smolvlm
""".split()
# The names that users import from Liger-Kernel 0.8.5, by module, except `apply_liger_kernel_to_<family>`.
EXPORTED = {
    "liger_kernel": "available_backends available_impls get_backend get_impl set_backend set_impl",
    "liger_kernel.chunked_loss": """
        LigerFusedLinearCPOLoss LigerFusedLinearCosineSimilarityLoss LigerFusedLinearDPOLoss LigerFusedLinearGRPOLoss
        LigerFusedLinearJSDLoss LigerFusedLinearKTOLoss LigerFusedLinearORPOLoss LigerFusedLinearSimPOLoss
    """,
    "liger_kernel.chunked_loss.functional": """
        LigerFusedLinearCPOFunction LigerFusedLinearCosineSimilarityFunction LigerFusedLinearDPOFunction
        LigerFusedLinearGRPOFunction LigerFusedLinearJSDFunction LigerFusedLinearKTOFunction
        LigerFusedLinearORPOFunction LigerFusedLinearSimPOFunction liger_fused_linear_cosine liger_fused_linear_cpo
        liger_fused_linear_dpo liger_fused_linear_grpo liger_fused_linear_jsd liger_fused_linear_kto
        liger_fused_linear_orpo liger_fused_linear_simpo
    """,
    "liger_kernel.chunked_loss.fused_linear_preference": "LigerFusedLinearPreferenceBase",
    "liger_kernel.chunked_loss.fused_linear_unpaired_preference": "LigerFusedLinearUnpairedPreferenceBase",
    "liger_kernel.chunked_loss.fused_linear_ppo": "LigerFusedLinearPPOBase",
    "liger_kernel.chunked_loss.fused_linear_distillation": "LigerFusedLinearDistillationBase",
    "liger_kernel.chunked_loss.dpo_loss": "LigerFusedLinearDPOFunction LigerFusedLinearDPOLoss",
    "liger_kernel.transformers": """
        AutoLigerKernelForCausalLM LigerBlockSparseTop2MLP LigerCrossEntropyLoss LigerDyT LigerExperts
        LigerFalconH1MLP LigerFalconH1SwiGLUMLP LigerFusedAddRMSNorm LigerFusedCETVDLoss
        LigerFusedLinearCrossEntropyLoss LigerFusedLinearJSD LigerFusedLinearKLDivLoss LigerGEGLUMLP LigerJSD
        LigerKLDIVLoss LigerLayerNorm LigerMHC LigerMLP LigerModulatedRMSNorm LigerMultiTokenAttention
        LigerPhi3SwiGLUMLP LigerPolyNorm LigerQwen3MoeSwiGLUMLP LigerRMSNorm LigerRMSNormForMuseGlimmer
        LigerRMSNormForMuseGlimmerTextCentered LigerReLUSquared LigerSoftmax LigerSparsemax LigerSwiGLUMLP
        LigerSwiGLUMLPForMuseGlimmer LigerTVDLoss LigerTiledGEGLUMLP LigerTiledSwiGLUMLP
        LigerVocabParallelCrossEntropy _apply_liger_kernel _apply_liger_kernel_to_instance is_transformers_available
        liger_llama4_text_rotary_pos_emb liger_llama4_vision_rotary_pos_emb liger_rotary_pos_emb
    """,
    "liger_kernel.transformers.functional": """
        CrossEntropyOutput liger_attn_res liger_cross_entropy liger_dyt liger_fused_add_rms_norm
        liger_fused_linear_cross_entropy liger_fused_linear_jsd liger_fused_linear_kl_div
        liger_fused_linear_scaled_cross_entropy_tp liger_fused_neighborhood_attention liger_geglu liger_group_norm
        liger_jsd liger_kl_div liger_layer_norm liger_mhc_apply liger_mhc_coeffs liger_mhc_forward
        liger_mhc_post_res liger_mhc_pre liger_modulated_rms_norm liger_multi_token_attention liger_poly_norm
        liger_qwen2vl_mrope liger_relu_squared liger_rms_norm liger_rope liger_softmax liger_sparsemax liger_swiglu
        liger_tvd
    """,
    "liger_kernel.ops": """
        GrpoLossFunction LigerAttnResFunction LigerCrossEntropyFunction LigerDyTFunction LigerEmbeddingFunction
        LigerFusedAddRMSNormFunction LigerFusedCETVDFunction LigerFusedGateUpSiLUMulFunction
        LigerFusedLinearCrossEntropyFunction LigerFusedLinearJSDFunction LigerFusedLinearKLDivFunction
        LigerFusedLinearScaledCrossEntropyFunction LigerFusedLinearScaledCrossEntropyTPFunction LigerFusedMoEFunction
        LigerFusedNeighborhoodAttentionFunction LigerGELUMulFunction LigerGroupNormFunction LigerJSDFunction
        LigerKLDivLossFunction LigerLayerNormFunction LigerLlama4RopeFunction LigerMHCCoeffsFunction
        LigerMHCPostResFunction LigerMHCPreFunction LigerMLPFunction LigerModulatedRMSNormFunction
        LigerMultiTokenAttentionFunction LigerPolyNormFunction LigerQwen2VLMRopeFunction LigerRMSNormFunction
        LigerReLUSquaredFunction LigerRopeFunction LigerSiLUMulFunction LigerSoftmaxFunction LigerSparsemaxFunction
        LigerTVDLossFunction LigerTiledMLPFunction LigerVocabParallelCEFunction apply_tiled_mlp
        cross_entropy_backward cross_entropy_forward geglu_backward geglu_forward layer_norm_backward
        layer_norm_forward rms_norm_backward rms_norm_forward rope_backward rope_forward swiglu_backward
        swiglu_forward
    """,
    "liger_kernel.transformers.rms_norm": """
        LigerRMSNorm LigerRMSNormForGemma LigerRMSNormForGemma2 LigerRMSNormForGemma3 LigerRMSNormForGemma4
        LigerRMSNormForGlm4 LigerRMSNormForOlmo2 LigerRMSNormForQwen3Next
    """,
    "liger_kernel.transformers.geglu": "LigerGEGLUMLP LigerGEGLUMLPForGemma4",
    "liger_kernel.transformers.rope": "liger_rotary_pos_emb liger_rotary_pos_emb_gpt_oss liger_rotary_pos_emb_vision",
    "liger_kernel.transformers.grpo_loss": "triton_grpo_loss fused_selective_log_softmax",
    "liger_kernel.transformers.monkey_patch": "MODEL_TYPE_TO_APPLY_LIGER_FN apply_liger_kernel_to_llama",
    "liger_kernel.transformers.trainer_integration": "_apply_liger_kernel",
    "liger_kernel.ops.rms_norm": "LigerRMSNormFunction",
    "liger_kernel.ops.tiled_mlp": "LigerTiledMLPFunction apply_tiled_mlp",
    "liger_kernel.transformers.tiled_mlp": "LigerTiledGEGLUMLP LigerTiledSwiGLUMLP",
}


def forget_liger_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take what is imported of the package away, for one test."""
    for name in [name for name in sys.modules if name.split(".")[0] == "liger_kernel"]:
        monkeypatch.delitem(sys.modules, name)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    forget_liger_kernel(monkeypatch)
    compat.install(force=True)
    yield
    compat.uninstall()


def test_every_name_of_liger_kernel_is_served_or_refused(installed: None) -> None:
    pytest.importorskip("transformers")
    assert sorted(transformers.ORDERS) == FAMILIES
    assert {f"apply_liger_kernel_to_{family}" for family in FAMILIES} <= set(dir(transformers))
    served = 0
    for module, names in EXPORTED.items():
        for name in names.split():
            if name not in MISSING:
                served_as = getattr(import_module(module), name)
                assert callable(served_as) or isinstance(served_as, dict), name
                served += 1
                continue
            with pytest.raises(ImportError, match=f"{name} is not supported: ") as refusal:
                exec(f"from {module} import {name}")
            assert MISSING[name] in str(refusal.value)
    assert served > 80
    for advice in set(MISSING.values()):
        used = re.findall(r"liger_chunked\.(\w+)(?:\.(\w+))?", advice)
        assert all(hasattr(getattr(lc, first), second or "__doc__") for first, second in used), advice


def test_install_refuses_an_installed_liger_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    forget_liger_kernel(monkeypatch)
    (tmp_path / "liger_kernel").mkdir()
    (tmp_path / "liger_kernel" / "__init__.py").write_text("theirs = True")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RuntimeError, match="Liger-Kernel is installed"):
        compat.install()
    import_module("liger_kernel")
    with pytest.raises(RuntimeError, match="already imported"):
        compat.install(force=True)
    del sys.modules["liger_kernel"]
    compat.install(force=True)
    try:
        assert not hasattr(import_module("liger_kernel"), "theirs")
    finally:
        compat.uninstall()


def test_family_that_transformers_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    hf = pytest.importorskip("transformers")
    from liger_chunked.integrations.transformers import family, overrides

    monkeypatch.setattr(overrides, "_modeling", lambda family: None)
    monkeypatch.setattr(overrides, "_heads", dict)
    afresh = family.family_function.__wrapped__
    monkeypatch.setattr("liger_chunked.integrations.transformers.family_function", afresh)
    lacks = f"the installed transformers {re.escape(hf.__version__)} has no family 'olmo3'"
    with pytest.raises(ImportError, match=lacks):
        transformers.apply_liger_kernel_to_olmo3  # noqa: B018


def tiny_models_of(family: str) -> list[str]:
    """Return the classes of a family, the vision tower of one that has no language model."""
    if family == "pixtral":
        return ["PixtralVisionModel"]
    hf = pytest.importorskip("transformers")
    from tiny_models import CAUSAL, IMAGE_TEXT

    from liger_chunked.integrations.transformers import overrides

    module = overrides.family_modeling(family).__name__
    return [name for name in CAUSAL + IMAGE_TEXT if getattr(hf, name).__module__ == module]


@pytest.mark.few(1)
@pytest.mark.ordinary_memory
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", sampled(FAMILIES, parts=6))
def test_every_family_is_served_as_detected(family: str) -> None:
    hf = pytest.importorskip("transformers")
    from tiny_models import build

    try:
        apply = getattr(transformers, f"apply_liger_kernel_to_{family}")
    except ImportError as lacking:
        # A family that is newer than this transformers: 5.23 has all.
        assert Version(hf.__version__) < Version("5.23"), lacking
        pytest.skip(str(lacking))
    gated = {"swiglu", "geglu"} & set(inspect.signature(apply).parameters)
    names = tiny_models_of(family)
    assert names
    for name in names:
        model = build(name)
        expected = lc.apply_liger_kernel(model).replaced
        lc.revert_liger_kernel(model)
        assert apply(model=model).replaced == expected
        without = apply(model=model, **dict.fromkeys(gated, False)).replaced
        assert set(without) == set(expected) - ({"swiglu", "geglu"} if gated else set())
        lc.revert_liger_kernel(model)
    apply()
    try:
        assert build(names[0])._liger_applied.replaced
    finally:
        lc.revert_liger_kernel(family)


@pytest.mark.few(1)
@pytest.mark.parametrize("model_type", ["llama", "qwen2_vl_text", "mllama_text_model"])
def test_apply_by_model_type(model_type: str) -> None:
    pytest.importorskip("transformers")
    transformers._apply_liger_kernel(model_type, rope=False)
    try:
        if model_type == "llama":
            assert llama()._liger_applied.replaced.keys() >= {"rms_norm", "swiglu"}
    finally:
        lc.revert_liger_kernel(model_type)
    model = llama()
    assert set(transformers._apply_liger_kernel_to_instance(model, rope=False, swiglu=False).replaced) == {
        "rms_norm", "fused_linear_cross_entropy",
    }  # fmt: skip


def test_functions_by_model_type(installed: None) -> None:
    pytest.importorskip("transformers")
    functions = import_module("liger_kernel.transformers.monkey_patch").MODEL_TYPE_TO_APPLY_LIGER_FN
    assert functions is import_module("liger_kernel.transformers.auto_model").MODEL_TYPE_TO_APPLY_LIGER_FN
    inner = {"llama4_text": "llama4", "mllama_text_model": "mllama", "qwen2_5_vl_text": "qwen2_5_vl", "qwen3": "qwen3"}
    for model_type, family in inner.items():
        assert functions[model_type].__name__ == f"apply_liger_kernel_to_{family}"
        assert tuple(inspect.signature(functions[model_type]).parameters) == transformers.ORDERS[family]
    assert "t5" not in functions
    model = llama()
    replaced = functions[model.config.model_type](rope=False, model=model).replaced
    assert set(replaced) == {"fused_linear_cross_entropy", "rms_norm", "swiglu"}


# Liger-Kernel's own kernels


def test_importing_is_light(fresh_process) -> None:
    """The package root does not import the adapters, and these do not import transformers."""
    code = (
        "import sys, liger_chunked; assert 'liger_chunked.compat' not in sys.modules;"
        "import liger_chunked.compat.transformers; assert 'transformers' not in sys.modules"
    )
    fresh_process.run(code)


def test_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once or twice, the modules are there and of one package; afterwards, none is."""
    forget_liger_kernel(monkeypatch)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if not (Path(path) / "liger_kernel").is_dir()])
    compat.install()
    compat.install()
    try:
        root, norms = import_module("liger_kernel"), import_module("liger_kernel.transformers.rms_norm")
        assert norms.LigerRMSNorm is root.transformers.LigerRMSNorm is transformers.LigerRMSNorm
        assert "LigerRMSNorm" in dir(norms)
        for module, name in (
            ("chunked_loss.dpo_loss", "LigerFusedLinearDPOFunction"),
            ("transformers.functional", "liger_rms_norm"),
            ("ops.rms_norm", "LigerRMSNormFunction"),
        ):
            assert hasattr(import_module(f"liger_kernel.{module}"), name)
        with pytest.raises(ModuleNotFoundError, match=r"liger_kernel\.megatron is not served") as refusal:
            import_module("liger_kernel.megatron")
        assert refusal.value.name == "liger_kernel.megatron"
    finally:
        compat.uninstall()
    assert not [name for name in sys.modules if name.startswith("liger_kernel")]
    with pytest.raises(ModuleNotFoundError):
        import_module("liger_kernel")


@pytest.mark.parametrize("root", ["liger_chunked.compat", "liger_kernel"])
def test_modules_inside_packages(root: str) -> None:
    """Code that imports from Liger-Kernel's files works after a change of the package's name, and after `install`."""
    if root == "liger_kernel":
        compat.install(force=True)
    try:
        for module, name in (
            ("chunked_loss.dpo_loss", "LigerFusedLinearDPOLoss"),
            ("chunked_loss.fused_linear_unpaired_preference", "LigerFusedLinearKTOLoss"),
            ("transformers.fused_linear_cross_entropy", "LigerFusedLinearCrossEntropyLoss"),
            ("transformers.monkey_patch", "apply_liger_kernel_to_llama"),
        ):
            assert getattr(import_module(f"{root}.{module}"), name).__name__ == name
        operators = import_module(f"{root}.ops.fused_linear_cross_entropy")
        with pytest.raises(ImportError, match="forward and backward are not separate here"):
            _ = operators.fused_linear_cross_entropy_forward
        preferences = import_module(f"{root}.chunked_loss.fused_linear_preference")
        with pytest.raises(ImportError, match=r"use liger_chunked\.LigerFusedLinearPreferenceBase"):
            _ = preferences.LigerFusedLinearPreferenceBase
        with pytest.raises(ModuleNotFoundError, match=r"ops\.unknown"):
            import_module(f"{root}.ops.unknown")
    finally:
        compat.uninstall()
