"""The engine: losses and gradients of chunks of tokens. It knows no loss by name.

batch, plan                  which tokens count; how they are cut
head, epilogue, gradients    one chunk: statistics, then dX, dW and db
step, distillation, stats    the three kinds of steps
divergences, top_k           divergences of a block of logits
loss, calls, compile         what all loss classes share
dry_run                      the memory of a step
side_stream, precision, hooks, checks
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
