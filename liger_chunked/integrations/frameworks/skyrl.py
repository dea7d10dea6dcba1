"""SkyRL, Megatron backend.

Run with SkyRL 0.4.0.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from liger_chunked.engine import linear_token_stats
from liger_chunked.integrations.tensor_parallel import budget_of, even_shard

__all__ = ["FusedLinearChunkedDistributedLogprob"]


class FusedLinearChunkedDistributedLogprob:
    """Replaces SkyRL's class of this name."""

    @staticmethod
    def apply(
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        vocab_start_index: int,
        vocab_end_index: int,
        chunk_size: int | None,
        tp_group: dist.ProcessGroup | None,
        inference_only: bool = False,
    ) -> Tensor:
        """Return log-probabilities (B, S) from `hidden` (B, S, H), this rank's rows and shifted targets (B, S).

        dX is the rank's share, which Megatron's gather of the sequence sums. `chunk_size` counts positions.
        """
        rows = range(vocab_start_index, vocab_end_index)
        tokens = None if chunk_size is None else chunk_size * hidden.shape[0]
        with torch.set_grad_enabled(torch.is_grad_enabled() and not inference_only):
            logps = linear_token_stats(
                weight,
                hidden.to(weight.dtype),
                target,
                vocab_shard=even_shard(weight, tp_group, "partial", rows=rows),
                logits_budget=budget_of(tokens, weight),
            ).logps
        assert logps is not None
        return logps
