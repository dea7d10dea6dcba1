"""Settings of the losses: changed after construction, left unread, or no finite numbers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from table import SMALL, Batch, evaluate, examples, pairs, rollouts, students

from liger_chunked import (
    LigerFusedLinearBCOLoss,
    LigerFusedLinearCPOLoss,
    LigerFusedLinearDPOLoss,
    LigerFusedLinearGRPOLoss,
    LigerFusedLinearJSDLoss,
    LigerFusedLinearKTOLoss,
    LigerFusedLinearORPOLoss,
    LigerFusedLinearSimPOLoss,
)
from liger_chunked.losses import cpo, dpo, kto

# Changed after construction

_SMOOTHED = {"sigmoid", "exo_pair", "robust", "aot", "aot_unpaired"}
LOSSES: dict[str, tuple[Callable[..., Any], Callable[[], Batch]]] = {
    **{
        f"dpo-{name}": (
            partial(LigerFusedLinearDPOLoss, loss_type=name, label_smoothing=0.1 if name in _SMOOTHED else 0.0),
            lambda: pairs(SMALL, seed=0),
        )
        for name in dpo.LOSS_TYPES
    },
    **{
        f"cpo-{name}": (partial(LigerFusedLinearCPOLoss, loss_type=name), lambda: pairs(SMALL, seed=0, ref=None))
        for name in cpo.LOSS_TYPES
    },
    "cpo-alphapo": (partial(LigerFusedLinearCPOLoss, alpha_param=0.25), lambda: pairs(SMALL, seed=0, ref=None)),
    "simpo": (LigerFusedLinearSimPOLoss, lambda: pairs(SMALL, seed=0, ref=None)),
    "orpo": (LigerFusedLinearORPOLoss, lambda: pairs(SMALL, seed=0, ref=None)),
    **{
        f"kto-{name}": (
            partial(LigerFusedLinearKTOLoss, loss_type=name),
            lambda point=point: examples(SMALL, seed=0) | ({"kl": 1.0} if point == "kl" else {}),
        )
        for name, point in kto.LOSS_TYPES.items()
    },
    "bco": (LigerFusedLinearBCOLoss, lambda: examples(SMALL, seed=0) | {"delta": 0.1}),
    "grpo": (LigerFusedLinearGRPOLoss, lambda: rollouts(SMALL, seed=0, ref="tokens")),
    "jsd": (LigerFusedLinearJSDLoss, lambda: students(SMALL, seed=0)),
}
WITH_ALPHA = [
    *((case, partial(LOSSES[case][0], compute_nll_loss=True)) for case in ("dpo-sigmoid", "dpo-ipo", "simpo")),
    *((case, LOSSES[case][0]) for case in LOSSES if case.startswith("cpo-")),
]


def assert_equal(changed: Any, fresh: Any, batch: Batch) -> None:
    """In loss, gradients, metrics and what `repr` says."""
    one, other = (evaluate(lambda batch, loss=loss: loss(**batch)[0], batch) for loss in (changed, fresh))
    assert all(torch.equal(one[name], other[name]) for name in other)
    for metric, expected in zip(changed(**batch)[1], fresh(**batch)[1], strict=True):
        assert metric is expected is None or torch.equal(metric, expected)
    assert repr(changed) == repr(fresh)


@pytest.mark.parametrize("case", LOSSES)
def test_beta_set_after_construction(case):
    make, sample = LOSSES[case]
    batch, loss = sample(), make(beta=0.1)
    before = loss(**batch)[0]
    loss.beta = 0.7
    assert_equal(loss, make(beta=0.7), batch)
    assert torch.equal(before, loss(**batch)[0]) == (case == "dpo-sft")  # which reads none


@pytest.mark.parametrize("alpha", [(1.0, 0.3), (1.0, 0.0), (0.0, 0.3)], ids=str)
@pytest.mark.parametrize(("case", "make"), WITH_ALPHA, ids=lambda x: x if isinstance(x, str) else "")
def test_alpha_set_after_construction(case, make, alpha):
    batch, loss = LOSSES[case][1](), make(alpha=alpha[0])
    before = loss(**batch)[0]
    loss.alpha = alpha[1]
    assert_equal(loss, make(alpha=alpha[1]), batch)
    assert not torch.equal(before, loss(**batch)[0])


def test_the_nll_term_of_cpo_follows_alpha():
    loss = LigerFusedLinearCPOLoss(alpha=0.0)
    batch = pairs(SMALL, seed=0, ref=None)
    assert not loss.compute_nll_loss
    with pytest.raises(ValueError, match="nll_target is for the NLL term, but compute_nll_loss is False"):
        loss(**batch, nll_target=batch["target"])
    loss.alpha = 0.5
    assert loss.compute_nll_loss
    loss(**batch, nll_target=batch["target"])
    loss.compute_nll_loss = False
    assert not loss.compute_nll_loss and loss(**batch)[1].nll_loss == 0
