"""Images under our trainers: pixels reach the model, and the log equals stock's."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl")
pytest.importorskip("PIL")
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import tiny
from trl_kinds import KINDS, PLAIN, Log, assert_same, build, run

from liger_chunked import (
    LigerFusedLinearCrossEntropyLoss,
    LigerFusedLinearDPOLoss,
    LigerFusedLinearGRPOLoss,
    LigerFusedLinearKTOLoss,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning")

CASES = [
    ("SFT", None),
    ("DPO", None),
    pytest.param("KTO", None, marks=pytest.mark.exhaustive),
    ("GRPO", None),
    pytest.param("Distillation", None, marks=pytest.mark.exhaustive),
    pytest.param("SFT", LigerFusedLinearCrossEntropyLoss(), marks=pytest.mark.exhaustive),
    ("DPO", LigerFusedLinearDPOLoss(beta=0.1)),
    pytest.param("KTO", LigerFusedLinearKTOLoss(beta=0.1), marks=pytest.mark.exhaustive),
    ("GRPO", LigerFusedLinearGRPOLoss(reduction="dapo")),
]


@pytest.mark.parametrize(("kind", "loss"), CASES, ids=lambda x: x if isinstance(x, str) else type(x).__name__)
def test_logs_what_trl_logs(tmp_path, kind, loss):
    data = tiny.vision_dataset("completions" if kind == "SFT" else KINDS[kind].data)

    def seeded(ours: bool, **own: Any) -> Log:
        for seed, name in enumerate(("model", "ref_model", "teacher_model")):
            if name == "model" or name in KINDS[kind].arguments():
                own[name] = tiny.vision_model(seed)
        # Images need all of their tokens.
        whole = {"max_length": None} if kind in ("SFT", "DPO", "KTO") else {}
        torch.manual_seed(0)
        return run(
            tmp_path,
            kind,
            ours,
            config={**PLAIN, **whole, "max_steps": 2, "max_grad_norm": 0.1},
            train_dataset=data,
            processing_class=tiny.processor(),
            **own,
        )

    assert_same(seeded(ours=True, loss=loss), seeded(ours=False), common=loss is not None, entries=3)


def test_a_data_set_with_images_keeps_all_sequences(tmp_path: Path) -> None:
    """Also a batch without images: a rank that skips sequences may run a pass more, and the others wait for it."""
    for data, skips in ((tiny.vision_dataset("prompts"), False), (tiny.dataset("prompts"), True)):
        own = {"train_dataset": data, "processing_class": tiny.processor(), "model": tiny.vision_model()}
        trainer = build(tmp_path, "GRPO", True, **own)
        assert (trainer._why_not_skipped() is None) == skips
        trainer.model.train()
        # Two prompts of two tokens, with completions of three. One prompt has no advantage.
        batch = {name: torch.ones(2, n, dtype=torch.int64) for name, n in (("prompt_ids", 2), ("completion_ids", 3))}
        batch |= {"prompt_mask": batch["prompt_ids"], "completion_mask": batch["completion_ids"]}
        assert (trainer._live({**batch, "advantages": torch.tensor([0.0, 1.0])}) is not None) == skips
