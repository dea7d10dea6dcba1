"""Patch and restore a model, or all models of a family.

A patched module gets a subclass of its class. Modules of a class share that subclass, so Dynamo compiles them once, and
a copy of a module uses its own parameters. A family's patch sets attributes of its classes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import types
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from liger_chunked.integrations.transformers import detect, head, overrides, verify
from liger_chunked.integrations.transformers.detect import forward_slot, inner_model, own_forward
from liger_chunked.integrations.transformers.head import STATE, STOCK, Fusion
from liger_chunked.integrations.transformers.layers import Layer, causal_lm_loss
from liger_chunked.integrations.transformers.overrides import BY_NAME, Family, family_by_name, family_of, layer_class
from liger_chunked.types import budget_bytes, shown

Method = Callable[..., Any]
_PATCH = "_liger_patch"  # attribute of a patched class


@dataclass(frozen=True)
class Patch:
    """A method and its picklable replacement, None for the forward of `head.py`."""

    method: str
    run: Method | None = None


def _patched_class(cls: Any, patch: Patch) -> Any:
    return _subclass(cls, patch, getattr(cls, patch.method))


@functools.cache
def _subclass(cls: Any, patch: Patch, method: Method) -> Any:
    def reduce(self: Any, protocol: Any) -> Any:
        # Refer to the original class, because nothing can import this subclass.
        reduced = super(subclass, self).__reduce_ex__(protocol)
        if type(self) is not subclass:
            return reduced
        make, arguments, *state = reduced
        arguments = tuple(cls if argument is subclass else argument for argument in arguments)
        return (_rebuilt, (patch, make, arguments), *state)

    named = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    replacement = _class_forward(method) if patch.run is None else patch.run
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
    return patch is not None and patch.run is not None


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
        """Restore the attributes that other code has not replaced since."""
        while self._replaced:
            owner, name, before, value = self._replaced.pop()
            if vars(owner).get(name) is not value:
                continue
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)


# The forward of `head.py` on a model or a class.


@dataclass(frozen=True)
class ForwardState:
    """Why a model or a class has our forward. A model's shallow copies share it."""

    head_fn: bool = False
    fusion: Fusion | None = None
    patches: Patches = field(default_factory=Patches)


def _update(owner: PreTrainedModel | type[PreTrainedModel], **reasons: Any) -> None:
    """Install our forward for the first reason; restore the original after the last one."""
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
    """Return a patched class's forward, with the signature of `stock` for generate and Trainer."""
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
        set_patch(model, Patch("forward"))
        return
    # A framework has set it. A partial can be pickled with the model.
    forward = functools.update_wrapper(functools.partial(head.forward, model, own), own)
    vars(forward)[STOCK] = own
    vars(model)[forward_slot(model)] = forward


def _uninstall(model: PreTrainedModel) -> None:
    if patch_of(model) == Patch("forward"):
        set_patch(model, None)
    slot = forward_slot(model)
    forward = vars(model).get(slot)
    if isinstance(forward, functools.partial) and forward.func is head.forward:
        vars(model)[slot] = vars(forward)[STOCK]


def _calls_ours(own: Callable[..., Any]) -> bool:
    """Whether this forward wraps ours, as Trainer's autocast does."""
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
    """Make a model, or every model of a class, train without logits; None undoes this.

    A model of a patched class is checked in its first step.
    """
    if fusion is not None and not isinstance(owner, type):
        head.head_facts(owner, causal_loss=True)
    _update(owner, fusion=fusion)


def attach_head(model: nn.Module) -> None:
    """Make `model(..., head_fn=fn)` return `fn(head, input)`, computed in place of head and loss.

    `fn` gets a `Head` and a `HeadInput`, and returns a tensor, or tensors in a tuple, dict or `ModelOutput`. It runs
    inside `model.forward`, under autocast and the hooks of DDP, FSDP and ZeRO.

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
    """Counts of replaced classes by switch; `print` shows them."""

    family: str
    replaced: dict[str, dict[str, int]] = field(default_factory=dict)
    patches: Patches = field(default_factory=Patches, repr=False)

    def count(self, switch: str, name: str) -> None:
        counts = self.replaced.setdefault(switch, {})
        counts[name] = counts.get(name, 0) + 1

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)  # a copied model needs the rope function too
        if "rope" in self.replaced:
            ROPES[self.family].hold(family_by_name(self.family), self)

    def __str__(self) -> str:
        lines = [
            f"  {switch}: " + ", ".join(f"{name} x {n}" if n > 1 else name for name, n in counts.items())
            for switch, counts in self.replaced.items()
        ]
        return "\n".join([f"Kernels for {self.family}:", *lines])


class _Rope:
    """Replaces a modeling module's rope function while a holder lives."""

    def __init__(self) -> None:
        self._patches = Patches()
        self._family: Family | None = None
        self._holders: dict[int, weakref.ref[Applied]] = {}

    def hold(self, family: Family, applied: Applied) -> None:
        if self._family is None or self._family.rope is not family.rope:  # the row may have been replaced
            self._set(family)
        key = id(applied)
        self._holders[key] = weakref.ref(applied, lambda _: self.release(key))

    def release(self, key: int) -> None:
        self._holders.pop(key, None)
        if not self._holders:
            self._set(None)

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        family = self._family
        self._patches.undo()
        try:
            yield
        finally:
            if self._holders and family is not None:
                self._set(family)

    def _set(self, family: Family | None) -> None:
        self._patches.undo()
        self._family = family
        if family is not None:
            self._patches.set(family.modeling, "apply_rotary_pos_emb", family.rope)


