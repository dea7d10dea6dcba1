from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import trl
from torch import Tensor, nn
from transformers import PreTrainedModel
from trl.trainer import utils

from liger_chunked.deferred.code import FORWARD_SLOTS, unwrapped
from liger_chunked.deferred.projection import projections_in
from liger_chunked.engine import linear_token_stats
from liger_chunked.integrations.transformers import HeadInput
from liger_chunked.integrations.transformers.attach import check_head, update
from liger_chunked.integrations.transformers.detect import STOCK, head_of
from liger_chunked.integrations.transformers.forward import STATE, add_keywords
from liger_chunked.kept_ids import KeptIds
from liger_chunked.shared_prefix.share import share_pass
from liger_chunked.types import Head, TokenStats, budget_bytes

FusedCausalLMOutput: Any = utils.FusedCausalLMOutput

# With the automatic budget, DPO of Qwen2.5-0.5B on 8 x 2048 tokens took 0.55 GiB more than TRL's head on Liger-Kernel's
# layers.
HEAD_BUDGET = 512 * 2**20

STATISTICS = {
    "log_probs": "logps",
    "entropy": "entropy",
    "log_sum_sq_probs": "log_sum_sq_probs",
    "mean_logits": "mean_logits",
    "is_top1": "is_top1",
}


def add_chunked_lm_head(
    model: PreTrainedModel,
    temperature: float = 1.0,
    cast_lm_head_to_fp32: bool = False,
    outputs: tuple[str, ...] = ("log_probs",),
    *,
    logits_budget: int | float | str | None = None,
    logits_dtype: torch.dtype | None = None,
    share_prefix: bool | str = False,
) -> None:
    """Give `model` the head of TRL's `add_fused_lm_head`, computed by `linear_token_stats`.

    `model(..., labels=labels, fused_lm_head=True)` then returns TRL's `FusedCausalLMOutput`, and `model(...,
    labels=labels, head_fn=fn)` returns `fn(head, input)`. Other calls do not change.

    The newest head of a model computes, TRL's or this one; `detach_head` and `revert_liger_kernel` take this one off.

    Args:
        model: a causal language model; under PEFT its base model.
        temperature, logits_budget, logits_dtype: see `LogitOptions`.
        cast_lm_head_to_fp32: project in float32, outside autocast.
        outputs: more fields of TRL's output: keys of `STATISTICS`.
        share_prefix: see `SharedPromptsMixin`.
    """
    unknown = [name for name in outputs if name not in STATISTICS]
    if unknown:
        raise ValueError(f"outputs must be among {tuple(STATISTICS)}, got {unknown}")
    check_head(model)
    take_off(model)
    _defer_in_float32(model)
    statistics = functools.partial(
        fused_output,
        outputs=("log_probs", *(name for name in outputs if name != "log_probs")),
        temperature=temperature,
        float32=cast_lm_head_to_fp32,
        logits_budget=logits_budget,
        logits_dtype=logits_dtype,
    )
    rewrite = functools.partial(_rewritten, statistics, share_prefix)
    update(model, head_fn=True, rewrite=rewrite, logits_budget=budget_bytes(logits_budget))


add_keywords("fused_lm_head", "kept_ids", "reads_padding")


def _rewritten(
    statistics: Callable[..., Any], share_prefix: bool | str, model: PreTrainedModel, arguments: dict[str, Any]
) -> dict[str, Any]:
    """Turn a trainer's call into one with `head_fn`, on the trie of its batch if prompts are shared."""
    reads_padding = arguments.pop("reads_padding", False)
    kept = arguments.pop("kept_ids", None)
    if "fused_lm_head" in arguments and _newer_head(model) is not None:
        return arguments
    if arguments.pop("fused_lm_head", False):
        arguments["head_fn"] = statistics if kept is None else functools.partial(statistics, kept=kept)
    head_fn = arguments.pop("head_fn", None)
    if head_fn is None:
        return arguments
    if _takes(type(model).forward, "use_cache"):
        arguments["use_cache"] = False  # as TRL's own head
    else:
        arguments.pop("use_cache", None)  # which TRL passes to a backbone
    batch = None
    if share_prefix is not False:
        batch = share_pass(model, arguments, always=share_prefix is True, with_trailing=reads_padding)
    if batch is None:
        return {**arguments, "head_fn": head_fn}
    own = ("input_ids", "attention_mask", "logits_to_keep")
    others = {name: x for name, x in arguments.items() if name not in {*own, *batch.inputs}}
    head_fn = batch.head_fn(head_fn, logits_to_keep=arguments.get("logits_to_keep", 0))
    return {**batch.inputs, **others, "head_fn": head_fn}


