"""Arguments that a loss treats as constants are refused if they require a gradient, in every loss and alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import test_calls
import torch
from table import SMALL, Batch, pairs, students
from torch import Tensor, nn

from liger_chunked import AdaptedWeight, arguments, losses
from liger_chunked.calls import altered

# Arguments with a gradient, and those that hold no floating-point tensor.
DIFFERENTIATED = {"weight", "input", "hidden", "bias"}
NO_FLOATS = {"target", "nll_target", "kl_target", "preference_labels", "teacher_ids", "cu_seqlens"}
NO_FLOATS |= {"vocab_shard", "sequence_group"}
OTHER_HEADS = ("ref_weight", "ref_bias", "teacher_weight", "teacher_bias")


# By class: a batch.
LOSSES: dict[type, Callable[[], Batch]] = {cls: sample for cls, sample, _ in test_calls.LOSSES.values()}


def constants_of(cls: type) -> list[str]:
    names = arguments.of_call(cls).names
    return [name for name in names if name not in DIFFERENTIATED | NO_FLOATS]


CASES = [(cls, name) for cls in LOSSES for name in constants_of(cls)]


def refusal(owner: str, name: str) -> str:
    return (
        rf"{owner} treats {name} as a constant, but it requires a gradient: pass {name}\.detach\(\)\. "
        rf"For a gradient by {name}, compute a loss of your own from linear_token_stats"
    )


@pytest.mark.few(4)
@pytest.mark.parametrize(("cls", "name"), CASES, ids=lambda x: x if isinstance(x, str) else x.__name__[16:])
def test_a_constant_with_a_gradient_is_refused_by_name(cls, name):
    """The value is of no shape that the loss takes: it is refused before it is read. Heads are computed ones."""
    batch = LOSSES[cls]()
    like = torch.as_tensor(batch.get(name, 1.0), dtype=torch.float64)
    batch[name] = like.clone().requires_grad_() * 1.0
    with pytest.raises(ValueError, match=refusal(cls.__name__, name)):
        cls()(**batch)


def with_gradient(x: Any) -> Any:
    return x.clone().requires_grad_() * 1.0 if isinstance(x, Tensor) and x.is_floating_point() else x


@pytest.mark.few(4)
@pytest.mark.parametrize("cls", LOSSES, ids=lambda cls: cls.__name__[16:])
def test_a_loss_without_gradients_takes_them(cls):
    """An evaluation of live tensors under `torch.no_grad()` has the same value."""
    batch = LOSSES[cls]()
    live = {name: with_gradient(x) for name, x in batch.items()}
    with torch.no_grad():
        values = [cls()(**given) for given in (batch, live)]
    ours, same = (x[0] if isinstance(x, tuple) else x for x in values)
    assert torch.equal(ours, same)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("cls", "name"), [case for case in CASES if case[1] in OTHER_HEADS and case[1] in LOSSES[case[0]]()]
)
def test_the_head_of_a_model_that_is_not_frozen(cls, name):
    """`teacher.lm_head.weight` is a parameter, which requires a gradient unless the teacher is frozen. It gets none."""
    batch = LOSSES[cls]()
    expected = cls()(**batch)[0]
    batch[name] = nn.Parameter(batch[name])
    batch["weight"].requires_grad_()
    loss = cls()(**batch)[0]
    loss.backward()
    assert torch.equal(loss, expected) and batch[name].grad is None


@pytest.mark.parametrize("live", ["weight", "up"])
def test_an_adapted_head_that_is_computed(live):
    batch = pairs(SMALL, seed=0)
    matrices = {"weight": batch["ref_weight"], "up": torch.ones(SMALL.vocab, 2, dtype=torch.float64)}
    down = nn.Linear(SMALL.ref_hidden, 2, bias=False, dtype=torch.float64)
    parameters = {name: nn.Parameter(x) for name, x in matrices.items()}
    losses.LigerFusedLinearDPOLoss()(**{**batch, "ref_weight": AdaptedWeight(**parameters, down=down)})
    matrices[live] = parameters[live] * 1.0
    with pytest.raises(ValueError, match=r"treats ref_weight as a constant.*\.detach\(\) its weight and up"):
        losses.LigerFusedLinearDPOLoss()(**{**batch, "ref_weight": AdaptedWeight(**matrices, down=down)})


@pytest.mark.parametrize("name", ["weight_soft_loss", "weight_hard_loss"])
def test_a_weight_of_a_distillation_loss_that_is_trained(name):
    """The reduced loss has no gradient by it, and says so; one loss a token has."""
    batch = students(SMALL, seed=0)
    batch["weight"].requires_grad_()
    loss, by_token = (
        altered(
            losses.LigerFusedLinearJSDLoss(reduction=reduction),
            **{name: nn.Parameter(torch.tensor(0.3, dtype=torch.float64))},
        )
        for reduction in ("mean", "none")
    )
    with pytest.raises(ValueError, match=f"LigerFusedLinearJSDLoss treats {name} as a constant, but it requires"):
        loss(**batch)
    values, metrics = by_token(**batch)
    values.mean().backward()
    torch.testing.assert_close(getattr(by_token, name).grad, getattr(metrics, name.removeprefix("weight_")).mean())
    with torch.no_grad():
        loss(**batch)
