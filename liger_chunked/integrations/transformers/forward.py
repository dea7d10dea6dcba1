"""The one forward that every patched model gets: its own, or a `head_fn`, or its own with head and loss fused."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.utils import ModelOutput, can_return_tuple

from liger_chunked.engine import Like, Returns, loss_and, one_operation
from liger_chunked.integrations.transformers.head import (
    STOCK,
    HeadFn,
    HeadInput,
    arguments,
    forget_facts,
    head_facts,
    inner_model,
    run_backbone,
    run_head,
)
from liger_chunked.integrations.transformers.layers import causal_lm_loss
from liger_chunked.integrations.transformers.patches import (
    Patches,
    forward_slot,
    has_own_forward,
    replace_method,
    replacement_of,
    restore_method,
)
from liger_chunked.losses import LigerFusedLinearCrossEntropyLoss
from liger_chunked.types import Head

_STATE = "_liger_forward"  # of a model or class


@dataclass(frozen=True)
class Fusion:
    """How head and loss are fused: what `model.forward` returns, and the most bytes of logits alive at once."""

    output: type[Any]
    logits_budget: int | None = None


@dataclass(frozen=True)
class ForwardState:
    """Why a model, or a class of models, has our forward, and how to put its own back.

    - `head_fn`: it was asked to know that keyword
    - `fusion`: how head and loss are fused in training; None for not at all
    - `patches`: what was replaced on a class

    A state is never changed, only exchanged: a shallow copy of a model shares it.
    """

    head_fn: bool = False
    fusion: Fusion | None = None
    patches: Patches = field(default_factory=Patches)


def _cross_entropy_returns(given: dict[str, Any]) -> Returns:
    accuracy = {"token_accuracy": Like(dtype="float32")} if given["token_accuracy"] else {}
    return loss_and(lambda token_accuracy=None: token_accuracy, accuracy, Like())


@one_operation(_cross_entropy_returns)
def _cross_entropy(
    weight: Tensor, input: Tensor, target: Tensor, bias: Tensor | None = None, *,
    num_items: int | Tensor | None = None, token_accuracy: bool, ignore_index: int, softcap: float | None = None,
    logit_scale: float, logits_budget: int | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The loss, and the token accuracy where it was asked for."""
    loss = LigerFusedLinearCrossEntropyLoss(
        ignore_index=ignore_index,
        softcap=softcap,
        logit_scale=logit_scale,
        logits_budget=logits_budget,
        return_token_accuracy=bool(token_accuracy),
    )
    result = loss(weight, input, target, bias, num_items=num_items)
    return (result[0], result[1].token_accuracy) if token_accuracy else (result, None)


@can_return_tuple
def _without_logits(
    model: PreTrainedModel, forward: Callable[..., Any] | None, fusion: Fusion, token_accuracy: bool, **kwargs: Any
) -> ModelOutput:
    """What `forward`, or else that of the model's class, returns for labels, without logits."""
    input = run_backbone(model, forward, **kwargs)

    def cross_entropy(head: Head, input: HeadInput) -> tuple[Tensor, Tensor | None]:
        return _cross_entropy(
            head.weight,
            input.hidden_states,
            input.target,
            head.bias,
            num_items=input.num_items_in_batch,
            token_accuracy=token_accuracy,
            ignore_index=input.options.ignore_index,
            softcap=input.options.softcap,
            logit_scale=input.options.logit_scale,
            logits_budget=fusion.logits_budget,
        )

    loss, accuracy = run_head(model, input, cross_entropy)
    if input.aux_loss is not None:
        loss = loss + input.aux_loss_coef * input.aux_loss.to(loss.device)
    shared = {name: x for name, x in input.outputs.items() if name in fusion.output.__dataclass_fields__}
    if input.aux_loss is not None:
        shared["aux_loss"] = input.aux_loss
    result = fusion.output(loss=loss, **shared)
    if accuracy is not None:
        result["token_accuracy"] = accuracy
    return result


