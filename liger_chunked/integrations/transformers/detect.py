"""Facts about a model's code: its parts, whose code runs, and what it computes after the backbone.

The config does not say how a model transforms its logits. So `check_head` runs a copy in which backbone and `lm_head`
return known values, and other modules with parameters raise. It takes milliseconds at any size.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import inspect
import math
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils import ModelOutput

from liger_chunked.types import LogitOptions

# The parts of a model.


def inner_model(model: nn.Module) -> PreTrainedModel:
    """Return the transformers model inside wrappers (DDP, PEFT), or raise a TypeError."""
    while not isinstance(model, PreTrainedModel):
        if isinstance(inner := getattr(model, "_orig_mod", None) or getattr(model, "module", None), nn.Module):
            model = inner
        elif callable(get_base_model := getattr(model, "get_base_model", None)):
            model = get_base_model()
        else:
            raise TypeError(f"model must be, or wrap, a transformers PreTrainedModel, got {type(model).__name__}")
    return model


def backbone_of(model: PreTrainedModel) -> nn.Module:
    # MllamaForCausalLM is its own base_model.
    backbone = model.base_model if model.base_model is not model else getattr(model, "model", None)
    if backbone is None:
        raise ValueError(f"{type(model).__name__} is not a backbone under an lm_head")
    return backbone


@dataclass(frozen=True)
class Projection:
    """A Linear inside `lm_head`, maybe in a LoRA layer of PEFT with `adapters` in use."""

    linear: nn.Linear
    layer: Any = None  # peft.tuners.lora.layer.Linear
    adapters: tuple[str, ...] = ()

    @property
    def has_bias(self) -> bool:
        return self.linear.bias is not None or any(self.layer.lora_bias[name] for name in self.adapters)

    @property
    def entered(self) -> list[tuple[nn.Module, nn.Module]]:
        """The modules whose hooks gather parameters, outermost first, each with the module that computes."""
        if self.layer is None:
            return [(self.linear, self.linear)]
        of_adapters = [self.layer.lora_B[name] for name in self.adapters]
        return [
            (self.layer, self.layer),
            (self.layer.base_layer, self.linear),
            *((module, _linear_in(module)) for module in of_adapters),
        ]


def projections(model: PreTrainedModel) -> list[Projection]:
    """Return the projections of which `lm_head` calls one, or raise a ValueError."""
    lm_head = model.get_output_embeddings()
    if lm_head is None:
        raise ValueError(f"{type(model).__name__} is not a backbone under an lm_head")
    return projections_in(lm_head)


def projections_in(lm_head: nn.Module) -> list[Projection]:
    found = list(_projections_in(lm_head))
    if not found:
        raise ValueError(_head_refusal(lm_head))
    return found


_WRAPPERS = {"FullyShardedDataParallel", "ModulesToSaveWrapper", "ModuleDict"}  # these only call a Linear


def _projections_in(module: nn.Module) -> Iterator[Projection]:
    if _is_linear(module):
        yield Projection(module)
    elif _is_lora(module):
        adapters = _adapters_in_use(module)
        yield Projection(_linear_in(module.base_layer), module, adapters)
    elif _WRAPPERS & _base_names(module):
        for child in module.children():
            yield from _projections_in(child)
    else:
        raise ValueError(_head_refusal(module))


def _is_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:
        return False
    if is_parametrized(module):
        raise ValueError(_head_refusal(module))
    return True


def _linear_in(module: Any) -> nn.Linear:
    """Return the Linear in `module`, or raise a ValueError."""
    if _is_linear(module):
        return module
    children = list(module.children())
    if "FullyShardedDataParallel" in _base_names(module) and len(children) == 1:
        return _linear_in(children[0])
    raise ValueError(_head_refusal(module))


def _is_lora(module: nn.Module) -> TypeGuard[Any]:
    lora: Any = sys.modules.get("peft.tuners.lora.layer")
    return lora is not None and isinstance(module, lora.Linear) and type(module).forward is lora.Linear.forward


def _adapters_in_use(layer: Any) -> tuple[str, ...]:
    """Return a LoRA layer's adapters in use, () if disabled or merged, or raise a ValueError."""
    if layer.disable_adapters or layer.merged:
        return ()
    names = tuple(name for name in layer.active_adapters if name in layer.lora_A)
    for name in names:
        if name in layer.lora_variant:
            variant = layer.lora_variant[name]
            kind = variant.__name__ if isinstance(variant, type) else type(variant).__name__
            raise ValueError(
                f"lm_head has the adapter {name!r} of the kind {kind}, and a fused loss computes LoRA without variants "
                "(DoRA, aLoRA and others). Take lm_head out of target_modules, or use plain LoRA or rsLoRA"
            )
    return names


