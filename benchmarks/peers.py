"""Peers that more than one family calls. Each is imported when its turn comes."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


def trl_token_stats(*outputs: str) -> Callable[[Tensor, Tensor, Tensor], list[Tensor]]:
    """TRL's chunked function of (input (n, H), weight (V, H), target (n,)).

    Args:
        outputs: which of its outputs, (n,) each, in its order: "log_probs", "entropy".
    """
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    vocabulary_chunk = 32768  # as TRL's trainers call it

    def token_stats(x: Tensor, w: Tensor, t: Tensor) -> list[Tensor]:
        return list(
            ChunkedLogProbFunction.apply(x, w, None, t, 1.0, vocabulary_chunk, None, 1.0, outputs)[: len(outputs)]
        )

    return token_stats
