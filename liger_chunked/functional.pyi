"""Written by scripts/functional_stub.py."""

import math
from collections.abc import Sequence
from typing import Literal, overload

import torch
from torch import Tensor

from liger_chunked.engine import linear_token_stats
from liger_chunked.kept_ids import KeptIds
from liger_chunked.losses.cross_entropy import WithMetrics
from liger_chunked.losses.dpo import LossOfPairs
from liger_chunked.losses.draft import DraftDivergenceName
from liger_chunked.losses.surrogates import Surrogate
from liger_chunked.teachers import TopK as TeacherTopK
from liger_chunked.types import (
    DistillationMetrics,
    DraftMetrics,
    LogitOptions,
    PolicyMetrics,
    PreferenceMetrics,
    ProcessGroup,
    UnpairedPreferenceMetrics,
    VocabShard,
    Weight,
)

__all__ = [
    "bco_loss",
    "cosine_similarity_loss",
    "cpo_loss",
    "cross_entropy_loss",
    "dpo_loss",
    "draft_loss",
    "grpo_loss",
    "jsd_loss",
    "kl_div_loss",
    "kto_loss",
    "linear_token_stats",
    "on_policy_distillation_loss",
    "orpo_loss",
    "simpo_loss",
    "tvd_loss",
    "uld_loss",
]

def bco_loss(
    weight: Weight,
    input: Tensor,
    target: Tensor,
    preference_labels: Tensor,
    bias: Tensor | None = None,
    ref_input: Tensor | None = None,
    ref_weight: Weight | None = None,
    ref_bias: Tensor | None = None,
    *,
    ref_logps: Tensor | None = None,
    kl: float | Tensor | None = None,
    kl_input: Tensor | None = None,
    kl_target: Tensor | None = None,
    ref_kl_input: Tensor | None = None,
    ref_kl_logps: Tensor | None = None,
    delta: float | Tensor | None = None,
    example_weights: Tensor | None = None,
    vocab_shard: VocabShard | None = None,
    cu_seqlens: Tensor | None = None,
    sequence_group: ProcessGroup | None = None,
    beta: float = 0.1,
    average_log_prob: bool = False,
    use_ref_model: bool | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
    logits_budget: int | float | str | None = None,
    logits_dtype: torch.dtype | None = None,
) -> tuple[Tensor, UnpairedPreferenceMetrics]:
    """Compute `LigerFusedLinearBCOLoss`: `-log sigmoid(reward - delta)`, with the sign of the label.

    Shapes are as in `kto_loss`.

    >>> import torch
    >>> weight, hidden = torch.randn(11, 4), torch.randn(2, 3, 4)       # a desirable and an undesirable sequence
    >>> target, labels = torch.tensor([[1, 2, 3], [4, 5, -100]]), torch.tensor([True, False])
    >>> loss, metrics = bco_loss(weight, hidden, target, labels, ref_logps=torch.zeros(2), delta=0.0)
    >>> metrics.chosen_count.item(), metrics.rejected_count.item()
    (1, 1)
    """

def cosine_similarity_loss(
    weight: Weight,
    input: Tensor,
    teacher_weight: Weight | None = None,
    teacher_input: Tensor | None = None,
    target: Tensor | None = None,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    *,
    teacher_logps: Tensor | None = None,
    teacher_ids: Tensor | None = None,
    teacher: TeacherTopK | None = None,
    mask: Tensor | None = None,
    num_items: float | Tensor | None = None,
    vocab_shard: VocabShard | None = None,
    sequence_group: ProcessGroup | None = None,
    weight_hard_loss: float = 0.5,
    weight_soft_loss: float = 0.5,
    reduction: str = "mean",
    teacher_options: LogitOptions | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
    logits_budget: int | float | str | None = None,
    logits_dtype: torch.dtype | None = None,
) -> tuple[Tensor, DistillationMetrics]:
    """Compute `LigerFusedLinearCosineSimilarityLoss`: `1 - cos` of the student's and the teacher's logits.

    Shapes are as in `kl_div_loss`.

    >>> import torch
    >>> weight, hidden, target = torch.randn(11, 4), torch.randn(2, 3, 4), torch.tensor([[1, 2, 3], [4, 5, -100]])
    >>> teacher_weight, teacher_hidden = torch.randn(11, 6), torch.randn(2, 3, 6)
    >>> loss, metrics = cosine_similarity_loss(weight, hidden, teacher_weight, teacher_hidden)
    >>> bool(0 <= metrics.soft_loss <= 2)
    True
    """

