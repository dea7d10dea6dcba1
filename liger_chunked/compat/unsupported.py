"""Refuses Liger-Kernel's unsupported names and arguments."""

from __future__ import annotations

from typing import NoReturn

from torch import Tensor

from liger_chunked.types import shown

_NO_KERNEL = "liger_chunked has no such kernel; Liger-Kernel's liger_kernel has it"
_NO_PARTS = (
    "forward and backward are not separate here; call the functions of liger_chunked.compat.transformers.functional"
)
_ADVICE: dict[str, str] = {
    _NO_KERNEL: """
        LigerDyT LigerFalconH1MLP LigerMHC LigerMLP LigerModulatedRMSNorm LigerMultiTokenAttention LigerPolyNorm
        LigerReLUSquared LigerSoftmax LigerSparsemax liger_llama4_text_rotary_pos_emb
        liger_llama4_vision_rotary_pos_emb
        liger_attn_res liger_dyt liger_fused_neighborhood_attention liger_group_norm liger_mhc_apply liger_mhc_coeffs
        liger_mhc_forward liger_mhc_post_res liger_mhc_pre liger_modulated_rms_norm liger_multi_token_attention
        liger_poly_norm liger_relu_squared liger_softmax liger_sparsemax
        LigerAttnResFunction LigerDyTFunction LigerEmbeddingFunction LigerFusedNeighborhoodAttentionFunction
        LigerGroupNormFunction LigerLlama4RopeFunction LigerMHCCoeffsFunction LigerMHCPostResFunction
        LigerMHCPreFunction LigerMLPFunction LigerModulatedRMSNormFunction LigerMultiTokenAttentionFunction
        LigerPolyNormFunction LigerReLUSquaredFunction LigerSoftmaxFunction LigerSparsemaxFunction
    """,
    _NO_PARTS: """
        attn_res_backward attn_res_forward cross_entropy_backward cross_entropy_forward fused_add_rms_norm_backward
        fused_add_rms_norm_forward fused_ce_tvd_backward fused_ce_tvd_forward fused_linear_cross_entropy_backward
        fused_linear_cross_entropy_forward fused_linear_jsd_backward fused_linear_jsd_forward
        fused_linear_kl_div_backward fused_linear_kl_div_forward geglu_backward geglu_forward group_norm_backward
        group_norm_forward jsd_backward jsd_forward layer_norm_backward layer_norm_forward
        modulated_rms_norm_backward modulated_rms_norm_forward poly_norm_backward poly_norm_forward
        relu_squared_backward relu_squared_forward rms_norm_backward rms_norm_forward rope_backward rope_forward
        swiglu_backward swiglu_forward
    """,
    "liger_chunked.apply_liger_kernel(model) serves the layers of a model without such a name": """
        LigerFusedMoEFunction LigerQwen2VLMRopeFunction liger_qwen2vl_mrope
        liger_rotary_pos_emb_gpt_oss liger_rotary_pos_emb_vision liger_multimodal_rotary_pos_emb
    """,
    "use liger_chunked.LigerFusedLinearTVDLoss, which takes the head's weight instead of logits": """
        LigerFusedCETVDLoss LigerFusedCETVDFunction
    """,
    "use liger_chunked.LigerFusedLinearKLDivLoss, whose target comes from a teacher's states": """
        LigerFusedLinearKLDivLoss LigerFusedLinearKLDivFunction liger_fused_linear_kl_div
    """,
    "use liger_chunked.LigerFusedLinearCrossEntropyLoss with vocab_shard": """
        LigerVocabParallelCrossEntropy LigerVocabParallelCEFunction
    """,
    "use liger_chunked.linear_token_stats, with vocab_shard for a split head": """
        LigerFusedLinearScaledCrossEntropyFunction LigerFusedLinearScaledCrossEntropyTPFunction
        liger_fused_linear_scaled_cross_entropy_tp
    """,
    "use liger_chunked.LigerFusedLinearGRPOLoss, which takes hidden states instead of logits": """
        GrpoLossFunction triton_grpo_loss fused_selective_log_softmax
    """,
    "use liger_chunked.LigerFusedLinearPreferenceBase, see docs/writing-a-loss.md": "LigerFusedLinearPreferenceBase",
    "use liger_chunked.LigerFusedLinearUnpairedPreferenceBase, see docs/writing-a-loss.md": """
        LigerFusedLinearUnpairedPreferenceBase
    """,
    "use liger_chunked.LigerFusedLinearPolicyBase, see docs/writing-a-loss.md": "LigerFusedLinearPPOBase",
    "use liger_chunked.LigerFusedLinearDistillationBase, see docs/writing-a-loss.md": """
        LigerFusedLinearDistillationBase
    """,
    "liger_chunked chooses its kernels by device": """
        available_backends available_impls get_backend get_impl set_backend set_impl
    """,
}
MISSING: dict[str, str] = {name: advice for advice, names in _ADVICE.items() for name in names.split()}


def refuse(name: str, value: object, reason: str) -> None:
    if isinstance(value, Tensor) or value:
        raise NotImplementedError(f"{name}={shown(value)} is not supported: {reason}")


def missing(module: str, name: str) -> NoReturn:
    """Refuse a name of a module.

    Raises:
        ImportError: Liger-Kernel has the name; `from ... import` loses the message of an AttributeError.
        AttributeError: Liger-Kernel has no such name.
    """
    if name in MISSING:
        raise ImportError(f"{name} is not supported: {MISSING[name]}")
    raise AttributeError(f"module {module!r} has no attribute {name!r}")
