"""Compare kernels with the code that they replace, on small layers.

Weights are random: a norm's initial ones and zeros would hide errors.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from liger_chunked.integrations.transformers import layers as kinds
from liger_chunked.integrations.transformers.detect import FORWARD_SLOTS, stock_method
from liger_chunked.integrations.transformers.layers import Binding, Layer
from liger_chunked.integrations.transformers.source import source_of

_TOLERANCE = 1e-4  # relative to a token's norm, in float32
_MOST_ROUNDED = 0.02  # of a norm's bfloat16 values; another casting order changes a tenth
_SCALES = (1.0, 1e-3, 20.0, 1.0, 3.0)  # to reveal a norm's eps, or a clamp

_LAYERS = {name: layer for name, layer in vars(kinds).items() if isinstance(layer, Layer)}


class Difference(ValueError):
    """A kernel differs from the code that it replaces."""


class Incomparable(Exception):
    """The original code does not run here."""


_COMPARED: dict[Any, str | None] = {}


def difference(binding: Binding, module: nn.Module, cls: type[nn.Module]) -> str | None:
    """Return how the layer differs from `cls`, cached by class, source and configuration."""
    plain = {name: x for name, x in vars(module).items() if isinstance(x, bool | float | str) and name != "training"}
    parts = {name: type(x) for name, x in (*module._modules.items(), *module._parameters.items())}
    stock = stock_method(cls, binding.layer.method)
    key = (cls, stock, source_of(stock, cls), binding, repr(sorted(plain.items())), repr(sorted(parts.items())))
    if key not in _COMPARED:
        try:
            check_layer(binding, module, cls)
            _COMPARED[key] = None
        except Difference as found:
            _COMPARED[key] = str(found)
        except Incomparable as failure:
            _COMPARED[key] = f"{cls.__name__} cannot be compared with {_name(binding.layer)} ({failure})"
    return _COMPARED[key]


def check_layer(binding: Binding, module: nn.Module, cls: type[nn.Module]) -> None:
    """Raise Difference unless a small copy of `module` computes the same with the layer."""
    layer = binding.layer
    with _quiet():
        probe = _probe(module, cls, {1: 1})
        width, expected = _stock_output(layer, probe, cls)
        found = _layer_difference(binding, probe, cls, width, expected)
        if found is None:
            return
        theirs = dict(zip(layer.attributes, binding.names, strict=True))
        others = {
            name: Binding(other, tuple(theirs.get(n, n) for n in other.attributes))
            for name, other in _LAYERS.items()
            if other.method == layer.method
        }
        same = [n for n, other in others.items() if _layer_difference(other, probe, cls, width, expected) is None]
    advice = f"; {same[0]} computes the same" if same else ""
    raise Difference(f"{cls.__name__} is not {_name(layer)}: {found}{advice}")


_ROTATED: dict[Any, str | None] = {}


def rotary_difference(ours: Callable[..., Any], function: Any, rotary: Iterable[nn.Module]) -> str | None:
    modules = {type(module): module for module in rotary}
    key = (ours, function, source_of(function), frozenset(modules))
    if key not in _ROTATED:
        with _quiet():
            found = [_angles(module) for module in modules.values()] + [_llama_angles()]
            differences = (_rotary_difference(ours, function, *angles) for angles in found if angles is not None)
            _ROTATED[key] = next(filter(None, differences), None)
    return _ROTATED[key]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with torch.no_grad(), torch.autocast("cpu", enabled=False), torch.device("cpu"):
        yield


def _first_line(failure: Exception) -> str:
    return f"{type(failure).__name__}: {failure}".splitlines()[0]


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float32)


def _largest(ours: Tensor, expected: Tensor) -> str | None:
    if ours.shape != expected.shape:
        return f"its shape is {tuple(expected.shape)}, that of the kernel {tuple(ours.shape)}"
    distance = (ours.double() - expected.double()).norm(dim=-1)
    size = expected.double().norm(dim=-1)
    error = (distance / size.clamp(min=1e-12)).nan_to_num(nan=torch.inf, posinf=torch.inf).max().item()
    return None if error <= _TOLERANCE else f"the results differ by up to {error:.2g} of their norm"


def _llama_angles() -> tuple[Tensor, Tensor]:
    angles = _POSITIONS[..., None] * 10.0 ** -torch.arange(0.0, 2.0, 0.25, dtype=torch.float32)
    return angles.cos().repeat(1, 1, 2), angles.sin().repeat(1, 1, 2)


_POSITIONS = torch.tensor([[0, 1, 2, 7, 50]])


def _angles(module: nn.Module) -> tuple[Tensor, Tensor] | None:
    try:
        rotary: Any = copy.deepcopy(module).to(dtype=torch.float32)
        device = next(rotary.buffers()).device
        x = torch.zeros(1, 5, 8, dtype=torch.float32, device=device)
        layered = "layer_type" in inspect.signature(rotary.forward).parameters
        more = {"layer_type": rotary.config.layer_types[0]} if layered else {}
        for ids in (_POSITIONS, _POSITIONS.expand(3, 1, -1)):  # then as for text and images
            cos, sin = (y.float().cpu() for y in rotary(x, ids.to(device), **more))
            if cos.ndim == 3 and cos.shape[:2] == (1, 5):
                return cos, sin
    except Exception:
        pass
    return None


def _rotary_difference(ours: Callable[..., Any], function: Any, cos: Tensor, sin: Tensor) -> str | None:
    for width in (cos.shape[-1] + 8, cos.shape[-1]):  # attention may pass only the rotated columns
        arguments = _random(1, 3, 5, width), _random(1, 2, 5, width, seed=1), cos, sin
        try:
            expected = function(*arguments)
        except Exception as failure:
            reason = f"it cannot be compared ({_first_line(failure)})"
            continue
        try:
            rotated = ours(*arguments)
        except Exception as failure:
            return f"the kernel does not take its arguments ({_first_line(failure)})"
        differences = (_largest(y, e) for y, e in zip(rotated, expected, strict=True))
        return next(filter(None, differences), None)
    return reason


def built(binding: Binding, cls: type[nn.Module], modeling: ModuleType) -> nn.Module:
    """Build a module on the meta device that the layer supports."""
    reasons = []
    for config in (*_configs(modeling), None):
        if hasattr(config, "_experts_implementation"):
            config._experts_implementation = "grouped_mm"
        try:
            with torch.device("meta"), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                module = cls(**_constructor_arguments(cls, config))
        except Exception as failure:
            reasons.append(_first_line(failure))
            continue
        try:
            binding.values(module)
        except AttributeError as missing:
            name = _name(binding.layer)
            raise Difference(f"{cls.__name__} is not {name}: it is laid out differently: {missing}") from None
        refusal = binding.refusal(module)
        if refusal is None:
            return module
        reasons.append(refusal)
    raise Incomparable(reasons[0])


def _configs(modeling: ModuleType) -> Iterator[Any]:
    models = (
        [x for x in vars(modeling).values() if inspect.isclass(x) and issubclass(x, PreTrainedModel)]
        if modeling
        else []
    )
    for config_class in dict.fromkeys(cls.config_class for cls in models if cls.config_class is not None):
        try:
            config = config_class()
        except Exception:
            continue
        parts = (getattr(config, part, None) for part in config.sub_configs)
        yield from (config.get_text_config(), config, *(part for part in parts if part is not None))


def _name(layer: Layer) -> str:
    return next((name for name, known in _LAYERS.items() if known.run is layer.run), layer.run.__name__)


def _constructor_arguments(cls: type[nn.Module], config: Any) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    for name, parameter in inspect.signature(cls).parameters.items():
        is_size = "size" in name or "dim" in name
        optional = parameter.default is not parameter.empty and not (parameter.default is None and is_size)
        if optional or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        known = {"config": config, "eps": 1e-6, "layer_idx": 0}
        arguments[name] = next((value for part, value in known.items() if part in name), 64)
    return arguments


def _small(size: int, sizes: dict[int, int]) -> int:
    """Map a dimension to a small one; twice another stays twice."""
    if size not in sizes:
        if 2 * size in sizes:
            sizes[size] = sizes[2 * size] // 2
        elif size % 2 == 0 and size // 2 in sizes:
            sizes[size] = 2 * sizes[size // 2]
        else:
            sizes[size] = 8 + 16 * len(sizes)
    return sizes[size]


def _attribute(value: Any, sizes: dict[int, int]) -> Any:
    if isinstance(value, tuple):
        return tuple(_attribute(x, sizes) for x in value)
    return sizes.get(value, value) if type(value) is int else value


def _probe(module: nn.Module, cls: Any, sizes: dict[int, int]) -> Any:
    probe = object.__new__(cls)
    nn.Module.__init__(probe)
    internal = {*vars(probe), *FORWARD_SLOTS, "_hf_hook"}
    for i, (name, parameter) in enumerate(module._parameters.items()):
        # ZeRO-3's shape.
        shape = getattr(parameter, "ds_shape", None) or (None if parameter is None else parameter.shape)
        probe._parameters[name] = None if shape is None else _weight(*(_small(n, sizes) for n in shape), seed=i)
    for i, (name, child) in enumerate(module._modules.items()):
        probe._modules[name] = None if child is None else _child(child, sizes, seed=i)
    for name, buffer in module._buffers.items():
        probe._buffers[name] = None if buffer is None else _random(*(_small(n, sizes) for n in buffer.shape))
    vars(probe).update({name: _attribute(x, sizes) for name, x in vars(module).items() if name not in internal})
    return probe.eval()


def _weight(*shape: int, seed: int) -> nn.Parameter:
    scale = 0.5 if len(shape) < 2 else shape[-1] ** -0.5
    return nn.Parameter(scale * _random(*shape, seed=seed), requires_grad=False)


def _child(child: nn.Module, sizes: dict[int, int], seed: int) -> nn.Module:
    if next(child.parameters(), None) is None:
        return copy.deepcopy(child).eval()
    n_in, n_out = getattr(child, "in_features", None), getattr(child, "out_features", None)
    if n_in is None or n_out is None:
        return _probe(child, type(child), sizes)
    # The projection may be quantized.
    width, height = _small(n_in, sizes), _small(n_out, sizes)
    linear = nn.Linear(width, height, bias=getattr(child, "bias", None) is not None, device="meta")
    for name, parameter in list(linear.named_parameters()):
        setattr(linear, name, _weight(*parameter.shape, seed=seed))
    return linear


def _tokens(width: int) -> Tensor:
    return _random(len(_SCALES), width) * torch.tensor(_SCALES, dtype=torch.float32)[:, None]


def _stock_output(layer: Layer, probe: Any, cls: Any) -> tuple[int, Tensor]:
    widths = [p.shape[-1] for p in probe.parameters()] if layer.method == "forward" else []
    failure: Exception | None = None
    for width in dict.fromkeys(widths or [48]):
        try:
            expected = stock_method(cls, layer.method)(probe, _tokens(width))
            if isinstance(expected, Tensor) and expected.ndim == 2:
                return width, expected
        except Exception as reason:
            failure = failure or reason
    raise Incomparable("it returns no tensor of tokens" if failure is None else _first_line(failure))


def _layer_difference(binding: Binding, probe: Any, cls: Any, width: int, expected: Tensor) -> str | None:
    try:
        found = _largest(binding.run(probe, _tokens(width)), expected)
        if found is None and not probe._modules and binding.layer.method == "forward":
            found = _rounding(binding, probe, cls, width)
    except AttributeError as missing:
        return f"it is laid out differently: {missing}"
    except Exception as failure:
        return f"the kernel does not run on it ({_first_line(failure)})"
    return found


def _cast(probe: Any, dtype: torch.dtype) -> Any:
    cast = object.__new__(type(probe))  # FSDP's classes cannot be copied
    vars(cast).update(vars(probe))
    for kind in ("_parameters", "_buffers"):
        vars(cast)[kind] = {name: None if x is None else x.to(dtype) for name, x in vars(probe)[kind].items()}
    return cast


def _rounding(binding: Binding, probe: Any, cls: Any, width: int) -> str | None:
    x = _random(64, width).bfloat16()
    for dtype in (torch.float32, torch.bfloat16):
        probe = _cast(probe, dtype)
        try:
            expected = stock_method(cls, binding.layer.method)(probe, x)
        except RuntimeError:  # no mixed dtypes
            continue
        ours = binding.run(probe, x)
        if ours.dtype != expected.dtype:
            return f"for bfloat16 and a {dtype} weight it returns {expected.dtype}, the kernel {ours.dtype}"
        changed = (ours != expected).float().mean().item()
        if changed > _MOST_ROUNDED:
            return f"in bfloat16 {changed:.0%} of the values are rounded differently"
    return None
