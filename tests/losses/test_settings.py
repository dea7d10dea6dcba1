"""Settings of the losses: set by a subclass or after construction, ignored, or not finite."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import fields
from typing import Any

import pytest
import torch
from table import (
    SMALL,
    Batch,
    evaluate,
    examples,
    pairs,
    relative_error,
    rollouts,
    students,
    tokens,
    with_attributes,
)

import liger_chunked as lc
from liger_chunked.engine import choose
from liger_chunked.losses import cpo, dpo, kto
from liger_chunked.losses.surrogates import SURROGATES


def parameters_of(loss: Any) -> dict[str, inspect.Parameter]:
    """Return the parameters of a constructor, and those of the surrogates that it takes by name."""
    kinds = SURROGATES.values() if loss is lc.LigerFusedLinearGRPOLoss else ()
    return {name: p for kind in (loss, *kinds) for name, p in inspect.signature(kind).parameters.items()}


# By a subclass, and after construction


def assert_equal(changed: Any, fresh: Any, batch: Batch) -> None:
    """Compare loss, gradients, metrics and `repr`."""
    one, other = (evaluate(lambda batch, loss=loss: loss(**batch)[0], batch) for loss in (changed, fresh))
    assert all(torch.equal(one[name], other[name]) for name in other)
    for metric, expected in zip(changed(**batch)[1], fresh(**batch)[1], strict=True):
        assert metric is expected is None or torch.equal(metric, expected)
    assert repr(changed) == repr(fresh)


def test_a_setting_of_a_finished_loss_cannot_be_set():
    """It would have half its effect: `surrogate` without its bounds, `loss_types` without their checks."""
    made = [loss(**kind) for loss, kind, _ in OF_EVERY_KIND]
    for loss in (*made, lc.LigerCrossEntropyLoss(), copy.deepcopy(made[0]), pickle.loads(pickle.dumps(made[0]))):
        buffers = {name for name, _ in loss.named_buffers()} | {"weight", "ce_weight"}  # of classes, read by each call
        for name in {*parameters_of(type(loss)), "options"} - buffers:
            message = f"^{type(loss).__name__}.{name} cannot be set: build a new {type(loss).__name__}"
            with pytest.raises(AttributeError, match=message):
                setattr(loss, name, 0.5)
    with pytest.raises(AttributeError, match="cannot assign to field 'epsilon_low'"):
        lc.LigerFusedLinearGRPOLoss().surrogate.epsilon_low = 0.1  # type: ignore[attr-defined]


def test_what_else_is_set_of_a_finished_loss():
    class Scheduled(lc.LigerFusedLinearDPOLoss):
        def __init__(self, margin: float = 0.0) -> None:
            self.beta = 0.3  # the base sets it again
            super().__init__()
            self.margin = margin
            self.beta = torch.nn.Parameter(torch.tensor(0.7))  # type: ignore[assignment]

        def preference_loss(self, pairs: Any) -> torch.Tensor:
            self.last = pairs.logps
            return super().preference_loss(pairs) + self.margin

    loss, batch = Scheduled(), pairs(SMALL, seed=0, ref="tokens")
    before = loss(**batch)[0]
    loss.margin = 1.0
    assert (loss(**batch)[0] - before).item() == pytest.approx(1.0)
    loss.beta = torch.nn.Parameter(torch.tensor(0.1))  # a registered parameter, as sharding sets
    seen: list[Any] = []
    loss.eval().register_forward_hook(lambda *_: seen.append(1))
    assert loss(**batch)[0] != before + 1 and seen == [1]


# Options whose other values change results in every loss that takes them: by name, such values.
CHANGES: dict[str, list[Any]] = {
    "ignore_index": [1], "softcap": [2.0], "logit_scale": [1.7], "temperature": [0.6],
    "teacher_options": [lc.LogitOptions(**x) for x in ({"temperature": 2.0}, {"softcap": 2.0}, {"logit_scale": -1.0})],
    "beta": [0.3], "label_smoothing": [0.2], "average_log_prob": [True], "ld_alpha": [0.4], "alpha": [0.5],
    "compute_nll_loss": [True], "loss_weights": [[0.5]], "use_weighting": [True], "discopop_tau": [1.0],
    "f_divergence_type": ["forward_kl", "js_divergence", "alpha_divergence"], "f_alpha_divergence_coef": [0.3],
    "cpo_alpha": [0.5, 0.0], "simpo_gamma": [0.9], "alphapo_alpha": [0.3], "gamma": [0.9],
    "desirable_weight": [0.4], "undesirable_weight": [0.4],
    "lse_square_scale": [0.1], "focal_gamma": [1.0], "dft": [True], "entropy_weight": [0.1],
    "ce_weight": [torch.linspace(0.5, 1.5, SMALL.vocab, dtype=torch.float64)],
    "skew": [0.3], "reverse": [True], "weight_hard_loss": [0.2], "weight_soft_loss": [0.2],
    "kl_coef": [0.5], "student": ["current"], "prefix_weight": [0.5], "reduction": ["sum", "none", "luspo", "grpo"],
    "importance_level": ["sequence", "sequence_token", "trajectory"], "epsilon_low": [0.05], "epsilon_high": [0.05],
    "delta": [1.1], "kl_estimator": ["k1", "k2", "abs", "low_var_kl"], "use_bias_correction_kl": [False],
    "off_policy_mask_threshold": [0.0], "entropy_coef": [0.3], "top_entropy_quantile": [0.4],
    "cispo_epsilon_low": [0.04], "max_completion_length": [7],
    "sapo_temperature_pos": [2.0], "sapo_temperature_neg": [2.0],
    **{f"vespo_{name}_{side}": [1.0] for name in ("k", "lambda") for side in ("pos", "neg")},
    "clip_cov_ratio": [0.5], "clip_cov_lb": [0.1], "clip_cov_ub": [2.0], "kl_cov_ratio": [0.5], "ppo_kl_coef": [0.3],
    "ratio_max": [0.9, None], "ipo_threshold": [0.001], "fipo_half_life": [1.0], "fipo_clip_low": [0.5],
    "fipo_clip_high": [0.8], "fipo_safety_ratio": [1.01, None], "real_temperature": [0.1], "group_size": [3],
    "a2po_beta": [0.5], "sampler_kl_coef": [0.4],
}  # fmt: skip
# Memory and rounding, what a call requires or returns, and the names that `OF_EVERY_KIND` goes through.
OTHER_OPTIONS = {
    "logits_budget", "logits_dtype", "use_ref_model", "return_z_loss", "return_token_accuracy",
    "return_predicted_tokens", "surrogate", "loss_type",
}  # fmt: skip


def far_rollouts(seed: int, spread: float, sides: str) -> Batch:
    """Return rollouts of a policy so far from the old one and the reference that every bound is reached."""
    batch = rollouts(SMALL, seed, ref="tokens", weights=sides, advantages=sides)
    slope = torch.linspace(-1, 1, batch["target"].numel(), dtype=torch.float64).view_as(batch["target"])
    batch["old_logps"] = (batch["old_logps"] + spread * slope).clamp(max=-1e-3)
    batch["ref_logps"] = batch["ref_logps"] + 3 * (spread - 1) * slope
    return batch


def of_far_rollouts(without: tuple[str, ...] = ()) -> list[Batch]:
    drawn = [far_rollouts(s, far, sides) for s, far, sides in ((3, 1, "tokens"), (4, 1, "sequences"), (5, 7, "tokens"))]
    return [{name: x for name, x in batch.items() if name not in without} for batch in drawn]


def of_teachers() -> list[Batch]:
    """Return rollouts with a teacher, and no rewards."""
    drawn = of_far_rollouts(("advantages", "ref_logps"))
    teacher = {name: x for name, x in students(SMALL, seed=3).items() if name.startswith("teacher_")}
    return [batch | teacher for batch in drawn]


# Every kind of loss: the class, the settings that choose the kind, and batches of which one must show each option.
OF_EVERY_KIND: list[tuple[Any, dict[str, Any], Callable[[], list[Batch]]]] = [
    *(
        (lc.LigerFusedLinearDPOLoss, settings, lambda: [pairs(SMALL, seed=3, ref="tokens")])
        for settings in (
            *({"loss_type": name} for name in dpo.LOSS_TYPES if name != "exo_pair"),
            {"loss_type": "exo_pair", "label_smoothing": 0.1},
            {"loss_type": "ipo", "f_divergence_type": "alpha_divergence"},
            {"loss_type": "sft", "compute_nll_loss": True},
        )
    ),
    *(
        (loss, settings, lambda: [pairs(SMALL, seed=3, ref=None)])
        for loss, settings in (
            *((lc.LigerFusedLinearCPOLoss, {"loss_type": name}) for name in cpo.LOSS_TYPES),
            *((lc.LigerFusedLinearSimPOLoss, {"loss_type": name}) for name in ("sigmoid", "hinge")),
            (lc.LigerFusedLinearORPOLoss, {}),
        )
    ),
    *(
        (
            lc.LigerFusedLinearKTOLoss,
            {"loss_type": name},
            lambda point=point: [examples(SMALL, seed=3, ref="tokens") | ({"kl": 1.0} if point == "kl" else {})],
        )
        for name, point in kto.LOSS_TYPES.items()
    ),
    (lc.LigerFusedLinearBCOLoss, {}, lambda: [examples(SMALL, seed=3, ref="tokens") | {"delta": 0.1}]),
    *(
        (lc.LigerFusedLinearGRPOLoss, {"surrogate": name, **of_real, **kl}, of_far_rollouts)
        for name in SURROGATES
        for of_real in [{"group_size": 2} if name == "real" else {}]
        for kl in ({}, {"beta": 0.3}, {"beta": 0.3, "use_bias_correction_kl": False})
    ),
    *(
        (lc.LigerFusedLinearOnPolicyDistillationLoss, {"surrogate": name, "student": student}, of_teachers)
        for name in ("clip", "truncate", "log_prob")
        for student in ("old", "current")
    ),
    (lc.LigerFusedLinearCrossEntropyLoss, {}, lambda: [tokens(SMALL, seed=3)]),
    *(
        (loss, {}, lambda: [students(SMALL, seed=3)])
        for loss in (
            lc.LigerFusedLinearJSDLoss,
            lc.LigerFusedLinearKLDivLoss,
            lc.LigerFusedLinearTVDLoss,
            lc.LigerFusedLinearCosineSimilarityLoss,
        )
    ),
]


BY_KIND = ["-".join([loss.__name__, *map(str, kind.values())]) for loss, kind, _ in OF_EVERY_KIND]


READS_BETA = [
    pytest.param(*case, id=name)
    for name, case in zip(BY_KIND, OF_EVERY_KIND, strict=True)
    if "beta" in parameters_of(case[0]) and "beta" not in case[1] and case[1].get("loss_type") != "sft"
]


@pytest.mark.few(6)
@pytest.mark.parametrize(("loss", "kind", "batches"), READS_BETA)
def test_beta_that_a_subclass_sets(loss, kind, batches):
    """A user's constructor is still construction: before or after the base's, its own settings are read."""
    batch = batches()[0]
    assert_equal(with_attributes(loss, beta=0.7)(**kind, beta=0.1), loss(**kind, beta=0.7), batch)


@pytest.mark.few(12)
@pytest.mark.parametrize(("loss", "kind", "batches"), OF_EVERY_KIND, ids=BY_KIND)
def test_an_option_has_an_effect_or_is_refused(loss, kind, batches):
    """An option that changes neither the loss nor a gradient is a user's mistake, which the constructor must name."""

    def results(settings: dict[str, Any]) -> list[dict[str, torch.Tensor]]:
        def value(batch: Batch) -> torch.Tensor:
            found = made(**batch)
            return (found[0] if isinstance(found, tuple) else found).cos().sum()  # "none" differs from "sum"

        made = loss(**settings)
        return [evaluate(value, batch) for batch in batches()]

    taken = [*parameters_of(loss), "ignore_index", "softcap", "logit_scale", "temperature"]
    taken = [name for name in taken if name not in OTHER_OPTIONS | kind.keys() | {"options", "settings"}]
    plain, parameters = results(kind), parameters_of(loss)
    for name in taken:
        for changed in CHANGES[name]:
            if name in parameters and changed is parameters[name].default:
                continue
            try:
                loss(**kind, **{name: changed})
            except (ValueError, TypeError) as error:
                assert name in str(error), (name, error)
                continue
            if name == "ignore_index":
                with pytest.raises(ValueError, match=r"target holds -100, expected ignore_index \(1\)"):
                    results(kind | {name: changed})
                continue
            other = results(kind | {name: changed})
            same = [relative_error(one[x], two[x]) < 1e-9 for one, two in zip(plain, other, strict=True) for x in one]
            assert not all(same), f"{name}={changed!r} has no effect"


