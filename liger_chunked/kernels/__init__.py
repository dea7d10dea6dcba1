"""One operation per file: the Triton kernel, the torch path beside it, and one public function that picks."""

from liger_chunked.kernels.divergence import DivergenceStats, divergence_stats, tail_stats
from liger_chunked.kernels.divergence_grad import divergence_grad_, tail_grad_
from liger_chunked.kernels.logits_grad import LogitsCotangents, logits_grad_
from liger_chunked.kernels.logits_stats import PartialStats, finish, logits_stats, merge
from liger_chunked.kernels.scale import scale_

__all__ = [
    "DivergenceStats",
    "LogitsCotangents",
    "PartialStats",
    "divergence_grad_",
    "divergence_stats",
    "finish",
    "logits_grad_",
    "logits_stats",
    "merge",
    "scale_",
    "tail_grad_",
    "tail_stats",
]