def _base_names(module: nn.Module) -> set[str]:
    # FSDP gives a module a subclass with a new name.
    return {base.__name__ for base in type(module).__mro__}


def _head_refusal(module: nn.Module) -> str:
    names, ignored = _base_names(module), ": a fused loss reads its weight and would ignore the"
    adapters = {
        "LoraLayer": "low-rank term, unless it is PEFT's LoRA on a torch.nn.Linear. Take lm_head out of "
        "target_modules; to train it anyway, name it in modules_to_save",
        "TrainableTokensWrapper": "rows of trainable_token_indices. Untie the head from the embeddings "
        "(tie_word_embeddings=False), or train both whole (modules_to_save)",
        "BaseTunerLayer": "adapter. Take lm_head out of the adapter's target_modules",
    }
    quantized = any("quant" in base.__module__ or "bitsandbytes" in base.__module__ for base in type(module).__mro__)
    if adapter := next((name for name in adapters if name in names), None):
        reason = f"{ignored} {adapters[adapter]}"
    elif is_parametrized(module):
        reason = (
            ", which is parametrized: a fused loss reads a weight that is a plain parameter. Call "
            "torch.nn.utils.parametrize.remove_parametrizations on lm_head first"
        )
    elif isinstance(module, nn.Linear) or quantized:
        reason = (
            ": a fused loss needs a weight in floating point, multiplied by torch.nn.Linear.forward. Leave lm_head out "
            "of quantization (llm_int8_skip_modules, modules_to_not_convert), or make it a torch.nn.Linear"
        )
    else:
        reason = (
            ": a fused loss needs a single torch.nn.Linear. Fold lm_head into one, or train with the logits of the "
            "model's own forward"
        )
    return f"lm_head is computed by {type(module).__module__}.{type(module).__name__}{reason}"


# Whose code runs.

# An instance's forward; accelerate's hooks move it to `_old_forward`.
FORWARD_SLOTS = ("forward", "_old_forward")

# Packages whose hooks and forwards accept any output.
_FRAMEWORKS = {"torch", "transformers", "accelerate", "deepspeed", "peft", "trl", "liger_chunked"}


def forward_slot(module: nn.Module) -> str:
    return "_old_forward" if "_old_forward" in vars(module) else "forward"


def own_forward(module: nn.Module) -> Callable[..., Any] | None:
    """Return the forward set on this instance, or None."""
    forward = vars(module).get(forward_slot(module))
    return None if getattr(forward, "__func__", None) is type(module).forward else forward


def unwrapped(function: Any) -> Iterator[Any]:
    """Yield a function and those that it wraps."""
    while function is not None:
        yield function
        partial = isinstance(function, functools.partial)
        function = function.func if partial else getattr(function, "__wrapped__", None)


def foreign_code(function: Any, known: type | None = None) -> Any:
    """Return the outermost wrapper that no framework defines; None if a forward of `known` comes first."""
    theirs = [] if known is None else [vars(cls)["forward"] for cls in known.__mro__ if "forward" in vars(cls)]
    for code in unwrapped(function):
        if getattr(code, "__func__", code) in theirs:
            return None
        # functools.wraps copies `__module__`, but not the globals.
        module = getattr(code, "__globals__", {}).get("__name__") or type(code).__module__
        if module.partition(".")[0] not in _FRAMEWORKS and not isinstance(code, functools.partial):
            return code
    return None


def runs_code_of(found: type[nn.Module], cls: type[nn.Module], method: str) -> bool:
    return all(stock_method(found, name) is stock_method(cls, name) for name in ("forward", method))


STOCK = "_liger_stock"  # attribute of our methods: the originals