ROPES: defaultdict[str, _Rope] = defaultdict(_Rope)
FAMILY_WIDE: dict[str, Applied] = {}


def _chosen(family: Family, available: tuple[str, ...], switches: dict[str, bool | None]) -> tuple[str, ...]:
    if unknown := switches.keys() - set(overrides.SWITCHES):
        raise TypeError(f"unknown switches {sorted(unknown)}; there are {sorted(overrides.SWITCHES)}")
    for switch, on in switches.items():
        if not (on is None or isinstance(on, bool)):
            raise TypeError(f"{switch} must be True, False or None, got {on!r}")
    wanted = {switch for switch, on in switches.items() if on}
    if absent := wanted - set(available):
        raise ValueError(f"{sorted(absent)} matches nothing in {family.name} here; it has {list(available)}")
    if set(overrides.HEAD_SWITCHES) <= wanted:
        raise ValueError("cross_entropy works on logits and fused_linear_cross_entropy builds none: choose one")
    off = {switch for switch, on in switches.items() if on is False}
    off.add(FUSED if "cross_entropy" in wanted else "cross_entropy")
    return tuple(switch for switch in available if switch not in off)


def layers_in(model: nn.Module, family: Family, switch: str) -> list[tuple[nn.Module, str]]:
    """Return the modules that a switch replaces, with their names in the table."""
    layers = [(name, layer_class(family, name), layer.method) for name, layer in family.layers[switch].items()]
    return [
        (module, name)
        for module in model.modules()
        for name, cls, method in layers
        if isinstance(module, cls)
        and detect.runs_code_of(stock_class(type(module)), cls, method)
        and own_forward(module) is None
    ]


def _refuse_layers(family: Family, switch: str, found: list[tuple[nn.Module, str]]) -> None:
    for name, layer in family.layers.get(switch, {}).items():
        modules = [module for module, known in found if known == name]
        try:
            reason = next(filter(None, map(layer.refusal, modules)), None)
        except AttributeError as missing:
            reason = f"it is laid out differently: {missing}"
        if reason is None and family not in overrides.FAMILIES:  # tests compare the built-in rows
            try:
                verify.check_layers(layer, modules, layer_class(family, name))
            except verify.Difference as difference:
                reason = str(difference)
        if reason is not None:
            raise ValueError(f"{switch} cannot serve {name}: {reason}; {switch}=False skips it")