def _newer_head(model: nn.Module) -> Any:
    """Return the function that TRL's `add_fused_lm_head` set on a model, or None.

    It is newer than the head of ours, whose `add_chunked_lm_head` removes what was there before.
    """
    parts = (part for slot in FORWARD_SLOTS for part in unwrapped(vars(model).get(slot)))
    return next((part for part in parts if _is_trls_head(part)), None)


def _is_trls_head(function: Any) -> bool:
    code = getattr(function, "__code__", None)
    return code is not None and function.__globals__ is vars(utils) and _BELOW in code.co_freevars


_BELOW = "original_forward"  # of a closure of TRL's: the forward that it took the place of


def hand_over(model: nn.Module) -> None:
    """Prepare a model that a trainer had, if it had one, for the next: take off TRL's heads and accelerate's autocast.

    accelerate's mark goes too, because it keeps the accelerator of the next trainer from setting its own precision.
    """
    if any(_newer_head(x) is not None or _has_trainers_head(x) for x in model.modules()):
        for x in model.modules():
            take_off(x, autocast=True)


def _defer_in_float32(model: Any) -> None:
    """Let a head defer that TRL cast to float32: a hook casts its input, in place of TRL's own product."""
    head = head_of(model)
    function = None if head is None else vars(head).get("forward")
    if head is not None and getattr(function, "__module__", "").startswith("trl.") and hasattr(function, "__closure__"):
        del head.forward
        head.register_forward_pre_hook(_in_dtype_of_weight)


