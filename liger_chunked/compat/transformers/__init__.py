"""The signatures of `liger_kernel.transformers` over our kernels and models."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from liger_chunked import kernels, losses, modules
from liger_chunked.calls import typed_like
from liger_chunked.compat.settings import Loss
from liger_chunked.compat.transformers.mlp import (
    LigerBlockSparseTop2MLP,
    LigerExperts,
    LigerFalconH1SwiGLUMLP,
    LigerGEGLUMLP,
    LigerGEGLUMLPForGemma4,
    LigerPhi3SwiGLUMLP,
    LigerTiledGEGLUMLP,
    LigerTiledSwiGLUMLP,
)
from liger_chunked.compat.unsupported import missing, refuse
from liger_chunked.kernels.logits_stats import row_stats
from liger_chunked.kernels.rms_norm import Casting
from liger_chunked.modules import LigerSwiGLUMLP, Reduction
from liger_chunked.types import LogitOptions, shown

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from liger_chunked.integrations.transformers import (
        AutoLigerKernelForCausalLM as AutoLigerKernelForCausalLM,
    )
    from liger_chunked.integrations.transformers import (
        AutoLigerKernelForImageTextToText as AutoLigerKernelForImageTextToText,
    )
    from liger_chunked.integrations.transformers.report import Applied

    MODEL_TYPE_TO_APPLY_LIGER_FN: dict[str, _FamilyFunction]

__all__ = [
    "CrossEntropyOutput",
    "LigerBlockSparseTop2MLP",
    "LigerCrossEntropyLoss",
    "LigerExperts",
    "LigerFalconH1SwiGLUMLP",
    "LigerFusedAddRMSNorm",
    "LigerFusedLinearCrossEntropyLoss",
    "LigerFusedLinearJSD",
    "LigerGEGLUMLP",
    "LigerGEGLUMLPForGemma4",
    "LigerJSD",
    "LigerKLDIVLoss",
    "LigerLayerNorm",
    "LigerPhi3SwiGLUMLP",
    "LigerQwen3MoeSwiGLUMLP",
    "LigerRMSNorm",
    "LigerRMSNormForGemma",
    "LigerRMSNormForGemma2",
    "LigerRMSNormForGemma3",
    "LigerRMSNormForGemma4",
    "LigerRMSNormForGlm4",
    "LigerRMSNormForMuseGlimmer",
    "LigerRMSNormForMuseGlimmerTextCentered",
    "LigerRMSNormForOlmo2",
    "LigerRMSNormForQwen3Next",
    "LigerSwiGLUMLP",
    "LigerSwiGLUMLPForMuseGlimmer",
    "LigerTVDLoss",
    "LigerTiledGEGLUMLP",
    "LigerTiledSwiGLUMLP",
    "is_transformers_available",
    "liger_rotary_pos_emb",
]

LigerQwen3MoeSwiGLUMLP: TypeAlias = LigerSwiGLUMLP
LigerSwiGLUMLPForMuseGlimmer: TypeAlias = LigerSwiGLUMLP
_CASTINGS: dict[str, Casting] = {"llama": "llama", "gemma": "gemma"}
_INITIAL: dict[str, Callable[[int], Tensor]] = {"ones": torch.ones, "zeros": torch.zeros}


def _initial(init_fn: str, hidden_size: int) -> nn.Parameter:
    if init_fn not in _INITIAL:
        raise ValueError(f"init_fn must be one of {list(_INITIAL)}, got {shown(init_fn)}")
    return nn.Parameter(_INITIAL[init_fn](hidden_size))


def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float = 1e-6, offset: float = 0.0, casting_mode: str = "llama"
) -> Tensor:
    """Return the RMSNorm; with `casting_mode="none"`, in PyTorch and in the input's dtype throughout."""
    if casting_mode in _CASTINGS:
        return kernels.liger_rms_norm(x, weight, eps, offset=offset, casting=_CASTINGS[casting_mode])
    if casting_mode != "none":
        raise ValueError(f"casting_mode must be one of {[*_CASTINGS, 'none']}, got {shown(casting_mode)}")
    y = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)
    return y if weight is None else y * (offset + weight)


def fused_add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting_mode: str = "llama",
) -> tuple[Tensor, Tensor]:
    if casting_mode in _CASTINGS:
        casting = _CASTINGS[casting_mode]
        return kernels.liger_rms_norm(x, weight, eps, offset=offset, casting=casting, residual=residual)
    total = x + residual
    return rms_norm(total, weight, eps, offset, casting_mode), total


