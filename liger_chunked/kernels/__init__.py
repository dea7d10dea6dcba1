"""One operation per file: a Triton kernel, a torch path, a function that picks one.

a head's logits     logits_stats.py, logits_grad.py, target_logit.py
fused epilogue      projection.py, merge_ranks.py, projection_grad.py, target_rows.py
rows of dW          add_rows.py
batch invariance    projection_logits.py
two heads' logits   divergence_sums.py, divergence.py, divergence_grad.py
base kernels        rms_norm.py, layer_norm.py, glu.py, rope.py, cross_entropy.py, relu_squared.py,
                    experts.py
utilities           scale.py, survey.py, place_rows.py
shared              backend.py, transform.py, norm_rows.py, operands.py, launch.py, tuning/
"""

from liger_chunked.kernels.add_rows import SortedRows, add_rows_, sorted_rows
from liger_chunked.kernels.cross_entropy import liger_cross_entropy
from liger_chunked.kernels.divergence import DivergenceStats, divergence_stats, tail_stats
from liger_chunked.kernels.divergence_grad import divergence_grad_, tail_grad_
from liger_chunked.kernels.glu import liger_geglu, liger_swiglu
from liger_chunked.kernels.layer_norm import liger_layer_norm
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
from liger_chunked.kernels.relu_squared import liger_relu_squared
from liger_chunked.kernels.rms_norm import liger_rms_norm, liger_rms_norm_gated
from liger_chunked.kernels.rope import liger_rotary_pos_emb
from liger_chunked.kernels.scale import scale_
from liger_chunked.kernels.survey import assert_counts, counts_match, find_tokens, survey, survey_top_k
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
    "assert_counts",
    "counts_match",
    "divergence_grad_",
    "divergence_stats",
    "find_tokens",
    "finish",
    "grad_from_exponentials_",
    "liger_cross_entropy",
    "liger_geglu",
    "liger_layer_norm",
    "liger_relu_squared",
    "liger_rms_norm",
    "liger_rms_norm_gated",
    "liger_rotary_pos_emb",
    "liger_swiglu",
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
