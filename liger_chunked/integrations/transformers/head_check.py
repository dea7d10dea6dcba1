"""What a model computes between its backbone and its logits, which its config does not say.

`check_head` runs a copy, in both modes. Backbone and `lm_head` return known values; using other modules with
parameters, or any tensor, raises.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils import ModelOutput

from liger_chunked.integrations.transformers.balance import balance_of
from liger_chunked.integrations.transformers.detect import (
    FORWARD_SLOTS,
    HOOKS,
    TRIAL,
    backbone_of,
    nested_of,
    parsed,
    projections,
)
from liger_chunked.types import LogitOptions

_BATCHES = {False: (1, 6), True: (2, 3)}  # samples and positions, by mode
_KEPT = 2  # positions, by `logits_to_keep`
_NUM_ITEMS = 7

# Arguments that do not change hidden states.
_FREE = {
    "use_cache", "return_dict", "output_attentions", "output_hidden_states", "output_router_logits", "logits_to_keep",
    "past_key_values", "cache_position",
}  # fmt: skip


_OF_HEAD = ("labels", "shift_labels", "logits_to_keep", "num_items_in_batch", "ignore_index")


@dataclass(frozen=True)
class HeadFacts:
    options: LogitOptions
    output: type
    of_forward: tuple[str, ...] = ()  # only the forward takes these
    constants: tuple[tuple[str, Any], ...] = ()  # the forward adds these
    dropped: tuple[str, ...] = ()
    backbone_takes_labels: bool = False
    nested: bool = False  # the head is in a causal model inside this one
    foreign: bool = False  # the forward is not that of transformers


def check_head(model: PreTrainedModel, forward: Callable[..., Any]) -> HeadFacts:
    evaluating, training = _trials(model, forward)
    with _explained(evaluating):
        facts = _facts(evaluating)
    with _explained(training):
        before, now = ({**vars(x), **vars(x.options)} for x in (facts, _facts(training)))
        for name in before.keys() - {"options"}:
            if not _equal_fact(before[name], now[name]):
                raise _Difference(f"its {name} is {now[name]}, and {before[name]} for another batch in evaluation mode")
    return facts


def _equal_fact(x: Any, y: Any) -> bool:
    return x == y or (isinstance(x, float) and isinstance(y, float) and math.isclose(x, y, rel_tol=2e-5))


def _facts(trial: _Trial) -> HeadFacts:
    # Small logits show the scale, large ones the softcap.
    trial.prepare(torch.logspace(-3, 6, math.prod(trial.batch), dtype=torch.float32))
    observed = trial.observe()
    factor = trial.factor(observed.reached, trial.hidden_states)
    if factor != 1 and trial.projection.has_bias:
        raise _Difference(
            f"what reaches lm_head is {factor:.7g} times the backbone's last hidden state, and lm_head has a bias"
        )
    options = trial.transform(_logits_of(observed.output), factor)
    if trial.nested and options != LogitOptions():
        raise _Difference(f"the causal model inside it transforms the logits: {options}")
    if "logits_to_keep" in _parameters(trial.forward):
        kept = trial.observe(logits_to_keep=_KEPT)
        trial.factor(kept.reached, trial.hidden_states[:, -_KEPT:])
    observed = trial.observe(lambda *args, **kwargs: torch.zeros(()), labels=trial.labels())
    read = _read_for_loss(trial.forward) if trial.nested else None
    taken = {*observed.passed, *_parameters(type(trial.backbone).forward), *_OF_HEAD, *_FREE}
    own = inspect.signature(trial.forward).parameters.values()
    names = [p.name for p in [*own][1:] if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    of_forward = tuple(name for name in names if name not in taken and (read is None or name in read))
    foreign = not trial.forward.__module__.startswith("transformers.")
    return replace(_passed_on(observed, options, of_forward), nested=trial.nested, foreign=foreign)


def _read_for_loss(forward: Callable[..., Any]) -> set[str] | None:
    """Return the names read under `if labels`, or None without source."""
    try:
        nodes = list(ast.walk(parsed(inspect.unwrap(forward))))
    except (OSError, TypeError):
        return None
    blocks = [n for n in nodes if isinstance(n, ast.If) and "labels" in ast.unparse(n.test)]
    return {n.id for block in blocks for n in ast.walk(block) if isinstance(n, ast.Name)}


def check_loss(model: PreTrainedModel, forward: Callable[..., Any]) -> None:
    """Raise ValueError unless `forward` computes the causal loss of its logits."""
    for trial in _trials(model, forward):
        with _explained(trial):
            trial.prepare()
            labels = trial.loss_labels()
            for arguments in ({}, _if_taken(forward, num_items_in_batch=torch.tensor(_NUM_ITEMS))):
                output = trial.observe(labels=labels, **arguments).output
                logits, target = _logits_of(output)[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
                total = F.cross_entropy(logits, target, ignore_index=-100, reduction="sum")
                expected = total / (_NUM_ITEMS if arguments else (target != -100).sum())
                loss = output.loss
                if not isinstance(loss, Tensor) or not torch.allclose(loss.float(), expected, rtol=1e-4, atol=0):
                    got = f"{loss:.6g}" if isinstance(loss, Tensor) and loss.ndim == 0 else f"a {type(loss).__name__}"
                    called = " and ".join(["labels", *arguments])
                    raise _Difference(
                        f"its loss, called with {called}, is {got} where the mean negative log-likelihood of the next "
                        f"tokens is {expected:.6g}"
                    )
                if not _same_gradient(loss, expected, trial.logits):
                    raise _Difference("the gradient of its loss is not that of its value")


class _Difference(Exception):
    """The model differs from `transform(lm_head(last_hidden_state))`."""


class _Part(Exception):
    """The forward reads this part of the backbone."""


def _trials(model: PreTrainedModel, forward: Callable[..., Any]) -> list[_Trial]:
    return [_Trial(model, forward, training) for training in _BATCHES]


@contextlib.contextmanager
def _explained(trial: _Trial) -> Iterator[None]:
    """Compute on the CPU; turn errors into a ValueError."""
    name = trial.forward.__qualname__
    advice = "Train it with its own forward, which builds logits (apply_liger_kernel: fused_linear_cross_entropy=False)"
    try:
        with (
            torch.inference_mode(False),
            torch.set_grad_enabled(trial.training),
            torch.device("cpu"),
            torch.autocast("cpu", enabled=False),
            torch.random.fork_rng([]),
        ):
            yield
    except Exception as error:
        known = isinstance(error, _Difference)
        lost = "the forward could not be followed from the backbone to the logits"
        reason = str(error) if known else f"{lost} ({type(error).__name__}: {error})"
        mode = "in training mode, " if trial.training else ""
        raise ValueError(f"a fused loss cannot stand in for {name}: {mode}{reason}. {advice}") from (
            None if known else error
        )


class _Observed(NamedTuple):
    reached: Tensor  # the input of lm_head
    output: Any
    given: dict[str, Any]  # arguments
    passed: dict[str, Any]  # arguments of the backbone, or the part of it that the forward calls
    expected: dict[str, Any] | None  # the same, for the whole backbone


class _Trial:
    def __init__(self, model: PreTrainedModel, forward: Callable[..., Any], training: bool) -> None:
        self.model, self.forward, self.training = model, forward, training
        self.batch = _BATCHES[training]
        nested = nested_of(model)
        self.backbone, self.projection = backbone_of(nested or model), projections(model)[0]
        self.nested = nested is not None
        self.configs = (model.config, model.config.get_text_config())
        self.inner: dict[nn.Module, set[nn.Module]] = {}

    def prepare(self, scales: Tensor | None = None) -> None:
        generator = torch.Generator().manual_seed(int(self.training))
        sizes = (self.projection.linear.out_features, self.projection.linear.in_features)
        made = [torch.randn(*self.batch, size, generator=generator, dtype=torch.float32) for size in sizes]
        if scales is not None:
            made[0] *= scales.view(*self.batch, 1)
        self.logits, self.hidden_states = (x.requires_grad_() for x in made)
        # Usually in the config, maybe as its reciprocal.
        values = [x for config in self.configs for x in vars(config).values() if isinstance(x, (int, float))]
        numbers = [float(x) for x in values if not isinstance(x, bool) and math.isfinite(x) and x != 0]
        self.numbers = [1.0, *numbers, *(1 / x for x in numbers)]

    def observe(self, loss_function: Callable[..., Tensor] | None = None, **arguments: Any) -> _Observed:
        core, used = self.backbone, ""
        while True:
            try:
                return self._run(core, loss_function, arguments)
            except _Part as part:
                used = str(part)
                core = getattr(core, used)
                if not isinstance(core, nn.Module) or core is self.model.get_output_embeddings():
                    raise _Difference(f"it uses {used!r} of its backbone") from None
            except Exception as error:
                if isinstance(error, _Difference) or not used:
                    raise
                raise _Difference(f"it uses {used!r} of its backbone") from error

    def _run(self, core: nn.Module, loss_function: Callable[..., Tensor] | None, arguments: Any) -> _Observed:
        model, forward = self.model, self.forward
        real_head = model.get_output_embeddings()
        stand_in = _Core(core, self.hidden_states)
        head = _Head(self.logits, _Unread(self.projection.linear.weight, "the weight of lm_head"))
        stand_ins: dict[nn.Module, nn.Module] = {core: stand_in, real_head: head}
        if core not in self.inner:
            self.inner[core] = {model} | _containing(model, real_head) | _containing(model, core)
        copy = _copy(model, "", stand_ins, self.inner[core], self.training)
        if loss_function is not None:
            vars(copy)["_loss_function"] = loss_function
        given = self.arguments() | arguments
        # An unknown loss of router logits raises.
        router_logits = balance_of(model) is None
        output = forward(copy, **given, **_if_taken(forward, return_dict=True, output_router_logits=router_logits))
        _check_attributes(stand_ins)
        for part, calls in (("its backbone", stand_in.calls), ("lm_head", head.inputs)):
            if len(calls) != 1:
                raise _Difference(f"it calls {part} {len(calls)} times, not once")
        expected = None
        if core is not self.backbone:
            own = {name: x for name, x in given.items() if name not in _OF_HEAD}
            result = stand_ins[self.backbone](**own, use_cache=False, return_dict=True)
            if len(stand_in.calls) != 2 or not _same(result.last_hidden_state, self.hidden_states):
                raise _Difference(
                    f"its backbone {type(self.backbone).__name__} changes the hidden states that reach lm_head"
                )
            expected = stand_in.calls[1]
        return _Observed(head.inputs[0], output, given, stand_in.calls[0], expected)

    def arguments(self) -> dict[str, Any]:
        positions = torch.arange(self.batch[1]).expand(self.batch)
        mask = torch.ones(self.batch, dtype=torch.long)
        mask[-1, _KEPT:] = 0
        optional = {"attention_mask": mask, "position_ids": positions + 1}
        names = _parameters(self.forward)
        tokens = {"inputs_embeds": self.hidden_states + 1} if self.nested else {"input_ids": self.labels()}
        return {**tokens, **{name: x for name, x in optional.items() if name in names}}

    def labels(self) -> Tensor:
        generator = torch.Generator().manual_seed(1 + self.training)
        return torch.randint(self.logits.shape[-1], self.batch, generator=generator)

    def loss_labels(self) -> Tensor:
        """Return labels with special tokens, which a forward may ignore."""
        labels = self.labels()
        labels[:, 1] = -100
        named = [(name, x) for config in self.configs for name, x in vars(config).items() if type(x) is int]
        special = sorted({x for name, x in named if name.endswith(("token_id", "token_index"))})
        last = labels[:, 2:].clone().view(-1)
        special = [x for x in special if 0 <= x < self.logits.shape[-1]]
        special = special[-len(last) :] if self.training else special[: len(last)]
        last[: len(special)] = torch.tensor(special, dtype=torch.long)
        labels[:, 2:] = last.view_as(labels[:, 2:])
        return labels

    def _exact(self, measured: Tensor) -> float:
        value = measured.item()
        return next((x for x in self.numbers if math.isclose(x, value, rel_tol=2e-6)), value)

    def factor(self, reached: Tensor, hidden_states: Tensor) -> float:
        if reached.shape != hidden_states.shape:
            raise _Difference(
                f"what reaches lm_head has the shape {tuple(reached.shape)}, and the backbone's last hidden state "
                f"{tuple(hidden_states.shape)}"
            )
        factor = self._exact((reached / hidden_states).median())
        expected = factor * hidden_states
        if not _same(reached, expected):
            raise _Difference(
                "what reaches lm_head is not the backbone's last hidden state: the largest difference is "
                f"{(reached - hidden_states).abs().max():.3g}, of values up to {hidden_states.abs().max():.3g}"
            )
        if not _same_gradient(reached, expected, self.hidden_states):
            raise _Difference("the gradient of the backbone's last hidden state is not that of what reaches lm_head")
        return factor

    def transform(self, logits: Tensor, factor: float) -> LogitOptions:
        raw = self.logits
        if logits.shape != raw.shape:
            shapes = f"{tuple(raw.shape)}, and the model {tuple(logits.shape)}"
            raise _Difference(f"lm_head returns logits of the shape {shapes}")
        scale = self._exact((logits / raw)[0, 0].median())
        softcap = self._exact(logits.abs().max())
        scaled = scale * raw
        capped = softcap * torch.tanh(scaled / softcap) if softcap else scaled
        if _same(logits, scaled):
            expected, options = scaled, LogitOptions(logit_scale=scale * factor)
        elif math.isfinite(softcap) and torch.allclose(logits, capped, rtol=1e-5, atol=1e-6 * softcap):
            expected, options = capped, LogitOptions(softcap=softcap, logit_scale=scale * factor)
        else:
            moderate = raw.abs() < 100
            raise _Difference(
                "its logits are not a scale and softcap of the output of lm_head: for values between -100 and 100 the "
                f"largest difference is {(logits - raw)[moderate].abs().max():.3g}"
            )
        if not _same_gradient(logits, expected, raw):
            raise _Difference("the gradient of its logits is not that of a scale and softcap of the output of lm_head")
        return options


class _Output(BaseModelOutputWithPast):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Unread(torch.empty(0), f"{name!r} of its backbone's output")


class _Core(nn.Module):
    def __init__(self, real: nn.Module, hidden_states: Tensor) -> None:
        super().__init__()
        self.real = (real,)  # not a submodule
        self.hidden_states = hidden_states
        self.calls: list[dict[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.__dict__["real"][0], name)
        if callable(value) or isinstance(value, Tensor):
            raise _Part(name)
        return value

    def forward(self, *args: Any, **kwargs: Any) -> _Output:
        self.calls.append(dict(zip(_parameters(type(self.real[0]).forward), args, strict=False)) | kwargs)
        return _Output(last_hidden_state=self.hidden_states.clone())


class _Head(nn.Module):
    def __init__(self, logits: Tensor, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight
        self.logits = logits
        self.inputs: list[Tensor] = []

    def forward(self, hidden_states: Tensor) -> Tensor:
        self.inputs.append(hidden_states)
        return self.logits[:, -hidden_states.shape[1] :].clone()


class _Between(nn.Module):
    def __init__(self, name: str, real: nn.Module) -> None:
        super().__init__()
        self.described = f"{name} ({type(real).__name__})"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise _Difference(f"it runs {self.described} in addition to its backbone and its lm_head")


_OVERRIDES = (*FORWARD_SLOTS, "_hf_hook", "_compiled_call_impl")


def _copy(
    module: nn.Module, name: str, stand_ins: dict[nn.Module, nn.Module], inner: set[nn.Module], training: bool
) -> nn.Module:
    """Copy a module without hooks, with stand-ins for tensors, and for all submodules but `inner`."""
    if module in stand_ins:
        return stand_ins[module]
    if module not in inner and (any(True for _ in module.parameters()) or any(True for _ in module.buffers())):
        stand_ins[module] = _Between(name, module)
        return stand_ins[module]
    copy = stand_ins[module] = object.__new__(type(module))
    prefix = f"{name}." if name else ""
    state = {key: value for key, value in vars(module).items() if key not in _OVERRIDES}
    state |= {key: type(state[key])() for key in HOOKS if key in state}
    state["_modules"] = {
        key: child if child is None else _copy(child, prefix + key, stand_ins, inner, training)
        for key, child in module._modules.items()
    }
    for kind, word in (("_parameters", "parameter"), ("_buffers", "buffer")):
        state[kind] = {
            key: x if x is None else _Unread(x, f"its {word} {prefix + key!r}") for key, x in state[kind].items()
        }
    for key, x in state.items():
        if isinstance(x, Tensor):
            state[key] = _Unread(x, f"its tensor {prefix + key!r}")
    vars(copy).update(state, training=training)
    vars(copy)[TRIAL] = True
    return copy


class _Unread(Tensor):
    """A tensor that raises where it is read."""

    described: str

    @staticmethod
    def __new__(cls, real: Tensor, described: str) -> _Unread:
        dtype = torch.float32 if real.is_floating_point() else real.dtype
        made: _Unread = Tensor._make_wrapper_subclass(cls, real.shape, dtype=dtype, device=torch.device("cpu"))
        made.described = described
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        described = next(x.described for x in tree_leaves((args, kwargs)) if isinstance(x, _Unread))
        raise _Difference(f"it computes with {described}, and a fused head takes numbers, not tensors that may change")


def _check_attributes(stand_ins: dict[nn.Module, nn.Module]) -> None:
    for module, copy in stand_ins.items():
        for name, x in vars(copy).items() if TRIAL in vars(copy) else ():
            before = vars(module).get(name, x)
            if type(x) in (int, float) and x is not before and x != before:
                raise _Difference(f"it sets its attribute {name!r} in each call")


def _containing(module: nn.Module, target: nn.Module) -> set[nn.Module]:
    found = set().union(*(_containing(child, target) for child in module.children()))
    return found | {module} if found or module is target else found


def _parameters(function: Callable[..., Any]) -> list[str]:
    _, *names = inspect.signature(function).parameters
    return names


def _if_taken(function: Callable[..., Any], **arguments: Any) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return {name: x for name, x in arguments.items() if open_ended or name in parameters}


def _logits_of(output: Any) -> Tensor:
    logits = output.logits if hasattr(output, "logits") else output[0]
    if not isinstance(logits, Tensor):
        raise _Difference(f"it returns logits of the type {type(logits).__name__}")
    return logits.float()


def _same(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and torch.allclose(x, y, rtol=1e-5, atol=0)


def _same_gradient(x: Tensor, y: Tensor, of: Tensor) -> bool:
    if not y.requires_grad:  # in evaluation mode
        return True
    if not x.requires_grad:
        return False
    upstream = torch.randn(x.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float32)
    options: dict[str, Any] = {"retain_graph": True, "allow_unused": True}
    found, expected = (torch.autograd.grad(z, of, upstream.to(z.dtype), **options)[0] for z in (x, y))
    return found is not None and torch.allclose(found, expected, rtol=1e-4, atol=1e-6)


def _passed_on(observed: _Observed, options: LogitOptions, of_forward: tuple[str, ...]) -> HeadFacts:
    whole = observed.expected is None
    ours = observed.expected or {name: x for name, x in observed.given.items() if name != "labels"}
    constants: dict[str, Any] = {}
    dropped: list[str] = []
    takes_labels = False
    for name in sorted((ours.keys() | observed.passed.keys()) - _FREE):
        own, theirs = ours.get(name), observed.passed.get(name)
        if _equal(own, theirs):
            continue
        if name == "labels" and theirs is observed.given.get("labels"):
            takes_labels = True
        elif whole and theirs is None and name != "input_ids":
            dropped.append(name)
        elif whole and own is None and _is_constant(theirs):
            constants[name] = theirs
        else:
            raise _Difference(f"it passes another {name} to its backbone than it was called with")
    output = type(observed.output)
    if not issubclass(output, ModelOutput):
        raise _Difference(f"it returns a {output.__name__}, not a ModelOutput")
    return HeadFacts(options, output, of_forward, tuple(constants.items()), tuple(dropped), takes_labels)


def _equal(own: Any, theirs: Any) -> bool:
    if own is theirs:
        return True
    if isinstance(own, Tensor) and isinstance(theirs, Tensor):
        return own.dtype == theirs.dtype and torch.equal(own, theirs)
    return not isinstance(own, Tensor) and not isinstance(theirs, Tensor) and (own or None) == (theirs or None)


def _is_constant(value: Any) -> bool:
    return all(map(_is_constant, value)) if isinstance(value, (list, tuple)) else isinstance(value, (int, float, str))
