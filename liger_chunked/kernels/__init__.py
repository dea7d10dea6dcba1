"""One operation per file: the Triton kernel, the torch path beside it, and one public function that picks."""

from liger_chunked.kernels.logits_grad import LogitsCotangents, logits_grad_
from liger_chunked.kernels.logits_stats import PartialStats, finish, logits_stats, merge
from liger_chunked.kernels.scale import scale_

__all__ = ["LogitsCotangents", "PartialStats", "finish", "logits_grad_", "logits_stats", "merge", "scale_"]