@pytest.mark.parametrize(
    ("loss", "settings"),
    [
        (lc.LigerFusedLinearDPOLoss, dpo.DPOSettings),
        (lc.LigerFusedLinearCPOLoss, cpo.CPOSettings),
    ],
)
def test_defaults_are_those_of_the_constructor(loss, settings):
    """The defaults decide whether a setting counts as given."""
    parameters = inspect.signature(loss).parameters
    assert {field.name: field.default for field in fields(settings)} == {
        field.name: parameters[field.name].default for field in fields(settings)
    }


# Numbers

NAN, INF = float("nan"), float("inf")


# By loss and setting, values outside of its range.
OUTSIDE: list[tuple[Any, dict[str, Any], float]] = [
    (lc.LigerFusedLinearDPOLoss, {"label_smoothing": 1.1}, 1.1),
    (lc.LigerFusedLinearDPOLoss, {"beta": -0.1}, -0.1),
    (lc.LigerFusedLinearDPOLoss, {"discopop_tau": 0.0, "loss_type": "discopop"}, 0.0),
    (lc.LigerFusedLinearKTOLoss, {"undesirable_weight": -0.1}, -0.1),
    (lc.LigerFusedLinearGRPOLoss, {"top_entropy_quantile": 1.1}, 1.1),
    (lc.LigerFusedLinearGRPOLoss, {"delta": 0.0}, 0.0),
    (lc.LigerFusedLinearGRPOLoss, {"clip_cov_ratio": 0.0, "surrogate": "clip_cov"}, 0.0),
    (lc.LigerFusedLinearCrossEntropyLoss, {"focal_gamma": -0.1}, -0.1),
    (lc.LigerFusedLinearKLDivLoss, {"skew": 1.0}, 1.0),
    (lc.LigerFusedLinearJSDLoss, {"weight_soft_loss": -0.1}, -0.1),
]


