"""Compute once a prefix that sequences share, such as a prompt in GRPO or DPO (docs/shared_prefix.md).

The model's own forward runs on a trie, with its wrappers, adapters, hooks and gradient checkpointing.
"""

from __future__ import annotations

import copy
import logging
import re
import warnings
import weakref
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from liger_chunked.deferred.code import foreign_code, own_forward
from liger_chunked.deferred.swap import stock_class
from liger_chunked.device import is_gpu, is_on_gpu
from liger_chunked.integrations.transformers.attach import attach_head
from liger_chunked.integrations.transformers.detect import inner_model
from liger_chunked.integrations.transformers.head_input import HeadFn, HeadInput, kept
from liger_chunked.integrations.transformers.trie import PackedTrie, TriePlan, gather_rows, pack_trie, plan_trie
from liger_chunked.integrations.transformers.trie_attention import BLOCK, TRIES_ONLY, dense_mask, serve, trie_mask
from liger_chunked.types import Head

logger = logging.getLogger(__name__)

WORTHWHILE = 0.1  # least share of tokens to save
_DENSE = 1024  # longest row with a dense mask on a GPU
_SHORT = 256  # tokens of a short row on a CPU
_TAKE_DENSE = ("sdpa", "eager")
_KNOWN_ATTENTION = re.compile(r"sdpa|eager|flex_attention|flash_attention_\d|.+/.+")  # or of the hub
_ROW = 1 << 16  # longest row for FlexAttention


@dataclass(frozen=True)
class SharedBatch:
    trie: PackedTrie
    inputs: dict[str, Any]  # of `model.forward`

    def hidden_states(self, packed: Tensor, logits_to_keep: int | Tensor = 0) -> Tensor:
        """Return the padded batch's hidden states (B, T, H), zero at padding, from `packed` (R, L, H) of `inputs`.

        `logits_to_keep` is as in `model.forward`.
        """
        index = kept(self.trie.node[..., None], logits_to_keep)[..., 0]
        return gather_rows(packed.flatten(0, 1), index)

    def head_fn(self, head_fn: HeadFn, *, logits_to_keep: int | Tensor = 0) -> HeadFn:
        """Wrap a function for `model(**batch.inputs, ...)`: it gets the padded batch's hidden states.

        Pass padded labels to the model, but `logits_to_keep` here. `HeadInput.outputs` stays the trie's.
        """

        def on_padded_batch(head: Head, input: HeadInput) -> Any:
            return head_fn(head, replace(input, hidden_states=self.hidden_states(input.hidden_states, logits_to_keep)))

        return on_padded_batch


def share_batch(model: nn.Module, input_ids: Tensor, attention_mask: Tensor | None = None) -> SharedBatch:
    """Merge the common prefixes of a batch.

    Positions count tokens without padding, as in `generate`.

    Args:
        input_ids: (B, T), padded anywhere.
        attention_mask: (B, T), 0 at padding.

    Raises:
        ValueError: see `why_not_shared`.
    """
    reason = why_not_shared(model)
    if reason is not None:
        raise ValueError(f"{type(inner_model(model)).__name__} cannot share prompts: {reason}")
    inner = inner_model(model)
    return _share(inner, _plan(inner, input_ids, attention_mask))


def maybe_share(model: nn.Module, input_ids: Tensor, attention_mask: Tensor | None = None) -> SharedBatch | None:
    """Merge common prefixes if the model allows it and saves a tenth of the tokens; log once per model."""
    inner = inner_model(model)
    reason = why_not_shared(model)
    if reason is None:
        plan = _plan(inner, input_ids, attention_mask)
        # The next batch may save more.
        return _logged(inner, _share(inner, plan)) if plan.saved >= WORTHWHILE else None
    _log_refusal(inner, reason)
    return None


def share_pass(
    model: PreTrainedModel, arguments: dict[str, Any], *, always: bool = False, with_trailing: bool = False
) -> SharedBatch | None:
    """Run `maybe_share` on `arguments` of `model.forward`, if hidden states equal `forward`'s.

    `forward` counts padding in positions, so models with absolute positions may differ.

    Args:
        model: without wrappers.
        always: share if anything is saved, or raise ValueError.
        with_trailing: as in `pack_trie`.
    """
    plan = None
    reason = _reason_of_arguments(arguments) or why_not_shared(model)
    if reason is None:
        plan = _plan(model, arguments["input_ids"], arguments.get("attention_mask"), with_trailing)
        reason = _reason_of_padding(model, plan, with_trailing)
    if reason is not None:
        if always:
            raise ValueError(f"{type(model).__name__} cannot share prompts: {reason}")
        _log_refusal(model, reason)
        return None
    assert plan is not None
    return _logged(model, _share(model, plan)) if plan.saved >= (0 if always else WORTHWHILE) else None


_KNOWN_ARGUMENTS = (
    "input_ids", "attention_mask", "labels", "shift_labels", "num_items_in_batch", "logits_to_keep", "ignore_index",
    "use_cache", "return_dict",
)  # fmt: skip


