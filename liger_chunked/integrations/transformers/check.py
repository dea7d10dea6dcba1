from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from liger_chunked.deferred.defer import SETTINGS
from liger_chunked.integrations.transformers.detect import inner_model
from liger_chunked.integrations.transformers.forward import STATE
from liger_chunked.integrations.transformers.patch import apply_liger_kernel, lists_switches, revert_model
from liger_chunked.integrations.transformers.report import APPLIED, FUSED, Applied
from liger_chunked.what_ran import RECORD, unrecorded

_CHANGED = (
    STATE,
    APPLIED,
    SETTINGS,
    RECORD,
    "_loss_function",
    "forward",
    "_old_forward",
    "training",
)


@dataclass(frozen=True)
class Comparison:
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
    """Errors of a patched model's loss and of its gradients, by parameter."""

    patched: Applied
    loss: Comparison
    gradients: dict[str, Comparison] = field(default_factory=dict)

    @property
    def failures(self) -> list[str]:
        loss = [] if self.loss.holds else [f"loss: {self.loss}"]
        return loss + [f"gradient of {name}: {g}" for name, g in self.gradients.items() if not g.holds]

    def __str__(self) -> str:
        worst = max(self.gradients.values(), key=lambda g: g.ours / (g.bound or 1.0), default=None)
        lines = [
            f"loss: {self.loss}",
            f"gradients of {len(self.gradients)} parameters" + ("" if worst is None else f", the worst: {worst}"),
        ]
        return "\n".join([str(self.patched), *lines])


@lists_switches
def check_model(
    model: nn.Module,
    *,
    input_ids: Tensor | None = None,
    labels: Tensor | None = None,
    factor: float = 2.0,
    logits_budget: int | float | str | None = None,
    rope: bool | None = None,
    rms_norm: bool | None = None,
    layer_norm: bool | None = None,
    swiglu: bool | None = None,
    geglu: bool | None = None,
    relu_squared: bool | None = None,
    cross_entropy: bool | None = None,
    fused_linear_cross_entropy: bool | None = None,
) -> ModelReport:
    """Compare a model's loss and gradients with the unpatched model's.

    Both run one step in the model's mode, without dropout. Errors are distances from a float64 copy, which must fit
    into memory.

    Args:
        model: a transformers model, also in PEFT, not quantized, sharded or offloaded.
        input_ids, labels: (B, T), as in `model(input_ids, labels=labels)`; None for random tokens.
        factor: the allowed multiple of the original's error, plus rounding.
        logits_budget, rope ... fused_linear_cross_entropy: see `apply_liger_kernel`. If all are None, a patched model
            keeps its patches.

    Raises:
        AssertionError: something differs.
        TypeError, ValueError: as `apply_liger_kernel`, or the models cannot be compared.

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
    options: dict[str, Any] = {
        "logits_budget": logits_budget,
        "rope": rope,
        "rms_norm": rms_norm,
        "layer_norm": layer_norm,
        "swiglu": swiglu,
        "geglu": geglu,
        "relu_squared": relu_squared,
        "cross_entropy": cross_entropy,
        FUSED: fused_linear_cross_entropy,
    }
    with _as_found(model), unrecorded(), torch.random.fork_rng(), torch.autocast(inner.device.type, enabled=False):
        if APPLIED not in vars(inner) or any(x is not None for x in options.values()):
            apply_liger_kernel(inner, **options)
        applied = vars(inner)[APPLIED]
        arguments = _arguments(inner, input_ids, labels)
        without_logits: dict[str, Any] = {"skip_logits": True} if FUSED in applied.replaced else {}
        ours = _step(model, {**arguments, **without_logits})
        revert_model(inner)
        stock = _step(_in_dtype(model, torch.float32) if dtype == torch.float64 else model, arguments)
        with _Float64Softmax():
            exact = _step(_in_dtype(model, torch.float64), arguments)
    eps = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    largest = max((g.norm().item() for name, g in exact.items() if name), default=0.0)

    def compared(name: str) -> Comparison:
        nothing = torch.zeros((), dtype=torch.float64, device=exact[""].device)
        value = exact.get(name, nothing)
        error, of_stock = ((step.get(name, nothing).double() - value).norm().item() for step in (ours, stock))
        size = value.norm().item()
        # A gradient near zero may round like the larger ones.
        rounding = eps * (size if not name else max(size, 0.1 * largest))
        return Comparison(error, of_stock, size, factor * (of_stock + rounding))

    gradients = {name: compared(name) for name in {**exact, **ours} if name}
    report = ModelReport(applied, compared(""), gradients)
    if report.failures:
        raise AssertionError("\n".join(["the patched model differs from stock:", *report.failures]))
    return report


@contextlib.contextmanager
def _as_found(model: nn.Module) -> Iterator[None]:
    inner = inner_model(model)
    before = [(m, type(m), {n: vars(m)[n] for n in _CHANGED if n in vars(m)}) for m in model.modules()]
    try:
        yield
    finally:
        revert_model(inner)
        for module, cls, attributes in before:
            object.__setattr__(module, "__class__", cls)
            for name in _CHANGED:
                vars(module).pop(name, None)
            vars(module).update(attributes)


def _arguments(inner: Any, input_ids: Tensor | None, labels: Tensor | None) -> dict[str, Any]:
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
        left = "leave no token to predict: all but those of the first position are -100"
        raise ValueError(f"labels of shape {tuple(labels.shape)} {left}")
    # Some models, such as BLT, cannot build a cache from their default configuration.
    without_cache = {"use_cache": False} if "use_cache" in inspect.signature(inner.forward).parameters else {}
    return {"input_ids": input_ids, "labels": labels, **without_cache}


def _step(model: nn.Module, arguments: dict[str, Any]) -> dict[str, Tensor]:
    torch.manual_seed(0)
    with torch.enable_grad(), _NoDropout():
        loss = model(**arguments).loss
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        gradients = torch.autograd.grad(loss, list(trained.values()), allow_unused=True) if trained else ()
    found = {name: g for name, g in zip(trained, gradients, strict=True) if g is not None}
    return {"": loss.detach(), **found}


class _Float64Softmax(TorchFunctionMode):
    """Keeps float64 where attention asks for a float32 softmax, in which a float64 mask overflows to -inf."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (F.softmax, torch.softmax, Tensor.softmax) and args and args[0].dtype == torch.float64:
            kwargs.pop("dtype", None)
        return func(*args, **kwargs)


class _NoDropout(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "dropout_p" in kwargs:  # of attention
            kwargs["dropout_p"] = 0.0
        return args[0] if "dropout" in getattr(func, "__name__", "") else func(*args, **kwargs)


def _in_dtype(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    twin = copy.deepcopy(model).to(dtype)
    inner = inner_model(twin)
    if getattr(inner.config, "_experts_implementation", None) not in (None, "eager"):
        inner.set_experts_implementation("eager")  # other implementations do not support float64
    return twin
