"""TRL's functions of logits, for stand-ins of logits: the same values from hidden states, in one pass.

Their own code would be fused as well where it is PyTorch. On a GPU they run kernels of TRL's, which need real logits,
and a mixture of two distributions needs them anywhere. Arguments other than stand-ins go to TRL's functions.

While a served trainer works, ours are where TRL's are: in modules, and on TRL's classes of trainers as static methods.
An override in a user's subclass comes before them, and its `super()` calls them.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from trl.trainer.base_trainer import _BaseTrainer

from liger_chunked.calls import altered
from liger_chunked.deferred import DeferredLogits
from liger_chunked.engine import linear_token_stats
from liger_chunked.integrations.transformers.head_input import with_transform
from liger_chunked.losses import LigerFusedLinearJSDLoss
from liger_chunked.types import LogitOptions, TokenStats


def are_expressible(*logits: Any) -> bool:
    """Whether all are stand-ins of logits (B, T, V) or (N, V), not yet real, that a loss can compute."""
    for z in logits:
        if not isinstance(z, DeferredLogits) or z.is_computed or z.ndim > 3:
            return False
        try:
            z.logit_options()
        except ValueError:  # log-probabilities, say
            return False
    return True


def _budget(z: Any) -> int | None:
    budget: int | None = z._plan.options.logits_budget
    return budget


def statistics(z: Any, target: Tensor, *outputs: str) -> TokenStats:
    """Return statistics (...) of stand-ins (..., V) at the ids `target` (...), zero where it is -100."""
    options = z.logit_options()

    def run(head: Any, rows: Tensor) -> TokenStats:
        return linear_token_stats(
            head.weight,
            rows,
            target,
            head.bias,
            outputs=outputs,
            softcap=options.softcap,
            logit_scale=options.logit_scale,
            logits_budget=_budget(z),
        )

    stats: TokenStats = z.run(run)
    return stats


def _values(outputs: tuple[str, ...], logits: Any, index: Tensor, temperature: float, row_mask: Tensor | None) -> Any:
    """Return statistics (...) of stand-ins (..., V) at ids `index` (...); None for other tensors.

    Rows where `row_mask` is zero are not computed, and have 0.
    """
    if not are_expressible(logits) or index.shape != logits.shape[:-1]:
        return None
    target = index if row_mask is None else index.masked_fill(row_mask == 0, -100)
    return statistics(logits / temperature, target, *outputs)


def _logps(logits: Any, index: Tensor, temperature: float = 1.0, row_mask: Tensor | None = None) -> Any:
    stats = _values(("logps",), logits, index, temperature, row_mask)
    return NotImplemented if stats is None else stats.logps


def _logps_and_entropy(
    logits: Any,
    index: Tensor,
    entropy_requires_grad: bool = True,
    temperature: float = 1.0,
    row_mask: Tensor | None = None,
) -> Any:
    stats = _values(("logps", "entropy"), logits, index, temperature, row_mask)
    if stats is None:
        return NotImplemented
    return stats.logps, stats.entropy if entropy_requires_grad else stats.entropy.detach()


def _why_real(logits: Any) -> str:
    asked_by = getattr(logits, "asked_by", None)
    return "are no stand-ins" if asked_by is None else f"were read: {asked_by}"


def distilled(
    loss: Any, student_logits: Any, teacher_logits: Any, target: Tensor, *, num_items: int | Tensor | None = None
) -> Any:
    """Return what a distillation loss returns of two stand-ins (..., V), at their transforms; `target` is (...)."""
    for model, logits in (("student", student_logits), ("teacher", teacher_logits)):
        if not are_expressible(logits):
            raise ValueError(
                f"the divergence needs the hidden states of the {model}, whose logits {_why_real(logits)}: leave that "
                "out, or make this trainer outside of patch_trl"
            )
    options = loss.teacher_options
    if options is loss.options:  # the student's may differ
        options = LogitOptions(temperature=options.temperature)
    of_pair = altered(
        loss,
        options=with_transform(loss.options, student_logits.logit_options()),
        teacher_options=with_transform(options, teacher_logits.logit_options()),
    )
    with_gradient = torch.is_grad_enabled()

    def in_teacher(teacher_head: Any, teacher_rows: Tensor) -> Any:
        def in_student(head: Any, rows: Tensor) -> Any:
            arguments = teacher_head.weight, teacher_rows, target, head.bias, teacher_head.bias
            return of_pair(head.weight, rows, *arguments, num_items=num_items)

        with torch.set_grad_enabled(with_gradient):  # the teacher ran without
            return student_logits.run(in_student)

    return teacher_logits.detach().run(in_teacher)


def _trains(teacher_logits: Any) -> bool:
    """Whether a teacher gets a gradient, which a fused divergence does not compute."""
    return torch.is_grad_enabled() and teacher_logits.requires_grad


def jsd_loss(
    beta: float, temperature: float, logits_budget: int | None, reduction: str = "mean"
) -> LigerFusedLinearJSDLoss:
    """Return TRL's generalized JSD alone, without a cross entropy."""
    return LigerFusedLinearJSDLoss(
        beta=beta,
        temperature=temperature,
        weight_hard_loss=0.0,
        weight_soft_loss=1.0,
        reduction=reduction,
        logits_budget=logits_budget,
    )


