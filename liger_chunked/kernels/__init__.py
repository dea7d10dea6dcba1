"""One operation per file: a Triton kernel, a torch path, a function that picks one.

a head's logits     logits_stats.py, logits_grad.py, target_logit.py
fused epilogue      projection.py, merge_ranks.py, projection_grad.py, target_rows.py
rows of dW          add_rows.py
batch invariance    projection_logits.py
two heads' logits   divergence_sums.py, divergence.py, divergence_grad.py
logits in memory    cross_entropy.py
utilities           scale.py, survey.py, place_rows.py
shared              backend.py, transform.py, operands.py, launch.py, tuning/

Those of a model's layers are in `layers/`.
"""

from liger_chunked.kernels.add_rows import SortedRows, add_rows_, sorted_rows
from liger_chunked.kernels.cross_entropy import liger_cross_entropy
from liger_chunked.kernels.divergence import DivergenceStats, divergence_stats, tail_stats
from liger_chunked.kernels.divergence_grad import divergence_grad_, tail_grad_
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
from liger_chunked.kernels.place_rows import place_rows
from liger_chunked.kernels.projection import Exponentials, project_exp, project_sums
from liger_chunked.kernels.projection_grad import RowFactors, grad_from_exponentials_, project_grad, row_factors
from liger_chunked.kernels.projection_logits import project_logits
from liger_chunked.kernels.scale import scale_
from liger_chunked.kernels.survey import find_tokens, survey, survey_top_k
from liger_chunked.kernels.target_logit import unround_logps_
from liger_chunked.kernels.target_rows import (
    RowScales,
    add_target_rows_of_weight,
    scale_rows,
)

__all__ = [
    "DivergenceStats",
    "ExactTarget",
    "Exponentials",
    "LogitsCotangents",
    "PartialStats",
    "RowFactors",
    "RowScales",
    "SortedRows",
    "add_rows_",
    "add_target_rows_of_weight",
    "divergence_grad_",
    "divergence_stats",
    "find_tokens",
    "finish",
    "grad_from_exponentials_",
    "liger_cross_entropy",
    "logits_grad_",
    "logits_stats",
    "merge",
    "merge_ranks",
    "place_rows",
    "project_exp",
    "project_grad",
    "project_logits",
    "project_sums",
    "row_factors",
    "row_stats",
    "row_stats_are_exact",
    "scale_",
    "scale_rows",
    "slopes_of_stats",
    "sorted_rows",
    "survey",
    "survey_top_k",
    "tail_grad_",
    "tail_stats",
    "unround_logps_",
]