@pytest.mark.parametrize(("loss", "settings", "value"), OUTSIDE)
def test_a_setting_outside_its_range(loss, settings, value):
    with pytest.raises(ValueError, match=f"^{next(iter(settings))} must .*, got {value}$"):
        loss(**settings)


def test_a_setting_is_a_finite_number():
    """Every float argument of every constructor, in a kind of the loss that reads it."""
    read, every = set(), set()
    for loss, kind, _ in OF_EVERY_KIND:
        for name, parameter in parameters_of(loss).items():
            if str(parameter.annotation) not in ("float", "float | None") or name in kind:
                continue
            every.add((loss, name))
            for value in (NAN, -INF, "0.1", *([] if name.startswith("epsilon") else [INF])):
                with pytest.raises((ValueError, TypeError), match=rf"\b{name}\b.*{value}") as raised:
                    loss(**kind, **{name: value})
                if str(raised.value).startswith(f"{name} must"):
                    read.add((loss, name))
    assert read == every


def test_an_infinite_epsilon_is_no_bound():
    batch = rollouts(SMALL, seed=0)
    free = lc.LigerFusedLinearGRPOLoss(epsilon_low=INF, epsilon_high=INF)
    ours, plain = (
        evaluate(lambda batch, loss=loss: loss(**batch)[0], batch)
        for loss in (free, lc.LigerFusedLinearGRPOLoss(surrogate="reinforce"))
    )
    assert all(torch.equal(ours[name], plain[name]) for name in plain)
    assert free(**batch)[1].clip_ratio == 0


