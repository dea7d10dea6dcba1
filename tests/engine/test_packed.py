"""Sequences one after another, without padding: every loss equals that of the padded batch."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from table import ROWS, SMALL, Batch, Row, evaluate, relative_error
from torch import Tensor

from liger_chunked import LigerFusedLinearDPOLoss, LigerFusedLinearGRPOLoss, LigerFusedLinearKTOLoss

SERVED = [
    row for row in ROWS if row.fused and row.id.split("-")[0] not in ("ce", "kl", "jsd", "tvd", "cosine", "squared")
]
HEADS = ("weight", "bias", "ref_weight", "ref_bias")
ELSEWHERE = ("kl_input", "kl_target", "ref_kl_input", "ref_kl_logps")  # stay padded


def kept(batch: Batch, seed: int) -> Tensor:
    """Return (B, T), True from the first to the last valid token of a sequence, and at some ignored ones around."""
    valid = batch["target"] != -100
    after = valid.flip(1).cumsum(1).flip(1) > 0
    before = valid.cumsum(1) > 0
    some = torch.rand(valid.shape[0], 1, generator=torch.Generator().manual_seed(seed)) < 0.5
    return (after | some) & (before | some.flip(0))


def packed(batch: Batch, keep: Tensor) -> dict[str, Any]:
    def rows(name: str, x: Tensor) -> Tensor:
        of_tokens = name not in (*HEADS, *ELSEWHERE) and x.shape[:2] == keep.shape
        return x[keep] if of_tokens else x

    ends = F.pad(keep.sum(1).cumsum(0), (1, 0))
    return {name: rows(name, x) for name, x in batch.items()} | {"cu_seqlens": ends.int()}


@pytest.mark.few(2)
@pytest.mark.parametrize("budget", [None, 8 * 23 * 5], ids=["one-chunk", "chunks"])
@pytest.mark.parametrize("row", SERVED, ids=str)
def test_equals_the_padded_batch(row: Row, budget: int | None) -> None:
    seed = SERVED.index(row)
    batch = row.sample(SMALL, seed)
    keep = kept(batch, seed)
    padded = evaluate(row.ours, batch)
    ours = evaluate(partial(row.ours, logits_budget=budget), packed(batch, keep))
    for name, expected in padded.items():
        expected = expected[keep] if name == "input" else expected
        assert relative_error(ours[name], expected) < 1e-9, name  # the order of sums differs


def test_metrics() -> None:
    rows = {row.id: row for row in ROWS}
    cases = [
        (LigerFusedLinearDPOLoss(alpha=0.5, compute_nll_loss=True), "dpo-sigmoid"),
        (LigerFusedLinearKTOLoss(), "kto-kl"),
        (LigerFusedLinearGRPOLoss(beta=0.1), "grpo-kl"),
    ]
    for loss, row in cases:
        batch: dict[str, Any] = rows[row].sample(SMALL, 1)
        if row == "kto-kl":
            batch["kl"] = torch.tensor(0.1)
        keep = kept(batch, 1)
        found, expected = loss(**packed(batch, keep))[1], loss(**batch)[1]
        for name, value in expected._asdict().items():
            if value is not None:
                assert relative_error(getattr(found, name).double(), value.double()) < 1e-9, (
                    row,
                    name,
                )  # the order of sums differs


@pytest.mark.parametrize(
    ("ends", "error", "message"),
    [
        *(
            (torch.tensor(ends), ValueError, r"cu_seqlens must be \(sequences \+ 1,\), rising from 0 to the 6 rows")
            for ends in ([0, 2, 5], [1, 2, 6], [0, 4, 2, 6], [6])
        ),
        ([0, 2, 6], TypeError, "cu_seqlens must be an int32 or int64 tensor, got list"),
        (torch.tensor([0, 2, 4, 6]), ValueError, "an odd 3"),
        (torch.tensor([0, 0, 2, 3, 4, 5, 6]), ValueError, "as many sequences as input has rows, 6"),
    ],
)
def test_refusals(ends: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        LigerFusedLinearDPOLoss(use_ref_model=False)(
            torch.randn(11, 4), torch.randn(6, 4), torch.randint(11, (6,)), cu_seqlens=ends
        )
