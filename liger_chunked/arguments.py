"""Errors for unknown arguments that suggest the right name or place."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar, get_args

from torch import Tensor, nn
from typing_extensions import get_type_hints

Options = TypeVar("Options", bound=Mapping[str, Any])


class _Here(NamedTuple):
    """Our names for another library's argument; errors suggest the first that the loss has."""

    names: tuple[str, ...] = ()
    remark: str = ""


_TARGET, _INPUT, _WEIGHT = _Here(("target",)), _Here(("input", "hidden")), _Here(("weight",))
_OLD, _REF, _REF_INPUT = _Here(("old_logps",)), _Here(("ref_logps",)), _Here(("ref_input",))
_SOFTCAP, _LEVEL = _Here(("softcap",)), _Here(("importance_level",))
_IMPORTANCE, _CLASS_WEIGHTS = _Here(("importance_weights",)), _Here(("ce_weight",))
_KEPT = _Here(("kept",), "pass KeptIds, the ids that the sampler kept: they are exact and cheaper")
_Z_LOSS, _MASK = _Here(("lse_square_scale",)), _Here(("attention_mask", "mask"))
_NO_CHUNKS = "the size of a chunk follows from the bytes of logits that it allows"
_NOT_COMPILED = "leave it out: a loss does not compile itself, and torch.compile accepts it as it is"
_COMPUTED = "leave it out: a loss computes log-probabilities itself, from weight, input and target"
_NOT_FREE = "set use_ref_model=False for a loss without a reference"
_NO_LOGITS = "a loss takes no logits: pass hidden states and the head's weight, or log-probabilities"
_REWARDS = "leave it out: weigh the rewards before they become advantages"
_COMPOSED = "from_loss_type(loss_type, ...) takes TRL's names, and sets 'reduction' and 'importance_level' too"
_SETTLED = "leave it out: this loss decides by itself whether it uses a reference"

# Names from TRL, Liger-Kernel, transformers and torch.
_CALLED: Mapping[str, _Here] = {
    # Token counts
    "num_items_in_batch": _Here(("num_items",)),
    "normalizer": _Here(("num_items",)),
    # Policy losses
    "epsilon": _Here(("epsilon_low",), "set 'epsilon_high' too"),
    "cliprange": _Here(("epsilon_low",), "set 'epsilon_high' too"),
    "importance_sampling_level": _LEVEL,
    "kl_coef": _Here(("beta",)),
    "loss_type": _Here(("surrogate",), _COMPOSED),
    "reward_weights": _Here(remark=_REWARDS),
    "ref_per_token_logps": _REF,
    "reference_logps": _REF,
    "ref_log_probs": _REF,
    "old_per_token_logps": _OLD,
    "old_log_probs": _OLD,
    "importance_sampling_ratio": _IMPORTANCE,
    "vllm_is_ratio": _IMPORTANCE,
    "completion_mask": _MASK,
    "attention_mask": _Here(("mask",)),
    "top_k": _KEPT,
    "top_p": _KEPT,
    "min_p": _KEPT,
    "per_token_logps": _Here(remark=_COMPUTED),
    "logps": _Here(remark=_COMPUTED),
    "log_probs": _Here(remark=_COMPUTED),
    # Preference losses
    "cpo_alpha": _Here(("alpha",), "the weight of the NLL term, with compute_nll_loss=True"),
    "rpo_alpha": _Here(("alpha",), "the weight of the NLL term, with compute_nll_loss=True"),
    "simpo_gamma": _Here(("gamma",)),
    "gamma": _Here(("simpo_gamma", "focal_gamma")),
    "alpha": _Here(("cpo_alpha",), "the weight of the NLL term; AlphaPO's alpha is 'alphapo_alpha'"),
    "alpha_param": _Here(("alphapo_alpha",)),
    "reference_free": _Here(("use_ref_model",), _NOT_FREE),
    "use_ref_model": _Here(remark=_SETTLED),
    "label_smoothing_factor": _Here(("label_smoothing",)),
    "length_normalization": _Here(("average_log_prob",)),
    "label": _Here(("preference_labels", "target")),
    "pos_weight": _Here(("desirable_weight", "ce_weight")),
    "ref_logits": _Here(remark=_NO_LOGITS),
    # Distillation
    "teacher_logits": _Here(remark=_NO_LOGITS),
    "teacher_hidden_states": _Here(("teacher_input",)),
    "teacher_labels": _TARGET,
    "return_soft_hard_loss": _Here(remark="leave it out: the metrics have soft_loss and hard_loss"),
    # Cross entropy
    "class_weight": _CLASS_WEIGHTS,
    "class_weights": _CLASS_WEIGHTS,
    "z_loss_scale": _Z_LOSS,
    "z_loss_weight": _Z_LOSS,
    "sample_weight": _Here(("token_weights", "example_weights")),
    # Heads and hidden states
    "lin_weight": _WEIGHT,
    "linear_weight": _WEIGHT,
    "lm_head_weight": _WEIGHT,
    "lm_head": _Here(("weight",), "pass lm_head.weight"),
    "student_weight": _WEIGHT,
    "student_bias": _Here(("bias",)),
    "_input": _INPUT,
    "input": _INPUT,
    "hidden": _INPUT,
    "hidden_states": _INPUT,
    "last_hidden_state": _INPUT,
    "student_input": _INPUT,
    "ref_hidden": _REF_INPUT,
    "ref_hidden_states": _REF_INPUT,
    "selected_token_ids": _TARGET,
    "labels": _TARGET,
    "shift_labels": _TARGET,
    "true_labels": _TARGET,
    "completion_ids": _TARGET,
    # Options
    "final_logit_softcapping": _SOFTCAP,
    "final_logit_softcap": _SOFTCAP,
    "logit_softcap": _SOFTCAP,
    "soft_cap": _SOFTCAP,
    "logits_scaling": _Here(("logit_scale",), "one multiplies, the other divides: pass 1 / logits_scaling"),
    "chunk_size": _Here(("logits_budget",), _NO_CHUNKS),
    "compiled": _Here(remark=_NOT_COMPILED),
    "compile": _Here(remark=_NOT_COMPILED),
}