def output_of(model_class: type[PreTrainedModel]) -> type[ModelOutput]:
    """What `forward` returns, by its annotation: the class has changed with the versions of transformers."""
    returned = typing.get_type_hints(inspect.unwrap(model_class.forward))["return"]
    return next(t for t in typing.get_args(returned) or (returned,) if issubclass(t, ModelOutput))


def _fusion(model: PreTrainedModel) -> Fusion | None:
    """Of the model, otherwise of its class."""
    states = (vars(model).get(_STATE), getattr(type(model), _STATE, None))
    return next((state.fusion for state in states if state is not None and state.fusion is not None), None)


def has_causal_loss(model: PreTrainedModel) -> bool:
    """Whether `model.loss_function` is the causal loss now: somebody may have set another one since patching."""
    return model.loss_function in (ForCausalLMLoss, causal_lm_loss)


def _fuses(model: PreTrainedModel, skip_logits: bool | None, kwargs: dict[str, Any]) -> bool:
    labelled = kwargs.get("labels") is not None or kwargs.get("shift_labels") is not None
    if skip_logits and not labelled:
        raise ValueError("skip_logits=True needs labels= or shift_labels=: there is nothing else to return")
    if not (labelled and (model.training if skip_logits is None else skip_logits)):
        return False
    if has_causal_loss(model):
        return True
    if skip_logits:
        raise ValueError(
            f"skip_logits=True is the causal loss, but the loss_function of this model is {model.loss_function}: leave "
            "skip_logits out, and that function gets its logits"
        )
    return False


# Somebody else's code: nothing says that it can be traced.
_run_untraced = torch.compiler.disable(run_head)


def _forward(
    model: PreTrainedModel, stock: Callable[..., Any], *args: Any, head_fn: HeadFn | None = None, **kwargs: Any
) -> Any:
    """`stock`, the forward of `model`, that also knows `head_fn` and, where the loss is fused, `skip_logits`."""
    kwargs = arguments(model, args, kwargs)
    if head_fn is not None:
        return _run_untraced(model, run_backbone(model, **kwargs), head_fn)
    fusion = _fusion(model)
    if fusion is not None:
        skip_logits = kwargs.pop("skip_logits", None)
        token_accuracy = kwargs.pop("return_token_accuracy", False)
        if _fuses(model, skip_logits, kwargs):
            # A class that was patched: a subclass may have called this forward from its own.
            forward = stock.func if isinstance(stock, functools.partial) else None
            head_facts(model, forward, causal_loss=True)
            return _without_logits(model, forward, fusion, token_accuracy, **kwargs)
    return stock(**kwargs)


# The signature of a forward stays, in both of these: generate and Trainer read it.


