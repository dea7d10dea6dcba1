"""Which models can compute shared prefixes once, and why the others cannot."""

from __future__ import annotations

import copy
import re
import sys
import warnings
import weakref
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from liger_chunked.deferred.code import foreign_code, own_forward
from liger_chunked.deferred.swap import stock_class
from liger_chunked.device import is_gpu
from liger_chunked.integrations.transformers.attach import attach_head
from liger_chunked.integrations.transformers.detect import inner_model
from liger_chunked.integrations.transformers.head_input import HeadInput
from liger_chunked.shared_prefix.attention import BLOCK, TRIES_ONLY
from liger_chunked.shared_prefix.inputs import UnknownLayers, implementation_of, model_inputs, windows_of
from liger_chunked.shared_prefix.trie import gather_rows, pack_trie
from liger_chunked.types import Head

_KNOWN_ATTENTION = re.compile(r"sdpa|eager|flex_attention|flash_attention_\d|.+/.+")  # or of the hub


def hidden_states_of(head: Head, input: HeadInput) -> Tensor:
    """A `head_fn` that returns the hidden states."""
    return input.hidden_states


def why_not_shared(model: nn.Module) -> str | None:
    """Return why a model cannot compute shared prefixes once; None if it can.

    Compares a small copy's hidden states on a batch and its trie, once per config and attention implementation.

    >>> from transformers import LlamaConfig, LlamaForCausalLM, MambaConfig, MambaForCausalLM
    >>> sizes = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1}
    >>> why_not_shared(LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=32, num_attention_heads=2)))
    >>> why_not_shared(MambaForCausalLM(MambaConfig(**sizes)))
    'its layers carry a state from token to token'
    """
    reason = _reason_of_wrapper(model)
    inner = inner_model(model)
    return reason or _reason_of_adapters(inner) or _reason_now(inner) or facts_of(inner).reason


ROUTER = (
    "its router loss would count a shared token once, not once for each sequence; set "
    "config.output_router_logits=False to train without that loss"
)


_DROPOUTS = (
    "attention_dropout",
    "attn_pdrop",
    "attention_probs_dropout_prob",
    "attn_dropout",
    "attention_dropout_prob",
)
_OF_BATCHES = ("LILY", "POLY", "SHADOW", "XLORA")  # adapters that mix tokens, or read their places


def _reason_of_wrapper(model: nn.Module) -> str | None:
    peft = getattr(getattr(model, "module", model), "active_peft_config", None)
    if getattr(peft, "is_prompt_learning", False):
        return f"its adapter ({type(peft).__name__}) adds virtual tokens to each sequence"
    return None


def _reason_of_adapters(model: PreTrainedModel) -> str | None:
    for peft in (getattr(model, "peft_config", None) or {}).values():
        kind = str(getattr(peft.peft_type, "value", peft.peft_type))
        if getattr(peft, "alora_invocation_tokens", None):
            return "its adapter (aLoRA) starts at a token of each sequence"
        if kind in _OF_BATCHES:
            return f"its adapter ({type(peft).__name__}) does not compute each token alone"
    return None


def _reason_now(model: PreTrainedModel) -> str | None:
    foreign = foreign_code(own_forward(model), stock_class(type(model)))
    if foreign is not None:
        name = getattr(foreign, "__qualname__", type(foreign).__qualname__)
        return f"its forward was replaced by {name}, which may not pass on positions"
    config = model.config.get_text_config()
    if getattr(config, "output_router_logits", False) or getattr(model.config, "output_router_logits", False):
        return ROUTER
    if model.training and (dropout := next((name for name in _DROPOUTS if getattr(config, name, None)), None)):
        return f"FlexAttention has no dropout, and {dropout} is {getattr(config, dropout)}; set it to 0"
    if model.training and getattr(model.get_input_embeddings(), "neftune_noise_alpha", None):
        return "NEFTune scales its noise by the length of a row; set neftune_noise_alpha=None"
    if len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1:
        return "its layers are on several devices (device_map)"
    if implementation_of(model) == "eager" and is_gpu(model.device):
        return "eager attention needs too much memory; call model.set_attn_implementation('flex_attention')"
    return None