def apply_liger_kernel(
    model: nn.Module, *, logits_budget: int | float | str | None = None, **switches: bool | None
) -> Applied:
    """Patch the base kernels and the fused loss into one model, in place.

    A training step then returns `logits=None`; `skip_logits=` overrides this, and `return_token_accuracy=True` adds
    `token_accuracy`. `rope` serves all models of the family until the
    last model patched with it is reverted or deleted.

    Args:
        model: a transformers model of a family in `overrides.py`, or a wrapper of one.
        logits_budget: as in `LogitOptions`.
        **switches: `rope`, `rms_norm`, `layer_norm`, `swiglu`, `geglu`, `cross_entropy`, `fused_linear_cross_entropy`.
            All that the model has are on by default, except `cross_entropy`, which excludes the last one.

    Raises:
        TypeError: a switch is unknown, or `model` contains no transformers model.
        ValueError: the family is unknown, a switch matches nothing, a kernel does not support a layer, the model runs
            hub kernels, its loss or head is not the causal one, or a user has set a forward on this instance.

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
    family = family_of(type(inner))
    if inner.use_kernels:
        raise ValueError(
            "this model runs kernels of the Hugging Face hub (use_kernels=True), which replace the forward of its "
            "layers again at every train() and eval(): load it with use_kernels=False"
        )
    causal = next(cls for cls in stock_class(type(inner)).__mro__ if "forward" in vars(cls)).__name__
    found = {switch: layers_in(inner, family, switch) for switch in family.layers}
    absent = {switch for switch in found if not found[switch]}
    if causal not in family.causal:  # a forward of the user's own
        absent |= set(overrides.HEAD_SWITCHES)
    on = _chosen(family, tuple(switch for switch in family.switches if switch not in absent), switches)
    for switch in on:
        _refuse_layers(family, switch, found.get(switch, []))
    for switch in set(overrides.HEAD_SWITCHES) & set(on):
        if not head.has_causal_loss(inner):
            raise ValueError(
                f"{switch} is the causal loss, but the loss_function of this model is {inner.loss_function}; "
                f"{switch}=False leaves it alone"
            )
    if FUSED in on:
        state = vars(inner).get(STATE)
        if state is None or not state.head_fn:  # else our forward stays
            _refuse_foreign_forward(inner)
        head.head_facts(inner, causal_loss=True)

    revert_liger_kernel(inner)
    applied = Applied(family.name)
    for switch in on:
        for module, name in found.get(switch, ()):
            layer = family.layers[switch][name]
            set_patch(module, Patch(layer.method, layer.run))
            applied.count(switch, name)
    if "rope" in on:
        _hold_rope(family, applied)
    if "cross_entropy" in on:
        vars(inner)["_loss_function"] = causal_lm_loss
        applied.count("cross_entropy", "loss_function")
    if FUSED in on:
        _fuse(inner, family, causal, logits_budget, applied)
    vars(inner)[APPLIED] = applied
    return applied


def _hold_rope(family: Family, applied: Applied) -> None:
    ROPES[family.name].hold(family, applied)
    applied.count("rope", "apply_rotary_pos_emb")


def _fuse(owner: Any, family: Family, causal: str, logits_budget: int | None, applied: Applied) -> None:
    fuse(owner, Fusion(head.output_of(getattr(family.modeling, causal)), logits_budget))
    applied.count(FUSED, causal)


def revert_liger_kernel(model: nn.Module | str) -> None:
    """Undo `apply_liger_kernel(model)`, or, for a family's name, `apply_liger_kernel_to_<family>()`.

    A forward that was set after patching stays.
    """
    if isinstance(model, str):
        _revert_family(family_by_name(model))
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


def _revert_family(family: Family) -> None:
    for name in family.causal:
        fuse(getattr(family.modeling, name), None)
    _release(FAMILY_WIDE.pop(family.name, None))


def _release(applied: Applied | None) -> None:
    if applied is not None:
        applied.patches.undo()
        ROPES[applied.family].release(id(applied))


def apply_to_family(
    family: Family, *, logits_budget: int | float | str | None = None, **switches: bool | None
) -> Applied:
    """Patch a family's classes, except torch's, and so all existing and future models.

    An unsupported activation raises when it runs.
    """
    logits_budget = budget_bytes(logits_budget)
    shared = {
        switch
        for switch, layers in family.layers.items()
        if any(layer_class(family, name) is getattr(nn, name, None) for name in layers)
    }
    on = _chosen(family, tuple(switch for switch in family.switches if switch not in shared), switches)
    _revert_family(family)
    if family not in overrides.FAMILIES:
        off = {switch for switch in ("rope", *family.layers) if switch not in on}
        unused: Any = {switch: None if switch == "rope" else {} for switch in off}
        verify.check_row(dataclasses.replace(family, **unused), needs_all=True)
    applied = Applied(family.name)
    for switch in on:
        for name, layer in family.layers.get(switch, {}).items():
            applied.patches.set(getattr(family.modeling, name), layer.method, layer.run)
            applied.count(switch, name)
    if "rope" in on:
        _hold_rope(family, applied)
    for name in family.causal:
        owner = getattr(family.modeling, name)
        if "cross_entropy" in on:
            applied.patches.set(owner, "_loss_function", staticmethod(causal_lm_loss))
            applied.count("cross_entropy", "loss_function")
        if FUSED in on:
            _fuse(owner, family, name, logits_budget, applied)
    FAMILY_WIDE[family.name] = applied
    return applied


def _function_of(name: str, family: Family) -> Callable[..., Applied]:
    def apply(*, model: PreTrainedModel | None = None, **options: Any) -> Applied:
        if model is None:
            return apply_to_family(family, **options)
        found = family_of(type(inner_model(model)))
        if found is not family:
            raise ValueError(f"model is a {found.name}, not a {family.name}: use apply_liger_kernel")
        return apply_liger_kernel(model, **options)

    options = (*family.switches, "logits_budget", "model")
    keywords = [inspect.Parameter(option, inspect.Parameter.KEYWORD_ONLY, default=None) for option in options]
    apply.__name__ = apply.__qualname__ = f"apply_liger_kernel_to_{name}"
    apply.__doc__ = (
        f"Patch `model`, or the classes of {family.name} if it is None, before or after models are built.\n\n"
        "See `apply_liger_kernel` for the switches; None turns on those that the model has. "
        f'`revert_liger_kernel(model)` or `revert_liger_kernel("{name}")` undoes the patch.'
    )
    vars(apply)["__signature__"] = inspect.Signature(keywords, return_annotation=Applied)
    return apply


def register_family(family: Family, *, replace: bool = False) -> Callable[..., Applied]:
    """Add a row to the table of families.

    Its kernels are compared with the code that they replace, now and in each patched model. `replace` allows a taken
    name; patched models stay as they are.

    Returns:
        `apply_liger_kernel_to_<name>`, also an attribute of `liger_chunked`.

    Raises:
        TypeError: `causal` or `aliases` is no tuple, or layers are no mapping of names to layers.
        ValueError: the name is taken, the modeling module lacks a class, or a kernel computes something else.

    >>> from liger_chunked.integrations.transformers.layers import GLU, RMS_NORM
    >>> row = Family(
    ...     "smollm3",
    ...     causal=("SmolLM3ForCausalLM",),
    ...     rms_norm={"SmolLM3RMSNorm": RMS_NORM},
    ...     swiglu={"SmolLM3MLP": GLU},
    ... )
    >>> register_family(row).__name__
    'apply_liger_kernel_to_smollm3'
    """
    if isinstance(family.causal, str) or isinstance(family.aliases, str):
        raise TypeError(f"causal and aliases must be tuples of names, got {family.causal!r} and {family.aliases!r}")
    for switch, layers in family.layers.items():
        if not isinstance(layers, Mapping) or not all(isinstance(layer, Layer) for layer in layers.values()):
            raise TypeError(f'{switch} must map class names to layers, as in {{"LlamaMLP": GLU}}, got {shown(layers)}')
    names = (family.name, *family.aliases)
    taken = [name for name in names if BY_NAME.get(name, family) != family]
    if taken and not replace:
        raise ValueError(f"the table has another family named {taken[0]!r}; replace=True replaces it")
    classes = [*family.causal, *(name for layers in family.layers.values() for name in layers)]
    wanted = [*classes, *(["apply_rotary_pos_emb"] if family.rope else [])]
    try:
        modeling = family.modeling
    except ModuleNotFoundError as failure:
        raise ValueError(f"there is no module {family.module_name}: name the right one, module=...") from failure
    known = vars(modeling).keys() | vars(nn).keys()
    if missing := [name for name in wanted if name not in known]:
        raise ValueError(f"{family.module_name} has no {', '.join(missing)}")
    replaced = {BY_NAME[name].name for name in taken}
    if patched := sorted(replaced & FAMILY_WIDE.keys()):
        raise ValueError(f"the classes of {patched[0]} are patched: revert_liger_kernel({patched[0]!r}) first")
    verify.check_row(family)
    for name in [name for name, old in BY_NAME.items() if old.name in replaced and old.name == family.name]:
        del BY_NAME[name], APPLY_TO[f"apply_liger_kernel_to_{name}"]
    BY_NAME.update(dict.fromkeys(names, family))
    APPLY_TO.update({f"apply_liger_kernel_to_{name}": _function_of(name, family) for name in names})
    return APPLY_TO[f"apply_liger_kernel_to_{family.name}"]


APPLY_TO = {f"apply_liger_kernel_to_{name}": _function_of(name, family) for name, family in BY_NAME.items()}


class AutoLigerKernelForCausalLM(AutoModelForCausalLM):
    """`AutoModelForCausalLM` with the keywords of `apply_liger_kernel`, which patches its models."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *model_args: Any, **kwargs: Any) -> Any:
        return _built_patched(super().from_pretrained, pretrained_model_name_or_path, *model_args, **kwargs)

    @classmethod
    def from_config(cls, *args: Any, **kwargs: Any) -> Any:
        return _built_patched(super().from_config, *args, **kwargs)


def _built_patched(build: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    options = {name: kwargs.pop(name) for name in ("logits_budget", *overrides.SWITCHES) if name in kwargs}
    model = build(*args, **kwargs)
    apply_liger_kernel(model, **options)
    return model
