"""The engine: losses and gradients of chunks of tokens. It knows no loss by name.

batch, known                     which tokens count, and in which order
cutting                          chunks and tiles within the budget: integers only
choose                           the one place that decides what runs, as a `Plan`
step                             the loop over chunks, and the autograd Function
head, epilogue                   passes over a chunk: plain logits, fused epilogue
distillation                     a loop of its own, of a student and a teacher
gradients                        accumulators of dX, dW and db
divergences, top_k, ranked       divergences of a tile of logits
stats                            linear_token_stats
estimated                        what estimate_memory, which runs these on the meta device, tells them and is told
shard, scattered, sequence       a vocabulary, hidden states, or sequences split over ranks
"""

from liger_chunked.engine.batch import Group, Layout, along, lay_out, lay_out_every
from liger_chunked.engine.checks import (
    check_projection,
    check_target,
    check_temperature,
    check_top_k,
    check_values,
    compute_dtype,
    shifted,
)
from liger_chunked.engine.distillation import LossWeights, Teacher, distillation_step
from liger_chunked.engine.divergences import ByAutograd, ClosedForm
from liger_chunked.engine.known import as_counts, assert_later, may_read, sequence_counts, token_count
from liger_chunked.engine.packed import Packing, Sequences, count, sequences_of, whole
from liger_chunked.engine.ranked import Ranked
from liger_chunked.engine.sequence import SequenceSplit, check_group
from liger_chunked.engine.stats import linear_token_stats, token_stats
from liger_chunked.engine.step import LinearObjective, NegativeLogLikelihood, Objective, fused_loss, run_step
from liger_chunked.engine.top_k import TopK
from liger_chunked.kernels.operands import plain

__all__ = [
    "ByAutograd",
    "ClosedForm",
    "Group",
    "Layout",
    "LinearObjective",
    "LossWeights",
    "NegativeLogLikelihood",
    "Objective",
    "Packing",
    "Ranked",
    "SequenceSplit",
    "Sequences",
    "Teacher",
    "TopK",
    "along",
    "as_counts",
    "assert_later",
    "check_group",
    "check_projection",
    "check_target",
    "check_temperature",
    "check_top_k",
    "check_values",
    "compute_dtype",
    "count",
    "distillation_step",
    "fused_loss",
    "lay_out",
    "lay_out_every",
    "linear_token_stats",
    "may_read",
    "plain",
    "run_step",
    "sequence_counts",
    "sequences_of",
    "shifted",
    "token_count",
    "token_stats",
    "whole",
]