class Facts(NamedTuple):
    reason: str | None
    relative: bool = False
    width_matters: bool = False


_KNOWN: dict[tuple[type, str, str], Facts] = {}
_KNOWN_MODELS: weakref.WeakKeyDictionary[PreTrainedModel, tuple[str, str, Facts]] = weakref.WeakKeyDictionary()


def facts_of(model: PreTrainedModel) -> Facts:
    implementation = implementation_of(model)
    settings = repr(vars(model.config))  # may change in place
    known = _KNOWN_MODELS.get(model)
    if known is not None and known[:2] == (settings, implementation):
        return known[2]
    declared = _declared_reason(model)
    if declared is None and not _KNOWN_ATTENTION.fullmatch(implementation):
        declared = f"its attention implementation, {implementation!r}, is not one of transformers"
    facts = _measured(model, implementation) if declared is None else Facts(declared)
    _KNOWN_MODELS[model] = (settings, implementation, facts)
    return facts


def _declared_reason(model: PreTrainedModel) -> str | None:
    if getattr(model, "_is_stateful", False):
        return "its layers carry a state from token to token"
    if model.config.get_text_config() is not model.config:
        return "it takes more than text; images and their positions cannot be merged"
    if model.config.is_encoder_decoder:
        return "it has an encoder"
    if getattr(model.config, "alibi", False) or model.config.model_type in ("bloom", "mpt"):
        return "its positions are biases of the attention scores (ALiBi)"
    if hasattr(model.config, "keep_window_size"):
        return "its attention selects keys, and breaks ties by their places in a row"
    try:
        windows_of(model.config)
    except UnknownLayers as unknown:
        return str(unknown)
    return None


def _measured(model: PreTrainedModel, implementation: str) -> Facts:
    try:
        config = _small(model.config)
        key = (type(model), implementation, config.to_json_string(use_diff=False))
    except Exception as error:
        return Facts(f"no small copy of its config could be made ({type(error).__name__}: {error})")
    if key not in _KNOWN:
        quiet = warnings.catch_warnings()
        with (
            quiet,
            torch.no_grad(),
            torch.device("cpu"),
            torch.autocast("cpu", enabled=False),
            torch.random.fork_rng([]),
        ):
            warnings.simplefilter("ignore")
            _KNOWN[key] = _compare(_made_from_config(type(model)), config, implementation)
    return _KNOWN[key]


