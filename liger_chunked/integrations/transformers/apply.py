"""Patch a model, or all models of a family, and revert the patch."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from liger_chunked.integrations.transformers.families import (
    BY_NAME,
    FAMILIES,
    HEAD_SWITCHES,
    SWITCHES,
    Family,
    family_of,
)
from liger_chunked.integrations.transformers.forward import Fusion, fuse, has_causal_loss, output_of, unfuse
from liger_chunked.integrations.transformers.head import head_facts, inner_model
from liger_chunked.integrations.transformers.layers import Layer, causal_lm_loss
from liger_chunked.integrations.transformers.patches import (
    Instead,
    Patches,
    has_own_forward,
    replace_method,
    replacement_of,
    restore_method,
    stock_class,
)
from liger_chunked.integrations.transformers.verify import Difference, check_layers, check_row
from liger_chunked.types import budget_bytes

_FUSED = "fused_linear_cross_entropy"
_APPLIED = "_liger_applied"


@dataclass
class Applied:
    """The result of a patch: for each switch, the names of the replaced parts and their counts. `print` shows it."""

    family: str
    replaced: dict[str, dict[str, int]] = field(default_factory=dict)
    patches: Patches = field(default_factory=Patches, repr=False)

    def count(self, switch: str, name: str) -> None:
        counts = self.replaced.setdefault(switch, {})
        counts[name] = counts.get(name, 0) + 1

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy needs the family's rope function too, so it holds it as well, for as long as it lives."""
        vars(self).update(state)
        if "rope" in self.replaced:
            _ROPES[self.family].hold(_by_name(self.family), self)

    def __str__(self) -> str:
        lines = [
            f"  {switch}: " + ", ".join(f"{name} x {n}" if n > 1 else name for name, n in counts.items())
            for switch, counts in self.replaced.items()
        ]
        return "\n".join([f"Kernels for {self.family}:", *lines])


