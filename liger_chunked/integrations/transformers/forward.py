"""What a patched model adds to its own forward: the keywords `head_fn`, `skip_logits` and `return_token_accuracy`.

The model's own forward always runs, with every wrapper that is set on it. Its head defers (see
`liger_chunked.deferred`), and the loss that the forward calls is fused.

    model(ids, labels=labels)                    the forward's own loss, fused; `logits` are a stand-in
    model(ids, labels=labels, head_fn=fn)        the forward runs without a loss, then fn(head, input), still inside it

A model's class is replaced by a subclass (`ModelPatch`) whose `forward` looks up the class's when it runs. A forward
that was set on the instance before, such as accelerate's autocast, bypasses that subclass; therefore its `__call__`
reads the keywords, and runs `head_fn` itself if no patched forward did.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from liger_chunked.deferred import Deferral, DeferredLogits, deferral_of, is_deferring, request, set_deferral
from liger_chunked.deferred.defer import refusal_of
from liger_chunked.deferred.lazy import REASON, outside_graphs
from liger_chunked.deferred.request import ASKED, Asked, Request, current, requested
from liger_chunked.deferred.swap import STOCK, Patch
from liger_chunked.device import is_gpu
from liger_chunked.integrations.transformers.detect import head_of, inner_model
from liger_chunked.integrations.transformers.head_input import HeadFn, HeadInput, kept
from liger_chunked.private import skip_frame, tracing_callback
from liger_chunked.types import Head, LogitOptions

STATE = "_liger_forward"  # attribute of a model

Rewrite = Callable[[PreTrainedModel, dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class Fusion:
    """Settings of the fused loss."""

    logits_budget: int | None = None
    in_evaluation: bool = True


@dataclass(frozen=True)
class ForwardState:
    """Why a model is patched.

    - `head_fn`: `attach_head` was called
    - `fusion`: training is fused
    - `rewrite`: turns the arguments of a call with one of `add_keywords`, or with `head_fn`, into those of a call
      without the former
    - `logits_budget`: of losses on stand-ins that are not of fused training, which has its own
    - `always`: calls without keywords defer too, in training and in evaluation
    """

    head_fn: bool = False
    fusion: Fusion | None = None
    rewrite: Rewrite | None = None
    logits_budget: int | None = None
    always: bool = False

    @property
    def deferral(self) -> Deferral:
        """How the head defers: as `apply_liger_kernel` asked, or, for `always`, in training and evaluation."""
        if self.fusion is None or self.always:
            return Deferral(self.logits_budget, in_training=self.always, of_trainer=self.always, whole_vocabulary=True)
        return Deferral(self.fusion.logits_budget, in_evaluation=self.fusion.in_evaluation, whole_vocabulary=True)


def state_of(model: nn.Module) -> ForwardState | None:
    state: ForwardState | None = vars(model).get(STATE)
    return state


@dataclass(frozen=True)
class ModelPatch(Patch):
    """The class of a patched model: `__call__` and `forward`, which runs the one that the class has at that moment."""

    def methods(self, cls: Any) -> dict[str, Any]:
        stock_call, stock = cls.__call__, cls.forward

        def __call__(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
            if _KEYWORDS.isdisjoint(kwargs):
                return stock_call(self, *args, **kwargs)
            return _outside(self, stock_call, args, kwargs)

        def forward(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
            hold_head(self)
            if (items := kwargs.get("num_items_in_batch")) is not None:
                kwargs["num_items_in_batch"] = _at_least_one(items)
            # Without an active request, no call with keywords waits for this forward.
            if _KEYWORDS.isdisjoint(kwargs) and not request.ACTIVE:
                return cls.forward(self, *args, **kwargs)
            return _inside(self, cls.forward, args, kwargs)

        # functools.wraps would set `__wrapped__`, and accelerate would unwrap this function.
        forward.__name__, forward.__qualname__, forward.__doc__ = stock.__name__, stock.__qualname__, stock.__doc__
        forward.__module__ = stock.__module__
        vars(forward)["__signature__"] = inspect.signature(stock)
        vars(forward)[STOCK] = stock
        return {"__call__": __call__, "forward": forward}

    def key(self, cls: Any) -> Hashable:
        return cls.forward  # `forward` copies its signature


def _at_least_one(items: Any) -> Any:
    """A step without items has a loss of 0, as every loss of the library; the model's own division gives NaN."""
    if isinstance(items, Tensor):
        return items.where(items != 0, 1)
    return items or 1


