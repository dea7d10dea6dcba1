"""The engine: it knows heads, tokens, groups and budgets, and no loss by name.

schedule.py   which tokens take part, in which order, in which packs and tiles
passes.py     a pack through the head: statistics, and back
precision.py  how cuBLAS adds up their products, while steps run on several threads
epilogue.py   the same without ever reading logits back, where a loss lets it
fused.py      gradient in forward: a loss of token statistics, with the gradients it computed on the way
loss.py       what it asks of such a loss
distill.py    the same for a student and its teacher, whose logits a loss compares
routes.py     how their logits become a divergence: by kernels, or by autograd
top_k.py      a third way, from a teacher's largest log-probabilities
aside.py      work on a second stream
stats.py      the statistics alone, differentiable: `linear_token_stats`
compile.py    all of these as one operation of a graph, for torch.compile
rehearsal.py  their steps on tensors without storage, which is what `estimate_memory` adds up
checks.py     what is asked of inputs
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
from liger_chunked.kernels.checks import plain

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
