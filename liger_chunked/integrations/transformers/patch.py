"""Patch and restore a model, or all models of a family.

A patched module gets a subclass that all modules of its class share: Dynamo compiles them once, and a copy uses its own
parameters. A family's patch sets attributes of its classes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import inspect
import logging
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from liger_chunked.integrations.transformers import detect, head, overrides, source, verify
from liger_chunked.integrations.transformers.detect import STOCK, forward_slot, inner_model, own_forward
from liger_chunked.integrations.transformers.head import STATE, Fusion
from liger_chunked.integrations.transformers.layers import Binding, Layer, causal_lm_loss
from liger_chunked.integrations.transformers.overrides import binding_of, family_modeling, family_of, rope_of
from liger_chunked.types import budget_bytes, shown

_LOGGER = logging.getLogger(__name__)

Method = Callable[..., Any]
_PATCH = "_liger_patch"  # attribute of a patched class


@dataclass(frozen=True)
class Patch:
    """A method's replacement: a layer, or None for the forward of `head.py`."""

    binding: Binding | None = None

    @property
    def method(self) -> str:
        return "forward" if self.binding is None else self.binding.layer.method


def _patched_class(cls: Any, patch: Patch) -> Any:
    return _subclass(cls, patch, getattr(cls, patch.method))


@functools.cache
def _layer_method(binding: Binding, stock: Method) -> Method:
    """Compile a method like `stock` that passes input and attributes to the layer.

    Each has its own code, because Dynamo limits compilations per code.
    """
    owner, input = inspect.signature(stock).parameters
    reads = binding.reads.items()
    attributes = "".join(f", {owner}.{n}" if needed else f", getattr({owner}, {n!r}, None)" for n, needed in reads)
    namespace: dict[str, Any] = {"_run": binding.layer.run}
    exec(f"def {binding.layer.method}({owner}, {input}):\n    return _run({input}{attributes})", namespace)
    method = namespace[binding.layer.method]
    vars(method)[STOCK] = stock
    return method


@functools.cache
def _subclass(cls: Any, patch: Patch, method: Method) -> Any:
    def reduce(self: Any, protocol: Any) -> Any:
        # Refer to the original class: nothing can import this one.
        reduced = super(subclass, self).__reduce_ex__(protocol)
        if type(self) is not subclass:
            return reduced
        make, arguments, *state = reduced
        arguments = tuple(cls if argument is subclass else argument for argument in arguments)
        return (_rebuilt, (patch, make, arguments), *state)

    named = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    if patch.binding is None:
        replacement = _class_forward(method)
    else:
        replacement = _layer_method(patch.binding, getattr(method, STOCK, method))
    namespace = {**named, "__reduce_ex__": reduce, patch.method: replacement, _PATCH: patch}
    subclass = type(cls)(cls.__name__, (cls,), namespace)
    return subclass


