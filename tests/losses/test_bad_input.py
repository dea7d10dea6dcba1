"""Bad input raises at once, with a message that has the argument's name, its value and the expected value."""

from __future__ import annotations

import math

import pytest
import torch
from eager.dpo import LOSS_TYPES
from table import SMALL, examples, pairs, rollouts, students, tokens

from liger_chunked import (
    LigerFusedLinearBCOLoss,
    LigerFusedLinearCPOLoss,
    LigerFusedLinearCrossEntropyLoss,
    LigerFusedLinearDPOLoss,
    LigerFusedLinearGRPOLoss,
    LigerFusedLinearKLDivLoss,
    LigerFusedLinearKTOLoss,
    LigerFusedLinearORPOLoss,
    LigerFusedLinearPolicyBase,
    LigerFusedLinearPreferenceBase,
    LigerFusedLinearSimPOLoss,
    LigerFusedLinearUnpairedPreferenceBase,
    LogitOptions,
    adaptive_entropy_coef,
    linear_token_stats,
    rollout_importance_weights,
)

V, H = SMALL.vocab, SMALL.hidden
B, T = SMALL.sequences, SMALL.length


def cross_entropy(_settings=None, **changes):
    return LigerFusedLinearCrossEntropyLoss(**_settings or {})(**tokens(SMALL, seed=0) | changes)


def dpo(_settings=None, _ref=None, **changes):
    return LigerFusedLinearDPOLoss(**_settings or {})(**pairs(SMALL, seed=0, ref=_ref) | changes)


def kto(_settings=None, _mismatched=None, **changes):
    """Pass hidden states of a reference with mismatched completions, else no reference and a KL of zero."""
    batch = examples(SMALL, seed=0, ref="states" if _mismatched else None, mismatched=_mismatched)
    kl = {} if _mismatched else {"kl": 0.0}
    return LigerFusedLinearKTOLoss(**_settings or {})(**{**batch, **kl, **changes})


def bco(**changes):
    return LigerFusedLinearBCOLoss()(**examples(SMALL, seed=0, ref=None) | {"delta": 0.0} | changes)


def grpo(_settings=None, **changes):
    return LigerFusedLinearGRPOLoss(**_settings or {})(**rollouts(SMALL, seed=0) | changes)


def stats(**changes):
    return linear_token_stats(**tokens(SMALL, seed=0) | changes)


def f64(*shape, device=None):
    return torch.zeros(shape, dtype=torch.float64, device=device)


def ids(*shape, fill=1, dtype=torch.int64, device=None):
    return torch.full(shape, fill, dtype=dtype, device=device)


def one_id(x):
    """Return a target whose last sequence alone has this id, at its end."""
    target = ids(B, T)
    target[-1, -1] = x
    return target


# Errors that every loss raises: (changes to a valid call, exception, pattern of the message).
EVERYWHERE = {
    "hidden-size": (
        {"weight": f64(V, H + 1)},
        ValueError,
        rf"input and weight must agree on the hidden size.*\({B}, {T}, {H}\).*\({V}, {H + 1}\)",
    ),
    "weight-1d": ({"weight": f64(V)}, ValueError, rf"weight must be \(V, H\).*got \({V},\)"),
    "weight-empty": ({"weight": f64(0, H)}, ValueError, rf"weight must be \(V, H\).*got \(0, {H}\)"),
    "weight-integer": ({"weight": ids(V, H)}, TypeError, "weight must be a floating-point tensor, got .* int64"),
    "weight-missing": ({"weight": None}, TypeError, "weight must be a floating-point tensor, got NoneType"),
    "input-1d": ({"input": f64(H)}, ValueError, r"input must be \(N, H\) or \(B, T, H\)"),
    "bias-shape": ({"bias": f64(V - 1)}, ValueError, rf"bias must be \({V},\).*got \({V - 1},\)"),
    "target-shape": ({"target": ids(B, T - 1)}, ValueError, rf"target must be \({B}, {T}\).*got \({B}, {T - 1}\)"),
    "target-float": ({"target": f64(B, T)}, TypeError, "target must be a tensor of token ids.*float64"),
    "target-bool": ({"target": ids(B, T, dtype=torch.bool)}, TypeError, "target must be a tensor of token ids.*bool"),
    "target-too-high": ({"target": ids(B, T, fill=V)}, ValueError, rf"target holds {V}.*-100.*0 to {V - 1}"),
    "target-too-low": ({"target": ids(B, T, fill=-2)}, ValueError, rf"target holds -2.*-100.*0 to {V - 1}"),
    "target-one-too-high": ({"target": one_id(V)}, ValueError, rf"target holds {V}.*-100.*0 to {V - 1}"),
    "target-one-too-low": ({"target": one_id(-2)}, ValueError, rf"target holds -2.*-100.*0 to {V - 1}"),
    "target-padding": ({"target": ids(B, T, fill=-1)}, ValueError, "If -1 marks tokens to skip, set ignore_index=-1$"),
    "mixed-dtypes": (
        {"weight": torch.zeros(V, H)},
        TypeError,
        "must share a dtype outside autocast: input float64, weight float32, bias float64",
    ),
    "mixed-dtype-of-bias": ({"bias": torch.zeros(V)}, TypeError, "must share a dtype.*bias float32"),
    "weight-elsewhere": ({"weight": f64(V, H, device="meta")}, ValueError, "weight is on meta, input on cpu"),
    "bias-elsewhere": ({"bias": f64(V, device="meta")}, ValueError, "bias is on meta, input on cpu"),
    "target-elsewhere": ({"target": ids(B, T, device="meta")}, ValueError, "target is on meta, input on cpu"),
}


@pytest.mark.parametrize("call", [cross_entropy, dpo, grpo, kto, stats], ids=lambda call: call.__name__)
@pytest.mark.parametrize("case", EVERYWHERE)
def test_tensors(call, case):
    changes, error, message = EVERYWHERE[case]
    with pytest.raises(error, match=message):
        call(**changes)


