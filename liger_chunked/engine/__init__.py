"""The engine: losses and gradients of chunks of tokens. It knows no loss by name.

batch.py         select and group the tokens that count
plan.py          cut a batch into chunks and tiles
head.py          statistics and gradients of a chunk
epilogue.py      the same with the fused epilogue
side_stream.py   overlap two products
gradients.py     accumulate dX, dW and db
precision.py     make products accumulate in float32
step.py          losses of token statistics, gradient in forward
distillation.py  the same for student and teacher
divergences.py   divergences of a block of logits
top_k.py         divergences from a teacher's top-k
stats.py         the differentiable primitive, `linear_token_stats`
hooks.py         hide inner graphs from saved-tensor hooks
loss.py          base class of losses of token statistics
compile.py       a loss as one torch.compile operation
calls.py         call a loss class with settings or tensors
dry_run.py       predict memory for `estimate_memory`
checks.py        check inputs
"""

from liger_chunked.engine.batch import Group, Layout, along, lay_out, lay_out_every
from liger_chunked.engine.checks import check_projection, check_target, check_top_k, check_values, shifted
from liger_chunked.engine.compile import FusedLoss, Like, Returns, loss_and, one_operation
from liger_chunked.engine.distillation import LossWeights, Teacher, distillation_loss
from liger_chunked.engine.divergences import ByAutograd, ClosedForm
from liger_chunked.engine.loss import StatsLoss
from liger_chunked.engine.stats import linear_token_stats, token_stats
from liger_chunked.engine.step import NegativeLogLikelihood, fused_loss
from liger_chunked.engine.top_k import TopK
from liger_chunked.kernels.operands import plain

__all__ = [
    "ByAutograd",
    "ClosedForm",
    "FusedLoss",
    "Group",
    "Layout",
    "Like",
    "LossWeights",
    "NegativeLogLikelihood",
    "Returns",
    "StatsLoss",
    "Teacher",
    "TopK",
    "along",
    "check_projection",
    "check_target",
    "check_top_k",
    "check_values",
    "distillation_loss",
    "fused_loss",
    "lay_out",
    "lay_out_every",
    "linear_token_stats",
    "loss_and",
    "one_operation",
    "plain",
    "shifted",
    "token_stats",
]
