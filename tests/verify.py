"""Compare kernels with the code that they replace, on small layers of every class that is recognised by its code.

Weights are random, and numbers of the configuration are changed: initial ones and zeros would hide errors.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from liger_chunked.deferred.code import FORWARD_SLOTS
from liger_chunked.integrations.transformers import layers as kinds
from liger_chunked.integrations.transformers.layers import Binding, Layer
from liger_chunked.integrations.transformers.rotary import (
    rotate_halves_by_half,
    rotate_one_by_half,
    rotate_pairs_of_repeated,
    rotate_vision,
)

_TOLERANCE = 1e-4  # relative to a token's norm, in float32
_MOST_ROUNDED = 0.02  # of a norm's bfloat16 values; another casting order changes a tenth
_SCALES = (1.0, 1e-3, 20.0, 1.0, 3.0)  # to reveal a norm's eps, or a clamp

_LAYERS = {name: layer for name, layer in vars(kinds).items() if isinstance(layer, Layer)}


class Difference(ValueError):
    """A kernel differs from the code that it replaces."""


class Incomparable(Exception):
    """The original code does not run here."""


def run(binding: Binding, module: nn.Module, *inputs: Tensor) -> Tensor:
    """Run a layer of ours on a module of the class that it serves."""
    return binding.layer.run(*inputs, *binding.values(module))


def check_layer(binding: Binding, module: nn.Module, cls: type[nn.Module]) -> None:
    """Raise Difference unless a small copy of `module` has the same results and gradients with the layer."""
    layer = binding.layer
    with _quiet():
        is_small = not module._modules and all(len(_shape(p)) < 2 for p in module.parameters())
        probe = _probe(module, cls, None if is_small else {1: 1})
        for training in (False, True):
            probe.train(training)
            if training:  # large values reveal a clamp
                for vector in (p for p in probe.parameters() if p.ndim < 2):
                    vector.mul_(100)
            before = _state(probe)
            expected = _stock_step(layer, probe, cls)
            changed = [name for name, x in _state(probe).items() if before.get(name, x) != x]
            found = f"it changes {changed[0]}" if changed else _layer_difference(binding, probe, cls, expected)
            if found is not None:
                break
        else:
            return
        theirs = dict(zip(layer.attributes, binding.names, strict=True))
        others = {
            name: Binding(other, tuple(theirs.get(n, n) for n in other.attributes))
            for name, other in _LAYERS.items()
            if (other.method, other.inputs) == (layer.method, layer.inputs)
        }
        same = [n for n, other in others.items() if _layer_difference(other, probe, cls, expected) is None]
    mode = "in training mode, " if training else ""
    advice = f"; {same[0]} computes the same" if same else ""
    raise Difference(f"{cls.__name__} is not {_name(layer)}: {mode}{found}{advice}")


def rotary_difference(ours: Callable[..., Any], function: Any, rotary: Iterable[nn.Module]) -> str | None:
    """Return how a rotary function of ours differs from stock, with the angles of these modules and with plain ones."""
    modules = {type(module): module for module in rotary}
    with _quiet():
        default = _default_angles(ours)
        found = [_angles(module) for module in modules.values()]
        fitting = [x for x in found if x.keys() == default.keys() and _ndim(x) == _ndim(default)]
        differences = (_rotary_difference(ours, function, angles) for angles in (*fitting, default))
        return next(filter(None, differences), None)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False), torch.device("cpu"):
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


_POSITIONS = torch.tensor([[0, 1, 2, 7, 50]])
_Angles = dict[str, Tensor]


def _default_angles(ours: Callable[..., Any]) -> _Angles:
    angles = _POSITIONS[..., None] * 10.0 ** -torch.arange(0.0, 2.0, 0.25, dtype=torch.float32)
    if "freqs_cis" in inspect.signature(ours).parameters:
        return {"freqs_cis": torch.polar(torch.ones_like(angles), angles)}
    if ours is rotate_pairs_of_repeated:
        angles = angles.repeat_interleave(2, dim=-1)
    elif ours not in (rotate_halves_by_half, rotate_one_by_half):
        angles = angles.repeat(1, 1, 2)
    angles = angles[0] if ours is rotate_vision else angles
    return {"cos": angles.cos(), "sin": angles.sin()}


def _ndim(angles: _Angles) -> int:
    return next(iter(angles.values())).ndim


def _angles(module: nn.Module) -> _Angles:
    text = _POSITIONS, _POSITIONS.expand(3, 1, -1)  # the second as models of text and images
    images = (_POSITIONS[0, :, None].expand(-1, n) for n in (2, 3))
    try:
        on_meta = any(x.is_meta for x in module.buffers())
        rotary: Any = type(module)(module.config) if on_meta else copy.deepcopy(module).to(dtype=torch.float32)
        device = next(rotary.buffers()).device
        x = torch.zeros(1, 5, 8, dtype=torch.float32, device=device)
        layered = "layer_type" in inspect.signature(rotary.forward).parameters
        more = {"layer_type": rotary.config.layer_types[0]} if layered else {}
    except Exception:  # another part of the model
        return {}
    for ids in (*text, *images):
        try:
            found = rotary(x, ids.to(device), **more)
            tensors = [found] if isinstance(found, Tensor) else [y.float() for y in found]
        except Exception:  # other positions
            continue
        names = ("freqs_cis",) if tensors[0].is_complex() else ("cos", "sin")
        if len(tensors) == len(names) and tensors[0].shape[:-1] in ((1, 5), (5,)):
            return {name: y.cpu() for name, y in zip(names, tensors, strict=True)}
    return {}


_Q, _K = ("q", "xq", "x", "tensor"), ("k", "xk")


def _rotary_difference(ours: Callable[..., Any], function: Any, angles: _Angles) -> str | None:
    known = {*_Q, *_K, *angles}
    names = [name for name in inspect.signature(ours).parameters if name in known]
    columns, reason = next(iter(angles.values())).shape[-1], ""
    # Attention may pass only the rotated columns, or twice those of the angles.
    for width, layout in itertools.product((columns + 8, columns, 2 * columns), _LAYOUTS):
        q, k = (_random(*(heads if n is None else n for n in layout), width, seed=heads) for heads in (3, 2))
        arguments = [q if name in _Q else k if name in _K else angles[name] for name in names]
        try:
            expected = function(*arguments)
        except Exception as failure:
            reason = f"it cannot be compared ({_first_line(failure)})"
            continue
        try:
            rotated = ours(*arguments)
        except Exception as failure:
            return f"the kernel does not take its arguments ({_first_line(failure)})"
        if isinstance(expected, Tensor):
            return _largest(rotated, expected)
        differences = (_largest(y, e) for y, e in zip(rotated, expected, strict=True))
        return next(filter(None, differences), None)
    return reason


_LAYOUTS = (1, None, 5), (1, 5, None), (5, None)  # of batch, heads (None) and tokens


def built(binding: Binding, cls: type[nn.Module], modeling: ModuleType) -> nn.Module:
    """Build a module on the meta device that the layer supports."""
    reasons = []
    for config in (*_configs(modeling), None):
        if config is not None and hasattr(config, "_experts_implementation"):
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
            pairs = zip(binding.layer.attributes, binding.reads.items(), strict=True)
            absent = [own for own, (name, needed) in pairs if needed and not hasattr(module, name)]
            advice = ", ".join(f"{own}='<its name>'" for own in absent)
            raise Difference(
                f"{cls.__name__} is not {_name(binding.layer)}: it is laid out differently: {missing}; pass {advice}"
            ) from None
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


def _small(size: int, sizes: dict[int, int] | None) -> int:
    """Map a dimension to a small one, except without `sizes`; twice another stays twice."""
    if sizes is None:
        return size
    if size not in sizes:
        if 2 * size in sizes:
            sizes[size] = sizes[2 * size] // 2
        elif size % 2 == 0 and size // 2 in sizes:
            sizes[size] = 2 * sizes[size // 2]
        else:
            sizes[size] = 8 + 16 * len(sizes)
    return sizes[size]


def _attribute(value: Any, sizes: dict[int, int] | None) -> Any:
    """Map a dimension to a small one, and change numbers: a factor of 1.0 hides that a kernel forgets it."""
    if isinstance(value, tuple):
        return tuple(_attribute(x, sizes) for x in value)
    if type(value) is float:
        return 0.75 * value
    return sizes.get(value, value) if sizes and type(value) is int else value


def _probe(module: nn.Module, cls: Any, sizes: dict[int, int] | None) -> Any:
    probe = object.__new__(cls)
    nn.Module.__init__(probe)
    internal = {*vars(probe), *FORWARD_SLOTS, "_hf_hook"}
    for i, (name, parameter) in enumerate(module._parameters.items()):
        known = None if parameter is None else _weight(*(_small(n, sizes) for n in _shape(parameter)), seed=i)
        probe._parameters[name] = known
    for i, (name, child) in enumerate(module._modules.items()):
        probe._modules[name] = None if child is None else _child(child, sizes, seed=i)
    for name, buffer in module._buffers.items():
        probe._buffers[name] = None if buffer is None else _random(*(_small(n, sizes) for n in buffer.shape))
    vars(probe).update({name: _attribute(x, sizes) for name, x in vars(module).items() if name not in internal})
    return probe


def _shape(parameter: Tensor) -> Any:
    return getattr(parameter, "ds_shape", None) or parameter.shape  # ZeRO-3's of a sharded parameter


def _weight(*shape: int, seed: int) -> nn.Parameter:
    scale = 0.5 if len(shape) < 2 else shape[-1] ** -0.5
    return nn.Parameter(scale * _random(*shape, seed=seed))


def _child(child: nn.Module, sizes: dict[int, int] | None, seed: int) -> nn.Module:
    if next(child.parameters(), None) is None:
        return copy.deepcopy(child)
    n_in, n_out = getattr(child, "in_features", None), getattr(child, "out_features", None)
    if n_in is None or n_out is None:
        return _probe(child, type(child), sizes)
    # The projection may be quantized.
    width, height = _small(n_in, sizes), _small(n_out, sizes)
    linear = nn.Linear(width, height, bias=getattr(child, "bias", None) is not None, device="meta")
    for name, parameter in list(linear.named_parameters()):
        setattr(linear, name, _weight(*parameter.shape, seed=seed))
    return linear


def _tokens(layer: Layer, probe: Any, width: int) -> list[Tensor]:
    experts = [p.shape[0] for p in probe.parameters() if p.ndim == 3 and layer.method == "forward"]
    scales = torch.tensor(_SCALES, dtype=torch.float32).repeat(experts[0] if experts else 1)
    x, *others = (_random(len(scales), width, seed=i) for i in range(layer.inputs))
    return [x * scales[:, None], *others]


def _state(probe: Any) -> dict[str, str]:
    numbers = {name: repr(x) for name, x in vars(probe).items() if type(x) in (int, float)}
    return {**numbers, **{name: repr(x.tolist()) for name, x in probe.named_buffers()}}


class _Step(NamedTuple):
    inputs: list[Tensor]
    output: Tensor
    gradients: dict[str, Tensor]


def _stock_step(layer: Layer, probe: Any, cls: Any) -> _Step:
    widths = [p.shape[-1] for p in probe.parameters()] if layer.method == "forward" else []
    widths = [*dict.fromkeys(widths or getattr(probe, "normalized_shape", [48]))]
    tokens = [_tokens(layer, probe, width) for width in widths]
    if probe.training:  # a batch reveals a wrong dimension; some experts take none
        tokens = [[x[None] for x in inputs] for inputs in tokens] + tokens
    failures = []
    for inputs in tokens:
        try:
            return _step(functools.partial(getattr(cls, layer.method), probe), probe, inputs)
        except Exception as failure:
            failures.append(_first_line(failure))
    raise Incomparable(failures[0] if failures else "the width of its input is not known")


def _step(method: Callable[..., Any], probe: Any, inputs: list[Tensor]) -> _Step:
    inputs = [x.detach().requires_grad_() for x in inputs]
    leaves = {**{f"input {i}": x for i, x in enumerate(inputs)}, **dict(probe.named_parameters())}
    with torch.enable_grad():
        output = method(*(x.clone() for x in inputs))  # a kernel may overwrite its input
    if not isinstance(output, Tensor) or output.shape[:-1] != inputs[0].shape[:-1]:
        raise TypeError("it returns no tensor of tokens")
    gradients: Any = [torch.zeros_like(x) for x in leaves.values()]
    if output.requires_grad:
        upstream = _random(*output.shape, seed=9).to(output.dtype)
        gradients = torch.autograd.grad(output, [*leaves.values()], upstream, materialize_grads=True)
    return _Step(inputs, output.detach(), dict(zip(leaves, gradients, strict=True)))


def _layer_difference(binding: Binding, probe: Any, cls: Any, expected: _Step) -> str | None:
    try:
        ours = _step(functools.partial(run, binding, probe), probe, expected.inputs)
        found = _largest(ours.output, expected.output)
        if found is None and not probe._modules and binding.layer.method == "forward":
            found = _rounding(binding, probe, cls, expected.inputs[0].shape[-1])
    except AttributeError as missing:
        return f"it is laid out differently: {missing}"
    except Exception as failure:
        return f"the kernel does not run on it ({_first_line(failure)})"
    return found or _gradient_difference(ours, expected)


def _gradient_difference(ours: _Step, expected: _Step) -> str | None:
    for name, of_stock in expected.gradients.items():
        pair = ours.gradients[name], of_stock
        # A parameter's rows may be zero but for rounding.
        found = _largest(*(pair if name.startswith("input ") else (g.flatten() for g in pair)))
        if found is not None:
            return f"gradient of {name}: {found}"
    return None


def _cast(probe: Any, dtype: torch.dtype) -> Any:
    cast = object.__new__(type(probe))  # FSDP's classes cannot be copied
    vars(cast).update(vars(probe))
    for kind in ("_parameters", "_buffers"):
        vars(cast)[kind] = {name: None if x is None else x.to(dtype) for name, x in vars(probe)[kind].items()}
    return cast


def _rounding(binding: Binding, probe: Any, cls: Any, width: int) -> str | None:
    inputs = [_random(64, width, seed=i).bfloat16() for i in range(binding.layer.inputs)]
    for dtype in (torch.float32, torch.bfloat16):
        probe = _cast(probe, dtype)
        try:
            expected = getattr(cls, binding.layer.method)(probe, *inputs)
        except RuntimeError:  # no mixed dtypes
            continue
        ours = run(binding, probe, *inputs)
        if ours.dtype != expected.dtype:
            return f"for bfloat16 and a {dtype} weight it returns {expected.dtype}, the kernel {ours.dtype}"
        changed = (ours != expected).float().mean().item()
        if changed > _MOST_ROUNDED:
            return (
                f"in bfloat16 {changed:.0%} of the values are rounded differently: compute in the same dtype, and "
                "round at the same place"
            )
    return None