OPTIONS = {
    "softcap-0": ({"softcap": 0.0}, "softcap must be a positive number or None, got 0.0"),
    "softcap-negative": ({"softcap": -3.0}, "softcap must be a positive"),
    "softcap-nan": ({"softcap": float("nan")}, "softcap must be a positive"),
    "temperature-0": ({"temperature": 0.0}, "temperature must be positive, got 0.0"),
    "temperature-negative": ({"temperature": -1.0}, "temperature must be positive, got -1.0"),
    "temperature-infinite": ({"temperature": float("inf")}, "temperature must be positive"),
    "logit_scale-infinite": ({"logit_scale": float("inf")}, "logit_scale must be finite, got inf"),
    "budget-0": ({"logits_budget": 0}, "logits_budget must be a positive number of bytes or None, got 0"),
    "budget-negative": ({"logits_budget": -1}, "logits_budget must be a positive number"),
    "budget-fraction": ({"logits_budget": 1.5}, "logits_budget must be a whole number of bytes, got 1.5"),
    "budget-nan": ({"logits_budget": float("nan")}, "logits_budget must be a whole number of bytes, got nan"),
    "budget-unit": ({"logits_budget": "1 gallon"}, "KiB, MiB, GiB, TiB .powers of 1024., got '1 gallon'"),
    "budget-bare-prefix": ({"logits_budget": "1G"}, "logits_budget must be a number of bytes, or one with a unit"),
    "budget-empty": ({"logits_budget": ""}, "logits_budget must be a number of bytes, or one with a unit"),
    "budget-text-0": (
        {"logits_budget": "0 MiB"},
        "logits_budget must be a positive number of bytes or None, got 0 MiB",
    ),
}


NO_NUMBERS = {
    "softcap": ("30", "softcap must be a number or None, got '30', a str"),
    "temperature": (None, "temperature must be a number, got None, a NoneType"),
    "logit_scale": ([1.0], "logit_scale must be a number, got a list of 1"),
    "logits_budget": (
        [1],
        "logits_budget must be a number of bytes, a string such as '512MiB', or None, got a list of 1",
    ),
    "ignore_index": (None, "ignore_index must be an int, got None"),
}


@pytest.mark.parametrize("build", [LogitOptions, LigerFusedLinearDPOLoss, stats], ids=lambda build: build.__name__)
@pytest.mark.parametrize("name", NO_NUMBERS)
def test_options_that_are_no_numbers(build, name):
    value, message = NO_NUMBERS[name]
    with pytest.raises(TypeError, match=message):
        build(**{name: value})


@pytest.mark.parametrize(
    "build",
    [
        LogitOptions,
        LigerFusedLinearCrossEntropyLoss,
        LigerFusedLinearDPOLoss,
        LigerFusedLinearGRPOLoss,
        LigerFusedLinearKTOLoss,
        stats,
    ],
    ids=lambda build: build.__name__,
)
@pytest.mark.parametrize("case", OPTIONS)
def test_options(build, case):
    settings, message = OPTIONS[case]
    with pytest.raises(ValueError, match=message):
        build(**settings)


class ValuesOfTheBatch(LigerFusedLinearPreferenceBase):
    def preference_loss(self, pairs):
        return pairs.logps[:, 0] * torch.arange(3)


class WrongShape(LigerFusedLinearPreferenceBase):
    def preference_loss(self, pairs):
        return pairs.logps  # (n, 2)


REFERENCE = {"ref_input": f64(B, T, 8), "ref_weight": f64(V, 8)}