def _reason_of_arguments(arguments: dict[str, Any]) -> str | None:
    others = [
        name for name, x in arguments.items() if name not in _KNOWN_ARGUMENTS and x is not None and x is not False
    ]
    if "output_router_logits" in others:
        return ROUTER
    if others:
        return f"the pass has {others[0]}, and only tokens and their mask can be merged"
    if not isinstance(arguments.get("input_ids"), Tensor):
        return "the pass has no input_ids"
    if torch.compiler.is_compiling():
        return "its forward is compiled"
    mask = arguments.get("attention_mask")
    if mask is not None and mask.ndim != 2:
        return f"its attention_mask has {mask.ndim} dimensions, and one of (B, T) can be merged"
    return None


def _reason_of_padding(model: PreTrainedModel, plan: TriePlan, with_trailing: bool) -> str | None:
    if plan.padding == "between":
        return "there is padding between the tokens of a sequence, which counts in their positions"
    if plan.padding == "left" and not _facts(model).relative:
        return "its positions are absolute, and count the padding on the left"
    if plan.longest < plan.batch.shape[1] and _facts(model).width_matters:
        return "its positions are scaled by the width of the batch, which counts padding"
    window = min((w for w in _windows(model.config).values() if w is not None), default=None)
    if with_trailing and window is not None and plan.most_trailing >= window:
        return f"the metrics of this trainer read padding, here beyond the sliding window of {window} tokens"
    return None


_LOGGED: weakref.WeakKeyDictionary[PreTrainedModel, set[str]] = weakref.WeakKeyDictionary()


def _is_new(model: PreTrainedModel, message: str) -> bool:
    logged = _LOGGED.setdefault(model, set())
    is_new = message not in logged
    logged.add(message)
    return is_new


def _log_refusal(model: PreTrainedModel, reason: str) -> None:
    if _is_new(model, reason):
        logger.info("%s computes shared prompts once for each sequence: %s", type(model).__name__, reason)


def _logged(model: PreTrainedModel, batch: SharedBatch) -> SharedBatch:
    if _is_new(model, "shared"):
        trie = batch.trie
        logger.info(
            "%s computes shared prompts once: %d tokens in place of %d (%.0f%% saved) in this batch",
            type(model).__name__, trie.input_ids.numel(), trie.tokens, 100 * trie.saved,
        )  # fmt: skip
    return batch