def _made_from_config(cls: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Return the class of which FSDP and patches derived another: FSDP's makes no new models once it is patched."""
    sharded = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    return next(c for c in cls.__mro__ if stock_class(c) is c and not issubclass(c, sharded))


_TOLERANCE = 1e-4  # of the hidden states' norm; some models round to float32
_VOCABULARY = 64
_PROMPT = [1, 2, 3, 4, 2, 1, 5, 6, 7, 2, 8]  # repeated: ties
_PROBE = [[*_PROMPT, 20, 21, 22, 23], [*_PROMPT, 20, 24], _PROMPT, [*_PROMPT[:4], *range(30, 40)], [40, 41]]


def _compare(cls: type[PreTrainedModel], config: Any, implementation: str) -> Facts:
    from_stock = "sdpa" if implementation == "sdpa" else "eager"
    ways = [(from_stock, True)] if implementation in ("sdpa", "eager") else []
    if implementation != "eager":
        ways.append((TRIES_ONLY, False))
    width = max(map(len, _PROBE))
    ids = torch.tensor([[*s, *[1] * (width - len(s))] for s in _PROBE])
    mask = torch.tensor([[1] * len(s) + [0] * (width - len(s)) for s in _PROBE])
    try:
        torch.default_generator.manual_seed(0)  # torch.manual_seed also seeds GPUs
        config._attn_implementation, config._experts_implementation = from_stock, "eager"
        small = cls(config).float().eval()
        for p in small.parameters():
            p.copy_(torch.randn_like(p) * p.shape[-1] ** -0.5 if p.ndim > 1 else p + 0.2 * torch.randn_like(p))
        with_head = small.get_output_embeddings() is not None
        if with_head:
            attach_head(small)

        def hidden_states(**inputs: Any) -> Tensor:
            # Through its own forward, which may not pass on positions to its backbone.
            return small(**inputs, head_fn=hidden_states_of) if with_head else small(**inputs).last_hidden_state

        def padded(ids: Tensor, mask: Tensor) -> Tensor:
            return hidden_states(input_ids=ids, attention_mask=mask, use_cache=False)[mask.bool()]

        expected = padded(ids, mask)
        trie = pack_trie(ids, mask, multiple=2 * BLOCK)
        for way, dense in ways:
            config._attn_implementation = way
            packed = hidden_states(**model_inputs(small, trie, way, dense))
            got = gather_rows(packed.flatten(0, 1), trie.node[mask.bool()])
            error = float((got - expected).norm() / expected.norm())
            if not error <= _TOLERANCE:
                return Facts(
                    "the hidden states of a small copy on a padded batch and on its trie differ by "
                    f"{error:.2g} of their norm: it does not follow position_ids and attention_mask"
                )
        config._attn_implementation = from_stock
        left, right = (padded(F.pad(ids, pad, value=1), F.pad(mask, pad)) for pad in ((3, 0), (0, 3)))
        moved, widened = (float((x - expected).norm() / expected.norm()) > _TOLERANCE for x in (left, right))
        return Facts(None, relative=not moved, width_matters=widened)
    except Exception as error:
        cause = str(error).splitlines()[0] if str(error) else ""
        return Facts(f"a small copy of it failed ({type(error).__name__}: {cause})")


_INNER = ("intermediate", "ffn", "inner", "mlp")
_MOST_LAYERS = 8
# Lengths that change what a token attends to. The probe exceeds them.
_REACHES = ("window", "window_size", "index_topk", "budget", "chunk_size", "floor_scale")
_REACH = 5
_CONTEXT = 16  # between the probe's widths with and without padding


def _rope_parameters(config: Any) -> list[dict[str, Any]]:
    parameters = getattr(config, "rope_parameters", None) or {}
    by_layer = [x for x in parameters.values() if isinstance(x, dict)]
    return by_layer or [parameters]


def _small(config: Any) -> Any:
    """Return a config with narrow layers: the first two, and one of each other type.

    Heads keep their size, as scaled rotary embeddings list as many factors.
    """
    small = copy.deepcopy(config)
    n_layers, n_heads = config.num_hidden_layers, config.num_attention_heads
    by_layer = {k: x for k, x in vars(config).items() if isinstance(x, list | tuple) and len(x) == n_layers}
    types = [repr([x[i] for x in by_layer.values()]) for i in range(n_layers)]
    layers = [i for i, kind in enumerate(types) if i < 2 or types.index(kind) == i][:_MOST_LAYERS]
    small.num_hidden_layers = len(layers)
    for name, values in by_layer.items():
        setattr(small, name, type(values)(values[i] for i in layers))

    kv = getattr(config, "num_key_value_heads", None) or n_heads
    sizes: dict[str, Any] = {
        "vocab_size": _VOCABULARY,
        "num_attention_heads": 4,
        "num_key_value_heads": 4 if kv == n_heads else min(kv, 2),
        "hidden_size": 4 * (getattr(config, "head_dim", None) or config.hidden_size // n_heads),
        "pad_token_id": 0,
        "original_max_position_embeddings": _CONTEXT,
        **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
        "num_experts_per_tok": 2,
        **dict.fromkeys(("n_group", "topk_group"), 1),
    }
    for name, value in vars(config).items():
        if isinstance(value, int) and value > 64 and any(part in name for part in _INNER):
            sizes[name] = 64
        if isinstance(value, int) and not isinstance(value, bool) and name.endswith(_REACHES):
            sizes[name] = _REACH
    for rope in _rope_parameters(small):
        if "original_max_position_embeddings" in rope:
            rope["original_max_position_embeddings"] = _CONTEXT
        if rope.get("rope_type") == "dynamic":
            sizes["max_position_embeddings"] = _CONTEXT
    for name, value in sizes.items():
        if getattr(small, name, None) is not None:
            setattr(small, name, value)
    return small
