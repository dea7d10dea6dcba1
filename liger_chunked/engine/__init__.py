"""The engine: run chunks of tokens through the head, and compute losses and gradients. It knows no loss by name.

batch.py         select the tokens that count, and order them in groups
plan.py          cut a batch to the logits budget, in chunks and tiles
head.py          run a chunk through the head: statistics, then gradients
epilogue.py      the same with the fused epilogue, which stores no logits
side_stream.py   run two products at the same time
gradients.py     accumulate the gradients of a step
precision.py     make matrix products accumulate in float32
step.py          losses of token statistics, with the gradient computed in the forward
distillation.py  the same for a student and a teacher
divergences.py   divergences of a block of logits: with kernels or with autograd
top_k.py         divergences from a teacher's largest log-probabilities
stats.py         differentiable statistics: `linear_token_stats`
hooks.py         hide the inner graphs of a step from hooks on saved tensors
loss.py          the base class of losses of token statistics
compile.py       each loss as one operation of a torch.compile graph
calls.py         calls of a loss class, with settings or with tensors
dry_run.py       run a step on meta tensors, for `estimate_memory`
checks.py        check the inputs
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
