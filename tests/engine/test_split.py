"""What two ranks split, by vocabulary or by positions: each rank compares its part with the whole.

`tests/ranks` has every loss; here are arguments that the rows of its table do not have.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import test_capture
import test_divergences_of_tokens
import test_kept_ids
import test_learned
import test_token_stats
import torch.distributed as dist
from fresh_process import FreshProcesses

WORKERS: dict[str, Any] = {
    "kept ids": test_kept_ids.on_a_rank,
    "kept ids of positions": test_kept_ids.of_positions,
    "temperatures": test_token_stats.of_policy_ranks,
    "candidates and float32 logits": test_token_stats.of_a_vocabulary,
    "capture": test_capture.split_vocabulary,
    "divergences of tokens": test_divergences_of_tokens.on_a_rank,
    "learned settings": test_learned.trained,
}


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="no gloo")
@pytest.mark.parametrize("name", WORKERS)
def test_each_rank_has_its_part(name: str, tmp_path: Path, fresh_process: FreshProcesses) -> None:
    fresh_process.spawn(WORKERS[name], 2, str(tmp_path))
