"""Ways to call a loss: modules, classes with tensors, and argument names of other libraries."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from table import SMALL, Batch, examples, pairs, rollouts, students, tokens
from torch import Tensor, nn

import liger_chunked as lc

V, H = SMALL.vocab, SMALL.hidden
B, T = SMALL.sequences, SMALL.length


def labelled(**point: float) -> Callable[[], Batch]:
    return lambda: examples(SMALL, seed=0, ref="tokens") | point  # type: ignore[return-value]


# name: (class, a batch, settings that are no defaults)
LOSSES: dict[str, tuple[Any, Callable[[], Batch], dict[str, Any]]] = {
    "cross_entropy": (
        lc.LigerFusedLinearCrossEntropyLoss,
        lambda: tokens(SMALL, seed=0),
        {"label_smoothing": 0.1, "return_z_loss": True, "ce_weight": torch.linspace(0.5, 2, V, dtype=torch.float64)},
    ),
    "dpo": (
        lc.LigerFusedLinearDPOLoss,
        lambda: pairs(SMALL, seed=0),
        {"beta": 0.3, "loss_type": ["hinge", "sigmoid"], "loss_weights": [0.2, 0.8]},
    ),
    "orpo": (lc.LigerFusedLinearORPOLoss, lambda: pairs(SMALL, 0, ref=None), {"beta": 0.3}),
    "cpo": (
        lc.LigerFusedLinearCPOLoss,
        lambda: pairs(SMALL, 0, ref=None),
        {"cpo_alpha": 0.3, "alphapo_alpha": 0.2},
    ),
    "simpo": (
        lc.LigerFusedLinearSimPOLoss,
        lambda: pairs(SMALL, 0, ref=None),
        {"gamma": 0.1},
    ),
    "kto": (lc.LigerFusedLinearKTOLoss, labelled(kl=0.5), {"desirable_weight": 2.0}),
    "bco": (lc.LigerFusedLinearBCOLoss, labelled(delta=0.1), {"beta": 0.3}),
    "grpo": (
        lc.LigerFusedLinearGRPOLoss,
        lambda: rollouts(SMALL, seed=0, ref="tokens"),
        {"beta": 0.1, "reduction": "dapo"},
    ),
    "kl_div": (lc.LigerFusedLinearKLDivLoss, lambda: students(SMALL, 0), {"reverse": True}),
    "jsd": (
        lc.LigerFusedLinearJSDLoss,
        lambda: students(SMALL, 0),
        {"beta": 0.2, "teacher_options": lc.LogitOptions(softcap=3.0)},
    ),
    "tvd": (lc.LigerFusedLinearTVDLoss, lambda: students(SMALL, 0), {"temperature": 2.0}),
    "cosine_similarity": (
        lc.LigerFusedLinearCosineSimilarityLoss,
        lambda: students(SMALL, 0),
        {"weight_soft_loss": 0.9},
    ),
    "on_policy_distillation": (
        lc.LigerFusedLinearOnPolicyDistillationLoss,
        lambda: students(SMALL, 0),
        {"kl_coef": 0.5, "teacher_options": lc.LogitOptions(softcap=3.0)},
    ),
}
CASES = pytest.mark.parametrize("case", LOSSES)

HEAD = nn.Linear(H, V).double()
STATES = torch.zeros(B, T, H, dtype=torch.float64)
IDS = torch.ones(B, T, dtype=torch.int64)


def flat(x: Any) -> list[Tensor]:
    return [x] if isinstance(x, Tensor) else [y for part in x if part is not None for y in flat(part)]


def split(batch: Batch, leading: int) -> tuple[list[Any], dict[str, Any]]:
    return list(batch.values())[:leading], dict(list(batch.items())[leading:])


def ordered(cls: type, batch: Batch) -> Batch:
    """Return the batch in the order of the call, positional arguments first."""
    names = [name for name in inspect.signature(cls.forward).parameters if name in batch]  # type: ignore[attr-defined]
    return {name: batch[name] for name in names}


def assert_same(ours: Any, expected: Any, weight: Tensor) -> None:
    assert type(ours) is type(expected)
    for x, y in zip(flat(ours), flat(expected), strict=True):
        assert torch.equal(x, y)
    gradients = [torch.autograd.grad(flat(x)[0], weight)[0] for x in (ours, expected)]
    assert torch.equal(*gradients)


# A class called with tensors


@pytest.mark.few(1)
@CASES
def test_a_class_called_with_tensors_evaluates_the_loss(case):
    cls, sample, settings = LOSSES[case]
    batch = ordered(cls, sample())
    batch["weight"].requires_grad_()
    args, data = split(batch, 3)
    assert_same(cls(*args, **data, **settings), cls(**settings)(**batch), batch["weight"])
    assert_same(cls(*args, **data), cls()(**batch), batch["weight"])


class Margin(lc.LigerFusedLinearPreferenceBase):
    def preference_loss(self, pairs):
        return torch.relu(1 - self.beta * (pairs.logps[:, 0] - pairs.logps[:, 1]))


class Three(Margin):
    """Its constructor has three positional parameters, as many as a call has tensors, but takes no tensor."""

    def __init__(self, beta=0.2, alpha=1.0, average_log_prob=False):
        super().__init__(beta=beta, alpha=alpha, average_log_prob=average_log_prob)


@pytest.mark.parametrize("cls", [Margin, Three], ids=lambda cls: cls.__name__)
def test_a_users_class_called_with_tensors(cls):
    batch = pairs(SMALL, seed=0, ref=None)
    batch["weight"].requires_grad_()
    args, data = split(ordered(cls, batch), 3)
    assert_same(cls(*args, **data), cls()(**batch), batch["weight"])
    assert_same(cls(*args, **data, beta=0.7), cls(beta=0.7)(**batch), batch["weight"])


def test_every_loss_is_in_the_table():
    leaves = {getattr(lc, name) for name in lc.__all__ if name.startswith("LigerFusedLinear") and name.endswith("Loss")}
    assert leaves == {cls for cls, *_ in LOSSES.values()}, "add a loss to LOSSES"


# Names


def of_class(loss: str) -> Any:
    return getattr(lc, f"LigerFusedLinear{loss}Loss")


# (loss, constructor or call, the name that the user passes, the message's text after "... has no argument '...'")
NAMES = [
    ("CPO", "init", "alpha", ": it is called 'cpo_alpha' here (the weight of the NLL term; AlphaPO's alpha is 'alpha"),
    ("GRPO", "init", "reward_weights", ": leave it out: weigh the rewards"),
    ("DPO", "init", "reference_free", ": it is called 'use_ref_model' here (set use_ref_model=False"),
    ("GRPO", "init", "num_items_in_batch", ": it is called 'num_items' here, an argument of its call"),
    ("GRPO", "call", "min_p", ": it is called 'kept' here (pass KeptIds, the ids that the sampler kept: they are"),
    ("JSD", "init", "sofcap", ": did you mean 'softcap'?"),
    ("CrossEntropy", "call", "label_smoothing_factor", ": it is called 'label_smoothing' here, an argument of its con"),
    ("KTO", "call", "label", ": it is called 'preference_labels' here"),
    ("JSD", "call", "attention_mask", ": it is called 'mask' here"),
]


@pytest.mark.few(4)
@pytest.mark.parametrize(("loss", "place", "name", "answer"), NAMES, ids=lambda x: x if str(x).isidentifier() else "")
def test_names(loss, place, name, answer):
    cls = of_class(loss)
    expected = f"{cls.__name__} has no argument {name!r}{answer}"
    with pytest.raises(TypeError) as error:
        cls(**{name: 1}) if place == "init" else cls()(**{name: torch.ones(1)})
    assert str(error.value).startswith(expected)
    # A class that is called with tensors raises it too, but names no place: all arguments go to one call.
    with pytest.raises(TypeError, match=f"^{cls.__name__} has no argument '{name}'"):
        cls(torch.ones(V, H), torch.ones(B, T, H), **{name: 1})


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: of_class("DPO")(ref_logps=torch.ones(2)), "DPOLoss takes 'ref_logps' in its call: .*ref_logps=...\\)"),
        (lambda: of_class("DPO")()(beta=0.1), r"DPOLoss takes 'beta' in its constructor: \w+\(beta=...\)"),
        (lambda: of_class("DPO")(0.1), r"takes its settings by name, beta=..., .* got float"),
        (lambda: of_class("DPO")(torch.ones(V, H)), "DPOLoss: missing a required argument: 'input', of .weight, input"),
        (lambda: of_class("CPO")()(*[torch.ones(1)] * 9), "CPOLoss: too many positional arguments"),
        (lambda: lc.linear_token_stats(sofcap=1), r"^linear_token_stats has no argument 'sofcap': did you .*'softcap'"),
    ],
)
def test_calls_that_do_not_bind(call, message):
    with pytest.raises(TypeError, match=message):
        call()


# Tensors


OUTPUT = SimpleNamespace(last_hidden_state=STATES)
CROSS_ENTROPY = lc.LigerFusedLinearCrossEntropyLoss()
PASSED = {
    "linear": ((HEAD, STATES, IDS), TypeError, "weight must be .* got Linear: pass its weight, and bias=its bias"),
    "swapped": (
        (STATES, HEAD.weight, IDS),
        ValueError,
        r"got \(6, 7, 5\) .*: weight and input look swapped, the order .* import from liger_chunked.compat, which has",
    ),
    "output": ((HEAD.weight, OUTPUT, IDS), TypeError, "input .* got SimpleNamespace: pass its last_hidden_state"),
    "dtypes": (
        (HEAD.weight, STATES.float(), IDS),
        TypeError,
        r"input float32, weight float64; cast them, as by input.to\(weight.dtype\), or call .* under torch.autocast",
    ),
}


def _distils(**changed):
    """A call of a distillation loss with a teacher of another hidden size, and some arguments changed."""
    given = {"weight": HEAD.weight, "input": STATES, "target": IDS}
    given |= {
        "teacher_weight": torch.ones(V, 9).double(),
        "teacher_input": torch.ones(*IDS.shape, 9).double(),
        **changed,
    }
    return lambda: lc.LigerFusedLinearKLDivLoss()(**given)


def _swapped(weight):
    return {"teacher_weight": torch.ones(*IDS.shape, 9).double(), "teacher_input": weight}


MISPLACED = {
    "a teacher": (
        _distils(**_swapped(torch.ones(V, 9).double())),
        r"teacher_weight and teacher_input look swapped, the order is \(teacher_weight, teacher_input\)",
    ),
    "a teacher's parameter": (
        _distils(**_swapped(nn.Parameter(torch.ones(V, 9).double()))),
        "^teacher_input is a Parameter, .*: teacher_weight and teacher_input look swapped",
    ),
    "a teacher of packed tokens": (
        _distils(
            input=STATES.flatten(0, 1),
            target=IDS.flatten(),
            teacher_weight=torch.ones(IDS.numel(), 9).double(),
            teacher_input=torch.ones(V, 9).double(),
        ),
        r"^teacher_input must be .* the order is \(teacher_weight, teacher_input\)",
    ),
    "transposed": (
        lambda: CROSS_ENTROPY(HEAD.weight.T, STATES, IDS),
        "must agree on the hidden size.*: weight looks transposed, pass",
    ),
    "a teacher, transposed": (
        _distils(teacher_weight=torch.ones(9, V).double()),
        ": teacher_weight looks transposed, pass",
    ),
}


@pytest.mark.parametrize("case", MISPLACED)
def test_tensors_in_the_wrong_place(case):
    call, message = MISPLACED[case]
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.few(4, "dtypes-linear_token_stats", "swapped-call0")
@pytest.mark.parametrize("call", [CROSS_ENTROPY, lc.LigerFusedLinearCrossEntropyLoss, lc.linear_token_stats])
@pytest.mark.parametrize("case", PASSED)
def test_what_to_pass(case, call):
    args, error, message = PASSED[case]
    with pytest.raises(error, match=message):
        call(*args)


# A loss without its reference


class OwnLogratios(lc.LigerFusedLinearPreferenceBase):
    def preference_loss(self, pairs):
        return -torch.nn.functional.logsigmoid(self.beta * (pairs.logratios[:, 0] - pairs.logratios[:, 1]))


class OwnRefLogps(lc.LigerFusedLinearUnpairedPreferenceBase):
    def preference_loss(self, examples):
        return examples.signs * (examples.ref_logps - examples.logps)


class OwnLogps(lc.LigerFusedLinearPreferenceBase):
    def preference_loss(self, pairs):
        return pairs.logps[:, 1] - pairs.logps[:, 0]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("cls", "sample"),
    [
        (OwnLogratios, lambda ref: pairs(SMALL, seed=0, ref=ref)),
        (OwnRefLogps, lambda ref: examples(SMALL, seed=0, ref=ref)),
        (lc.LigerFusedLinearDPOLoss, lambda ref: pairs(SMALL, seed=0, ref=ref)),
        (lc.LigerFusedLinearKTOLoss, lambda ref: examples(SMALL, seed=0, ref=ref) | {"kl": 0.0}),
        (lc.LigerFusedLinearBCOLoss, lambda ref: examples(SMALL, seed=0, ref=ref) | {"delta": 0.0}),
    ],
)
def test_a_loss_warns_once_that_it_has_no_reference(cls, sample):
    loss = cls()
    loss(**sample("tokens"))
    with pytest.warns(UserWarning, match=rf"^{cls.__name__} got no reference .*{cls.__name__}\(use_ref_model=False\)"):
        warned = loss(**sample(None))[0]
    with warnings.catch_warnings(record=True) as again:
        warnings.simplefilter("always")
        loss(**sample(None))
        meant = cls(use_ref_model=False)(**sample(None))[0]
    assert not again and torch.equal(warned, meant)


def test_a_loss_that_reads_no_reference_does_not_warn():
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        OwnLogps()(**pairs(SMALL, seed=0, ref=None))
        lc.LigerFusedLinearDPOLoss(loss_type="sft")(**pairs(SMALL, seed=0, ref=None))
    assert not warned


# What a class declares


class Clip(lc.LigerFusedLinearPolicyBase):
    def policy_loss(self, rollouts):
        return -rollouts.ratio * rollouts.advantages


class WithoutSuper(Margin):
    def __init__(self):
        self.gamma = 1.0


def test_a_constructor_that_leaves_out_its_base():
    with pytest.raises(RuntimeError, match=r"^WithoutSuper.__init__ does not call super\(\).__init__\(\)"):
        WithoutSuper()


NAMED = r"X.token_outputs must be a tuple of names, such as "
# (base, attributes, error, pattern of the message)
DECLARED: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "text": (Margin, {"token_outputs": "entropy"}, TypeError, NAMED + r"\('entropy',"),
    "scope": (Margin, {"scope": "bach"}, ValueError, r"X.scope must be one of \('pair', 'batch'\), got 'bach'"),
    "of-rollouts": (Clip, {"token_outputs": ("lse",)}, ValueError, r"\('logps', 'entropy'\), got \['lse'\]"),
}


@pytest.mark.few(4)
@pytest.mark.parametrize("where", ["class", "constructor"])
@pytest.mark.parametrize("case", DECLARED)
def test_a_wrong_declaration_is_reported_where_it_is_made(case, where):
    base, attributes, error, message = DECLARED[case]

    def __init__(self):
        base.__init__(self)
        vars(self).update(attributes)

    with pytest.raises(error, match=message):
        made = type(base)("X", (base,), attributes if where == "class" else {"__init__": __init__})
        assert where == "constructor"
        made()
