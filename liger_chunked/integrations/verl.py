"""verl, Megatron and FSDP backends. Labels are shifted already."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor, nn

from liger_chunked.calls import typed_like
from liger_chunked.functional import linear_token_stats
from liger_chunked.integrations.tensor_parallel import budget_of, even_shard
from liger_chunked.types import VocabShard

__all__ = ["FusedLinearForPPO", "linear_cross_entropy"]


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    reduction: str = "none",
    dist_process_group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the tokens' log-probabilities and entropies (N,), as `verl.utils.kernel.linear_cross_entropy`.

    dX is the rank's share, which Megatron's gather of the sequence sums.

    Args:
        hidden, labels: (..., H), (...).
        weight: this rank's rows.
        temperature: see `LogitOptions`.
        dist_process_group: the tensor-parallel group; None: one rank has all rows.
    """
    if reduction.lower() != "none":
        raise ValueError(f"reduction must be 'none', got {reduction!r}")
    shard = None if dist_process_group is None else even_shard(weight, dist_process_group, "partial")
    return _logps_and_entropy(hidden.reshape(-1, hidden.shape[-1]), weight, labels.reshape(-1), temperature, shard)


class FusedLinearForPPO(nn.Module):
    """The tokens' log-probabilities and entropies, as `verl.utils.experimental.torch_functional.FusedLinearForPPO`.

    The entropy is float32, not in the logits' dtype. `chunk_size` counts tokens. `impl_backend` is not used.
    """

    def __init__(self, chunk_size: int | None = None, impl_backend: str = "torch") -> None:
        super().__init__()
        self.chunk_size = chunk_size

    def forward(
        self, hidden_states: Tensor, vocab_weights: Tensor, input_ids: Tensor, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        budget = budget_of(self.chunk_size, vocab_weights)
        return _logps_and_entropy(hidden_states, vocab_weights, input_ids, temperature, logits_budget=budget)

    if TYPE_CHECKING:

        @typed_like(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


def _logps_and_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float,
    shard: VocabShard | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    stats = linear_token_stats(
        weight,
        hidden,
        labels,
        outputs=("logps", "entropy"),
        temperature=temperature,
        vocab_shard=shard,
        **options,
    )
    assert stats.logps is not None and stats.entropy is not None
    return stats.logps, stats.entropy
