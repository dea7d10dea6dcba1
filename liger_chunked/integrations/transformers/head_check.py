"""What a model does between its backbone and its logits, found by running its own forward on stand-ins.

A fused loss computes `transform(lm_head(last_hidden_state))`. A config does not say whether the logits of a model are
that: some multimodal models ignore the softcap or the scale of their text config, and others have a prediction head
before `lm_head`. So the forward of the model's class runs on a copy of the model in which

- the backbone returns known hidden states and records its arguments,
- `lm_head` records its input and returns known logits,
- every other module with parameters refuses to run.

The copy keeps the config and the attributes of the model, and reads none of its parameters. So the check works for
sharded, offloaded, quantized and meta-device models, and takes milliseconds for any size.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from liger_chunked.types import LogitOptions

_LENGTH, _MASKED = 6, 4  # positions of the probe, and the first one that its attention mask leaves out
_KEPT = 2  # positions that `logits_to_keep` keeps in the probe
_NUM_ITEMS = 7

# Arguments of a backbone that do not change its hidden states, or that belong to one call rather than to the model.
_FREE = {
    "use_cache",
    "return_dict",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "logits_to_keep",
    "past_key_values",
    "cache_position",
}


@dataclass(frozen=True)
class HeadFacts:
    """What `check_head` found out about a model.

    - `options`: the transform of its logits
    - `constants`: arguments that its forward hands to the backbone although the call did not name them
    - `dropped`: arguments that its forward takes and does not hand to the backbone
    - `backbone_takes_labels`: its forward hands the labels to the backbone
    """

    options: LogitOptions
    constants: tuple[tuple[str, Any], ...] = ()
    dropped: tuple[str, ...] = ()
    backbone_takes_labels: bool = False


class _Difference(Exception):
    """How a model differs from `transform(lm_head(last_hidden_state))`."""


class _Part(Exception):
    """The forward reads a module of the backbone by this name."""


class _Probe(NamedTuple):
    """What the stand-ins return: `hidden_states` (1, T, H) and `logits` (1, T, V)."""

    hidden_states: Tensor
    logits: Tensor


class _Observed(NamedTuple):
    """One run of a forward on stand-ins.

    - `reached`: the input of `lm_head`
    - `output`: what the forward returned
    - `given`: the arguments of the forward
    - `handed`: the arguments that the core got from the forward
    - `ours`: the arguments that the core gets when the backbone is called with `given`; None where the core is the
      backbone
    """

    reached: Tensor
    output: Any
    given: dict[str, Any]
    handed: dict[str, Any]
    ours: dict[str, Any] | None


class Subject(NamedTuple):
    """What is checked.

    - `forward`: the function that makes logits of `model`, usually that of its class
    - `backbone`: a fused loss multiplies its `last_hidden_state` by the head
    - `projection`: of `lm_head`; only its sizes are read, and whether it has a bias
    """

    model: PreTrainedModel
    forward: Callable[..., Any]
    backbone: nn.Module
    projection: nn.Linear


def check_head(subject: Subject) -> HeadFacts:
    """Find the transform of a model's logits.

    Raises:
        ValueError: the logits are not `transform(lm_head(last_hidden_state))`. The message says how they differ.
    """
    return _told(subject, _find_facts)


def check_loss(subject: Subject) -> None:
    """Compare the loss of the model's own forward with the causal loss on its logits.

    Raises:
        ValueError: they differ.
    """
    _told(subject, _compare_losses)


def _told(subject: Subject, check: Callable[[Subject], Any]) -> Any:
    name = subject.forward.__qualname__
    advice = "Train it with its own forward, which builds logits (apply_liger_kernel: fused_linear_cross_entropy=False)"
    try:
        with torch.no_grad(), torch.device("cpu"), torch.autocast("cpu", enabled=False), torch.random.fork_rng([]):
            return check(subject)
    except _Difference as difference:
        raise ValueError(f"a fused loss cannot stand in for {name}: {difference}. {advice}") from None
    except Exception as error:  # somebody else's forward may raise anything
        raise ValueError(
            f"a fused loss cannot stand in for {name}: the forward could not be followed from the backbone to "
            f"the logits ({type(error).__name__}: {error}). {advice}"
        ) from error


def _find_facts(subject: Subject) -> HeadFacts:
    probe, numbers = _probe(subject.projection, wide=True), _numbers(subject.model)
    observed = _observe(subject, probe)
    factor = _factor(observed.reached, probe.hidden_states, numbers)
    if factor != 1 and subject.projection.bias is not None:
        raise _Difference(
            f"what reaches lm_head is {factor:.7g} times the backbone's last hidden state, and lm_head has a bias"
        )
    options = _transform(probe.logits, _logits_of(observed.output), numbers, factor)
    if "logits_to_keep" in _parameters(subject.forward):
        kept = _observe(subject, probe, logits_to_keep=_KEPT)
        _factor(kept.reached, probe.hidden_states[:, -_KEPT:], numbers)
    labelled = _observe(subject, probe, loss_function=_no_loss, labels=observed.given["input_ids"].clone())
    return _handed_over(labelled, options)


def _probe(projection: nn.Linear, *, wide: bool) -> _Probe:
    """`wide` logits reach from the slope of a softcap at zero to its limit."""
    generator = torch.Generator("cpu").manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")

    logits = randn(1, _LENGTH, projection.out_features)
    if wide:
        logits *= torch.logspace(-2, 6, _LENGTH, dtype=torch.float32, device="cpu")[:, None]
    return _Probe(randn(1, _LENGTH, projection.in_features), logits)


# Stand-ins.


class _Output(BaseModelOutputWithPast):
    """The output of a backbone that has nothing but hidden states."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


