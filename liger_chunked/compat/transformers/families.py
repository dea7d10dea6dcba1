"""`apply_liger_kernel_to_<family>`, with the positions of Liger-Kernel's arguments."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn

from liger_chunked.compat.unsupported import refuse

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from liger_chunked.integrations.transformers.report import Applied


INTEGRATION = "liger_chunked.integrations.transformers"
APPLY = "apply_liger_kernel_to_"
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


class FamilyFunction(Protocol):
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
    ) -> Applied | None: ...


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
    return import_module(INTEGRATION).family_function(model_type)(**kwargs)


def _apply_liger_kernel_to_instance(model: nn.Module, **kwargs: Any) -> Any:
    return import_module(INTEGRATION).apply_liger_kernel(model, **kwargs)


def family_function(name: str) -> Callable[..., Any]:
    family = name.removeprefix(APPLY)
    try:
        apply = getattr(import_module(INTEGRATION), name)
    except AttributeError as unknown:
        if family not in ORDERS:
            raise AttributeError(f"module {__package__!r} has no attribute {name!r}: {unknown}") from None
        raise ImportError(
            f"{name}: the installed transformers {version('transformers')} has no family {family!r}; install a version "
            "that has it"
        ) from None
    return _positional(apply, family) if family in ORDERS else apply


@functools.cache
def functions_by_type() -> dict[str, Callable[..., Any]]:
    functions = {}
    for model_type, family in {**{family: family for family in ORDERS}, **_INNER}.items():
        try:
            functions[model_type] = family_function(f"{APPLY}{family}")
        except ImportError:
            continue
    return functions