def stock_method(cls: type, name: str) -> Any:
    method = getattr(cls, name, None)
    return getattr(method, STOCK, method)


# Whether functions are the same code.

_READ: dict[int, Any] = {}  # objects that texts refer to by id


@functools.cache
def source_of(function: Any, cls: Any = None) -> tuple[str, tuple[str, ...]] | None:
    """Return a function's syntax tree without names, and the attributes of `cls` that it reads.

    Functions with equal trees do the same with their arguments and, in order, these attributes. None without source.
    """
    reader = _Reader(cls)
    try:
        return reader.read(function), tuple(reader.attributes)
    except (OSError, TypeError, ValueError, SyntaxError, RecursionError):
        return None


class _Reader:
    def __init__(self, cls: type | None) -> None:
        self.cls = cls
        self.attributes: dict[str, int] = {}

    def read(self, function: Any) -> str:
        *wrappers, function = unwrapped(function)
        if any(foreign_code(wrapper) is wrapper for wrapper in wrappers):
            raise TypeError(f"{function} is wrapped in other code")
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
        if not isinstance(tree, ast.FunctionDef):
            raise TypeError(f"{function} is not defined by def")
        if ast.get_docstring(tree) is not None:
            del tree.body[0]
        # Decorators may change the result, except those of hub kernels.
        kept = [x for x in tree.decorator_list if not ast.unparse(x).startswith("use_kernel")]
        tree.name, tree.returns, tree.decorator_list = "", None, kept
        return ast.dump(_Renamed(self, function, tree).visit(tree))

    def attribute(self, name: str) -> str:
        value = inspect.getattr_static(self.cls, name, None)
        if _has_text(value):
            return f"method {_Reader.read(self, value)}"
        return f"attribute {self.attributes.setdefault(name, len(self.attributes))}"


def _has_text(value: Any) -> bool:
    return inspect.isfunction(value) and (value.__module__ or "").partition(".")[0] != "torch"