def test_numbers_of_a_call_and_of_lists():
    with pytest.raises(ValueError, match=r"^loss_weights\[1\] must be finite, got nan$"):
        lc.LigerFusedLinearDPOLoss(loss_type=["sigmoid", "sft"], loss_weights=[1.0, NAN])
    with pytest.raises(TypeError, match=r"^max_completion_length must be an int or None, got 8.5, a float$"):
        lc.LigerFusedLinearGRPOLoss(reduction="dr_grpo", max_completion_length=8.5)
    for num_items in (NAN, INF, -1):
        with pytest.raises(ValueError, match=f"^num_items must be finite and not negative, got {num_items}$"):
            lc.LigerFusedLinearJSDLoss()(**students(SMALL, seed=0), num_items=num_items)


# Budgets


@pytest.mark.parametrize(
    ("spelt", "size"),
    [(1000.0, 1000), ("1e3", 1000), ("1kB", 1000), ("1 gb", 10**9), ("512MiB", 512 << 20), ("0.5GiB", 512 << 20)],
)
def test_a_budget_in_bytes_or_with_a_unit(spelt, size):
    options = lc.LigerFusedLinearJSDLoss(logits_budget=spelt).options
    assert options == lc.LogitOptions(logits_budget=size) and type(options.logits_budget) is int