# Keywords of all patched models, and those of trainers.
_KEYWORDS = {"head_fn", "skip_logits", "return_token_accuracy"}


def add_keywords(*names: str) -> None:
    """Let every patched model look for these keywords; `ForwardState.rewrite` removes them."""
    _KEYWORDS.update(names)


def hold_head(model: PreTrainedModel) -> None:
    """Let the current head defer as this model asks: PEFT, FSDP and the user may have replaced it.

    A shallow copy of a model shares its head, and may have another state.
    """
    head = head_of(model)
    # Dynamo cannot trace the rest, which an earlier call has done; a head with an adapter keeps its class.
    if head is None or (torch.compiler.is_compiling() and is_deferring(head)):
        return
    _hold(model, head)


@torch.compiler.disable(reason=REASON)  # type: ignore[untyped-decorator]
def _hold(model: PreTrainedModel, head: nn.Module) -> None:
    state = state_of(model)
    if state is not None and deferral_of(head) != state.deferral:
        set_deferral(head, state.deferral, model)


@torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
def _outside(
    model: PreTrainedModel, stock_call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call a model whose keywords no wrapper of its forward would know."""
    if tracing_callback() is not None:
        # From now on Dynamo compiles what these call, and breaks no graph here. Functions that call them inline them.
        skip_frame(type(model).__call__)
        skip_frame(type(model).forward)
    plan = _planned(model, args, kwargs)
    with requested(waiting=plan, **plan.changes):
        outputs = stock_call(model, *plan.args, **plan.arguments)
    # A forward that was set on the instance bypassed ours.
    return outputs if plan.finished else plan.finish(outputs)


@torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
def _inside(model: PreTrainedModel, stock: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the forward of a call with keywords, given here or taken by `_outside`."""
    if not _KEYWORDS.isdisjoint(kwargs):  # `model.forward(...)`, as PEFT calls it
        plan = _planned(model, args, kwargs)
        with requested(**plan.changes):
            if tracing_callback() is not None:
                return plan.finish(plan.run_compiled(stock, plan.args, plan.arguments))
            return plan.finish(stock(model, *plan.args, **plan.arguments))
    plan = current().waiting
    if plan is None or plan.finished or plan.model is not model:
        return stock(model, *args, **kwargs)
    if tracing_callback() is not None:
        return plan.finish(plan.run_compiled(stock, args, kwargs))
    return plan.finish(stock(model, *args, **kwargs))


class _Plan:
    """How a call with keywords runs: the arguments of the stock forward, and what becomes of its outputs.

    `changes` are those of the request that is active while the forward runs.
    """

    def __init__(
        self, model: PreTrainedModel, args: tuple[Any, ...], arguments: dict[str, Any], **changes: Any
    ) -> None:
        self.model, self.args, self.arguments, self.finished = model, args, arguments, False
        self.sources: list[Any] = []  # of the heads' calls
        self.changes = {"sources": self.sources, **changes}
        self.gave_zero = False  # whether a cross entropy was withheld in a compiled graph

    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
    def run_compiled(self, stock: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the stock forward, which Dynamo compiles."""
        head = head_of(self.model)
        if head is None:
            return stock(self.model, *args, **kwargs)
        accuracies = current().accuracies
        before, asked = vars(head).get(ASKED), Asked(current())
        vars(head)[ASKED] = asked
        try:
            outputs = stock(self.model, *args, **kwargs)
        finally:
            vars(head)[ASKED] = before
        self.gave_zero = asked.gave_zero
        if accuracies is not None:
            accuracies.extend(asked.accuracies)
        return outputs

    @outside_graphs
    def finish(self, outputs: Any) -> Any:
        """Return the result of the call. The code in it may run other models: nothing is asked of these."""
        self.finished = True
        with requested(**vars(Request())):
            return self.result(outputs)

    def result(self, outputs: Any) -> Any:
        raise NotImplementedError


@functools.lru_cache(maxsize=256)
def _parameters(forward: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(forward).parameters


@outside_graphs
def _planned(model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Plan:
    args, kwargs = _named(model, args, kwargs)
    state = state_of(model)
    if state is not None and state.rewrite is not None:
        kwargs = state.rewrite(model, kwargs)
    hold_head(model)
    head_fn = kwargs.pop("head_fn", None)
    if head_fn is not None:
        for name in ("skip_logits", "return_token_accuracy"):
            kwargs.pop(name, None)
        return _HeadCall(model, args, kwargs, head_fn)
    return _LossCall(model, args, kwargs)


def _named(model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return positional arguments under their names; as they are for a forward that takes any number of them."""
    _, *parameters = _parameters(type(model).forward).values()
    if any(x.kind is x.VAR_POSITIONAL for x in parameters):
        return args, dict(kwargs)
    names = [x.name for x in parameters if x.kind in (x.POSITIONAL_ONLY, x.POSITIONAL_OR_KEYWORD)]
    if len(args) > len(names):
        raise TypeError(f"{type(model).__name__} takes {len(names)} positional arguments, got {len(args)}")
    if twice := [name for name in names[: len(args)] if name in kwargs]:
        raise TypeError(f"{type(model).__name__} got multiple values for argument {twice[0]!r}")
    # Dynamo of torch 2.9 cannot trace `strict=False`.
    return (), dict(zip(names, args)) | kwargs  # noqa: B905


class _LossCall(_Plan):
    """A call with `skip_logits` or `return_token_accuracy`."""

    def __init__(self, model: PreTrainedModel, args: tuple[Any, ...], arguments: dict[str, Any]) -> None:
        self.skip_logits = arguments.pop("skip_logits", None)
        wants_accuracy = arguments.pop("return_token_accuracy", False)
        state = state_of(model)
        is_fused = state is not None and state.fusion is not None  # attach_head alone fuses no loss
        self.accuracies: list[Any] | None = [] if wants_accuracy and is_fused else None
        changes = {} if self.skip_logits is None else {"defer": bool(self.skip_logits)}
        super().__init__(model, args, arguments, accuracies=self.accuracies, **changes)
        if self.skip_logits and all(arguments.get(name) is None for name in ("labels", "shift_labels")):
            raise ValueError("skip_logits=True needs labels= or shift_labels=: there is nothing else to return")

    def result(self, outputs: Any) -> Any:
        logits = _logits_of(outputs)
        if self.skip_logits:
            if not isinstance(logits, DeferredLogits) or logits.is_computed:
                raise ValueError(
                    f"skip_logits=True, but {type(self.model).__name__} used its logits: "
                    f"{_why_real(self.model, self.sources)}. Leave skip_logits out, and the model gets them"
                )
            if hasattr(outputs, "logits"):
                outputs["logits"] = None
        if self.accuracies and hasattr(outputs, "logits"):
            outputs["token_accuracy"] = self.accuracies[-1]
        return outputs


_LOSS_ARGUMENTS = ("labels", "shift_labels", "num_items_in_batch", "ignore_index")


class _HeadCall(_Plan):
    """A call with `head_fn`, which takes the place of the loss."""

    def __init__(
        self, model: PreTrainedModel, args: tuple[Any, ...], arguments: dict[str, Any], head_fn: HeadFn
    ) -> None:
        self.head_fn = head_fn
        self.loss_arguments = loss_arguments = {name: arguments.pop(name, None) for name in _LOSS_ARGUMENTS}
        keep = arguments.get("logits_to_keep")
        # Models take the last positions, or the same ones of each sample.
        self.keep = arguments.pop("logits_to_keep") if isinstance(keep, Tensor) and keep.ndim > 1 else None
        takes = _parameters(type(model).forward)
        takes_all = any(x.kind is x.VAR_KEYWORD for x in takes.values())
        # The forward gets its labels: it may add a router's loss, or make a decoder's input of them. Its cross entropy
        # returns 0, so that its loss is the sum of the other terms.
        labels = loss_arguments["labels"] if loss_arguments["labels"] is not None else loss_arguments["shift_labels"]
        self.own_loss = labels is not None and ("labels" in takes or takes_all)
        if self.own_loss:
            loss_kwargs = {name: x for name, x in loss_arguments.items() if name in takes or takes_all}
            arguments |= {name: x for name, x in loss_kwargs.items() if x is not None} | {"labels": labels}
        if "return_dict" in takes or takes_all:
            arguments["return_dict"] = True
        super().__init__(model, args, arguments, defer=True, withhold=True)

    def result(self, outputs: Any) -> Any:
        logits = _logits_of(outputs)
        if not isinstance(logits, DeferredLogits) or logits.is_computed:
            raise ValueError(
                f"head_fn takes the place of the logits, and {type(self.model).__name__} needs them: "
                f"{_why_real(self.model, self.sources)}"
            )
        ignore_index = self.loss_arguments["ignore_index"]
        options = logits.logit_options(-100 if ignore_index is None else ignore_index)
        num_items = self.loss_arguments["num_items_in_batch"]

        def compute(head: Head, hidden_states: Tensor) -> Any:
            input = HeadInput(
                hidden_states if self.keep is None else kept(hidden_states, self.keep),
                options,
                outputs,
                self.loss_arguments["labels"],
                self.loss_arguments["shift_labels"],
                None if num_items is None else _at_least_one(num_items),
                _aux_loss(self.model, outputs, self.arguments.get("attention_mask")),
                getattr(outputs, "loss", None) if self.own_loss and (self.gave_zero or logits.gave_zero) else None,
            )
            return self.head_fn(head, input)

        if hasattr(outputs, "logits"):
            outputs["logits"] = None
        return logits.run(compute)


def _aux_loss(model: PreTrainedModel, outputs: Any, attention_mask: Tensor | None) -> Any:
    """Return the load-balancing loss of experts; None if router logits were not asked for, or the config has no sizes.

    Some forwards, such as Afmoe's, return router logits without a loss of them. They get Mixtral's, as in TRL.
    """
    aux_loss, router_logits = getattr(outputs, "aux_loss", None), getattr(outputs, "router_logits", None)
    config = model.config.get_text_config()
    n_experts, n_chosen = (getattr(config, name, None) for name in ("num_experts", "num_experts_per_tok"))
    if aux_loss is not None or not router_logits or not n_experts or not n_chosen:
        return aux_loss
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func  # 50 ms, for these models alone

    return load_balancing_loss_func(router_logits, n_experts, n_chosen, attention_mask)


def _logits_of(outputs: Any) -> Any:
    if hasattr(outputs, "logits"):
        return outputs.logits
    values = outputs if isinstance(outputs, tuple) else ()
    return next((x for x in values if isinstance(x, DeferredLogits)), None)


def _why_real(model: PreTrainedModel, sources: list[Any]) -> str:
    """Return why a call of a model has real logits; `sources` are those of its heads' calls."""
    head = head_of(model)
    if head is None:
        return "it has no lm_head"
    if (reason := refusal_of(head)) is not None:
        return reason
    for source in sources:
        if source.asked_by is not None:
            return f"a hook or the forward read the logits, {source.asked_by}"
    return "its lm_head returns real ones" if not sources else "its forward or a hook replaces them"


def logit_options(model: nn.Module, *, ignore_index: int = -100) -> LogitOptions:
    """Return the transform that a model's forward applies to its logits: scale and softcap.

    Runs the forward on one token and returns the recorded operations on its logits. The config is not read. A factor
    before `lm_head` is part of the hidden states.

    Args:
        model: a transformers model, maybe wrapped (DDP, PEFT).
        ignore_index: the label of tokens to skip, for the result's field.

    Returns:
        A `LogitOptions` with `softcap`, `logit_scale` and `ignore_index`; its other fields have their defaults.

    Raises:
        TypeError: `model` contains no transformers model.
        ValueError: the forward does something else with its logits than a loss can express.

    >>> from transformers import GraniteConfig, GraniteForCausalLM
    >>> sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    >>> model = GraniteForCausalLM(GraniteConfig(**sizes, num_hidden_layers=1, logits_scaling=8.0))
    >>> logit_options(model).logit_scale
    0.125
    """
    inner = inner_model(model)
    head = head_of(inner)
    if head is None:
        raise ValueError(f"{type(inner).__name__} has no lm_head")
    if (reason := refusal_of(head)) is not None:
        raise ValueError(reason)
    ids = torch.zeros((1, 1), dtype=torch.long, device=inner.device)
    inputs = {"input_ids": ids, **({"decoder_input_ids": ids} if inner.config.is_encoder_decoder else {})}
    lent = not is_deferring(head)
    if lent:
        set_deferral(head, Deferral(in_training=False))
    try:
        gpus = [inner.device] if is_gpu(inner.device) else []
        # A model in training draws random numbers for dropout: the caller's stay as they are.
        # With gradients, a factor that is computed from a parameter does not look like a number.
        sources: list[Any] = []
        asked = requested(defer=True, withhold=True, sources=sources)
        with torch.random.fork_rng(gpus), torch.enable_grad(), asked:
            logits = _logits_of(model(**inputs))
    finally:
        if lent:
            set_deferral(head, None)
    if not isinstance(logits, DeferredLogits) or logits.is_computed:
        raise ValueError(f"no loss can express what {type(inner).__name__} does: {_why_real(inner, sources)}")
    return logits.logit_options(ignore_index)
