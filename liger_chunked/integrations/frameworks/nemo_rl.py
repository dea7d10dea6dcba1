"""NeMo-RL, Megatron backend with `use_linear_ce_fusion_loss`.

Run with NeMo-RL, commit 7ea279a.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from liger_chunked.engine import linear_token_stats
from liger_chunked.integrations.tensor_parallel import budget_of, even_shard
from liger_chunked.losses import LigerFusedLinearKLDivLoss
from liger_chunked.types import LogitOptions

__all__ = ["ChunkedDistributedHiddenStatesToKL", "ChunkedDistributedHiddenStatesToLogprobs"]


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


class ChunkedDistributedHiddenStatesToKL:
    """The KL divergence of each token from a teacher's hidden states, of the whole vocabulary.

    The hidden states, rows and groups of the student are those of `ChunkedDistributedHiddenStatesToLogprobs`, and the
    divergences those of NeMo-RL's `DistillationLossFn` without a top-k:

    | kl_type | divergence of student `p` and teacher `q`, in nats |
    |---|---|
    | "forward" | `KL(q || p)` |
    | "reverse" | `KL(p || q)`, that of `on_policy_distillation.full` |
    | "mixed" | `mixed_kl_weight * KL(q || p) + (1 - mixed_kl_weight) * KL(p || q)`, at the price of both |
    """

    @staticmethod
    def apply(
        tensor_parallel_hidden_states: Tensor,
        output_weight_layer: Tensor,
        teacher_hidden_states: Tensor,
        teacher_output_weight_layer: Tensor,
        vocab_start_index: int,
        vocab_end_index: int,
        chunk_size: int | None,
        tp_group: dist.ProcessGroup | None,
        inference_only: bool = False,
        *,
        mask: Tensor | None = None,
        kl_type: str = "reverse",
        mixed_kl_weight: float = 0.5,
        temperature: float = 1.0,
        teacher_temperature: float = 1.0,
    ) -> Tensor:
        """Return divergences (B, S), float32, or float64 for float64 inputs, 0 where `mask` is False.

        Gathers the sequence; dX is summed over the ranks and scattered. The backward projects both models again.

        Args:
            tensor_parallel_hidden_states: (S / ranks, B, H), this rank's.
            output_weight_layer: (V / ranks, H), this rank's rows.
            teacher_hidden_states: (B, S, H_teacher), whole on every rank. Without gradient.
            teacher_output_weight_layer: (V / ranks, H_teacher), the teacher's rows of the same ids.
            vocab_start_index, vocab_end_index: the ids of these rows.
            chunk_size: positions whose logits of both models are in memory together; None: automatic.
            tp_group: the tensor-parallel group; None: the default one.
            inference_only: whether nothing has a gradient.
            mask: (B, S), not 0 at tokens that count. None: all.
            kl_type, mixed_kl_weight: see the table.
            temperature, teacher_temperature: divide the logits.

        Raises:
            ValueError: an unknown `kl_type`, or shapes that do not fit.
        """
        parts = {"forward": (1.0, 0.0), "reverse": (0.0, 1.0), "mixed": (mixed_kl_weight, 1.0 - mixed_kl_weight)}
        if kl_type not in parts:
            raise ValueError(f"kl_type must be one of {sorted(parts)}, got {kl_type!r}")
        weight, rows = output_weight_layer, range(vocab_start_index, vocab_end_index)
        shard = even_shard(weight, tp_group, "reduce_scatter", rows=rows)
        hidden = tensor_parallel_hidden_states.transpose(0, 1)
        teacher_input = teacher_hidden_states
        if shard is not None:
            length = hidden.shape[1]
            if teacher_input.shape[1] != length * shard.ranks:
                raise ValueError(
                    f"teacher_hidden_states must have the {length * shard.ranks} positions of all ranks, got "
                    f"{tuple(teacher_input.shape)}"
                )
            # This rank's positions, as the student's: the loss gathers both.
            teacher_input = teacher_input[:, dist.get_rank(tp_group) * length :][:, :length]
        # A logit of the student and one of the teacher for each of the rank's rows.
        tokens = None if chunk_size is None else 2 * chunk_size * hidden.shape[0]
        found: Tensor | None = None
        with torch.set_grad_enabled(torch.is_grad_enabled() and not inference_only):
            for factor, reverse in zip(parts[kl_type], (False, True), strict=True):
                if not factor:
                    continue
                loss = LigerFusedLinearKLDivLoss(
                    reverse=reverse,
                    reduction="none",
                    weight_soft_loss=factor,
                    temperature=temperature,
                    teacher_options=LogitOptions(temperature=teacher_temperature),
                    logits_budget=budget_of(tokens, weight),
                )
                divergence, _ = loss(
                    weight,
                    hidden,
                    teacher_output_weight_layer,
                    teacher_input.to(hidden.dtype),
                    mask=None if mask is None else mask.bool(),
                    vocab_shard=shard,
                )
                found = divergence if found is None else found + divergence
        assert found is not None
        return found