class _Renamed(ast.NodeTransformer):
    """Replaces a function's names by their order or the objects that they name."""

    def __init__(self, reader: _Reader, function: Any, tree: ast.AST) -> None:
        self.reader, self.scope = reader, {**vars(builtins), **function.__globals__}
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=False)
        self.scope |= {name: cell.cell_contents for name, cell in cells}
        nodes = list(ast.walk(tree))
        arguments = [n.arg for n in nodes if isinstance(n, ast.arg)]
        local = arguments + [n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
        self.local = {name: f"local {i}" for i, name in enumerate(dict.fromkeys(local))}
        self.self = local[0] if reader.cls is not None and local else None

    def visit_arg(self, node: ast.arg) -> ast.AST:
        return ast.arg(self.local[node.arg])

    def visit_AnnAssign(self, node: ast.AnnAssign) -> Any:
        return self.visit(ast.Assign([node.target], node.value)) if node.value is not None else None

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Name(self.local.get(node.id) or self.referred(node) or node.id, ast.Load())

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if isinstance(node.value, ast.Name) and node.value.id == self.self:
            return ast.Name(self.reader.attribute(node.attr), ast.Load())
        found = self.referred(node)
        return self.generic_visit(node) if found is None else ast.Name(found, ast.Load())

    def referred(self, node: ast.expr) -> str | None:
        names = ast.unparse(node).split(".")
        if not all(map(str.isidentifier, names)) or names[0] in self.local or names[0] not in self.scope:
            return None
        value = self.scope[names[0]]
        for name in names[1:]:
            if not isinstance(value, ModuleType) or not hasattr(value, name):
                return None
            value = getattr(value, name)
        if _has_text(value):
            if text := source_of(getattr(value, STOCK, value)):
                return f"function {text[0]}"
        if isinstance(value, (bool, int, float, str)):
            return repr(value)
        _READ[id(value)] = value
        return f"object {id(value)}"


@functools.cache
def rotary_functions(cls: type) -> frozenset[tuple[str, str]]:
    """Return module and name of the rotary functions in a class's methods."""
    found = set()
    for base in cls.__mro__:
        for method in filter(inspect.isfunction, vars(base).values()):
            method = inspect.unwrap(method)
            names = [name for name in method.__code__.co_names if re.match(r"_?\w*apply\w*(rotary|rope)", name)]
            theirs = method.__globals__
            found |= {(theirs["__name__"], name) for name in names if inspect.isfunction(theirs.get(name))}
    return frozenset(found)


def looks_like_layer(cls: Any) -> bool:
    """Whether a class has a norm's name, or multiplies and is named like a gated MLP or experts."""
    if cls.__module__.partition(".")[0] == "torch":
        return False
    if re.search(r"(RMS|Layer|L2)Norm", cls.__name__):
        return True
    named = re.search(r"(MLP|Mlp|FeedForward|GLU|Experts)$", cls.__name__)
    read = source_of(cls.forward, cls) if named else None
    return read is not None and ("Mult()" in read[0] or cls.__name__.endswith("Experts"))


# Between backbone and logits.

_LENGTH, _MASKED = 6, 4  # positions, and the first masked one
_KEPT = 2  # positions that `logits_to_keep` selects
_NUM_ITEMS = 7

# Arguments that do not change hidden states.
_FREE = {
    "use_cache", "return_dict", "output_attentions", "output_hidden_states", "output_router_logits", "logits_to_keep",
    "past_key_values", "cache_position",
}  # fmt: skip


_OF_HEAD = ("labels", "shift_labels", "logits_to_keep", "num_items_in_batch", "ignore_index")


@dataclass(frozen=True)
class HeadFacts:
    """The logits' transform, the forward's output, and how forward's and backbone's arguments differ."""

    options: LogitOptions
    output: type
    of_forward: tuple[str, ...] = ()  # only the forward takes these, maybe for the loss
    constants: tuple[tuple[str, Any], ...] = ()  # the forward adds these
    dropped: tuple[str, ...] = ()  # it does not pass these on
    backbone_takes_labels: bool = False


def check_head(model: PreTrainedModel, forward: Callable[..., Any]) -> HeadFacts:
    """Return the facts, or raise a ValueError if the logits are not `transform(lm_head(last_hidden_state))`."""
    trial = _Trial(model, forward)
    with _explained(forward):
        # Small logits show the scale, large ones the softcap.
        trial.prepare(torch.logspace(-2, 6, _LENGTH, dtype=torch.float32)[:, None])
        observed = trial.observe()
        factor = trial.factor(observed.reached, trial.hidden_states)
        if factor != 1 and trial.projection.has_bias:
            raise _Difference(
                f"what reaches lm_head is {factor:.7g} times the backbone's last hidden state, and lm_head has a bias"
            )
        options = trial.transform(_logits_of(observed.output), factor)
        if "logits_to_keep" in _parameters(forward):
            kept = trial.observe(logits_to_keep=_KEPT)
            trial.factor(kept.reached, trial.hidden_states[:, -_KEPT:])
        labels = observed.given["input_ids"].clone()
        observed = trial.observe(lambda *args, **kwargs: torch.zeros(()), labels=labels)
        taken = {*observed.passed, *_parameters(type(trial.backbone).forward), *_OF_HEAD, *_FREE}
        own = inspect.signature(forward).parameters.values()
        of_forward = tuple(
            p.name for p in [*own][1:] if p.name not in taken and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        )
        return _passed_on(observed, options, of_forward)


def check_loss(model: PreTrainedModel, forward: Callable[..., Any]) -> None:
    """Raise a ValueError unless `forward` computes the causal loss of its logits."""
    trial = _Trial(model, forward)
    with _explained(forward):
        trial.prepare()
        labels = _arguments(forward, trial.logits)["input_ids"].clone()
        labels[:, 1] = -100
        for arguments in ({}, _if_taken(forward, num_items_in_batch=torch.tensor(_NUM_ITEMS))):
            output = trial.observe(labels=labels, **arguments).output
            logits, target = _logits_of(output), labels[0, 1:]
            total = F.cross_entropy(logits[0, :-1], target, ignore_index=-100, reduction="sum")
            expected = total / (_NUM_ITEMS if arguments else (target != -100).sum())
            loss = output.loss
            if not isinstance(loss, Tensor) or not torch.allclose(loss.float(), expected, rtol=1e-4, atol=0):
                got = f"{loss:.6g}" if isinstance(loss, Tensor) and loss.ndim == 0 else f"a {type(loss).__name__}"
                raise _Difference(
                    f"its loss, called with {' and '.join(['labels', *arguments])}, is {got} where the mean negative "
                    f"log-likelihood of the next tokens is {expected:.6g}"
                )


class _Difference(Exception):
    """The model differs from `transform(lm_head(last_hidden_state))`."""


class _Part(Exception):
    """The forward reads this attribute of the backbone."""


@contextlib.contextmanager
def _explained(forward: Callable[..., Any]) -> Iterator[None]:
    """Compute on the CPU; turn errors into a ValueError."""
    name = forward.__qualname__
    advice = "Train it with its own forward, which builds logits (apply_liger_kernel: fused_linear_cross_entropy=False)"
    try:
        with torch.no_grad(), torch.device("cpu"), torch.autocast("cpu", enabled=False), torch.random.fork_rng([]):
            yield
    except Exception as error:  # a forward may raise anything
        known = isinstance(error, _Difference)
        lost = "the forward could not be followed from the backbone to the logits"
        reason = str(error) if known else f"{lost} ({type(error).__name__}: {error})"
        raise ValueError(f"a fused loss cannot stand in for {name}: {reason}. {advice}") from (None if known else error)


class _Observed(NamedTuple):
    reached: Tensor  # the input of lm_head
    output: Any
    given: dict[str, Any]  # arguments of the forward
    passed: dict[str, Any]  # arguments of the core: the backbone, or its part that the forward calls
    expected: dict[str, Any] | None  # arguments of the core in a call of the whole backbone


class _Trial:
    """Runs one forward of a model on stand-ins."""

    def __init__(self, model: PreTrainedModel, forward: Callable[..., Any]) -> None:
        self.model, self.forward = model, forward
        self.backbone, self.projection = backbone_of(model), projections(model)[0]

    def prepare(self, scale: Tensor | float = 1.0) -> None:
        """Draw what the stand-ins return."""
        generator = torch.Generator().manual_seed(0)
        sizes = (self.projection.linear.out_features, self.projection.linear.in_features)
        made = [torch.randn(1, _LENGTH, size, generator=generator, dtype=torch.float32) for size in sizes]
        self.logits, self.hidden_states = made[0] * scale, made[1]
        # Usually a number of the config, or its reciprocal.
        configs = (self.model.config, self.model.config.get_text_config())
        values = [x for config in configs for x in vars(config).values() if isinstance(x, (int, float))]
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
        stand_in, head = _Core(core, self.hidden_states), _Head(self.logits)
        stand_ins: dict[nn.Module, nn.Module] = {core: stand_in, real_head: head}
        copy = _copy(model, "", stand_ins, {model} | _containing(model, real_head) | _containing(model, core))
        if loss_function is not None:
            vars(copy)["_loss_function"] = loss_function
        given = _arguments(forward, self.logits) | arguments
        output = forward(copy, **given, **_if_taken(forward, return_dict=True, output_router_logits=False))
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

    def _exact(self, measured: Tensor) -> float:
        value = measured.item()
        return next((x for x in self.numbers if math.isclose(x, value, rel_tol=2e-6)), value)

    def factor(self, reached: Tensor, hidden_states: Tensor) -> float:
        """Return the factor between backbone and `lm_head`."""
        if reached.shape != hidden_states.shape:
            raise _Difference(
                f"what reaches lm_head has the shape {tuple(reached.shape)}, and the backbone's last hidden state "
                f"{tuple(hidden_states.shape)}"
            )
        factor = self._exact((reached / hidden_states).median())
        if not _same(reached, factor * hidden_states):
            raise _Difference(
                "what reaches lm_head is not the backbone's last hidden state: the largest difference is "
                f"{(reached - hidden_states).abs().max():.3g}, of values up to {hidden_states.abs().max():.3g}"
            )
        return factor

    def transform(self, logits: Tensor, factor: float) -> LogitOptions:
        raw = self.logits
        if logits.shape != raw.shape:
            shapes = f"{tuple(raw.shape)}, and the model {tuple(logits.shape)}"
            raise _Difference(f"lm_head returns logits of the shape {shapes}")
        scale = self._exact((logits / raw)[:, 0].median())
        if _same(logits, scale * raw):
            return LogitOptions(logit_scale=scale * factor)
        softcap = self._exact(logits.abs().max())
        capped = softcap * torch.tanh(scale * raw / softcap) if softcap else raw
        if softcap and math.isfinite(softcap) and torch.allclose(logits, capped, rtol=1e-5, atol=1e-6 * softcap):
            return LogitOptions(softcap=softcap, logit_scale=scale * factor)
        moderate = raw.abs() < 100
        raise _Difference(
            "its logits are not a scale and softcap of the output of lm_head: for values between -100 and 100 the "
            f"largest difference is {(logits - raw)[moderate].abs().max():.3g}"
        )


class _Output(BaseModelOutputWithPast):
    """A backbone's output; any other field is None."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


class _Core(nn.Module):
    """Replaces the backbone, or a part of it."""

    def __init__(self, real: nn.Module, hidden_states: Tensor) -> None:
        super().__init__()
        self.real = (real,)  # a tuple, not a submodule
        self.hidden_states = hidden_states
        self.calls: list[dict[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.__dict__["real"][0], name)
        if callable(value) or isinstance(value, Tensor):
            raise _Part(name)
        return value

    def forward(self, *args: Any, **kwargs: Any) -> _Output:
        self.calls.append(dict(zip(_parameters(type(self.real[0]).forward), args, strict=False)) | kwargs)
        return _Output(last_hidden_state=self.hidden_states)


class _Head(nn.Module):
    """Replaces `lm_head`."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        # Some forwards read its dtype. Products raise.
        self.weight = nn.Parameter(torch.empty(0, dtype=torch.float32), requires_grad=False)
        self.logits = logits
        self.inputs: list[Tensor] = []

    def forward(self, hidden_states: Tensor) -> Tensor:
        self.inputs.append(hidden_states)
        return self.logits[:, -hidden_states.shape[1] :].clone()


class _Between(nn.Module):
    """Replaces any other module with parameters."""

    def __init__(self, name: str, real: nn.Module) -> None:
        super().__init__()
        self.described = f"{name} ({type(real).__name__})"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise _Difference(f"it runs {self.described} in addition to its backbone and its lm_head")


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OVERRIDES = (*FORWARD_SLOTS, "_hf_hook", "_compiled_call_impl")


def _copy(module: nn.Module, name: str, stand_ins: dict[nn.Module, nn.Module], inner: set[nn.Module]) -> nn.Module:
    """Copy a module without hooks; stand-ins replace all submodules but `inner`."""
    if module in stand_ins:
        return stand_ins[module]
    if module not in inner and (any(True for _ in module.parameters()) or any(True for _ in module.buffers())):
        stand_ins[module] = _Between(name, module)
        return stand_ins[module]
    copy = stand_ins[module] = object.__new__(type(module))
    state = {key: value for key, value in vars(module).items() if key not in _OVERRIDES}
    state |= {key: type(state[key])() for key in _HOOKS if key in state}
    state["_modules"] = {
        key: child if child is None else _copy(child, f"{name}.{key}" if name else key, stand_ins, inner)
        for key, child in module._modules.items()
    }
    for kind in ("_parameters", "_buffers"):
        state[kind] = {key: x if x is None else _random_like(x) for key, x in state[kind].items()}
    # Training mode reveals a dropout, but a patched model would run its fused forward.
    state["training"] = module not in inner
    vars(copy).update(state)
    return copy


def _random_like(x: Tensor) -> Tensor:
    floating = x.is_floating_point()
    return torch.randn(x.shape, dtype=torch.float32) if floating else torch.zeros(x.shape, dtype=x.dtype)


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


def _arguments(forward: Callable[..., Any], logits: Tensor) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    mask = torch.ones(1, _LENGTH, dtype=torch.long)
    mask[:, _MASKED:] = 0
    optional = {"attention_mask": mask, "position_ids": torch.arange(_LENGTH)[None] + 1}
    names = _parameters(forward)
    ids = torch.randint(logits.shape[-1], (1, _LENGTH), generator=generator)
    return {"input_ids": ids, **{name: x for name, x in optional.items() if name in names}}


def _logits_of(output: Any) -> Tensor:
    logits = output.logits if hasattr(output, "logits") else output[0]
    if not isinstance(logits, Tensor):
        raise _Difference(f"it returns logits of the type {type(logits).__name__}")
    return logits.float()


def _same(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and torch.allclose(x, y, rtol=1e-5, atol=0)


def _passed_on(observed: _Observed, options: LogitOptions, of_forward: tuple[str, ...]) -> HeadFacts:
    """Compare the forward's arguments with its backbone's."""
    whole = observed.expected is None
    ours = observed.expected or {name: x for name, x in observed.given.items() if name != "labels"}
    constants: dict[str, Any] = {}
    dropped: list[str] = []
    takes_labels = False
    for name in (ours.keys() | observed.passed.keys()) - _FREE:
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


# Experts' load-balancing loss. Its settings have many names, so we evaluate the source's expressions.

_SWITCH = "output_router_logits"


@dataclass(frozen=True)
class Balance:
    """How a forward computes the load-balancing loss, or why this is unknown. Defaults: none."""

    asked: Callable[..., Any] = lambda model, output_router_logits: output_router_logits
    loss: Callable[..., Any] = lambda model, outputs, attention_mask: None
    coefficient: Callable[..., Any] = lambda model: 0.0
    refusal: str | None = None


_BALANCES: dict[type, Balance | None] = {}


def balance_of(model: Any) -> Balance | None:
    """Return how a model computes its load-balancing loss."""
    model_class = type(model)
    _read_balance(model_class)
    return _BALANCES[model_class]


@torch.compiler.assume_constant_result  # Dynamo runs it during tracing
def _read_balance(model_class: type) -> None:
    if model_class not in _BALANCES:
        _BALANCES[model_class] = _balance_of_class(model_class)


def _balance_of_class(model_class: type) -> Balance | None:
    forwards = [vars(cls)["forward"] for cls in model_class.__mro__ if "forward" in vars(cls)]
    for forward in dict.fromkeys(map(inspect.unwrap, forwards)):
        try:
            (tree,) = ast.parse(textwrap.dedent(inspect.getsource(forward))).body
        except (OSError, TypeError):
            return Balance(refusal=f"the source of {forward.__qualname__} is not available")
        nodes = list(ast.walk(tree))
        calls = [n for n in nodes if isinstance(n, ast.Call) and ast.unparse(n.func) == "load_balancing_loss_func"]
        if calls:
            return _balance_of_calls(forward, nodes, calls)
        if "super().forward" not in ast.unparse(tree):
            return None
    return None


def _balance_of_calls(forward: Any, nodes: list[ast.AST], calls: list[ast.Call]) -> Balance:
    sums = [n.value for n in nodes if isinstance(n, ast.AugAssign) and ast.unparse(n.target) == "loss"]
    products = [x for x in sums if isinstance(x, ast.BinOp) and isinstance(x.op, ast.Mult)]
    factors = [x.left for x in products if ast.unparse(x.right).startswith("aux_loss")]
    asked = [n.value for n in nodes if isinstance(n, ast.Assign) and list(map(ast.unparse, n.targets)) == [_SWITCH]]
    try:
        ((call,), (factor,)) = calls, factors
        return Balance(
            _evaluator(forward, asked[0] if asked else ast.Name(_SWITCH, ast.Load()), "self", _SWITCH),
            _evaluator(forward, call, "self", "outputs", "attention_mask"),
            _evaluator(forward, factor, "self"),
        )
    except (ValueError, NameError) as failure:
        return Balance(refusal=f"{forward.__qualname__} computes it in another way than other models do ({failure})")


def _evaluator(forward: Any, expression: ast.expr, *names: str) -> Callable[..., Any]:
    """Compile an expression to a function of `names`, or raise a NameError."""
    local = set(forward.__code__.co_varnames) - set(names)
    if missing := sorted(n.id for n in ast.walk(expression) if isinstance(n, ast.Name) and n.id in local):
        raise NameError(f"it needs {', '.join(missing)}")
    namespace: dict[str, Any] = {}
    code = f"def evaluated({', '.join(names)}):\n    return {ast.unparse(expression)}"
    exec(compile(code, inspect.getfile(forward), "exec"), forward.__globals__, namespace)
    return namespace["evaluated"]
