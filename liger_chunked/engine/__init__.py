"""The engine: losses and gradients of chunks of tokens. It knows no loss by name.

From drivers down to what knows nothing of the others; `pyproject.toml` has the layers that a linter checks:

loss                             the loop over chunks, for a loss of token statistics
stats, saved                     linear_token_stats, and tensors that autograd keeps for its backward
distillation                     a loop of its own, of a student and a teacher
step                             the autograd Function of a loss whose gradients are known
choose, cutting                  the one place that decides what runs; chunks and tiles within the budget, integers only
head, epilogue                   passes over a chunk: plain logits, fused epilogue
token_pass, shard                plain logits of one token at a time, of a rank's ids
invariant                        plain logits whose bits do not depend on the batch
kept, kept_pass                  the ids that a sampler kept, by rows of the head, and by products
gradients, live_rows             accumulators of dX, dW and db; leave rows without a gradient out of their products
plan                             what the choice returns: `Plan`, and the `Tokens` of a chunk
objective                        the loss of a chunk, and its gradient by the statistics
rows, known, packed              which tokens count, in which order, and how values return to the batch
rank_rows                        the same where ranks split sequences
scattered, sequence, collectives hidden states and sequences split over ranks, and what ranks send
adapter                          the low-rank term of an `AdaptedWeight`
precision, hooks, side_stream    what surrounds products: no autocast, no hooks on saved tensors, a second stream
candidates                       log-probabilities of ids that the caller names
divergences, top_k, ranked       divergences of a tile of logits
checks, once                     what a caller gave, and what ranks must agree on
"""

from liger_chunked.engine.checks import (
    check_projection,
    check_target,
    check_temperature,
    check_temperature_values,
    check_top_k,
    check_values,
    compute_dtype,
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
from liger_chunked.engine.known import host_may_sync, refuse_capture
from liger_chunked.engine.loss import fused_loss, loss_of_kept
from liger_chunked.engine.objective import (
    Objective,
    Share,
)
from liger_chunked.engine.packed import Packing, Sequences, count, sequences_of, whole
from liger_chunked.engine.rank_rows import on_this_rank
from liger_chunked.engine.ranked import Ranked
from liger_chunked.engine.rows import Group, Rows, all_rows, at_least_1, select_rows
from liger_chunked.engine.sequence import SequenceSplit, check_group
from liger_chunked.engine.stats import linear_token_stats, stats_of_kept, token_stats
from liger_chunked.engine.step import Fused, run_step
from liger_chunked.engine.top_k import TopK
from liger_chunked.kernels.operands import along, plain

__all__ = [
    "ByAutograd",
    "Chunk",
    "ClosedForm",
    "Distillation",
    "Fused",
    "Group",
    "LossWeights",
    "Objective",
    "Packing",
    "Ranked",
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