def _rebuilt(patch: Patch, make: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    module = make(*arguments)
    object.__setattr__(module, "__class__", _patched_class(type(module), patch))
    return module


def stock_class(cls: Any) -> Any:
    if _PATCH in vars(cls):
        return cls.__bases__[0]
    return _rebased(cls) if hasattr(cls, _PATCH) else cls


@functools.cache
def _rebased(cls: Any) -> Any:
    """Rebuild a class that, for example, `fully_shard` derived from a patched one."""
    namespace = {name: x for name, x in vars(cls).items() if name not in ("__dict__", "__weakref__")}
    return type(cls)(cls.__name__, tuple(map(stock_class, cls.__bases__)), namespace)


def patch_of(module: nn.Module) -> Patch | None:
    return getattr(type(module), _PATCH, None)


def is_patched(module: nn.Module) -> bool:
    return patch_of(module) is not None


def has_our_layer(module: nn.Module) -> bool:
    patch = patch_of(module)
    return patch is not None and patch.binding is not None


def set_patch(module: nn.Module, patch: Patch | None) -> None:
    """Set the module's only patch; None restores the method."""
    stock = stock_class(type(module))
    _set_class(module, stock if patch is None else _patched_class(stock, patch))


def _set_class(module: nn.Module, cls: Any) -> None:
    before = type(module)
    if before is cls:
        return
    object.__setattr__(module, "__class__", cls)
    # accelerate's hooks keep the previous class's bound method.
    for slot in detect.FORWARD_SLOTS:
        bound = vars(module).get(slot)
        if isinstance(bound, types.MethodType) and bound.__func__ is before.forward:
            vars(module)[slot] = types.MethodType(cls.forward, module)


_ABSENT = object()


class Patches:
    """Replaced attributes."""

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, Any, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        self._replaced.append((owner, name, vars(owner).get(name, _ABSENT), value))
        setattr(owner, name, value)

    def undo(self) -> None:
        """Restore attributes that are still ours."""
        while self._replaced:
            owner, name, before, value = self._replaced.pop()
            if vars(owner).get(name) is not value:
                continue
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)


# The forward of `head.py`.


@dataclass(frozen=True)
class ForwardState:
    """Why a model or class has our forward. Shallow copies share it."""

    head_fn: bool = False
    fusion: Fusion | None = None
    patches: Patches = field(default_factory=Patches)


def _update(owner: PreTrainedModel | type[PreTrainedModel], **reasons: Any) -> None:
    """Install our forward for the first reason; restore the original after the last."""
    before = vars(owner).get(STATE)
    state = dataclasses.replace(ForwardState() if before is None else before, **reasons)
    if state.head_fn or state.fusion is not None:
        if before is None:
            if isinstance(owner, type):
                state.patches.set(owner, "forward", _class_forward(owner.forward))
            else:
                _install(owner)
        setattr(owner, STATE, state)
    elif before is not None:
        state.patches.undo()
        if not isinstance(owner, type):
            _uninstall(owner)
        delattr(owner, STATE)
        head.forget_facts(owner)


