"""Whether a model computes with the kernels what it computes without them."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from liger_chunked.integrations.transformers.apply import (
    _APPLIED,
    _FAMILY_WIDE,
    _FUSED,
    _ROPES,
    Applied,
    _by_name,
    apply_liger_kernel,
    revert_liger_kernel,
)
from liger_chunked.integrations.transformers.forward import _STATE
from liger_chunked.integrations.transformers.head import inner_model
from liger_chunked.integrations.transformers.layers import Layer
from liger_chunked.integrations.transformers.patches import Instead, patch_of, replacement_of, stock_class
from liger_chunked.integrations.transformers.verify import Difference, Incomparable, check_layer, check_rope

# What patching changes in the dictionary of a module, beside its class.
_ATTRIBUTES = (_STATE, _APPLIED, "_loss_function", "forward", "_old_forward")


@dataclass(frozen=True)
class Comparison:
    """How far the patched and the stock model are from the same model in float64: norms of the differences."""

    ours: float
    stock: float
    size: float
    bound: float

    @property
    def holds(self) -> bool:
        return self.ours <= self.bound

    def __str__(self) -> str:
        scale = self.size or 1.0
        return f"error {self.ours / scale:.2g}, stock {self.stock / scale:.2g}, allowed {self.bound / scale:.2g}"


@dataclass
class ModelReport:
    """What `check_model` found. `print` it.

    - `patched`: what was patched, as `apply_liger_kernel` returns it
    - `loss`: of the whole model
    - `gradients`: of each parameter that is trained, by name
    - `layers`: what is wrong with each kind of patched layer, by class name; None for nothing
    """

    patched: Applied
    loss: Comparison
    gradients: dict[str, Comparison] = field(default_factory=dict)
    layers: dict[str, str | None] = field(default_factory=dict)

    @property
    def failures(self) -> list[str]:
        """What differs, one line each."""
        layers = [f"layer {name}: {reason}" for name, reason in self.layers.items() if reason is not None]
        loss = [] if self.loss.holds else [f"loss: {self.loss}"]
        return layers + loss + [f"gradient of {name}: {g}" for name, g in self.gradients.items() if not g.holds]

    def __str__(self) -> str:
        worst = max(self.gradients.values(), key=lambda g: g.ours / (g.bound or 1.0), default=None)
        lines = [
            f"loss: {self.loss}",
            f"gradients of {len(self.gradients)} parameters" + ("" if worst is None else f", the worst: {worst}"),
            *(f"layer {name}: {'as stock' if reason is None else reason}" for name, reason in self.layers.items()),
        ]
        return "\n".join([str(self.patched), *lines])


def check_model(
    model: nn.Module,
    *,
    input_ids: Tensor | None = None,
    labels: Tensor | None = None,
    factor: float = 2.0,
    logits_budget: int | None = None,
    **switches: bool | None,
) -> ModelReport:
    """Compare a model's loss, gradients and patched layers with those of the same model without patches.

    Both run one step in evaluation mode (no dropout), and a float64 copy of the stock model runs it too. An error is a
    distance from that copy. It may be `factor` times the error of the stock model, plus as much of the value as the
    dtype rounds away. The kernels compute in float32, so a float64 model is allowed what a float32 model is. The model
    is left as it was: its patches, modes and gradients, and the state of random numbers.

    Args:
        model: a transformers model, or what wraps one (PEFT). It must fit into memory in float64 a second time, so take
            a model of few layers of a large one; a quantized, sharded or offloaded model has no such copy.
        input_ids: (B, T); None for a few random tokens, none of which the config names as special.
        labels: (B, T), those of `model(labels=...)`; None for `input_ids` without the first three.
        factor: how many times the error of the stock model is allowed.
        logits_budget, **switches: as `apply_liger_kernel` takes them. A model that is patched already is checked as it
            is, unless one of them is given.

    Returns:
        The errors. `print` them.

    Raises:
        AssertionError: something differs; the message says what, and by how much.
        TypeError, ValueError: those of `apply_liger_kernel`; a family whose classes are patched, parameters on the meta
            device, labels that leave no token to predict.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    >>> report = check_model(LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1)))
    >>> report.failures
    []
    """
    inner = inner_model(model)
    if on_meta := [name for name, p in inner.named_parameters() if p.is_meta]:
        raise ValueError(
            "check_model runs the model and a float64 copy of it, and parameters are on the meta device "
            f"({on_meta[0]} and {len(on_meta) - 1} more): load the model without offloading"
        )
    dtype = next(p.dtype for p in inner.parameters() if p.is_floating_point())
    options: dict[str, Any] = {**switches, **({} if logits_budget is None else {"logits_budget": logits_budget})}
    with _as_found(model), torch.random.fork_rng(), torch.autocast(inner.device.type, enabled=False):
        model.eval()
        if options or _APPLIED not in vars(inner):
            apply_liger_kernel(inner, **options)
        applied = vars(inner)[_APPLIED]
        if applied.family in _FAMILY_WIDE:
            raise ValueError(
                f"the classes of {applied.family} are patched, so there is no stock model to compare with: "
                f"revert_liger_kernel({applied.family!r}) first"
            )
        arguments = _arguments(inner, input_ids, labels)
        without_logits: dict[str, Any] = {"skip_logits": True} if _FUSED in applied.replaced else {}
        ours = _step(model, {**arguments, **without_logits})
        layers = {type(m).__name__: m for m in inner.modules() if isinstance(replacement_of(m), Instead)}
        rope = _ROPES[applied.family]
        with rope.suspended():
            found = {name: _difference(module) for name, module in layers.items()}
            if "rope" in applied.replaced:
                found["apply_rotary_pos_emb"] = _rope_difference(applied)
        revert_liger_kernel(inner)
        with rope.suspended():
            stock = _step(_in_dtype(model, torch.float32) if dtype == torch.float64 else model, arguments)
            exact = _step(_in_dtype(model, torch.float64), arguments)
    eps = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    largest = max((g.norm().item() for name, g in exact.items() if name), default=0.0)

    def compared(name: str) -> Comparison:
        nothing = torch.zeros((), dtype=torch.float64, device=exact[""].device)
        value = exact.get(name, nothing)
        error, of_stock = ((step.get(name, nothing).double() - value).norm().item() for step in (ours, stock))
        size = value.norm().item()
        # A gradient that is zero but for rounding may be off by what rounds away of the larger ones.
        rounding = eps * (size if not name else max(size, 0.1 * largest))
        return Comparison(error, of_stock, size, factor * (of_stock + rounding))

    gradients = {name: compared(name) for name in {**exact, **ours} if name}
    report = ModelReport(applied, compared(""), gradients, found)
    if report.failures:
        raise AssertionError("\n".join(["the patched model differs from stock:", *report.failures]))
    return report


@contextlib.contextmanager
def _as_found(model: nn.Module) -> Iterator[None]:
    """Put back what patching and `eval` change."""
    inner = inner_model(model)
    modules = [(module, type(module), module.training, _patches_of(module)) for module in model.modules()]
    try:
        yield
    finally:
        revert_liger_kernel(inner)
        for module, cls, training, attributes in modules:
            object.__setattr__(module, "__class__", cls)
            for name in _ATTRIBUTES:
                vars(module).pop(name, None)
            vars(module).update(attributes, training=training)
        applied = vars(inner).get(_APPLIED)
        if applied is not None and "rope" in applied.replaced:
            _ROPES[applied.family].hold(_by_name(applied.family), applied)


def _patches_of(module: nn.Module) -> dict[str, Any]:
    return {name: vars(module)[name] for name in _ATTRIBUTES if name in vars(module)}


def _arguments(inner: Any, input_ids: Tensor | None, labels: Tensor | None) -> dict[str, Tensor]:
    if input_ids is None:
        config = inner.config.get_text_config()
        special = [x for c in (inner.config, config) for name, x in c.to_dict().items() if name.endswith("token_id")]
        ids = [i for i in range(min(config.vocab_size, 1000)) if i not in special]
        picked = torch.randint(len(ids), (2, 16), generator=torch.Generator().manual_seed(0))
        input_ids = torch.tensor(ids)[picked].to(inner.device)
    if labels is None:
        labels = input_ids.clone()
        labels[:, :3] = -100
    if not (labels[:, 1:] != -100).any():
        raise ValueError(
            f"labels of shape {tuple(labels.shape)} leave no token to predict: all but those of the first position are "
            "-100"
        )
    return {"input_ids": input_ids, "labels": labels}


def _step(model: nn.Module, arguments: dict[str, Any]) -> dict[str, Tensor]:
    """The loss, under the name "", and the gradient of each parameter by name."""
    torch.manual_seed(0)
    with torch.enable_grad():
        loss = model(**arguments).loss
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        gradients = torch.autograd.grad(loss, list(trained.values()), allow_unused=True) if trained else ()
    found = {name: g for name, g in zip(trained, gradients, strict=True) if g is not None}
    return {"": loss.detach(), **found}


def _in_dtype(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    twin = copy.deepcopy(model).to(dtype)
    inner = inner_model(twin)
    if getattr(inner.config, "_experts_implementation", None) not in (None, "eager"):
        inner.set_experts_implementation("eager")  # the others have no float64
    return twin


def _difference(module: nn.Module) -> str | None:
    patch: Any = patch_of(module)
    try:
        check_layer(Layer(patch.make.run, patch.method), module, stock_class(type(module)))
    except (Difference, Incomparable) as difference:
        return str(difference)
    return None


def _rope_difference(applied: Applied) -> str | None:
    try:
        check_rope(_by_name(applied.family))
    except Difference as difference:
        return str(difference)
    return None
