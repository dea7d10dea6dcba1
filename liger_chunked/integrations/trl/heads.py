"""The heads of a trainer's models while it runs: how they are set, what they compute, and how they come off.

A trainer has one `Heads`. Setting them changes the class of each of its models and of its `lm_head` (see
`liger_chunked.deferred.swap`), and sets apart what another trainer left on the instance, TRL's head and accelerate's
autocast. Taking them off restores both.

    heads = Heads(HeadSettings(logits_budget=2**28))
    heads.set([trainer.model, trainer.ref_model])
    heads.give(trainer.model, HeadSettings(...))    # in place of TRL's `add_fused_lm_head`
    model(**inputs, labels=labels, fused_lm_head=True)    # TRL's `FusedCausalLMOutput`, by `linear_token_stats`
    model(**inputs).logits                                # a stand-in, see `defer_logits`
    heads.take_off()
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import weakref
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel
from trl.trainer import utils

from liger_chunked.deferred.code import FORWARD_SLOTS, unwrapped
from liger_chunked.engine import linear_token_stats
from liger_chunked.fused_head import check_fields, fields_of, statistics_of
from liger_chunked.integrations.transformers import HeadInput
from liger_chunked.integrations.transformers.attach import NO_HEAD, check_head, rebind, update
from liger_chunked.integrations.transformers.detect import STOCK, head_of, inner_model
from liger_chunked.integrations.transformers.forward import STATE, ForwardState, add_keywords
from liger_chunked.kept_ids import KeptIds
from liger_chunked.shared_prefix.share import share_pass
from liger_chunked.types import Head, shown

# With the automatic budget, DPO of Qwen2.5-0.5B on 8 x 2048 tokens took 0.55 GiB more than TRL's head on Liger-Kernel's
# layers.
HEAD_BUDGET = 512 * 2**20


@dataclass(frozen=True)
class HeadSettings:
    """The arguments of TRL's `add_fused_lm_head`, and ours.

    - `temperature`, `cast_lm_head_to_fp32`, `outputs` (of `fused_lm_head`): TRL's
    - `logits_budget`, `logits_dtype`: see `LogitOptions`
    - `share_prefix`: see `patch_trl`
    """

    temperature: float = 1.0
    cast_lm_head_to_fp32: bool = False
    outputs: tuple[str, ...] = ("log_probs",)
    logits_budget: int = HEAD_BUDGET
    logits_dtype: torch.dtype | None = None
    share_prefix: bool | str = False

    def __post_init__(self) -> None:
        check_fields(self.outputs)


# The newest `Heads` of a model.
_NEWEST: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Heads]] = weakref.WeakKeyDictionary()
# What accelerate and TRL set on an instance.
_SLOTS = ("forward", "_original_forward", "_is_accelerate_prepared")


@dataclass
class _Record:
    """What is known of a trainer's model, or of the module that wraps it.

    Between `set`s all but `settings` and `ours` are None:

    - `settings`: given to the model by `give`
    - `before`: why the model was patched before
    - `theirs`: what others have set on the instance
    - `ours`: what this trainer left on the instance, for the next `set`
    - `cast`: the model's head, TRL's forward of it, and the hook in its place
    """

    settings: HeadSettings | None = None
    before: ForwardState | None = None
    theirs: dict[str, Any] | None = None
    ours: dict[str, Any] | None = None
    cast: tuple[Any, Any, Any] | None = None


class Heads:
    """The heads of one trainer's models.

    Args:
        plain: settings of the models that get no others by `give`, because the trainer reads their logits.
    """

    def __init__(self, plain: HeadSettings) -> None:
        self.plain = plain
        self._records: weakref.WeakKeyDictionary[nn.Module, _Record] = weakref.WeakKeyDictionary()

    def _record(self, module: nn.Module) -> _Record:
        return self._records.setdefault(module, _Record())

    def set(self, models: Iterable[nn.Module]) -> None:
        """Set the heads of models, maybe wrapped (PEFT); those of another trainer come off first."""
        for model in models:
            inner = inner_model(model)
            state = vars(inner).get(STATE)
            if _newest(inner) is not self or state is None or state.rewrite is None:
                self._set(inner, state)
                rebind(model, inner)
            self._set_cast_apart(inner)
            # A trainer of TRL's may have been made since the first call.
            of_trl = any(newer_head(module) is not None for module in {model, inner})
            for module in {model, inner}:
                if of_trl or self._record(module).theirs is None:
                    self._set_apart(module, of_trl)

    def give(self, model: nn.Module, settings: HeadSettings) -> None:
        """Set the head of a model, maybe wrapped, with settings of its own."""
        inner = inner_model(model)
        self._record(inner).settings = settings
        self.set([model])
        self._update(inner)

    def settings_of(self, model: nn.Module) -> HeadSettings:
        """Return the settings of a model's head, maybe wrapped."""
        record = self._records.get(inner_model(model))
        return self.plain if record is None or record.settings is None else record.settings

    def _set(self, model: PreTrainedModel, state: ForwardState | None) -> None:
        check_head(model)
        before = _newest(model)
        if before is not None and before is not self:
            before.take_off()
            state = vars(model).get(STATE)
        _NEWEST[model] = weakref.ref(self)
        if state is not None and state.rewrite is not None:  # a copy of a model with a trainer's head
            state = dataclasses.replace(state, **NO_HEAD)
        self._record(model).before = state or ForwardState()
        self._update(model)

    def _update(self, model: PreTrainedModel) -> None:
        settings = self.settings_of(model)
        rewrite = functools.partial(_rewritten, settings)
        update(model, head_fn=True, rewrite=rewrite, logits_budget=settings.logits_budget, always=True)

    def _set_apart(self, module: nn.Module, of_trl: bool) -> None:
        """Remember what is set on an instance, and take off what a trainer of TRL's left."""
        record, state = self._record(module), vars(module)
        record.theirs = {name: state[name] for name in _SLOTS if name in state}
        if isinstance(module, FSDPModule):  # once for ever, and accelerate's mark says so
            return
        if record.ours is not None:
            for name in record.theirs:
                del state[name]
            state.update(record.ours)
            record.ours = None
        elif of_trl:
            _clear(module)

    def _set_cast_apart(self, model: PreTrainedModel) -> None:
        """Let a head defer that TRL casts to float32 and multiplies by itself: a hook casts its input instead."""
        head: Any = head_of(model)
        function = vars(head).get("forward")
        if getattr(function, "__module__", "").startswith("trl."):
            del head.forward
            self._record(model).cast = head, function, head.register_forward_pre_hook(_in_dtype_of_weight)

    def take_off(self) -> None:
        """Restore the models as they were before `set`."""
        for module, record in [*self._records.items()]:
            state: Any = vars(module)
            if record.before is not None:
                update(cast(PreTrainedModel, module), **vars(record.before))
                if _newest(module) is self:
                    del _NEWEST[module]
            if record.cast is not None:
                head, function, hook = record.cast
                hook.remove()
                vars(head).setdefault("forward", function)
            # A newer trainer of TRL's may have set its own head meanwhile.
            if record.theirs is not None and not isinstance(module, FSDPModule) and newer_head(module) is None:
                record.ours = {name: state.pop(name) for name in _SLOTS if name in state}
                state.update(record.theirs)
            record.before = record.theirs = record.cast = None