CASES = {
    # Cross entropy
    "ce-reduction": (
        lambda: LigerFusedLinearCrossEntropyLoss(reduction="average"),
        r"reduction must be one of \('mean', 'sum', 'none'\), got 'average'",
    ),
    "ce-smoothing": (
        lambda: LigerFusedLinearCrossEntropyLoss(label_smoothing=1.5),
        r"label_smoothing must be in \[0, 1\], got 1.5",
    ),
    "ce-z-loss": (
        lambda: LigerFusedLinearCrossEntropyLoss(lse_square_scale=-1.0),
        "lse_square_scale must be finite and not negative, got -1.0",
    ),
    "ce-weight-2d": (
        lambda: LigerFusedLinearCrossEntropyLoss(ce_weight=f64(V, 1)),
        rf"ce_weight must be floating \(V,\), got \({V}, 1\)",
    ),
    "ce-weight-integer": (lambda: LigerFusedLinearCrossEntropyLoss(ce_weight=ids(V)), "ce_weight must be floating"),
    "ce-weight-length": (
        lambda: cross_entropy({"ce_weight": f64(V + 1)}),
        rf"ce_weight must have one value for each row of weight \({V}, {H}\), got \({V + 1},\)",
    ),
    "ce-num_items-with-sum": (
        lambda: cross_entropy({"reduction": "sum"}, num_items=3),
        "num_items divides a mean, but reduction is 'sum'",
    ),
    "ce-num_items-negative": (lambda: cross_entropy(num_items=-1), "num_items must be finite and not negative, got -1"),
    "ce-num_items-infinite": (
        lambda: cross_entropy(num_items=math.inf),
        "num_items must be finite and not negative, got inf",
    ),
    "ce-num_items-shape": (
        lambda: cross_entropy(num_items=ids(2)),
        r"num_items must be one number, got a tensor \(2,\)",
    ),
    "kl-num_items-negative": (
        lambda: LigerFusedLinearKLDivLoss()(**students(SMALL, seed=0), num_items=-1),
        "num_items must be finite and not negative, got -1",
    ),
    "ce-focal_gamma": (
        lambda: LigerFusedLinearCrossEntropyLoss(focal_gamma=-1.0),
        "focal_gamma must be finite and not negative, got -1.0",
    ),
    "ce-entropy_weight": (
        lambda: LigerFusedLinearCrossEntropyLoss(entropy_weight=float("nan")),
        "entropy_weight must be finite, got nan",
    ),
    "ce-focal-and-smoothing": (
        lambda: LigerFusedLinearCrossEntropyLoss(focal_gamma=2.0, label_smoothing=0.1),
        "at most one of label_smoothing, focal_gamma and dft can be set, got .*0.1.*2.0",
    ),
    "ce-focal-and-dft": (lambda: LigerFusedLinearCrossEntropyLoss(focal_gamma=2.0, dft=True), "at most one of"),
    "ce-token_weights-shape": (
        lambda: cross_entropy(token_weights=f64(B)),
        rf"token_weights must be \({B}, {T}\), as target is, got \({B},\)",
    ),
    "ce-token_weights-list": (lambda: cross_entropy(token_weights=[1.0]), "token_weights must be .*got list"),
    "ce-token_weights-elsewhere": (
        lambda: cross_entropy(token_weights=f64(B, T, device="meta")),
        "token_weights is on meta, target on cpu",
    ),
    "ce-num_items-with-gradient": (
        lambda: cross_entropy(num_items=torch.tensor(7.0, requires_grad=True)),
        r"CrossEntropyLoss treats num_items as a constant, .* pass num_items\.detach\(\)",
    ),
    "ce-token_weights-with-gradient": (
        lambda: cross_entropy(token_weights=f64(B, T).requires_grad_()),
        r"CrossEntropyLoss treats token_weights as a constant, .* pass token_weights\.detach\(\)",
    ),
    # Statistics
    "stats-unknown": (lambda: stats(outputs=("logps", "perplexity")), "outputs must name distinct fields.*perplexity"),
    "stats-twice": (lambda: stats(outputs=("logps", "logps")), "outputs must name distinct fields"),
    "stats-none": (lambda: stats(outputs=()), "outputs must name distinct fields"),
    # Pairs
    "odd-batch": (
        lambda: dpo(input=f64(5, T, H), target=ids(5, T)),
        rf"input must stack as many chosen as rejected.*odd 5 in \(5, {T}, {H}\)",
    ),
    "pairs-2d": (lambda: dpo(input=f64(B, H), target=ids(B)), rf"input must be \(2 n, T, H\).*got \({B}, {H}\)"),
    "wrong-shape-from-a-subclass": (
        lambda: WrongShape()(**pairs(SMALL, seed=0, ref=None)),
        r"preference_loss must return one value for each of 3 pairs, got \(3, 2\)",
    ),
    "values-of-the-batch-in-a-part": (
        lambda: ValuesOfTheBatch(logits_budget=8 * SMALL.vocab)(**pairs(SMALL, seed=0, ref=None)),
        r"for each of 1 pairs, got \(3,\): it may get a part of the batch, .* scope = \"batch\" it gets all pairs",
    ),
    "no-tensor-from-a-callable": (
        lambda: dpo({"loss_type": lambda pairs: 1.0, "use_ref_model": False}),
        r"loss_type <function .*lambda.* must return one value for each of 3 pairs, got a float",
    ),
    "wrong-shape-from-a-callable": (
        lambda: dpo({"loss_type": ["sigmoid", lambda pairs: pairs.logps.mean()], "use_ref_model": False}),
        r"loss_type <function .*lambda.* must return one value for each of 3 pairs, got \(\)",
    ),
    # The reference
    "reference-missing": (
        lambda: dpo({"use_ref_model": True}),
        "LigerFusedLinearDPOLoss needs a reference: pass ref_input and ref_weight, or ref_logps",
    ),
    "reference-refused": (
        lambda: dpo({"use_ref_model": False}, **REFERENCE),
        "use_ref_model=False takes no reference, got ref_input, ref_weight",
    ),
    "reference-refused-logps": (
        lambda: dpo({"use_ref_model": False}, ref_logps=f64(B)),
        "use_ref_model=False takes no reference, got ref_logps",
    ),
    "reference-twice": (
        lambda: dpo(**REFERENCE, ref_logps=f64(B)),
        "reference is given twice: as ref_logps and as ref_input, ref_weight",
    ),
    "reference-without-weight": (
        lambda: dpo(ref_input=f64(B, T, 8)),
        r"needs ref_input and ref_weight \(or ref_logps\), got only ref_input",
    ),
    "reference-only-bias": (lambda: dpo(ref_bias=f64(V)), "got only ref_bias"),
    "reference-vocabulary": (
        lambda: dpo(**REFERENCE | {"ref_weight": f64(V + 1, 8)}),
        rf"ref_weight must have the vocabulary of weight, {V} rows, got \({V + 1}, 8\)",
    ),
    "reference-hidden-size": (
        lambda: dpo(**REFERENCE | {"ref_weight": f64(V, 9)}),
        "ref_input and ref_weight must agree on the hidden size",
    ),
    "reference-length": (
        lambda: dpo(**REFERENCE | {"ref_input": f64(B, T + 1, 8)}),
        rf"ref_input must be \({B}, {T}, 'H_ref'\).*got \({B}, {T + 1}, 8\)",
    ),
    "reference-bias": (lambda: dpo(**REFERENCE, ref_bias=f64(V + 2)), rf"ref_bias must be \({V},\)"),
    "reference-elsewhere": (
        lambda: dpo(ref_input=f64(B, T, 8, device="meta"), ref_weight=f64(V, 8, device="meta")),
        "ref_input is on meta, target on cpu",
    ),
    "ref_logps-shape": (
        lambda: dpo(ref_logps=f64(B - 1)),
        rf"ref_logps must be \({B}, {T}\), one value a token, or \({B},\), one a sequence, got \({B - 1},\)",
    ),
    "ref_logps-list": (lambda: dpo(ref_logps=[0.0] * B), "ref_logps must be .* got list"),
    "ref_logps-elsewhere": (lambda: dpo(ref_logps=f64(B, device="meta")), "ref_logps is on meta, target on cpu"),
    # DPO
    "loss-type": (
        lambda: LigerFusedLinearDPOLoss(loss_type="simoid"),
        "unknown loss_type 'simoid', expected one of .*" + ".*".join(sorted(LOSS_TYPES)),
    ),
    "loss-type-in-a-list": (lambda: LigerFusedLinearDPOLoss(loss_type=["ipo", "x"]), "unknown loss_type 'x'"),
    "loss-type-none": (lambda: LigerFusedLinearDPOLoss(loss_type=[]), "loss_type must name at least one loss"),
    "loss-weights": (
        lambda: LigerFusedLinearDPOLoss(loss_type=["sigmoid", "sft"], loss_weights=[1.0]),
        "loss_weights must have one weight for each of 2 loss types, got 1",
    ),
    "smoothing-range": (
        lambda: LigerFusedLinearDPOLoss(label_smoothing=-0.1),
        r"label_smoothing must be in \[0, 1\], got -0.1",
    ),
    "smoothing-unused": (
        lambda: LigerFusedLinearDPOLoss(loss_type="hinge", label_smoothing=0.1),
        r"label_smoothing=0.1 is not read by loss_type 'hinge', only by \['aot',.*'sigmoid'\]",
    ),
    "smoothing-robust": (
        lambda: LigerFusedLinearDPOLoss(loss_type="robust", label_smoothing=0.5),
        r"'robust' needs label_smoothing in \[0, 0.5\), got 0.5",
    ),
    "smoothing-exo_pair": (
        lambda: LigerFusedLinearDPOLoss(loss_type="exo_pair"),
        r"'exo_pair' needs label_smoothing in \(0, 1\), got 0.0",
    ),
    "discopop-tau": (
        lambda: LigerFusedLinearDPOLoss(discopop_tau=0.0),
        "discopop_tau must be finite and positive, got 0.0",
    ),
    "f-divergence": (
        lambda: LigerFusedLinearDPOLoss(f_divergence_type="kl"),
        "unknown f_divergence_type 'kl', expected one of .*reverse_kl.*forward_kl",
    ),
    "f-divergence-of-one-reward": (
        lambda: LigerFusedLinearDPOLoss(f_divergence_type="js_divergence", loss_type=["sigmoid", "nca_pair"]),
        "f_divergence_type='js_divergence' needs loss types among .*hinge.*got .*nca_pair",
    ),
    "f-divergence-of-a-callable": (
        lambda: LigerFusedLinearDPOLoss(f_divergence_type="forward_kl", loss_type=lambda pairs: pairs.logps[:, 0]),
        "f_divergence_type='forward_kl' needs loss types among",
    ),
    "f-divergence-alpha": (
        lambda: LigerFusedLinearDPOLoss(f_alpha_divergence_coef=float("nan")),
        "f_alpha_divergence_coef must be finite, got nan",
    ),
    "ld_alpha": (lambda: LigerFusedLinearDPOLoss(ld_alpha=1.5), r"ld_alpha must be in \[0, 1\] or None, got 1.5"),
    "ld_alpha-ref_logps": (
        lambda: dpo({"ld_alpha": 0.5}, ref_logps=f64(B)),
        rf"ref_logps must be \({B}, {T}\), one value a token, with ld_alpha=0.5.*got one a sequence, \({B},\)",
    ),
    "ld_alpha-ref_logps-packed": (
        lambda: LigerFusedLinearDPOLoss(ld_alpha=0.5)(
            f64(V, H), f64(10, H), ids(10), ref_logps=-f64(4).abs(), cu_seqlens=torch.tensor([0, 2, 5, 8, 10])
        ),
        r"ref_logps must be \(10,\), one value a token, with ld_alpha=0.5.*got one a sequence, \(4,\)",
    ),
    "weighting-of-a-sort": (
        lambda: LigerFusedLinearDPOLoss(use_weighting=True, loss_type=["sigmoid", "aot"]),
        "use_weighting needs a loss per pair, which .*'aot', 'aot_unpaired', 'sft'.* do not have, got .*'aot'",
    ),
    # ORPO, CPO, SimPO
    "orpo-reference": (
        lambda: LigerFusedLinearORPOLoss()(**pairs(SMALL, seed=0)),
        "LigerFusedLinearORPOLoss with use_ref_model=False takes no reference, got ref_input, ref_weight, ref_bias",
    ),
    "cpo-reference": (
        lambda: LigerFusedLinearCPOLoss()(**pairs(SMALL, seed=0, ref="sequences")),
        "LigerFusedLinearCPOLoss with use_ref_model=False takes no reference, got ref_logps",
    ),
    "simpo-reference": (
        lambda: LigerFusedLinearSimPOLoss()(**pairs(SMALL, seed=0)),
        "takes no reference, got ref_input",
    ),
    "orpo-nll_target-disagrees": (
        lambda: LigerFusedLinearORPOLoss()(**pairs(SMALL, seed=0, ref=None), nll_target=ids(B, T, fill=V - 1)),
        "nll_target and target must agree on every token that neither of them ignores",
    ),
    "orpo-nll_target-shape": (
        lambda: LigerFusedLinearORPOLoss()(**pairs(SMALL, seed=0, ref=None), nll_target=ids(B, T + 1)),
        rf"nll_target must be \({B}, {T}\).*got \({B}, {T + 1}\)",
    ),
    "cpo-nll_target-without-nll": (
        lambda: LigerFusedLinearCPOLoss(cpo_alpha=0.0)(**pairs(SMALL, seed=0, ref=None), nll_target=ids(B, T)),
        "nll_target is for the NLL term, but compute_nll_loss is False",
    ),
    "dpo-weights-of-sequences": (
        lambda: LigerFusedLinearDPOLoss()(**pairs(SMALL, seed=0), example_weights=f64(B)),
        rf"example_weights must be \({B // 2},\), one value for each pair of input .*, got \({B},\)",
    ),
    "dpo-weights-aot": (
        lambda: LigerFusedLinearDPOLoss(loss_type="aot")(**pairs(SMALL, seed=0), example_weights=f64(B // 2)),
        "example_weights are factors of pairs, but LigerFusedLinearDPOLoss computes its loss from the whole batch",
    ),
    "cpo-loss-type": (
        lambda: LigerFusedLinearCPOLoss(loss_type="alphapo"),
        "unknown loss_type 'alphapo', expected one of .*hinge.*ipo.*sigmoid.*simpo",
    ),
    "cpo-smoothing": (
        lambda: LigerFusedLinearCPOLoss(loss_type="ipo", label_smoothing=0.1),
        r"label_smoothing=0.1 is not read by loss_type 'ipo', only by \['sigmoid', 'simpo'\]",
    ),
    "cpo-smoothing-range": (
        lambda: LigerFusedLinearCPOLoss(label_smoothing=2.0),
        r"label_smoothing must be in \[0, 1\], got 2.0",
    ),
    "cpo-ipo-beta": (lambda: LigerFusedLinearCPOLoss(loss_type="ipo", beta=0.0), "beta must not be 0 with .*ipo"),
    "cpo-alphapo_alpha": (
        lambda: LigerFusedLinearCPOLoss(alphapo_alpha=float("inf")),
        "alphapo_alpha must be finite, got inf",
    ),
    "simpo-loss-type": (
        lambda: LigerFusedLinearSimPOLoss(loss_type="ipo"),
        "unknown loss_type 'ipo', expected one of .*sigmoid.*hinge",
    ),
    "simpo-smoothing": (
        lambda: LigerFusedLinearSimPOLoss(loss_type="hinge", label_smoothing=0.1),
        "label_smoothing=0.1 is not read by loss_type 'hinge', only by 'sigmoid'",
    ),
    "simpo-smoothing-range": (
        lambda: LigerFusedLinearSimPOLoss(label_smoothing=-1.0),
        r"label_smoothing must be in \[0, 1\], got -1.0",
    ),
    "ipo-beta": (lambda: LigerFusedLinearDPOLoss(loss_type="ipo", beta=0.0), "beta must not be 0 with .*ipo"),
    "averaged-twice": (
        lambda: LigerFusedLinearDPOLoss(loss_type="ipo", average_log_prob=True),
        "'ipo'.* averages over tokens itself: average_log_prob must be False",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_losses(case):
    call, message = CASES[case]
    with pytest.raises(ValueError, match=message):
        call()


def test_mixed_dtypes_of_the_reference():
    with pytest.raises(TypeError, match="ref_input, ref_weight and ref_bias must share a dtype outside autocast"):
        dpo(ref_input=f64(B, T, 8), ref_weight=torch.zeros(V, 8))


@pytest.mark.parametrize(
    "loss",
    [
        LigerFusedLinearBCOLoss,
        LigerFusedLinearCPOLoss,
        LigerFusedLinearCrossEntropyLoss,
        LigerFusedLinearDPOLoss,
        LigerFusedLinearGRPOLoss,
        LigerFusedLinearKLDivLoss,
        LigerFusedLinearKTOLoss,
        LigerFusedLinearORPOLoss,
        LigerFusedLinearSimPOLoss,
    ],
)
def test_an_unknown_keyword_is_the_loss_own(loss):
    with pytest.raises(TypeError, match=f"^{loss.__name__} has no argument 'sofcap': did you mean 'softcap'\\?$"):
        loss(sofcap=0.1)
    with pytest.raises(TypeError, match=f"^{loss.__name__} has no argument 'perplexity'$"):
        loss(perplexity=0.1)


def test_loss_type_of_a_policy_loss_says_where_it_goes():
    with pytest.raises(TypeError, match=r"takes TRL's loss_type as LigerFusedLinearGRPOLoss.from_loss_type"):
        LigerFusedLinearGRPOLoss(loss_type="dapo")


@pytest.mark.parametrize("beta", [-0.1, float("nan"), float("inf")])
@pytest.mark.parametrize(
    "loss", [LigerFusedLinearBCOLoss, LigerFusedLinearDPOLoss, LigerFusedLinearKTOLoss, LigerFusedLinearORPOLoss]
)
def test_beta(loss, beta):
    with pytest.raises(ValueError, match=f"beta must be finite and not negative, got {beta}"):
        loss(beta=beta)


def test_a_base_is_not_a_loss():
    for base in (LigerFusedLinearPreferenceBase, LigerFusedLinearUnpairedPreferenceBase):
        with pytest.raises(TypeError, match="abstract"):
            base()


class WrongShapeUnpaired(LigerFusedLinearUnpairedPreferenceBase):
    def preference_loss(self, examples):
        return examples.logps.sum()


MISMATCHED = {"kl_input": f64(B, T, H), "kl_target": ids(B, T), "ref_kl_logps": f64(B)}

# (call, exception, pattern of the message)
UNPAIRED = {
    # Sequences, labels, weights
    "sequences-2d": (
        lambda: kto(input=f64(B, H), target=ids(B)),
        ValueError,
        rf"input must be \(n, T, H\), a sequence a row, got \({B}, {H}\)",
    ),
    "labels-integer": (
        lambda: kto(preference_labels=-ids(B)),
        ValueError,
        "preference_labels must be bool, or integers 0 and 1 .* got torch.int64 with another number in it",
    ),
    "labels-signed": (
        lambda: kto(preference_labels=1 - 2 * (torch.arange(B) % 2)),  # some are 1
        ValueError,
        "with another number in it. For labels of -1 and 1 pass preference_labels > 0",
    ),
    "labels-float": (
        lambda: kto(preference_labels=f64(B)),
        TypeError,
        "preference_labels must be a tensor of bool, or of integers 0 and 1, one for each sequence, got float64",
    ),
    "labels-list": (lambda: kto(preference_labels=[True] * B), TypeError, "preference_labels .* got list"),
    "labels-missing": (lambda: kto(preference_labels=None), TypeError, "preference_labels .* got NoneType"),
    "labels-length": (
        lambda: kto(preference_labels=ids(B - 1, dtype=torch.bool)),
        ValueError,
        rf"preference_labels must be \({B},\), one value .* input \({B}, {T}, {H}\), got \({B - 1},\)",
    ),
    "labels-of-tokens": (
        lambda: kto(preference_labels=ids(B, T, dtype=torch.bool)),
        ValueError,
        rf"preference_labels must be \({B},\).*got \({B}, {T}\)",
    ),
    "labels-elsewhere": (
        lambda: kto(preference_labels=ids(B, dtype=torch.bool, device="meta")),
        ValueError,
        "preference_labels is on meta, input on cpu",
    ),
    "weights-integer": (
        lambda: bco(example_weights=ids(B)),
        TypeError,
        "example_weights must be a floating-point tensor, one value for each sequence, got int64",
    ),
    "weights-length": (
        lambda: bco(example_weights=f64(B + 1)),
        ValueError,
        rf"example_weights must be \({B},\).*got \({B + 1},\)",
    ),
    "wrong-shape-from-a-subclass": (
        lambda: WrongShapeUnpaired()(**examples(SMALL, seed=0, ref=None)),
        ValueError,
        r"preference_loss must return one value for each of 6 sequences, got \(\)",
    ),
    # The reference
    "reference-missing": (
        lambda: kto({"use_ref_model": True}),
        ValueError,
        "LigerFusedLinearKTOLoss needs a reference: pass ref_input and ref_weight, or ref_logps",
    ),
    "reference-refused": (
        lambda: kto({"use_ref_model": False}, ref_logps=f64(B)),
        ValueError,
        "use_ref_model=False takes no reference, got ref_logps",
    ),
    # The reference point
    "kl-missing": (
        lambda: kto(kl=None),
        ValueError,
        "LigerFusedLinearKTOLoss needs a reference point: pass kl, or kl_input and kl_target, got neither",
    ),
    "kl-not-a-scalar": (lambda: kto(kl=f64(B)), ValueError, rf"kl must be a scalar, got a tensor of shape \({B},\)"),
    "kl-integer-tensor": (lambda: kto(kl=ids()), TypeError, "kl must be a float or a floating.*, got int64"),
    "kl-text": (lambda: kto(kl="batch"), TypeError, "kl must be a float or a floating.*, got str"),
    "kl-bool": (lambda: kto(kl=True), TypeError, "kl must be a float or a floating.*, got bool"),
    "kl-nan": (lambda: kto(kl=float("nan")), ValueError, "kl must be finite, got nan"),
    "kl-twice": (
        lambda: kto(kl=0.0, **MISMATCHED),
        ValueError,
        "the reference point is given twice: as kl and as kl_input, kl_target, ref_kl_logps",
    ),
    "kl-of-apo": (
        lambda: kto({"loss_type": "apo_zero_unpaired"}),
        ValueError,
        "LigerFusedLinearKTOLoss takes no kl: the reference point that it asks for is none",
    ),
    "mismatched-of-apo": (
        lambda: kto({"loss_type": "apo_zero_unpaired"}, kl=None, **MISMATCHED),
        ValueError,
        "takes no kl_input, kl_target, ref_kl_logps",
    ),
    "delta-of-kto": (
        lambda: kto(kl=None, delta=0.0),
        ValueError,
        "LigerFusedLinearKTOLoss takes no delta: the reference point that it asks for is kl",
    ),
    "kl-of-bco": (lambda: bco(kl=0.0), ValueError, "LigerFusedLinearBCOLoss takes no kl: .* asks for is delta"),
    "delta-missing": (
        lambda: bco(delta=None),
        ValueError,
        "LigerFusedLinearBCOLoss needs a reference point: pass delta",
    ),
    "delta-not-a-scalar": (lambda: bco(delta=f64(2)), ValueError, r"delta must be a scalar.* \(2,\)"),
    # Mismatched completions
    "mismatched-without-target": (
        lambda: kto(kl=None, **MISMATCHED | {"kl_target": None}),
        ValueError,
        "pass kl, or kl_input and kl_target, got kl_input, ref_kl_logps",
    ),
    "mismatched-only-reference": (
        lambda: kto(kl=None, ref_kl_logps=f64(B)),
        ValueError,
        "pass kl, or kl_input and kl_target, got ref_kl_logps",
    ),
    "mismatched-without-reference": (
        lambda: kto(kl=None, **MISMATCHED | {"ref_kl_logps": None}),
        ValueError,
        "LigerFusedLinearKTOLoss needs a reference: pass ref_kl_input and ref_weight, or ref_kl_logps",
    ),
    "mismatched-without-ref_weight": (
        lambda: kto(kl=None, **MISMATCHED | {"ref_kl_logps": None}, ref_kl_input=f64(B, T, 8)),
        ValueError,
        r"needs ref_kl_input and ref_weight \(or ref_kl_logps\), got only ref_kl_input",
    ),
    "mismatched-reference-twice": (
        lambda: kto(_mismatched="states", ref_kl_logps=f64(B)),
        ValueError,
        "reference is given twice: as ref_kl_logps and as ref_kl_input, ref_weight",
    ),
    "mismatched-hidden-size": (
        lambda: kto(_mismatched="states", kl_input=f64(B, T, H + 1)),
        ValueError,
        rf"kl_input and weight must agree on the hidden size: kl_input is \({B}, {T}, {H + 1}\)",
    ),
    "mismatched-2d": (
        lambda: kto(_mismatched="states", kl_input=f64(B, H), kl_target=ids(B)),
        ValueError,
        rf"kl_input must be \(m, T, H\), a completion a row, got \({B}, {H}\)",
    ),
    "mismatched-dtype": (
        lambda: kto(_mismatched="states", kl_input=torch.zeros(B, T, H)),
        TypeError,
        "kl_input, weight and bias must share a dtype outside autocast: kl_input float32, weight float64",
    ),
    "mismatched-target-shape": (
        lambda: kto(_mismatched="states", kl_target=ids(B, T + 1)),
        ValueError,
        rf"kl_target must be \({B}, {T}\), one token id for each row of kl_input",
    ),
    "mismatched-target-range": (
        lambda: kto(_mismatched="states", kl_target=ids(B, T, fill=V)),
        ValueError,
        rf"kl_target holds {V}, expected ignore_index",
    ),
    "mismatched-reference-shape": (
        lambda: kto(_mismatched="states", ref_kl_input=f64(B, T + 1, 8)),
        ValueError,
        rf"ref_kl_input must be \({B}, {T}, 'H_ref'\), as kl_target \({B}, {T}\) is, got \({B}, {T + 1}, 8\)",
    ),
    "mismatched-reference-hidden-size": (
        lambda: kto(_mismatched="states", ref_kl_input=f64(B, T, 9)),
        ValueError,
        "ref_kl_input and ref_weight must agree on the hidden size",
    ),
    "mismatched-reference-logps-shape": (
        lambda: kto(kl=None, **MISMATCHED | {"ref_kl_logps": f64(B + 1)}),
        ValueError,
        rf"ref_kl_logps must be \({B}, {T}\), one value a token, or \({B},\), one a sequence, got \({B + 1},\)",
    ),
    "mismatched-reference-logps-elsewhere": (
        lambda: kto(kl=None, **MISMATCHED | {"ref_kl_logps": f64(B, device="meta")}),
        ValueError,
        "ref_kl_logps is on meta, kl_target on cpu",
    ),
    # KTO
    "kto-loss-type": (
        lambda: LigerFusedLinearKTOLoss(loss_type="kto_pair"),
        ValueError,
        r"unknown loss_type 'kto_pair', expected one of \['apo_zero_unpaired', 'kto'\]",
    ),
    "desirable-weight": (
        lambda: LigerFusedLinearKTOLoss(desirable_weight=-1.0),
        ValueError,
        "desirable_weight must be finite and not negative, got -1.0",
    ),
    "undesirable-weight": (
        lambda: LigerFusedLinearKTOLoss(undesirable_weight=float("nan")),
        ValueError,
        "undesirable_weight must be finite and not negative, got nan",
    ),
}


@pytest.mark.parametrize("case", UNPAIRED)
def test_unpaired(case):
    call, error, message = UNPAIRED[case]
    with pytest.raises(error, match=message):
        call()


class OneNumber(LigerFusedLinearPolicyBase):
    def policy_loss(self, rollouts):
        return rollouts.logps.mean()


PER_SEQUENCE = rf"\({B}, {T}\), one value a token, or \({B},\) or \({B}, 1\), one a sequence"

# The same for policy losses.
POLICY = {
    "surrogate": (
        lambda: LigerFusedLinearGRPOLoss(surrogate="ppo"),
        "unknown surrogate 'ppo', expected one of .*cispo.*clip.*reinforce.*sapo.*vespo",
    ),
    "reduction": (
        lambda: LigerFusedLinearGRPOLoss(reduction="mean"),
        "unknown reduction 'mean', expected one of .*bnpo.*dapo.*dr_grpo.*grpo.*luspo",
    ),
    "importance-level": (
        lambda: LigerFusedLinearGRPOLoss(importance_level="turn"),
        "unknown importance_level 'turn', expected one of .*token.*sequence.*trajectory",
    ),
    "loss-type": (
        lambda: LigerFusedLinearGRPOLoss.from_loss_type("ppo"),
        "unknown loss_type 'ppo', expected one of .*bnpo.*cispo.*dapo.*dr_grpo.*grpo.*luspo.*sapo.*vespo",
    ),
    "epsilon-low": (lambda: LigerFusedLinearGRPOLoss(epsilon_low=-0.1), "epsilon_low must not be negative, got -0.1"),
    "epsilon-high": (lambda: LigerFusedLinearGRPOLoss(epsilon_high=-0.1), "epsilon_high must not be negative"),
    "epsilon-nan": (lambda: LigerFusedLinearGRPOLoss(epsilon_high=float("nan")), "epsilon_high must not be .* got nan"),
    "delta": (lambda: LigerFusedLinearGRPOLoss(delta=0.0), "delta must be finite and positive or None, got 0.0"),
    "sapo-temperature": (
        lambda: LigerFusedLinearGRPOLoss(surrogate="sapo", sapo_temperature_neg=0.0),
        "sapo_temperature_neg must be finite and positive, got 0.0",
    ),
    "vespo-k": (
        lambda: LigerFusedLinearGRPOLoss(surrogate="vespo", vespo_k_neg=-1.0),
        "vespo_k_neg must be finite and not negative, got -1.0",
    ),
    "vespo-lambda": (
        lambda: LigerFusedLinearGRPOLoss(surrogate="vespo", vespo_lambda_pos=0.0),
        "vespo_lambda_pos must be finite and positive, got 0.0",
    ),
    "delta-of-cispo": (
        lambda: LigerFusedLinearGRPOLoss(surrogate="cispo", delta=2.0),
        r"delta=2.0 is not read by surrogate 'cispo', only by \['clip', 'fipo'\]",
    ),
    "epsilon-of-sapo": (
        lambda: LigerFusedLinearGRPOLoss(surrogate="sapo", epsilon_high=0.3),
        r"epsilon_high=0.3 is not read by surrogate 'sapo', only by \['cispo', 'clip', 'clip_cov', 'dppo_kl', .*",
    ),
    "level-of-gmpo": (
        lambda: LigerFusedLinearGRPOLoss(surrogate="gmpo", importance_level="sequence"),
        "surrogate 'gmpo' takes its ratios per token: importance_level must be 'token', got 'sequence'",
    ),
    "group-size": (
        lambda: LigerFusedLinearGRPOLoss(surrogate="real"),
        "surrogate 'real' needs group_size, the number of sequences a prompt, got None",
    ),
    "group-of-one": (
        lambda: LigerFusedLinearGRPOLoss(surrogate="real", group_size=1),
        "group_size must be 2 or more, got 1",
    ),
    "cispo-bounds": (
        lambda: LigerFusedLinearGRPOLoss(surrogate="cispo", cispo_epsilon_low=0.8, epsilon_high=0.2),
        "cispo_epsilon_low=0.8, the lowest ratio, must not be above epsilon_high=0.2, the highest",
    ),
    "covariance-bounds": (
        lambda: LigerFusedLinearGRPOLoss(surrogate="clip_cov", clip_cov_lb=5.0),
        "clip_cov_lb=5.0 must be below clip_cov_ub=5.0",
    ),
    "kl-estimator": (
        lambda: LigerFusedLinearGRPOLoss(beta=0.1, kl_estimator="full"),
        "unknown kl_estimator 'full', expected one of .*k1.*k2.*k3.*abs.*low_var_kl",
    ),
    "weights-mode": (
        lambda: rollout_importance_weights(f64(B, T), f64(B, T), ids(B, T), mode="mask"),
        "unknown mode 'mask', expected one of .*token_truncate.*sequence_mask.*geometric_mask",
    ),
    "weights-without-bounds": (
        lambda: rollout_importance_weights(f64(B, T), f64(B, T), ids(B, T), mode="token_truncate", clip_max=None),
        "mode 'token_truncate' needs clip_min or clip_max, got None for both",
    ),
    "weights-bounds": (
        lambda: rollout_importance_weights(f64(B, T), f64(B, T), ids(B, T), clip_min=4.0),
        "clip_min=4.0 must be below clip_max=3.0",
    ),
    "weights-shape": (
        lambda: rollout_importance_weights(f64(B, T), f64(B, T + 1), ids(B, T)),
        rf"sampling_logps must be \(B, T\), the shape of old_logps, got \({B}, {T + 1}\)",
    ),
    "weights-mask": (
        lambda: rollout_importance_weights(f64(B, T), f64(B, T), None),
        r"mask must be \(B, T\), the shape of old_logps, got a NoneType",
    ),
    "entropy-coef-bounds": (
        lambda: adaptive_entropy_coef(0.0, 0.1, entropy_coef_min=2.0),
        "entropy_coef_min=2.0 must not be above entropy_coef_max=1.0",
    ),
    "entropy-nan": (lambda: adaptive_entropy_coef(0.0, float("nan")), "entropy must be finite, got nan"),
    "temperature-of-clip": (
        lambda: LigerFusedLinearGRPOLoss(sapo_temperature_pos=2.0),
        r"sapo_temperature_pos=2.0 is not read by surrogate 'clip', only by \['sapo'\]",
    ),
    "beta": (lambda: LigerFusedLinearGRPOLoss(beta=-0.1), "beta must be finite and not negative, got -0.1"),
    "entropy-coef": (
        lambda: LigerFusedLinearGRPOLoss(entropy_coef=float("inf")),
        "entropy_coef must be finite, got inf",
    ),
    "top-entropy": (
        lambda: LigerFusedLinearGRPOLoss(top_entropy_quantile=1.2),
        r"top_entropy_quantile must be in \[0, 1\], got 1.2",
    ),
    "length-missing": (
        lambda: LigerFusedLinearGRPOLoss(reduction="dr_grpo"),
        "reduction 'dr_grpo' needs a positive max_completion_length, got None",
    ),
    "length-0": (
        lambda: LigerFusedLinearGRPOLoss.from_loss_type("dr_grpo", max_completion_length=0),
        "reduction 'dr_grpo' needs a positive max_completion_length, got 0",
    ),
    "length-not-read": (
        lambda: LigerFusedLinearGRPOLoss(max_completion_length=5),
        r"max_completion_length=5 is not read by reduction 'grpo', only by \['dr_grpo', 'seq-mean-token-sum-norm'\]",
    ),
    "num_items-not-read": (
        lambda: grpo(num_items=5),
        r"num_items is not read by reduction 'grpo', only by \['dapo', 'token-mean'\]",
    ),
    "num_items-negative": (
        lambda: grpo({"reduction": "dapo"}, num_items=-1),
        "num_items must be finite and not negative, got -1",
    ),
    "num_items-shape": (
        lambda: grpo({"reduction": "dapo"}, num_items=ids(2)),
        r"num_items must be one number, got a tensor \(2,\)",
    ),
    "input-2d": (
        lambda: grpo(input=f64(B, H), target=ids(B), advantages=f64(B)),
        rf"input must be \(B, T, H\).*got \({B}, {H}\)",
    ),
    "advantages-shape": (
        lambda: grpo(advantages=f64(B - 1)),
        rf"advantages must be {PER_SEQUENCE}, got \({B - 1},\)",
    ),
    "advantages-transposed": (lambda: grpo(advantages=f64(T, B)), rf"advantages must be .* got \({T}, {B}\)"),
    "advantages-missing": (lambda: grpo(advantages=None), f"advantages must be {PER_SEQUENCE}, got NoneType"),
    "advantages-elsewhere": (
        lambda: grpo(advantages=f64(B, device="meta")),
        "advantages is on meta, target on cpu: expected one device",
    ),
    "attention_mask-additive": (
        lambda: grpo(attention_mask=torch.zeros(B, T).index_fill(1, torch.tensor([T - 1]), -1e9)),
        r"attention_mask must be 0 or 1 at every token, got -1e\+09 to 0",
    ),
    "attention_mask-shape": (
        lambda: grpo(attention_mask=ids(B, T + 1)),
        rf"attention_mask must be \({B}, {T}\), one value a token, got \({B}, {T + 1}\)",
    ),
    "old_logps-shape": (
        lambda: grpo(old_logps=f64(B)),
        rf"old_logps must be \({B}, {T}\), one value a token, got \({B},\)",
    ),
    "old_logps-elsewhere": (lambda: grpo(old_logps=f64(B, T, device="meta")), "old_logps is on meta, target on cpu"),
    "ref_logps-of-sequences": (
        lambda: grpo(ref_logps=f64(B)),
        rf"ref_logps must be \({B}, {T}\), one value a token, got \({B},\)",
    ),
    "importance_weights-shape": (
        lambda: grpo(importance_weights=f64(T)),
        rf"importance_weights must be {PER_SEQUENCE}, got \({T},\)",
    ),
    "reference-missing": (
        lambda: grpo({"beta": 0.1}),
        "LigerFusedLinearGRPOLoss needs a reference: pass ref_input and ref_weight, or ref_logps",
    ),
    "reference-twice": (
        lambda: grpo({"beta": 0.1}, **REFERENCE, ref_logps=f64(B, T)),
        "reference is given twice: as ref_logps and as ref_input, ref_weight",
    ),
    "wrong-shape-from-a-subclass": (
        lambda: OneNumber()(**rollouts(SMALL, seed=0)),
        rf"policy_loss must return \({B}, {T}\), one value a token, or \({B}, 1\), one a sequence, got \(\)",
    ),
}


@pytest.mark.parametrize("case", POLICY)
def test_policy(case):
    call, message = POLICY[case]
    with pytest.raises(ValueError, match=message):
        call()


def test_a_policy_base_is_not_a_loss():
    with pytest.raises(TypeError, match="abstract"):
        LigerFusedLinearPolicyBase()
