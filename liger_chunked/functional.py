"""Every loss as a function: data first, then settings by name.

    loss, metrics = dpo_loss(lm_head.weight, hidden, target, ref_logps=ref_logps, beta=0.1)

is `LigerFusedLinearDPOLoss(beta=0.1)(lm_head.weight, hidden, target, ref_logps=ref_logps)`. The class and its `forward`
document arguments, results and errors.

Signatures come from the classes. Type checkers and editors read them in `functional.pyi`, which
`scripts/functional_stub.py` writes.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, get_args

from torch import Tensor

from liger_chunked import arguments, losses
from liger_chunked.calls import entry_point, once
from liger_chunked.engine import linear_token_stats
from liger_chunked.losses.surrogates import SURROGATES
from liger_chunked.types import LogitOptions

__all__ = [
    "bco_loss",
    "cosine_similarity_loss",
    "cpo_loss",
    "cross_entropy_loss",
    "dpo_loss",
    "draft_loss",
    "grpo_loss",
    "jsd_loss",
    "kl_div_loss",
    "kto_loss",
    "linear_token_stats",
    "on_policy_distillation_loss",
    "orpo_loss",
    "simpo_loss",
    "tvd_loss",
    "uld_loss",
]


def signature_of(cls: Any, as_text: bool = False) -> inspect.Signature:
    """Return the parameters of a loss's call, then those of its constructor by name, with types, or as written.

    A parameter of both takes what either takes, except the call's None, which stands for the constructor's value.
    """

    def read(function: Any) -> inspect.Signature:
        return inspect.signature(function, eval_str=not as_text)

    call = read(cls.forward)
    _, *data = call.parameters.values()
    found = {p.name: p for p in data}
    for setting in _settings(cls, read):
        name, both = setting.name, setting.annotation
        if name in found and both != found[name].annotation:
            both = _either(both, found[name].annotation)
        found[name] = setting.replace(annotation=both)
    returned = call.return_annotation
    if isinstance(returned, TypeVar):  # the settings of the cross entropy decide what it returns
        returned = returned.__bound__
    return inspect.Signature(list(found.values()), return_annotation=returned)


def _settings(cls: Any, read: Callable[[Any], inspect.Signature]) -> Iterator[inspect.Parameter]:
    """Yield the constructor's parameters, and those of bases, surrogates and `LogitOptions` that `**options` take."""
    left = dict.fromkeys(arguments.of_constructor(cls).names)
    for base in (*cls.__mro__, *SURROGATES.values(), LogitOptions):
        if left and "__init__" in vars(base):
            for p in read(vars(base)["__init__"]).parameters.values():
                if p.name in left:
                    del left[p.name]
                    yield p.replace(kind=p.KEYWORD_ONLY)


def _either(setting: Any, data: Any) -> Any:
    if isinstance(setting, str):
        return " | ".join([setting, *(x for x in data.split(" | ") if x != "None")])
    return functools.reduce(lambda a, b: a | b, (x for x in get_args(data) if x is not type(None)), setting)