def _newest(model: nn.Module) -> Heads | None:
    reference = _NEWEST.get(model)
    return None if reference is None else reference()


def language_models(values: Iterable[Any]) -> Iterator[nn.Module]:
    """Yield what are models with an lm_head, maybe wrapped (DDP, PEFT)."""
    for x in values:
        if not isinstance(x, nn.Module):
            continue
        try:
            inner = inner_model(x)
        except TypeError:
            continue
        if head_of(inner) is not None:
            yield x


def _in_dtype_of_weight(head: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(x.to(head.weight.dtype) for x in args)


add_keywords("fused_lm_head", "kept_ids")


def _rewritten(settings: HeadSettings, model: PreTrainedModel, arguments: dict[str, Any]) -> dict[str, Any]:
    """Turn a trainer's call into one with `head_fn`, on the trie of its batch if prompts are shared."""
    kept = arguments.pop("kept_ids", None)
    if "fused_lm_head" in arguments and newer_head(model) is not None:
        return arguments
    is_fused = arguments.pop("fused_lm_head", False)
    if kept is not None and not is_fused:
        raise ValueError(
            f"kept_ids is read by fused_lm_head=True alone, got {shown(kept)} without it: pass fused_lm_head=True, or "
            "leave kept_ids out and pass kept= to the loss in your head_fn"
        )
    if is_fused:
        routed = bool(arguments.get("output_router_logits"))
        arguments["head_fn"] = functools.partial(fused_output, settings=settings, kept=kept, routed=routed)
    head_fn = arguments.pop("head_fn", None)
    if head_fn is None:
        return arguments
    if _takes(type(model).forward, "use_cache"):
        arguments["use_cache"] = False  # as TRL's own head
    else:
        arguments.pop("use_cache", None)  # which TRL passes to a backbone
    batch = None
    if settings.share_prefix is not False:
        batch = share_pass(model, arguments, always=settings.share_prefix is True)
    if batch is None:
        return {**arguments, "head_fn": head_fn}
    own = ("input_ids", "attention_mask", "logits_to_keep")
    others = {name: x for name, x in arguments.items() if name not in {*own, *batch.inputs}}
    head_fn = batch.head_fn(head_fn, logits_to_keep=arguments.get("logits_to_keep", 0))
    return {**batch.inputs, **others, "head_fn": head_fn}


@functools.cache
def _takes(forward: Any, name: str) -> bool:
    parameters = inspect.signature(forward).parameters.values()
    return any(x.name == name or x.kind is x.VAR_KEYWORD for x in parameters)


NO_AUX_LOSS = (
    "router_aux_loss_coef is set, and the model returns no load-balancing loss of its router, nor router logits with "
    "num_experts and num_experts_per_tok in its config: pass router_aux_loss_coef=0.0"
)


def fused_output(
    head: Head, input: HeadInput, *, settings: HeadSettings, kept: KeptIds | None = None, routed: bool = False
) -> Any:
    """Return TRL's `FusedCausalLMOutput`: fields (B, T - 1), or (B, T) for `shift_labels`.

    `kept`, the ids that a sampler kept at each position of `input.target`, is the argument `kept_ids` of the model.
    `loss` is the NLL over `num_items_in_batch` or valid tokens, plus the auxiliary loss, which `routed` requires.
    """
    if routed and input.aux_loss is None:
        raise ValueError(NO_AUX_LOSS)
    autocast: Any = nullcontext()
    if settings.cast_lm_head_to_fp32:
        head = Head(head.weight.float(), None if head.bias is None else head.bias.float())
        input = dataclasses.replace(input, hidden_states=input.hidden_states.float())
        autocast = torch.autocast(input.hidden_states.device.type, enabled=False)
    with autocast:
        stats = linear_token_stats(
            head.weight,
            input.hidden_states,
            input.target,
            head.bias,
            outputs=statistics_of(settings.outputs),
            softcap=input.options.softcap,
            logit_scale=input.options.logit_scale,
            temperature=settings.temperature,
            logits_budget=settings.logits_budget,
            logits_dtype=settings.logits_dtype,
            kept=kept,
        )
    end = None if input.shift_labels is not None else -1  # TRL drops the last position
    fields = {name: x[:, :end] for name, x in fields_of(stats, settings.outputs).items()}
    label_mask = input.target[:, :end] != -100
    num_items = input.num_items_in_batch
    if isinstance(num_items, Tensor):
        num_items = num_items.clamp(min=1)
    loss = -fields["log_probs"].sum() / (label_mask.sum().clamp(min=1) if num_items is None else num_items)
    if input.added_loss is not None:
        loss = loss + input.added_loss
    return utils.FusedCausalLMOutput(loss=loss, label_mask=label_mask, aux_loss=input.aux_loss, **fields)


# What TRL and accelerate leave on an instance

_BELOW = "original_forward"  # of a closure of TRL's head: the forward that it took the place of


def newer_head(model: nn.Module) -> Any:
    """Return the function that TRL's own `add_fused_lm_head` set on a model, or None: ours is no instance's forward."""
    parts = (part for slot in FORWARD_SLOTS for part in unwrapped(vars(model).get(slot)))
    return next((part for part in parts if _is_trls_head(part)), None)


def _is_trls_head(function: Any) -> bool:
    code = getattr(function, "__code__", None)
    return code is not None and function.__globals__ is vars(utils) and _BELOW in code.co_freevars


def _clear(model: nn.Module) -> None:
    """Take off TRL's heads and accelerate's autocast of an earlier trainer, so that accelerate prepares a model anew.

    They would compute in place of a newer head. What somebody else put around them stays, and them with it.
    """
    state = vars(model)
    while (below := _below(model)) is not None:
        state.pop("_original_forward", None)
        function = getattr(below, "__func__", None)
        if hasattr(function, STOCK) or any(vars(cls).get("forward") is function for cls in type(model).__mro__):
            del state["forward"]
        else:
            state["forward"] = below
    state.pop("_is_accelerate_prepared", None)


def _below(model: nn.Module) -> Any:
    """Return the forward under TRL's outermost head, or under accelerate's autocast; None: nothing to take off."""
    parts = [*unwrapped(vars(model).get("forward"))]
    head = newer_head(model)
    if head is not None:
        below = inspect.getclosurevars(head).nonlocals[_BELOW]
    else:
        below = vars(model).get("_original_forward")
        head = getattr(below, "__func__", below)
    around = itertools.takewhile(lambda part: part is not head, parts)
    return below if head in parts and all(map(_is_accelerates, around)) else None


def _is_accelerates(wrapper: Any) -> bool:
    """Whether this is a part of the autocast that accelerate sets on a prepared model, or a bound TRL head."""
    function = getattr(wrapper, "__func__", wrapper)
    module = getattr(function, "__globals__", {}).get("__name__") or type(function).__module__
    return module.partition(".")[0] in ("accelerate", "torch") or _is_trls_head(function)