class _Core(nn.Module):
    """In place of the backbone, or of the part of it that the forward calls."""

    def __init__(self, real: nn.Module, hidden_states: Tensor) -> None:
        super().__init__()
        self.real = (real,)  # in a tuple: not a submodule
        self.hidden_states = hidden_states
        self.calls: list[dict[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.__dict__["real"][0], name)
        if callable(value) or isinstance(value, Tensor):
            raise _Part(name)
        return value

    def forward(self, *args: Any, **kwargs: Any) -> _Output:
        names = _parameters(type(self.real[0]).forward)
        self.calls.append(dict(zip(names, args, strict=False)) | kwargs)
        return _Output(last_hidden_state=self.hidden_states)


class _Head(nn.Module):
    """In place of `lm_head`."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        # Some forwards read its dtype and device. It has no rows, so a product with it is an error.
        self.weight = nn.Parameter(torch.empty(0, dtype=torch.float32, device="cpu"), requires_grad=False)
        self.logits = logits
        self.inputs: list[Tensor] = []

    def forward(self, hidden_states: Tensor) -> Tensor:
        self.inputs.append(hidden_states)
        return self.logits[:, -hidden_states.shape[1] :].clone()


class _Between(nn.Module):
    """In place of any other module with parameters."""

    def __init__(self, name: str, real: nn.Module) -> None:
        super().__init__()
        self.described = f"{name} ({type(real).__name__})"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise _Difference(f"it runs {self.described} beside its backbone and its lm_head")


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OVERRIDES = ("forward", "_old_forward", "_hf_hook", "_compiled_call_impl")


def _copy(module: nn.Module, name: str, stand_ins: dict[nn.Module, nn.Module], inner: set[nn.Module]) -> nn.Module:
    """The module without its hooks, its submodules replaced by stand-ins, its tensors by random ones.

    Args:
        stand_ins: by the module that each replaces; grows.
        inner: modules that are copied although they have parameters, as they contain the core or `lm_head`.
    """
    if module in stand_ins:
        return stand_ins[module]
    if module not in inner and (any(True for _ in module.parameters()) or any(True for _ in module.buffers())):
        stand_ins[module] = _Between(name, module)
        return stand_ins[module]
    copy = object.__new__(type(module))
    stand_ins[module] = copy
    state = {key: value for key, value in vars(module).items() if key not in _OVERRIDES}
    state |= {key: type(state[key])() for key in _HOOKS if key in state}
    state["_modules"] = {
        key: child if child is None else _copy(child, f"{name}.{key}" if name else key, stand_ins, inner)
        for key, child in module._modules.items()
    }
    for kind in ("_parameters", "_buffers"):
        state[kind] = {key: x if x is None else _random_like(x) for key, x in state[kind].items()}
    # A dropout must show; the model itself must not take the way of training, which may be fused already.
    state["training"] = module not in inner
    vars(copy).update(state)
    return copy


def _random_like(x: Tensor) -> Tensor:
    if x.is_floating_point():
        return torch.randn(x.shape, dtype=torch.float32, device="cpu")
    return torch.zeros(x.shape, dtype=x.dtype, device="cpu")


def _containing(module: nn.Module, target: nn.Module) -> set[nn.Module]:
    """`module` and those of its submodules in which `target` lies."""
    # No recursive closure, which would keep the model alive until Python collects garbage.
    children = [child for child in module._modules.values() if child is not None]
    found = set().union(*(_containing(child, target) for child in children))
    return found | {module} if found or module is target else found


def _no_loss(*args: Any, **kwargs: Any) -> Tensor:
    return torch.zeros((), device="cpu")


def _observe(
    subject: Subject, probe: _Probe, *, loss_function: Callable[..., Tensor] | None = None, **arguments: Any
) -> _Observed:
    """Run the forward on stand-ins.

    Some forwards call a part of the backbone, such as its `decoder`. Then that part is the core, and what the backbone
    itself hands to it is compared with what the forward does.
    """
    core, used = subject.backbone, ""
    while True:
        try:
            return _run(subject, core, probe, loss_function, arguments)
        except _Part as part:
            used = str(part)
            core = getattr(core, used)
            if not isinstance(core, nn.Module) or core is subject.model.get_output_embeddings():
                raise _Difference(f"it uses {used!r} of its backbone") from None
        except _Difference:
            raise
        except Exception as error:
            if not used:
                raise
            raise _Difference(f"it uses {used!r} of its backbone") from error


def _run(
    subject: Subject,
    core: nn.Module,
    probe: _Probe,
    loss_function: Callable[..., Tensor] | None,
    arguments: dict[str, Any],
) -> _Observed:
    model, forward = subject.model, subject.forward
    real_head = model.get_output_embeddings()
    stand_in, head = _Core(core, probe.hidden_states), _Head(probe.logits)
    stand_ins: dict[nn.Module, nn.Module] = {core: stand_in, real_head: head}
    copy = _copy(model, "", stand_ins, {model} | _containing(model, real_head) | _containing(model, core))
    if loss_function is not None:
        vars(copy)["_loss_function"] = loss_function
    given = _arguments(forward, probe) | arguments
    output = forward(copy, **given, **_if_taken(forward, return_dict=True, output_router_logits=False))
    if len(stand_in.calls) != 1:
        raise _Difference(f"it calls its backbone {len(stand_in.calls)} times, not once")
    if len(head.inputs) != 1:
        raise _Difference(f"it calls lm_head {len(head.inputs)} times, not once")
    ours = None
    if core is not subject.backbone:
        own = {name: x for name, x in given.items() if name not in ("labels", "logits_to_keep", "num_items_in_batch")}
        result = stand_ins[subject.backbone](**own, use_cache=False, return_dict=True)
        if len(stand_in.calls) != 2 or not _same(result.last_hidden_state, probe.hidden_states):
            raise _Difference(
                f"its backbone {type(subject.backbone).__name__} changes the hidden states that reach lm_head"
            )
        ours = stand_in.calls[1]
    return _Observed(head.inputs[0], output, given, stand_in.calls[0], ours)


def _parameters(function: Callable[..., Any]) -> list[str]:
    _, *names = inspect.signature(function).parameters
    return names


def _if_taken(function: Callable[..., Any], **arguments: Any) -> dict[str, Any]:
    """Those arguments that a function takes by name, or in its **kwargs."""
    parameters = inspect.signature(function).parameters
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return {name: x for name, x in arguments.items() if open_ended or name in parameters}


def _arguments(forward: Callable[..., Any], probe: _Probe) -> dict[str, Any]:
    """Token ids, and what else the forward names of a mask and positions."""
    vocab_size = probe.logits.shape[-1]
    generator = torch.Generator("cpu").manual_seed(1)
    mask = torch.ones(1, _LENGTH, dtype=torch.long, device="cpu")
    mask[:, _MASKED:] = 0
    optional = {"attention_mask": mask, "position_ids": torch.arange(_LENGTH, device="cpu")[None] + 1}
    names = _parameters(forward)
    return {
        "input_ids": torch.randint(vocab_size, (1, _LENGTH), generator=generator, device="cpu"),
        **{name: x for name, x in optional.items() if name in names},
    }


# What the runs say.


def _logits_of(output: Any) -> Tensor:
    logits = output.logits if hasattr(output, "logits") else output[0]
    if not isinstance(logits, Tensor):
        raise _Difference(f"it returns logits of the type {type(logits).__name__}")
    return logits.float()


def _numbers(model: PreTrainedModel) -> list[float]:
    """The numbers of the config, and their reciprocals: measured scales and softcaps are one of these, exactly."""
    configs = (model.config, model.config.get_text_config())
    values = [x for config in configs for x in vars(config).values() if isinstance(x, (int, float))]
    numbers = [float(x) for x in values if not isinstance(x, bool) and math.isfinite(x) and x != 0]
    return [1.0, *numbers, *(1 / x for x in numbers)]


def _exact(measured: float, numbers: list[float]) -> float:
    return next((x for x in numbers if math.isclose(x, measured, rel_tol=2e-6)), measured)


def _same(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and torch.allclose(x, y, rtol=1e-5, atol=0)


def _factor(reached: Tensor, hidden_states: Tensor, numbers: list[float]) -> float:
    """By which the backbone's last hidden state is multiplied before `lm_head`."""
    if reached.shape != hidden_states.shape:
        raise _Difference(
            f"what reaches lm_head has the shape {tuple(reached.shape)}, and the backbone's last hidden state "
            f"{tuple(hidden_states.shape)}"
        )
    factor = _exact((reached / hidden_states).median().item(), numbers)
    if not _same(reached, factor * hidden_states):
        raise _Difference(
            "what reaches lm_head is not the backbone's last hidden state: the largest difference is "
            f"{(reached - hidden_states).abs().max():.3g}, of values up to {hidden_states.abs().max():.3g}"
        )
    return factor


def _transform(raw: Tensor, logits: Tensor, numbers: list[float], factor: float) -> LogitOptions:
    """The options that make `logits` of `raw`; `factor` is that of the hidden states."""
    if logits.shape != raw.shape:
        raise _Difference(
            f"lm_head returns logits of the shape {tuple(raw.shape)}, and the model {tuple(logits.shape)}"
        )
    scale = _exact((logits / raw)[:, 0].median().item(), numbers)
    if _same(logits, scale * raw):
        return LogitOptions(logit_scale=scale * factor)
    softcap = _exact(logits.abs().max().item(), numbers)
    capped = softcap * torch.tanh(scale * raw / softcap) if softcap else raw
    if softcap and math.isfinite(softcap) and torch.allclose(logits, capped, rtol=1e-5, atol=1e-6 * softcap):
        return LogitOptions(softcap=softcap, logit_scale=scale * factor)
    moderate = raw.abs() < 100
    raise _Difference(
        "its logits are no scale and softcap of what lm_head returns: for values between -100 and 100 the largest "
        f"difference is {(logits - raw)[moderate].abs().max():.3g}"
    )


def _handed_over(observed: _Observed, options: LogitOptions) -> HeadFacts:
    """What the forward hands to its backbone, beside what it was given."""
    ours = observed.ours or {name: x for name, x in observed.given.items() if name != "labels"}
    constants: dict[str, Any] = {}
    dropped: list[str] = []
    takes_labels = False
    for name in (ours.keys() | observed.handed.keys()) - _FREE:
        own, theirs = ours.get(name), observed.handed.get(name)
        if _equal(own, theirs):
            continue
        if name == "labels" and theirs is observed.given.get("labels"):
            takes_labels = True
        elif observed.ours is None and theirs is None and name != "input_ids":
            dropped.append(name)
        elif observed.ours is None and own is None and _is_constant(theirs):
            constants[name] = theirs
        else:
            raise _Difference(f"it hands another {name} to its backbone than it was called with")
    return HeadFacts(options, tuple(constants.items()), tuple(dropped), takes_labels)


def _equal(own: Any, theirs: Any) -> bool:
    if own is theirs:
        return True
    if isinstance(own, Tensor) and isinstance(theirs, Tensor):
        return own.dtype == theirs.dtype and torch.equal(own, theirs)
    return not isinstance(own, Tensor) and not isinstance(theirs, Tensor) and (own or None) == (theirs or None)


def _is_constant(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_constant, value))
    return isinstance(value, (bool, int, float, str))


def _compare_losses(subject: Subject) -> None:
    probe = _probe(subject.projection, wide=False)
    labels = _arguments(subject.forward, probe)["input_ids"].clone()
    labels[:, 1] = -100
    counted = _if_taken(subject.forward, num_items_in_batch=torch.tensor(_NUM_ITEMS))
    for arguments in ({}, counted):
        observed = _observe(subject, probe, labels=labels, **arguments)
        logits, target = _logits_of(observed.output), labels[0, 1:]
        total = F.cross_entropy(logits[0, :-1], target, ignore_index=-100, reduction="sum")
        expected = total / (_NUM_ITEMS if arguments else (target != -100).sum())
        loss = observed.output.loss
        if not isinstance(loss, Tensor) or not torch.allclose(loss.float(), expected, rtol=1e-4, atol=0):
            got = f"{loss:.6g}" if isinstance(loss, Tensor) and loss.ndim == 0 else f"a {type(loss).__name__}"
            raise _Difference(
                f"its loss, called with {' and '.join(['labels', *arguments])}, is {got} where the mean negative "
                f"log-likelihood of the next tokens is {expected:.6g}"
            )