# Only Liger-Kernel's losses have these names. Code that was written for them has their order of arguments, and results.
_OF_LIGER_KERNEL = frozenset(
    ("lin_weight", "_input", "student_weight", "student_input", "selected_token_ids", "true_labels", "vllm_is_ratio",
     "chunk_size", "compiled", "return_soft_hard_loss")
)  # fmt: skip
COMPAT = "Code for Liger-Kernel runs with the import from liger_chunked.compat, which has its signatures"


class Arguments(NamedTuple):
    """Keywords, and whether a subclass's `**kwargs` accepts others."""

    names: tuple[str, ...]
    takes_any: bool = False


def _definitions(cls: type, method: str) -> Iterator[tuple[Callable[..., Any], list[inspect.Parameter]]]:
    for base in cls.__mro__:
        if method in vars(base):
            function = vars(base)[method]
            yield function, list(inspect.signature(function).parameters.values())[1:]


# A dictionary, because torch.compile warns about functools.lru_cache.
_KEYWORDS: dict[tuple[type, str], Arguments] = {}


def _keywords(cls: type, method: str) -> Arguments:
    if (cls, method) not in _KEYWORDS:
        _KEYWORDS[cls, method] = _read_keywords(cls, method)
    return _KEYWORDS[cls, method]


def _read_keywords(cls: type, method: str) -> Arguments:
    """Collect keywords along bases while each passes its `**kwargs` on."""
    names: list[str] = []
    takes_any = False
    for function, parameters in _definitions(cls, method):
        names += [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        rest = [p.name for p in parameters if p.kind is p.VAR_KEYWORD]
        if not rest:
            break
        options = _typed_options(function, rest[0])
        if options:
            names += options
            break
        takes_any = True
    return Arguments(tuple(dict.fromkeys(names)), takes_any)


def _typed_options(function: Callable[..., Any], name: str) -> tuple[str, ...]:
    """Return the keys of `**name: Unpack[TypedDict]`."""
    if "Unpack" not in str(function.__annotations__.get(name, "")):
        return ()
    try:
        options = get_args(get_type_hints(function)[name])
    except NameError:  # a name that only type checkers import
        return ()
    return tuple(options[0].__annotations__) if options else ()


def of_constructor(cls: type) -> Arguments:
    """Return the settings of a loss class, also those that its `**options` take."""
    return _keywords(cls, "__init__")


def of_call(cls: type) -> Arguments:
    """Return the arguments of a loss's `forward`."""
    return _keywords(cls, "forward")


def unknown(owner: str, given: Iterable[str], here: Arguments, other: Arguments, place: str = "") -> TypeError:
    """Build the error for arguments `given` that `here` lacks.

    `other` has the arguments of the other `place`, "constructor" or "call".
    """
    names = tuple(given)
    answers = "; ".join(_answer(owner, name, here.names, other.names, place) for name in names)
    return TypeError(answers + ("" if _OF_LIGER_KERNEL.isdisjoint(names) else f". {COMPAT}"))


def _answer(owner: str, name: str, here: tuple[str, ...], other: tuple[str, ...], place: str) -> str:
    if name in other:
        data = "" if name in ("weight", "input", "target") else f", {name}=..."
        where = f"{owner}({name}=...)" if place == "constructor" else f"{owner}(...)(weight, input, target{data})"
        return f"{owner} takes {name!r} in its {place}: {where}"
    refused = f"{owner} has no argument {name!r}"
    known = _CALLED.get(name, _Here())
    for ours in known.names:
        if ours in here or ours in other:
            belongs = "" if ours in here else f", an argument of its {place}"
            remark = f" ({known.remark})" if known.remark else ""
            return f"{refused}: it is called {ours!r} here{belongs}{remark}"
    if known.remark and not known.names:
        return f"{refused}: {known.remark}"
    near = difflib.get_close_matches(name, [*here, *other], n=1, cutoff=0.75)
    if not near:
        return refused
    belongs = "" if near[0] in here else f" It is an argument of its {place}."
    return f"{refused}: did you mean {near[0]!r}?{belongs}"


def own_options(loss: type, options: Options, known: Collection[str]) -> Options:
    """Return the `options` of a constructor. Raises TypeError, with a suggestion, for a name that is not in `known`."""
    names = [name for name in options if name not in known]
    if names:
        raise unknown(loss.__name__, names, of_constructor(loss), of_call(loss), "call")
    return options


def split(cls: type, given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split keywords into the constructor's and the call's.

    A name in both is the constructor's, unless its value is a tensor.
    """
    constructor, call = of_constructor(cls), of_call(cls)
    settings: dict[str, Any] = {}
    data: dict[str, Any] = {}
    neither: list[str] = []
    for name, value in given.items():
        if name in constructor.names and not (name in call.names and isinstance(value, Tensor)):
            settings[name] = value
        elif name in call.names:
            data[name] = value
        elif constructor.takes_any:
            settings[name] = value
        elif call.takes_any:
            data[name] = value
        else:
            neither.append(name)
    if neither:
        raise unknown(cls.__name__, neither, Arguments(constructor.names + call.names), Arguments(()))
    return settings, data


def are_data(cls: type, args: tuple[Any, ...], kwargs: Mapping[str, Any], data: tuple[type, ...]) -> bool:
    """Whether arguments are those of a call: tensors by position, of the types `data`, or an `input` by name.

    The constructor gets tensors by position if it has a parameter for each, and those that get them have no default, or
    default to None or a tensor.
    """
    if "input" in kwargs and "input" not in of_constructor(cls).names:
        return True
    if not args or not (isinstance(args[0], nn.Module) or any(isinstance(x, data) for x in args)):
        return False
    named: list[inspect.Parameter] = []
    for _, parameters in _definitions(cls, "__init__"):
        named = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        if not any(p.kind is p.VAR_POSITIONAL for p in parameters):
            break
    if len(args) > len(named):
        return True
    defaults = [p.default for p, x in zip(named, args, strict=False) if isinstance(x, data)]
    return not all(x is None or x is inspect.Parameter.empty or isinstance(x, Tensor) for x in defaults)


def call_error(
    owner: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], constructor: Arguments
) -> TypeError | None:
    """Return the error for arguments that `function` does not take; None if it takes them.

    Args:
        owner: the loss or function, for the message.
        constructor: the arguments of the loss's constructor, to which an unknown name may belong.
    """
    parameters = inspect.signature(function).parameters
    names = tuple(name for name in parameters if name != "self")
    refused = [name for name in kwargs if name not in names]
    if refused:
        return unknown(owner, refused, Arguments(names), constructor, "constructor")
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError as error:
        return TypeError(f"{owner}: {error}, of ({', '.join(names)})")
    return None


def constructor_error(cls: type, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> TypeError | None:
    """Return the error for arguments that the constructor does not take; None if it takes them."""
    try:
        inspect.signature(cls.__init__).bind(None, *args, **kwargs)  # type: ignore[misc]
    except TypeError as error:
        here = of_constructor(cls)
        refused = [name for name in kwargs if name not in here.names and not here.takes_any]
        if refused:
            return unknown(cls.__name__, refused, here, of_call(cls), "call")
        if args:
            return TypeError(
                f"{cls.__name__} takes its settings by name, {', '.join(f'{x}=...' for x in here.names[:3])}, ..., and "
                f"tensors by position, to evaluate them: got {', '.join(type(x).__name__ for x in args)}"
            )
        return TypeError(f"{cls.__name__}: {error}, of ({', '.join(here.names)})")
    return None
