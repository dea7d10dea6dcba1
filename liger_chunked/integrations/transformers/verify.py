"""Compare each kernel of a row with the code that it replaces, on small layers.

Tokens and weights are random, because a norm's initial ones and zeros would hide errors.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from liger_chunked.integrations.transformers import layers as kinds
from liger_chunked.integrations.transformers.detect import FORWARD_SLOTS
from liger_chunked.integrations.transformers.layers import Layer, rotate_halves, rotate_pairs
from liger_chunked.integrations.transformers.overrides import Family, layer_class

_TOLERANCE = 1e-4  # relative to a token's norm, in float32
_MOST_ROUNDED = 0.02  # share of a norm's bfloat16 values; another casting order changes a tenth
_SCALES = (1.0, 1e-3, 20.0, 1.0, 3.0)  # small tokens reveal a norm's eps, large ones a clamp

_LAYERS = {name: layer for name, layer in vars(kinds).items() if isinstance(layer, Layer)}


class Difference(ValueError):
    """A kernel differs from the code that it replaces."""


class Incomparable(Exception):
    """The original code does not run on the probe."""


def check_row(family: Family, *, needs_all: bool = False) -> None:
    """Raise a Difference if a kernel differs. Skip modules that need a model to be built, unless `needs_all`."""
    if family.rope is not None:
        check_rope(family)
    for switch, layers in family.layers.items():
        for name, layer in layers.items():
            cls = layer_class(family, name)
            try:
                check_layer(layer, _built(layer, cls, family), cls)
            except Difference as difference:
                raise Difference(f"{switch}: {difference}") from difference.__cause__
            except Incomparable as failure:
                if needs_all:
                    raise Difference(
                        f"{switch}: {name} cannot be compared without a model ({failure}): patch models one by one, "
                        f"apply_liger_kernel(model), or leave it out, {switch}=False"
                    ) from failure


def check_layers(layer: Layer, modules: Iterable[nn.Module], cls: type[nn.Module]) -> None:
    """Run `check_layer` on one module of each configuration."""
    seen = set()
    for module in modules:
        plain = {name: x for name, x in vars(module).items() if isinstance(x, bool | float | str)}
        setting = repr(sorted((plain | {"training": None}).items()))
        if setting in seen:
            continue
        seen.add(setting)
        try:
            check_layer(layer, module, cls)
        except Incomparable as failure:
            raise Difference(f"{cls.__name__} cannot be compared with {_name(layer)} ({failure})") from failure


def check_layer(layer: Layer, module: nn.Module, cls: type[nn.Module]) -> None:
    """Raise a Difference unless `layer.run` equals `cls` on a small copy of `module`."""
    with _quiet():
        probe = _probe(module, cls, {1: 1})
        width, expected = _stock_output(layer, probe, cls)
        difference = _layer_difference(layer, probe, cls, width, expected)
        if difference is None:
            return
        others = {name: other for name, other in _LAYERS.items() if other.method == layer.method}
        same = [n for n, other in others.items() if _layer_difference(other, probe, cls, width, expected) is None]
    advice = f"{same[0]} computes the same" if same else "leave it out of the row"
    raise Difference(f"{cls.__name__} is not {_name(layer)}: {difference}; {advice}")


def check_rope(family: Family) -> None:
    """Raise a Difference unless `family.rope` equals the function that it replaces."""
    ours: Any = family.rope
    advice = "set rope=None in the row, which leaves the rotary embedding as it is"
    title = f"rope: apply_rotary_pos_emb of {family.module_name}"
    with _quiet():
        try:
            arguments = _rotary_arguments(family)
            expected = family.modeling.apply_rotary_pos_emb(*arguments)
        except Exception as failure:
            raise Difference(f"{title} cannot be compared ({_first_line(failure)}); {advice}") from failure
        difference = _rotary_difference(ours, arguments, expected)
        if difference is None:
            return
        for other in (rotate_halves, rotate_pairs):
            if other is not ours and _rotary_difference(other, arguments, expected) is None:
                advice = f"set rope={other.__name__}, which is in {kinds.__name__}"
    raise Difference(f"{title} is not {getattr(ours, '__name__', repr(ours))}: {difference}; {advice}")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with torch.no_grad(), torch.autocast("cpu", enabled=False), torch.device("cpu"):
        yield


def _first_line(failure: Exception) -> str:
    return f"{type(failure).__name__}: {failure}".splitlines()[0]


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float32)


def _largest(ours: Tensor, expected: Tensor) -> str | None:
    """Describe the largest difference, if it is more than rounding."""
    if ours.shape != expected.shape:
        return f"its shape is {tuple(expected.shape)}, that of the kernel {tuple(ours.shape)}"
    distance = (ours.double() - expected.double()).norm(dim=-1)
    size = expected.double().norm(dim=-1)
    error = (distance / size.clamp(min=1e-12)).nan_to_num(nan=torch.inf, posinf=torch.inf).max().item()
    return None if error <= _TOLERANCE else f"the results differ by up to {error:.2g} of their norm"


def _configs(family: Family) -> Iterator[Any]:
    named = [getattr(family.modeling, name) for name in family.causal]
    others = [x for x in vars(family.modeling).values() if inspect.isclass(x) and issubclass(x, PreTrainedModel)]
    classes = [config for cls in (*named, *others) if (config := cls.config_class) is not None]
    for config_class in dict.fromkeys(classes):
        try:
            config = config_class()
        except Exception:  # the config has no defaults
            continue
        parts = (getattr(config, part, None) for part in config.sub_configs)
        yield from (config.get_text_config(), config, *(part for part in parts if part is not None))


def _rotary_arguments(family: Family) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return q, k, cos and sin."""
    positions = torch.tensor([[0, 1, 2, 7, 50]])
    found = _angles(family, positions)
    if found is None:  # use Llama's
        angles = positions[..., None] * 10.0 ** -torch.arange(0.0, 2.0, 0.25, dtype=torch.float32)
        found = angles.cos().repeat(1, 1, 2), angles.sin().repeat(1, 1, 2), 16
    cos, sin, width = found
    q, k = _random(1, 3, 5, width), _random(1, 2, 5, width, seed=1)
    try:
        family.modeling.apply_rotary_pos_emb(q, k, cos, sin)
    except Exception:
        width = cos.shape[-1]  # attention passes only the rotated columns
    return q[..., :width], k[..., :width], cos, sin


