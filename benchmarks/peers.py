"""Peers that more than one family calls. Each is imported when its turn comes."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

TokenStats = Callable[..., tuple[Tensor, Tensor | None]]


def trl_token_stats() -> TokenStats:
    """TRL's chunked function: `(x (n, H), w (V, H), t (n,), entropy=False)` to log-probabilities and entropies (n,)."""
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    vocabulary_chunk = 32768  # as TRL's trainers call it

    def token_stats(x: Tensor, w: Tensor, t: Tensor, entropy: bool = False) -> tuple[Tensor, Tensor | None]:
        outputs = ("log_probs", "entropy") if entropy else ("log_probs",)
        return ChunkedLogProbFunction.apply(x, w, None, t, 1.0, vocabulary_chunk, None, 1.0, outputs)[:2]

    return token_stats
