"""Peers that several benchmark families call. Each is imported when it runs."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


def trl_token_stats(*outputs: str) -> Callable[[Tensor, Tensor, Tensor], list[Tensor]]:
    """Return TRL's chunked function of (input (n, H), weight (V, H), target (n,)).

    Args:
        outputs: which of its (n,) outputs to return: "log_probs", "entropy".
    """
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    vocabulary_chunk = 32768  # the value that TRL's trainers use

    def token_stats(x: Tensor, w: Tensor, t: Tensor) -> list[Tensor]:
        return list(
            ChunkedLogProbFunction.apply(x, w, None, t, 1.0, vocabulary_chunk, None, 1.0, outputs)[: len(outputs)]
        )

    return token_stats