class LigerRMSNorm(nn.Module):
    """RMSNorm, with a weight if `elementwise_affine`; see `liger_chunked.liger_rms_norm`.

    Args:
        casting_mode: "llama", "gemma", or "none", which computes in the input's dtype.
    """

    weight: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "llama",
        init_fn: str = "ones",
        in_place: bool = True,
        row_mode: bool | None = None,
        elementwise_affine: bool = True,
    ) -> None:
        super().__init__()
        if casting_mode not in (*_CASTINGS, "none"):
            raise ValueError(f"casting_mode must be one of {[*_CASTINGS, 'none']}, got {shown(casting_mode)}")
        self.register_parameter("weight", _initial(init_fn, hidden_size) if elementwise_affine else None)
        self.variance_epsilon = eps
        self.offset = offset
        self.casting_mode = casting_mode

    def forward(self, hidden_states: Tensor) -> Tensor:
        return rms_norm(hidden_states, self.weight, self.variance_epsilon, self.offset, self.casting_mode)

    if TYPE_CHECKING:

        @typed_like(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def extra_repr(self) -> str:
        shape = None if self.weight is None else tuple(self.weight.shape)
        return f"{shape}, eps={self.variance_epsilon}, offset={self.offset}, casting_mode={self.casting_mode!r}"


class LigerFusedAddRMSNorm(LigerRMSNorm):
    """Return `(norm of the sum, sum)` of hidden states and a residual."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "llama",
        init_fn: str = "ones",
        in_place: bool = False,
    ) -> None:
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn)

    def forward(self, hidden_states: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return fused_add_rms_norm(
            hidden_states, residual, self.weight, self.variance_epsilon, self.offset, self.casting_mode
        )

    if TYPE_CHECKING:

        @typed_like(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...  # type: ignore[override]


class LigerRMSNormForGemma(LigerRMSNorm):
    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 1.0,
        casting_mode: str = "gemma",
        init_fn: str = "zeros",
        in_place: bool = False,
        row_mode: bool | None = None,
    ) -> None:
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn)


LigerRMSNormForGemma2 = LigerRMSNormForQwen3Next = LigerRMSNormForMuseGlimmerTextCentered = LigerRMSNormForGemma
LigerRMSNormForGlm4 = LigerRMSNormForOlmo2 = LigerRMSNorm


class LigerRMSNormForGemma3(LigerRMSNorm):
    def __init__(
        self,
        dim: int,
        eps: float = 1e-6,
        offset: float = 1.0,
        casting_mode: str = "gemma",
        init_fn: str = "zeros",
        in_place: bool = False,
    ) -> None:
        super().__init__(dim, eps, offset, casting_mode, init_fn)


class LigerRMSNormForGemma4(LigerRMSNorm):
    """RMSNorm in float32, with a weight if `with_scale`."""

    def __init__(
        self,
        dim: int | None = None,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "gemma",
        init_fn: str = "ones",
        in_place: bool = False,
        with_scale: bool = True,
    ) -> None:
        super().__init__(dim, eps, offset, casting_mode, init_fn, elementwise_affine=with_scale)  # type: ignore[arg-type]


LigerRMSNormForMuseGlimmer = LigerRMSNormForGemma4


class LigerLayerNorm(nn.Module):
    """LayerNorm; see `liger_chunked.liger_layer_norm`.

    The bias is always trainable; `bias` initialises it randomly, not with 0.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        bias: bool = False,
        init_fn: str = "ones",
        impl: str | None = None,
        mode: str | None = None,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        self.weight = _initial(init_fn, hidden_size)
        self.bias = nn.Parameter(torch.randn(hidden_size) if bias else torch.zeros(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        return kernels.liger_layer_norm(hidden_states, self.weight, self.bias, self.variance_epsilon)

    if TYPE_CHECKING:

        @typed_like(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.variance_epsilon}"


def liger_rotary_pos_emb(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None = None,
    unsqueeze_dim: int = 1,
    rotary_dim: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Apply `liger_chunked.liger_rotary_pos_emb` to the first `rotary_dim` columns of a head.

    The default is the columns of `cos`. Otherwise `cos` and `sin` need only `rotary_dim // 2` columns. `position_ids`
    are read with tables `cos` and `sin`, (positions, R), and ignored otherwise, as Liger-Kernel ignores them.
    """
    if rotary_dim is not None:
        if rotary_dim % 2 or not 0 < rotary_dim <= 2 * cos.shape[-1]:
            raise ValueError(f"rotary_dim must be even and at most twice cos {tuple(cos.shape)}, got {rotary_dim}")
    rows = position_ids if cos.ndim == 2 else None
    return kernels.liger_rotary_pos_emb(q, k, cos, sin, rows, unsqueeze_dim, rotary_dim=rotary_dim)


@dataclass(frozen=True)
class CrossEntropyOutput:
    loss: Tensor
    z_loss: Tensor | None = None
    token_accuracy: Tensor | None = None
    predicted_tokens: Tensor | None = None


class LigerCrossEntropyLoss(Loss):
    """`liger_chunked.LigerCrossEntropyLoss`, in the dtype of the logits, which are not overwritten."""

    def __init__(
        self,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: Literal["mean", "sum", "none"] = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
    ) -> None:
        super().__init__()
        self.loss = modules.LigerCrossEntropyLoss(
            weight,
            ignore_index=ignore_index,
            lse_square_scale=lse_square_scale,
            label_smoothing=label_smoothing,
            reduction=reduction,
            softcap=softcap,
        )

    def forward(self, _input: Tensor, target: Tensor) -> Tensor | CrossEntropyOutput:
        loss = self.loss(_input, target).to(_input.dtype)
        if not (self.return_z_loss or self.return_token_accuracy or self.return_predicted_tokens):
            return loss
        z_loss, accuracy, predicted = self._metrics(_input.detach(), target)
        return CrossEntropyOutput(
            loss,
            z_loss.to(_input.dtype) if self.return_z_loss else None,
            accuracy if self.return_token_accuracy else None,
            predicted if self.return_predicted_tokens else None,
        )

    if TYPE_CHECKING:

        @typed_like(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def _metrics(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        options, valid = LogitOptions(softcap=self.softcap), target != self.ignore_index
        stats = row_stats(logits, target.where(valid, 0).long(), options, ("lse", "argmax"))[1]
        assert stats.lse is not None and stats.argmax is not None
        z_loss = (self.lse_square_scale * stats.lse.square()).where(valid, 0.0)
        predicted = stats.argmax.where(valid, -1)
        correct = (predicted == target).where(valid, False).to(stats.lse.dtype)
        if self.reduction == "none":
            return z_loss, correct, predicted
        n = valid.sum().clamp(min=1)
        return z_loss.sum() / (n if self.reduction == "mean" else 1), correct.sum() / n, predicted


class LigerFusedLinearCrossEntropyLoss(Loss):
    """`losses.LigerFusedLinearCrossEntropyLoss`; `use_token_scaling` is `dft`."""

    def __init__(
        self,
        ce_weight: Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        accum_dtype: torch.dtype | None = None,
        use_token_scaling: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
    ) -> None:
        super().__init__()
        if use_token_scaling:
            refuse("label_smoothing", label_smoothing, "use_token_scaling scales the cross entropy alone")
            refuse("lse_square_scale", lse_square_scale, "use_token_scaling scales the cross entropy alone")
        self.returns_output = return_z_loss or return_token_accuracy or return_predicted_tokens
        # "none" has an accuracy for each token, from the predictions.
        self.accuracy_by_token = return_token_accuracy and reduction == "none"
        self.loss: Any = losses.LigerFusedLinearCrossEntropyLoss(
            ce_weight=ce_weight,
            ignore_index=ignore_index,
            lse_square_scale=lse_square_scale,
            label_smoothing=label_smoothing,
            reduction=reduction,
            softcap=softcap,
            dft=use_token_scaling,
            return_z_loss=return_z_loss,
            return_token_accuracy=return_token_accuracy and not self.accuracy_by_token,
            return_predicted_tokens=return_predicted_tokens or self.accuracy_by_token,
        )

    def forward(
        self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None
    ) -> Tensor | CrossEntropyOutput:
        result = self.loss(lin_weight, _input, target, bias)
        if not self.returns_output:
            return result
        loss, (z_loss, accuracy, predicted) = result
        if self.accuracy_by_token:
            accuracy = ((predicted == target) & (target != self.ignore_index)).to(loss.dtype)
        z_loss = None if z_loss is None else z_loss.to(_input.dtype)
        return CrossEntropyOutput(loss, z_loss, accuracy, predicted if self.return_predicted_tokens else None)

    if TYPE_CHECKING:

        @typed_like(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


class LigerFusedLinearJSD(Loss):
    """`losses.LigerFusedLinearJSDLoss` without a hard loss."""

    def __init__(
        self,
        jsd_beta: float = 0.5,
        ignore_index: int = -100,
        temperature: float = 1.0,
        accum_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.loss = losses.LigerFusedLinearJSDLoss(
            beta=jsd_beta, temperature=temperature, weight_hard_loss=0.0, weight_soft_loss=1.0
        )

    def forward(
        self,
        student_input: Tensor,
        student_weight: Tensor,
        teacher_input: Tensor,
        teacher_weight: Tensor,
        shift_labels: Tensor | None = None,
    ) -> Tensor:
        """Return the mean over tokens not labelled `ignore_index`."""
        if teacher_weight.shape[0] > student_weight.shape[0]:
            raise NotImplementedError(
                f"teacher_weight {tuple(teacher_weight.shape)} with more rows than student_weight "
                f"{tuple(student_weight.shape)} is not supported: cut teacher_weight, or use LigerFusedLinearJSDLoss"
            )
        mask = None if shift_labels is None else shift_labels != self.ignore_index
        loss, _ = self.loss(student_weight, student_input, teacher_weight, teacher_input, mask=mask)
        return loss

    if TYPE_CHECKING:

        @typed_like(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


def _of_one_dtype(student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(student.dtype, teacher.dtype)
    return student.to(dtype), teacher.detach().to(dtype)


class LigerJSD(Loss):
    """`liger_chunked.LigerJSD`, in the dtype of `log_q`."""

    def __init__(self, beta: float = 0.5, ignore_index: int = -100) -> None:
        super().__init__()

    def forward(self, log_q: Tensor, log_p: Tensor, shift_labels: Tensor | None = None) -> Tensor:
        loss = kernels.liger_jsd(
            *_of_one_dtype(log_q, log_p), shift_labels, beta=self.beta, ignore_index=self.ignore_index
        )
        return loss.to(log_q.dtype)

    if TYPE_CHECKING:

        @typed_like(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


class LigerTVDLoss(Loss):
    """`liger_chunked.LigerTVDLoss`."""

    def __init__(self, reduction: Reduction = "batchmean", ignore_index: int = -100) -> None:
        super().__init__()

    def forward(self, p: Tensor, q: Tensor, shift_labels: Tensor | None = None) -> Tensor:
        return kernels.liger_tvd(
            *_of_one_dtype(p, q), shift_labels, reduction=self.reduction, ignore_index=self.ignore_index
        )

    if TYPE_CHECKING:

        @typed_like(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


_EPS = 1e-10


class LigerKLDIVLoss(Loss):
    """`liger_chunked.LigerKLDIVLoss`, where `0 log 0` is 0; another `eps` is the least target in `log`, in PyTorch."""

    def __init__(
        self,
        eps: float = _EPS,
        size_average: bool | None = None,
        reduce: bool | None = None,
        reduction: Reduction = "mean",
        log_target: bool = False,
    ) -> None:
        super().__init__()
        # The deprecated pair, if given, chooses the reduction.
        self.chosen: Any = nn.KLDivLoss(size_average, reduce, reduction).reduction

    def forward(self, y_pred: Tensor, y_true: Tensor) -> Tensor:
        y_pred, y_true = _of_one_dtype(y_pred, y_true)
        if self.eps == _EPS or self.log_target:
            return kernels.liger_kl_div(y_pred, y_true, reduction=self.chosen, log_target=self.log_target)
        terms = y_true * (y_true.clamp(min=self.eps).log() - y_pred)
        if self.chosen == "none":
            return terms
        divisors = {"mean": terms.numel(), "batchmean": terms.shape[0], "sum": 1}
        return terms.sum() / divisors[self.chosen]

    if TYPE_CHECKING:

        @typed_like(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


_INTEGRATION = "liger_chunked.integrations.transformers"
_APPLY = "apply_liger_kernel_to_"
_LOSSES = ("cross_entropy", "fused_linear_cross_entropy")
_SWIGLU = ("rope", *_LOSSES, "rms_norm", "swiglu", "model")
_GEGLU = ("rope", *_LOSSES, "rms_norm", "geglu", "model")
# Liger-Kernel's families, by the order of arguments of their functions.
_FAMILIES: dict[tuple[str, ...], str] = {
    _SWIGLU: "deepseek_v2 deepseek_v3 deepseek_v4 exaone4 falcon_h1 glm4 glm4v glm4v_moe gpt_oss granite "
    "hunyuan_v1_dense hunyuan_v1_moe llama ministral mistral mixtral olmo2 olmo3 phi3 qwen2 qwen2_5_vl qwen3 qwen3_5 "
    "qwen3_5_moe qwen3_moe qwen3_next qwen3_vl qwen3_vl_moe smollm3",
    _GEGLU: "gemma gemma2 gemma3_text gemma4_text",
    ("rope", *_LOSSES, "layer_norm", "rms_norm", "geglu", "model"): "gemma3 gemma4 paligemma",
    ("rope", *_LOSSES, "layer_norm", "rms_norm", "swiglu", "model"): "mllama muse_glimmer",
    ("rope", *_LOSSES, "rms_norm", "layer_norm", "swiglu", "model"): "qwen2_vl",
    (*_SWIGLU, "layer_norm"): "llama4",
    (*_LOSSES, "rms_norm", "layer_norm", "model"): "internvl smolvlm",
    (*_LOSSES, "model"): "llava",
    ("relu_squared", *_LOSSES, "model"): "nemotron",
    ("rope", "rms_norm", "swiglu", "model"): "pixtral",
}
_PASSED_ON = ("internvl", "llava", "nemotron", "smolvlm")  # take any switch
ORDERS = {family: order for order, families in _FAMILIES.items() for family in families.split()}
# Language models inside others.
_INNER = {
    "mllama_text_model": "mllama",
    **{
        f"{family}_text": family
        for family in "llama4 qwen2_vl qwen2_5_vl qwen3_5 qwen3_5_moe qwen3_vl qwen3_vl_moe".split()
    },
}


class _FamilyFunction(Protocol):
    def __call__(
        self,
        *switches: bool | PreTrainedModel | None,
        model: PreTrainedModel | None = None,
        rope: bool | None = None,
        rms_norm: bool | None = None,
        layer_norm: bool | None = None,
        swiglu: bool | None = None,
        geglu: bool | None = None,
        relu_squared: bool | None = None,
        cross_entropy: bool | None = None,
        fused_linear_cross_entropy: bool | None = None,
    ) -> Applied: ...


def _positional(apply: Callable[..., Any], family: str) -> Callable[..., Any]:
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(name, kind, default=None) for name in ORDERS[family]]
    if family in _PASSED_ON:
        parameters.append(inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD))
    signature = inspect.Signature(parameters)

    def by_position(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs).arguments
        arguments.update(arguments.pop("kwargs", {}))
        refuse("relu_squared", arguments.pop("relu_squared", None), "no kernel computes it")
        # Liger-Kernel has one switch.
        for switch, other in (("swiglu", "geglu"), ("geglu", "swiglu")):
            if arguments.get(switch) is False:
                arguments.setdefault(other, False)
        return apply(**arguments)

    by_position.__name__ = by_position.__qualname__ = apply.__name__
    by_position.__doc__ = apply.__doc__
    vars(by_position)["__signature__"] = signature
    return by_position


def is_transformers_available() -> bool:
    return find_spec("transformers") is not None


def _apply_liger_kernel(model_type: str, **kwargs: Any) -> Any:
    return import_module(_INTEGRATION).family_function(model_type)(**kwargs)


def _apply_liger_kernel_to_instance(model: nn.Module, **kwargs: Any) -> Any:
    return import_module(_INTEGRATION).apply_liger_kernel(model, **kwargs)


def _family_function(name: str) -> Callable[..., Any]:
    family = name.removeprefix(_APPLY)
    try:
        apply = getattr(import_module(_INTEGRATION), name)
    except AttributeError as unknown:
        if family not in ORDERS:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}: {unknown}") from None
        raise ImportError(
            f"{name}: the installed transformers {version('transformers')} has no family {family!r}; install a version "
            "that has it"
        ) from None
    return _positional(apply, family) if family in ORDERS else apply


@functools.cache
def _functions_by_type() -> dict[str, Callable[..., Any]]:
    functions = {}
    for model_type, family in {**{family: family for family in ORDERS}, **_INNER}.items():
        try:
            functions[model_type] = _family_function(f"{_APPLY}{family}")
        except ImportError:
            continue
    return functions


# For type checkers every other name is an `apply_liger_kernel_to_<family>`, whose positions depend on the family.
def __getattr__(name: str) -> _FamilyFunction:
    value: Any
    if name == "MODEL_TYPE_TO_APPLY_LIGER_FN":
        value = _functions_by_type()
        return value
    if name in ("AutoLigerKernelForCausalLM", "AutoLigerKernelForImageTextToText"):
        return getattr(import_module(_INTEGRATION), name)
    if name.startswith(_APPLY):
        return _family_function(name)
    return missing(__name__, name)


def __dir__() -> list[str]:
    offered = [f"{_APPLY}{family}" for family in ORDERS] + ["AutoLigerKernelForCausalLM"]
    return sorted({*globals(), *(offered if is_transformers_available() else ())})