def _evaluates(cls: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that makes a function evaluate a loss. The function itself is a name and a text."""
    settings, data = set(arguments.of_constructor(cls).names), set(arguments.of_call(cls).names)
    forward = cls.forward.__wrapped__  # without the checks of an entry point, which the function is

    def decorate(described: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(described)
        def function(*args: Any, **kwargs: Any) -> Any:
            # A name of both is a setting, unless its value is a tensor.
            chosen = [x for x in kwargs if x in settings and not (x in data and isinstance(kwargs[x], Tensor))]
            loss = once(cls, **{name: kwargs.pop(name) for name in chosen})
            return forward(loss, *args, **kwargs)

        signature = vars(function)["__signature__"] = signature_of(cls)
        vars(function)["loss"] = cls
        made = entry_point(function)
        # After wrapping: since Python 3.14, a wrapper computes the annotations of what it wraps.
        made.__annotations__ = {name: p.annotation for name, p in signature.parameters.items()}
        made.__annotations__["return"] = signature.return_annotation
        return made

    return decorate


@_evaluates(losses.LigerFusedLinearCrossEntropyLoss)
def cross_entropy_loss(*args: Any, **kwargs: Any) -> Any:
    """Compute `LigerFusedLinearCrossEntropyLoss`: `mean(logsumexp(z) - z[target])` of the logits `z`.

    `input` is (B, T, H) or (N, H), `target` (B, T) or (N,).

    >>> import torch
    >>> weight, hidden, target = torch.randn(11, 4), torch.randn(2, 3, 4), torch.tensor([[1, 2, -100], [3, 4, 5]])
    >>> loss = cross_entropy_loss(weight, hidden, target, label_smoothing=0.1)
    >>> logits = (hidden @ weight.T).view(-1, 11)
    >>> bool(torch.isclose(loss, torch.nn.functional.cross_entropy(logits, target.view(-1), label_smoothing=0.1)))
    True
    """


@_evaluates(losses.LigerFusedLinearDPOLoss)
def dpo_loss(*args: Any, **kwargs: Any) -> Any:
    """Compute `LigerFusedLinearDPOLoss`: `-log sigmoid(beta * (chosen - rejected))` of log-ratios in nats.

    `input` is (2 n, T, H), `target` (2 n, T), chosen sequences first.

    >>> import torch
    >>> weight, hidden = torch.randn(11, 4), torch.randn(2, 3, 4)       # one pair of three tokens
    >>> target = torch.tensor([[1, 2, 3], [4, 5, -100]])
    >>> loss, metrics = dpo_loss(weight, hidden, target, ref_logps=torch.zeros(2), beta=0.2)
    >>> margin = metrics.chosen_rewards - metrics.rejected_rewards
    >>> bool(torch.isclose(loss, -torch.nn.functional.logsigmoid(margin).mean()))
    True
    """


@_evaluates(losses.LigerFusedLinearORPOLoss)
def orpo_loss(*args: Any, **kwargs: Any) -> Any:
    """Compute `LigerFusedLinearORPOLoss`: `nll - beta * log sigmoid(log odds(chosen) - log odds(rejected))`.

    Shapes are as in `dpo_loss`.

    >>> import torch
    >>> weight, hidden = torch.randn(11, 4), torch.randn(2, 3, 4)       # one pair of three tokens
    >>> target = torch.tensor([[1, 2, 3], [4, 5, -100]])
    >>> loss, metrics = orpo_loss(weight, hidden, target, beta=0.1)
    >>> bool(loss > metrics.nll_loss)
    True
    """


@_evaluates(losses.LigerFusedLinearCPOLoss)
def cpo_loss(*args: Any, **kwargs: Any) -> Any:
    """Compute `LigerFusedLinearCPOLoss`: `-log sigmoid(beta * (chosen - rejected)) + cpo_alpha * nll`.

    Shapes are as in `dpo_loss`.

    >>> import torch
    >>> weight, hidden = torch.randn(11, 4), torch.randn(2, 3, 4)       # one pair of three tokens
    >>> target = torch.tensor([[1, 2, 3], [4, 5, -100]])
    >>> loss, metrics = cpo_loss(weight, hidden, target, cpo_alpha=0.0)
    >>> margin = metrics.chosen_rewards - metrics.rejected_rewards
    >>> bool(torch.isclose(loss, -torch.nn.functional.logsigmoid(margin).mean()))
    True
    """


@_evaluates(losses.LigerFusedLinearSimPOLoss)
def simpo_loss(*args: Any, **kwargs: Any) -> Any:
    """Compute `LigerFusedLinearSimPOLoss`: `-log sigmoid(beta * (chosen - rejected) - gamma)` of means over tokens.

    Shapes are as in `dpo_loss`.

    >>> import torch
    >>> weight, hidden = torch.randn(11, 4), torch.randn(2, 3, 4)       # one pair of three tokens
    >>> target = torch.tensor([[1, 2, 3], [4, 5, -100]])
    >>> loss, metrics = simpo_loss(weight, hidden, target, beta=2.0, gamma=0.5)
    >>> margin = metrics.chosen_rewards - metrics.rejected_rewards - 0.5
    >>> bool(torch.isclose(loss, -torch.nn.functional.logsigmoid(margin).mean()))
    True
    """


@_evaluates(losses.LigerFusedLinearKTOLoss)
def kto_loss(*args: Any, **kwargs: Any) -> Any:
    """Compute `LigerFusedLinearKTOLoss`: `1 - sigmoid(beta * (log-ratio - kl))`, with the sign of the label.

    `input` is (n, T, H), `target` (n, T), `preference_labels` (n,) bool.

    >>> import torch
    >>> weight, hidden = torch.randn(11, 4), torch.randn(2, 3, 4)       # a desirable and an undesirable sequence
    >>> target, labels = torch.tensor([[1, 2, 3], [4, 5, -100]]), torch.tensor([True, False])
    >>> loss, metrics = kto_loss(weight, hidden, target, labels, ref_logps=torch.zeros(2), kl=0.5)
    >>> metrics.reference_point.item()
    0.5
    """


@_evaluates(losses.LigerFusedLinearBCOLoss)
def bco_loss(*args: Any, **kwargs: Any) -> Any:
    """Compute `LigerFusedLinearBCOLoss`: `-log sigmoid(reward - delta)`, with the sign of the label.

    Shapes are as in `kto_loss`.

    >>> import torch
    >>> weight, hidden = torch.randn(11, 4), torch.randn(2, 3, 4)       # a desirable and an undesirable sequence
    >>> target, labels = torch.tensor([[1, 2, 3], [4, 5, -100]]), torch.tensor([True, False])
    >>> loss, metrics = bco_loss(weight, hidden, target, labels, ref_logps=torch.zeros(2), delta=0.0)
    >>> metrics.chosen_count.item(), metrics.rejected_count.item()
    (1, 1)
    """


@_evaluates(losses.LigerFusedLinearGRPOLoss)
def grpo_loss(*args: Any, **kwargs: Any) -> Any:
    """Compute `LigerFusedLinearGRPOLoss`, or a variant by `surrogate` and `reduction`.

    `input` is (B, T, H), `target` (B, T), `advantages` (B,), (B, 1) or (B, T).

    >>> import torch
    >>> weight, hidden = torch.randn(11, 4), torch.randn(2, 3, 4)       # two completions of up to three tokens
    >>> target, advantages = torch.tensor([[1, 2, 3], [4, 5, -100]]), torch.tensor([1.0, -1.0])
    >>> loss, metrics = grpo_loss(weight, hidden, target, advantages, reduction="dapo", epsilon_high=0.28)
    >>> metrics.clip_ratio.item()        # on-policy
    0.0
    """


@_evaluates(losses.LigerFusedLinearKLDivLoss)
def kl_div_loss(*args: Any, **kwargs: Any) -> Any:
    """Compute `LigerFusedLinearKLDivLoss`: `KL(teacher || student)`, or with `reverse` `KL(student || teacher)`.

    `input` and `teacher_input` are (B, T, H) or (N, H); H may differ.

    >>> import torch
    >>> weight, hidden, target = torch.randn(11, 4), torch.randn(2, 3, 4), torch.tensor([[1, 2, 3], [4, 5, -100]])
    >>> teacher_weight, teacher_hidden = torch.randn(11, 6), torch.randn(2, 3, 6)
    >>> loss, metrics = kl_div_loss(weight, hidden, teacher_weight, teacher_hidden, target, reverse=True)
    >>> bool(torch.isclose(loss, 0.5 * metrics.soft_loss + 0.5 * metrics.hard_loss))
    True
    """


@_evaluates(losses.LigerFusedLinearJSDLoss)
def jsd_loss(*args: Any, **kwargs: Any) -> Any:
    """Compute `LigerFusedLinearJSDLoss`: the generalized Jensen-Shannon divergence.

    Shapes are as in `kl_div_loss`.

    >>> import torch
    >>> weight, hidden, target = torch.randn(11, 4), torch.randn(2, 3, 4), torch.tensor([[1, 2, 3], [4, 5, -100]])
    >>> teacher_weight, teacher_hidden = torch.randn(11, 6), torch.randn(2, 3, 6)
    >>> loss, metrics = jsd_loss(weight, hidden, teacher_weight, teacher_hidden, target, beta=0.1, temperature=2.0)
    >>> bool(torch.isclose(loss, 0.5 * metrics.soft_loss + 0.5 * metrics.hard_loss))
    True
    """


@_evaluates(losses.LigerFusedLinearTVDLoss)
def tvd_loss(*args: Any, **kwargs: Any) -> Any:
    """Compute `LigerFusedLinearTVDLoss`: the total variation distance `sum(|p - q|) / 2`.

    Shapes are as in `kl_div_loss`.

    >>> import torch
    >>> weight, hidden, target = torch.randn(11, 4), torch.randn(2, 3, 4), torch.tensor([[1, 2, 3], [4, 5, -100]])
    >>> teacher_weight, teacher_hidden = torch.randn(11, 6), torch.randn(2, 3, 6)
    >>> loss, metrics = tvd_loss(weight, hidden, teacher_weight, teacher_hidden)
    >>> bool(0 <= metrics.soft_loss <= 1)
    True
    """


@_evaluates(losses.LigerFusedLinearCosineSimilarityLoss)
def cosine_similarity_loss(*args: Any, **kwargs: Any) -> Any:
    """Compute `LigerFusedLinearCosineSimilarityLoss`: `1 - cos` of the student's and the teacher's logits.

    Shapes are as in `kl_div_loss`.

    >>> import torch
    >>> weight, hidden, target = torch.randn(11, 4), torch.randn(2, 3, 4), torch.tensor([[1, 2, 3], [4, 5, -100]])
    >>> teacher_weight, teacher_hidden = torch.randn(11, 6), torch.randn(2, 3, 6)
    >>> loss, metrics = cosine_similarity_loss(weight, hidden, teacher_weight, teacher_hidden)
    >>> bool(0 <= metrics.soft_loss <= 2)
    True
    """


@_evaluates(losses.LigerFusedLinearOnPolicyDistillationLoss)
def on_policy_distillation_loss(*args: Any, **kwargs: Any) -> Any:
    """Compute `LigerFusedLinearOnPolicyDistillationLoss`: the reverse KL, estimated from sampled tokens.

    `input` and `teacher_input` are (B, T, H); H may differ.

    >>> import torch
    >>> weight, hidden, target = torch.randn(11, 4), torch.randn(2, 3, 4), torch.tensor([[1, 2, 3], [4, 5, -100]])
    >>> loss, metrics = on_policy_distillation_loss(weight, hidden, target=target, teacher_logps=torch.zeros(2, 3))
    >>> bool(torch.isclose(loss, metrics.kl))
    True
    """


@_evaluates(losses.LigerFusedLinearULDLoss)
def uld_loss(*args: Any, **kwargs: Any) -> Any:
    """Compute `LigerFusedLinearULDLoss`: the Wasserstein-1 distance of sorted probabilities.

    `input` and `teacher_input` are (B, T, H) or (N, H); H and vocabulary may differ.

    >>> import torch
    >>> weight, hidden = torch.randn(11, 4), torch.randn(3, 4)
    >>> teacher_weight, teacher_hidden = torch.randn(17, 6), torch.randn(3, 6)
    >>> loss, metrics = uld_loss(weight, hidden, teacher_weight, teacher_hidden, temperature=2.0)
    >>> bool(0 <= loss <= 2)
    True
    """


@_evaluates(losses.LigerFusedLinearDraftLoss)
def draft_loss(*args: Any, **kwargs: Any) -> Any:
    """Compute `LigerFusedLinearDraftLoss`: the divergence of a draft for speculative decoding from its teacher.

    `input` is (K, B, T, H) or (K, N, H), K steps of the draft; `teacher_input` (B, T, H) or (N, H); H may differ.

    >>> import torch
    >>> weight, hidden = torch.randn(5, 4), torch.randn(2, 3, 4)  # two steps at three positions
    >>> teacher_weight, teacher_hidden = torch.randn(11, 6), torch.randn(3, 6)
    >>> ids = torch.tensor([0, 2, 3, 7, 8])
    >>> loss, metrics = draft_loss(weight, hidden, teacher_weight, teacher_hidden, draft_ids=ids, divergence="tvd")
    >>> bool(torch.isclose(loss, (1 - metrics.acceptance).sum()))
    True
    """