class _Rope:
    """The rope function of one modeling module, which all models of a family call. It is ours while one asks for it."""

    def __init__(self) -> None:
        self._patches = Patches()
        self._function: Callable[..., Any] | None = None
        self._holders: dict[int, weakref.ref[Applied]] = {}

    def hold(self, family: Family, applied: Applied) -> None:
        if self._function is not family.rope:  # not patched yet, or the table row was replaced
            self._patches.undo()
            self._patches.set(family.modeling, "apply_rotary_pos_emb", family.rope)
            self._function = family.rope
        key = id(applied)
        self._holders[key] = weakref.ref(applied, lambda _: self._drop(key))

    def release(self, applied: Applied) -> None:
        self._drop(id(applied))

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Restore the function of transformers inside the `with` block."""
        held = self._patches.current()
        self._patches.undo()
        try:
            yield
        finally:
            for owner, name, value in held if self._holders else ():
                self._patches.set(owner, name, value)

    def _drop(self, key: int) -> None:
        self._holders.pop(key, None)
        if not self._holders:
            self._patches.undo()
            self._function = None


_ROPES: defaultdict[str, _Rope] = defaultdict(_Rope)
_FAMILY_WIDE: dict[str, Applied] = {}


def _chosen(family: Family, available: tuple[str, ...], switches: dict[str, bool | None]) -> tuple[str, ...]:
    """Return the switches that are on: those requested, and by default all available ones.

    Raises:
        TypeError: a switch is unknown, or is not True, False or None.
        ValueError: a switch is on but not available.
    """
    if unknown := switches.keys() - set(SWITCHES):
        raise TypeError(f"unknown switches {sorted(unknown)}; there are {sorted(SWITCHES)}")
    for switch, on in switches.items():
        if not (on is None or isinstance(on, bool)):
            raise TypeError(f"{switch} must be True, False or None, got {on!r}")
    wanted = {switch for switch, on in switches.items() if on}
    if absent := wanted - set(available):
        raise ValueError(f"{sorted(absent)} matches nothing in {family.name} here; it has {list(available)}")
    if set(HEAD_SWITCHES) <= wanted:
        raise ValueError("cross_entropy works on logits and fused_linear_cross_entropy builds none: choose one")
    if switches.get("cross_entropy"):
        available = tuple(switch for switch in available if switch != _FUSED)
    default = set(available) - {"cross_entropy"}
    return tuple(s for s in available if s in wanted or (switches.get(s) is None and s in default))


def _causal_class(model_class: type, family: Family) -> str | None:
    """Return the name, in `family.causal`, of the class that defines the `forward` of `model_class`."""
    owner = next(cls for cls in model_class.__mro__ if "forward" in vars(cls))
    return owner.__name__ if owner.__name__ in family.causal else None


def _layer_class(family: Family, name: str) -> type[nn.Module]:
    """Return the class of this name from the modeling module, or else from torch.nn."""
    return getattr(family.modeling, name, None) or getattr(nn, name)


def _layers_in(model: nn.Module, family: Family, switch: str) -> list[tuple[nn.Module, str]]:
    """Return the modules that a switch replaces, with their names in the table. Skips modules with their own code."""
    layers = [(name, _layer_class(family, name), layer.method) for name, layer in family.layers[switch].items()]
    return [
        (module, name)
        for module in model.modules()
        for name, cls, method in layers
        if isinstance(module, cls) and _runs_code_of(module, cls, method)
    ]


def _runs_code_of(module: nn.Module, cls: type[nn.Module], method: str) -> bool:
    """Whether the module still runs the code of `cls`: no subclass and no forward set on the instance overrides it."""
    stock = stock_class(type(module))
    if stock.forward is not cls.forward or getattr(stock, method, None) is not getattr(cls, method, None):
        return False
    return not has_own_forward(module)


def _refusal(layer: Layer, module: nn.Module) -> str | None:
    """Return why a kernel cannot replace a module, or None."""
    try:
        return layer.refusal(module)
    except AttributeError as missing:
        return f"it is laid out differently: {missing}"


def _compare(family: Family, found: dict[str, list[tuple[nn.Module, str]]], on: tuple[str, ...]) -> None:
    """Compare the kernels of a registered row with the layers of a model."""
    for switch in found.keys() & set(on):
        for name, layer in family.layers[switch].items():
            modules = [module for module, known in found[switch] if known == name]
            try:
                check_layers(layer, modules, _layer_class(family, name))
            except Difference as difference:
                raise ValueError(f"{switch} cannot serve {name}: {difference}; {switch}=False skips it") from None


def apply_liger_kernel(
    model: nn.Module, *, logits_budget: int | float | str | None = None, **switches: bool | None
) -> Applied:
    """Patch the base kernels and the fused loss into one model, in place.

    In training, `model(labels=...)` then builds no logits: its output has `logits=None`. Evaluation and generation
    still build them. The keyword argument `skip_logits` of `forward` overrides this choice, and
    `return_token_accuracy=True` adds `token_accuracy` to an output without logits. `revert_liger_kernel` undoes the
    patch. Copies and pickles of a patched model are patched too.

    Everything is patched on this model only, except `rope`. It is a function of the family's modeling module, so it
    also serves the other models of the family, until the last model patched with it is reverted or deleted.

    Args:
        model: a transformers model of a family in `families.py`, or a wrapper of one (PEFT, DDP).
        logits_budget: the most bytes of logits that the fused loss keeps in memory at once, as a number or a string
            such as "512MiB". None chooses automatically.
        **switches: `rope`, `rms_norm`, `layer_norm`, `swiglu`, `geglu`, `cross_entropy`, `fused_linear_cross_entropy`.
            By default, all that the model has are on except `cross_entropy`, which turns off
            `fused_linear_cross_entropy`.

    Returns:
        The parts that were patched.

    Raises:
        TypeError: a switch is unknown, or `model` contains no transformers model.
        ValueError: the family is unknown, a switch matches nothing in the model, a kernel does not support a layer, the
            model runs hub kernels (`use_kernels=True`), its loss is not the causal one, or its `lm_head` is more than a
            weight and a bias (a LoRA adapter, for example).

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
    logits_budget = budget_bytes(logits_budget)  # raises before anything is patched
    inner = inner_model(model)
    family = family_of(type(inner))
    if inner.use_kernels:
        raise ValueError(
            "this model runs kernels of the Hugging Face hub (use_kernels=True), which replace the forward of its "
            "layers again at every train() and eval(): load it with use_kernels=False"
        )
    causal = _causal_class(stock_class(type(inner)), family)
    found = {switch: _layers_in(inner, family, switch) for switch in family.layers}
    absent = {switch for switch in found if not found[switch]} | (set() if causal else set(HEAD_SWITCHES))
    on = _chosen(family, tuple(switch for switch in family.switches if switch not in absent), switches)
    for switch in on:
        for module, name in found.get(switch, ()):
            if reason := _refusal(family.layers[switch][name], module):
                raise ValueError(f"{switch} cannot serve {name}: {reason}; {switch}=False skips it")
    if family not in FAMILIES:  # the test suite compares the built-in rows
        _compare(family, found, on)
    for switch in set(HEAD_SWITCHES) & set(on):
        if not has_causal_loss(inner):
            raise ValueError(
                f"{switch} is the causal loss, but the loss_function of this model is {inner.loss_function}; "
                f"{switch}=False leaves it alone"
            )
    if _FUSED in on:
        head_facts(inner, causal_loss=True)

    revert_liger_kernel(inner)
    applied = Applied(family.name)
    for switch in on:
        for module, name in found.get(switch, ()):
            layer = family.layers[switch][name]
            replace_method(module, layer.method, Instead(layer.run))
            applied.count(switch, name)
    if "rope" in on:
        _ROPES[family.name].hold(family, applied)
        applied.count("rope", "apply_rotary_pos_emb")
    if "cross_entropy" in on:
        vars(inner)["_loss_function"] = causal_lm_loss
        applied.count("cross_entropy", "loss_function")
    if _FUSED in on and causal is not None:
        fuse(inner, Fusion(output_of(getattr(family.modeling, causal)), logits_budget))
        applied.count(_FUSED, causal)
    vars(inner)[_APPLIED] = applied
    return applied