# A vocabulary of a model's size, with minimal hidden states.
LARGE = {"weight": torch.ones(32768, 1), "input": torch.ones(300, 1), "target": torch.zeros(300, dtype=torch.int64)}
ROW = 32768 * 4


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "call",
    [
        lambda budget: lc.linear_token_stats(**LARGE, logits_budget=budget),
        lambda budget: lc.LigerFusedLinearCrossEntropyLoss(logits_budget=budget)(**LARGE),
        lambda budget: lc.LigerFusedLinearJSDLoss(logits_budget=2 * budget)(
            **LARGE, teacher_weight=LARGE["weight"], teacher_input=LARGE["input"]
        ),
    ],
    ids=["stats", "fused", "distillation"],
)
def test_a_budget_of_a_few_rows(call):
    choose._warn_once_of_few_rows.cache_clear()
    message = r"holds only 2 rows of logits: a row takes (131072|262144) bytes for a vocabulary of 32768, .* '256MiB'"
    with pytest.warns(UserWarning, match=message) as caught:
        call(2 * ROW)
    assert [warning.filename for warning in caught] == [__file__]
    call(2 * ROW)  # the warning appears once; warnings are errors here
    call(16 * ROW)


@pytest.mark.parametrize(
    ("vocab_size", "n_tokens", "budget", "warns"),
    [
        (512, 256, 100, True),  # 5,376 tiles
        (512, 255, 100, False),  # a small step
        (512, 2048, 16 * 512 * 4, False),  # 128 chunks of 16 rows
        (512, 960, 15 * 512 * 4, False),  # 64 chunks
        (512, 961, 15 * 512 * 4, True),
    ],
)
def test_a_budget_that_cuts_a_step_into_many_pieces(vocab_size, n_tokens, budget, warns):
    """At any vocabulary."""
    choose._warn_once_of_few_rows.cache_clear()
    tensors = torch.ones(vocab_size, 1), torch.ones(n_tokens, 1), torch.zeros(n_tokens, dtype=torch.int64)
    with pytest.warns(UserWarning, match="holds ") if warns else nullcontext():
        lc.linear_token_stats(*tensors, logits_budget=budget)


def test_a_budget_of_a_few_rows_in_a_graph():
    """The code of a graph, which is no module's, lies between the loss and the user's line."""
    choose._warn_once_of_few_rows.cache_clear()
    loss = lc.LigerFusedLinearCrossEntropyLoss(logits_budget=100)
    tensors = torch.ones(512, 1), torch.ones(256, 1), torch.zeros(256, dtype=torch.int64)
    with pytest.warns(UserWarning, match="holds less than one row") as caught:
        torch.compile(loss, backend="aot_eager")(*tensors)
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.parametrize("outputs", [("logprobs",), ("logps", "logprobs"), ()])
def test_outputs_are_shown_as_given(outputs):
    with pytest.raises(ValueError, match=r"outputs must name distinct fields of TokenStats .*, got ") as error:
        lc.linear_token_stats(**LARGE, outputs=outputs)
    assert str(error.value).endswith(f"got {outputs}")


def test_help_of_a_constructor_is_that_of_its_class():
    """It was nn.Module's: "Initialize internal Module state"."""
    for cls in (lc.LigerFusedLinearDPOLoss, lc.LigerFusedLinearGRPOLoss, lc.LigerFusedLinearCrossEntropyLoss):
        assert inspect.getdoc(cls.__init__) == inspect.getdoc(cls) and "Args:" in inspect.getdoc(cls.__init__)
