"""prime-rl's fused heads. Labels are shifted already.

Run with prime-rl 0.8.0.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from liger_chunked.calls import typed_like
from liger_chunked.engine import linear_token_stats
from liger_chunked.integrations.tensor_parallel import budget_of
from liger_chunked.kept_ids import KeptIds
from liger_chunked.types import LogitOptions

__all__ = ["FusedOutputLinear", "GemmaFusedOutputLinear"]


def kept_of_mask(sampling_mask: Tensor, labels: Tensor) -> KeptIds:
    """Return the kept ids of prime-rl's `sampling_mask` (B, S, K), padded with -1, where the label is among them."""
    ids, flat = sampling_mask.flatten(0, -2), labels.reshape(-1, 1)
    is_kept = (ids >= 0) & (ids == flat).any(1, keepdim=True)
    counts = is_kept.sum(1)
    return KeptIds(ids[is_kept], torch.cat([counts.new_zeros(1), counts.cumsum(0)]))


class FusedOutputLinear(nn.Linear):
    """Replaces prime-rl's class of this name. The entropy is differentiable. `chunk_size` counts tokens."""

    softcap: float | None = None

    def __init__(self, in_features: int, out_features: int, chunk_size: int | None = None) -> None:
        super().__init__(in_features, out_features, bias=False)
        self.chunk_size = chunk_size

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        labels: Tensor | None = None,
        temperature: float | Tensor | None = None,
        sampling_mask: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Return `logprobs` and `entropy` (B, S), float32. The first three arguments are required.

        Args:
            hidden_states, labels: (B, S, H), (B, S).
            temperature: positive: a number, a tensor of one value, which waits for the device, or (B, S).
            sampling_mask: (B, S, K), the ids that the sampler kept of each label, then -1; no label among them: the
                whole vocabulary. Unlike prime-rl's, the entropy is of the kept ids too, and no other row of the weight
                is read at these positions.
        """
        if labels is None or temperature is None:
            missing = "labels" if labels is None else "temperature"
            raise ValueError(f"{missing} must be given: this head returns log-probabilities, got None")
        options = LogitOptions(softcap=self.softcap, logits_budget=budget_of(self.chunk_size, self.weight))
        kept = None if sampling_mask is None else kept_of_mask(sampling_mask, labels)
        if isinstance(temperature, Tensor) and temperature.is_floating_point():
            temperature = temperature.item() if temperature.numel() == 1 else temperature.float()
        settings: dict[str, Any] = asdict(options) | {"temperature": temperature, "kept": kept}
        stats = linear_token_stats(self.weight, hidden_states, labels, outputs=("logps", "entropy"), **settings)
        assert stats.logps is not None and stats.entropy is not None
        return {"logprobs": stats.logps, "entropy": stats.entropy}

    if TYPE_CHECKING:

        @typed_like(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


class GemmaFusedOutputLinear(FusedOutputLinear):
    """Replaces prime-rl's class of this name."""

    def __init__(self, in_features: int, out_features: int, chunk_size: int | None, softcap: float) -> None:
        super().__init__(in_features, out_features, chunk_size)
        self.softcap = softcap
