"""The generalized JSD against TRL's, on full logits."""

from __future__ import annotations

from functools import partial

import pytest
from table import SMALL, evaluate, relative_error, students

from liger_chunked import LigerFusedLinearJSDLoss

gkd = pytest.importorskip("trl.experimental.gkd.gkd_trainer")


def trl_loss(batch, **settings):
    student = batch["input"] @ batch["weight"].T + batch["bias"]
    teacher = batch["teacher_input"] @ batch["teacher_weight"].T + batch["teacher_bias"]
    return gkd.GKDTrainer.generalized_jsd_loss(student, teacher, labels=batch["target"], **settings)


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("temperature", [0.9, 1.0, 2.0])
@pytest.mark.parametrize("num_items", [None, 37])
def test_jsd(beta, temperature, num_items):
    batch = students(SMALL, seed=0)
    soft = LigerFusedLinearJSDLoss(beta=beta, temperature=temperature, weight_hard_loss=0.0, weight_soft_loss=1.0)
    ours = evaluate(lambda b: soft(**b, num_items=num_items)[0], batch)
    theirs = evaluate(partial(trl_loss, beta=beta, temperature=temperature, num_items_in_batch=num_items), batch)
    for name in theirs:
        assert relative_error(ours[name], theirs[name]) < 1e-12, name