def _angles(family: Family, positions: Tensor) -> tuple[Tensor, Tensor, int] | None:
    classes: list[Any] = [
        cls
        for name, cls in vars(family.modeling).items()
        if name.endswith("RotaryEmbedding") and "Vision" not in name and inspect.isclass(cls)
    ]
    x = torch.zeros(1, 5, 8, dtype=torch.float32)
    for config in _configs(family):
        width = getattr(config, "head_dim", None)
        for cls in classes:
            try:
                width = width or config.hidden_size // config.num_attention_heads
                rotary = cls(config)
                layered = "layer_type" in inspect.signature(rotary.forward).parameters
                more = {"layer_type": config.layer_types[0]} if layered else {}
                for ids in (positions, positions.expand(3, 1, -1)):  # then as models of text and images
                    cos, sin = rotary(x, ids, **more)
                    if cos.ndim == 3 and cos.shape[0] == 1:
                        return cos, sin, width
            except Exception:  # another part of the model
                continue
    return None


def _rotary_difference(ours: Callable[..., Any], arguments: tuple[Tensor, ...], expected: Any) -> str | None:
    try:
        rotated = ours(*arguments)
    except Exception as failure:
        return f"the kernel does not take its arguments ({_first_line(failure)})"
    differences = (_largest(y, e) for y, e in zip(rotated, expected, strict=True))
    return next(filter(None, differences), None)


