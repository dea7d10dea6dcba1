"""The functions of `liger_kernel.chunked_loss.functional`, by position."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from liger_chunked.compat import chunked_loss as modules
from liger_chunked.compat.unsupported import missing

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

_PAIR = "_input lin_weight target bias"
_REF = "ref_input ref_weight ref_bias"
_STUDENT = "student_input student_weight teacher_input teacher_weight true_labels student_bias teacher_bias"
_POLICY = "_input lin_weight selected_token_ids attention_mask advantages bias ref_per_token_logps old_per_token_logps"
_VESPO = "vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg"
_DISTILLATION = (
    f"{_STUDENT} weight_hard_loss weight_soft_loss beta ignore_index temperature compiled chunk_size "
    "return_soft_hard_loss"
)


def _function(module: type[nn.Module], order: str, **defaults: Any) -> Callable[..., Any]:
    """Return a function of a module's tensors and settings, in Liger-Kernel's order."""
    settings = inspect.signature(module).parameters
    tensors = inspect.signature(module.forward).parameters
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = []
    for name in order.split():
        default = defaults.get(name, {**settings, **tensors}[name].default)
        parameters.append(inspect.Parameter(name.replace("lin_weight", "weight"), kind, default=default))
    signature = inspect.Signature(parameters)

    def function(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        arguments = {"lin_weight" if name == "weight" else name: value for name, value in given.arguments.items()}
        loss = module(**{name: arguments.pop(name) for name in settings if name in arguments})
        return loss(**arguments)

    function.__doc__ = f"Evaluate `{module.__name__}`."
    vars(function)["__signature__"] = signature
    return function


def applied(name: str, module: str, function: Callable[..., Any]) -> Any:
    """Return a class with `function` as `apply`, like an autograd function."""
    return type(name, (), {"__module__": module, "__doc__": function.__doc__, "apply": staticmethod(function)})


liger_fused_linear_dpo = _function(
    modules.LigerFusedLinearDPOLoss,
    f"{_PAIR} {_REF} ignore_index beta compute_nll_loss compiled use_ref_model average_log_prob chunk_size loss_type "
    "label_smoothing discopop_tau alpha",
)
liger_fused_linear_orpo = _function(
    modules.LigerFusedLinearORPOLoss,
    f"{_PAIR} ignore_index beta compute_nll_loss nll_target compiled chunk_size",
)
liger_fused_linear_cpo = _function(
    modules.LigerFusedLinearCPOLoss,
    f"{_PAIR} ignore_index beta alpha label_smoothing compute_nll_loss compiled average_log_prob chunk_size",
)
liger_fused_linear_simpo = _function(
    modules.LigerFusedLinearSimPOLoss,
    f"{_PAIR} ignore_index beta alpha label_smoothing compute_nll_loss compiled gamma chunk_size",
    compute_nll_loss=False,
)
liger_fused_linear_kto = _function(
    modules.LigerFusedLinearKTOLoss,
    f"_input lin_weight target preference_labels bias {_REF} kl ignore_index beta compiled use_ref_model "
    "average_log_prob chunk_size",
    use_ref_model=True,
)
liger_fused_linear_grpo = _function(
    modules.LigerFusedLinearGRPOLoss,
    f"{_POLICY} {_REF} beta epsilon_low epsilon_high loss_type max_completion_length importance_sampling_level "
    "sapo_temperature_pos sapo_temperature_neg temperature compiled use_ref_model chunk_size vllm_is_ratio delta "
    f"use_bias_correction_kl {_VESPO} num_items_in_batch",
)
liger_fused_linear_jsd = _function(modules.LigerFusedLinearJSDLoss, _DISTILLATION)
liger_fused_linear_cosine = _function(modules.LigerFusedLinearCosineSimilarityLoss, _DISTILLATION)


LigerFusedLinearDPOFunction = applied("LigerFusedLinearDPOFunction", __name__, liger_fused_linear_dpo)
LigerFusedLinearORPOFunction = applied("LigerFusedLinearORPOFunction", __name__, liger_fused_linear_orpo)
LigerFusedLinearCPOFunction = applied("LigerFusedLinearCPOFunction", __name__, liger_fused_linear_cpo)
LigerFusedLinearSimPOFunction = applied("LigerFusedLinearSimPOFunction", __name__, liger_fused_linear_simpo)
LigerFusedLinearKTOFunction = applied("LigerFusedLinearKTOFunction", __name__, liger_fused_linear_kto)
LigerFusedLinearGRPOFunction = applied("LigerFusedLinearGRPOFunction", __name__, liger_fused_linear_grpo)
LigerFusedLinearJSDFunction = applied("LigerFusedLinearJSDFunction", __name__, liger_fused_linear_jsd)
LigerFusedLinearCosineSimilarityFunction = applied(
    "LigerFusedLinearCosineSimilarityFunction", __name__, liger_fused_linear_cosine
)


def __getattr__(name: str) -> Any:
    return missing(__name__, name)