def revert_liger_kernel(model: nn.Module | str) -> None:
    """Undo `apply_liger_kernel(model)`, or, for the name of a family, `apply_liger_kernel_to_<family>()`.

    A model that is not patched stays as it is. Forwards that other code has set since are kept.

    Raises:
        ValueError: the family is unknown.
        TypeError: `model` contains no transformers model.
    """
    if isinstance(model, str):
        _revert_family(_by_name(model))
        return
    inner = inner_model(model)
    unfuse(inner)
    for module in inner.modules():
        if isinstance(replacement_of(module), Instead):
            restore_method(module)
    if vars(inner).get("_loss_function") is causal_lm_loss:
        del inner._loss_function
        if inner.loss_function not in (ForCausalLMLoss, causal_lm_loss):  # it was set before patching
            inner.loss_function = ForCausalLMLoss
    applied = vars(inner).pop(_APPLIED, None)
    if applied is not None:
        _ROPES[applied.family].release(applied)


def _by_name(name: str) -> Family:
    if name not in BY_NAME:
        raise ValueError(f"unknown family {name!r}; supported families: {', '.join(BY_NAME)}")
    return BY_NAME[name]


def _revert_family(family: Family) -> None:
    for name in family.causal:
        unfuse(getattr(family.modeling, name))
    applied = _FAMILY_WIDE.pop(family.name, None)
    if applied is not None:
        applied.patches.undo()
        _ROPES[family.name].release(applied)


