"""The table of model families: which layer serves which class of a modeling module.

A row names the norm, the MLP and the classes with an `lm_head` of `modeling_<name>.py`, with layers that compute and
round the same. A tiny config in `tests/model_zoo.py` makes the test suite cover it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from torch import nn

from liger_chunked.integrations.transformers.layers import (
    EXPERTS,
    GLU,
    LAYER_NORM,
    PACKED_GLU,
    RMS_NORM,
    RMS_NORM_FP32,
    RMS_NORM_OFFSET,
    Layer,
    rotate_halves,
    rotate_pairs,
)

Layers = Mapping[str, Layer]
Rope = Callable[..., Any] | None

HEAD_SWITCHES = ("cross_entropy", "fused_linear_cross_entropy")
SWITCHES = ("rope", "rms_norm", "layer_norm", "swiglu", "geglu", *HEAD_SWITCHES)


@dataclass(frozen=True)
class Family:
    """One row of the table. `rms_norm`, `layer_norm`, `swiglu` and `geglu` map class names to layers.

    - `name`, `aliases`: of `apply_liger_kernel_to_<name>`
    - `causal`: the classes with an `lm_head`
    - `rope`: replaces `apply_rotary_pos_emb`, unless None
    - `module`: the modeling module, if it is not that of `name`
    """

    name: str
    causal: tuple[str, ...]
    rms_norm: Layers = field(default_factory=dict)
    rope: Rope = rotate_halves
    swiglu: Layers = field(default_factory=dict)
    geglu: Layers = field(default_factory=dict)
    layer_norm: Layers = field(default_factory=dict)
    aliases: tuple[str, ...] = ()
    module: str | None = None

    @property
    def modeling(self) -> ModuleType:
        return importlib.import_module(self.module_name)

    @property
    def module_name(self) -> str:
        return self.module or f"transformers.models.{self.name}.modeling_{self.name}"

    @property
    def layers(self) -> Mapping[str, Layers]:
        names = ("rms_norm", "layer_norm", "swiglu", "geglu")
        return {name: layers for name in names if (layers := getattr(self, name))}

    @property
    def switches(self) -> tuple[str, ...]:
        rope = ("rope",) if self.rope else ()
        return (*rope, *self.layers, *(HEAD_SWITCHES if self.causal else ()))


def _decoder(
    name: str, prefix: str, norm: Layer = RMS_NORM, mlp: Layer = GLU, geglu: bool = False, rope: Rope = rotate_halves
) -> Family:
    """A family whose classes are named after one prefix."""
    gated = {f"{prefix}MLP": mlp}
    switches = ({}, gated) if geglu else (gated, {})
    return Family(name, (f"{prefix}ForCausalLM",), {f"{prefix}RMSNorm": norm}, rope, *switches)


FAMILIES = (
    _decoder("llama", "Llama"),
    Family(
        "mllama",
        ("MllamaForCausalLM", "MllamaForConditionalGeneration"),
        {"MllamaTextRMSNorm": RMS_NORM},
        swiglu={"MllamaTextMLP": GLU},
        layer_norm={"LayerNorm": LAYER_NORM},
    ),
    _decoder("mistral", "Mistral"),
    Family("mixtral", ("MixtralForCausalLM",), {"MixtralRMSNorm": RMS_NORM}, swiglu={"MixtralExperts": EXPERTS}),
    _decoder("gemma", "Gemma", RMS_NORM_OFFSET, geglu=True),
    _decoder("gemma2", "Gemma2", RMS_NORM_OFFSET, geglu=True),
    Family(
        "gemma3",
        ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
        {"Gemma3RMSNorm": RMS_NORM_OFFSET},
        geglu={"Gemma3MLP": GLU},
        layer_norm={"LayerNorm": LAYER_NORM},
        aliases=("gemma3_text",),
    ),
    _decoder("qwen2", "Qwen2"),
    Family(
        "qwen2_vl",
        ("Qwen2VLForConditionalGeneration",),
        {"Qwen2VLRMSNorm": RMS_NORM},
        swiglu={"Qwen2MLP": GLU},
        layer_norm={"LayerNorm": LAYER_NORM},
    ),
    Family(
        "qwen2_5_vl",
        ("Qwen2_5_VLForConditionalGeneration",),
        {"Qwen2_5_VLRMSNorm": RMS_NORM},
        swiglu={"Qwen2MLP": GLU, "Qwen2_5_VLMLP": GLU},
    ),
    _decoder("qwen3", "Qwen3"),
    Family(
        "qwen3_moe",
        ("Qwen3MoeForCausalLM",),
        {"Qwen3MoeRMSNorm": RMS_NORM},
        swiglu={"Qwen3MoeMLP": GLU, "Qwen3MoeExperts": EXPERTS},
    ),
    _decoder("phi3", "Phi3", mlp=PACKED_GLU),
    _decoder("granite", "Granite"),
    _decoder("olmo2", "Olmo2", RMS_NORM_FP32),
    _decoder("glm4", "Glm4", mlp=PACKED_GLU, rope=rotate_pairs),
)

BY_NAME = {name: family for family in FAMILIES for name in (family.name, *family.aliases)}


def family_by_name(name: str) -> Family:
    if name not in BY_NAME:
        raise ValueError(f"unknown family {name!r}; supported families: {', '.join(BY_NAME)}")
    return BY_NAME[name]


def layer_class(family: Family, name: str) -> type[nn.Module]:
    return getattr(family.modeling, name, None) or getattr(nn, name)


def family_of(model_class: type) -> Family:
    """Return the family that defines the class or one of its bases."""
    modules = {cls.__module__ for cls in model_class.__mro__}
    for family in BY_NAME.values():
        if family.module_name in modules:
            return family
    raise ValueError(
        f"no kernels for {model_class.__name__}; supported families: {', '.join(BY_NAME)}. register_family adds one; "
        f"attach_head, and the losses, work on any model with an lm_head"
    )
