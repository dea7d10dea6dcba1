"""One operation per file: a Triton kernel, a torch path, a function that picks one.

a head's logits     logits_stats.py, logits_grad.py, target_logit.py
fused epilogue      projection.py, merge_ranks.py, projection_grad.py, target_rows.py
batch invariance    projection_logits.py
sampling filters    sampling_bound.py, drop_below.py
two heads' logits   divergence_sums.py, divergence.py, divergence_grad.py
logits in memory    cross_entropy.py, logits_divergence.py, pointwise_divergence.py
utilities           scale.py, survey.py, move_rows.py
losses              nll.py, pair_loss.py, example_loss.py, policy_loss.py
shared              backend.py, transform.py, operands.py, launch.py, tuning/

Those of a model's layers are in `layers/`.
"""

from liger_chunked.kernels.cross_entropy import liger_cross_entropy
from liger_chunked.kernels.divergence import DivergenceStats, divergence_stats, tail_stats
from liger_chunked.kernels.divergence_grad import divergence_grad_, tail_grad_
from liger_chunked.kernels.drop_below import drop_below_
from liger_chunked.kernels.example_loss import ExampleLoss, ExampleSums, example_loss
from liger_chunked.kernels.logits_divergence import (
    liger_jsd_with_logits,
    liger_kl_div_with_logits,
    liger_tvd_with_logits,
)
from liger_chunked.kernels.logits_grad import LogitsCotangents, logits_grad_, slopes_of_stats
from liger_chunked.kernels.logits_stats import (
    ExactTarget,
    PartialStats,
    finish,
    logits_stats,
    merge,
    row_stats,
    row_stats_are_exact,
)
from liger_chunked.kernels.merge_ranks import merge_ranks
from liger_chunked.kernels.move_rows import move_rows_, place_rows
from liger_chunked.kernels.nll import nll, nll_has_kernel
from liger_chunked.kernels.pair_loss import MOST_TERMS, PairLoss, PairSums, pair_loss
from liger_chunked.kernels.pointwise_divergence import liger_jsd, liger_kl_div, liger_tvd
from liger_chunked.kernels.policy_loss import PolicyLoss, PolicySides, PolicySums, policy_loss
from liger_chunked.kernels.projection import Exponentials, project_exp, project_sums
from liger_chunked.kernels.projection_grad import RowFactors, grad_from_exponentials_, project_grad, row_factors
from liger_chunked.kernels.projection_logits import project_logits
from liger_chunked.kernels.sampling_bound import sampling_bound
from liger_chunked.kernels.scale import scale_
from liger_chunked.kernels.survey import assert_counts, counts_match, find_tokens, survey, survey_top_k
from liger_chunked.kernels.target_logit import unround_logps_
from liger_chunked.kernels.target_rows import (
    RowScales,
    add_target_rows_,
    add_target_rows_of_weight,
    occurrences,
    scale_rows,
)

__all__ = [
    "MOST_TERMS",
    "DivergenceStats",
    "ExactTarget",
    "ExampleLoss",
    "ExampleSums",
    "Exponentials",
    "LogitsCotangents",
    "PairLoss",
    "PairSums",
    "PartialStats",
    "PolicyLoss",
    "PolicySides",
    "PolicySums",
    "RowFactors",
    "RowScales",
    "add_target_rows_",
    "add_target_rows_of_weight",
    "assert_counts",
    "counts_match",
    "divergence_grad_",
    "divergence_stats",
    "drop_below_",
    "example_loss",
    "find_tokens",
    "finish",
    "grad_from_exponentials_",
    "liger_cross_entropy",
    "liger_jsd",
    "liger_jsd_with_logits",
    "liger_kl_div",
    "liger_kl_div_with_logits",
    "liger_tvd",
    "liger_tvd_with_logits",
    "logits_grad_",
    "logits_stats",
    "merge",
    "merge_ranks",
    "move_rows_",
    "nll",
    "nll_has_kernel",
    "occurrences",
    "pair_loss",
    "place_rows",
    "policy_loss",
    "project_exp",
    "project_grad",
    "project_logits",
    "project_sums",
    "row_factors",
    "row_stats",
    "row_stats_are_exact",
    "sampling_bound",
    "scale_",
    "scale_rows",
    "slopes_of_stats",
    "survey",
    "survey_top_k",
    "tail_grad_",
    "tail_stats",
    "unround_logps_",
]
