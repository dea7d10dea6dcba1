"""Stock code that our kernels compute, and model families of transformers.

A row serves every class or function whose source differs only in names.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any

import transformers
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.activations import ReLUSquaredActivation
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import model_type_to_module_name

from liger_chunked.integrations.transformers import detect, rotary, source
from liger_chunked.integrations.transformers.layers import (
    _RMS_NORM_GATE_FIRST_ONE_GROUP,
    _RMS_NORM_GATED_SILU,
    EXPERTS,
    EXPERTS_CLAMPED,
    EXPERTS_INTERLEAVED,
    EXPERTS_LIMITED,
    EXPERTS_STACKED,
    GLU,
    GLU_LIMITED,
    GLU_SPARSE,
    LAYER_NORM,
    LAYER_NORM_BARE,
    LAYER_NORM_SCALED,
    PACKED_GLU,
    PACKED_GLU_CLAMPED,
    RELU_SQUARED,
    RMS_NORM,
    RMS_NORM_BARE,
    RMS_NORM_FP32,
    RMS_NORM_GATE_FIRST,
    RMS_NORM_GATED,
    RMS_NORM_GATED_FP32,
    RMS_NORM_OFFSET,
    RMS_NORM_SCALED,
    SILU_GLU,
    Binding,
    Layer,
)

HEAD_SWITCHES = ("cross_entropy", "fused_linear_cross_entropy")
LAYER_SWITCHES = ("rms_norm", "layer_norm", "swiglu", "geglu", "relu_squared")
PARALLEL = "parallel_linear"
SWITCHES = ("rope", *LAYER_SWITCHES, PARALLEL, *HEAD_SWITCHES)
TILED = "tiled_mlp"
OPTIONS = ("logits_budget", TILED, "defer_in_evaluation")  # other arguments of `apply_liger_kernel`


def check_switches(names: set[str]) -> None:
    known = [*sorted(SWITCHES), *OPTIONS]
    if unknown := sorted(names - {*known}):
        close = {near: None for name in unknown for near in difflib.get_close_matches(name, known, n=1, cutoff=0.85)}
        hint = f": did you mean {', '.join(map(repr, close))}?" if close else ""
        raise TypeError(f"unknown switches {unknown}{hint}; there are {known}")


# Class, layer, and the attributes named unlike the arguments of `Layer.run`. Frequent ones come first: a row's module
# is imported if no earlier row matches. The last rows are for older versions of transformers. Some of their
# classes are also named above: the row whose attributes a class has is the one that serves it.
_ROWS: list[tuple[str, Layer, dict[str, str]]] = [
    ("llama.LlamaRMSNorm", RMS_NORM, {"eps": "variance_epsilon"}),
    ("llama.LlamaMLP", GLU, {}),
    ("mixtral.MixtralExperts", EXPERTS, {}),
    ("qwen2_5_vl.Qwen2_5_VLMLP", GLU, {}),
    ("gemma.GemmaRMSNorm", RMS_NORM_OFFSET, {}),
    ("olmo2.Olmo2RMSNorm", RMS_NORM_FP32, {"eps": "variance_epsilon"}),
    ("phi3.Phi3MLP", PACKED_GLU, {"act_fn": "activation_fn"}),
    ("helium.HeliumRMSNorm", RMS_NORM_FP32, {"eps": "variance_epsilon"}),
    ("gemma3n.Gemma3nRMSNorm", RMS_NORM_SCALED, {}),
    ("llama4.Llama4TextRMSNorm", RMS_NORM, {}),
    ("llama4.Llama4TextL2Norm", RMS_NORM_BARE, {}),
    ("llama4.Llama4TextMLP", GLU, {"act_fn": "activation_fn"}),
    ("moshi.MoshiRMSNorm", RMS_NORM_FP32, {}),
    ("lfm2.Lfm2MLP", SILU_GLU, {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}),
    (
        "granitemoehybrid.GraniteMoeHybridMLP",
        PACKED_GLU,
        {"act_fn": "activation", "gate_up_proj": "input_linear", "down_proj": "output_linear"},
    ),
    ("recurrent_gemma.RecurrentGemmaMlp", GLU, {}),
    ("gpt_oss.GptOssExperts", EXPERTS_INTERLEAVED, {}),
    ("llama4.Llama4TextExperts", EXPERTS_STACKED, {}),
    ("minimax_m3_vl.MiniMaxM3VLExperts", EXPERTS_CLAMPED, {"alpha": "swiglu_alpha", "limit": "swiglu_limit"}),
    ("minimax_m3_vl.MiniMaxM3VLDenseMLP", PACKED_GLU_CLAMPED, {"alpha": "swiglu_alpha", "limit": "swiglu_limit"}),
    ("deepseek_v4.DeepseekV4Experts", EXPERTS_LIMITED, {}),
    ("deepseek_v4.DeepseekV4MLP", GLU_LIMITED, {}),
    ("hy_v4.HYV4Experts", EXPERTS_LIMITED, {"limit": "swiglu_limit"}),
    ("glm5_next.Glm5NextTextMLP", GLU_LIMITED, {"limit": "swiglu_limit"}),
    ("gemma3n.Gemma3nTextMLP", GLU_SPARSE, {}),
    ("cohere.CohereLayerNorm", LAYER_NORM_SCALED, {"eps": "variance_epsilon"}),
    ("olmo.OlmoLayerNorm", LAYER_NORM_BARE, {}),
    ("beam.BeamMLP", GLU, {}),
    ("beam.BeamExperts", EXPERTS, {}),
    ("qwen3_next.Qwen3NextRMSNormGated", RMS_NORM_GATED, {"eps": "variance_epsilon"}),
    ("mamba2.MambaRMSNormGated", RMS_NORM_GATE_FIRST, {"eps": "variance_epsilon"}),
    ("kimi_linear.KimiLinearRMSNormGated", RMS_NORM_GATED_FP32, {"eps": "variance_epsilon"}),
    ("zamba2.Zamba2RMSNormGated", RMS_NORM_GATE_FIRST, {"eps": "variance_epsilon"}),
    ("qwen3_next.Qwen3NextRMSNormGated", _RMS_NORM_GATED_SILU, {"eps": "variance_epsilon"}),
    ("mamba2.MambaRMSNormGated", _RMS_NORM_GATE_FIRST_ONE_GROUP, {"eps": "variance_epsilon"}),
]

# Rotary functions, and ours with the same arguments.
_ROTARY: list[tuple[str, Callable[..., Any]]] = [
    ("llama.apply_rotary_pos_emb", rotary.rotate_halves),
    ("glm4_moe.apply_rotary_pos_emb", rotary.rotate_halves),
    ("olmo2.apply_rotary_pos_emb", rotary.rotate_halves),
    ("glm4.apply_rotary_pos_emb", rotary.rotate_pairs),
    ("phi3.apply_rotary_pos_emb", rotary.rotate_halves),
    ("nemotron.apply_rotary_pos_emb", rotary.rotate_halves),
    ("modernbert_decoder.apply_rotary_pos_emb", rotary.rotate_halves),
    ("hunyuan_vl.apply_rotary_pos_emb", rotary.rotate_halves),
    ("ernie4_5.apply_rotary_pos_emb", rotary.rotate_pairs),
    ("helium.apply_rotary_pos_emb", rotary.rotate_pairs),
    ("qwen2_vl.apply_rotary_pos_emb_vision", rotary.rotate_vision),
    ("deepseek_v3.apply_rotary_pos_emb_interleave", rotary.rotate_to_halves),
    ("cohere.apply_rotary_pos_emb", rotary.rotate_pairs_of_repeated),
    ("blt.apply_rotary_pos_emb", rotary.rotate_pairs_of_repeated),
    ("ernie4_5_vl_moe.apply_rotary_pos_emb", rotary.rotate_pairs_of_repeated),
    ("glm4v.apply_rotary_pos_emb", rotary.rotate_pairs_of_repeated),
    ("gemma3n.apply_rotary_pos_emb", rotary.rotate_one),
    ("gpt_oss.apply_rotary_pos_emb", rotary.rotate_halves_by_half),
    ("llama4.apply_rotary_emb", rotary.rotate_complex),
    ("deepseek_v2.apply_rotary_emb", rotary.rotate_complex_heads),
    ("gptj.apply_rotary_pos_emb", rotary.rotate_one_by_half),
    ("nanochat.apply_rotary_pos_emb", rotary.rotate_back),
]


def _modeling(family: str) -> ModuleType | None:
    try:
        return importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    except ImportError:  # another version of transformers
        return None


def bound(layer: Layer, names: dict[str, str]) -> Binding:
    return Binding(layer, tuple(names.get(name, name) for name in layer.attributes))


# Classes recognised by their methods, not their source.
_REGISTERED: dict[type[nn.Module], Binding] = {
    nn.LayerNorm: bound(LAYER_NORM, {}),
    ReLUSquaredActivation: bound(RELU_SQUARED, {}),
}


@functools.cache
def _read(path: str, method: str = "") -> source.Source | None:
    family, name = path.split(".")
    stock: Any = getattr(_modeling(family), name, None)
    if stock is None or not method:
        return stock and source.source_of(stock)
    return source.source_of(getattr(stock, method, None), stock)


def binding_of(cls: Any) -> Binding | None:
    """Return the layer that equals a class."""
    for known, binding in _REGISTERED.items():
        if detect.runs_code_of(cls, known, binding.layer.method):
            return binding
    methods = ((name, getattr(cls, name, None)) for name in ("forward", "_apply_gate"))
    counted = ((name, _inputs(method), method) for name, method in methods)
    return _recognised(tuple((name, n, source.source_of(method, cls)) for name, n, method in counted if n in (1, 2)))


@functools.cache
def _inputs(method: Any) -> int:
    """Return how many arguments a method takes, 0 if no row takes as many."""
    if not inspect.isfunction(method):
        return 0
    n = len(inspect.signature(method).parameters) - 1
    return 0 if n == 2 and "rsqrt" not in inspect.unwrap(method).__code__.co_names else n


@functools.cache
def _recognised(methods: tuple[tuple[str, int, source.Source | None], ...]) -> Binding | None:
    for name, inputs, read in methods:
        if read is None:
            continue
        for path, layer, names in _ROWS:
            if (layer.method, layer.inputs) != (name, inputs):
                continue
            if name == "forward" and len(layer.attributes) != len(read[1]):
                continue
            row = _read(path, name)
            if row is not None and row[0] == read[0]:
                theirs = dict(zip(row[1], read[1], strict=True))
                return Binding(layer, tuple(theirs.get(n, n) for n in bound(layer, names).names))
    return None


def rope_of(function: Any) -> Any:
    return _rope_of_source(source.source_of(function))


@functools.cache
def _rope_of_source(read: source.Source | None) -> Any:
    rows = ((_read(path), ours) for path, ours in _ROTARY)
    return next((ours for row, ours in rows if read is not None and row == read), None)


def register(cls: type[nn.Module], binding: Binding) -> None:
    """Let a layer serve a class on every device: no code of the class was proved to be the same."""
    _REGISTERED[cls] = replace(binding, everywhere=True)


_MAPPINGS: tuple[Mapping[str, Any], ...] = (
    modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)


def _heads() -> dict[str, str]:
    return {
        name.replace("-", "_"): cls for mapping in _MAPPINGS for name, cls in mapping.items() if isinstance(cls, str)
    }


def causal_classes(modeling: ModuleType) -> list[Any]:
    heads = {cls for mapping in _MAPPINGS for cls in mapping.values()}
    return [
        cls
        for name, cls in vars(modeling).items()
        if inspect.isclass(cls) and issubclass(cls, GenerationMixin) and cls.__module__ == modeling.__name__
        if name in heads or name.endswith("ForCausalLM")
    ]


def model_classes(modeling: ModuleType) -> list[Any]:
    """Return the classes of models of a modeling module that can be built."""
    return [
        cls
        for name, cls in vars(modeling).items()
        if inspect.isclass(cls) and issubclass(cls, PreTrainedModel) and cls.__module__ == modeling.__name__
        if not name.endswith("PreTrainedModel")
    ]


# Model types whose module older transformers, such as 5.5, do not know.
_MODULES = {"mllama_text_model": "mllama"}


def family_modeling(name: str) -> ModuleType:
    modeling, heads = _modeling(name) or _modeling(_MODULES.get(name) or model_type_to_module_name(name)), _heads()
    if modeling is None and name in heads:
        modeling = importlib.import_module(getattr(transformers, heads[name]).__module__)
    if modeling is None or not (causal_classes(modeling) or _has_layers(modeling)):
        raise _unknown_family(name)
    return modeling


def _has_layers(modeling: ModuleType) -> bool:
    classes = [x for x in vars(modeling).values() if inspect.isclass(x) and issubclass(x, nn.Module)]
    return any(binding_of(cls) is not None for cls in classes if cls.__module__ == modeling.__name__)


def check_family(name: str) -> None:
    if name not in _heads():  # else imported when patched
        family_modeling(name)


def _unknown_family(name: str) -> ValueError:
    close = difflib.get_close_matches(name, _heads(), n=4, cutoff=0.4)
    return ValueError(
        f"unknown family {name!r}: expected a model type of transformers with a causal language model"
        f"{', such as ' * bool(close)}{', '.join(close)}"
    )


def family_name(module: str) -> str:
    return module.rpartition(".")[2].removeprefix("modeling_")


def family_of(model_class: type) -> str:
    modules = [cls.__module__ for cls in model_class.__mro__]
    return family_name(next((m for m in modules if m.startswith("transformers.models.")), modules[0]))
