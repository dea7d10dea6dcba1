"""The engine: run chunks of tokens through the head, and compute losses and gradients. It knows no loss by name.

batch.py         select the tokens that count, and group them
plan.py          cut a batch into chunks and tiles
head.py          project a chunk; compute statistics, then gradients
epilogue.py      the same with the fused epilogue, without logits
side_stream.py   overlap two products
gradients.py     accumulate dX, dW and db
precision.py     make products accumulate in float32
step.py          losses of token statistics, with the gradient in the forward
distillation.py  the same for a student and a teacher
divergences.py   divergences of a block of logits
top_k.py         divergences from a teacher's top-k
stats.py         the differentiable primitive, `linear_token_stats`
hooks.py         hide inner graphs from hooks on saved tensors
loss.py          base class of losses of token statistics
compile.py       each loss as one operation of torch.compile
calls.py         call a loss class with settings or tensors
dry_run.py       predict memory for `estimate_memory`
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