def divergence(
    student_logits: Any,
    teacher_logits: Any,
    beta: float,
    *,
    temperature: float = 1.0,
    labels: Tensor | None = None,
    num_items: int | Tensor | None = None,
    reduction: str = "mean",
) -> Any:
    """Return TRL's generalized JSD of two stand-ins (..., V), of one vocabulary; NotImplemented for other tensors.

    Args:
        beta: 0 is the forward KL, 1 the reverse KL, others the JSD.
        labels: (...), -100 where a row does not count. None: all count.
        num_items: divisor of the sum. None: the rows that count.
        reduction: "mean", or "none" for a value for each row.
    """
    if not are_expressible(student_logits, teacher_logits) or _trains(teacher_logits):
        return NotImplemented
    loss = jsd_loss(beta, temperature, _budget(student_logits), reduction)
    target = torch.zeros(student_logits.shape[:-1], dtype=torch.long, device=student_logits.device)
    target = target if labels is None else target.masked_fill(labels == -100, -100)
    return distilled(loss, student_logits, teacher_logits, target, num_items=num_items)[0]


def _self_distillation(student_logits: Any, teacher_logits: Any, *, distillation_alpha: float) -> Any:
    return divergence(student_logits, teacher_logits, distillation_alpha, reduction="none")


def _batch_logps(logits: Any, labels: Tensor, average_log_prob: bool = False, is_encoder_decoder: bool = False) -> Any:
    """Sum the log-probabilities (B,) of ORPO and CPO. Tokens without a label, such as prompts, are not computed."""
    shift = not is_encoder_decoder
    target = labels[:, 1:] if shift else labels
    mask = target != -100
    logps = _logps(logits[:, :-1] if shift else logits, target.where(mask, 0), row_mask=mask)
    if logps is NotImplemented:
        return logps
    return logps.sum(-1) / mask.sum(-1) if average_log_prob else logps.sum(-1)


def _generalized_jsd_loss(
    student_logits: Any,
    teacher_logits: Any,
    labels: Tensor | None = None,
    beta: float = 0.5,
    temperature: float = 1.0,
    reduction: str = "batchmean",
    *others: Any,
    num_items_in_batch: int | Tensor | None = None,
    **named: Any,
) -> Any:
    """Compute the divergence of GKD, GOLD and IW-OPD, which differ in their last arguments."""
    if reduction != "batchmean" or others or named.get("top_k") or named.get("logits_are_probs"):
        return NotImplemented
    if labels is None and num_items_in_batch is None:
        num_items_in_batch = max(len(student_logits), 1)  # sequences, and not tokens
    settings: Any = {"temperature": temperature, "labels": labels, "num_items": num_items_in_batch}
    return divergence(student_logits, teacher_logits, beta, **settings)


_OURS: dict[str, Callable[..., Any]] = {
    "selective_log_softmax": _logps,
    "selective_log_softmax_and_entropy": _logps_and_entropy,
    "compute_full_logit_self_distillation_loss": _self_distillation,
    "get_batch_logps": _batch_logps,
    "generalized_jsd_loss": _generalized_jsd_loss,
}


