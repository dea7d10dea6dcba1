"""prime-rl's fused heads. Labels are shifted already."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from liger_chunked.calls import typed_like
from liger_chunked.integrations.tensor_parallel import budget_of
from liger_chunked.modules import logps_and_entropy
from liger_chunked.types import LogitOptions

__all__ = ["FusedOutputLinear", "GemmaFusedOutputLinear"]


class FusedOutputLinear(nn.Linear):
    """Replaces prime-rl's class of this name. The entropy is differentiable. `chunk_size` counts tokens."""

    softcap: float | None = None

    def __init__(self, in_features: int, out_features: int, chunk_size: int | None = None) -> None:
        super().__init__(in_features, out_features, bias=False)
        self.chunk_size = chunk_size

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, labels: Tensor | None = None, temperature: float | Tensor | None = None
    ) -> dict[str, Tensor]:
        """Return `logprobs` and `entropy` (B, S), float32. Arguments are required.

        `temperature` is as in `ChunkedLMHead.forward`.
        """
        if labels is None or temperature is None:
            missing = "labels" if labels is None else "temperature"
            raise ValueError(f"{missing} must be given: this head returns log-probabilities, got None")
        options = LogitOptions(softcap=self.softcap, logits_budget=budget_of(self.chunk_size, self.weight))
        logps, entropy = logps_and_entropy(self, hidden_states, labels, temperature, options)
        return {"logprobs": logps, "entropy": entropy}

    if TYPE_CHECKING:

        @typed_like(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


class GemmaFusedOutputLinear(FusedOutputLinear):
    """Replaces prime-rl's class of this name."""

    def __init__(self, in_features: int, out_features: int, chunk_size: int | None, softcap: float) -> None:
        super().__init__(in_features, out_features, chunk_size)
        self.softcap = softcap
