"""What type checkers see of this module, whose functions are made from the signatures of the losses.

tests/api/test_typing.py compares the arguments with the real ones.
"""

from collections.abc import Callable
from typing import ParamSpec, Protocol, TypeVar

from torch import Tensor

from liger_chunked.compat.chunked_loss import PairMetrics

__all__ = [
    "LigerFusedLinearCPOFunction",
    "LigerFusedLinearCosineSimilarityFunction",
    "LigerFusedLinearDPOFunction",
    "LigerFusedLinearGRPOFunction",
    "LigerFusedLinearJSDFunction",
    "LigerFusedLinearKTOFunction",
    "LigerFusedLinearORPOFunction",
    "LigerFusedLinearSimPOFunction",
    "liger_fused_linear_cosine",
    "liger_fused_linear_cpo",
    "liger_fused_linear_dpo",
    "liger_fused_linear_grpo",
    "liger_fused_linear_jsd",
    "liger_fused_linear_kto",
    "liger_fused_linear_orpo",
    "liger_fused_linear_simpo",
]

P = ParamSpec("P")
Result_co = TypeVar("Result_co", covariant=True)

class HasApply(Protocol[P, Result_co]):
    """The type of a class whose `apply` is a function."""

    def apply(self, *args: P.args, **kwargs: P.kwargs) -> Result_co: ...

def applied(name: str, module: str, function: Callable[P, Result_co]) -> HasApply[P, Result_co]: ...
def liger_fused_linear_dpo(
    _input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ref_input: Tensor | None = None,
    ref_weight: Tensor | None = None,
    ref_bias: Tensor | None = None,
    ignore_index: int = -100,
    beta: float = 0.1,
    compute_nll_loss: bool = False,
    compiled: bool = True,
    use_ref_model: bool = True,
    average_log_prob: bool = False,
    chunk_size: int = 1,
    loss_type: str = "sigmoid",
    label_smoothing: float = 0.0,
    discopop_tau: float = 0.05,
    alpha: float = 1.0,
) -> tuple[Tensor, PairMetrics]: ...

class LigerFusedLinearDPOFunction:
    apply = staticmethod(liger_fused_linear_dpo)

def liger_fused_linear_orpo(
    _input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    beta: float = 0.1,
    compute_nll_loss: bool = True,
    nll_target: Tensor | None = None,
    compiled: bool = True,
    chunk_size: int = 1,
) -> tuple[Tensor, tuple[Tensor, ...]]: ...

class LigerFusedLinearORPOFunction:
    apply = staticmethod(liger_fused_linear_orpo)

def liger_fused_linear_cpo(
    _input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    beta: float = 0.1,
    alpha: float = 1.0,
    label_smoothing: float = 0.0,
    compute_nll_loss: bool = True,
    compiled: bool = True,
    average_log_prob: bool = False,
    chunk_size: int = 1,
) -> tuple[Tensor, PairMetrics]: ...

class LigerFusedLinearCPOFunction:
    apply = staticmethod(liger_fused_linear_cpo)

def liger_fused_linear_simpo(
    _input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    beta: float = 0.1,
    alpha: float = 1.0,
    label_smoothing: float = 0.0,
    compute_nll_loss: bool = False,
    compiled: bool = True,
    gamma: float = 0.5,
    chunk_size: int = 1,
) -> tuple[Tensor, PairMetrics]: ...

class LigerFusedLinearSimPOFunction:
    apply = staticmethod(liger_fused_linear_simpo)

def liger_fused_linear_kto(
    _input: Tensor,
    weight: Tensor,
    target: Tensor,
    preference_labels: Tensor | None = None,
    bias: Tensor | None = None,
    ref_input: Tensor | None = None,
    ref_weight: Tensor | None = None,
    ref_bias: Tensor | None = None,
    kl: Tensor | None = None,
    ignore_index: int = -100,
    beta: float = 0.1,
    compiled: bool = True,
    use_ref_model: bool = True,
    average_log_prob: bool = False,
    chunk_size: int = 1,
) -> tuple[Tensor, tuple[Tensor, ...]]: ...

class LigerFusedLinearKTOFunction:
    apply = staticmethod(liger_fused_linear_kto)

def liger_fused_linear_grpo(
    _input: Tensor,
    weight: Tensor,
    selected_token_ids: Tensor,
    attention_mask: Tensor,
    advantages: Tensor,
    bias: Tensor | None = None,
    ref_per_token_logps: Tensor | None = None,
    old_per_token_logps: Tensor | None = None,
    ref_input: Tensor | None = None,
    ref_weight: Tensor | None = None,
    ref_bias: Tensor | None = None,
    beta: float = 0.04,
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    loss_type: str = "dapo",
    max_completion_length: int | None = None,
    importance_sampling_level: str = "token",
    sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.05,
    temperature: float = 1.0,
    compiled: bool = True,
    use_ref_model: bool = True,
    chunk_size: int = 1,
    vllm_is_ratio: Tensor | None = None,
    delta: float | None = None,
    use_bias_correction_kl: bool = False,
    vespo_k_pos: float = 2.0,
    vespo_lambda_pos: float = 3.0,
    vespo_k_neg: float = 3.0,
    vespo_lambda_neg: float = 2.0,
    num_items_in_batch: float | Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]: ...

class LigerFusedLinearGRPOFunction:
    apply = staticmethod(liger_fused_linear_grpo)

def liger_fused_linear_jsd(
    student_input: Tensor,
    student_weight: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    true_labels: Tensor,
    student_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    weight_hard_loss: float = 0.5,
    weight_soft_loss: float = 0.5,
    beta: float = 0.5,
    ignore_index: int = -100,
    temperature: float = 1.0,
    compiled: bool = True,
    chunk_size: int = 1024,
    return_soft_hard_loss: bool = False,
) -> Tensor | tuple[Tensor, Tensor, Tensor]: ...

class LigerFusedLinearJSDFunction:
    apply = staticmethod(liger_fused_linear_jsd)

def liger_fused_linear_cosine(
    student_input: Tensor,
    student_weight: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    true_labels: Tensor,
    student_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    weight_hard_loss: float = 0.5,
    weight_soft_loss: float = 0.5,
    beta: float = 0.5,
    ignore_index: int = -100,
    temperature: float = 1.0,
    compiled: bool = True,
    chunk_size: int = 1024,
    return_soft_hard_loss: bool = False,
) -> Tensor | tuple[Tensor, Tensor, Tensor]: ...

class LigerFusedLinearCosineSimilarityFunction:
    apply = staticmethod(liger_fused_linear_cosine)