@contextmanager
def lent(x: Any, **attributes: Any) -> Iterator[None]:
    """Set attributes of an object for the time of a block."""
    before = {name: getattr(x, name) for name in attributes}
    for name, value in attributes.items():
        setattr(x, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(x, name, value)


def _all_modules() -> list[Any]:
    return [*sys.modules.values()]


@contextmanager
def replaced(
    functions: Mapping[str, Callable[..., Any]],
    modules: Callable[[], Iterable[Any]] = _all_modules,
    *,
    of_anyone: bool = False,
) -> Iterator[None]:
    """Replace functions of TRL's wherever they are, because its trainers import them by name.

    A replacement that returns `NotImplemented` leaves the call to TRL's function.

    Args:
        modules: returns the modules to look through, at the start of the block and at its end.
        of_anyone: also replace what somebody else has put into TRL's modules under these names. False: it stays.
    """
    made: dict[Any, Any] = {}  # from a replacement to what it took the place of

    def replacement(ours: Callable[..., Any], theirs: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(theirs)
        def function(*args: Any, **kwargs: Any) -> Any:
            result = ours(*args, **kwargs)
            return theirs(*args, **kwargs) if result is NotImplemented else result

        return function

    try:
        for owner, name, function in _holders(functions, modules()):
            if _is_trls(function) or (of_anyone and owner.__name__.partition(".")[0] == "trl"):
                new, before = replacement(functions[name], function), vars(owner)[name]
                made[new] = before
                setattr(owner, name, staticmethod(new) if isinstance(before, staticmethod) else new)
        yield
    finally:
        for owner, name, function in _holders(functions, modules()):  # also in modules that were imported meanwhile
            if function in made:
                setattr(owner, name, made[function])


def _is_trls(function: Any) -> bool:
    """Whether a function is TRL's, or ours in its place, and so are those of `_OURS` that it calls.

    Its globals say so: `functools.wraps` gives a user's function the names of TRL's.
    """
    names = function.__globals__
    called = [names[name] for name in function.__code__.co_names if name in _OURS and name in names]
    package = names.get("__name__", "").partition(".")[0]
    return package in ("trl", "liger_chunked") and all(inspect.isfunction(x) and _is_trls(x) for x in called)


def _members(x: Any) -> Any:
    return getattr(x, "__dict__", {})


def _holders(names: Iterable[str], modules: Iterable[Any]) -> Iterator[tuple[Any, str, Any]]:
    """Yield modules and classes of trainers, names of their functions or static methods, and these functions."""
    wanted = frozenset(names)
    for owner in [*modules, *trainer_classes()]:
        members = _members(owner)
        for name in wanted & members.keys():
            x = members[name]
            if isinstance(owner, type):
                x = x.__func__ if isinstance(x, staticmethod) else None
            if inspect.isfunction(x):
                yield owner, name, x


def trainer_classes() -> list[type]:
    """Return the imported trainers of TRL's, and subclasses of them."""
    found: list[type] = [_BaseTrainer]
    for cls in found:  # which grows
        subclasses: list[type] = cls.__subclasses__()
        found += [subclass for subclass in subclasses if subclass not in found]
    return found[1:]


# The functions are swapped while a served trainer works.
_LOCK = threading.RLock()
_N_USERS = 0
_SWAP: Any = None


@contextmanager
def swapped() -> Iterator[None]:
    """Let TRL's modules call our functions for stand-ins."""
    global _N_USERS, _SWAP
    with _LOCK:
        if not _N_USERS:
            _SWAP = replaced(_OURS, _known_modules)
            _SWAP.__enter__()
        _N_USERS += 1
    try:
        yield
    finally:
        with _LOCK:
            _N_USERS -= 1
            if not _N_USERS:
                _SWAP.__exit__(None, None, None)


# All modules when they were last looked through, and those of them that have one of the functions. A loop of a user's
# own swaps at each step, and to look through thousands of modules takes milliseconds.
_KNOWN: tuple[list[Any], list[Any]] = [], []


def _known_modules() -> list[Any]:
    """Return the modules that have one of the functions, and `__main__`, where names are set at any time."""
    global _KNOWN
    every, (before, found) = _all_modules(), _KNOWN
    if every != before:
        main = sys.modules.get("__main__")
        found = [x for x in every if x is main or not _members(x).keys().isdisjoint(_OURS)]
        _KNOWN = every, found
    return found