def _taught_class(stock: Callable[..., Any]) -> Callable[..., Any]:
    """`_forward` for every model of a class whose forward is `stock`."""
    stock = getattr(stock, STOCK, stock)  # of a family that is patched already

    @functools.wraps(stock)
    def forward(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        return _forward(self, functools.partial(stock, self), *args, **kwargs)

    vars(forward)[STOCK] = stock
    return forward


def _taught_instance(model: PreTrainedModel, own: Callable[..., Any]) -> Callable[..., Any]:
    """`_forward` for one model on which somebody has set the forward `own`."""
    # A partial, which a model can be pickled with.
    forward = functools.update_wrapper(functools.partial(_forward, model, own), own)
    vars(forward)[STOCK] = own
    return forward


def _knows_ours(own: Callable[..., Any]) -> bool:
    """Whether a forward that somebody has set calls `_forward`: Trainer's does, as it wraps autocast around ours."""
    return hasattr(inspect.unwrap(own, stop=lambda forward: hasattr(forward, STOCK)), STOCK)


def _teach_model(model: PreTrainedModel) -> None:
    if has_own_forward(model):
        slot = forward_slot(model)
        own = vars(model)[slot]
        if not _knows_ours(own):
            vars(model)[slot] = _taught_instance(model, own)
            return
    replace_method(model, "forward", _taught_class)


def _unteach_model(model: PreTrainedModel) -> None:
    if replacement_of(model) is _taught_class:
        restore_method(model)
    slot = forward_slot(model)
    forward = vars(model).get(slot)
    if isinstance(forward, functools.partial) and forward.func is _forward:
        vars(model)[slot] = vars(forward)[STOCK]


def _teach(owner: PreTrainedModel | type[PreTrainedModel], **wish: Any) -> None:
    """Add a wish; with the first one, the owner gets our forward."""
    state = vars(owner).get(_STATE)
    if state is None:
        state = ForwardState(patches=Patches())
        if isinstance(owner, type):
            state.patches.set(owner, "forward", _taught_class(owner.forward))
        else:
            _teach_model(owner)
    _set_state(owner, replace(state, **wish))


def _forget(owner: PreTrainedModel | type[PreTrainedModel], **wish: Any) -> None:
    """Withdraw one wish; without any left, the owner gets its own forward back."""
    state = vars(owner).get(_STATE)
    if state is None:
        return
    state = replace(state, **wish)
    if state.head_fn or state.fusion is not None:
        _set_state(owner, state)
        return
    state.patches.undo()
    if not isinstance(owner, type):
        _unteach_model(owner)
    delattr(owner, _STATE)
    forget_facts(owner)


def _set_state(owner: PreTrainedModel | type[PreTrainedModel], state: ForwardState) -> None:
    if isinstance(owner, type):
        setattr(owner, _STATE, state)
    else:
        vars(owner)[_STATE] = state


def fuse(owner: PreTrainedModel | type[PreTrainedModel], fusion: Fusion) -> None:
    """Let a model, or every model of a class, train without logits.

    Raises:
        ValueError: a fused loss is not what the model computes. Models of a class are checked before their first step.
    """
    if not isinstance(owner, type):
        head_facts(owner, causal_loss=True)
    _teach(owner, fusion=fusion)


def unfuse(owner: PreTrainedModel | type[PreTrainedModel]) -> None:
    """Undo `fuse`."""
    _forget(owner, fusion=None)


def attach_head(model: nn.Module) -> None:
    """Let `model(..., head_fn=fn)` run `fn(head, input)` in place of head and loss, and return what it returns.

    Calls without `head_fn` stay as they were. `fn` gets `Head` and `HeadInput`, runs inside `model.forward` (and so
    under the hooks of DDP, FSDP, ZeRO and autocast), and returns tensors, in tuples, dicts or a `ModelOutput` if they
    are several: in containers of other kinds FSDP and ZeRO do not find them. `labels` and `shift_labels` given to the
    call arrive in `HeadInput`, padded where PEFT prepends virtual tokens.

    Args:
        model: a transformers model with an `lm_head`, or what wraps one (PEFT, DDP, FSDP, DeepSpeed).

    Raises:
        TypeError: there is no transformers model in it.
        ValueError: that model has no backbone with an `lm_head`, an `lm_head` that is more than weight and bias, or
            logits that are no `transform(lm_head(last_hidden_state))`; see `logit_options`.

    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from liger_chunked import linear_token_stats
    >>> sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    >>> model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1))
    >>> attach_head(model)
    >>> def logps(head, input):
    ...     return linear_token_stats(head.weight, input.hidden_states, input.target, head.bias).logps
    >>> ids = torch.randint(64, (1, 8))
    >>> model(ids, labels=ids, head_fn=logps).shape
    torch.Size([1, 8])
    """
    inner = inner_model(model)
    head_facts(inner)
    _teach(inner, head_fn=True)


def detach_head(model: nn.Module) -> None:
    """Undo `attach_head`."""
    _forget(inner_model(model), head_fn=False)
