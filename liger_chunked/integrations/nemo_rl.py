"""NeMo-RL, Megatron backend with `use_linear_ce_fusion_loss`."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from liger_chunked.functional import linear_token_stats
from liger_chunked.integrations.tensor_parallel import budget_of, even_shard

__all__ = ["ChunkedDistributedHiddenStatesToLogprobs"]


class ChunkedDistributedHiddenStatesToLogprobs:
    """Replaces NeMo-RL's class of this name."""

    @staticmethod
    def apply(
        tensor_parallel_hidden_states: Tensor,
        target: Tensor,
        output_weight_layer: Tensor,
        vocab_start_index: int,
        vocab_end_index: int,
        chunk_size: int | None,
        tp_group: dist.ProcessGroup | None,
        inference_only: bool = False,
    ) -> Tensor:
        """Return log-probabilities (B, S) from this rank's hidden states (S / ranks, B, H) and rows.

        Gathers the sequence; dX is summed over the ranks and scattered. Targets (B, S) are shifted. `chunk_size` counts
        positions.
        """
        weight, rows = output_weight_layer, range(vocab_start_index, vocab_end_index)
        tokens = None if chunk_size is None else chunk_size * target.shape[0]
        with torch.set_grad_enabled(torch.is_grad_enabled() and not inference_only):
            logps = linear_token_stats(
                weight,
                tensor_parallel_hidden_states.transpose(0, 1),
                target,
                vocab_shard=even_shard(weight, tp_group, "reduce_scatter", rows=rows),
                logits_budget=budget_of(tokens, weight),
            ).logps
        assert logps is not None
        return logps