def cpo_loss(
    weight: Weight,
    input: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ref_input: Tensor | None = None,
    ref_weight: Weight | None = None,
    ref_bias: Tensor | None = None,
    *,
    ref_logps: Tensor | None = None,
    nll_target: Tensor | None = None,
    example_weights: Tensor | None = None,
    vocab_shard: VocabShard | None = None,
    cu_seqlens: Tensor | None = None,
    sequence_group: ProcessGroup | None = None,
    beta: float = 0.1,
    cpo_alpha: float = 1.0,
    label_smoothing: float = 0.0,
    loss_type: str = "sigmoid",
    simpo_gamma: float = 0.5,
    alphapo_alpha: float = 0.0,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
    logits_budget: int | float | str | None = None,
    logits_dtype: torch.dtype | None = None,
) -> tuple[Tensor, PreferenceMetrics]:
    """Compute `LigerFusedLinearCPOLoss`: `-log sigmoid(beta * (chosen - rejected)) + cpo_alpha * nll`.

    Shapes are as in `dpo_loss`.

    >>> import torch
    >>> weight, hidden = torch.randn(11, 4), torch.randn(2, 3, 4)       # one pair of three tokens
    >>> target = torch.tensor([[1, 2, 3], [4, 5, -100]])
    >>> loss, metrics = cpo_loss(weight, hidden, target, cpo_alpha=0.0)
    >>> margin = metrics.chosen_rewards - metrics.rejected_rewards
    >>> bool(torch.isclose(loss, -torch.nn.functional.logsigmoid(margin).mean()))
    True
    """