# Layers.


def _built(layer: Layer, cls: type[nn.Module], family: Family) -> nn.Module:
    """Build a module that `layer` supports on the meta device."""
    reasons = []
    for config in (*_configs(family), None):
        if hasattr(config, "_experts_implementation"):
            config._experts_implementation = "grouped_mm"  # normally chosen by the model
        try:
            with torch.device("meta"):
                module = cls(**_constructor_arguments(cls, config))
        except Exception as failure:
            reasons.append(_first_line(failure))
            continue
        try:
            refusal = layer.refusal(module)
        except AttributeError as missing:
            raise Difference(f"{cls.__name__} is not {_name(layer)}: it is laid out differently: {missing}") from None
        if refusal is None:
            return module
        reasons.append(refusal)
    raise Incomparable(reasons[0])


def _name(layer: Layer) -> str:
    return next((name for name, known in _LAYERS.items() if known.run is layer.run), "its layer in the row")


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
    """Map a layer's dimension to a small one; twice another dimension stays twice."""
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
    """Return a copy of `module` with small random weights."""
    probe = object.__new__(cls)
    nn.Module.__init__(probe)
    internal = {*vars(probe), *FORWARD_SLOTS, "_hf_hook"}
    for i, (name, parameter) in enumerate(module._parameters.items()):
        # ZeRO-3 keeps the shape of a sharded parameter in ds_shape.
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
    # Replaces a projection that may be quantized.
    width, height = _small(n_in, sizes), _small(n_out, sizes)
    linear = nn.Linear(width, height, bias=getattr(child, "bias", None) is not None, device="meta")
    for name, parameter in list(linear.named_parameters()):
        setattr(linear, name, _weight(*parameter.shape, seed=seed))
    return linear


def _tokens(width: int) -> Tensor:
    return _random(len(_SCALES), width) * torch.tensor(_SCALES, dtype=torch.float32)[:, None]


def _stock_output(layer: Layer, probe: Any, cls: Any) -> tuple[int, Tensor]:
    """Return an input width that the original accepts, and its output."""
    widths = [p.shape[-1] for p in probe.parameters()] if layer.method == "forward" else [48]
    failure: Exception | None = None
    for width in dict.fromkeys(widths):
        try:
            expected = getattr(cls, layer.method)(probe, _tokens(width))
            if isinstance(expected, Tensor) and expected.ndim == 2:
                return width, expected
        except Exception as reason:
            failure = failure or reason
    raise Incomparable("it has no parameters" if failure is None else _first_line(failure))


def _layer_difference(layer: Layer, probe: Any, cls: Any, width: int, expected: Tensor) -> str | None:
    try:
        difference = _largest(layer.run(probe, _tokens(width)), expected)
        if difference is None and not probe._modules and layer.method == "forward":
            difference = _rounding(layer, probe, cls, width)
    except AttributeError as missing:
        return f"it is laid out differently: {missing}"
    except Exception as failure:
        return f"the kernel does not run on it ({_first_line(failure)})"
    return difference


def _rounding(layer: Layer, probe: Any, cls: Any, width: int) -> str | None:
    """Compare a norm's rounding in bfloat16, with float32 and bfloat16 weights."""
    x = _random(64, width).bfloat16()
    for dtype in (torch.float32, torch.bfloat16):
        probe = copy.deepcopy(probe).to(dtype)
        try:
            expected = getattr(cls, layer.method)(probe, x)
        except RuntimeError:  # it takes no mixed dtypes
            continue
        ours = layer.run(probe, x)
        if ours.dtype != expected.dtype:
            return f"for bfloat16 and a {dtype} weight it returns {expected.dtype}, the kernel {ours.dtype}"
        changed = (ours != expected).float().mean().item()
        if changed > _MOST_ROUNDED:
            return f"in bfloat16 {changed:.0%} of the values are rounded differently"
    return None
