"""Test divergences of materialized logits: in place, empty, with zero probabilities, and as modules."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from base_ops import (
    labels,
    our_with_logits,
    teacher_logits,
)
from torch import Tensor

import liger_chunked as lc

WITH_LOGITS: dict[str, Callable[..., Tensor]] = {
    "kl": lc.liger_kl_div_with_logits,
    "kl-reverse": partial(lc.liger_kl_div_with_logits, reverse=True),
    "jsd": partial(lc.liger_jsd_with_logits, beta=0.3),
    "tvd": lc.liger_tvd_with_logits,
}


each_with_logits = pytest.mark.parametrize("function", WITH_LOGITS.values(), ids=WITH_LOGITS)


@pytest.mark.triton
@each_with_logits
def test_divergence_with_logits_in_place(function: Callable[..., Tensor], device: str) -> None:
    x = torch.randn(2, 3, 33, device=device, requires_grad=True)
    t, shift_labels = teacher_logits(x), labels(x)
    logits = x * 1.0
    loss = function(logits, t, shift_labels, inplace=True)
    expected = torch.autograd.grad(function(x, t, shift_labels), x)[0]
    gradient = torch.autograd.grad(loss, x, retain_graph=True)[0]
    assert torch.equal(gradient, expected) and torch.equal(logits, gradient)
    assert torch.equal(t, teacher_logits(x))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, x)


@pytest.mark.triton
@each_with_logits
def test_divergence_with_logits_of_nothing(function: Callable[..., Tensor], device: str) -> None:
    """Ignored rows give a value and a gradient of 0, for any content."""
    x, t = torch.randn(4, 33, device=device), torch.randn(4, 33, device=device)
    shift_labels = torch.tensor([3, 7, 7, 5], device=device)
    expected = function(x[::3], t[::3])
    x[1:3], t[1] = torch.tensor([torch.nan, -torch.inf], device=device)[:, None], torch.inf
    x.requires_grad_()
    for reduction in ("batchmean", "none"):
        loss = function(x, t, shift_labels, ignore_index=7, reduction=reduction)
        (gradient,) = torch.autograd.grad(loss.sum(), x)
        assert gradient.isfinite().all() and not gradient[1:3].any() and gradient[0].any() and gradient[3].any()
        torch.testing.assert_close(loss.sum() / (2 if reduction == "none" else 1), expected)
    nothing = function(x, t, torch.full_like(shift_labels, 7), ignore_index=7)
    (gradient,) = torch.autograd.grad(nothing, x)
    assert nothing == 0 and not gradient.any()


@pytest.mark.triton
@pytest.mark.parametrize("masked", ["both", "teacher", "student"])
@each_with_logits
def test_divergence_with_logits_of_minus_infinity(function: Callable[..., Tensor], masked: str, device: str) -> None:
    """Forbidden tokens give the same result as eager code with `0 log 0 = 0`."""
    x, t = torch.randn(3, 40, device=device), torch.randn(3, 40, device=device)
    for z in {"both": (x, t), "teacher": (t,), "student": (x,)}[masked]:
        z[:, 5:30] = -torch.inf
    x.requires_grad_()
    loss = function(x, t)
    if (function is WITH_LOGITS["kl"] and masked == "student") or (
        function is WITH_LOGITS["kl-reverse"] and masked == "teacher"
    ):
        assert loss == torch.inf
        return
    (gradient,) = torch.autograd.grad(loss, x)
    # Compare with a student whose forbidden tokens have a tiny probability.
    near = x.detach().double().clamp(min=-80).requires_grad_()
    expected = function(near, t.double().clamp(min=-80 if masked != "teacher" else -torch.inf))
    # float32 sums against float64; a gradient is a difference of probabilities, with fewer correct digits.
    torch.testing.assert_close(loss, expected.float(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, near)[0].float(), rtol=1e-4, atol=1e-6)


@pytest.mark.triton
def test_divergence_with_logits_takes_a_teacher_of_another_dtype(device: str) -> None:
    x, t = torch.randn(3, 40, device=device), torch.randn(3, 40, device=device).bfloat16()
    assert torch.equal(lc.liger_jsd_with_logits(x, t), lc.liger_jsd_with_logits(x, t.float()))


@pytest.mark.parametrize(
    ("module", "function"),
    [
        (
            lc.LigerKLDIVWithLogitsLoss("sum", reverse=True, temperature=2.0),
            partial(our_with_logits, kind="reverse_kl"),
        ),
        (lc.LigerJSDWithLogits(0.3, reduction="sum", temperature=2.0), partial(our_with_logits, kind="jsd", beta=0.3)),
        (lc.LigerTVDWithLogitsLoss("sum", temperature=2.0), partial(our_with_logits, kind="tvd")),
    ],
    ids=lambda x: type(x).__name__,
)
def test_divergence_with_logits_as_a_module(module: torch.nn.Module, function: Callable[..., Tensor]) -> None:
    x = torch.randn(4, 33)
    value = module(x, teacher_logits(x), labels(x))
    assert torch.equal(value, function(x, reduction="sum", temperature=2.0))
    assert "reduction='sum'" in repr(module) and "temperature=2.0" in repr(module)