def _in_dtype_of_weight(head: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(x.to(head.weight.dtype) for x in args)


def _has_trainers_head(model: nn.Module) -> bool:
    state = vars(model).get(STATE)
    return state is not None and state.rewrite is not None


def take_off(model: nn.Module, *, autocast: bool = False) -> None:
    """Take off what TRL left on the instance: its heads, with accelerate's autocast around them.

    They would compute in place of a newer head. What somebody else put around them stays, and them with it.

    Args:
        autocast: see `hand_over`.
    """
    state = vars(model)
    while (below := _below(model, autocast)) is not None:
        state.pop("_original_forward", None)
        function = getattr(below, "__func__", None)
        if hasattr(function, STOCK) or any(vars(cls).get("forward") is function for cls in type(model).__mro__):
            del state["forward"]
        else:
            state["forward"] = below
    if autocast and not any(cls.__name__ == "FSDPModule" for cls in type(model).__mro__):  # sharded once for ever
        state.pop("_is_accelerate_prepared", None)


def _below(model: nn.Module, autocast: bool) -> Any:
    """Return the forward under TRL's outermost head, or under accelerate's autocast; None: nothing to take off."""
    parts = [*unwrapped(vars(model).get("forward"))]
    head = _newer_head(model)
    if head is not None:
        below = inspect.getclosurevars(head).nonlocals[_BELOW]
    else:
        below = vars(model).get("_original_forward") if autocast else None
        head = getattr(below, "__func__", below)
    around = itertools.takewhile(lambda part: part is not head, parts)
    return below if head in parts and all(map(_is_accelerates, around)) else None


def _is_accelerates(wrapper: Any) -> bool:
    """Whether this is a part of the autocast that accelerate sets on a prepared model, or a bound TRL head."""
    function = getattr(wrapper, "__func__", wrapper)
    module = getattr(function, "__globals__", {}).get("__name__") or type(function).__module__
    return module.partition(".")[0] in ("accelerate", "torch") or _is_trls_head(function)


@functools.cache
def _takes(forward: Any, name: str) -> bool:
    parameters = inspect.signature(forward).parameters.values()
    return any(x.name == name or x.kind is x.VAR_KEYWORD for x in parameters)


def head_stats(
    head: Head,
    input: HeadInput,
    outputs: tuple[str, ...],
    *,
    temperature: float = 1.0,
    logits_budget: int | float | str | None = None,
    logits_dtype: torch.dtype | None = None,
    kept: KeptIds | None = None,
) -> TokenStats:
    return linear_token_stats(
        head.weight,
        input.hidden_states,
        input.target,
        head.bias,
        outputs=outputs,
        softcap=input.options.softcap,
        logit_scale=input.options.logit_scale,
        temperature=temperature,
        logits_budget=logits_budget,
        logits_dtype=logits_dtype,
        kept=kept,
    )


def fused_output(
    head: Head,
    input: HeadInput,
    *,
    outputs: tuple[str, ...],
    temperature: float,
    float32: bool,
    logits_budget: int | float | str | None,
    logits_dtype: torch.dtype | None = None,
    kept: KeptIds | None = None,
) -> Any:
    """Return TRL's `FusedCausalLMOutput` with the fields `outputs`: (B, T - 1), or (B, T) for `shift_labels`.

    `kept`, the ids that a sampler kept at each position of `input.target`, is the argument `kept_ids` of the model.
    `loss` is the NLL over `num_items_in_batch` or valid tokens, plus the auxiliary loss.
    """
    autocast: Any = nullcontext()
    if float32:
        head = Head(head.weight.float(), None if head.bias is None else head.bias.float())
        input = dataclasses.replace(input, hidden_states=input.hidden_states.float())
        autocast = torch.autocast(input.hidden_states.device.type, enabled=False)
    with autocast:
        names = tuple(STATISTICS[name] for name in outputs)
        options: Any = {"temperature": temperature, "logits_budget": logits_budget, "logits_dtype": logits_dtype}
        stats = head_stats(head, input, names, kept=kept, **options)
    # TRL drops the last position.
    end = None if input.shift_labels is not None else -1
    fields = {name: getattr(stats, STATISTICS[name])[:, :end] for name in outputs}
    if "mean_logits" in fields:
        fields["mean_logits"] = fields["mean_logits"].detach()
    label_mask = input.target[:, :end] != -100
    num_items = input.num_items_in_batch
    if isinstance(num_items, Tensor):
        num_items = num_items.clamp(min=1)
    loss = -fields["log_probs"].sum() / (label_mask.sum().clamp(min=1) if num_items is None else num_items)
    if input.added_loss is not None:
        loss = loss + input.added_loss
    return FusedCausalLMOutput(loss=loss, label_mask=label_mask, aux_loss=input.aux_loss, **fields)


_THEIRS: Any = utils.add_fused_lm_head


def _head_of(name: str, module: Any) -> Any:
    """Return a module's `add_fused_lm_head`, TRL's or a replacement, or None."""
    function = getattr(module, "__dict__", {}).get("add_fused_lm_head")
    return function if name.partition(".")[0] == "trl" or function is _THEIRS else None


@contextmanager
def chunked_heads(
    *,
    logits_budget: int | float | str | None = None,
    logits_dtype: torch.dtype | None = None,
    share_prefix: bool | str = False,
) -> Iterator[None]:
    """Replace TRL's `add_fused_lm_head` by `add_chunked_lm_head`, for trainers made inside the block.

        with chunked_heads():
            trainer = GRPOTrainer(...)

    For the arguments, see `add_chunked_lm_head`; `logits_budget` is 512 MiB by default.
    """
    budget = HEAD_BUDGET if logits_budget is None else budget_bytes(logits_budget)
    settings: Any = {"logits_budget": budget, "logits_dtype": logits_dtype, "share_prefix": share_prefix}
    with replaced_heads(functools.partial(add_chunked_lm_head, **settings)):
        yield


@contextmanager
def replaced_heads(add_head: Callable[..., None]) -> Iterator[None]:
    """Replace TRL's `add_fused_lm_head` by a function with its arguments, inside the block."""

    def add(model: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
        hand_over(model)  # TRL prepares it after this
        add_head(model, *args, **kwargs)

    ours = functools.wraps(_THEIRS)(add)
    before = {name: found for name, module in [*sys.modules.items()] if (found := _head_of(name, module)) is not None}
    try:
        for name in before:
            sys.modules[name].add_fused_lm_head = ours  # type: ignore[attr-defined]
        yield
    finally:
        for name, module in [*sys.modules.items()]:
            if getattr(module, "__dict__", {}).get("add_fused_lm_head") is ours:
                module.add_fused_lm_head = before.get(name, before[utils.__name__])  # type: ignore[attr-defined]


def reads_logits(trainer: type[Any], models_without_head: tuple[str, ...]) -> bool:
    """Whether neither TRL's head nor ours takes the place of the logits that a trainer would read.

    No trainer of TRL 1.15 and 1.16 does: this is for one of a later release, which would train without a word on real
    logits.
    """
    names = [cls.__module__ for cls in trainer.__mro__]
    return all(_head_of(name, sys.modules[name]) is None for name in names) and "model" not in models_without_head


def check_has_methods(trainer: type[Any], names: tuple[str, ...]) -> None:
    """Raise RuntimeError unless TRL's trainer has these methods: it would not call those that replace them."""
    theirs = [vars(cls) for cls in trainer.__mro__ if not cls.__module__.startswith("liger_chunked.")]
    missing = [name for name in names if not any(name in members for members in theirs)]
    if missing:
        raise RuntimeError(
            f"TRL {trl.__version__} does not call {', '.join(missing)} of {trainer.__name__}, which would be "
            "replaced; TRL 1.15 and 1.16 do"
        )


def check_reads_loss(trainer: type[Any], ours: type[Any], names: tuple[str, ...]) -> None:
    """Raise TypeError if a class before ours, written for TRL's trainer, overrides a method that runs `loss`.

    Python would call that method, such as `_compute_loss` of TRL's `GMPOTrainer`, and leave the loss out. Subclasses of
    ours know about it, and a method that calls `super()` gets here.
    """
    for name in names:
        owner = next((cls for cls in trainer.__mro__ if name in vars(cls)), None)
        replaced = any(name in vars(cls) for cls in trainer.__mro__ if issubclass(cls, ours))
        if owner is None or not replaced or issubclass(owner, ours):
            continue
        code = getattr(vars(owner)[name], "__code__", None)
        if code is None or "__class__" in code.co_freevars or "super" in code.co_names:
            continue
        before = next(cls.__name__ for cls in trainer.__mro__ if cls.__name__.startswith("Liger"))
        raise TypeError(
            f"{trainer.__name__} would not read loss=, because {owner.__name__} overrides {name} and comes before "
            f"{before}: write class {trainer.__name__}({before}, {owner.__name__}), and the loss replaces that of "
            f"{owner.__name__}. Or leave loss= out to train with the latter"
        )


class _Unsupported(type):
    """Replaces PEFT's `BaseTunerLayer` where TRL checks `lm_head` for an adapter.

    Raises ValueError for unsupported adapters.
    """

    def __instancecheck__(cls, lm_head: Any) -> bool:
        projections_in(lm_head)
        return False


class _UnsupportedAdapter(metaclass=_Unsupported):
    pass


@contextmanager
def lora_heads(trainer: type[Any]) -> Iterator[None]:
    """Let a trainer's `__init__` accept LoRA on `lm_head`."""
    name = "BaseTunerLayer"
    modules: list[Any] = [sys.modules[cls.__module__] for cls in trainer.__mro__]
    theirs = {module: getattr(module, name) for module in modules if name in vars(module)}
    try:
        for module in theirs:
            setattr(module, name, _UnsupportedAdapter)
        yield
    finally:
        for module, of_peft in theirs.items():
            setattr(module, name, of_peft)
