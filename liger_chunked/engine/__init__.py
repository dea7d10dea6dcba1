"""The engine: losses and gradients of chunks of tokens. It knows no loss by name.

From drivers down to what knows nothing of the others; `pyproject.toml` has the layers that a linter checks:

loss, stats                      losses of token statistics; `linear_token_stats`
kept                             the ids that a sampler kept, by rows of the head
distillation                     divergences of a student from a teacher, as a source
step, saved                      the loop over chunks, the two autograd Functions, tensors that autograd keeps
choose, cutting                  the one place that decides what runs; chunks and tiles within the budget, integers only
source, epilogue                 values of tokens and their gradients, from logits in memory or by the fused epilogue
invariant, kept_products         sources whose bits do not depend on the batch, and of long lists of kept ids
sink, live_rows                  accumulators of dX, dW and db; leave rows without a gradient out of their products
plan                             what the choice returns: `Plan`, and the `Tokens` of a chunk
rows, packed                     which tokens count, in which order, and how values return to the batch
rank_rows, sequence, scattered   the same where ranks split sequences, or hidden states
adapter                          the low-rank term of an `AdaptedWeight`
surroundings, side_stream        what surrounds products: no autocast, no hooks on saved tensors, a second stream
candidates                       log-probabilities of ids that the caller names
divergences, top_k               divergences of a tile of logits
checks, collectives              what a caller gave; what ranks send, and agree on once
"""

from liger_chunked.engine.checks import (
    check_projection,
    check_target,
    check_temperature,
    check_temperature_values,
    check_top_k,
    check_values,
    compute_dtype,
    host_may_sync,
    refuse_capture,
    shifted,
)
from liger_chunked.engine.cutting import Chunk
from liger_chunked.engine.distillation import (
    Distillation,
    LossWeights,
    Teacher,
    distillation_loss,
    divergences_of_tokens,
)
from liger_chunked.engine.divergences import ByAutograd, ClosedForm
from liger_chunked.engine.kept import check_kept
from liger_chunked.engine.loss import fused_loss, loss_of_kept
from liger_chunked.engine.packed import Sequences, count, sequences_of, whole
from liger_chunked.engine.rank_rows import on_this_rank
from liger_chunked.engine.rows import Group, Rows, all_rows, at_least_1, select_rows
from liger_chunked.engine.sequence import SequenceSplit, check_group
from liger_chunked.engine.stats import linear_token_stats, stats_of_kept, token_stats
from liger_chunked.engine.step import (
    Fused,
    Objective,
    Share,
    run_step,
)
from liger_chunked.engine.top_k import TopK
from liger_chunked.kernels.operands import along, mapped, plain

__all__ = [
    "ByAutograd",
    "Chunk",
    "ClosedForm",
    "Distillation",
    "Fused",
    "Group",
    "LossWeights",
    "Objective",
    "Rows",
    "SequenceSplit",
    "Sequences",
    "Share",
    "Teacher",
    "TopK",
    "all_rows",
    "along",
    "at_least_1",
    "check_group",
    "check_kept",
    "check_projection",
    "check_target",
    "check_temperature",
    "check_temperature_values",
    "check_top_k",
    "check_values",
    "compute_dtype",
    "count",
    "distillation_loss",
    "divergences_of_tokens",
    "fused_loss",
    "host_may_sync",
    "linear_token_stats",
    "loss_of_kept",
    "mapped",
    "on_this_rank",
    "plain",
    "refuse_capture",
    "run_step",
    "select_rows",
    "sequences_of",
    "shifted",
    "stats_of_kept",
    "token_stats",
    "whole",
]
