"""Bad input raises at once, with a message that has the argument's name, its value and the expected value."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from table import SMALL, examples, pairs, rollouts, tokens

import liger_chunked as lc
from liger_chunked.losses.surrogates import Clip

V, H = SMALL.vocab, SMALL.hidden
B, T = SMALL.sequences, SMALL.length

# Constructors, by short names: a row of a table below is a line.
CE, DPO, ORPO = lc.LigerFusedLinearCrossEntropyLoss, lc.LigerFusedLinearDPOLoss, lc.LigerFusedLinearORPOLoss
KTO, BCO, GRPO = lc.LigerFusedLinearKTOLoss, lc.LigerFusedLinearBCOLoss, lc.LigerFusedLinearGRPOLoss


def cross_entropy(_settings=None, **changes):
    return CE(**_settings or {})(**tokens(SMALL, seed=0) | changes)


def dpo(_settings=None, **changes):
    return DPO(**_settings or {})(**pairs(SMALL, seed=0, ref=None) | changes)


def kto(_settings=None, **changes):
    return KTO(**_settings or {})(**examples(SMALL, seed=0, ref=None) | {"kl": 0.0} | changes)


def kto_of_mismatched(**changes):
    """Pass hidden states of a reference with mismatched completions."""
    return KTO()(**examples(SMALL, seed=0, mismatched="states") | changes)


def bco(**changes):
    return BCO()(**examples(SMALL, seed=0, ref=None) | {"delta": 0.0} | changes)


def grpo(_settings=None, **changes):
    return GRPO(**_settings or {})(**rollouts(SMALL, seed=0) | changes)


def stats(**changes):
    return lc.linear_token_stats(**tokens(SMALL, seed=0) | changes)


def on_pairs(loss: Any, ref: str | None = None):
    """Return a call of the loss on pairs."""
    return lambda **changes: loss(**pairs(SMALL, seed=0, ref=ref) | changes)


def f64(*shape, device=None):
    return torch.zeros(shape, dtype=torch.float64, device=device)


def ids(*shape, fill=1, dtype=torch.int64, device=None):
    return torch.full(shape, fill, dtype=dtype, device=device)


def one_id(x):
    """Return a target whose last sequence alone has this id, at its end."""
    target = ids(B, T)
    target[-1, -1] = x
    return target


def refuses(call: Any, changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(**changes)


# Errors that every loss raises: (changes to a valid call, exception, pattern of the message).
EVERYWHERE = {
    "hidden-size": ({"weight": f64(V, H + 1)}, ValueError, rf"agree on the hidden size.*, {H}\).*\({V}, {H + 1}\)"),
    "weight-1d": ({"weight": f64(V)}, ValueError, rf"weight must be \(V, H\).*got \({V},\)"),
    "weight-integer": ({"weight": ids(V, H)}, TypeError, "weight must be a floating-point tensor, got .* int64"),
    "input-1d": ({"input": f64(H)}, ValueError, r"input must be \(N, H\) or \(B, T, H\)"),
    "bias-shape": ({"bias": f64(V - 1)}, ValueError, rf"bias must be \({V},\).*got \({V - 1},\)"),
    "target-shape": ({"target": ids(B, T - 1)}, ValueError, rf"target must be \({B}, {T}\).*got \({B}, {T - 1}\)"),
    "target-float": ({"target": f64(B, T)}, TypeError, "target must be a tensor of token ids.*float64"),
    "target-one-too-high": ({"target": one_id(V)}, ValueError, rf"target holds {V}.*-100.*0 to {V - 1}"),
    "target-one-too-low": ({"target": one_id(-2)}, ValueError, rf"target holds -2.*-100.*0 to {V - 1}"),
    "target-padding": ({"target": ids(B, T, fill=-1)}, ValueError, "If -1 marks tokens to skip, set ignore_index=-1$"),
    "mixed-dtypes": ({"weight": torch.zeros(V, H)}, TypeError, "must share a dtype .* input float64, weight float32"),
    "weight-elsewhere": ({"weight": f64(V, H, device="meta")}, ValueError, "weight is on meta, input on cpu"),
}  # fmt: skip


@pytest.mark.few(9, "hidden-size-dpo", "target-one-too-high-dpo", "target-padding-kto", "target-shape-stats")
@pytest.mark.parametrize("call", [cross_entropy, dpo, grpo, kto, stats], ids=lambda call: call.__name__)
@pytest.mark.parametrize("case", EVERYWHERE)
def test_tensors(call, case):
    refuses(call, *EVERYWHERE[case])


OPTIONS = {
    "softcap-0": ({"softcap": 0.0}, ValueError, "softcap must be a positive number or None, got 0.0"),
    "temperature-0": ({"temperature": 0.0}, ValueError, "temperature must be positive, got 0.0"),
    "temperature-none": ({"temperature": None}, TypeError, "temperature must be a number, got None, a NoneType"),
    "logit_scale-infinite": ({"logit_scale": float("inf")}, ValueError, "logit_scale must be finite, got inf"),
    "ignore_index-none": ({"ignore_index": None}, TypeError, "ignore_index must be an int, got None"),
    "budget-0": ({"logits_budget": 0}, ValueError, "logits_budget must be a positive number of bytes or None, got 0"),
    "budget-fraction": ({"logits_budget": 1.5}, ValueError, "logits_budget must be a whole number of bytes, got 1.5"),
    "budget-unit": ({"logits_budget": "1 gallon"}, ValueError, "KiB, MiB, GiB, TiB .powers of 1024., got '1 gallon'"),
}


@pytest.mark.few(5)
@pytest.mark.parametrize("build", [lc.LogitOptions, DPO, stats], ids=lambda build: build.__name__)
@pytest.mark.parametrize("case", OPTIONS)
def test_options(build, case):
    refuses(build, *OPTIONS[case])


class ValuesOfTheBatch(lc.LigerFusedLinearPreferenceBase):
    def preference_loss(self, pairs):
        return pairs.logps[:, 0] * torch.arange(3)


class WrongShape(lc.LigerFusedLinearPreferenceBase):
    def preference_loss(self, pairs):
        return pairs.logps  # (n, 2)


class WrongShapeUnpaired(lc.LigerFusedLinearUnpairedPreferenceBase):
    def preference_loss(self, examples):
        return examples.logps.sum()


class OneNumber(lc.LigerFusedLinearPolicyBase):
    def policy_loss(self, rollouts):
        return rollouts.logps.mean()


REFERENCE = {"ref_input": f64(B, T, 8), "ref_weight": f64(V, 8)}
WITHOUT = {"use_ref_model": False}
NO_REFERENCE = "takes no reference, got ref_"
SEVERAL = ["sigmoid", "sft"]
MISMATCHED = {"kl": None, "kl_input": f64(B, T, H), "kl_target": ids(B, T), "ref_kl_logps": f64(B)}
APO = {"_settings": {"loss_type": "apo_zero_unpaired"}}
PER_TOKEN = rf"\({B}, {T}\), one value a token"
PER_SEQUENCE = rf"{PER_TOKEN}, or \({B},\) or \({B}, 1\), one a sequence"
ADDITIVE = torch.zeros(B, T).index_fill(1, torch.tensor([T - 1]), -1e9)
NO_LENGTH = "needs a positive max_completion_length, got"

# (call, its arguments, pattern of the message of the ValueError)
CASES = {
    # Cross entropy
    "ce-reduction": (CE, {"reduction": "average"}, r"reduction must be one of \('mean', .*, got 'average'"),
    "ce-weight-length": (cross_entropy, {"_settings": {"ce_weight": f64(V + 1)}}, "ce_weight must .* one value for"),
    "ce-num_items-with-sum": (cross_entropy, {"_settings": {"reduction": "sum"}, "num_items": 3},
        "num_items divides a mean"),
    "ce-token_weights-shape": (cross_entropy, {"token_weights": f64(B)}, rf"token_weights must be .* got \({B},\)"),
    # Pairs
    "pairs-2d": (dpo, {"input": f64(B, H), "target": ids(B)}, rf"input must be \(2 n, T, H\).*got \({B}, {H}\)"),
    "wrong-shape-from-a-subclass": (on_pairs(WrongShape()), {}, r"preference_loss must return .*, got \(3, 2\)"),
    "values-of-the-batch-in-a-part": (on_pairs(ValuesOfTheBatch(logits_budget=8 * V)), {},
        'of 1 pairs, .* scope = "batch"'),
    # The reference
    "reference-refused": (dpo, {"_settings": WITHOUT, **REFERENCE}, f"{NO_REFERENCE}input, ref_weight"),
    "reference-twice": (dpo, {**REFERENCE, "ref_logps": f64(B)}, "twice: as ref_logps and as ref_input, ref_weight"),
    "reference-without-weight": (dpo, {"ref_input": f64(B, T, 8)}, "needs ref_input and ref_weight .* only ref_input"),
    # DPO
    "loss-type": (DPO, {"loss_type": "simoid"}, "unknown loss_type 'simoid', expected one of .*'aot'.*'sigmoid'"),
    "tau-of-several": (DPO, {"loss_type": SEVERAL, "discopop_tau": 9},
        "discopop_tau=9 is not read by loss_type 'sigmoid', 'sft', only by"),
    "f-divergence": (DPO, {"f_divergence_type": "kl"}, "unknown f_divergence_type 'kl', .*reverse_kl.*forward_kl"),
    "coefficient": (DPO, {"f_alpha_divergence_coef": 3},
        r"not read by f_divergence_type 'reverse_kl', only by \['alpha_divergence'\]"),
    "ld_alpha-ref_logps-packed": (
        DPO(ld_alpha=0.5),
        {"weight": f64(V, H), "input": f64(10, H), "target": ids(10), "ref_logps": -f64(4).abs(),
         "cu_seqlens": torch.tensor([0, 2, 5, 8, 10])},
        r"ref_logps must be \(10,\), one value a token, with ld_alpha=0.5.*got one a sequence, \(4,\)",
    ),
    "weighting-of-a-sort": (DPO, {"use_weighting": True, "loss_type": ["sigmoid",
        "aot"]}, "which .*'aot', 'aot_unpaired', 'sft'.* do not have, got .*'aot'"),
    "averaged-twice": (DPO, {"loss_type": "ipo", "average_log_prob": True}, "itself: average_log_prob must be False"),
    "dpo-weights-of-sequences": (on_pairs(DPO(), "states"), {"example_weights": f64(B)},
        rf"example_weights must be \({B // 2},\)"),
    "dpo-weights-aot": (dpo, {"_settings": {"loss_type": "aot"}, "example_weights": f64(B // 2)},
        "computes its loss from the whole batch"),
    # ORPO, CPO, SimPO
    "orpo-nll_target-disagrees": (on_pairs(ORPO()), {"nll_target": ids(B, T, fill=V - 1)},
        "nll_target and target must agree on every token"),
    # Unpaired preferences: labels, weights, the reference point, mismatched completions
    "labels-signed": (kto, {"preference_labels": 1 - 2 * (torch.arange(B) % 2)},  # some are 1
        "For labels of -1 and 1 pass preference_labels > 0"),
    "bco-weights-length": (bco, {"example_weights": f64(B + 1)}, rf"example_weights must .*got \({B + 1},\)"),
    "unpaired-wrong-shape-from-a-subclass": (lambda: WrongShapeUnpaired()(**examples(SMALL, seed=0, ref=None)), {},
        r"one value for each of 6 sequences, got \(\)"),
    "kl-missing": (kto, {"kl": None}, "needs a reference point: pass kl, or kl_input .* got neither"),
    "kl-not-a-scalar": (kto, {"kl": f64(B)}, rf"kl must be a scalar, got a tensor of shape \({B},\)"),
    "kl-twice": (kto, MISMATCHED | {"kl": 0.0}, "twice: as kl and as kl_input, kl_target, ref_kl_logps"),
    "kl-of-apo": (kto, APO, "KTOLoss takes no kl: the reference point that it asks for is none"),
    "mismatched-reference-twice": (kto_of_mismatched, {"ref_kl_logps": f64(B)},
        "given twice: as ref_kl_logps and as ref_kl_input"),
    # Policies
    "surrogate": (GRPO, {"surrogate": "ppo"}, "unknown surrogate 'ppo', expected .*cispo.*clip.*, or a Surrogate"),
    "reduction": (GRPO, {"reduction": "mean"}, "unknown reduction 'mean', .*bnpo.*dapo.*dr_grpo.*grpo.*luspo"),
    "delta-of-cispo": (GRPO, {"surrogate": "cispo", "delta": 2.0},
        r"delta=2.0 is not read by surrogate 'cispo', only by \['clip', 'fipo'\]"),
    "level-of-gmpo": (GRPO, {"surrogate": "gmpo", "importance_level": "sequence"}, "must be 'token', got 'sequence'"),
    "group-of-one": (GRPO, {"surrogate": "real", "group_size": 1}, "group_size must be 2 or more, got 1"),
    "kl-estimator": (GRPO, {"beta": 0.1, "kl_estimator": "full"}, "unknown kl_estimator 'full', .*k1.*k2.*k3"),
    "length-0": (GRPO.from_loss_type, {"loss_type": "dr_grpo", "max_completion_length": 0},
        f"reduction 'dr_grpo' {NO_LENGTH} 0"),
    "num_items-not-read": (grpo, {"num_items": 5}, r"not read by reduction 'grpo', only by \['dapo', 'token-mean'\]"),
    "advantages-shape": (grpo, {"advantages": f64(B - 1)}, rf"advantages must be {PER_SEQUENCE}, got \({B - 1},\)"),
    "attention_mask-additive": (grpo, {"attention_mask": ADDITIVE}, r"must be 0 or 1 at every token, got -1e\+09 to 0"),
    "importance_weights-shape": (grpo, {"importance_weights": f64(T)}, rf"must be {PER_SEQUENCE}, got \({T},\)"),
    "policy-wrong-shape-from-a-subclass": (lambda: OneNumber()(**rollouts(SMALL, seed=0)), {},
        rf"policy_loss must return {PER_TOKEN}, .* got \(\)"),
}  # fmt: skip


@pytest.mark.few(30, "advantages-shape", "importance_weights-shape", "labels-signed", "length-0",
                 "tau-of-several", "weighting-of-a-sort")  # fmt: skip
@pytest.mark.parametrize("case", CASES)
def test_losses(case):
    call, changes, message = CASES[case]
    refuses(call, changes, ValueError, message)


@pytest.mark.parametrize(
    ("call", "changes", "message"),
    [
        (dpo, {"ref_input": f64(B, T, 8), "ref_weight": torch.zeros(V, 8)}, "ref_bias must share a dtype outside auto"),
        (kto, {"preference_labels": f64(B)}, "preference_labels .* of bool, .* got float64"),
        (GRPO, {"surrogate": Clip}, r"surrogate must be an object, Clip\(\.\.\.\), got the class Clip"),
        (GRPO, {"loss_type": "dapo"}, r"takes TRL's loss_type as LigerFusedLinearGRPOLoss.from_loss_type"),
        (lc.LigerFusedLinearPolicyBase, {}, "abstract"),
        (lc.LigerFusedLinearDistillationBase, {}, "abstract"),
    ],
)
def test_types(call, changes, message):
    refuses(call, changes, TypeError, message)