def apply_to_family(
    family: Family, *, logits_budget: int | float | str | None = None, **switches: bool | None
) -> Applied:
    """Patch the classes of a family, and with them all its existing and future models.

    The switches are those of `apply_liger_kernel`, except for layers whose class does not belong to the family, such as
    `nn.LayerNorm`. No model is inspected. An unsupported activation therefore raises only when the layer runs. Experts
    that never call `_apply_gate` run unchanged; `apply_liger_kernel` rejects them.

    Raises:
        TypeError: a switch is unknown.
        ValueError: the family does not have a switch that is on.
    """
    logits_budget = budget_bytes(logits_budget)
    everybodys = {
        switch
        for switch, layers in family.layers.items()
        if any(_layer_class(family, name) is getattr(nn, name, None) for name in layers)
    }
    on = _chosen(family, tuple(switch for switch in family.switches if switch not in everybodys), switches)
    _revert_family(family)
    if family not in FAMILIES:
        off: dict[str, Any] = {
            switch: None if switch == "rope" else {} for switch in ("rope", *family.layers) if switch not in on
        }
        check_row(dataclasses.replace(family, **off), needs_all=True)
    applied = Applied(family.name)
    for switch in on:
        for name, layer in family.layers.get(switch, {}).items():
            applied.patches.set(getattr(family.modeling, name), layer.method, layer.run)
            applied.count(switch, name)
    if "rope" in on:
        _ROPES[family.name].hold(family, applied)
        applied.count("rope", "apply_rotary_pos_emb")
    if "cross_entropy" in on:
        for name in family.causal:
            applied.patches.set(getattr(family.modeling, name), "_loss_function", staticmethod(causal_lm_loss))
            applied.count("cross_entropy", "loss_function")
    if _FUSED in on:
        for name in family.causal:
            model_class = getattr(family.modeling, name)
            fuse(model_class, Fusion(output_of(model_class), logits_budget))
            applied.count(_FUSED, name)
    _FAMILY_WIDE[family.name] = applied
    return applied


def _function_of(name: str, family: Family) -> Callable[..., Applied]:
    """Return `apply_liger_kernel_to_<name>`, with the switches of the family in its signature."""

    def apply(*, model: PreTrainedModel | None = None, **options: Any) -> Applied:
        if model is None:
            return apply_to_family(family, **options)
        found = family_of(type(inner_model(model)))
        if found is not family:
            raise ValueError(f"model is a {found.name}, not a {family.name}: use apply_liger_kernel")
        return apply_liger_kernel(model, **options)

    names = (*family.switches, "logits_budget", "model")
    keywords = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in names]
    apply.__name__ = apply.__qualname__ = f"apply_liger_kernel_to_{name}"
    apply.__doc__ = (
        f"Patch `model`, or the classes of {family.name} if it is None, before or after models are built.\n\n"
        "See `apply_liger_kernel` for the switches; None turns on those that the model has. "
        f'`revert_liger_kernel(model)` or `revert_liger_kernel("{name}")` undoes the patch.'
    )
    vars(apply)["__signature__"] = inspect.Signature(keywords, return_annotation=Applied)
    return apply


def register_family(family: Family, *, replace: bool = False) -> Callable[..., Applied]:
    """Add a row to the table of families, for `apply_liger_kernel` and `AutoLigerKernelForCausalLM`.

    Each kernel of the row is compared with the code that it replaces, on a few random tokens. This function compares
    the rotary embedding and small instances of the layers. `apply_liger_kernel` compares the actual layers of each
    model.

    Args:
        family: the row.
        replace: replace rows that share a name with `family`. Models that are already patched stay as they are.

    Returns:
        The function `apply_liger_kernel_to_<name>`, which becomes an attribute of `liger_chunked` too.

    Raises:
        TypeError: `causal` or `aliases` is a string instead of a tuple of strings.
        ValueError: another family has that name and `replace` is False; the modeling module does not exist or lacks a
            name in the row; or a kernel computes something else than the code that it replaces.

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
    if patched := sorted(replaced & _FAMILY_WIDE.keys()):
        raise ValueError(f"the classes of {patched[0]} are patched: revert_liger_kernel({patched[0]!r}) first")
    check_row(family)
    for name in [name for name, old in BY_NAME.items() if old.name in replaced and old.name == family.name]:
        del BY_NAME[name], APPLY_TO[f"apply_liger_kernel_to_{name}"]
    BY_NAME.update(dict.fromkeys(names, family))
    APPLY_TO.update({f"apply_liger_kernel_to_{name}": _function_of(name, family) for name in names})
    return APPLY_TO[f"apply_liger_kernel_to_{family.name}"]


APPLY_TO = {f"apply_liger_kernel_to_{name}": _function_of(name, family) for name, family in BY_NAME.items()}
"""`apply_liger_kernel_to_<family>` for every family of the table."""