def shared_prefix_hidden_states(model: nn.Module, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
    """Return the backbone's hidden states (B, T, H), zero at padding. Computes common prefixes once.

    Differentiable. With an `lm_head`, use `attach_head(model)`, which also runs wrappers.

    Raises:
        ValueError: see `why_not_shared`.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    >>> model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1))
    >>> batch = torch.tensor([[5, 6, 7, 8], [5, 6, 9, 0]])
    >>> mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])
    >>> hidden_states = shared_prefix_hidden_states(model, batch, mask)
    >>> hidden_states.shape, torch.equal(hidden_states[0, :2], hidden_states[1, :2])
    (torch.Size([2, 4, 16]), True)
    """
    batch = share_batch(model, input_ids, attention_mask)
    if inner_model(model).get_output_embeddings() is None:
        return batch.hidden_states(model(**batch.inputs).last_hidden_state)
    attach_head(model)
    return model(**batch.inputs, head_fn=batch.head_fn(_hidden_states))


def _hidden_states(head: Head, input: HeadInput) -> Tensor:
    return input.hidden_states


def _plan(
    model: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor | None, with_trailing: bool = False
) -> TriePlan:
    if is_on_gpu(input_ids):
        row_tokens, tree_tokens, multiple = _ROW, None, 2 * BLOCK
    else:
        # Dense attention grows with a row's square. Twice the width holds any pair.
        row_tokens = tree_tokens = max(2 * input_ids.shape[1], _SHORT)
        multiple = 8 if _implementation(model) in _TAKE_DENSE else 2 * BLOCK
    return plan_trie(
        input_ids, attention_mask, row_tokens=row_tokens, tree_tokens=tree_tokens, multiple=multiple,
        with_trailing=with_trailing,
    )  # fmt: skip


def _share(model: PreTrainedModel, plan: TriePlan) -> SharedBatch:
    implementation = _implementation(model)
    dense = implementation in _TAKE_DENSE
    if is_on_gpu(plan.input_ids):
        dense = dense and (plan.row_length <= _DENSE or _dtype(model) == torch.float64)
    if not dense:
        serve(implementation)
    trie = plan.pack()
    return SharedBatch(trie, _inputs(model, trie, implementation, dense))


def _inputs(model: PreTrainedModel, trie: PackedTrie, implementation: str, dense: bool) -> dict[str, Any]:
    windows = _windows(model.config)
    has_windows = any(window is not None for window in windows.values())

    def mask(window: int | None) -> Any:
        if not dense:
            return trie_mask(trie.end, trie.position_ids, window, has_windows=has_windows)
        allowed = dense_mask(trie.end, trie.position_ids, window)
        if implementation != "eager":
            return allowed
        dtype = _dtype(model)
        return torch.zeros((), dtype=dtype, device=allowed.device).where(allowed, torch.finfo(dtype).min)

    masks = {window: mask(window) for window in dict.fromkeys(windows.values())}
    attention_mask = (
        {kind: masks[window] for kind, window in windows.items()} if len(windows) > 1 else next(iter(masks.values()))
    )
    return {
        "input_ids": trie.input_ids,
        "position_ids": trie.position_ids,
        "attention_mask": attention_mask,
        "use_cache": False,
    }


def _implementation(model: PreTrainedModel) -> str:
    config = model.config.get_text_config()
    return (config._attn_implementation or "eager") if hasattr(config, "_attn_implementation") else "unknown"


def _dtype(model: PreTrainedModel) -> torch.dtype:
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    return weight.dtype


class _Unknown(Exception):
    """The masks do not cover a layer."""


def _windows(config: Any) -> dict[str, int | None]:
    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    if not layer_types:
        return {"every": window}
    known = {"full_attention": None, "sliding_attention": window}
    if others := sorted(set(layer_types) - known.keys()):
        raise _Unknown(f"it has layers of the type {others[0]}; those of full_attention and sliding_attention can")
    return {kind: known[kind] for kind in dict.fromkeys(layer_types)}


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
    return reason or _reason_of_adapters(inner) or _reason_now(inner) or _facts(inner).reason


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
    if _implementation(model) == "eager" and is_gpu(model.device):
        return "eager attention needs too much memory; call model.set_attn_implementation('flex_attention')"
    return None


class _Facts(NamedTuple):
    reason: str | None
    relative: bool = False
    width_matters: bool = False


_KNOWN: dict[tuple[type, str, str], _Facts] = {}
_KNOWN_MODELS: weakref.WeakKeyDictionary[PreTrainedModel, tuple[str, str, _Facts]] = weakref.WeakKeyDictionary()


def _facts(model: PreTrainedModel) -> _Facts:
    implementation = _implementation(model)
    settings = repr(vars(model.config))  # may change in place
    known = _KNOWN_MODELS.get(model)
    if known is not None and known[:2] == (settings, implementation):
        return known[2]
    declared = _declared_reason(model)
    if declared is None and not _KNOWN_ATTENTION.fullmatch(implementation):
        declared = f"its attention implementation, {implementation!r}, is not one of transformers"
    facts = _measured(model, implementation) if declared is None else _Facts(declared)
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
        _windows(model.config)
    except _Unknown as unknown:
        return str(unknown)
    return None


def _measured(model: PreTrainedModel, implementation: str) -> _Facts:
    try:
        config = _small(model.config)
        key = (type(model), implementation, config.to_json_string(use_diff=False))
    except Exception as error:
        return _Facts(f"no small copy of its config could be made ({type(error).__name__}: {error})")
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
    return next(
        c for c in cls.__mro__ if stock_class(c) is c and not any(b.__name__ == "FSDPModule" for b in c.__mro__)
    )


_TOLERANCE = 1e-4  # of the hidden states' norm; some models round to float32
_VOCABULARY = 64
_PROMPT = [1, 2, 3, 4, 2, 1, 5, 6, 7, 2, 8]  # repeated: ties
_PROBE = [[*_PROMPT, 20, 21, 22, 23], [*_PROMPT, 20, 24], _PROMPT, [*_PROMPT[:4], *range(30, 40)], [40, 41]]


def _compare(cls: type[PreTrainedModel], config: Any, implementation: str) -> _Facts:
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
            return small(**inputs, head_fn=_hidden_states) if with_head else small(**inputs).last_hidden_state

        def padded(ids: Tensor, mask: Tensor) -> Tensor:
            return hidden_states(input_ids=ids, attention_mask=mask, use_cache=False)[mask.bool()]

        expected = padded(ids, mask)
        trie = pack_trie(ids, mask, multiple=2 * BLOCK)
        for way, dense in ways:
            config._attn_implementation = way
            packed = hidden_states(**_inputs(small, trie, way, dense))
            got = gather_rows(packed.flatten(0, 1), trie.node[mask.bool()])
            error = float((got - expected).norm() / expected.norm())
            if not error <= _TOLERANCE:
                return _Facts(
                    "the hidden states of a small copy on a padded batch and on its trie differ by "
                    f"{error:.2g} of their norm: it does not follow position_ids and attention_mask"
                )
        config._attn_implementation = from_stock
        left, right = (padded(F.pad(ids, pad, value=1), F.pad(mask, pad)) for pad in ((3, 0), (0, 3)))
        moved, widened = (float((x - expected).norm() / expected.norm()) > _TOLERANCE for x in (left, right))
        return _Facts(None, relative=not moved, width_matters=widened)
    except Exception as error:
        cause = str(error).splitlines()[0] if str(error) else ""
        return _Facts(f"a small copy of it failed ({type(error).__name__}: {cause})")


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