def _class_forward(stock: Method) -> Method:
    """Return a patched class's forward, with `stock`'s signature."""
    stock = getattr(stock, STOCK, stock)  # the family may be patched already

    @functools.wraps(stock)
    def forward(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        return head.forward(self, functools.partial(stock, self), *args, **kwargs)

    vars(forward)[STOCK] = stock
    return forward


def _install(model: PreTrainedModel) -> None:
    _refuse_foreign_forward(model)
    own = own_forward(model)
    if own is None or _calls_ours(own):
        set_patch(model, Patch())
        return
    # A framework's. A partial can be pickled.
    forward = functools.update_wrapper(functools.partial(head.forward, model, own), own)
    vars(forward)[STOCK] = own
    vars(model)[forward_slot(model)] = forward


def _uninstall(model: PreTrainedModel) -> None:
    if patch_of(model) == Patch():
        set_patch(model, None)
    slot = forward_slot(model)
    forward = vars(model).get(slot)
    if isinstance(forward, functools.partial) and forward.func is head.forward:
        vars(model)[slot] = vars(forward)[STOCK]


def _calls_ours(own: Callable[..., Any]) -> bool:
    """Whether this forward wraps ours."""
    return any(hasattr(function, STOCK) for function in detect.unwrapped(own))


def _refuse_foreign_forward(model: PreTrainedModel) -> None:
    """Raise if a fused step would skip a user's forward."""
    own = own_forward(model)
    if own is None or _calls_ours(own):
        return
    if (code := detect.foreign_code(own, stock_class(type(model)))) is not None:
        name = f"{getattr(code, '__module__', None)}.{getattr(code, '__qualname__', type(code).__qualname__)}"
        raise ValueError(
            f"the forward of this {type(model).__name__} was set on the instance, to {name}, and a fused head would "
            "not call it. Set it after patching, so that it calls the patched forward, or define it in a subclass; or "
            "leave the head alone (apply_liger_kernel: fused_linear_cross_entropy=False)"
        )


def fuse(owner: PreTrainedModel | type[PreTrainedModel], fusion: Fusion | None) -> None:
    """Make a model or class train without logits; None undoes this. A class's models are checked in the first step."""
    if fusion is not None and not isinstance(owner, type):
        head.head_facts(owner, causal_loss=True)
    _update(owner, fusion=fusion)


def attach_head(model: nn.Module) -> None:
    """Make `model(..., head_fn=fn)` return `fn(head, input)`, computed in place of head and loss.

    `fn` gets `Head` and `HeadInput`, and returns a tensor, or tensors in a tuple, dict or `ModelOutput`. It runs inside
    `model.forward`, with autocast and hooks of DDP, FSDP and ZeRO.

    Raises:
        TypeError: `model` contains no transformers model.
        ValueError: the `lm_head` is more than weight and bias, the logits are not `transform(lm_head(hidden_states))`,
            or a user has set a forward on this instance.

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
    head.head_facts(inner)
    _update(inner, head_fn=True)


def detach_head(model: nn.Module) -> None:
    """Undo `attach_head`."""
    _update(inner_model(model), head_fn=False)


# Layers and heads.

FUSED = "fused_linear_cross_entropy"
APPLIED = "_liger_applied"  # attribute of a model


@dataclass
class Applied:
    """Counts of replaced classes by switch, and reasons for others; `print` shows them."""

    family: str
    replaced: dict[str, dict[str, int]] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    ropes: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    patches: Patches = field(default_factory=Patches, repr=False)

    def count(self, switch: str, name: str) -> None:
        counts = self.replaced.setdefault(switch, {})
        counts[name] = counts.get(name, 0) + 1

    def hold_ropes(self) -> None:
        for key in self.ropes:
            ROPES(*key).hold(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)  # a copy needs the rope function too
        self.hold_ropes()

    def __str__(self) -> str:
        lines = [
            f"  {switch}: " + ", ".join(f"{name} x {n}" if n > 1 else name for name, n in counts.items())
            for switch, counts in self.replaced.items()
        ]
        left = ["Left alone:", *(f"  {name}: {reason}" for name, reason in self.left.items())] if self.left else []
        return "\n".join([f"Kernels for {self.family}:", *lines, *left])


class _Rope:
    """Replaces a module's rotary function while a holder lives."""

    def __init__(self, module: str, name: str) -> None:
        self._owner, self._name = importlib.import_module(module), name
        self._patches = Patches()
        self._holders: dict[int, weakref.ref[Applied]] = {}
        self._stock: Any = None

    @property
    def stock(self) -> Any:
        return self._stock if self._holders else getattr(self._owner, self._name)

    def hold(self, applied: Applied) -> None:
        if not self._holders:
            self._stock = getattr(self._owner, self._name)
            self._replace()
        key = id(applied)
        self._holders[key] = weakref.ref(applied, lambda _: self.release(key))

    def release(self, key: int) -> None:
        self._holders.pop(key, None)
        if not self._holders:
            self._patches.undo()

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        self._patches.undo()
        try:
            yield
        finally:
            if self._holders:
                self._replace()

    def _replace(self) -> None:
        self._patches.set(self._owner, self._name, rope_of(self._stock) or self._stock)


ROPES = functools.cache(_Rope)
FAMILY_WIDE: dict[str, Applied] = {}


@dataclass
class _Found:
    """Layers that kernels can serve, and reasons for others."""

    layers: list[tuple[str, Any, Binding]] = field(default_factory=list)  # switch, and module or class
    ropes: tuple[tuple[str, str], ...] = ()
    heads: tuple[str, ...] = ()  # switches
    left: dict[str, str] = field(default_factory=dict)

    @property
    def switches(self) -> list[str]:
        layers = {switch for switch, *_ in self.layers}
        found = [switch for switch in overrides.LAYER_SWITCHES if switch in layers]
        return [*found, *(["rope"] if self.ropes else []), *self.heads]

    def add_layer(self, owner: Any, module: nn.Module, cls: Any, binding: Binding | None) -> None:
        if binding is None:
            reason = _VARIANT if source.looks_like_layer(cls) else None
        elif (reason := binding.refusal(module) or verify.difference(binding, module, cls)) is None:
            self.layers.append((binding.switch(module), owner, binding))
        if reason is not None:
            self.left.setdefault(owner_of(module).__name__, reason)

    def add_ropes(self, classes: Iterable[type], rotary: list[nn.Module]) -> None:
        keys = []
        for key in sorted(set().union(*map(source.rotary_functions, classes))):
            stock = ROPES(*key).stock
            ours = rope_of(stock)
            reason = _VARIANT if ours is None else verify.rotary_difference(ours, stock, rotary)
            if reason is None:
                keys.append(key)
            else:
                self.left.setdefault(key[1], reason)
        self.ropes = tuple(keys)

    def chosen(self, family: str, switches: dict[str, bool | None]) -> list[str]:
        if unknown := switches.keys() - set(overrides.SWITCHES):
            raise TypeError(f"unknown switches {sorted(unknown)}; there are {sorted(overrides.SWITCHES)}")
        for switch, on in switches.items():
            if not (on is None or isinstance(on, bool)):
                raise TypeError(f"{switch} must be True, False or None, got {on!r}")
        wanted = {switch for switch, on in switches.items() if on}
        reasons = "".join(f"\n  {name}: {reason}" for name, reason in self.left.items())
        if absent := wanted - set(self.switches):
            raise ValueError(f"{sorted(absent)} matches nothing in {family} here; it has {self.switches}{reasons}")
        if set(overrides.HEAD_SWITCHES) <= wanted:
            raise ValueError("cross_entropy works on logits and fused_linear_cross_entropy builds none: choose one")
        if set(self.switches) <= {"cross_entropy"} and not wanted and switches.get(FUSED) is not False:
            raise ValueError(f"our kernels serve nothing in {family}{reasons}")
        off = {switch for switch, on in switches.items() if on is False}
        off.add(FUSED if "cross_entropy" in wanted else "cross_entropy")
        return [switch for switch in self.switches if switch not in off]


_VARIANT = "a variant that no kernel computes"


def found_in(model: PreTrainedModel, fused: bool = True) -> _Found:
    """Return what the kernels serve of a model; the head only if `fused`."""
    found = _Found()
    used = set()
    for module in model.modules():
        cls = stock_class(type(module))
        binding, own = binding_of(cls), own_forward(module) is not None
        if not own:
            used.add(cls)
        if binding is not None and own:
            found.left.setdefault(owner_of(module).__name__, "its forward was set on the instance")
        elif binding is not None and hasattr(module, "_distribute_module_applied"):
            found.left.setdefault(owner_of(module).__name__, "parallelize_module runs it on DTensors")
        elif not own:
            found.add_layer(module, module, cls, binding)
    found.add_ropes(used, [module for module in model.modules() if "Rotary" in type(module).__name__])
    if model.get_output_embeddings() is not None:
        owner, of_loss, reason = owner_of(model), head.has_causal_loss(model), None
        if not owner.__module__.startswith("transformers."):
            of_loss, reason = False, f"its forward is that of {owner.__module__}, not of transformers"
        elif not of_loss:
            loss = model.loss_function
            reason = f"its loss_function is {getattr(loss, '__qualname__', loss)}, not the causal loss"
        elif fused:
            reason = _head_refusal(model)
        switches = {"cross_entropy": of_loss, FUSED: fused and reason is None}
        found.heads = tuple(switch for switch, on in switches.items() if on)
        found.left |= {} if reason is None else {owner.__name__: reason}
    elif model.can_generate():
        found.left[owner_of(model).__name__] = "it is not a backbone under an lm_head"
    return found


def owner_of(module: nn.Module) -> type:
    """Return the class that defines the forward: FSDP derives others."""
    return next(cls for cls in stock_class(type(module)).__mro__ if "forward" in vars(cls))


def _head_refusal(model: PreTrainedModel) -> str | None:
    balance = detect.balance_of(model)
    if balance is not None and balance.refusal is not None:
        return f"its load-balancing loss cannot be computed: {balance.refusal}"
    try:
        state = vars(model).get(STATE)
        if state is None or not state.head_fn:  # else our forward stays
            _refuse_foreign_forward(model)
        head.head_facts(model, causal_loss=True)
    except ValueError as refusal:
        return str(refusal)
    return None


def apply_liger_kernel(
    model: nn.Module, *, logits_budget: int | float | str | None = None, **switches: bool | None
) -> Applied:
    """Patch the base kernels and the fused loss into one model, in place.

    A training step then returns `logits=None`; `skip_logits=` overrides this, and `return_token_accuracy=True` adds
    `token_accuracy`. `rope` serves all models of a modeling module, until the last patched one is reverted or deleted.
    The result says which layers and heads are left alone, and why.

    Args:
        model: a transformers model, maybe wrapped.
        logits_budget: as in `LogitOptions`.
        **switches: `rope`, `rms_norm`, `layer_norm`, `swiglu`, `geglu`, `cross_entropy`, `fused_linear_cross_entropy`.
            By default, all that the model has, except `cross_entropy`, which excludes the last.

    Raises:
        TypeError: a switch is unknown, or `model` contains no transformers model.
        ValueError: a switch that is True matches nothing, nothing matches at all, or the model runs hub kernels.

    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    >>> model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2))
    >>> print(apply_liger_kernel(model, rope=False))
    Kernels for llama:
      rms_norm: LlamaRMSNorm x 5
      swiglu: LlamaMLP x 2
      fused_linear_cross_entropy: LlamaForCausalLM
    >>> ids = torch.randint(64, (1, 8))
    >>> output = model.train()(ids, labels=ids)
    >>> output.loss.shape, output.logits
    (torch.Size([]), None)
    >>> revert_liger_kernel(model)
    """
    logits_budget = budget_bytes(logits_budget)  # raise all errors before the first patch
    inner = inner_model(model)
    family = family_of(stock_class(type(inner)))
    if inner.use_kernels:
        raise ValueError(
            "this model runs kernels of the Hugging Face hub (use_kernels=True), which replace the forward of its "
            "layers again at every train() and eval(): load it with use_kernels=False"
        )
    try:
        found = found_in(inner, fused=switches.get(FUSED) is not False)
        on = found.chosen(family, switches)
    finally:
        if STATE not in vars(inner):
            head.forget_facts(inner)
    if FUSED not in on and FUSED not in switches and (reason := found.left.get(owner_of(inner).__name__)):
        _LOGGER.warning("%s trains with logits: %s", type(inner).__name__, reason)
    revert_liger_kernel(inner)
    applied = Applied(family, left=found.left)
    for name in on:
        for switch, module, binding in found.layers:
            if switch == name:
                set_patch(module, Patch(binding))
                applied.count(switch, owner_of(module).__name__)
    _hold_ropes(found, on, applied)
    if "cross_entropy" in on:
        vars(inner)["_loss_function"] = causal_lm_loss
        applied.count("cross_entropy", "loss_function")
    if FUSED in on:
        fuse(inner, Fusion(logits_budget))
        applied.count(FUSED, owner_of(inner).__name__)
    vars(inner)[APPLIED] = applied
    return applied


def _hold_ropes(found: _Found, on: list[str], applied: Applied) -> None:
    if "rope" in on:
        applied.ropes = found.ropes
        applied.hold_ropes()
        for _, name in found.ropes:
            applied.count("rope", name)


def revert_liger_kernel(model: nn.Module | str) -> None:
    """Undo `apply_liger_kernel(model)` or, for a name, `apply_liger_kernel_to_<family>()`.

    Forwards set after patching stay.
    """
    if isinstance(model, str):
        _revert_family(family_modeling(model))
        return
    inner = inner_model(model)
    fuse(inner, None)
    for module in filter(has_our_layer, inner.modules()):
        set_patch(module, None)
    if vars(inner).get("_loss_function") is causal_lm_loss:
        del inner._loss_function
        if not head.has_causal_loss(inner):  # it was set before patching
            inner.loss_function = ForCausalLMLoss
    _release(vars(inner).pop(APPLIED, None))


def _revert_family(modeling: ModuleType) -> None:
    for cls in overrides.causal_classes(modeling):
        fuse(cls, None)
    _release(FAMILY_WIDE.pop(overrides.family_name(modeling.__name__), None))


def _release(applied: Applied | None) -> None:
    if applied is not None:
        applied.patches.undo()
        for key in applied.ropes:
            ROPES(*key).release(id(applied))


def _found_in_classes(modeling: ModuleType) -> _Found:
    """Return what kernels serve of default configurations."""
    found = _Found(heads=overrides.HEAD_SWITCHES if overrides.causal_classes(modeling) else ())
    classes: list[Any] = [x for x in vars(modeling).values() if inspect.isclass(x) and issubclass(x, nn.Module)]
    classes = [cls for cls in classes if cls.__module__.partition(".")[0] != "torch"]
    for cls in dict.fromkeys(classes):
        binding = binding_of(cls)
        if binding is not None:
            try:
                found.add_layer(cls, verify.built(binding, cls, modeling), cls, binding)
            except (verify.Incomparable, verify.Difference) as failure:
                found.left[cls.__name__] = f"it cannot be compared without a model ({failure})"
        elif source.looks_like_layer(cls):
            found.left[cls.__name__] = _VARIANT
    found.add_ropes(classes, [])
    return found


def apply_to_family(name: str, *, logits_budget: int | float | str | None = None, **switches: bool | None) -> Applied:
    """Patch a family's classes, except torch's, and so all its models.

    Unsupported activations raise when they run. Unfit heads train with their own forward, unless
    `fused_linear_cross_entropy=True`.
    """
    logits_budget = budget_bytes(logits_budget)
    modeling = family_modeling(name)
    family = overrides.family_name(modeling.__name__)
    _revert_family(modeling)
    found = _found_in_classes(modeling)
    on = found.chosen(family, switches)
    applied = Applied(family, left=found.left)
    for chosen in on:
        for switch, cls, binding in found.layers:
            if switch == chosen:
                method = binding.layer.method
                applied.patches.set(cls, method, _layer_method(binding, getattr(cls, method)))
                applied.count(switch, cls.__name__)
    _hold_ropes(found, on, applied)
    for owner in overrides.causal_classes(modeling):
        if "cross_entropy" in on:
            applied.patches.set(owner, "_loss_function", staticmethod(causal_lm_loss))
            applied.count("cross_entropy", "loss_function")
        if FUSED in on:
            fuse(owner, Fusion(logits_budget, required=bool(switches.get(FUSED))))
            applied.count(FUSED, owner.__name__)
    FAMILY_WIDE[family] = applied
    return applied


@functools.cache
def family_function(name: str) -> Callable[..., Applied]:
    """Return `apply_liger_kernel_to_<name>`, or raise a ValueError."""
    overrides.check_family(name)

    def apply(*, model: PreTrainedModel | None = None, **options: Any) -> Applied:
        if model is None:
            return apply_to_family(name, **options)
        found, family = family_of(type(inner_model(model))), overrides.family_name(family_modeling(name).__name__)
        if found != family:
            raise ValueError(f"model is a {found}, not a {family}: use apply_liger_kernel")
        return apply_liger_kernel(model, **options)

    options = (*overrides.SWITCHES, "logits_budget", "model")
    keywords = [inspect.Parameter(option, inspect.Parameter.KEYWORD_ONLY, default=None) for option in options]
    apply.__name__ = apply.__qualname__ = f"apply_liger_kernel_to_{name}"
    apply.__doc__ = (
        f"Patch `model`, or the classes of {name} if it is None, before or after models are built.\n\n"
        "See `apply_liger_kernel` for the switches; None turns on those that the family has. "
        f'`revert_liger_kernel(model)` or `revert_liger_kernel("{name}")` undoes the patch.'
    )
    vars(apply)["__signature__"] = inspect.Signature(keywords, return_annotation=Applied)
    return apply


def register_layer(cls: type[nn.Module], layer: Layer, **names: str) -> None:
    """Let `layer` serve a class unknown to `apply_liger_kernel`.

    Compares them in each patched model, and now if a module can be built. Also serves subclasses without own code.

    Args:
        cls: a module class; its method takes one tensor.
        layer: from `layers.py`, or your own.
        **names: the class's names of the layer's attributes, where they differ.

    Raises:
        TypeError: `cls` is no module class, or `layer` no `Layer`.
        ValueError: the layer has no such attribute, or computes something else.

    >>> import torch
    >>> from liger_chunked.integrations.transformers.layers import RMS_NORM
    >>> class Norm(torch.nn.Module):
    ...     def __init__(self, size=8):
    ...         super().__init__()
    ...         self.scale, self.eps = torch.nn.Parameter(torch.ones(size)), 1e-6
    ...
    ...     def forward(self, x):
    ...         return torch.nn.functional.rms_norm(x, x.shape[-1:], eps=self.eps) * self.scale
    >>> register_layer(Norm, RMS_NORM, weight="scale")
    """
    if not (inspect.isclass(cls) and issubclass(cls, nn.Module)):
        raise TypeError(f"cls must be a class of modules, got {shown(cls)}")
    if not isinstance(layer, Layer):
        raise TypeError(f"layer must be a Layer, such as layers.RMS_NORM, got {shown(layer)}")
    if unknown := sorted(names.keys() - set(layer.attributes)):
        raise ValueError(f"the layer reads {list(layer.attributes)}, not {unknown}")
    if len(inspect.signature(getattr(cls, layer.method, cls.forward)).parameters) != 2:
        raise ValueError(f"{layer.method} of {cls.__name__} must take one tensor, as a Layer does")
    binding = overrides.bound(layer, names)
    with contextlib.suppress(verify.Incomparable):
        verify.check_layer(binding, verify.built(binding, cls, sys.modules[cls.__module__]), cls)
    overrides.register(cls, binding)


class _Patched:
    """Patches the models that an Auto class builds."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *model_args: Any, **kwargs: Any) -> Any:
        build: Any = super()
        return _built_patched(build.from_pretrained, pretrained_model_name_or_path, *model_args, **kwargs)

    @classmethod
    def from_config(cls, *args: Any, **kwargs: Any) -> Any:
        build: Any = super()
        return _built_patched(build.from_config, *args, **kwargs)


class AutoLigerKernelForCausalLM(_Patched, AutoModelForCausalLM):
    """`AutoModelForCausalLM` with the keywords of `apply_liger_kernel`, which patches its models."""


class AutoLigerKernelForImageTextToText(_Patched, AutoModelForImageTextToText):
    """`AutoModelForImageTextToText` with the same keywords."""


def _built_patched(build: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    options = {name: kwargs.pop(name) for name in ("logits_budget", *overrides.SWITCHES) if name in kwargs}
    model = build(*args, **kwargs)
    apply_liger_kernel(model, **options)
    return model