@overload
def cross_entropy_loss(
    weight: Weight,
    input: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    num_items: float | Tensor | None = None,
    token_weights: Tensor | None = None,
    ce_weight: Tensor | None = None,
    vocab_shard: VocabShard | None = None,
    sequence_group: ProcessGroup | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    focal_gamma: float = 0.0,
    dft: bool = False,
    entropy_weight: float = 0.0,
    return_z_loss: Literal[False] = False,
    return_token_accuracy: Literal[False] = False,
    return_predicted_tokens: Literal[False] = False,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
    logits_budget: int | float | str | None = None,
    logits_dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute `LigerFusedLinearCrossEntropyLoss`: `mean(logsumexp(z) - z[target])` of the logits `z`.

    `input` is (B, T, H) or (N, H), `target` (B, T) or (N,).

    >>> import torch
    >>> weight, hidden, target = torch.randn(11, 4), torch.randn(2, 3, 4), torch.tensor([[1, 2, -100], [3, 4, 5]])
    >>> loss = cross_entropy_loss(weight, hidden, target, label_smoothing=0.1)
    >>> logits = (hidden @ weight.T).view(-1, 11)
    >>> bool(torch.isclose(loss, torch.nn.functional.cross_entropy(logits, target.view(-1), label_smoothing=0.1)))
    True
    """

@overload
def cross_entropy_loss(
    weight: Weight,
    input: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    num_items: float | Tensor | None = None,
    token_weights: Tensor | None = None,
    ce_weight: Tensor | None = None,
    vocab_shard: VocabShard | None = None,
    sequence_group: ProcessGroup | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    focal_gamma: float = 0.0,
    dft: bool = False,
    entropy_weight: float = 0.0,
    return_z_loss: Literal[True],
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
    logits_budget: int | float | str | None = None,
    logits_dtype: torch.dtype | None = None,
) -> WithMetrics:
    """Compute `LigerFusedLinearCrossEntropyLoss`: `mean(logsumexp(z) - z[target])` of the logits `z`.

    `input` is (B, T, H) or (N, H), `target` (B, T) or (N,).

    >>> import torch
    >>> weight, hidden, target = torch.randn(11, 4), torch.randn(2, 3, 4), torch.tensor([[1, 2, -100], [3, 4, 5]])
    >>> loss = cross_entropy_loss(weight, hidden, target, label_smoothing=0.1)
    >>> logits = (hidden @ weight.T).view(-1, 11)
    >>> bool(torch.isclose(loss, torch.nn.functional.cross_entropy(logits, target.view(-1), label_smoothing=0.1)))
    True
    """

@overload
def cross_entropy_loss(
    weight: Weight,
    input: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    num_items: float | Tensor | None = None,
    token_weights: Tensor | None = None,
    ce_weight: Tensor | None = None,
    vocab_shard: VocabShard | None = None,
    sequence_group: ProcessGroup | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    focal_gamma: float = 0.0,
    dft: bool = False,
    entropy_weight: float = 0.0,
    return_z_loss: bool = False,
    return_token_accuracy: Literal[True],
    return_predicted_tokens: bool = False,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
    logits_budget: int | float | str | None = None,
    logits_dtype: torch.dtype | None = None,
) -> WithMetrics:
    """Compute `LigerFusedLinearCrossEntropyLoss`: `mean(logsumexp(z) - z[target])` of the logits `z`.

    `input` is (B, T, H) or (N, H), `target` (B, T) or (N,).

    >>> import torch
    >>> weight, hidden, target = torch.randn(11, 4), torch.randn(2, 3, 4), torch.tensor([[1, 2, -100], [3, 4, 5]])
    >>> loss = cross_entropy_loss(weight, hidden, target, label_smoothing=0.1)
    >>> logits = (hidden @ weight.T).view(-1, 11)
    >>> bool(torch.isclose(loss, torch.nn.functional.cross_entropy(logits, target.view(-1), label_smoothing=0.1)))
    True
    """

@overload
def cross_entropy_loss(
    weight: Weight,
    input: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    num_items: float | Tensor | None = None,
    token_weights: Tensor | None = None,
    ce_weight: Tensor | None = None,
    vocab_shard: VocabShard | None = None,
    sequence_group: ProcessGroup | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    focal_gamma: float = 0.0,
    dft: bool = False,
    entropy_weight: float = 0.0,
    return_z_loss: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: Literal[True],
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
    logits_budget: int | float | str | None = None,
    logits_dtype: torch.dtype | None = None,
) -> WithMetrics:
    """Compute `LigerFusedLinearCrossEntropyLoss`: `mean(logsumexp(z) - z[target])` of the logits `z`.

    `input` is (B, T, H) or (N, H), `target` (B, T) or (N,).

    >>> import torch
    >>> weight, hidden, target = torch.randn(11, 4), torch.randn(2, 3, 4), torch.tensor([[1, 2, -100], [3, 4, 5]])
    >>> loss = cross_entropy_loss(weight, hidden, target, label_smoothing=0.1)
    >>> logits = (hidden @ weight.T).view(-1, 11)
    >>> bool(torch.isclose(loss, torch.nn.functional.cross_entropy(logits, target.view(-1), label_smoothing=0.1)))
    True
    """

@overload
def cross_entropy_loss(
    weight: Weight,
    input: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    num_items: float | Tensor | None = None,
    token_weights: Tensor | None = None,
    ce_weight: Tensor | None = None,
    vocab_shard: VocabShard | None = None,
    sequence_group: ProcessGroup | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    focal_gamma: float = 0.0,
    dft: bool = False,
    entropy_weight: float = 0.0,
    return_z_loss: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
    logits_budget: int | float | str | None = None,
    logits_dtype: torch.dtype | None = None,
) -> Tensor | WithMetrics:
    """Compute `LigerFusedLinearCrossEntropyLoss`: `mean(logsumexp(z) - z[target])` of the logits `z`.

    `input` is (B, T, H) or (N, H), `target` (B, T) or (N,).

    >>> import torch
    >>> weight, hidden, target = torch.randn(11, 4), torch.randn(2, 3, 4), torch.tensor([[1, 2, -100], [3, 4, 5]])
    >>> loss = cross_entropy_loss(weight, hidden, target, label_smoothing=0.1)
    >>> logits = (hidden @ weight.T).view(-1, 11)
    >>> bool(torch.isclose(loss, torch.nn.functional.cross_entropy(logits, target.view(-1), label_smoothing=0.1)))
    True
    """

def dpo_loss(
    weight: Weight,
    input: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ref_input: Tensor | None = None,
    ref_weight: Weight | None = None,
    ref_bias: Tensor | None = None,
    *,
    ref_logps: Tensor | None = None,
    nll_target: Tensor | None = None,
    example_weights: Tensor | None = None,
    vocab_shard: VocabShard | None = None,
    cu_seqlens: Tensor | None = None,
    sequence_group: ProcessGroup | None = None,
    beta: float = 0.1,
    loss_type: str | LossOfPairs | Sequence[str | LossOfPairs] = "sigmoid",
    loss_weights: Sequence[float] | None = None,
    label_smoothing: float = 0.0,
    discopop_tau: float = 0.05,
    compute_nll_loss: bool = False,
    alpha: float = 1.0,
    average_log_prob: bool = False,
    f_divergence_type: str = "reverse_kl",
    f_alpha_divergence_coef: float = 0.5,
    ld_alpha: float | None = None,
    use_weighting: bool = False,
    use_ref_model: bool | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
    logits_budget: int | float | str | None = None,
    logits_dtype: torch.dtype | None = None,
) -> tuple[Tensor, PreferenceMetrics]:
    """Compute `LigerFusedLinearDPOLoss`: `-log sigmoid(beta * (chosen - rejected))` of log-ratios in nats.

    `input` is (2 n, T, H), `target` (2 n, T), chosen sequences first.

    >>> import torch
    >>> weight, hidden = torch.randn(11, 4), torch.randn(2, 3, 4)       # one pair of three tokens
    >>> target = torch.tensor([[1, 2, 3], [4, 5, -100]])
    >>> loss, metrics = dpo_loss(weight, hidden, target, ref_logps=torch.zeros(2), beta=0.2)
    >>> margin = metrics.chosen_rewards - metrics.rejected_rewards
    >>> bool(torch.isclose(loss, -torch.nn.functional.logsigmoid(margin).mean()))
    True
    """

def draft_loss(
    weight: Weight,
    input: Tensor,
    teacher_weight: Weight,
    teacher_input: Tensor,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    *,
    teacher_rows: Tensor | None = None,
    mask: Tensor | None = None,
    position_weight: Tensor | None = None,
    num_items: float | Tensor | None = None,
    draft_ids: Tensor | None = None,
    divergence: DraftDivergenceName = "kl",
    beta: float | None = None,
    renormalize: bool = False,
    skip_outside: bool = False,
    step_decay: float = 1.0,
    teacher_options: LogitOptions | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
    logits_budget: int | float | str | None = None,
    logits_dtype: torch.dtype | None = None,
) -> tuple[Tensor, DraftMetrics]:
    """Compute `LigerFusedLinearDraftLoss`: the divergence of a draft for speculative decoding from its teacher.

    `input` is (K, B, T, H) or (K, N, H), K steps of the draft; `teacher_input` (B, T, H) or (N, H); H may differ.

    >>> import torch
    >>> weight, hidden = torch.randn(5, 4), torch.randn(2, 3, 4)  # two steps at three positions
    >>> teacher_weight, teacher_hidden = torch.randn(11, 6), torch.randn(3, 6)
    >>> ids = torch.tensor([0, 2, 3, 7, 8])
    >>> loss, metrics = draft_loss(weight, hidden, teacher_weight, teacher_hidden, draft_ids=ids, divergence="tvd")
    >>> bool(torch.isclose(loss, (1 - metrics.acceptance).sum()))
    True
    """

def grpo_loss(
    weight: Weight,
    input: Tensor,
    target: Tensor,
    advantages: Tensor,
    bias: Tensor | None = None,
    *,
    attention_mask: Tensor | None = None,
    old_logps: Tensor | None = None,
    ref_logps: Tensor | None = None,
    ref_input: Tensor | None = None,
    ref_weight: Weight | None = None,
    ref_bias: Tensor | None = None,
    importance_weights: Tensor | None = None,
    num_items: float | Tensor | None = None,
    accumulation_steps: int | None = None,
    temperature: float | Tensor = 1.0,
    kept: KeptIds | None = None,
    vocab_shard: VocabShard | None = None,
    cu_seqlens: Tensor | None = None,
    sequence_group: ProcessGroup | None = None,
    beta: float = 0.0,
    surrogate: str | Surrogate = "clip",
    reduction: str = "grpo",
    importance_level: str = "token",
    max_completion_length: int | None = None,
    kl_estimator: str = "k3",
    use_bias_correction_kl: bool = True,
    off_policy_mask_threshold: float | None = None,
    entropy_coef: float = 0.0,
    top_entropy_quantile: float = 1.0,
    sampler_kl_coef: float = 0.0,
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    delta: float | None = None,
    cispo_epsilon_low: float = 0.0,
    sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.05,
    vespo_k_pos: float = 2.0,
    vespo_lambda_pos: float = 3.0,
    vespo_k_neg: float = 3.0,
    vespo_lambda_neg: float = 2.0,
    clip_cov_ratio: float = 0.0002,
    clip_cov_lb: float = 1.0,
    clip_cov_ub: float = 5.0,
    kl_cov_ratio: float = 0.0002,
    ppo_kl_coef: float = 1.0,
    ratio_max: float | None = 20.0,
    ipo_threshold: float = 0.1,
    fipo_half_life: float = 32.0,
    fipo_clip_low: float = 0.0,
    fipo_clip_high: float = 0.2,
    fipo_safety_ratio: float | None = 4.0,
    group_size: int | None = None,
    real_temperature: float = 0.5,
    a2po_beta: float = 0.001,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    logits_budget: int | float | str | None = None,
    logits_dtype: torch.dtype | None = None,
) -> tuple[Tensor, PolicyMetrics]:
    """Compute `LigerFusedLinearGRPOLoss`, or a variant by `surrogate` and `reduction`.

    `input` is (B, T, H), `target` (B, T), `advantages` (B,), (B, 1) or (B, T).

    >>> import torch
    >>> weight, hidden = torch.randn(11, 4), torch.randn(2, 3, 4)       # two completions of up to three tokens
    >>> target, advantages = torch.tensor([[1, 2, 3], [4, 5, -100]]), torch.tensor([1.0, -1.0])
    >>> loss, metrics = grpo_loss(weight, hidden, target, advantages, reduction="dapo", epsilon_high=0.28)
    >>> metrics.clip_ratio.item()        # on-policy
    0.0
    """

def jsd_loss(
    weight: Weight,
    input: Tensor,
    teacher_weight: Weight | None = None,
    teacher_input: Tensor | None = None,
    target: Tensor | None = None,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    *,
    teacher_logps: Tensor | None = None,
    teacher_ids: Tensor | None = None,
    teacher: TeacherTopK | None = None,
    mask: Tensor | None = None,
    num_items: float | Tensor | None = None,
    vocab_shard: VocabShard | None = None,
    sequence_group: ProcessGroup | None = None,
    beta: float = 0.5,
    weight_hard_loss: float = 0.5,
    weight_soft_loss: float = 0.5,
    reduction: str = "mean",
    teacher_options: LogitOptions | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
    logits_budget: int | float | str | None = None,
    logits_dtype: torch.dtype | None = None,
) -> tuple[Tensor, DistillationMetrics]:
    """Compute `LigerFusedLinearJSDLoss`: the generalized Jensen-Shannon divergence.

    Shapes are as in `kl_div_loss`.

    >>> import torch
    >>> weight, hidden, target = torch.randn(11, 4), torch.randn(2, 3, 4), torch.tensor([[1, 2, 3], [4, 5, -100]])
    >>> teacher_weight, teacher_hidden = torch.randn(11, 6), torch.randn(2, 3, 6)
    >>> loss, metrics = jsd_loss(weight, hidden, teacher_weight, teacher_hidden, target, beta=0.1, temperature=2.0)
    >>> bool(torch.isclose(loss, 0.5 * metrics.soft_loss + 0.5 * metrics.hard_loss))
    True
    """

def kl_div_loss(
    weight: Weight,
    input: Tensor,
    teacher_weight: Weight | None = None,
    teacher_input: Tensor | None = None,
    target: Tensor | None = None,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    *,
    teacher_logps: Tensor | None = None,
    teacher_ids: Tensor | None = None,
    teacher: TeacherTopK | None = None,
    mask: Tensor | None = None,
    num_items: float | Tensor | None = None,
    vocab_shard: VocabShard | None = None,
    sequence_group: ProcessGroup | None = None,
    reverse: bool = False,
    skew: float = 0.0,
    weight_hard_loss: float = 0.5,
    weight_soft_loss: float = 0.5,
    reduction: str = "mean",
    teacher_options: LogitOptions | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
    logits_budget: int | float | str | None = None,
    logits_dtype: torch.dtype | None = None,
) -> tuple[Tensor, DistillationMetrics]:
    """Compute `LigerFusedLinearKLDivLoss`: `KL(teacher || student)`, or with `reverse` `KL(student || teacher)`.

    `input` and `teacher_input` are (B, T, H) or (N, H); H may differ.

    >>> import torch
    >>> weight, hidden, target = torch.randn(11, 4), torch.randn(2, 3, 4), torch.tensor([[1, 2, 3], [4, 5, -100]])
    >>> teacher_weight, teacher_hidden = torch.randn(11, 6), torch.randn(2, 3, 6)
    >>> loss, metrics = kl_div_loss(weight, hidden, teacher_weight, teacher_hidden, target, reverse=True)
    >>> bool(torch.isclose(loss, 0.5 * metrics.soft_loss + 0.5 * metrics.hard_loss))
    True
    """

def kto_loss(
    weight: Weight,
    input: Tensor,
    target: Tensor,
    preference_labels: Tensor,
    bias: Tensor | None = None,
    ref_input: Tensor | None = None,
    ref_weight: Weight | None = None,
    ref_bias: Tensor | None = None,
    *,
    ref_logps: Tensor | None = None,
    kl: float | Tensor | None = None,
    kl_input: Tensor | None = None,
    kl_target: Tensor | None = None,
    ref_kl_input: Tensor | None = None,
    ref_kl_logps: Tensor | None = None,
    delta: float | Tensor | None = None,
    example_weights: Tensor | None = None,
    vocab_shard: VocabShard | None = None,
    cu_seqlens: Tensor | None = None,
    sequence_group: ProcessGroup | None = None,
    beta: float = 0.1,
    loss_type: str = "kto",
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    average_log_prob: bool = False,
    use_ref_model: bool | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
    logits_budget: int | float | str | None = None,
    logits_dtype: torch.dtype | None = None,
) -> tuple[Tensor, UnpairedPreferenceMetrics]:
    """Compute `LigerFusedLinearKTOLoss`: `1 - sigmoid(beta * (log-ratio - kl))`, with the sign of the label.

    `input` is (n, T, H), `target` (n, T), `preference_labels` (n,) bool.

    >>> import torch
    >>> weight, hidden = torch.randn(11, 4), torch.randn(2, 3, 4)       # a desirable and an undesirable sequence
    >>> target, labels = torch.tensor([[1, 2, 3], [4, 5, -100]]), torch.tensor([True, False])
    >>> loss, metrics = kto_loss(weight, hidden, target, labels, ref_logps=torch.zeros(2), kl=0.5)
    >>> metrics.reference_point.item()
    0.5
    """

def on_policy_distillation_loss(
    weight: Weight,
    input: Tensor,
    teacher_weight: Weight | None = None,
    teacher_input: Tensor | None = None,
    target: Tensor | None = None,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    *,
    teacher_logps: Tensor | None = None,
    advantages: Tensor | None = None,
    attention_mask: Tensor | None = None,
    old_logps: Tensor | None = None,
    importance_weights: Tensor | None = None,
    num_items: float | Tensor | None = None,
    kept: KeptIds | None = None,
    vocab_shard: VocabShard | None = None,
    cu_seqlens: Tensor | None = None,
    sequence_group: ProcessGroup | None = None,
    kl_coef: float = 1.0,
    epsilon_low: float = math.inf,
    epsilon_high: float = math.inf,
    surrogate: str | Surrogate = "clip",
    ratio_max: float = 2.0,
    student: str = "old",
    prefix_weight: float = 0.0,
    reduction: str = "token-mean",
    max_completion_length: int | None = None,
    teacher_options: LogitOptions | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
    logits_budget: int | float | str | None = None,
    logits_dtype: torch.dtype | None = None,
) -> tuple[Tensor, PolicyMetrics]:
    """Compute `LigerFusedLinearOnPolicyDistillationLoss`: the reverse KL, estimated from sampled tokens.

    `input` and `teacher_input` are (B, T, H); H may differ.

    >>> import torch
    >>> weight, hidden, target = torch.randn(11, 4), torch.randn(2, 3, 4), torch.tensor([[1, 2, 3], [4, 5, -100]])
    >>> loss, metrics = on_policy_distillation_loss(weight, hidden, target=target, teacher_logps=torch.zeros(2, 3))
    >>> bool(torch.isclose(loss, metrics.kl))
    True
    """

def orpo_loss(
    weight: Weight,
    input: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ref_input: Tensor | None = None,
    ref_weight: Weight | None = None,
    ref_bias: Tensor | None = None,
    *,
    ref_logps: Tensor | None = None,
    nll_target: Tensor | None = None,
    example_weights: Tensor | None = None,
    vocab_shard: VocabShard | None = None,
    cu_seqlens: Tensor | None = None,
    sequence_group: ProcessGroup | None = None,
    beta: float = 0.1,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
    logits_budget: int | float | str | None = None,
    logits_dtype: torch.dtype | None = None,
) -> tuple[Tensor, PreferenceMetrics]:
    """Compute `LigerFusedLinearORPOLoss`: `nll - beta * log sigmoid(log odds(chosen) - log odds(rejected))`.

    Shapes are as in `dpo_loss`.

    >>> import torch
    >>> weight, hidden = torch.randn(11, 4), torch.randn(2, 3, 4)       # one pair of three tokens
    >>> target = torch.tensor([[1, 2, 3], [4, 5, -100]])
    >>> loss, metrics = orpo_loss(weight, hidden, target, beta=0.1)
    >>> bool(loss > metrics.nll_loss)
    True
    """

def simpo_loss(
    weight: Weight,
    input: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ref_input: Tensor | None = None,
    ref_weight: Weight | None = None,
    ref_bias: Tensor | None = None,
    *,
    ref_logps: Tensor | None = None,
    nll_target: Tensor | None = None,
    example_weights: Tensor | None = None,
    vocab_shard: VocabShard | None = None,
    cu_seqlens: Tensor | None = None,
    sequence_group: ProcessGroup | None = None,
    beta: float = 0.1,
    gamma: float = 0.5,
    alpha: float = 1.0,
    compute_nll_loss: bool = False,
    label_smoothing: float = 0.0,
    loss_type: str = "sigmoid",
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
    logits_budget: int | float | str | None = None,
    logits_dtype: torch.dtype | None = None,
) -> tuple[Tensor, PreferenceMetrics]:
    """Compute `LigerFusedLinearSimPOLoss`: `-log sigmoid(beta * (chosen - rejected) - gamma)` of means over tokens.

    Shapes are as in `dpo_loss`.

    >>> import torch
    >>> weight, hidden = torch.randn(11, 4), torch.randn(2, 3, 4)       # one pair of three tokens
    >>> target = torch.tensor([[1, 2, 3], [4, 5, -100]])
    >>> loss, metrics = simpo_loss(weight, hidden, target, beta=2.0, gamma=0.5)
    >>> margin = metrics.chosen_rewards - metrics.rejected_rewards - 0.5
    >>> bool(torch.isclose(loss, -torch.nn.functional.logsigmoid(margin).mean()))
    True
    """

def tvd_loss(
    weight: Weight,
    input: Tensor,
    teacher_weight: Weight | None = None,
    teacher_input: Tensor | None = None,
    target: Tensor | None = None,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    *,
    teacher_logps: Tensor | None = None,
    teacher_ids: Tensor | None = None,
    teacher: TeacherTopK | None = None,
    mask: Tensor | None = None,
    num_items: float | Tensor | None = None,
    vocab_shard: VocabShard | None = None,
    sequence_group: ProcessGroup | None = None,
    weight_hard_loss: float = 0.5,
    weight_soft_loss: float = 0.5,
    reduction: str = "mean",
    teacher_options: LogitOptions | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
    logits_budget: int | float | str | None = None,
    logits_dtype: torch.dtype | None = None,
) -> tuple[Tensor, DistillationMetrics]:
    """Compute `LigerFusedLinearTVDLoss`: the total variation distance `sum(|p - q|) / 2`.

    Shapes are as in `kl_div_loss`.

    >>> import torch
    >>> weight, hidden, target = torch.randn(11, 4), torch.randn(2, 3, 4), torch.tensor([[1, 2, 3], [4, 5, -100]])
    >>> teacher_weight, teacher_hidden = torch.randn(11, 6), torch.randn(2, 3, 6)
    >>> loss, metrics = tvd_loss(weight, hidden, teacher_weight, teacher_hidden)
    >>> bool(0 <= metrics.soft_loss <= 1)
    True
    """

def uld_loss(
    weight: Weight,
    input: Tensor,
    teacher_weight: Weight,
    teacher_input: Tensor,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    *,
    scale: Tensor | None = None,
    teacher_scale: Tensor | None = None,
    mask: Tensor | None = None,
    num_items: float | Tensor | None = None,
    vocab_shard: VocabShard | None = None,
    teacher_options: LogitOptions | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
    logits_budget: int | float | str | None = None,
    logits_dtype: torch.dtype | None = None,
) -> tuple[Tensor, DistillationMetrics]:
    """Compute `LigerFusedLinearULDLoss`: the Wasserstein-1 distance of sorted probabilities.

    `input` and `teacher_input` are (B, T, H) or (N, H); H and vocabulary may differ.

    >>> import torch
    >>> weight, hidden = torch.randn(11, 4), torch.randn(3, 4)
    >>> teacher_weight, teacher_hidden = torch.randn(17, 6), torch.randn(3, 6)
    >>> loss, metrics = uld_loss(weight, hidden, teacher_weight, teacher_hidden, temperature=2.0)
    >>> bool(0 <= loss <= 2)
    True
    """
