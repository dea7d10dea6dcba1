"""The engine: run chunks of tokens through the head, and compute losses and gradients. It knows no loss by name.

schedule.py   select the tokens that count, and cut the batch into groups, chunks and tiles
passes.py     run a chunk through the head: statistics, then gradients
epilogue.py   the same with the fused epilogue, which stores no logits
precision.py  make cuBLAS accumulate in float32 while steps run
aside.py      a side stream
fused.py      losses of token statistics, with the gradient computed in the forward
loss.py       the base class of these losses
distill.py    the same for a student and a teacher
routes.py     divergences of a block of logits: with kernels or with autograd
top_k.py      divergences from a teacher's largest log-probabilities
stats.py      differentiable statistics: `linear_token_stats`
saved.py      what autograd saves between forward and backward
compile.py    each loss as one operation of a torch.compile graph
calls.py      calls of a loss class, with settings or with tensors
rehearsal.py  a dry run on meta tensors, for `estimate_memory`
checks.py     checks of the inputs
"""

from liger_chunked.engine.checks import check_projection, check_target, check_top_k, check_values, shifted
from liger_chunked.engine.compile import FusedLoss, Like, Returns, loss_and, one_operation
from liger_chunked.engine.distill import LossWeights, Teacher, distillation_loss
from liger_chunked.engine.fused import NegativeLogLikelihood, fused_loss
from liger_chunked.engine.loss import StatsLoss
from liger_chunked.engine.routes import ByAutograd, ClosedForm
from liger_chunked.engine.schedule import Group, Layout, along, lay_out, lay_out_every
from liger_chunked.engine.stats import linear_token_stats, token_stats
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
